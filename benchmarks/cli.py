"""The command line of every benchmark: `--key=value` changes a setting at the top of its file (configurator.py).

Arguments after `--` go to train.py:

    python bench.py sweep --offload=all --arms=all,torch -- --compile=true
"""

import os
import re
import shlex
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from benchmarks.record import ROOT
from configurator import SettingError, help_text, preview, read_command_line, read_script
from model import LlamaConfig

TRAIN = ROOT / "train.py"


def read_settings(namespace: dict, argv: list[str], lists=None, out="", for_train_py=False) -> SimpleNamespace:
    """The settings in a benchmark's `globals()`, changed by argv, and two more: `flags`, the words after --;
    `command`, argv without --out=.

    lists: setting -> the names allowed in its one,two,..., or a parser such as shapes; such a setting becomes a list.
    out: the record unless --out names another. SettingError with a message for a user error. --help prints the file's
    docstring and settings, and exits.
    """
    words, flags = at_dashes(argv)
    declared, values = read_script(namespace)
    if not {"--help", "-h"} & set(words):
        refuse_unknown(words, declared, for_train_py)
    if flags and not for_train_py:
        raise SettingError(f"-- {shlex.join(flags)}: this command passes nothing on to train.py, leave them out")
    if read_command_line(words, declared, values, namespace["__file__"]):
        settings = help_text(namespace, declared, values).partition("[--key=value]")[2]
        print(f"{namespace['__doc__'].strip()}\n{settings}")
        sys.exit(0)
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise SettingError(f"--{name}={value}: it must be above 0")
        if isinstance(value, str):
            values[name] = os.path.expanduser(value)  # a shell does not expand the ~ of --out=~/plot.png
    refuse_flags(flags, has_peers=values.get("peers", "none") != "none")
    for name, known in (lists or {}).items():
        read = known if callable(known) else partial(one_of, known=known)
        values[name] = read(name, values[name]) if values[name] or namespace[name] else []
    if "out" in values:
        values["out"] = Path(values["out"] or ROOT / out)
    pairs = pairwise(["", *argv])  # --out=FILE, or --out FILE
    command = [word for before, word in pairs if not word.startswith("--out=") and "--out" not in (before, word)]
    return SimpleNamespace(**values, flags=flags, command=command)


def at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first --, and those after it."""
    i = words.index("--") if "--" in words else len(words)
    return words[:i], words[i + 1 :]


def refuse_unknown(words: list[str], declared: dict, for_train_py: bool) -> None:
    """Checks that configurator.py cannot make: a benchmark has no config files, and train.py may have the setting."""
    for before, word in pairwise(["", *words]):
        name = word.lstrip("-").partition("=")[0]
        if not word.startswith("-") and "=" not in word and not re.fullmatch(r"--\w+", before):
            hint = f": say --config={word}" if word.endswith(".py") and "config" in declared else ""
            raise SettingError(f"Unknown word {word}{hint or ': settings are --key=value, --help lists them'}")
        if for_train_py and word.startswith("-") and name not in declared and name in preview(TRAIN, []):
            raise SettingError(f"--{name} is a setting of train.py: put it after --, as in -- --{name}=...")


def parts_of(name: str, text: str, pattern: str, expected: str) -> list[str]:
    """The parts of one,two,...; SettingError for a part that does not match the pattern."""
    parts = [part for part in text.split(",") if part]
    for part in parts or [""]:
        if not re.fullmatch(pattern, part):
            raise SettingError(f"--{name}={part}: {expected}")
    return parts


def one_of(name: str, text: str, known) -> list[str]:
    return parts_of(name, text, "|".join(map(re.escape, known)), f"there are {', '.join(known)}")


def whole_numbers(name: str, text: str) -> list[int]:
    return [int(part) for part in parts_of(name, text, r"[1-9]\d*", "whole numbers, at least 1")]


def shapes(name: str, text: str) -> list[tuple[int, ...]]:
    """Sequences x tokens: '8x2048,2x8192' is [(8, 2048), (2, 8192)]."""
    parts = parts_of(name, text, r"[1-9]\d*x[1-9]\d*", "sequences x tokens, as in 8x2048")
    return [tuple(map(int, part.split("x"))) for part in parts]


def refuse_flags(flags: list[str], has_peers: bool) -> None:
    """SettingError for settings of train.py that differ for each run, that this command sets itself, or that the peers,
    which take their model from the config, would not follow."""
    for name in (flag.removeprefix("--").partition("=")[0] for flag in flags):
        if name in ("max_iters", "out_dir"):
            raise SettingError(f"-- --{name}: each measured run sets its own, leave it out")
        if name in ("batch_size", "block_size", "activation_checkpointing", "offload"):
            raise SettingError(f"-- --{name}: say --{name.removeprefix('activation_')}=... before the --")
        if name in LlamaConfig.__dataclass_fields__ and has_peers:
            hint = "write it in a config, or say --peers=none"
            raise SettingError(f"-- --{name}: the peers would train another model; {hint}")
