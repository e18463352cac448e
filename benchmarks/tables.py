"""Tables of a record's rows: TABLES says what each kind of rows shows.

`python bench.py readme` writes them into benchmarks/README.md, wherever it has a marker:

<!-- table: step points -->              the rows `points` of benchmarks/records/step.json
<!-- /table -->
<!-- table: linux_114m whole_runs -->    one row for each record whose name begins so, of a run of train.py
"""

import re
import statistics
from collections.abc import Callable, Iterable

from benchmarks.settings import RECORDS, ROOT, load_record
from benchmarks.trainers import TRAINERS

HEADERS = {  # of a row's keys, where they differ from the key
    "batch": "sequences", "block": "tokens of each", "ranks": "GPUs", "tok_per_s": "tok/s", "mfu": "MFU",
    "of_limit": "of the limit", "of_copy": "of a copy's speed", "best_peer": "speed vs. the best peer",
    "host_us": "CPU time per launch, us", "peak_mib": "peak MiB / the leanest peer's", "config": "an update of",
    "plain_gb_per_s": "plain GB/s", "update_gb_per_s": "GB/s", "plain_threads": "its threads",
    "targets_per_s": "target tokens/s", "rate": "learning rate", "mean": "minus float32's",
    "distance": "distance from float32's", "val": "validation losses, from the start to the end",
    "losses": "loss", "xz_bits_per_byte": "xz -9",
}  # fmt: skip


def title(trainer: str) -> str:
    return TRAINERS[trainer].title if trainer in TRAINERS else f"`{trainer}`"


