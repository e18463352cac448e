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
import os
import re
import runpy
import sys
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path

PLAIN = (bool, int, float, str, dict, list, types.NoneType)  # the types of settings: all serialize to JSON
WORDS = {"true": True, "false": False, "none": None}
PHRASES = {bool: "true or false", int: "an int", float: "a float", str: "a string", dict: "a dict", list: "a list"}


class SettingError(ValueError):
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
    lines = ["", *source.splitlines()]  # 1-based, as in ast
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
        values[name] = check(name, options, default)

        first = node.lineno  # of the comment lines above
        while lines[first - 1].startswith("#"):
            first -= 1
        group = " ".join(line.strip("#- ") for line in lines[first : node.lineno]).strip() or group
        comment = lines[node.end_lineno].partition("  # ")[2]
        settings[name] = Setting(options, group, comment)
    return settings, values


def options_of(annotation) -> list:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in options_of(part)]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if annotation is types.NoneType:
        return [None]
    return [annotation]


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
        elif name in settings and argument.startswith("-"):
            options = settings[name].options
            if not equals and bool in options:
                text = "true"  # --compile
            elif not equals:
                if not rest or rest[0].startswith("--"):
                    raise SettingError(f"{flag} needs a value: {flag}=...")
                text = rest.pop(0)
            readings = [text] if options == [str] else [parse(text), text]
            flags[name] = check(flag, options, *readings)
        elif argument.startswith("-"):
            raise unknown(name or argument, settings)
        else:
            override(values, read_file(argument, settings, script), f"{argument}: ")
    override(values, flags)
    return wants_help


def override(values: dict, new: dict, where: str = "") -> None:
    """Apply what one file names, or all flags. Of max_iters and epochs the one that is named later counts."""
    if new.get("max_iters") is not None:
        if new.get("epochs") is not None:
            hint = "name one of them (and `del` one that an imported config names)"
            raise SettingError(f"{where}max_iters and epochs exclude each other: {hint}")
        new = new | {"epochs": None}
    values.update(new)


def read_file(path: str, settings: dict, script: str) -> dict:
    """The settings that a config file assigns, checked. A mistake in its Python has Python's own traceback."""
    if not os.path.isfile(path) or not path.endswith(".py"):
        # Compare file stems: the folder and .py would make all names similar.
        files = {file.stem: os.path.relpath(file) for file in Path(script).resolve().parent.glob("config/*.py")}
        hint = ". A setting is --name=value"
        if os.path.isdir(path):
            hint += f", such as --out_dir={path}"
        else:
            hint = did_you_mean(Path(path).stem, files) or hint
        raise SettingError(f"there is no config file {path} (a .py file){hint}")
    sys.path.append(str(Path(path).resolve().parent))  # it may build on another beside it
    values = {}
    for name, value in runpy.run_path(path).items():
        if name in settings:
            values[name] = check(f"{path}: {name}", settings[name].options, value)
        elif isinstance(value, PLAIN) and not name.startswith("_"):
            raise unknown(name, settings, f"{path}: ")
    return values


def parse(text: str):
    """A flag's text as Python: true, false, none, a number, a list or a dict; otherwise the text itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text) if re.match(r"[-+.\d\[{]", text) else text
    except (ValueError, SyntaxError):
        return text


def check(label: str, options: list, *readings):
    """The first reading that fits an option, converted to its type. The last reading is what the user wrote."""
    for value in readings:
        for option in options:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if option is bool and isinstance(value, int) and value in (0, 1):
                return bool(value)
            if option is int and number and value % 1 == 0:  # 1e3, but not 1.5, inf or nan
                return int(value)
            if option is float and number and abs(value) <= sys.float_info.max:  # not inf or nan
                return float(value)
            if option in (str, dict, list) and isinstance(value, option):
                return value
            if not isinstance(option, type) and type(value) is type(option) and value == option:
                return value
    phrases = [PHRASES.get(option) or ("none" if option is None else repr(option)) for option in options]
    expected = " or ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))
    raise SettingError(f"{label} expects {expected}, got {readings[-1]!r:.300}")


def unknown(name: str, settings: dict, where: str = "") -> SettingError:
    hint = did_you_mean(name, {name: name for name in settings}) or ". --help lists them all"
    return SettingError(f"{where}Unknown setting {name}{hint}")


def did_you_mean(word: str, candidates: dict[str, str]) -> str:
    """A question with the value of the key closest to word; empty if no key is close."""
    near = difflib.get_close_matches(word, candidates, n=1)
    return f". Did you mean {candidates[near[0]]}?" if near else ""


def help_text(namespace: dict, settings: dict, values: dict) -> str:
    """The script's first paragraph, then each setting with its value, its choices and its comment."""
    purpose = (namespace.get("__doc__") or "").strip().split("\n\n")[0]
    out = [purpose, "", f"usage: python {os.path.relpath(namespace['__file__'])} [CONFIG.py] [--key=value]"]
    width = max(map(len, settings), default=0)
    group = None
    for name, setting in settings.items():
        if setting.group != group:
            group = setting.group
            out += ["", group]
        choices = "|".join(spell(option) for option in setting.options if isinstance(option, str | int))
        comment = ": ".join(filter(None, [choices, setting.comment]))
        line = f"  --{name:<{width}}  {spell(values[name]):<13}  {comment}".rstrip()
        out += textwrap.wrap(line, 120, subsequent_indent=" " * (width + 21), break_on_hyphens=False)
    return "\n".join(out).strip()


def spell(value) -> str:
    """A value as typed after a flag's =."""
    if isinstance(value, str):
        return value if re.fullmatch(r"\S+", value) else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)
