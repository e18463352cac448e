"""What the rows of a record say beside each other: speeds and memory over those of a peer, scaling, what fits."""

import statistics
from collections.abc import Iterable

from benchmarks import arms


def done(rows: list[dict]) -> list[dict]:
    """Those that were measured: neither out of memory nor failed."""
    return [row for row in rows if "tok_per_s" in row]


def values(row: dict, keys: tuple[str, ...]) -> tuple:
    return tuple(row[key] for key in keys)


def mfu(row: dict) -> str:
    return "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"


def cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return "out of memory" if row.get("oom") else f"{row['tok_per_s']:,.0f} · {row['peak_gib']:.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_and_memory(row: dict, peer: dict) -> dict:
    return {key: row[key] / peer[key] for key in ("tok_per_s", "peak_gib") if key in row}


def ratios(rows: list[dict], place: tuple[str, ...], ours: str = "nanocria") -> list[dict]:
    """Speed and memory of our arm over those of each peer at the same place, whose first key is the arm."""
    found = {values(row, place): row for row in done(rows)}
    return [
        {"at": where, "peer": arm} | speed_and_memory(found[ours, *where], peer)
        for (arm, *where), peer in found.items()
        if not arm.startswith(ours) and (ours, *where) in found
    ]


# --- Kernels ---


def shape(row: dict) -> str:
    return " ".join(f"{letter}{number}" for letter, number in row["shape"].items())


def row_name(row: dict) -> str:
    return f"{row['op']} {shape(row)} {row['pass']}"


def median_us(row: dict, arm: str) -> float | None:
    """None for an arm that failed or was not installed."""
    result = row["arms"].get(arm, {})
    return result["us"][1] if "us" in result else None


