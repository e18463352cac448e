"""The points of the sweeps (benchmarks/sweep.py): what names them, what memory.py says of them, their tables."""

import itertools
import json
import math
import shlex
import sys
from pathlib import Path

from benchmarks import estimate, report, step
from model import LlamaConfig
from runtime import memory

ARMS = {  # what train.py is told
    "all": [],
    "long": ["--offload_activations=true"],
    "kernels": ["--fused_loss=false"],
    "torch": ["--fused_kernels=false", "--attention=sdpa", "--fused_loss=false"],
}
WHOLE = ("all", "long")  # with every kernel: what a peer is compared with
SHOWN = ("all", "long", "liger", "hf")  # in the README
PEERS = {  # as benchmarks/peers.py names them, without offload and with
    "hf": {"none": "hf-masters", "all": "hf-offload"},
    "liger": {"none": "hf-liger-masters", "all": "hf-liger-offload"},
    "recipe": {"none": "recipe"},
}
TITLES = {
    "all": "nanocria",
    "long": "nanocria, activations on the CPU",
    "kernels": "nanocria, unfused loss",
    "torch": "nanocria, plain PyTorch",
    "hf": "Hugging Face",
    "liger": "Hugging Face + Liger",
    "recipe": "torchtitan's recipe",
}
PLACE = ("config", "arm", "ranks", "batch", "block", "checkpointing", "offload", "limit_gib", "flags")
ROWS = {"batch": PLACE, "seq": PLACE}  # what names a row
MODEL = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim", "vocab_size", "tie_embeddings")
SERIES = tuple(key for key in PLACE if key not in ("batch", "block"))
VARIES, SIZE = {"batch": "batch", "seq": "block"}, {"batch": "batch", "seq": "context"}


# ----------------------------------------------------------------------------------------------------------------------
# What memory.py says of them


def refuse_model(flags: dict, peers: list[str]) -> None:
    """Flags are for ours alone, and a peer's model is the config's."""
    found = [name for name in MODEL if name in flags]
    if found and set(peers) & set(PEERS):
        raise ValueError(f"--{found[0]}: the peers would train another model; write it in a config, or say peers=none")


def settings(row: dict) -> dict:
    """train.py's, of a row of ours."""
    flags = estimate.read_flags([*ARMS[row["arm"]], *shlex.split(row["flags"])])
    named = {"block_size": row["block"], "batch_size": row["batch"], "offload": row["offload"]}
    named |= {"gradient_accumulation_steps": row["ranks"]}
    return named | {"activation_checkpointing": row["checkpointing"]} | flags


def situation(row: dict) -> tuple[LlamaConfig, memory.RunShape]:
    """Of a peer only the model is right."""
    if row["arm"] in ARMS:
        return estimate.situation(row["config"], row["ranks"], settings(row))
    return estimate.situation(row["config"], 1, {"sharding": "zero3"})


def estimated_gib(row: dict) -> float:
    return memory.peak_gib(*situation(row))


def cpu_gib(row: dict) -> float:
    """What all ranks hold in the CPU's memory: a peer's FSDP2 float32 weights, gradients and two moments."""
    config, plan = situation(row)
    if row["arm"] in ARMS:
        return estimate.cpu_gib(config, plan)
    block, root = memory.n_params(config)
    return 16 * (root + config.n_layer * block) / 2**30 if row["offload"] == "all" else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons


def series_of(row: dict) -> tuple:
    return tuple(row[key] for key in SERIES)


def by_series(rows: list[dict], kind: str) -> dict[tuple, list[dict]]:
    """The rows of each series, as its size grows; the last may be out of memory."""
    found = {}
    for row in sorted(rows, key=lambda row: row[VARIES[kind]]):
        found.setdefault(series_of(row), []).append(row)
    return dict(sorted(found.items(), key=lambda item: list(TITLES).index(item[1][0]["arm"])))


def done(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "tok_per_s" in row]


def largest(rows: list[dict], kind: str, arms: tuple[str, ...]) -> int:
    """The largest size at which any of these arms fits; 0 for none."""
    return max((row[VARIES[kind]] for row in done(rows) if row["arm"] in arms), default=0)


