"""What the prepare.py scripts share: options, progress, messages."""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.encode import cpu_cores
from data.files import display_path
from data.meta import SPLITS
from data.rows import DECOMPRESSORS
from data.tokenizer import NAMES, ROOT, Tokenizer, get_tokenizer


def make_parser(doc: str, folder: Path) -> argparse.ArgumentParser:
    """A script's argument parser: its docstring is the help, --out its one option. Options that are not given are left
    out of the result: the defaults are those of the script's prepare().
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    out_help = "folder for the dataset (default: the script's)"
    parser.add_argument("--out", dest="folder", type=path_argument, default=folder, help=out_help)
    return parser


def add_input_option(parser: argparse.ArgumentParser) -> None:
    input_help = f"files (-: standard input); {', '.join(DECOMPRESSORS)} are decompressed"
    parser.add_argument("--input", dest="inputs", type=path_argument, nargs="+", required=True, help=input_help)


def add_text_options(parser: argparse.ArgumentParser, tokenizer: str, val_fraction: str) -> None:
    """Add the options for text and tokens. tokenizer, val_fraction: their defaults, as --help shows them."""
    tokenizer_help = f"one of {', '.join(NAMES)}, or a Hugging Face or Meta folder or file (default: {tokenizer})"
    parser.add_argument("--tokenizer", help=tokenizer_help)
    parser.add_argument("--val_fraction", type=share, help=f"validation share (default: {val_fraction})")
    errors_help = "broken rows and files: stop at the first one, or skip and count them (default: strict)"
    parser.add_argument("--errors", choices=["strict", "skip"], help=errors_help)
    workers_help = "processes (default: one per CPU core)"
    parser.add_argument("--workers", type=positive, default=cpu_cores(), help=workers_help)


def path_argument(text: str) -> Path:
    """An argparse type: a path, whose ~ a shell leaves in --out=~/x, or - for standard input."""
    return Path("/dev/stdin" if text == "-" else text).expanduser()


def share(text: str) -> float:
    """An argparse type: a number above 0 and below 1."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below 1")
    return float(text)


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def tokenizer_for_data(name: str) -> Tokenizer:
    """The tokenizer that a script's options name."""
    tokenizer = get_tokenizer(os.path.expanduser(name))
    if tokenizer.bos == tokenizer.end_of_text:  # a document starts after the end of another anyway
        tokenizer.bos = None
    lost = [char for char in "aé漢🦙" if char not in tokenizer.decode(tokenizer.encode(char))]
    if lost:  # neither bytes nor such characters are among its tokens
        print(f"tokenizer {name} cannot write {' '.join(lost)}: such text is lost, bits per byte mean little")
    return tokenizer


class Progress:
    """Prints a line every 10 seconds."""

    def __init__(self, prefix: str = ""):
        self.prefix = prefix
        self.start = time.time()
        self.last_shown = self.start

    def __call__(self, counts: dict) -> None:
        now = time.time()
        if now - self.last_shown < 10:
            return
        self.last_shown = now
        n_documents = sum(counts[split]["documents"] for split in SPLITS)
        n_tokens = sum(counts[split]["tokens"] for split in SPLITS)
        rate = n_tokens / (now - self.start)
        print(f"{self.prefix}{n_documents:,} documents, {n_tokens:,} tokens, {rate:,.0f}/s", flush=True)


def print_summary(folder: Path, meta: dict) -> None:
    """Print what a finished dataset holds."""
    print(f"{folder}: tokenizer {meta['tokenizer']}, vocab_size {meta['vocab_size']:,}, {meta['dtype']}")
    print(f"{'split':<6}{'documents':>12}{'bytes':>18}{'tokens':>18}")
    for split in SPLITS:
        n_documents, n_bytes, n_tokens = (meta[f"{split}_{name}"] for name in ("documents", "bytes", "tokens"))
        print(f"{split:<6}{n_documents:>12,}{n_bytes:>18,}{n_tokens:>18,}")
    if "xz_bits_per_byte" in meta:
        print(f"xz -9 needs {meta['xz_bits_per_byte']:.3f} bits per byte of val")


def print_next(*arguments: str) -> None:
    """Print the command that trains on a finished dataset, as it runs from the current folder."""
    paths = [display_path(ROOT / name) if name.endswith(".py") else name for name in ("train.py", *arguments)]
    print("next: " + shlex.join(["python", *paths]))


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main: a user error prints one line, Ctrl-C and SIGTERM print no traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: nothing half-written is left")
