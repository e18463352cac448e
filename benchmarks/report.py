"""Records become the tables and plots of README.md and benchmarks/README.md.

What was measured stands on a page between two markers, <!-- part --> and <!-- /part -->, and is made from records by
the part's function here.
"""

import math
import re
import runpy
from functools import partial
from itertools import groupby

from benchmarks import arms, compare
from benchmarks.compare import SIZE, VARIES, done, table, values
from benchmarks.record import RECORDS, ROOT, load
from configurator import SettingError
from data.files import atomic_write

PLOTS = ROOT / "benchmarks" / "plots"
NAMES = {  # of the packages that a footer names
    "torch": "PyTorch", "triton": "Triton", "transformers": "transformers", "liger_kernel": "Liger-Kernel",
    "liger-kernel": "Liger-Kernel", "cut-cross-entropy": "cut-cross-entropy", "torchtitan": "torchtitan",
    "torchao": "torchao", "peft": "peft", "bitsandbytes": "bitsandbytes", "galore-torch": "galore-torch",
}  # fmt: skip
LIGER = {"hf-liger", "liger", "liger-8bit", "liger-galore", "peft", "peft-qlora"}
ARMS_OF = {  # which arms ran a package; every arm ran those that are not here
    "transformers": LIGER | {"hf", "hf-compiled", "hf-graphs", "hf-static", "float32"},
    "liger_kernel": LIGER,
    "peft": {"peft", "peft-qlora"},
    "bitsandbytes": {"bitsandbytes", "liger-8bit", "liger-galore", "peft-qlora"},
    "galore-torch": {"liger-galore"},
    "torchtitan": {"torchtitan"},  # the recipe is written out in peers.py
    "torchao": {"recipe-fp8"},
}


def card(r: dict) -> str:
    """The one device of a record, without the memory that some GPUs have in their name."""
    return re.sub(r"^1 x | \d+GB.*", "", r["device"])


def footer(name: str) -> str:
    """On what a record was measured, what that card reaches, and where the commands and commits are."""
    r, path = load(name), f"benchmarks/records/{name}.json"
    rows = [row for kind in r.values() if isinstance(kind, list) for row in kind]
    ran = {arm for row in rows for arm in row.get("arms", [row.get("arm")])}
    packages = [
        f"{title} {r['versions'][package].partition('+')[0]}"
        for package, title in NAMES.items()
        if package in r["versions"] and ARMS_OF.get(package, ran) & ran
    ]
    number, _, device = r["device"].rpartition(" x ")
    many = number not in ("", "1")
    measured = f"Measured on {number if many else 'one'} {device}{'s' * many} with {', '.join(packages)}"
    limits = f"; copies {r['copy_tb_s']:.2f} TB/s, matmuls {r['matmul_tflops']:.0f} TFLOP/s" if "copy_tb_s" in r else ""
    limits += f", {r['cpu_cores']} CPU cores" if "cpu_cores" in r else ""  # older records do not say
    link = f"[{path}]({path})"
    origin = f"Commands and commits: {link}" if " && " in r["command"] else f"Command: `{r['command']}`; commit: {link}"
    return f"{measured}{limits}. {origin}."


# --- Kernels and training runs ---


def kernels_table(name: str) -> str:
    """A line an operation and size, its passes beside each other; bold is where a peer is faster than ours."""
    lines = []
    for (op, size), rows in groupby(load(name)["rows"], key=lambda row: (row["op"], compare.shape(row))):
        cells = [
            (row["pass"], compare.duration(compare.median_us(row, "nanocria")), compare.percent(compare.of_limit(row)),
             lead_cell(row), f"{row['arms']['nanocria']['host_us']:.0f} us")
            for row in rows
        ]  # fmt: skip
        lines.append([f"`{op}`", size, *map(" / ".join, zip(*cells, strict=True))])
    header = ["operation", "shape", "pass", "time", "of the limit", "speed vs. the best peer", "CPU time per launch"]
    return f"{table(header, lines)}\n\n{footer(name)}"


def lead_cell(row: dict) -> str:
    ratio = compare.lead(row)
    cell = "-" if ratio is None else f"{ratio:.2f} x {compare.best_peer(row)}"
    return f"**{cell}**" if ratio and ratio < 0.995 else cell