def duration(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def of_limit(row: dict, arm: str = "nanocria") -> float | None:
    """How much of the limit an arm reaches: the shortest time that the card allows over its own."""
    us = median_us(row, arm)
    return row["floor_us"] / us if us else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def best_peer(row: dict) -> str | None:
    times = {arm: us for arm in row["arms"] if not arm.startswith("nanocria") and (us := median_us(row, arm))}
    return min(times, key=times.get, default=None)


def lead(row: dict) -> float | None:
    """The best peer's time over ours: below 1 where it is faster."""
    ours, peer = of_limit(row), best_peer(row)
    return ours / of_limit(row, peer) if ours and peer else None


# --- Steps, on one GPU and on several ---

STEP_PLACE = ("arm", "batch", "block", "checkpointing")
GPUS_PLACE = ("arm", "ranks", "batch", "block", "checkpointing")


def efficiency(row: dict, rows: list[dict]) -> float | None:
    """Tokens a second over those of one GPU times the number of GPUs; None without the same trainer on one GPU."""
    found = {values(r, GPUS_PLACE): r for r in done(rows)}
    alone = found.get((row["arm"].partition("-")[0], 1, *values(row, GPUS_PLACE[2:])))
    return row["tok_per_s"] / row["ranks"] / alone["tok_per_s"] if alone else None


def gpus_ratios(row: dict, rows: list[dict]) -> dict | None:
    """nanocria's speed and memory over those of torchtitan's recipe, sharded alike, at the same place.

    Selective checkpointing is compared with the recipe's full one where its selective was not measured.
    """
    found = {values(r, GPUS_PLACE): r for r in done(rows)}
    arm, *where, checkpointing = values(row, GPUS_PLACE)
    peer_arm = {"nanocria": "recipe", "nanocria-zero2": "recipe-zero2"}.get(arm)
    for theirs in (checkpointing, "full" if checkpointing == "selective" else checkpointing):
        if peer := found.get((peer_arm, *where, theirs)):
            return {"peer": peer_arm, "checkpointing": theirs} | speed_and_memory(row, peer)
    return None


def saves_sentence(row: dict) -> str:
    n, seconds = row.get("intervals", 2), row["resume_seconds"]  # older records are of two
    return (
        f"a checkpoint of {row['checkpoint_bytes'] / 1e9:.1f} GB every {row['every']} steps costs the training "
        f"{row['cost']:.1%} ({row['seconds_without'] / n:.1f} s without, {row['seconds_with'] / n:.1f} s with)"
    ) + ("; it was not resumed" if seconds is None else f"; a resume reads it in {seconds:.1f} s")


# --- Losses ---

REFERENCE = "float32"


def differences(row: dict, rows: list[dict]) -> list[float] | None:
    """Of each step's loss from that of the reference; None without it, or for the reference itself."""
    reference = next((r for r in rows if r["arm"] == REFERENCE and "losses" in r), None)
    if reference is None or row is reference or "losses" not in row:
        return None
    return [loss - other for loss, other in zip(row["losses"], reference["losses"], strict=True)]


def loss_cells(row: dict, rows: list[dict]) -> list[str]:
    """The mean loss over the last third of the steps; the mean and the mean size of its differences there."""
    last, found = f"{last_third(row['losses']):.4f}", differences(row, rows)
    return [last, f"{last_third(found):+.4f}", f"{last_third(map(abs, found)):.4f}"] if found else [last, "-", "-"]


def last_third(numbers: Iterable[float]) -> float:
    """The mean of the last third of them."""
    numbers = list(numbers)
    return statistics.fmean(numbers[-max(len(numbers) // 3, 1) :])


# --- Sweeps ---

SWEEP_PLACE = ("config", "arm", "ranks", "batch", "block", "checkpointing", "offload", "limit_gib", "flags")
SERIES = tuple(key for key in SWEEP_PLACE if key not in ("batch", "block"))
KINDS = ("batch", "seq")  # of a sweep: what grows
VARIES, SIZE = {"batch": "batch", "seq": "block"}, {"batch": "batch", "seq": "context"}


def by_series(rows: list[dict], kind: str) -> dict[tuple, list[dict]]:
    """The rows of each series, as its size grows; the last may be out of memory."""
    found = {}
    for row in sorted(rows, key=lambda row: row[VARIES[kind]]):
        found.setdefault(values(row, SERIES), []).append(row)
    return dict(sorted(found.items(), key=lambda item: list(arms.SWEEP).index(item[1][0]["arm"])))


def largest(rows: list[dict], kind: str, arm: str) -> dict | None:
    """The largest point of an arm; None where none fits."""
    return max((r for r in done(rows) if r["arm"] == arm), key=lambda row: row[VARIES[kind]], default=None)


def labels(rows: list[dict]) -> dict[tuple, str]:
    """What each series is called: the trainer, and what differs between series of ours, or of the peers."""
    names = {}
    for row in rows:
        beside = [other for other in rows if (other["arm"] in arms.SWEEP_FLAGS) == (row["arm"] in arms.SWEEP_FLAGS)]
        differing = [key for key in ("checkpointing", "offload", "flags") if len({r[key] for r in beside}) > 1]
        said = [row[key] if key == "flags" else f"{key} {row[key]}" for key in differing if row[key]]
        names[values(row, SERIES)] = ", ".join([arms.SWEEP[row["arm"]], *said])
    return names


# --- The ladder ---


def rung_cells(rung: str, points: list[dict], losses: dict[str, float]) -> list[str]:
    """Of a model's rung: memory of one sequence; the largest batch, its speed and memory; the loss, and what is new."""
    rows = [row for row in points if row["rung"] == rung]
    one, best = (f(done(rows), key=lambda row: row["batch"], default=None) for f in (min, max))
    cells = [f"{one['peak_gib']:.1f}", f"{one['cpu_gib']:.0f}"] if one and one["batch"] == 1 else ["out of memory", "-"]
    cells += [str(best["batch"]), cell(best)] if best else ["-", "-"]
    if rung not in losses:
        return [*cells, "-"]
    below = losses.get(arms.RUNGS[rung].on)
    return [*cells, f"{losses[rung]:.4f}" + (f" ({losses[rung] - below:+.4f})" if below else "")]