def slope_kb(rows: list[dict]) -> float | None:
    """KB by which the peak grows with a token, between the two largest sizes."""
    if len(done(rows)) < 2:
        return None
    (tokens, gib), (more_tokens, more_gib) = ((r["batch"] * r["block"], r["peak_gib"]) for r in done(rows)[-2:])
    return (more_gib - gib) * 2**30 / (more_tokens - tokens) / 1000


def checkpoints_kb(row: dict) -> float:
    """KB of a token's checkpoints: each block's input, in bfloat16."""
    config, _ = situation(row)
    return 2 * config.n_embd * config.n_layer / 1000


def ratios(rows: list[dict]) -> list[dict]:
    """Speed and memory of nanocria over those of each peer at the same size; it may offload less than they."""
    found = []
    for row, peer in itertools.product(done(rows), done(rows)):
        keys = ("config", "ranks", "batch", "block", "checkpointing", "limit_gib")
        same = all(row[key] == peer[key] for key in keys) and (row["offload"] == "none") == (peer["offload"] == "none")
        if row["arm"] in WHOLE and peer["arm"] in PEERS and same:
            at = {key: row[key] for key in ("arm", "batch", "block", "checkpointing", "offload", "flags")}
            at["peer"] = peer["arm"]
            found.append(at | {key: row[key] / peer[key] for key in ("tok_per_s", "peak_gib")})
    return found


def deviations(record: dict) -> list[tuple[dict, float]]:
    """Each measured row of ours with the estimate of memory.py, as it is now, over its peak, less 1."""
    rows = {tuple(row[key] for key in PLACE): row for kind in ROWS for row in done(record[kind]) if row["arm"] in ARMS}
    return [(row, estimated_gib(row) / row["peak_gib"] - 1) for row in rows.values()]


# ----------------------------------------------------------------------------------------------------------------------
# What one sees


def labels(rows: list[dict]) -> dict[tuple, str]:
    """What each series is called: the trainer, and what differs between series of ours, or of the peers."""
    names = {}
    for row in rows:
        beside = [other for other in rows if (other["arm"] in ARMS) == (row["arm"] in ARMS)]
        differing = [key for key in ("checkpointing", "offload", "flags") if len({r[key] for r in beside}) > 1]
        said = [row[key] if key == "flags" else f"{key} {row[key]}" for key in differing if row[key]]
        names[series_of(row)] = ", ".join([TITLES[row["arm"]], *said])
    return names


HEADER = (
    f"{'trainer':<33}{'checkpoints':<13}{'offload':<11}{'batch':>6}{'tokens':>8}"
    f"{'GiB':>7}{'reserved':>10}{'estimate':>10}{'tok/s':>9}{'MFU':>7}"
)


def line(row: dict) -> str:
    """A row as one reads it while the sweep goes on: GiB is the peak of what PyTorch allocated."""
    where = f"{TITLES[row['arm']]:<33}{row['checkpointing']:<13}{row['offload']:<11}{row['batch']:>6}{row['block']:>8}"
    estimated = gib_cell(row.get("estimated_gib"))
    if "tok_per_s" not in row:
        return f"{where}{'-':>7}{'-':>10}{estimated:>10}  {step.trouble(row)}"
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
    memory = f"{gib_cell(row['peak_gib']):>7}{gib_cell(row.get('reserved_gib')):>10}{estimated:>10}"
    return f"{where}{memory}{row['tok_per_s']:9,.0f}{mfu:>7}"


def gib_cell(gib: float | None) -> str:
    return "-" if gib is None else f"{gib:.1f}"


def sweep_table(record: dict, kind: str) -> str:
    """Tokens a second and peak GiB: a row for each size, a column for each series."""
    rows, key = record[kind], VARIES[kind]
    columns, names = by_series(rows, kind), labels(rows)
    found = {name: {row[key]: row for row in of_name} for name, of_name in columns.items()}
    sizes = sorted({row[key] for row in rows})
    lines = [[f"{size:,}", *(step.cell(found[name].get(size)) for name in columns)] for size in sizes]
    return report.table([SIZE[kind], *(names[name] for name in columns)], lines)


