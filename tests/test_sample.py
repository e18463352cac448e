"""sample.py on its own."""

import os
import runpy
import subprocess
import sys

import pytest

from tests.runs import ROOT, run

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_sample_continues_a_prompt_and_repeats_itself_for_a_seed(train, tmp_path):
    train()

    def sample(**settings):
        settings = {"out_dir": tmp_path / "out", "prompt": "def ", "max_new_tokens": 40, "device": "cpu", **settings}
        done = run(settings, "sample.py")
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = sample(seed=1)
    assert first.startswith("def ") and len(first) > 60 and first == sample(seed=1) != sample(seed=2)
    command = [sys.executable, "sample.py", f"--out_dir={tmp_path}/out", "--device=cpu"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "the text could not be written: No space left on device\n")
    in_ascii = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--prompt=né"], cwd=ROOT, env=in_ascii, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"n?"), done.stderr


@pytest.mark.parametrize(
    "setting, sentence",
    [
        ("--temperature=-1", "temperature is -1.0: it must be at least 0"),
        ("--top_k=0", "top_k is 0: it must be at least 1, or none"),
        ("--top_p=0", "top_p is 0.0: it must be above 0 and at most 1, or none"),
        ("--top_p=1.1", "top_p is 1.1: it must be above 0 and at most 1, or none"),
        ("--max_new_tokens=0", "max_new_tokens is 0: it must be at least 1"),
    ],
)
def test_sample_refuses_settings_before_it_reads_a_model(tmp_path, monkeypatch, setting, sentence):
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path}/none", setting])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    assert stopped.value.code == sentence


def test_sample_names_a_tokenizer_path_that_nothing_reads(train, tmp_path, monkeypatch):
    train(max_iters=1)
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path}/out", "--tokenizer_path=~/tokenizer.model"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    path = os.path.expanduser("~/tokenizer.model")
    sentence = f"tokenizer_path is {path}, but only the tokenizer llama3 is read from a file, not bytes"
    assert stopped.value.code == sentence


def test_sample_passes_over_tokens_that_mean_nothing(train, tmp_path):
    train(vocab_size=1000, max_iters=1)  # the tokenizer has 257 of them
    settings = {"out_dir": tmp_path / "out", "max_new_tokens": 20, "device": "cpu", "seed": 1}
    done = run(settings, "sample.py")
    assert done.returncode == 0 and len(done.stdout) < 20 + 80 + 10, done.stderr
