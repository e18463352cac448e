"""Render records into the tables and plots of README.md and benchmarks/README.md.

A page marks each generated part, <!-- part --> ... <!-- /part -->; a function here makes it from a record.
"""

import math
import re
import runpy
from collections.abc import Callable
from functools import partial
from itertools import groupby

from benchmarks import arms, compare
from benchmarks.compare import GPUS_PLACE, SIZE, STEP_PLACE, VARIES, by_place, done, speed_and_memory, table, values
from benchmarks.record import ROOT, load
from configurator import SettingError
from data.files import atomic_write

PLOTS = ROOT / "benchmarks" / "plots"
TITLES = {"torch": "PyTorch", "triton": "Triton", "liger_kernel": "Liger-Kernel"}  # of packages, if not their names
AT = "{batch} x {block:,}"
LINK = "[{versions[nanocria]}](benchmarks/records/{name}.json)"  # from a commit to the record


def card(r: dict) -> str:
    """A record's single device, without the memory size that some GPUs have in their name."""
    return re.sub(r"^1 x | \d+GB.*", "", r["device"])


def footer(r: dict) -> str:
    """What a record was measured on, what that card reaches, and where to find the commands and commits."""
    path = f"benchmarks/records/{r['name']}.json"
    rows = [row for kind in r.values() if isinstance(kind, list) for row in kind]
    ran = arms.packages_of({arm for row in rows for arm in row.get("arms", [row.get("arm")])})
    packages = [
        f"{TITLES.get(package, package)} {r['versions'][package].partition('+')[0]}"
        for package in ("torch", "triton", *ran)
        if package in r["versions"]
    ]
    number, _, device = r["device"].rpartition(" x ")
    device = f"one {device}" if number in ("", "1") else f"{number} {device}s"
    commands = "Commands and commits" if " && " in r["command"] else f"Command: `{r['command']}`; commit"
    return f"Measured on {device} with {', '.join(packages)}{limits(r)}. {commands}: [{path}]({path})."


def limits(r: dict) -> str:
    """What a record's device reaches, as far as the record says."""
    forms = {"copy_tb_s": "copies {:.2f} TB/s", "matmul_tflops": "matmuls {:.0f} TFLOP/s", "cpu_cores": "{} CPU cores"}
    found = ", ".join(form.format(r[name]) for name, form in forms.items() if name in r)
    return f"; {found}" if found else ""


# --- Kernels and training runs ---


def kernels_table(r: dict) -> str:
    """A line for each operation and size, its passes side by side; bold where a peer is faster than ours."""
    lines = []
    for (op, size), rows in groupby(r["rows"], key=lambda row: (row["op"], compare.shape(row))):
        cells = [
            (row["pass"], compare.duration(compare.times(row).get("nanocria")), compare.percent(compare.of_limit(row)),
             lead_cell(row), compare.cell("{arms[nanocria][host_us]:.0f} us", row))
            for row in rows
        ]  # fmt: skip
        lines.append([f"`{op}`", size, *map(" / ".join, zip(*cells, strict=True))])
    header = ["operation", "shape", "pass", "time", "of the limit", "speed vs. the best peer", "CPU time per launch"]
    return compare.markdown(header, lines)


def lead_cell(row: dict) -> str:
    if (lead := compare.lead(row)) is None:
        return "-"
    return "**{:.2f} x {}**".format(*lead) if lead[0] < 0.995 else "{:.2f} x {}".format(*lead)


def baby_table(runs: list[dict]) -> str:
    """Training time and result, and those of two compressors of the same bytes."""
    header = "command | device | minutes | bits per byte | gzip -9 | xz -9"
    bits = "{bits_per_byte:.2f} | {gzip_bits_per_byte:.2f} | {xz_bits_per_byte:.2f}"
    rows = [r | {"card": card(r), "minutes": r["train_seconds"] / 60} for r in runs]
    return table(header, f"`{{command}}` | {{card}} | {{minutes:.1f}} | {bits}", rows)