def baby_table() -> str:
    """The baby's runs: how long, how good, beside two compressors that read the same bytes."""
    rows = []
    for r in map(load, ("baby_llama_cpu", "baby_llama_gpu")):
        bits = [f"{r[key]:.2f}" for key in ("bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte")]
        rows.append([f"`{r['command']}`", card(r), f"{r['train_seconds'] / 60:.1f}", *bits])
    return table(["command", "device", "minutes", "bits per byte", "gzip -9", "xz -9"], rows)


def linux_runs() -> dict[str, dict]:
    """The records of the model trained on Linux's source. AdamW's, whose loss the others are to reach, is the first."""
    return {name: load(name) for name in sorted(path.stem for path in RECORDS.glob("linux_114m*.json"))}


def tokens_of(r: dict, steps: int) -> int:
    s = r["settings"]
    return steps * s["batch_size"] * s["block_size"] * s["gradient_accumulation_steps"]


def reached(r: dict, loss: float) -> tuple[int, float] | None:
    """After how many tokens and minutes of training an evaluation found that loss or a lower one."""
    return next(((tokens_of(r, step), t / 60) for step, t, found in r["val_curve"] if found <= loss), None)


def linux_headline() -> str:
    """What AdamW learns how fast, and with how many tokens the quickest of the others learns as much."""
    first, *others = linux_runs().values()
    tokens = tokens_of(first, first["steps"])
    text = (
        f"- Trained to the end: a Llama of 114 million parameters on {tokens / 1e6:.0f} million tokens of the Linux "
        f"kernel's source, in {first['train_seconds'] / 60:.0f} minutes of one {card(first)} "
        f"({first['tok_per_s']:,.0f} tokens per second, {first['mfu']:.0%} MFU). Files that it has not seen take "
        f"{first['bits_per_byte']:.3f} bits per byte, with xz -9 {first['xz_bits_per_byte']:.3f}."
    )
    there = [(*at, r["settings"]["optimizer"]) for r in others if (at := reached(r, first["val_loss"]))]
    if not there:
        return text
    least, minutes, optimizer = min(there)
    return f"{text} `--optimizer={optimizer}` is there after {least / tokens:.0%} of the tokens, {minutes:.0f} minutes."


def linux_table() -> str:
    """The leaderboard: who needs the fewest minutes to AdamW's loss, then who does not reach it."""
    runs, lines = linux_runs(), []
    first = runs["linux_114m"]
    for name, r in runs.items():
        at = reached(r, first["val_loss"])
        to = [f"{at[0] / 1e6:.0f}M", f"{at[1]:.1f}"] if at else ["-", "-"]
        end = [f"{r['val_loss']:.4f}", f"{r['bits_per_byte']:.3f}"]
        link = f"[{r['versions']['nanocria']}](benchmarks/records/{name}.json)"
        cells = [f"`{r['command']}`", *to, *end, f"{r['tok_per_s']:,.0f}", card(r), link]
        lines.append((at[1] if at else math.inf, r["val_loss"], cells))
    header = ["command", f"tokens to {first['val_loss']:.4f}", "minutes", "loss at its end", "bits per byte"]
    text = table([*header, "tokens/s", "device", "commit"], [cells for *_, cells in sorted(lines)])
    others = ", ".join(f"{name} -9 {first[f'{name}_bits_per_byte']:.3f}" for name in ("gzip", "xz"))
    return f"{text}\n\nBits per byte of the same files: {others}."


def losses_part() -> str:
    runs = load("losses")["runs"]
    rows = [[arms.LOSSES[r["arm"]], *compare.loss_cells(r, runs)] for r in runs if "losses" in r]
    at = "Llama 3.2 1B, {steps} steps of {batch} x {block:,} tokens".format(**runs[0])
    means = "means over the last third of them, the distance regardless of sign"
    text = table(["trainer", "loss", "minus float32's", "distance from float32's"], rows)
    return f"{at}; {means}:\n\n{text}\n\n{footer('losses')}"


