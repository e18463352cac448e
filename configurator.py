"""Settings of a script: assignments at its top, which config files and flags override. All values are checked.

    # data
    dataset = 'pystdlib'  # a folder under data/
    min_lr: float | None = None  # the final learning rate; none: learning_rate / 10
    dtype: Literal['float32', 'bfloat16'] = 'bfloat16'  # compute dtype
    settings, named = configure(globals(), sys.argv[1:])

    python train.py config/baby_llama.py --batch_size=32 --learning_rate 1e-3 --compile
    python train.py config/baby_llama.py --help

Every lowercase name assigned above the call is a setting. Its annotation or default gives its type, the comment after
it its help text. Comment lines above a setting start a group and name it. Flags override files; later flags and files
override earlier ones. A config file is Python: it may compute, and build on another (`from llama31_8b import *`), but
every plain value in it must be a setting or have a name that starts with an underscore.
"""

import ast
import difflib
import io
import os
import re
import runpy
import sys
import textwrap
import tokenize
import types
import typing
from dataclasses import dataclass
from pathlib import Path

PLAIN = (bool, int, float, str, dict, list, types.NoneType)  # the types of settings: all serialize to JSON
WORDS = {"true": True, "false": False, "none": None}
PHRASES = {bool: "true or false", int: "an int", float: "a float", str: "a string", dict: "a dict", list: "a list"}
FORMER = {  # settings of older versions
    "fused_kernels": "it is now kernels=none, blocks or all", "fused_loss": "it is now kernels=none, blocks or all",
    "base_dtype": "it is now quantize_base=none or nf4",
    "beta1": "it is now a constant in optimizers/adamw.py", "beta2": "it is now a constant in optimizers/adamw.py",
    "galore_interval": "it is now a constant in optimizers/galore.py", "galore_scale": "it is now always 1",
    "wandb_project": "wandb reads the environment variable WANDB_PROJECT",
    "wandb_run_name": "wandb reads the environment variable WANDB_NAME",
}  # fmt: skip


class SettingError(Exception):
    """A user error; its message is printed without a traceback."""


@dataclass
class Setting:
    options: list  # accepted types and values: int | Literal['auto'] | None is [int, 'auto', None]
    group: str
    comment: str


def configure(namespace: dict, argv: list[str]) -> tuple[dict, set[str]]:
    """Update the settings in a script's `globals()` from its command line.

    Returns all settings by name, in order, and the names of those that a config file or a flag sets.

    A user error prints one line to stderr and exits with status 2, `--help` exits with 0. Only rank 0 prints.
    """
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    named = {}
    try:
        settings, values = read_script(namespace)
        wants_help = read_command_line(argv, settings, named, namespace["__file__"])
    except SettingError as error:
        if is_rank_0:
            print(error, file=sys.stderr)
        sys.exit(2)
    values |= named
    if wants_help:
        if is_rank_0:
            print(help_text(namespace, settings, values))
        sys.exit(0)
    namespace.update(values)
    return values, set(named)


def preview(script: str | Path, argv: list[str]) -> dict:
    """The settings that a script would run with, without running it. Raises SettingError."""
    namespace = {"__file__": str(script), "Literal": typing.Literal}
    for node in ast.parse(Path(script).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("configure("):
            break
        if isinstance(node, ast.Assign | ast.AnnAssign):
            exec(compile(ast.Module([node], []), script, "exec"), namespace)
    settings, values = read_script(namespace)
    read_command_line(argv, settings, values, str(script))
    return values


def read_script(namespace: dict) -> tuple[dict[str, Setting], dict]:
    """The settings that a script declares, and their defaults."""
    source = Path(namespace["__file__"]).read_text(encoding="utf-8")
    lines = ["", *source.splitlines()]  # 1-based, as in ast and tokenize
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.strip("#-= ") for token in tokens if token.type == tokenize.COMMENT}
    settings = {}
    values = {}
    group = "settings"
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                annotation = None
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                pass
            case _:
                continue
        # A name assigned below the call has no value yet, or is already in `settings`.
        is_value = isinstance(namespace.get(name, ...), PLAIN)
        if not is_value or not name.islower() or name.startswith("_") or name in settings:
            continue
        default = namespace[name]
        options = options_of(eval(ast.unparse(annotation), namespace)) if annotation else [type(default)]
        assert options != [types.NoneType], f"{name} = None has no type: write {name}: float | None = None, or another"
        values[name] = check(name, options, default)

        first = node.lineno  # of the comment lines above
        while first - 1 in comments and lines[first - 1].startswith("#"):
            first -= 1
        group = " ".join(comments[row] for row in range(first, node.lineno)).strip() or group
        settings[name] = Setting(options, group, comments.get(node.end_lineno, ""))
    return settings, values


def options_of(annotation) -> list:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in options_of(part)]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if annotation is types.NoneType:
        return [None]
    return [typing.get_origin(annotation) or annotation]  # list[int]: list