def linux_headline(r: dict) -> str:
    millions = compare.tokens_of(r, r["steps"]) / 1e6
    return (
        "- Trained from scratch to the end: a 114M-parameter Llama on {millions:.0f} million tokens of the Linux "
        "kernel's source, in {minutes:.0f} minutes on one {card} ({tok_per_s:,.0f} tokens per second, {mfu:.0%} MFU). "
        "It needs {bits_per_byte:.3f} bits per byte for held-out files; xz -9 needs {xz_bits_per_byte:.3f}."
    ).format(**r, millions=millions, minutes=r["train_seconds"] / 60, card=card(r))


def linux_table(runs: list[dict]) -> str:
    """The leaderboard: by minutes to reach the loss of the first record, AdamW's; then those that do not reach it."""
    first, rows = runs[0], []
    for r in runs:
        row, reached = r | {"card": card(r)}, [point for point in r["val_curve"] if point[-1] <= first["val_loss"]]
        if reached:
            step, seconds, _ = reached[0]
            row |= {"millions": compare.tokens_of(r, step) / 1e6, "minutes": seconds / 60}
        rows.append(row)
    rows.sort(key=lambda r: (r.get("minutes", math.inf), r["val_loss"]))
    header = f"command | tokens to {first['val_loss']:.4f} | minutes | loss at its end | bits per byte | tokens/s"
    line = "`{command}` | {millions:.0f}M | {minutes:.1f} | {val_loss:.4f} | {bits_per_byte:.3f} | {tok_per_s:,.0f}"
    others = ", ".join(f"{name} -9 {first[f'{name}_bits_per_byte']:.3f}" for name in ("gzip", "xz"))
    found = table(f"{header} | device | commit", f"{line} | {{card}} | {LINK}", rows)
    return f"{found}\n\nBits per byte of the same files: {others}."


def optimizer_bits_table(runs: list[dict]) -> str:
    """AdamW's moments in 32 bits and in 8, pair by pair."""
    line = f"`{{command}}` | {{card}} | {{tok_per_s:,.0f}} | {{peak_gib:.1f}} | {{val_loss:.4f}} | {LINK}"
    rows = [r | {"card": card(r)} for r in runs]
    return table("command | device | tokens/s | GiB per GPU | validation loss | commit", line, rows)


def losses_table(r: dict) -> str:
    """The mean loss over the last third of the steps; its mean and mean absolute difference from float32's there."""
    rows = []
    for row in compare.named((row for row in r["runs"] if "losses" in row), arms.LOSSES):
        row["loss"] = compare.last_third(row["losses"])
        if found := compare.differences(row, r["runs"]):
            row |= {"mean": compare.last_third(found), "size": compare.last_third(map(abs, found))}
        rows.append(row)
    header = "trainer | loss | minus float32's | distance from float32's"
    at = "Llama 3.2 1B, {steps} steps of {batch} x {block:,} tokens".format(**r["runs"][0])
    means = "means over the last third of them, the distance regardless of sign"
    return f"{at}; {means}:\n\n{table(header, '{trainer} | {loss:.4f} | {mean:+.4f} | {size:.4f}', rows)}"


def finetune_losses_table(r: dict) -> str:
    """A table for each number of steps: runs that train all weights are shorter than those of adapters."""
    tables, runs = [], compare.named((row for row in r["runs"] if "losses" in row), arms.FINETUNE)
    for n in sorted({row["steps"] for row in runs}):
        rows = [row for row in runs if row["steps"] == n]
        header = ["trainer", "training", *(f"validation, {step}" for step, _ in rows[0]["val"])]
        losses = ([compare.last_third(row["losses"]), *(loss for _, loss in row["val"])] for row in rows)
        lines = [[row["trainer"], *map("{:.4f}".format, found)] for row, found in zip(rows, losses, strict=True)]
        title = "{steps} steps of {batch} x {block:,} packed tokens, learning rate {rate:g}".format(**rows[0])
        tables.append(f"{title}; training: the mean over the last third:\n\n{compare.markdown(header, lines)}")
    return "\n\n".join(tables)