def snapshot_table() -> str:
    """GiB of each part at the peak, a column for each trainer."""
    rows = [row for row in load("snapshot")["arms"] if "peak_gib" in row]
    lines = [[part, *(f"{row['at_peak'][part]:.2f}" for row in rows)] for part in arms.SNAPSHOT_PARTS]
    lines.append(["together", *(f"{row['peak_gib']:.2f}" for row in rows)])
    return f"{table(['GiB at the peak', *(arms.SWEEP[row['arm']] for row in rows)], lines)}\n\n{footer('snapshot')}"


# --- Steps on one GPU ---


def steps_table(name: str) -> str:
    """Tokens a second and peak GiB of each arm, a row for each shape and checkpointing."""
    points = load(name)["points"]
    found = {values(point, compare.STEP_PLACE): point for point in points}
    there = [arm for arm in arms.STEP if any(point["arm"] == arm for point in points)]
    rows = []
    for where in dict.fromkeys(values(point, compare.STEP_PLACE[1:]) for point in points):
        cells = [compare.cell(found.get((arm, *where))) for arm in there]
        rows.append([f"{where[0]} x {where[1]:,}", where[2], *cells])
    text = table(["sequences x tokens", "checkpointing", *(arms.STEP[arm] for arm in there)], rows)
    return f"Tokens per second · peak GiB:\n\n{text}\n\n{footer(name)}"


def headline() -> str:
    """The largest number of tokens a second, and what torchtitan's recipe does on the same."""
    r = load("step")
    best = max((p for p in done(r["points"]) if p["arm"] == "nanocria"), key=lambda p: p["tok_per_s"])
    share = f" ({best['mfu']:.0%} MFU)" if best["mfu"] else ""  # of some cards the peak is not known
    where = list(values(best, compare.STEP_PLACE[1:]))
    found = compare.ratios(r["points"], compare.STEP_PLACE)
    ratio = next(x for x in found if x["peer"] == "recipe" and x["at"] == where)
    return (
        f"- Llama 3.2 1B trains at {best['tok_per_s']:,.0f} tokens per second{share} on one {r['device']}: "
        f"{ratio['tok_per_s']:.2f} times the speed of torchtitan's recipe, in {ratio['peak_gib']:.0%} of its memory "
        f"({best['peak_gib']:.0f} GiB)."
    )


def fp8_sentence() -> str:
    """What float8 brings, and what torchtitan's recipe does with torchao's."""
    found = {values(p, compare.STEP_PLACE): p["tok_per_s"] for p in done(load("step_fp8")["points"])}
    parts = []
    for arm, *at in found:
        if arm == "nanocria-fp8" and {("nanocria", *at), ("recipe-fp8", *at)} <= found.keys():
            fp8, bf16, peer = (found[other, *at] for other in ("nanocria-fp8", "nanocria", "recipe-fp8"))
            where = f"{'at' if parts else 'At'} {at[0]} x {at[1]:,}{'' if parts else ' tokens'}"
            beside = f"{fp8 / peer:.2f} times those of torchtitan's recipe with torchao's rowwise float8"
            parts.append(f"{where} {fp8:,.0f} tokens per second ({fp8 / bf16:.2f} times bfloat16's, {beside})")
    return "; ".join(parts) + "."


def small_model_table() -> str:
    """The steps of the small model, where a step is hundreds of launches of a few microseconds."""
    rows = [
        [arms.STEP.get(p["arm"], f"`{p['arm']}`"), f"{p['ms_per_step']:.2f}", f"{p['tok_per_s']:,.0f}"]
        for p in done(load("step")["baby"])
    ]
    return table(["trainer", "ms per step", "tok/s"], rows)


def breakdown_table() -> str:
    """Milliseconds of each part of the step and the least that it could take."""
    parts = load("step")["breakdown"]
    rows = [[r["part"], f"{r['ms']:.1f}", "" if r["floor_ms"] is None else f"{r['floor_ms']:.1f}"] for r in parts]
    total = [f"{sum(r[key] or 0.0 for r in parts):.1f}" for key in ("ms", "floor_ms")]
    at = "{batch} x {block:,} tokens, checkpointing {checkpointing}".format(**parts[0])
    above = f"Where the milliseconds of our step go ({at}), and the least each part could take"
    return f"{above}:\n\n{table(['part', 'ms', 'floor, ms'], [*rows, ['whole step', *total]])}"


