"""What a user sees while something takes long, and of a name that is no folder of weights yet."""

import itertools
from types import SimpleNamespace

import pytest

from runtime import distributed
from runtime.distributed import progress
from tests.runs import run

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds): from now on each look at the clock takes so long."""

    def set_clock(seconds):
        ticks = itertools.count(0, seconds)
        monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: next(ticks)))

    return set_clock


@pytest.mark.parametrize("seconds, shown", [(4, "reading: 2 of 6\nreading: 5 of 6\n"), (1, "")])
def test_rank_0_says_every_ten_seconds_how_much_is_done(clock, monkeypatch, capsys, seconds, shown):
    clock(seconds)
    for rank, expected in ((0, shown), (1, "")):
        monkeypatch.setattr(distributed, "rank", rank)
        assert list(progress("abcdef", "reading")) == list("abcdef")
        assert capsys.readouterr().err == expected


def test_reading_weights_evaluating_and_scoring_show_how_far_they_are(train, sample, clock, tmp_path, capsys):
    train(max_iters=2, eval_interval=2)
    (checkpoint,) = (tmp_path / "out").glob("step_*")
    (tmp_path / "a.txt").write_text("a line of text\n" * 200)
    assert capsys.readouterr().err == ""
    clock(11)
    train(init_from=checkpoint, out_dir=tmp_path / "new", max_iters=2, eval_interval=2)
    shown = capsys.readouterr().err
    assert f"reading {checkpoint}: 1 of " in shown and "evaluating, batches: 1 of 2" in shown
    scores, shown = sample(evaluate=tmp_path / "a.txt")
    assert "perplexity" in scores and "scoring" not in scores and "scoring, batches: 1 of " in shown
    assert f"reading {checkpoint}: 1 of " in shown


CASES = [  # a script with a name that holds no weights or tokenizer yet, and what it says
    ("train.py --device=cpu --out_dir={0}/new --init_from=HuggingFaceTB/SmolLM2-135M",
     "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M"),
    ("sample.py --device=cpu --out_dir={0}/only/model.gguf", "GGUF files are not read"),
    ("convert.py {0}/only {0}/new", "GGUF files are not read"),
    ("convert.py {0}/peft {0}/new", "merge_and_unload"),
    ("data/text/prepare.py --input {0}/text --out {0}/new --tokenizer {0}/bare", "hf download"),
    ("data/chat/prepare.py --input {0}/text --out {0}/new --tokenizer HuggingFaceTB/SmolLM2-135M", "hf download Hugg"),
]  # fmt: skip


@pytest.mark.parametrize("command, sentence", CASES)
def test_a_hub_name_a_gguf_file_and_a_folder_without_weights_say_how_to_fetch_them(command, sentence, tmp_path):
    (tmp_path / "text").write_text("text")
    for folder, file in (("only", "model.gguf"), ("bare", "config.json"), ("peft", "adapter_config.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    script, *words = command.format(tmp_path).split()
    done = run(words, script)
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