def packing_sentence(r: dict) -> str:
    speeds = [row["targets_per_s"] for row in r["packing"] if "targets_per_s" in row]
    if len(speeds) < 2:
        return ""
    packed, padded = speeds
    return (
        f"Packed: {packed:,.0f} target tokens per second. Padded to the longest, in micro-batches of as many tokens: "
        f"{padded:,.0f}. Packing is {packed / padded:.1f} times as fast."
    )


def sft_sentence(r: dict) -> str:
    loss = {row["arm"]: row["val"][-1][1] for row in r["runs"]}
    packed, padded = (row["targets_per_s"] for row in r["packing"])
    return (
        "SmolLM2-135M-Instruct after {steps} steps, against transformers on the same conversations: validation loss "
        "{nanocria-float32:.4f} vs. {hf-float32:.4f} in float32, {nanocria:.4f} vs. {hf:.4f} in bfloat16. Packed "
        "batches train on {ratio:.1f} times as many target tokens per second as padded ones."
    ).format(**loss, steps=r["runs"][0]["steps"], ratio=packed / padded)


def snapshot_table(r: dict) -> str:
    """GiB of each part at the peak, with a column for each trainer."""
    rows = [row for row in r["arms"] if "peak_gib" in row]
    lines = [[part, *(f"{row['at_peak'][part]:.2f}" for row in rows)] for part in arms.SNAPSHOT_PARTS]
    lines.append(["together", *(f"{row['peak_gib']:.2f}" for row in rows)])
    return compare.markdown(["GiB at the peak", *(arms.SWEEP[row["arm"]] for row in rows)], lines)


# --- Steps on one GPU ---


def steps_table(r: dict) -> str:
    """Tokens per second and peak GiB of each arm, with a row for each shape and checkpointing."""
    there, points = {point["arm"] for point in r["points"]}, compare.named(r["points"], arms.STEP)
    trainers = [title for arm, title in arms.STEP.items() if arm in there]
    header, line = "sequences x tokens | checkpointing", f"{AT} | {{checkpointing}}"
    return f"Tokens per second · peak GiB:\n\n{compare.side_by_side(points, header, line, trainers)}"


def headline(r: dict) -> str:
    """The most tokens per second, and what torchtitan's recipe reaches at the same place."""
    best = max((p for p in done(r["points"]) if p["arm"] == "nanocria"), key=lambda p: p["tok_per_s"])
    ratio = compare.ratio(best, by_place(r["points"], STEP_PLACE)["recipe", *values(best, STEP_PLACE[1:])])
    return (
        "- Llama 3.2 1B trains at {tok_per_s:,.0f} tokens per second ({mfu:.0%} MFU) on one {card}: "
        "{ratio[tok_per_s]:.2f} times as fast as torchtitan's recipe, in {ratio[peak_gib]:.0%} of its memory "
        "({peak_gib:.0f} GiB)."
    ).format(**best, ratio=ratio, card=card(r))


def fp8_sentence(r: dict) -> str:
    """What float8 gains, and what torchtitan's recipe reaches with torchao's."""
    found, parts = by_place(r["points"], STEP_PLACE), []
    for (arm, *at), row in found.items():
        others = [found.get((other, *at)) for other in ("nanocria", "recipe-fp8")]
        if arm == "nanocria-fp8" and "none" in at and all(others):
            bf16, peer = (compare.ratio(row, other)["tok_per_s"] for other in others)
            where = f"{'at' if parts else 'At'} {AT}{'' if parts else ' tokens'}".format(**row)
            beside = f"{peer:.2f} times torchtitan's recipe with torchao's rowwise float8"
            parts.append(f"{where} {row['tok_per_s']:,.0f} tokens per second ({bf16:.2f} times bfloat16, {beside})")
    return "; ".join(parts) + "."


def small_model_table(r: dict) -> str:
    """The steps of the small model: each is hundreds of kernels of a few microseconds."""
    rows = compare.named(done(r["baby"]), arms.STEP)
    return table("trainer | ms per step | tok/s", "{trainer} | {ms_per_step:.2f} | {tok_per_s:,.0f}", rows)


