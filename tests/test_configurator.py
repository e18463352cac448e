"""Settings from defaults, files and flags, of a small script in a temporary folder."""

import re
import runpy
import sys

import pytest

SCRIPT = '''"""Train a toy
in two lines.

This paragraph is not for --help.
"""

import sys
from typing import Literal

from configurator import configure

VERSION = 3
_hidden = 1

# -----------------------------------------------------------------------------
# data,
# and how much of it
dataset = 'pystdlib'  # a folder under data/
batch_size = 12  # sequences a micro-batch holds
tokens_per_step = 4 * 1024
# optimizer
learning_rate = 3e-4  # the peak, after the warm-up
min_lr: float | None = None  # where the cosine ends; none: learning_rate / 10
grad_clip: float = 1  # none if 0
warmup_iters = 100

# system
compile = True  # each block
wandb_log = False
init_from: Literal['scratch', 'resume'] = 'scratch'  # where the weights come from
world: Literal[0, 1, 2] | None = None
rope_scaling: dict | None = None
betas = [0.9, 0.95]
prompt: str | None = ''
device = 'cuda' if VERSION > 3 else 'cpu'
top_k = -1
settings, named = configure(globals(), sys.argv[1:])

batch_size = batch_size  # below the call: neither a new setting nor a new comment
below = 1
'''
DEFAULTS = dict(
    dataset="pystdlib", batch_size=12, tokens_per_step=4096, learning_rate=3e-4, min_lr=None, grad_clip=1.0,
    warmup_iters=100, compile=True, wandb_log=False, init_from="scratch", world=None, rope_scaling=None,
    betas=[0.9, 0.95], prompt="", device="cpu", top_k=-1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/baby_llama.py").write_text("batch_size = 4 * 8  # fits a laptop\ncompile = False\n")
    (tmp_path / "config/llama32_1b.py").write_text("batch_size = 8\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.fixture
def run(monkeypatch):
    """Run the script in this process; return its final globals."""

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        return runpy.run_path("train.py")

    return run


@pytest.fixture
def printed(run, capsys):
    """What a command line prints before it exits with this code."""

    def printed(code, *argv):
        with pytest.raises(SystemExit) as exit:
            run(*argv)
        out, err = capsys.readouterr()
        assert exit.value.code == code and not (err if code == 0 else out)
        return (out or err)[:-1]

    return printed


BATCH_3 = {"batch_size": 3}
WANDB = {"wandb_log": True}
ACCEPTED = [
    (["--batch_size", "32", "--dataset", "x"], {"batch_size": 32, "dataset": "x"}),
    (["--batch_size=3", "config/llama32_1b.py"], BATCH_3),  # a flag before a file overrides it, too
    (["--dataset=a=b"], {"dataset": "a=b"}),
    (["--wandb_log", "--batch_size=3"], WANDB | BATCH_3),
    (["--wandb_log", "config/llama32_1b.py"], WANDB | {"batch_size": 8}),
    (["--top_k", "-5", "--dataset", "-"], {"top_k": -5, "dataset": "-"}),
    (["--rope_scaling={'factor': 32.0}"], {"rope_scaling": {"factor": 32.0}}),
    (["--init_from=resume", "--world=2"], {"init_from": "resume", "world": 2}),
    (["--batch_size=4", "--batch_size", "3"], BATCH_3),
    (["-batch_size=3"], BATCH_3),
    (["config/llama32_1b.py", "config/baby_llama.py"], {"batch_size": 32, "compile": False}),
]


@pytest.mark.parametrize("argv, expected", ACCEPTED, ids=str)
def test_a_command_line_changes_settings_and_names_those_it_sets(run, argv, expected):
    ended = run(*argv, "--betas=[0.9, 0.95]")
    settings = ended["settings"]
    assert {name: ended[name] for name in settings} == settings == DEFAULTS | expected
    assert list(settings) == list(DEFAULTS) and ended["named"] == {*expected, "betas"}


OF_ANOTHER_TYPE = {
    ("batch_size", "an int"): ["abc", "1.5", "", "true", "none", "1e400", "[1]", "4*8", '"4"'],
    ("learning_rate", "a float"): ["nan", "inf", "1e400", "abc", "none", "true", "1" + "0" * 400, "3j"],
    ("compile", "true or false"): ["yes", "2", "", "none", "1.0"],
    ("rope_scaling", "a dict or none"): ["{'a': }", "[1]"],
}
REFUSED = [
    (["--batch_size"], "--batch_size needs a value: --batch_size=..."),
    (["--batch-size=3"], "Unknown setting batch-size. Did you mean batch_size?"),
    (["--below=4"], "Unknown setting below. --help lists them all"),  # assigned below the call
    (["--_hidden=4"], "Unknown setting _hidden. --help lists them all"),
    (["batch_size=3"], "there is no config file batch_size=3 (a .py file). A setting is --name=value"),
    (["config"], "there is no config file config (a .py file). A setting is --name=value, such as --out_dir=config"),
    (["--init_from=resum"], "--init_from expects 'scratch' or 'resume', got 'resum'"),
    (["--world=true"], "--world expects 0, 1, 2 or none, got 'true'"),
    *(([f"--{name}={text}"], f"--{name} expects {kind}, got {text!r:.300}")
      for (name, kind), texts in OF_ANOTHER_TYPE.items() for text in texts),
    (["llama_1b.py"], "there is no config file llama_1b.py (a .py file). Did you mean config/llama32_1b.py?"),
]  # fmt: skip


def test_a_wrong_flag_a_wrong_value_and_a_missing_file_get_one_line(printed):
    for argv, message in REFUSED:
        assert printed(2, *argv) == message


SPELLINGS = {
    "batch_size": [("1e3", 1000), ("10_000", 10000), ("-4", -4), ("64.0", 64), ("+7", 7)],
    "learning_rate": [("6e-4", 6e-4), (".5", 0.5), ("1", 1.0)],
    "compile": [("TRUE", True), ("1", True), ("0", False)],
    "prompt": [("none", None)],
    "min_lr": [("None", None), ("1", 1.0)],
    "dataset": [(text, text) for text in ("123", "", "none", "1e3", "'a'", "[1, 2", "--x", "a b", '3is "\\d"', "ü\n")],
}


def test_a_string_is_taken_literally_and_another_value_as_in_python(run, recwarn):
    for name, spellings in SPELLINGS.items():
        for text, value in spellings:
            found = run(f"--{name}={text}")[name]
            assert (type(found), found) == (type(value), value), (name, text)
    assert not recwarn.list


def test_a_file_may_compute_build_on_another_keep_private_names_and_is_converted(folder, run):
    (folder / "config/base_of_mine.py").write_text("batch_size = 32\ncompile = False\n")
    (folder / "config/x.py").write_text(
        "import math\nfrom base_of_mine import *\n_n = 4\n"
        "def double(x):\n    y = 2 * x\n    return y\n"
        "warmup_iters = double(_n)\nlearning_rate: float = math.pi\n"
        "top_k = 1e3\ngrad_clip = 2\nwandb_log = 1\nmin_lr = None\n"
    )
    expected = dict(batch_size=32, compile=False, warmup_iters=8, learning_rate=3.141592653589793)
    settings = run("config/x.py")["settings"]
    assert settings == DEFAULTS | expected | dict(top_k=1000, grad_clip=2.0, wandb_log=True)
    assert type(settings["top_k"]) is int and type(settings["grad_clip"]) is float


@pytest.mark.parametrize("line, message", [
    ("batch_szie = 4", "Unknown setting batch_szie. Did you mean batch_size?"),
    ("from mistyped import *", "Unknown setting batch_szie. Did you mean batch_size?"),
    ("batch_size = '4'", "batch_size expects an int, got '4'"),
    ("learning_rate = float('nan')", "learning_rate expects a float, got nan"),
    ("compile = 'false'", "compile expects true or false, got 'false'"),
])  # fmt: skip
def test_a_wrong_name_or_value_in_a_file_names_the_file(folder, printed, line, message):
    (folder / "config/mistyped.py").write_text("batch_szie = 4\n")
    (folder / "config/x.py").write_text(line)
    assert printed(2, "config/x.py", "--batch_size=4") == f"config/x.py: {message}"


def test_help_shows_the_settings_in_their_groups_with_value_choices_and_comment(printed):
    text = printed(0, "--help", "config/baby_llama.py", "--dataset=x")
    assert text.startswith("Train a toy\nin two lines.\n\nusage: python train.py [CONFIG.py] [--key=value]\n")
    assert re.findall(r"^\w.*$", text, re.M)[3:] == ["data, and how much of it", "optimizer", "system"]
    assert re.findall(r"^  --(\w+)", text, re.M) == list(DEFAULTS)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["--batch_size", "32", "sequences a micro-batch holds"] in rows
    assert ["--dataset", "x", "a folder under data/"] in rows
    assert ["--init_from", "scratch", "scratch|resume: where the weights come from"] in rows
    assert ["--world", "none", "0|1|2"] in rows and ["--wandb_log", "false"] in rows


def test_only_rank_0_prints_and_every_rank_exits(printed, monkeypatch):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert bool(printed(2, "--batch_size=x")) == bool(printed(0, "--help")) == (rank == "0")
