"""What both pages say of the records of the sweeps: tables, and the sentences above them."""

import math
import runpy

from benchmarks.arms import SWEEP as TITLES
from benchmarks.arms import SWEEP_FLAGS, SWEEP_PEERS
from benchmarks.compare import (
    KINDS,
    SIZE,
    VARIES,
    by_series,
    cell,
    deviations,
    done,
    labels,
    largest,
    sweep_ratios,
    table,
)
from benchmarks.record import ROOT

SHOWN = ("all", "long", "liger", "hf")  # in the README
ON_CPU = {
    "none": "",
    "optimizer": "With the optimizer in CPU memory, ",
    "all": "With weights and optimizer in CPU memory, ",
}


def sweep_table(record: dict, kind: str) -> str:
    """Tokens a second and peak GiB: a row for each size, a column for each series."""
    columns, names = by_series(record[kind], kind), labels(record[kind])
    found = {name: {row[VARIES[kind]]: row for row in rows} for name, rows in columns.items()}
    sizes = sorted({row[VARIES[kind]] for row in record[kind]})
    lines = [[f"{size:,}", *(cell(found[name].get(size)) for name in columns)] for size in sizes]
    return table([SIZE[kind], *(names[name] for name in columns)], lines)


def fits_table(record: dict, kind: str) -> str:
    """The largest size of each series, what did not fit, how it was there, and what a token more takes."""
    lines, names, key = [], labels(record[kind]), VARIES[kind]
    for name, rows in by_series(record[kind], kind).items():
        fits, too_large = done(rows), [f"{row[key]:,}" for row in rows if row.get("oom")]
        end = ["none", "-", "-"]
        if fits:
            end = [f"{fits[-1][key]:,}", f"{fits[-1]['tok_per_s']:,.0f}", f"{fits[-1]['peak_gib']:.1f}"]
        slope = slope_kb(rows)
        lines.append(
            [names[name], end[0], (too_large or ["-"])[0], *end[1:], "-" if slope is None else f"{slope:,.0f}"]
        )
    header = ["trainer", f"largest {SIZE[kind]}", "out of memory at", "its tok/s", "its peak GiB", "KB per extra token"]
    return table(header, lines)


def slope_kb(rows: list[dict]) -> float | None:
    """KB by which the peak grows with a token, between the two largest sizes."""
    if len(done(rows)) < 2:
        return None
    (tokens, gib), (more_tokens, more_gib) = ((r["batch"] * r["block"], r["peak_gib"]) for r in done(rows)[-2:])
    return (more_gib - gib) * 2**30 / (more_tokens - tokens) / 1000


def ran_out(record: dict, kind: str, arm: str) -> bool:
    return any(row["arm"] == arm and row.get("oom") for row in record[kind])


def fits_of_both(record: dict) -> str:
    """The README's table: the largest batch and the largest context of each trainer, and how it was there."""
    kinds, lines = [kind for kind in KINDS if record[kind]], []
    for arm in SHOWN:
        ends = {kind: largest(record[kind], kind, arm) for kind in kinds}
        cells = [TITLES[arm]]
        for kind, end in ends.items():
            star = "" if ran_out(record, kind, arm) else r"\*"
            cells += [f"{end[VARIES[kind]]:,}{star}", cell(end)] if end else ["-", "-"]
        lines += [cells] if any(ends.values()) else []
    what = {"batch": "batch of {block:,} tokens", "seq": "context at batch {batch}"}
    sizes = [f"largest {what[kind].format(**record[kind][0])}" for kind in kinds]
    text = table(["trainer", *(title for size in sizes for title in (size, "tok/s · GiB"))], lines)
    tried = []
    for kind in kinds:
        numbers = ", ".join(f"{size:,}" for size in sorted({row[VARIES[kind]] for row in record[kind]}))
        tried.append(f"{'batches' if kind == 'batch' else 'contexts'} of {numbers}")
    note = f"Tried: {'; '.join(tried)}. The next size was out of memory"
    return f"{text}\n\n{note}" + (r", except at \*, the largest tried." if r"\*" in text else ".")