def breakdown_table(r: dict) -> str:
    """Milliseconds of each part of the step, and the minimum that it could take."""
    parts = [row for row in r["breakdown"] if "ms" in row]
    total = {"part": "whole step"} | {key: sum(row[key] or 0.0 for row in parts) for key in ("ms", "floor_ms")}
    rows = [row | {"floor": "" if row["floor_ms"] is None else f"{row['floor_ms']:.1f}"} for row in [*parts, total]]
    at = "{batch} x {block:,} tokens, checkpointing {checkpointing}".format(**parts[0])
    above = f"Where the milliseconds of a nanocria step go ({at}), and the least each part could take"
    return f"{above}:\n\n{table('part | ms | floor, ms', '{part} | {ms:.1f} | {floor}', rows)}"


# --- Several GPUs ---


EACH_GPU = "MFU | peak GiB | estimated / peak", "{mfu:.1%} | {peak_gib:.1f} | {accuracy:.2f}"


def of_each_gpu(rows: list[dict]) -> list[dict]:
    """The rows, named, with the columns that a table derives from the measurements."""
    rows = [row | {"speed": "out of memory"} for row in compare.named(rows, arms.GPUS)]
    for row in done(rows):
        row |= {"speed": f"{row['tok_per_s']:,.0f}", "each": row["tok_per_s"] / row["ranks"]}
        row |= {"accuracy": row["estimated_gib"] / row["peak_gib"]} if row.get("estimated_gib") else {}
    return rows


def scaling_table(r: dict) -> str:
    """Tokens per second over those of the same trainer on one GPU times the number of GPUs."""
    rows = of_each_gpu(sorted(r["scaling"], key=lambda row: row["ranks"]))
    alone = {row["arm"]: row["tok_per_s"] for row in done(rows) if row["ranks"] == 1}
    for row in rows:
        one = alone.get(row["arm"].partition("-")[0])
        row |= {"efficiency": row["each"] / one} if one and "each" in row else {}
        row["trainer"] = row["trainer"].partition("," if row["ranks"] == 1 else "\n")[0]  # one GPU is not sharded
    header = f"trainer | GPUs | tok/s | tok/s per GPU | scaling efficiency | {EACH_GPU[0]}"
    line = f"{{trainer}} | {{ranks}} | {{speed}} | {{each:,.0f}} | {{efficiency:.3f}} | {EACH_GPU[1]}"
    return f"Llama 3.2 1B, 16 x 2,048 tokens per GPU, without checkpointing:\n\n{table(header, line, rows)}"


def big_table(r: dict) -> str:
    """nanocria's speed and memory over those of torchtitan's recipe, sharded alike, at the same place.

    Selective checkpointing is compared with the recipe's full one if its selective was not measured.
    """
    rows = of_each_gpu(r["8b"])
    found = by_place(rows, GPUS_PLACE)
    for (arm, *where, how), row in found.items():
        peers = [found.get((arm.replace("nanocria", "recipe"), *where, theirs)) for theirs in (how, "full")]
        peer = peers[0] or (peers[1] if how == "selective" else None)
        if peer and peer["arm"] != arm:
            ratio = compare.ratio(row, peer)
            row["beside"] = f"{ratio['tok_per_s']:.3f} · {ratio['peak_gib']:.2f}{'' if peers[0] else ' (vs. full)'}"
    header = "sequences x tokens per GPU | checkpointing | trainer | tok/s | tok/s per GPU | speed · memory vs. recipe"
    line = f"{AT} | {{checkpointing}} | {{trainer}} | {{speed}} | {{each:,.0f}} | {{beside}}"
    text = table(f"{header} | {EACH_GPU[0]}", f"{line} | {EACH_GPU[1]}", rows)
    return f"Llama 3.1 8B on {rows[0]['ranks']} GPUs:\n\n{text}"


def optimizers_table(r: dict) -> str:
    """A step's time, and its ratio to AdamW's on as many GPUs."""
    rows = compare.named(done(r["optimizers"]), arms.GPUS)
    adamw = {row["ranks"]: row["ms_per_step"] for row in rows if row["arm"] == "nanocria-adamw"}
    for row in rows:
        row |= {"times": row["ms_per_step"] / adamw[row["ranks"]]} if row["ranks"] in adamw else {}
    line = "{trainer} | {ranks} | {ms_per_step:,.0f} | {times:.3f} | {peak_gib:.1f}"
    found = table("optimizer | GPUs | ms per step | over AdamW's | peak GiB", line, rows)
    return f"`config/linux_114m.py`, steps of 8 x {AT} tokens:\n\n{found}".format(**rows[0])