# --- Several GPUs ---


def gpus_cells(row: dict, comparison: str) -> list[str]:
    if "tok_per_s" not in row:
        return ["out of memory", *["-"] * 5]
    estimated = f"{row['estimated_gib'] / row['peak_gib']:.2f}" if row.get("estimated_gib") else "-"
    speed = [f"{row['tok_per_s']:,.0f}", f"{row['tok_per_s'] / row['ranks']:,.0f}"]
    return [*speed, comparison, compare.mfu(row), f"{row['peak_gib']:.1f}", estimated]


def gpus_header(comparison: str) -> list[str]:
    return ["tok/s", "tok/s per GPU", comparison, "MFU", "peak GiB", "estimated / peak"]


def scaling_table(scaling: list[dict]) -> str:
    rows = []
    for row in sorted(scaling, key=lambda row: row["ranks"]):
        share = compare.efficiency(row, scaling) if "tok_per_s" in row else None
        title = arms.GPUS[row["arm"]]
        name = title if row["ranks"] > 1 else title.partition(",")[0]  # one is not sharded
        rows.append([name, str(row["ranks"]), *gpus_cells(row, "-" if share is None else f"{share:.3f}")])
    return table(["trainer", "GPUs", *gpus_header("scaling efficiency")], rows)


def big_table(big: list[dict]) -> str:
    rows = []
    for row in big:
        found, comparison = compare.gpus_ratios(row, big) if "tok_per_s" in row else None, "-"
        if found:
            other = f" (vs. {found['checkpointing']})" if found["checkpointing"] != row["checkpointing"] else ""
            comparison = f"{found['tok_per_s']:.3f} · {found['peak_gib']:.2f}{other}"
        where = [f"{row['batch']} x {row['block']:,}", row["checkpointing"], arms.GPUS[row["arm"]]]
        rows.append([*where, *gpus_cells(row, comparison)])
    header = ["sequences x tokens per GPU", "checkpointing", "trainer", *gpus_header("speed · memory vs. recipe")]
    return table(header, rows)


def gpus_tables(name: str = "gpus") -> str:
    """1B on one GPU and several, 8B beside the recipe, checkpoints beside the training."""
    r = load(name)
    parts = ["Llama 3.2 1B, 16 x 2,048 tokens per GPU, without checkpointing:", scaling_table(r["scaling"])]
    if r["8b"]:
        parts += [f"Llama 3.1 8B on {r['8b'][0]['ranks']} GPUs:", big_table(r["8b"])]
    for row in r["saves"]:
        at = "Llama 3.2 1B on {ranks} GPUs, {batch} x {block:,} tokens each".format(**row)
        parts.append(f"{at}: {compare.saves_sentence(row)}.")
    return "\n\n".join([*parts, footer(name)])


# --- Sweeps ---

SHOWN = ("all", "long", "liger", "hf")  # in the README
ON_CPU = {"none": "", "optimizer": "With the optimizer in CPU memory, ",
          "all": "With weights and optimizer in CPU memory, "}  # fmt: skip


def sweep_part(name: str) -> str:
    """For each sweep of a record what fits, then all points, which GitHub shows to whoever clicks on the title."""
    r, parts = load(name), []
    title = "All measurements: tokens per second · peak GiB"
    for kind in filter(r.get, compare.KINDS):
        parts += [f"{what_was_swept(r, kind)}:", fits_table(r, kind)]
        parts.append(f"<details><summary>{title}</summary>\n\n{sweep_table(r, kind)}\n\n</details>")
    return "\n\n".join([*parts, f"{footer(name)} {arithmetic(r)}".rstrip()])


def sweep_table(record: dict, kind: str) -> str:
    """Tokens a second and peak GiB: a row for each size, a column for each series."""
    columns, names, key = compare.by_series(record[kind], kind), compare.labels(record[kind]), VARIES[kind]
    found = {(name, row[key]): row for name, rows in columns.items() for row in rows}
    sizes = sorted({row[key] for row in record[kind]})
    lines = [[f"{size:,}", *(compare.cell(found.get((name, size))) for name in columns)] for size in sizes]
    return table([SIZE[kind], *(names[name] for name in columns)], lines)