def fits_table(record: dict, kind: str) -> str:
    """The largest size of each series, what did not fit, how it was there, and what a token more takes."""
    lines, names = [], labels(record[kind])
    for name, rows in by_series(record[kind], kind).items():
        fits, too_large = done(rows), [row[VARIES[kind]] for row in rows if row.get("oom")]
        largest = f"{fits[-1][VARIES[kind]]:,}" if fits else "none"
        speed, peak = (f"{fits[-1]['tok_per_s']:,.0f}", f"{fits[-1]['peak_gib']:.1f}") if fits else ("-", "-")
        slope = slope_kb(rows)
        out_of_memory = f"{too_large[0]:,}" if too_large else "-"
        lines.append([names[name], largest, out_of_memory, speed, peak, "-" if slope is None else f"{slope:,.0f}"])
    sizes = [f"largest {SIZE[kind]}", "out of memory at"]
    return report.table(["trainer", *sizes, "its tok/s", "its peak GiB", "KB per extra token"], lines)


def end_of(record: dict, kind: str, arm: str) -> dict | None:
    """The largest point of an arm; None where none fits."""
    return max((r for r in done(record[kind]) if r["arm"] == arm), key=lambda row: row[VARIES[kind]], default=None)


def ran_out(record: dict, kind: str, arm: str) -> bool:
    return any(row["arm"] == arm and row.get("oom") for row in record[kind])


def fits_of_both(record: dict) -> str:
    """The README's table: the largest batch and the largest context of each trainer, and how it was there."""
    kinds = [kind for kind in ROWS if record[kind]]
    lines = []
    for arm in SHOWN:
        ends = {kind: end_of(record, kind, arm) for kind in kinds}
        cells = [TITLES[arm]]
        for kind, end in ends.items():
            star = "" if ran_out(record, kind, arm) else r"\*"
            cells += [f"{end[VARIES[kind]]:,}{star}", step.cell(end)] if end else ["-", "-"]
        lines += [cells] if any(ends.values()) else []
    blocks = {"batch": "batch of {block:,} tokens", "seq": "context at batch {batch}"}
    sizes = [f"largest {blocks[kind].format(**record[kind][0])}" for kind in kinds]
    table = report.table(["trainer", *(cell for size in sizes for cell in (size, "tok/s · GiB"))], lines)
    tried = [f"{PLURAL[kind]} of {numbers(sorted({row[VARIES[kind]] for row in record[kind]}))}" for kind in kinds]
    note = f"Tried: {'; '.join(tried)}. The next size was out of memory"
    return f"{table}\n\n{note}" + (r", except at \*, the largest tried." if r"\*" in table else ".")


PLURAL = {"batch": "batches", "seq": "contexts"}