def saves_sentences(r: dict) -> str:
    text = (
        "Llama 3.2 1B on {ranks} GPUs, {batch} x {block:,} tokens each: a checkpoint of {gb:.1f} GB every {every} "
        "steps {costs} ({walls[0]:.1f} s without, {walls[1]:.1f} s with); {resume}."
    )
    sentences = []
    for row in (row for row in r["saves"] if "cost" in row):
        walls = [row[key] / row["intervals"] for key in ("seconds_without", "seconds_with")]
        costs = "adds no measurable time" if row["cost"] < 0 else f"adds {row['cost']:.1%} to the training time"
        resume = "it was not resumed"
        if row["resume_seconds"] is not None:
            resume = f"a resume reads it in {row['resume_seconds']:.1f} s"
        sentences.append(text.format(**row, gb=row["checkpoint_bytes"] / 1e9, walls=walls, costs=costs, resume=resume))
    return "\n\n".join(sentences)


def save_memory_sentences(r: dict) -> str:
    text = (
        "Llama 3.1 8B with `--offload=all` takes {cpu_gib:.1f} GiB of CPU memory, {saved_cpu_gib:.1f} while a "
        "checkpoint of {gb:.0f} GB is written and {resumed_cpu_gib:.1f} after a resume. Writing takes "
        "{save_seconds:.0f} s, reading {resume_seconds:.0f} s."
    )
    rows = (row for row in r["memory"] if row.get("resume_seconds"))
    return "\n\n".join(text.format(**row, gb=row["checkpoint_bytes"] / 1e9) for row in rows)


# --- Sweeps ---


def sweep_tables(r: dict) -> str:
    """For each sweep of a record, what fits, then all points, folded under their title on GitHub."""
    parts = []
    for kind in filter(r.get, compare.KINDS):
        series = compare.by_series(r, kind)
        rows = sorted((row for rows in series.values() for row in rows), key=lambda row: row[VARIES[kind]])
        points = compare.side_by_side(rows, SIZE[kind], f"{{{VARIES[kind]}:,}}", series)
        summary = "<summary>All measurements: tokens per second · peak GiB</summary>"
        parts += [fits_table(r, kind), f"<details>{summary}\n\n{points}\n\n</details>"]
    return "\n\n".join([*parts, footer(r) + arithmetic(r)])


def fits_table(r: dict, kind: str) -> str:
    """The largest size of each series, what did not fit, speed and memory at the largest, and bytes per extra token."""
    rows, size = [], VARIES[kind]
    for series in compare.by_series(r, kind).values():
        fits, too_large = done(series), [row[size] for row in series if row.get("oom")]
        row = {"largest": f"{fits[-1][size]:,}"} | fits[-1] if fits else {"largest": "none", **series[0]}
        row |= {"too_large": min(too_large)} if too_large else {}
        if len(fits) > 1:  # between the two largest
            (tokens, gib), (more_tokens, more_gib) = ((r["batch"] * r["block"], r["peak_gib"]) for r in fits[-2:])
            row["slope_kb"] = (more_gib - gib) * 2**30 / (more_tokens - tokens) / 1000
        rows.append(row)
    header = f"trainer | largest {SIZE[kind]} | out of memory at | its tok/s | its peak GiB | KB per extra token"
    line = "{trainer} | {largest} | {too_large:,} | {tok_per_s:,.0f} | {peak_gib:.1f} | {slope_kb:,.0f}"
    return f"{what_was_swept(r[kind], kind)}:\n\n{table(header, line, rows)}"