def what_was_swept(record: dict, kind: str) -> str:
    """The sentence above a table."""
    rows = record[kind]
    first = rows[0]
    at = f"sequences of {first['block']:,} tokens" if kind == "batch" else f"batch {first['batch']}"
    limit = f" held to {first['limit_gib']:g} GiB" if first["limit_gib"] else ""
    ranks = f" on {first['ranks']} GPUs (batch and peak memory of each, tok/s of all)" if first["ranks"] > 1 else ""
    checkpointing = " or ".join(dict.fromkeys(row["checkpointing"] for row in rows))
    ours, theirs = (
        " or ".join(dict.fromkeys(row["offload"] for row in rows if (row["arm"] in SWEEP_FLAGS) == own))
        for own in (True, False)
    )
    offload = f"offload {ours}" + (f" (the others {theirs})" if theirs not in ("", ours) else "")
    return f"`{first['config']}`{ranks}{limit}, {at}, activation checkpointing {checkpointing}, {offload}"


def arithmetic(record: dict) -> str:
    """Sentences: what full checkpointing must keep, and how close the estimates of the measured code were."""
    sentences = []
    full = [row for kind in KINDS for row in record[kind] if row["checkpointing"] == "full"]
    if full:
        config = runpy.run_path(str(ROOT / full[0]["config"]))
        kb = 2 * config["n_embd"] * config["n_layer"] / 1000  # in bfloat16
        sentences.append(f"Full checkpointing keeps {kb:.0f} KB per token: each block's input.")
    off = [abs(deviation) for _, deviation in deviations(record)]
    if off:
        most = math.ceil(1000 * max(off)) / 1000  # not rounded down
        sentences.append(f"memory.py's estimate was within {most:.1%} of each of nanocria's {len(off)} peaks.")
    return " ".join(sentences)


def headline(record: dict) -> str:
    """What fits, like for like: nanocria and each peer with the same kept on the CPU; then with the activations too."""
    ends = {kind: end for kind in KINDS if (end := largest(record[kind], kind, "all"))}
    first, device = next(iter(ends.values())), record["device"].removeprefix("1 x ")
    what = {"batch": "batches of {batch:,} x {block:,} tokens", "seq": "contexts of {block:,} at batch {batch}"}
    text = f"{ON_CPU[first['offload']]}Llama 3.2 1B trains within {first['limit_gib']:g} GiB of GPU memory "
    text += f"(one {device} limited to that) at "
    text += " or ".join(what[kind].format(**row) for kind, row in ends.items())
    ended = {}
    for peer in SWEEP_PEERS:
        found = [(kind, largest(record[kind], kind, peer)) for kind in ends if ran_out(record, kind, peer)]
        if found:
            sizes = ((SIZE[kind], end[VARIES[kind]] if end else 0) for kind, end in found)
            ended[TITLES[peer]] = " and ".join(f"{size} {n:,}" for size, n in sizes)
    for i, (peer, at) in enumerate(reversed(ended.items())):
        text += f"{', ' if i else '; '}{peer} {'' if i else 'ends '}at {at}"
    text += "."
    same = [ratio for ratio in sweep_ratios(record["batch"]) if ratio["arm"] == "all"]
    if same:
        both = max(same, key=lambda ratio: (ratio["batch"], -ratio["peak_gib"]))
        text += f" At batch {both['batch']:,} nanocria is {both['tok_per_s']:.2f} times as fast as "
        text += f"{TITLES[both['peer']]}, in {both['peak_gib']:.0%} of the GPU memory."
    longest = [f"{SIZE[kind]} {end[VARIES[kind]]:,}" for kind in KINDS if (end := largest(record[kind], kind, "long"))]
    return text + (f" With activations on the CPU too: {' or '.join(longest)}." if longest else "")
