"""docs/learn.md: the change of each exercise, applied to a copy of the files, does what the page says.

    python -m tests.test_learn 3

writes the change of the third exercise into your own files.
"""

import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.trainers import llama_config
from docs.draw import draw_block, draw_step, tensors_of_a_block
from runtime.memory import RunShape, parts_table
from tests import test_style
from tests.fork_server import Run, start_server
from tests.runs import PLAIN, ROOT, SHORT, SMALL, finished, flags, metrics

PAGE = ROOT / "docs" / "learn.md"
OUTCOMES = {"pass": "PASSED", "fail": "FAILED", "skip": "SKIPPED"}


def exercise(number: int) -> str:
    """The section of the page."""
    return re.split(r"^### \d\. ", PAGE.read_text(), flags=re.M)[number]


def steps_of(section: str) -> list[tuple[list[str], dict[str, str]]]:
    """([diff, ...], {test: its outcome after these diffs}), ... in the order of the page."""
    steps = []
    pattern = r"^```diff\n(.*?)^```|^- Must (\w+): (.*?)(?=^- |\n\n|\Z)"
    for diff, outcome, tests in re.findall(pattern, section, re.M | re.S):
        if diff and (not steps or steps[-1][1]):
            steps.append(([], {}))
        diffs, expected = steps[-1]
        if diff:
            diffs.append(diff)
        for test in re.findall(r"`((?:tests/|test_kernels)[^`]+)`", tests):
            expected[test] = OUTCOMES[outcome]
    return steps


def apply(diff: str, folder: Path) -> None:
    """Change files in a folder. After `--- FILE` come hunks, with @@ between them; new lines alone are a new file.

    Hunks have no line numbers: what one keeps or removes must stand in exactly one place of the file.
    """
    for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
        name, hunks = part.split("\n", 1)
        path = folder / name
        for hunk in re.split(r"^@@\n", hunks, flags=re.M):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            text = f"\n{path.read_text()}" if before else "\n"
            n = text.count(f"\n{before}")
            if n != 1:
                raise ValueError(f"{name} has these lines in {n} places:\n{before}")
            path.write_text(text.replace(f"\n{before}", f"\n{after}")[1:])


@pytest.fixture
def files(tmp_path):
    """A copy of our files."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "wandb", "plots", "*.bin")
    shutil.copytree(ROOT, tmp_path / "files", ignore=ignored)
    return tmp_path / "files"


# Neither our own modules, since the copies have theirs, nor Triton, which reads TRITON_INTERPRET when imported.
server = functools.cache(lambda: start_server(os.environ, ("torch.distributed.fsdp", "transformers")))


def run_in(files: Path, *argv: str | Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a script in a copy of our files."""
    with tempfile.TemporaryFile("w+") as stdout:
        return finished([Run(server(), argv, os.environ | environment, stdout, folder=files)])


def run_tests(tests: list[str], files: Path) -> tuple[dict[str, str], str]:
    """{test with its parameters: outcome}, and pytest's output."""
    words = shlex.split(" ".join(shlex.quote(test) if "[" in test else test for test in tests))
    options = ("-n=0", "-v", "-rs", "--tb=line", "-p", "no:cacheprovider")
    output = run_in(files, Path(pytest.__file__).parent / "__main__.py", *options, *words).stdout
    return dict(re.findall(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED)", output, re.M)), output


def change(number: int, files: Path) -> None:
    """Write an exercise's whole change into files."""
    for diffs, _ in steps_of(exercise(number)):
        for diff in diffs:
            apply(diff, files)


SLOW = (3, 4)  # a minute on a busy core


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in range(1, 9)])
def test_the_named_tests_pass_fail_and_are_skipped_as_the_page_says(number, files, monkeypatch):
    for diffs, expected in steps_of(exercise(number)):
        for diff in diffs:
            apply(diff, files)
        found, output = run_tests(list(expected), files)
        for test, outcome in expected.items():
            assert {found[name] for name in found if name.startswith(test.split(" ")[0])} == {outcome}, output
        assert "SKIPPED" not in expected.values() or "this model is changed" in output
    monkeypatch.setattr(test_style, "ROOT", files)
    for name in re.findall(r"^--- (.*)", exercise(number), re.M):
        assert list(test_style.offences(files / name)) == []


# ----------------------------------------------------------------------------------------------------------------------
# What you should then see


@pytest.fixture
def train_changed(files, text_data, tmp_path):
    """train_changed(number, **settings) runs train.py with an exercise's change: its output, its steps' metrics."""

    def run(number, **settings):
        change(number, files)
        settings = SMALL | SHORT | {"dataset": text_data, "out_dir": tmp_path / "out"} | settings
        done = run_in(files, files / "train.py", *flags(settings), **PLAIN)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, [line for line in metrics(tmp_path / "out") if "loss" in line]

    return run


def test_1_clipped_is_the_share_of_steps_whose_norm_exceeds_grad_clip(train_changed):
    output, steps = train_changed(1)
    median = sorted(line["grad_norm"] for line in steps)[4]
    assert " | clipped " in output and median > 0
    assert [line["clipped"] for line in steps] == [float(line["grad_norm"] > 1.0) for line in steps]


def test_2_a_checkpoint_with_gelu_has_another_model_type(train_changed, tmp_path):
    train_changed(2)
    config = json.loads((tmp_path / "out/step_000008/config.json").read_text())
    assert config["model_type"] == "nanocria" and config["hidden_act"] == "gelu_pytorch_tanh"


def test_5_z_loss_is_the_square_of_the_logarithm_of_the_vocabulary_at_first(train_changed):
    _, steps = train_changed(5, z_loss=0.1)
    assert abs(steps[0]["loss"] - math.log(257) - 0.1 * math.log(257) ** 2) < 0.05


def test_7_weights_in_8_bits_learn(train_changed):
    _, steps = train_changed(7, int8=True)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1


# ----------------------------------------------------------------------------------------------------------------------
# The pictures and the map


def test_the_pictures_can_be_drawn_and_the_page_has_their_numbers():
    config = llama_config("config/llama32_1b.py")
    tensors = {t.name: t for t in tensors_of_a_block(config)}
    kept = sum(t.mib for t in tensors_of_a_block(config) if t.is_kept)
    assert f"{tensors['gate, up'].mib:.0f} of {kept:.0f} MiB" in PAGE.read_text()
    of_parts = re.findall(r"([\d.]+) GiB", parts_table(config, RunShape(batch_size=8)))
    assert all(f"| {gib} |" in PAGE.read_text() for gib in of_parts[:-1]) and f"{float(of_parts[-1]):.1f}" == "28.5"
    for figure in (draw_block(config), draw_step(config)):
        (axes,) = figure.axes
        assert len(axes.texts) > 5


def test_what_the_map_names_is_there():
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", PAGE.read_text(), re.M)
    for row in rows:
        for file in re.findall(r"`(\S+\.py)`", row):
            assert (ROOT / file).exists(), file
        for name, file in re.findall(r"`(\w+)` in `(\S+\.py)`", row):
            assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{name} in {file}"
    assert len(rows) > 10


if __name__ == "__main__":
    change(int(sys.argv[1]), ROOT)