def what_was_swept(rows: list[dict], kind: str) -> str:
    first = rows[0]
    fixed = " or ".join(f"{n:,}" for n in sorted({row[compare.FIXED[kind]] for row in rows}))
    at = f"sequences of {fixed} tokens" if kind == "batch" else f"batch {fixed}"
    limit = f" held to {first['limit_gib']:g} GiB" if first["limit_gib"] else ""
    ranks = f" on {first['ranks']} GPUs (batch and peak memory of each, tok/s of all)" if first["ranks"] > 1 else ""
    checkpointing, offload = (" or ".join(dict.fromkeys(r[key] for r in rows)) for key in ("checkpointing", "offload"))
    return f"`{first['config']}`{ranks}{limit}, {at}, activation checkpointing {checkpointing}, offload {offload}"


def arithmetic(r: dict) -> str:
    """What full checkpointing must keep, and how close the estimates of the measured code were."""
    points = [row for kind in compare.KINDS for row in r[kind]]
    text = ""
    if full := [row for row in points if row["checkpointing"] == "full"]:
        config = runpy.run_path(str(ROOT / full[0]["config"]))
        kb = 2 * config["n_embd"] * config["n_layer"] / 1000  # in bfloat16
        text = f" Full checkpointing keeps {kb:.0f} KB per token: each block's input."
    ours = by_place((row for row in points if row["arm"] in arms.SWEEP_FLAGS), compare.SWEEP_PLACE).values()
    most = max(abs(row["estimated_gib"] / row["peak_gib"] - 1) for row in ours)
    most = math.ceil(1000 * most) / 1000  # not rounded down
    return f"{text} memory.py's estimate was within {most:.1%} of each of nanocria's {len(ours)} peaks."


def fits_headline(r: dict) -> str:
    """What fits: nanocria and each peer with the same state on the CPU, and nanocria with its activations there too."""
    found = by_place(r["batch"], ("batch", "arm"))
    largest = {arm: found[batch, arm] for batch, arm in sorted(found)}
    ours, long, liger, hf = (largest[arm] for arm in arms.SHOWN)
    ratio = compare.ratio(found[liger["batch"], "all"], liger)
    return (
        "- In {limit_gib:g} GiB of GPU memory (one {card} limited to that), with weights and optimizer offloaded to "
        "the CPU, Llama 3.2 1B trains at batch {batch:,} x {block:,} tokens, and at {long[batch]:,} with activations "
        "offloaded too. Hugging Face + Liger fits {liger[batch]:,}, Hugging Face {hf[batch]:,}. At batch "
        "{liger[batch]:,} nanocria is {ratio[tok_per_s]:.2f} times as fast as Hugging Face + Liger and uses "
        "{ratio[peak_gib]:.0%} of its GPU memory."
    ).format(**ours, long=long, liger=liger, hf=hf, ratio=ratio, card=card(r))


# --- Finetuning, generation, the ladder ---


def finetune_rows(r: dict) -> list[dict]:
    """8B with adapters: by the size of a step, each trainer's slower settings first."""
    size = ("batch", "block", "arm", "tok_per_s")
    return sorted(done([*r["batch"], *r["seq"]]), key=lambda row: (row["batch"] * row["block"], *values(row, size)))


def finetune_table(r: dict) -> str:
    rows = compare.named(finetune_rows(r), arms.SWEEP)
    for row in rows:
        row["settings"] = " ".join([row["checkpointing"], *(f"`{flag}`" for flag in row["flags"].split())])
    line = f"{AT} | {{trainer}} | {{settings}} | {{tok_per_s:,.0f}} | {{peak_gib:.1f}}"
    return table("a step | trainer | checkpointing | tok/s | peak GiB", line, rows)


def qlora_table(r: dict) -> str:
    """QLoRA in float8 and in bfloat16 beside the peer, at each size and at each one's fastest settings."""
    found, rows = by_place(finetune_rows(r), ("arm", "batch", "block")), []
    for (arm, *at), row in found.items():
        if arm == "qlora-fp8" and (peer := found.get(("peft-qlora", *at))):  # their 131,072 tokens do not fit
            fp8, bf16 = (compare.ratio(ours, peer)["tok_per_s"] for ours in (row, found["qlora", *at]))
            rows.append(row | {"fp8": fp8, "bf16": bf16, "peer_gib": peer["peak_gib"]})
    header = "tokens per step | tok/s with `--fp8=true` | speedup | speedup without float8 | GiB | theirs"
    line = f"{AT} | {{tok_per_s:,.0f}} | {{fp8:.2f}} | {{bf16:.2f}} | {{peak_gib:.1f}} | {{peer_gib:.1f}}"
    peer = "Hugging Face + Liger + peft + bitsandbytes"
    return f"QLoRA of Llama 3.1 8B in 24 GiB, against {peer}:\n\n{table(header, line, rows)}"


