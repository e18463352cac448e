"""The command line of every benchmark: `--key=value` changes a setting at the top of its file (configurator.py).

What stands behind `--` goes to train.py:

    python bench.py sweep --offload=all --arms=all,torch -- --compile=true
"""

import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from benchmarks.record import ROOT
from configurator import SettingError, did_you_mean, help_text, preview, read_command_line, read_script

TRAIN = ROOT / "train.py"


def read_settings(namespace: dict, argv: list[str], for_train_py: bool = False) -> SimpleNamespace:
    """The settings of a benchmark's `globals()`, changed by argv, and three more: `given`, the names that argv sets;
    `flags`, the words behind --; `command`, argv without --out=.

    SettingError with a sentence for a user error. --help prints the file's docstring and settings, and exits.
    """
    words = argv[: argv.index("--")] if "--" in argv else argv
    flags = argv[len(words) + 1 :]
    declared, values = read_script(namespace)
    given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    if "help" not in given and "-h" not in words:
        refuse_unknown(words, declared, for_train_py)
    if flags and not for_train_py:
        raise SettingError(f"-- {shlex.join(flags)}: no settings of train.py are passed on here, leave them out")
    if read_command_line(words, declared, values, namespace["__file__"]):
        settings = help_text(namespace, declared, values).partition("[--key=value]")[2]
        print(f"{namespace['__doc__'].strip()}\n{settings}")
        sys.exit(0)
    command = [word for word in argv if not word.startswith("--out=")]
    return SimpleNamespace(**values, given=given, flags=flags, command=command)


def refuse_unknown(words: list[str], declared: dict, for_train_py: bool) -> None:
    """What configurator.py cannot know of a benchmark: it has no config files, and train.py may have the setting."""
    choices = {option: f"--{name}={option}" for name, setting in declared.items() for option in setting.options
               if isinstance(option, str)}  # fmt: skip
    for before, word in pairwise(["", *words]):
        name = word.lstrip("-").partition("=")[0]
        is_value = re.fullmatch(r"--\w+", before)
        if name in declared or is_value:
            continue
        if not word.startswith("-") and "=" not in word:
            hint = f". Did you mean --config={word}?" if word.endswith(".py") else did_you_mean(word, choices)
            raise SettingError(f"Unknown word {word}{hint or ': settings are --key=value, --help lists them'}")
        if for_train_py and name in preview(TRAIN, []):
            raise SettingError(f"--{name} is a setting of train.py: put it behind --, as in -- --{name}=...")


def one_of(name: str, text: str, known) -> list[str]:
    """The parts of one,two,... ; SettingError for one that is not known."""
    parts = [part for part in text.split(",") if part]
    for part in parts:
        if part not in known:
            hint = did_you_mean(part, {option: option for option in known})
            raise SettingError(f"--{name}={part}: there are {', '.join(known)}{hint}")
    if not parts:
        raise SettingError(f"--{name}= is empty: there are {', '.join(known)}")
    return parts


def whole_numbers(name: str, text: str) -> list[int]:
    for part in filter(None, text.split(",")):
        if not re.fullmatch(r"[1-9]\d*", part):
            raise SettingError(f"--{name}={part}: whole numbers, at least 1")
    return [int(part) for part in text.split(",") if part]


def shapes(name: str, text: str) -> list[tuple[int, int]]:
    """Sequences x tokens: '8x2048,2x8192' is [(8, 2048), (2, 8192)]."""
    for part in filter(None, text.split(",")):
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", part):
            raise SettingError(f"--{name}={part}: sequences x tokens, as in 8x2048")
    return [tuple(map(int, part.split("x"))) for part in text.split(",") if part]


def at_least_one(s: SimpleNamespace, *names: str) -> None:
    for name in names:
        if getattr(s, name) is not None and getattr(s, name) < 1:
            raise SettingError(f"--{name}={getattr(s, name)}: it must be at least 1")


def n_gpus(name: str, value: int | str, there: int) -> int:
    """So many of the GPUs that torch sees, or all; one where it sees none."""
    n = max(there, 1) if value == "all" else value
    if not 1 <= n <= max(there, 1):
        raise SettingError(f"--{name}={value}: torch sees {there} GPU{'s' * (there != 1)}")
    return n


def refuse_unread(s: SimpleNamespace, what: str, read: tuple[str, ...]) -> None:
    """SettingError for a setting that was given and that this measurement does not read."""
    for name in s.given:
        if name not in read:
            raise SettingError(f"--{name} is not read by {what}: leave it out")


def refuse_flags(s: SimpleNamespace, own: tuple[str, ...]) -> None:
    """SettingError for settings of train.py that each measured run has its own of, or that are settings here."""
    for flag in s.flags:
        name = flag.removeprefix("--").partition("=")[0]
        if name in ("max_iters", "out_dir"):
            raise SettingError(f"-- --{name}: each measured run has its own, leave it out")
        if name in own:
            raise SettingError(f"-- --{name}: say --{name.removeprefix('activation_')}=... before the --")


def config_path(path: str) -> str:
    """A config that only the user's folder has is made absolute: what reads it runs in the repository."""
    elsewhere = Path(path).is_file() and not (ROOT / path).is_file()
    return str(Path(path).absolute()) if elsewhere else path