def fits_table(record: dict, kind: str) -> str:
    """The largest size of each series, what did not fit, how it was there, and what a token more takes."""
    lines, names, key = [], compare.labels(record[kind]), VARIES[kind]
    for name, rows in compare.by_series(record[kind], kind).items():
        too_large = next((f"{row[key]:,}" for row in rows if row.get("oom")), "-")
        last, *numbers = ["none", "-", "-"]
        for row in done(rows)[-1:]:
            last, *numbers = f"{row[key]:,}", f"{row['tok_per_s']:,.0f}", f"{row['peak_gib']:.1f}"
        slope = slope_kb(rows)
        lines.append([names[name], last, too_large, *numbers, "-" if slope is None else f"{slope:,.0f}"])
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


def fits_of_both() -> str:
    """The README's table: the largest batch and the largest context of each trainer, and how it was there."""
    record, lines = load("study"), []
    for arm in SHOWN:
        cells = [arms.SWEEP[arm]]
        for kind in compare.KINDS:
            end, star = compare.largest(record[kind], kind, arm), "" if ran_out(record, kind, arm) else r"\*"
            cells += [f"{end[VARIES[kind]]:,}{star}", compare.cell(end)] if end else ["-", "-"]
        lines.append(cells)
    what = {"batch": "batch of {block:,} tokens", "seq": "context at batch {batch}"}
    sizes = [f"largest {what[kind].format(**record[kind][0])}" for kind in compare.KINDS]
    text = table(["trainer", *(title for size in sizes for title in (size, "tok/s · GiB"))], lines)
    tried = [", ".join(f"{n:,}" for n in sorted({r[VARIES[kind]] for r in record[kind]})) for kind in compare.KINDS]
    note = "Tried: batches of {}; contexts of {}. The next size was out of memory".format(*tried)
    return f"{text}\n\n{note}" + (r", except at \*, the largest tried." if r"\*" in text else ".")


def what_was_swept(record: dict, kind: str) -> str:
    """The sentence above a table."""
    rows, first = record[kind], record[kind][0]
    at = f"sequences of {first['block']:,} tokens" if kind == "batch" else f"batch {first['batch']}"
    limit = f" held to {first['limit_gib']:g} GiB" if first["limit_gib"] else ""
    ranks = f" on {first['ranks']} GPUs (batch and peak memory of each, tok/s of all)" if first["ranks"] > 1 else ""
    checkpointing = " or ".join(dict.fromkeys(row["checkpointing"] for row in rows))
    ours, theirs = (
        " or ".join(dict.fromkeys(row["offload"] for row in rows if (row["arm"] in arms.SWEEP_FLAGS) == own))
        for own in (True, False)
    )
    offload = f"offload {ours}" + (f" (the others {theirs})" if theirs not in ("", ours) else "")
    return f"`{first['config']}`{ranks}{limit}, {at}, activation checkpointing {checkpointing}, {offload}"


def arithmetic(record: dict) -> str:
    """What full checkpointing must keep, and how close the estimates of the measured code were."""
    full = [row for kind in compare.KINDS for row in record[kind] if row["checkpointing"] == "full"]
    text = ""
    if full:
        config = runpy.run_path(str(ROOT / full[0]["config"]))
        kb = 2 * config["n_embd"] * config["n_layer"] / 1000  # in bfloat16
        text = f"Full checkpointing keeps {kb:.0f} KB per token: each block's input. "
    rows = {values(row, compare.SWEEP_PLACE): row for kind in compare.KINDS for row in done(record[kind])}
    off = [abs(row["estimated_gib"] / row["peak_gib"] - 1) for row in rows.values() if row["arm"] in arms.SWEEP_FLAGS]
    most = math.ceil(1000 * max(off)) / 1000  # not rounded down
    return text + f"memory.py's estimate was within {most:.1%} of each of nanocria's {len(off)} peaks."