def last_third(numbers: Iterable[float]) -> float:
    """The mean of the last third of the numbers."""
    numbers = list(numbers)
    return statistics.fmean(numbers[-max(len(numbers) // 3, 1) :])


TEXT_OF = {  # how a row's values are written, by its keys; other numbers have two decimals below 10, one below 1,000
    **dict.fromkeys(["of_copy", "of_limit"], "{:.0%}".format),
    **dict.fromkeys(["bits_per_byte", "xz_bits_per_byte"], "{:.3f}".format),
    **dict.fromkeys(["loss", "val_loss", "best_val_loss", "distance"], "{:.4f}".format),
    **dict.fromkeys(["op", "technique", "command", "config", "flags"], "`{}`".format),
    "mfu": "{:.1%}".format,
    "cost": "{:+.1%}".format,
    "mean": "{:+.4f}".format,
    "rate": "{:g}".format,
    "step_ms": "{:.2f}".format,
    "trainer": title,
    "shape": lambda sizes: " ".join(f"{letter}{size}" for letter, size in sizes.items()),
    "losses": lambda losses: f"{last_third(losses):.4f}",
    "val": lambda evaluations: ", ".join(f"{loss:.4f}" for _, loss in evaluations),
}


def table(rows: Iterable[dict], keys: str) -> str:
    """A markdown table with a column for each of the keys, one two ..."""
    return markdown(keys.split(), [[cell(row, key) for key in keys.split()] for row in rows])


def markdown(keys: list[str], lines: list[list[str]]) -> str:
    headers = [HEADERS.get(key, key.replace("_", " ").replace("gib", "GiB")) for key in keys]
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(row: dict, key: str) -> str:
    """What a row says of a key: - if nothing."""
    value = row.get(key)
    if value is None or value == "":
        return "out of memory" if row.get("oom") and key in ("tok_per_s", "losses") else "-"
    if key in TEXT_OF:
        return TEXT_OF[key](value)
    if isinstance(value, float):
        digits = 0 if value >= 1000 else 1
        return f"{value:,.{digits}f}" if value >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe(row: dict) -> str:
    """A row as printed during a run: its names and numbers, or why there are none."""
    if "functions" in row:
        row = row | microseconds(row)
    shown = [key for key, value in row.items() if value and isinstance(value, str | int | float) or key == "shape"]
    return "  ".join("out of memory" if key == "oom" else f"{key} {cell(row, key)}" for key in shown)


def is_measured(row: dict) -> bool:
    """Neither out of memory nor failed."""
    return "tok_per_s" in row


def side_by_side(rows: Iterable[dict], keys="batch block") -> str:
    """Tokens per second and peak GiB, with a column for each trainer and a line for each point, named by the keys."""
    lines = {}
    for row in rows:
        point = tuple(cell(row, key) for key in keys.split())
        result = "{tok_per_s:,.0f} · {peak_gib:.1f}".format(**row) if is_measured(row) else "out of memory"
        lines.setdefault(point, {})[row["trainer"]] = result
    trainers = list(dict.fromkeys(name for line in lines.values() for name in line))
    cells = [[*point, *(line.get(name, "-") for name in trainers)] for point, line in lines.items()]
    return markdown([*keys.split(), *map(title, trainers)], cells)


# --- Tables of more than a row's keys ---


def sweep_table(rows: list[dict]) -> str:
    order = list(TRAINERS)
    return side_by_side(sorted(rows, key=lambda row: (row["batch"], row["block"], order.index(row["trainer"]))))


def adapters_table(rows: list[dict]) -> str:
    rows = filter(is_measured, rows)
    rows = sorted(rows, key=lambda row: (row["batch"] * row["block"], row["batch"], title(row["trainer"])))
    return table(rows, "batch block trainer checkpointing flags tok_per_s peak_gib")


def losses_table(rows: list[dict]) -> str:
    """The mean loss over the last third of the steps; its mean and mean absolute difference from float32's there."""
    exact = {row["steps"]: row["losses"] for row in rows if row["trainer"] == "float32" and "losses" in row}
    lines = []
    for row in rows:
        line = dict(row)
        if row["steps"] in exact and row["trainer"] != "float32" and "losses" in row:
            pairs = zip(row["losses"], exact[row["steps"]], strict=True)
            differences = [loss - of_float32 for loss, of_float32 in pairs]
            line |= {"mean": last_third(differences), "distance": last_third(map(abs, differences))}
        lines.append(line)
    return table(lines, "trainer losses mean distance")


def ladder_table(rows: list[dict]) -> str:
    """For each model and technique: the memory of one sequence, and the largest batch that fits."""
    lines = {}
    for row in rows:
        line = lines.setdefault((row["model"], row["technique"]), {"batch": 0, "one_sequence_gib": "out of memory"})
        if is_measured(row) and row["batch"] == 1:
            line["one_sequence_gib"] = row["peak_gib"]
        if is_measured(row) and row["batch"] > line["batch"]:
            line |= row
        line |= {"model": row["model"], "technique": row["technique"]}
    return table(lines.values(), "model technique one_sequence_gib batch tok_per_s peak_gib cpu_gib")


def microseconds(row: dict) -> dict[str, float]:
    """The median of each function that was measured."""
    return {name: result["us"][1] for name, result in row["functions"].items() if "us" in result}


def kernels_table(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        times = microseconds(row)
        peaks = {name: result["peak_mib"] for name, result in row["functions"].items() if "peak_mib" in result}
        peers = [name for name in times if not name.startswith("nanocria")]
        line = dict(row)
        if "nanocria" in times and peers:
            fastest = min(peers, key=times.get)
            leanest = min(peers, key=peaks.get)
            line |= {
                "us": times["nanocria"],
                "of_limit": row["floor_us"] / times["nanocria"],
                "best_peer": f"{times[fastest] / times['nanocria']:.2f} x {fastest}",
                "host_us": row["functions"]["nanocria"]["host_us"],
                "peak_mib": f"{peaks['nanocria']:,.0f} / {peaks[leanest]:,.0f} {leanest}",
            }
        lines.append(line)
    return table(lines, "op shape pass us of_limit best_peer host_us peak_mib")


# --- All of them ---

POINT = "batch block checkpointing trainer ranks ms_per_step tok_per_s mfu peak_gib estimated_gib"
TABLES: dict[str, dict[str, str | Callable[[list[dict]], str]]] = {  # command -> kind of rows -> keys, or a function
    "step": {"points": lambda rows: side_by_side(rows, "batch block checkpointing"), "breakdown": "part ms floor_ms",
             "baby": "trainer ms_per_step tok_per_s"},
    "--preset=finetune": {"batch": adapters_table},  # before sweep, whose preset it is
    "sweep": {"batch": sweep_table, "seq": sweep_table},
    "ladder": {"points": ladder_table, "losses": "model technique losses"},
    "gpus": {"scaling": POINT, "8b": POINT, "optimizers": POINT,
             "saves": "ranks checkpoint_bytes seconds_without seconds_with cost resume_seconds",
             "memory": "ranks cpu_gib saved_cpu_gib resumed_cpu_gib checkpoint_bytes save_seconds resume_seconds"},
    "finetune": {"runs": "trainer steps rate losses val", "packing": "trainer targets_per_s"},
    "losses": {"runs": losses_table},
    "kernels": {"rows": kernels_table},
    "generate": {"points": "batch trainer tok_per_s step_ms of_copy"},
    "disk": {"drives": "config flags bytes update_gb_per_s plain_gb_per_s plain_threads ratio"},
    "snapshot": {"rows": "batch block checkpointing trainer peak_gib"},
}  # fmt: skip
RUNS = "command device train_seconds tok_per_s peak_gib val_loss bits_per_byte xz_bits_per_byte record"


def of_record(record: dict) -> dict[str, str]:
    """The tables of a record, by kind of rows."""
    words = record["command"].split()
    command = next((name for name in TABLES if name in words), "sweep")
    tables = {}
    for kind, columns in TABLES[command].items():
        rows = record.get(kind)
        if rows:
            tables[kind] = table(rows, columns) if isinstance(columns, str) else columns(rows)
    return tables


# --- In the page ---

README = ROOT / "benchmarks" / "README.md"
MARKED = re.compile(r"<!-- table: (\S+) (\S+) -->\n.*?<!-- /table -->", re.DOTALL)


def of_runs(prefix: str) -> str:
    """The runs of train.py whose records begin so, the best first."""
    runs = []
    for path in RECORDS.glob(f"{prefix}*.json"):
        run = load_record(path.stem)
        runs.append(run | {"record": f"[{run['versions']['nanocria']}](records/{path.name})"})
    return table(sorted(runs, key=lambda run: run["val_loss"]), RUNS)


def with_caption(name: str, kind: str) -> str:
    """A table of a record, and below it what it was measured on."""
    record = load_record(name)
    limits = f"copies {record['copy_tb_s']:.2f} TB/s"
    if "matmul_tflops" in record:
        limits += f", matmuls {record['matmul_tflops']:.0f} TFLOP/s"
    measured_on = f"{record['device']}, PyTorch {record['versions']['torch']}, {limits}"
    link = f"[records/{name}.json](records/{name}.json)"
    return f"{of_record(record)[kind]}\n\n{measured_on}; commands, commits and versions: {link}"


def render(text: str) -> str:
    """The page with each of its tables written again."""

    def written(marker: re.Match) -> str:
        name, kind = marker.groups()
        made = of_runs(name) if kind == "whole_runs" else with_caption(name, kind)
        return f"<!-- table: {name} {kind} -->\n{made}\n<!-- /table -->"

    return MARKED.sub(written, text)


def write_page() -> None:
    README.write_text(render(README.read_text()))