def numbers(values: list[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)


def what_was_swept(record: dict, kind: str) -> str:
    """The sentence above a table."""
    rows = record[kind]
    first = rows[0]
    at = f"sequences of {first['block']:,} tokens" if kind == "batch" else f"batch {first['batch']}"
    limit = f" held to {first['limit_gib']:g} GiB" if first["limit_gib"] else ""
    ranks = f" on {first['ranks']} GPUs (batch and peak memory of each, tok/s of all)" if first["ranks"] > 1 else ""
    checkpointing = " or ".join(dict.fromkeys(row["checkpointing"] for row in rows))
    ours, theirs = (" or ".join(dict.fromkeys(row["offload"] for row in rows if (row["arm"] in ARMS) == own))
                    for own in (True, False))  # fmt: skip
    offload = f"offload {ours}" + (f" (the others {theirs})" if theirs not in ("", ours) else "")
    return f"`{first['config']}`{ranks}{limit}, {at}, activation checkpointing {checkpointing}, {offload}"


def arithmetic(record: dict) -> str:
    """Sentences: what full checkpointing must keep, and how close the estimates are."""
    sentences = []
    full = [row for kind in ROWS for row in record[kind] if row["checkpointing"] == "full"]
    if full:
        sentences.append(f"Full checkpointing keeps {checkpoints_kb(full[0]):.0f} KB per token: each block's input.")
    off = [abs(deviation) for _, deviation in deviations(record)]
    if off:
        most = math.ceil(1000 * max(off)) / 1000  # not rounded down
        sentences.append(f"memory.py's estimate is within {most:.1%} of each of nanocria's {len(off)} peaks.")
    return " ".join(sentences)


ON_CPU = {"none": "", "optimizer": "With the optimizer in CPU memory, ",
          "all": "With weights and optimizer in CPU memory, "}  # fmt: skip


def headline(record: dict) -> str:
    """What fits, like for like: nanocria and each peer with the same kept on the CPU; then with the activations too."""
    ends = {kind: end for kind in ROWS if (end := end_of(record, kind, "all"))}
    first, device = next(iter(ends.values())), record["device"].removeprefix("1 x ")
    limit = f"{first['limit_gib']:g} GiB of GPU memory (one {device} limited to that)"
    what = {"batch": "batches of {batch:,} x {block:,} tokens", "seq": "contexts of {block:,} at batch {batch}"}
    sizes = " or ".join(what[kind].format(**row) for kind, row in ends.items())
    text = f"{ON_CPU[first['offload']]}Llama 3.2 1B trains within {limit} at {sizes}"
    ended = {}
    for peer in PEERS:
        found = {kind: largest(record[kind], kind, (peer,)) for kind in ends if ran_out(record, kind, peer)}
        if found:
            ended[TITLES[peer]] = " and ".join(f"{SIZE[kind]} {size:,}" for kind, size in found.items())
    for i, (peer, at) in enumerate(reversed(ended.items())):
        text += f"{', ' if i else '; '}{peer} {'' if i else 'ends '}at {at}"
    text += "."
    same = [ratio for ratio in ratios(record["batch"]) if ratio["arm"] == "all"]
    both = max(same, key=lambda ratio: (ratio["batch"], -ratio["peak_gib"]), default=None)
    if both:
        text += f" At batch {both['batch']:,} nanocria is {both['tok_per_s']:.2f} times as fast as "
        text += f"{TITLES[both['peer']]}, in {both['peak_gib']:.0%} of the GPU memory."
    longest = [f"{SIZE[kind]} {end[VARIES[kind]]:,}" for kind in ROWS if (end := end_of(record, kind, "long"))]
    return text + (f" With activations on the CPU too: {' or '.join(longest)}." if longest else "")


def summary(record: dict, out: Path, failed: list[dict]) -> dict:
    fits = [
        dict(zip(SERIES, name, strict=True)) | {f"largest_{kind}": largest(rows, kind, (rows[0]["arm"],))}
        for kind in ROWS
        for name, rows in by_series(record[kind], kind).items()
    ]
    off = max((abs(deviation) for _, deviation in deviations(record)), default=None)
    return {"record": str(out), "failed": failed, "largest": fits, "estimate_off": off,
            "ratios": [ratio for kind in ROWS for ratio in ratios(record[kind])]}  # fmt: skip


def read_record(path: Path) -> dict:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):  # a folder, no JSON
        record = None
    if not isinstance(record, dict) or not ROWS.keys() <= record.keys():
        sys.exit(f"{path} is no record of a sweep")
    return record


def check(names: list[str]) -> None:
    """memory.py's estimates beside the peaks of the records; ends with 1 where one is off by more than 5%."""
    paths = [Path(name) for name in names] or [
        report.ASSETS / f"{name}.json" for name in ("sweep", "study", "study_8b")
    ]
    for name in names:
        if not Path(name).exists():
            sys.exit(f"{name} does not exist")
    found = [pair for path in paths if path.exists() for pair in deviations(read_record(path))]
    if not found:
        sys.exit(f"nothing to check: there is no point of nanocria in {', '.join(path.name for path in paths)}")
    print(HEADER)
    for row, deviation in found:
        print(f"{line(row | {'estimated_gib': estimated_gib(row)})}  {deviation:+.1%}")
    worst = max(abs(deviation) for _, deviation in found)
    print(json.dumps({"points": len(found), "worst": worst, "within_5_percent": worst <= 0.05}))
    sys.exit(0 if worst <= 0.05 else 1)