def fits_headline() -> str:
    """What fits, like for like: nanocria and each peer with the same kept on the CPU; then with the activations too."""
    record = load("study")
    ends = {kind: compare.largest(record[kind], kind, "all") for kind in compare.KINDS}
    first, device = ends["batch"], card(record)
    text = f"- {ON_CPU[first['offload']]}Llama 3.2 1B trains within {first['limit_gib']:g} GiB of GPU memory "
    text += f"(one {device} limited to that) at batches of {first['batch']:,} x {first['block']:,} tokens or "
    text += "contexts of {block:,} at batch {batch}".format(**ends["seq"])
    ended = []
    for peer in reversed(arms.SWEEP_PEERS):
        found = [(kind, compare.largest(record[kind], kind, peer)) for kind in ends if ran_out(record, kind, peer)]
        sizes = [f"{SIZE[kind]} {end[VARIES[kind]] if end else 0:,}" for kind, end in found]
        ended += [f"{arms.SWEEP[peer]} {'' if ended else 'ends '}at {' and '.join(sizes)}"] if found else []
    text += f"; {', '.join(ended)}" if ended else ""
    rows = [row for row in record["batch"] if row["arm"] in ("all", *arms.SWEEP_PEERS)]
    both = max(compare.ratios(rows, ("arm", "batch"), "all"), key=lambda x: (x["at"], -x["peak_gib"]))
    text += f". At batch {both['at'][0]:,} nanocria is {both['tok_per_s']:.2f} times as fast as "
    text += f"{arms.SWEEP[both['peer']]}, in {both['peak_gib']:.0%} of the GPU memory."
    longest = {kind: compare.largest(record[kind], kind, "long") for kind in ends}
    sizes = [f"{SIZE[kind]} {end[VARIES[kind]]:,}" for kind, end in longest.items() if end]
    return text + (f" With activations on the CPU too: {' or '.join(sizes)}." if sizes else "")


# --- Finetuning ---


def finetune_rows() -> list[dict]:
    """Of 8B with adapters: by the size of a step, of each trainer the slower settings first."""
    r = load("finetune")
    size = ("batch", "block", "arm", "tok_per_s")
    return sorted(done([*r["batch"], *r["seq"]]), key=lambda row: (row["batch"] * row["block"], *values(row, size)))


def finetune_table() -> str:
    lines = []
    for row in finetune_rows():
        settings = " ".join([row["checkpointing"], *(f"`{flag}`" for flag in row["flags"].split())])
        at = f"{row['batch']} x {row['block']:,}", arms.SWEEP[row["arm"]], settings
        lines.append([*at, *compare.cell(row).split(" · ")])
    return f"{table(['a step', 'trainer', 'checkpointing', 'tok/s', 'peak GiB'], lines)}\n\n{footer('finetune')}"


def finetune_sentence() -> str:
    """QLoRA beside the peer at each size that both have, at the fastest settings of each."""
    found, parts = {(row["batch"], row["block"], row["arm"]): row for row in finetune_rows()}, []
    for (batch, block, arm), row in found.items():
        peer = found.get((batch, block, "peft-qlora"))
        if arm == "qlora" and peer:
            ratio = compare.speed_and_memory(row, peer)["tok_per_s"]
            gib = f"{ratio:.2f} times, {row['peak_gib']:.1f} GiB beside {peer['peak_gib']:.1f}"
            parts.append(f"at {batch} x {block:,} tokens {row['tok_per_s']:,.0f} tokens per second ({gib})")
    return (
        f"QLoRA of Llama 3.1 8B within 24 GiB, beside Hugging Face + Liger + peft + bitsandbytes: {', '.join(parts)}."
    )


# --- Generation ---


def generate_table() -> str:
    lines = []
    for row in done(load("generate")["points"]):
        step = f"{row['step_ms']:.2f} ms, {row['of_copy']:.0%}" if "step_ms" in row else "-"
        lines.append([f"{row['batch']}", arms.GENERATE[row["arm"]], f"{row['tok_per_s']:,.0f}", step])
    header = ["batch", "", "tokens/s", "a step, and its share of a copy's speed"]
    return f"{table(header, lines)}\n\n{footer('generate')}"