def generate_table(r: dict) -> str:
    line = "{batch} | {trainer} | {tok_per_s:,.0f} | {step_ms:.2f} ms, {of_copy:.0%}"
    rows = compare.named(done(r["points"]), arms.GENERATE)
    return table("batch |  | tokens/s | a step, and its share of a copy's speed", line, rows)


def generate_sentence(r: dict) -> str:
    found, parts = by_place(r["points"], ("arm", "batch")), []
    for (arm, batch), row in found.items():
        if arm == "nanocria":
            plain, static = (compare.ratio(row, found[peer, batch])["tok_per_s"] for peer in ("hf", "hf-static"))
            beside = f"{plain:.1f} times transformers.generate, {static:.1f} times its compiled static cache"
            parts.append(f"{row['tok_per_s']:,.0f} at batch {batch} ({beside})")
    return f"Tokens per second of Llama 3.2 1B on one {card(r)}: {'; '.join(parts)}."


def ladder_table(r: dict) -> str:
    """For each model and rung: the memory of one sequence; the largest batch, its speed and memory; the loss, and its
    difference from the loss of the rung that this one builds on."""
    rows = []
    for model, rungs in compare.by_rung(r["points"]).items():
        trained = (row for row in r["losses"] if row["model"] == model and "losses" in row)
        losses = {row["rung"]: compare.last_third(row["losses"]) for row in trained}
        for rung, fits in rungs.items():
            title, on, *_ = arms.RUNGS[rung]
            row = fits[-1] | {"best": speed_and_memory(fits[-1])} if fits else {}
            alone = [f"{fit['peak_gib']:.1f}" for fit in fits if fit["batch"] == 1]
            row |= {"model": model, "title": title, "one": alone[0] if alone else "out of memory"}
            if rung in losses:
                row["loss"] = f"{losses[rung]:.4f}" + (f" ({losses[rung] - losses[on]:+.4f})" if on in losses else "")
            rows.append(row)
    header = "model | and this | GiB of one sequence | largest batch | its tok/s · GiB | CPU GiB | loss (difference)"
    return table(header, "{model} | {title} | {one} | {batch} | {best} | {cpu_gib:.0f} | {loss}", rows)


def whole_8b_sentence(r: dict) -> str:
    best = compare.by_rung(r["points"])["8b"]["offload_all"][-1]
    return (
        "All of Llama 3.1 8B trains in 24 GiB of one {card} and about {cpu_gib:.0f} GiB of CPU memory, at "
        "{tok_per_s:,.0f} tokens per second ({batch} x 1,024 tokens per step): `--offload=all --optimizer_bits=8 "
        "--batch_size={batch} --block_size=1024 --activation_checkpointing=full --gradient_accumulation_steps=1`."
    ).format(**best, card=card(r))


def drive_sentence(r: dict) -> str:
    one, *_, best = compare.by_rung(r["points"])["8b"]["nvme"]
    return (
        "Llama 3.1 8B with its 8-bit optimizer on the drive: {tok_per_s:,.0f} tokens per second at {batch} x 1,024 "
        "tokens per step, in {peak_gib:.1f} GiB of GPU memory. A step of one sequence takes {seconds:.0f} s and pins "
        "{one[cpu_gib]:.0f} GiB of CPU memory (by memory.py); the process peaked at {one[used_cpu_gib]:.0f}."
    ).format(**best, one=one, seconds=one["ms_per_step"] / 1000)


def disk_table(r: dict) -> str:
    """An update through a drive against plain reads and writes; bytes both read and written."""
    rows = [row | {"of": f"{row['config']} {row['flags']}".strip(), "gb": row["bytes"] / 1e9} for row in r["drives"]]
    line = "`{of}` | {gb:.1f} | {update_gb_per_s:.2f} | {plain_gb_per_s:.2f} | {plain_threads} | {ratio:.2f}"
    return table("an update of | GB | GB/s | plain GB/s | its threads | ratio", line, rows)


