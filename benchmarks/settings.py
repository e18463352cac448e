"""The command line of every benchmark: `--key=value` changes a setting at the top of its file (configurator.py).

Arguments after `--` go to train.py:

    python bench.py sweep --offload=all --trainers=nanocria,nanocria-plain -- --compile=true
"""

import json
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from configurator import SettingError, help_text, read_command_line, read_script
from data.tokenizer import ROOT
from model import LlamaConfig

RECORDS = ROOT / "benchmarks" / "records"
SET_BY_BENCHMARKS = {"max_iters", "out_dir", "batch_size", "block_size", "activation_checkpointing", "offload"}
CHECKPOINTING = ["none", "selective", "full"]  # Hugging Face has no selective


def read_settings(namespace: dict, argv: list[str], for_train_py=False, **lists) -> SimpleNamespace:
    """The settings in a benchmark's `globals()`, changed by argv, and two more: `flags`, what follows --; `argv`.

    lists: setting -> the names allowed in its one,two,..., or a function that reads one; such a setting becomes a list.
    --help prints the file's docstring and settings, and exits.
    """
    end = argv.index("--") if for_train_py and "--" in argv else len(argv)
    flags = argv[end + 1 :]
    declared, values = read_script(namespace)
    if read_command_line(argv[:end], declared, values, namespace["__file__"]):
        settings = help_text(namespace, declared, values).partition("[--key=value]")[2]
        print(f"{namespace['__doc__'].strip()}\n{settings}")
        sys.exit(0)
    of_all_trainers = LlamaConfig.__dataclass_fields__ if "trainers" in values else {}
    for name in (flag.removeprefix("--").partition("=")[0] for flag in flags):
        if name in SET_BY_BENCHMARKS or name in of_all_trainers:
            raise SettingError(f"-- --{name}: each measured run sets its own, by --help or in the config file")
    for name, known in lists.items():
        values[name] = [one_of(name, part, known) for part in values[name].split(",") if part]
    return SimpleNamespace(**values, flags=flags, argv=argv)


def one_of(setting: str, text: str, known: Iterable[str] | Callable):
    """The text, if it is known, or what the function reads in it."""
    if callable(known):
        try:
            return known(text)
        except ValueError:
            raise SettingError(f"--{setting}={text}: write numbers, a shape as in 8x2048") from None
    if text not in known:
        raise SettingError(f"--{setting}={text}: there are {', '.join(known)}")
    return text


def load_record(name: str) -> dict:
    """A record of benchmarks/records/."""
    return json.loads((RECORDS / f"{name}.json").read_text())


def shape(text: str) -> tuple[int, int]:
    """Sequences x tokens: '8x2048' is (8, 2048)."""
    batch, block = text.split("x")
    return int(batch), int(block)
