"""The command line of every benchmark: `--key=value` changes a setting at the top of its file (configurator.py).

Arguments after `--` go to train.py:

    python bench.py sweep --offload=all --trainers=nanocria,nanocria-plain -- --compile=true
"""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

from configurator import SettingError, help_text, read_command_line, read_script

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
SET_BY_BENCHMARKS = {"max_iters", "out_dir", "batch_size", "block_size", "activation_checkpointing", "offload"}
CHECKPOINTING = ["none", "selective", "full"]  # Hugging Face has no selective
OFFLOAD = ["none", "optimizer", "all"]


def read_settings(namespace: dict, argv: list[str], lists=None, out="", for_train_py=False) -> SimpleNamespace:
    """The settings in a benchmark's `globals()`, changed by argv, and two more: `flags`, what follows --; `command`,
    argv without --out=.

    lists: setting -> the names allowed in its one,two,..., or a reader such as shapes; such a setting becomes a list.
    out: the record, unless --out names another. --help prints the file's docstring and settings, and exits.
    """
    argv, flags = split_at_dashes(argv)
    declared, values = read_script(namespace)
    if read_command_line(argv, declared, values, namespace["__file__"]):
        settings = help_text(namespace, declared, values).partition("[--key=value]")[2]
        print(f"{namespace['__doc__'].strip()}\n{settings}")
        sys.exit(0)
    refuse_flags(flags, for_train_py)
    for name, value in values.items():
        if type(value) in (int, float) and value <= 0:
            raise SettingError(f"--{name}={value}: it must be above 0")
    for name, known in (lists or {}).items():
        if values[name] or namespace[name]:
            values[name] = known(name, values[name]) if callable(known) else names(name, values[name], known)
        else:
            values[name] = []
    if "out" in values:
        values["out"] = Path(values["out"] or ROOT / out).expanduser()
    command = [word for word in argv if not word.startswith("--out=")]
    return SimpleNamespace(**values, flags=flags, command=[*command, "--", *flags] if flags else command)


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first --, and those after it."""
    i = argv.index("--") if "--" in argv else len(argv)
    return argv[:i], argv[i + 1 :]


def refuse_flags(flags: list[str], for_train_py: bool) -> None:
    if flags and not for_train_py:
        raise SettingError(f"-- {shlex.join(flags)}: this command passes nothing on to train.py, leave them out")
    for name in (flag.removeprefix("--").partition("=")[0] for flag in flags):
        if name in SET_BY_BENCHMARKS:
            raise SettingError(f"-- --{name}: each measured run sets its own; --help lists what goes before the --")


def parts_of(name: str, text: str, pattern: str, expected: str) -> list[str]:
    """The parts of one,two,...; SettingError for a part that does not match the pattern."""
    parts = [part for part in text.split(",") if part]
    for part in parts or [""]:
        if not re.fullmatch(pattern, part):
            raise SettingError(f"--{name}={part}: {expected}")
    return parts


def names(name: str, text: str, known) -> list[str]:
    return parts_of(name, text, "|".join(map(re.escape, known)), f"there are {', '.join(known)}")


def whole_numbers(name: str, text: str) -> list[int]:
    return [int(part) for part in parts_of(name, text, r"[1-9]\d*", "whole numbers, at least 1")]


def shapes(name: str, text: str) -> list[tuple[int, ...]]:
    """Sequences x tokens: '8x2048,2x8192' is [(8, 2048), (2, 8192)]."""
    parts = parts_of(name, text, r"[1-9]\d*x[1-9]\d*", "sequences x tokens, as in 8x2048")
    return [tuple(map(int, part.split("x"))) for part in parts]