def generate_sentence() -> str:
    r = load("generate")
    ours = {row["batch"]: row["tok_per_s"] for row in done(r["points"]) if row["arm"] == "nanocria"}
    ratios, parts = compare.ratios(r["points"], ("arm", "batch")), []
    for batch, tok_per_s in ours.items():
        beside = [f"{x['tok_per_s']:.1f} times {arms.GENERATE[x['peer']]}" for x in ratios if x["at"] == [batch]]
        parts.append(f"{tok_per_s:,.0f} at batch {batch} ({', '.join(beside)})")
    return f"Tokens per second of Llama 3.2 1B on one {card(r)}: {'; '.join(parts)}."


# --- The ladder ---


def ladder_table(r: dict) -> str:
    """A line for each rung of each model, from the lowest to the highest."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in r["points"]):
        of_model = [row for row in r["points"] if row["model"] == model]
        last = {row["rung"]: compare.last_third(row["losses"]) for row in r["losses"] if row["model"] == model}
        for rung, (title, *_) in arms.RUNGS.items():
            if any(row["rung"] == rung for row in of_model):
                lines.append([model, title, *compare.rung_cells(rung, of_model, last)])
    header = ["model", "and this", "GiB of one sequence", "CPU GiB", "largest batch", "its tok/s · GiB"]
    return table([*header, "loss (difference)"], lines)


def ladder_part() -> str:
    return f"{ladder_table(load('ladder'))}\n\n{footer('ladder')}"


def ladder_sentence() -> str:
    """The largest batch on each of our own rungs, of the smallest model."""
    r, largest = load("ladder"), {}
    for row in done(r["points"]):
        if row["model"] == "1b" and not arms.RUNGS[row["rung"]].peer:
            largest[row["rung"]] = max(row["batch"], largest.get(row["rung"], 0))
    parts = [f"{arms.RUNGS[rung].title} {largest[rung]:,}" for rung in arms.RUNGS if rung in largest]
    return (
        f"The largest batch, of 1, 2, 3, 4, 6, 8, 12, ... sequences of 1,024 tokens, of Llama 3.2 1B within 24 GiB of "
        f"one {card(r)}, each on top of the one that it extends: {'; '.join(parts)}."
    )


# --- The pages ---

PAGES = {  # page -> its parts: name -> what makes it
    "README.md": {
        "headline": headline, "fits_headline": fits_headline, "linux_headline": linux_headline, "fits": fits_of_both,
        "ladder": ladder_sentence, "fp8": fp8_sentence, "finetune": finetune_sentence, "generate": generate_sentence,
    },
    "benchmarks/README.md": {
        "small_model": small_model_table, "linux": linux_table, "baby": baby_table, "breakdown": breakdown_table,
        "snapshot": snapshot_table, "finetune": finetune_table, "generate": generate_table, "losses": losses_part,
        "ladder": ladder_part,
        "steps": partial(steps_table, "step"),
        **{name: partial(steps_table, name) for name in ("step_h100", "step_fp8")},
        **{name: partial(gpus_tables, name) for name in ("gpus", "gpus_h100")},
        **{name: partial(sweep_part, name) for name in ("study", "sweep", "study_8b")},
        **{name: partial(kernels_table, name) for name in ("kernels", "fp8_linear")},
    },
}  # fmt: skip


def render(text: str, page: str) -> str:
    """The page with each of its parts made anew."""
    marked = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)
    if wrong := set(marked.findall(text)) ^ set(PAGES[page]):
        raise SettingError(f"{page} must hold each part between <!-- PART --> and <!-- /PART -->, look at {wrong}")

    def made(match):
        part = PAGES[page][match[1]]()
        part = part.replace("benchmarks/records/", "records/") if "/" in page else part  # links from its folder
        return f"<!-- {match[1]} -->\n{part}\n<!-- /{match[1]} -->"

    return marked.sub(made, text)


def write_pages() -> None:
    """Writes the tables of all pages, or of none, and draws the plots."""
    from benchmarks import draw

    pages = {page: render((ROOT / page).read_text(), page) for page in PAGES}
    for page, text in pages.items():
        with atomic_write(ROOT / page) as file:  # who reads the page meanwhile finds it whole
            file.write(text.encode())
    draw.draw_baby(PLOTS / "baby_llama.png")
    draw.draw_linux(linux_runs(), PLOTS / "linux_114m.png")
    for plot, (name, draw_plot) in draw.PLOTS.items():
        draw_plot(load(name), PLOTS / f"{plot}.png")