# --- The pages ---

TABLES = {  # a word of the command -> kind of rows -> the function that makes their table
    "kernels": {"rows": kernels_table},
    "step": {"points": steps_table, "breakdown": breakdown_table, "baby": small_model_table},
    "gpus": {"scaling": scaling_table, "8b": big_table, "optimizers": optimizers_table, "saves": saves_sentences,
             "memory": save_memory_sentences},
    "sweep": {kind: partial(fits_table, kind=kind) for kind in compare.KINDS},
    "--preset=finetune": {"batch": finetune_table},
    "finetune": {"runs": finetune_losses_table, "packing": packing_sentence},
    "ladder": {"points": ladder_table},
    "losses": {"runs": losses_table},
    "snapshot": {"arms": snapshot_table},
    "generate": {"points": generate_table},
    "disk": {"drives": disk_table},
}  # fmt: skip


def tables(r: dict) -> str:
    """The tables of a record: its command prints them, and pages show them."""
    makes = TABLES[next((word for word in r["command"].split() if word in TABLES), "sweep")].items()
    made = (make(r) for kind, make in makes if any(not row.get("oom") for row in r.get(kind, [])))
    return "\n\n".join(filter(None, made))


def measured(r: dict, make: Callable[[dict], str] = tables) -> str:
    """A part of a page: what `make` makes of a record, and where the record comes from."""
    return f"{make(r)}\n\n{footer(r)}"


PAGES = {  # page -> its parts: name -> the function that makes it, and its record or records
    "README.md": {
        "headline": (headline, "step"), "fits_headline": (fits_headline, "study"),
        "linux_headline": (linux_headline, "linux_114m"), "whole_8b": (whole_8b_sentence, "ladder"),
        "fp8": (fp8_sentence, "step"), "sft": (sft_sentence, "finetune_losses"),
        "finetune": (qlora_table, "finetune"), "generate": (generate_sentence, "generate"),
    },
    "benchmarks/README.md": {
        "linux": (linux_table, "linux_114m*"), "baby": (baby_table, "baby_llama*"),
        "optimizer_bits": (optimizer_bits_table, "llama_114m*"), "steps": (partial(measured, make=steps_table), "step"),
        "small_model": (small_model_table, "step"), "breakdown": (breakdown_table, "step"),
        "drive_8b": (drive_sentence, "ladder"),
        **{name: (sweep_tables, name) for name in ("study", "sweep", "study_8b")},
        **{name: (measured, name) for name in (
            "step_h100", "snapshot", "losses", "ladder", "gpus", "gpus_two", "gpus_saves", "gpus_memory",
            "gpus_optimizers", "disk", "kernels", "fp8_linear", "adamw_nf4", "generate", "generate_cpu", "finetune",
            "finetune_losses",
        )},
    },
}  # fmt: skip


def render(text: str, page: str) -> str:
    """The page with each of its parts rendered again."""
    marked = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)
    if wrong := set(marked.findall(text)) ^ set(PAGES[page]):
        raise SettingError(f"{page} must hold each part between <!-- PART --> and <!-- /PART -->, look at {wrong}")

    def made(match):
        make, name = PAGES[page][match[1]]
        part = make(load(name))
        part = part.replace("benchmarks/records/", "records/") if "/" in page else part  # links from its folder
        return f"<!-- {match[1]} -->\n{part}\n<!-- /{match[1]} -->"

    return marked.sub(made, text)


def write_pages() -> None:
    """Write the tables of all pages, or of none, and draw the plots."""
    from benchmarks import draw

    pages = {page: render((ROOT / page).read_text(), page) for page in PAGES}
    for plot, (name, draw_plot) in draw.PLOTS.items():
        draw_plot(load(name), PLOTS / f"{plot}.png")
    for page, text in pages.items():
        with atomic_write(ROOT / page) as file:  # a reader never sees half a page
            file.write(text.encode())