def read_command_line(argv: list[str], settings: dict, values: dict, script: str) -> bool:
    """Apply config files and flags to `values`. Return True if --help is among them."""
    flags = {}
    wants_help = False
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, text = argument.partition("=")
        name = flag.lstrip("-")
        if argument in ("-h", "--help"):
            wants_help = True
        elif name in settings and flag != f"--{name}":
            raise SettingError(f"Unknown argument {argument}. Did you mean --{argument.lstrip('-')}?")
        elif name in settings:
            options = settings[name].options
            if not equals and bool in options and (not rest or re.match(r"-|.*\.py$", rest[0])):
                text = "true"  # --compile without a value
            elif not equals:
                if not rest or rest[0].startswith("--"):
                    raise SettingError(f"{flag} needs a value: {flag}=...")
                text = rest.pop(0)
            readings = [text] if options == [str] else [read(text), text]
            flags[name] = check(flag, options, *readings)
        elif argument.startswith("-"):
            raise unknown(name or argument, settings)
        else:
            values.update(read_file(argument, settings, script))
    values.update(flags)
    return wants_help


def read_file(path: str, settings: dict, script: str) -> dict:
    """The settings that a config file assigns, checked. A mistake in its Python has Python's own traceback."""
    if not os.path.isfile(path):
        # Compare file stems: the folder and .py would make all names similar.
        folders = [os.path.dirname(path) or ".", os.path.relpath(Path(script).resolve().parent / "config")]
        files = {file.stem: str(file) for folder in folders for file in Path(folder).glob("*.py")}
        if os.path.isdir(path) and "out_dir" in settings:
            raise SettingError(f"{path} is a folder, not a config file. Did you mean --out_dir={path}?")
        raise SettingError(f"config file {path} does not exist{did_you_mean(Path(path).stem, files)}")
    if not path.endswith(".py"):
        raise SettingError(f"{path} is not a config file: it must be a .py file of assignments, such as batch_size = 4")
    sys.path.append(str(Path(path).resolve().parent))  # it may build on another beside it
    values = {}
    for name, value in runpy.run_path(path).items():
        if name in settings:
            values[name] = check(f"{path}: {name}", settings[name].options, value)
        elif isinstance(value, PLAIN) and not name.startswith("_"):
            raise unknown(name, settings, f"{path}: ")
    return values


def read(text: str):
    """A flag's text as Python: true, false, none, a number, a list or a dict; otherwise the text itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text) if re.match(r"[-+.\d\[{]", text) else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def check(label: str, options: list, *readings):
    """The first reading that fits an option, converted to its type. The last reading is what the user wrote."""
    for value in readings:
        for option in options:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if option is bool and isinstance(value, int) and value in (0, 1):
                return bool(value)
            if option is int and number and abs(value) < 2**100 and value % 1 == 0:  # 1e3, but not 1.5, inf or nan
                return int(value)
            if option is float and number and abs(value) <= sys.float_info.max:  # not inf or nan
                return float(value)
            if option in (str, dict, list) and isinstance(value, option):
                return value
            if not isinstance(option, type) and type(value) is type(option) and value == option:
                return value
    phrases = [PHRASES.get(option) or ("none" if option is None else repr(option)) for option in options]
    expected = " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))
    choices = {option: repr(option) for option in options if isinstance(option, str)}
    raise SettingError(f"{label} expects {expected}, got {readings[-1]!r}{did_you_mean(readings[-1], choices)}")


def unknown(name: str, settings: dict, where: str = "") -> SettingError:
    if name == "config":
        hint = ": name a config file without --config, as in python train.py config/baby_llama.py"
    elif name in FORMER:
        hint = f": {FORMER[name]}"
    else:
        hint = did_you_mean(name, {name: name for name in settings}) or ". --help lists them all"
    return SettingError(f"{where}Unknown setting {name}{hint}")


def did_you_mean(word, candidates: dict[str, str]) -> str:
    """A question with the value of the key closest to word; empty if no key is close."""
    near = difflib.get_close_matches(str(word), candidates, n=1)
    return f". Did you mean {candidates[near[0]]}?" if near else ""


def help_text(namespace: dict, settings: dict, values: dict) -> str:
    """The script's first paragraph, then each setting with its type, its value and its comment."""
    rows = {}
    for name, setting in settings.items():
        choices = [spell(option) for option in setting.options if isinstance(option, str | int)]
        kinds = [option if isinstance(option, type) else type(option) for option in setting.options]
        kind = "|".join(dict.fromkeys(kind.__name__ for kind in kinds)).replace("NoneType", "none")
        comment = ": ".join(filter(None, ["|".join(choices), setting.comment]))
        rows[name] = [f"  --{name}", kind, spell(values[name]), comment]
    # A long value, such as a dict, shifts only its own comment to the right.
    widths = [max((len(row[i]) for row in rows.values() if len(row[i]) < 32), default=0) for i in range(3)]

    purpose = (namespace.get("__doc__") or "").strip().split("\n\n")[0]
    out = [purpose, "", f"usage: python {os.path.relpath(namespace['__file__'])} [CONFIG.py] [--key=value]"]
    for group in dict.fromkeys(setting.group for setting in settings.values()):
        out += ["", group]
        for *cells, comment in (rows[name] for name in settings if settings[name].group == group):
            line = "  ".join([*map(str.ljust, cells, widths), comment]).rstrip()
            out += textwrap.wrap(line, 120, subsequent_indent=" " * (sum(widths) + 6), break_on_hyphens=False)
    return "\n".join(out).strip()


def spell(value) -> str:
    """A value as typed after a flag's =."""
    if isinstance(value, str):
        return value if re.fullmatch(r"\S+", value) else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)
