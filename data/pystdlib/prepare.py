"""The running Python's own standard library: real text without a download.

    python data/pystdlib/prepare.py

Makes train.bin (about 9 MB of source, 3 million tokens) and val.bin (0.5 MB) in this folder, in about five seconds,
with a tokenizer of 2,048 tokens that it learns from the training files. train.py runs it by itself when a config asks
for pystdlib and the files are missing.

Each file is a document. Tests, which Debian's and slim Pythons lack, and two packages of generated tables are skipped.
The rest is 9 to 10 MB in Python 3.11, 3.12 and 3.13, 7 to 9 MB in Debian's, which lack Tkinter and IDLE, and about
equally hard to compress. So losses of two Pythons are close, but not the same. (The tests would add 19 MB of much more
repetitive text.)
"""

import contextlib
import fcntl
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.command import make_parser, print_summary, run_script
from data.files import lock, open_to_write
from data.tokenizer import train_tokenizer
from data.write import split_of, write_dataset

HERE = Path(__file__).resolve().parent
SKIP = {
    "site-packages", "dist-packages",  # what was installed, not the standard library
    "test", "tests", "idle_test",
    "encodings", "pydoc_data",  # generated: character maps, one 757 KB dictionary of help texts
}  # fmt: skip
VAL_FRACTION = 0.07  # of the files; in bytes 5-7%, half a megabyte
N_VOCAB = 2048  # tokens, of 3.2 bytes of source on average


def read_sources(stdlib: Path) -> dict[str, str]:
    """Return {source: relative path}, sorted by path; only the first of copies, which could land in both splits."""
    names = {}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        if SKIP.isdisjoint(name.parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):  # a dangling link, another encoding
                names.setdefault(path.read_bytes().decode(), name.as_posix())
    names.pop("", None)
    return names


def prepare(folder: Path = HERE, stdlib: Path | None = None) -> dict:
    """Write the dataset into `folder` from `stdlib` (default: the running Python's); return its meta.json."""
    names = read_sources(Path(stdlib or sysconfig.get_path("stdlib")))
    # split by a hash of the name: a file that a Python update changes or adds does not move the others
    documents = [(split_of(name, VAL_FRACTION), source) for source, name in names.items()]
    tokenizer = train_tokenizer((source for split, source in documents if split == "train"), N_VOCAB)
    meta = write_dataset(folder, documents, tokenizer)
    print_summary(folder, meta)
    return meta


def prepare_once(folder: Path) -> None:
    """Write the dataset unless it exists. If another process is writing it, wait for that."""
    if (folder / "meta.json").exists():
        return
    with open_to_write(folder / ".once.lock", "a") as file:  # not .lock, which prepare takes
        lock(file, fcntl.LOCK_EX)
        if not (folder / "meta.json").exists():
            prepare(folder)


if __name__ == "__main__":
    run_script(lambda: prepare(make_parser(__doc__, HERE).parse_args().folder))
