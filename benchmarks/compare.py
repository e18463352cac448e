"""Compare the rows of a record: speed and memory relative to a peer, what fits; and make tables of them."""

import statistics
from collections.abc import Iterable

from benchmarks import arms


def done(rows: Iterable[dict]) -> list[dict]:
    """The rows that were measured: neither out of memory nor failed."""
    return [row for row in rows if "tok_per_s" in row]


def values(row: dict, keys: tuple[str, ...]) -> tuple:
    return tuple(row[key] for key in keys)


def by_place(rows: Iterable[dict], keys: tuple[str, ...]) -> dict[tuple, dict]:
    """The measured rows by their values of these keys; the last one counts."""
    return {values(row, keys): row for row in done(rows)}


def ratio(row: dict, peer: dict) -> dict:
    return {key: row[key] / peer[key] for key in ("tok_per_s", "peak_gib") if key in row}


# --- Tables ---


def table(header: str, line: str, rows: Iterable[dict]) -> str:
    """A markdown table with a line for each row. The cells of `line` are formats of the row's keys: {ms:.1f} | {part}.

    A cell is - if the row lacks the key, n/a if it is None.
    """
    return markdown(header.split(" | "), [[cell(form, row) for form in line.split(" | ")] for row in rows])


def cell(form: str, row: dict) -> str:
    try:
        return form.format(**row)
    except KeyError:
        return "-"
    except TypeError:
        return "n/a"


def markdown(header: list[str], lines: Iterable[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def named(rows: Iterable[dict], titles: dict[str, str]) -> list[dict]:
    """The rows, each with its trainer's title."""
    return [row | {"trainer": titles.get(row["arm"], f"`{row['arm']}`")} for row in rows]


def side_by_side(rows: list[dict], header: str, line: str, trainers: Iterable[str]) -> str:
    """A line for each place, formatted as by table(), with a column for each trainer: its speed and memory."""
    lines = {}
    for row in rows:
        lines.setdefault(tuple(line.format(**row).split(" | ")), {})[row["trainer"]] = row
    cells = [[*place, *(speed_and_memory(there.get(name)) for name in trainers)] for place, there in lines.items()]
    return markdown([*header.split(" | "), *trainers], cells)


def speed_and_memory(row: dict | None) -> str:
    if row is None:
        return "-"
    return "out of memory" if row.get("oom") else f"{row['tok_per_s']:,.0f} · {row['peak_gib']:.1f}"


# --- Kernels ---


def shape(row: dict) -> str:
    return " ".join(f"{letter}{number}" for letter, number in row["shape"].items())


def times(row: dict) -> dict[str, float]:
    """The microseconds of each arm that was measured."""
    return {arm: result["us"][1] for arm, result in row["arms"].items() if "us" in result}


def duration(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def of_limit(row: dict) -> float | None:
    """The fraction of the limit that ours reaches: the shortest time that the card allows over our time."""
    us = times(row).get("nanocria")
    return row["floor_us"] / us if us else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def lead(row: dict) -> tuple[float, str] | None:
    """The best peer's time over ours (below 1 if the peer is faster), and its name."""
    found = times(row)
    peer = min((arm for arm in found if not arm.startswith("nanocria")), key=found.get, default=None)
    return (found[peer] / found["nanocria"], peer) if peer and "nanocria" in found else None


def is_inaccurate(arms: dict[str, dict]) -> bool:
    """True if our error against float64 exceeds 1.2 times eager's plus one bfloat16 rounding: test_kernels' limit."""
    ours, eager = (arms[name].get("error") for name in ("nanocria", "eager"))
    return ours is not None and eager is not None and ours > 1.2 * eager + 2**-8


# --- Steps, runs and losses ---

STEP_PLACE = ("arm", "batch", "block", "checkpointing")
GPUS_PLACE = ("arm", "ranks", "batch", "block", "checkpointing")
REFERENCE = "float32"


def tokens_of(r: dict, steps: int) -> int:
    """How many tokens a run of train.py has read after so many steps."""
    s = r["settings"]
    return steps * s["batch_size"] * s["block_size"] * s["gradient_accumulation_steps"]


def differences(row: dict, rows: list[dict]) -> list[float] | None:
    """Each step's loss minus the reference's; None for the reference, or if there is none of the same length."""
    reference = next((r for r in rows if r["arm"] == REFERENCE and "losses" in r), None)
    if reference is None or row["arm"] == REFERENCE or len(row.get("losses", [])) != len(reference["losses"]):
        return None
    return [loss - other for loss, other in zip(row["losses"], reference["losses"], strict=True)]


def last_third(numbers: Iterable[float]) -> float:
    """The mean of the last third of the numbers."""
    numbers = list(numbers)
    return statistics.fmean(numbers[-max(len(numbers) // 3, 1) :])


# --- Sweeps and the ladder ---

SWEEP_PLACE = ("config", "arm", "ranks", "batch", "block", "checkpointing", "offload", "limit_gib", "flags")
KINDS = ("batch", "seq")  # what grows in a sweep
VARIES, FIXED = {"batch": "batch", "seq": "block"}, {"batch": "block", "seq": "batch"}
SIZE = {"batch": "batch", "seq": "context"}


def by_series(record: dict, kind: str) -> dict[str, list[dict]]:
    """The rows of each series, by title, in order of size; the last may be out of memory."""
    rows, fixed, found = record[kind], FIXED[kind], {}
    of_both = [row for each in KINDS for row in record.get(each, [])]
    several = len({row[fixed] for row in rows}) > 1
    for row in sorted(rows, key=lambda row: (list(arms.SWEEP).index(row["arm"]), row[VARIES[kind]])):
        trainer = title(row, of_both) + f", {fixed} {row[fixed]:,}" * several
        found.setdefault(trainer, []).append(row | {"trainer": trainer})
    return found


def title(row: dict, rows: list[dict]) -> str:
    """The trainer, and the settings that differ among our rows, or among the peers'."""
    beside = [other for other in rows if (other["arm"] in arms.SWEEP_FLAGS) == (row["arm"] in arms.SWEEP_FLAGS)]
    settings = [key for key in SWEEP_PLACE if key not in ("arm", "batch", "block")]
    differing = [key for key in settings if len({other[key] for other in beside}) > 1 and row[key]]
    return ", ".join([arms.SWEEP[row["arm"]], *(row[k] if k == "flags" else f"{k} {row[k]}" for k in differing)])


def by_rung(points: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """For each model, what fits on each measured rung, from the smallest batch to the largest."""
    found = {}
    for row in sorted(points, key=lambda row: (row["model"], list(arms.RUNGS).index(row["rung"]), row["batch"])):
        found.setdefault(row["model"], {}).setdefault(row["rung"], []).extend(done([row]))
    return found
