"""One megabyte of Shakespeare's plays, the first text that char-rnn and nanoGPT learn.

    python data/shakespeare_char/prepare.py

Downloads 1.1 MB (or reads input.txt, if it is already in this folder) and makes train.bin and val.bin, the first 90%
and the last 10% of the text, in about a second. The text is ASCII, so its characters are its bytes and the `bytes`
tokenizer is a character tokenizer; a loss in nats per token is comparable to nanoGPT's shakespeare_char.
"""

import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.command import make_parser, print_summary, run_script
from data.files import atomic_write
from data.tokenizer import get_tokenizer
from data.write import write_dataset

HERE = Path(__file__).resolve().parent
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def download(file: Path) -> None:
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
    except OSError as error:
        raise OSError(f"could not download {URL} ({error}): fetch it elsewhere and put it at {file}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as out:
        out.write(content)


def prepare(folder: Path = HERE) -> dict:
    """Write the dataset into `folder`, from its input.txt, downloaded if missing; return its meta.json."""
    if not (folder / "input.txt").exists():
        download(folder / "input.txt")
    text = (folder / "input.txt").read_bytes().decode()
    n_train = len(text) * 9 // 10
    documents = [("train", text[:n_train]), ("val", text[n_train:])]
    meta = write_dataset(folder, documents, get_tokenizer("bytes"))
    print_summary(folder, meta)
    return meta


if __name__ == "__main__":
    run_script(lambda: prepare(make_parser(__doc__, HERE).parse_args().folder))
