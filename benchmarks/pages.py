"""The tables of README.md and benchmarks/README.md. A page marks where one stands, `python bench.py readme` writes it:

<!-- table: step points -->              the rows `points` of benchmarks/records/step.json
<!-- /table -->
<!-- table: linux_114m whole_runs -->    one row for each record whose name begins so, of a run of train.py
"""

import re

from benchmarks import tables
from benchmarks.records import load, load_all
from benchmarks.settings import ROOT
from data.files import atomic_write

PAGES = ["README.md", "benchmarks/README.md"]
MARKED = re.compile(r"<!-- table: (\S+) (\S+) -->\n.*?<!-- /table -->", re.DOTALL)


def caption(record: dict) -> str:
    """What a record was measured on, and where its commands, commits and versions are."""
    path = f"benchmarks/records/{record['name']}.json"
    facts = [record["device"], f"PyTorch {record['versions']['torch']}", f"copies {record['copy_tb_s']:.2f} TB/s"]
    facts += [f"matmuls {record['matmul_tflops']:.0f} TFLOP/s"] if "matmul_tflops" in record else []
    return f"{', '.join(facts)}; commands, commits and versions: [{path}]({path})"


def part(name: str, kind: str) -> str:
    if kind == "whole_runs":
        runs = sorted(load_all(name), key=lambda run: run["val_loss"])
        links = [f"[{run['versions']['nanocria']}](benchmarks/records/{run['name']}.json)" for run in runs]
        return tables.table([run | {"record": link} for run, link in zip(runs, links, strict=True)], tables.RUNS)
    record = load(name)
    made = tables.qlora_table(record["batch"]) if kind == "qlora" else tables.of_record(record)[kind]
    return f"{made}\n\n{caption(record)}"


def render(text: str, page: str) -> str:
    """The page with each of its tables written again."""

    def written(match: re.Match) -> str:
        made = part(*match.groups())
        if "/" in page:
            made = made.replace("benchmarks/records/", "records/")  # links from its folder
        return f"<!-- table: {' '.join(match.groups())} -->\n{made}\n<!-- /table -->"

    return MARKED.sub(written, text)


def write() -> None:
    """Write the tables of all pages, or of none."""
    pages = {page: render((ROOT / page).read_text(), page) for page in PAGES}
    for page, text in pages.items():
        with atomic_write(ROOT / page) as file:  # a reader never sees half a page
            file.write(text.encode())
