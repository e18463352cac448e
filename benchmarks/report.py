"""Records become the tables and plots of README.md and benchmarks/README.md.

What was measured stands on a page between two markers, <!-- part --> and <!-- /part -->, and is made from records by
the part's function here.
"""

import re
from functools import partial
from itertools import groupby

from benchmarks import arms, compare, sweep_report
from benchmarks.compare import done, table, values
from benchmarks.record import ROOT, exists, load

PLOTS = ROOT / "benchmarks" / "plots"
NAMES = {  # of the packages that a footer names
    "torch": "PyTorch", "triton": "Triton", "transformers": "transformers", "liger_kernel": "Liger-Kernel",
    "liger-kernel": "Liger-Kernel", "cut-cross-entropy": "cut-cross-entropy", "torchtitan": "torchtitan",
    "torchao": "torchao",
}  # fmt: skip
ARMS_OF = {  # which arms ran a package; every arm ran those that are not here
    "transformers": {"hf", "hf-compiled", "hf-liger", "liger", "float32"},
    "liger_kernel": {"hf-liger", "liger"},
    "torchtitan": {"torchtitan"},  # the recipe is written out in peers.py
    "torchao": {"recipe-fp8"},
}


def footer(name: str) -> str:
    """On what a record was measured, what that card reaches, and where the commands and commits are."""
    r, path = load(name), f"benchmarks/records/{name}.json"
    ran = {row.get("arm") for rows in r.values() if isinstance(rows, list) for row in rows}
    packages = [
        f"{title} {r['versions'][package].partition('+')[0]}"
        for package, title in NAMES.items()
        if package in r["versions"] and ARMS_OF.get(package, ran) & ran
    ]
    number, _, device = r["device"].rpartition(" x ")
    many = number not in ("", "1")
    measured = f"Measured on {number if many else 'one'} {device}{'s' * many} with {', '.join(packages)}"
    limits = f"; copies {r['copy_tb_s']:.2f} TB/s, matmuls {r['matmul_tflops']:.0f} TFLOP/s" if "copy_tb_s" in r else ""
    link = f"[{path}]({path})"
    origin = f"Commands and commits: {link}" if " && " in r["command"] else f"Command: `{r['command']}`; commit: {link}"
    return f"{measured}{limits}. {origin}."


# ----------------------------------------------------------------------------------------------------------------------
# Kernels and training runs


def kernels_table(name: str) -> str:
    """A line an operation and size, its passes beside each other; bold is where a peer is faster than ours."""
    lines = []
    for (op, size), rows in groupby(load(name)["rows"], key=lambda row: (row["op"], compare.shape(row))):
        rows = list(rows)
        host = [row["arms"].get("nanocria", {}).get("host_us") for row in rows]
        columns = [
            [row["pass"] for row in rows],
            [compare.duration(compare.median_us(row, "nanocria")) for row in rows],
            [compare.percent(compare.of_limit(row)) for row in rows],
            [lead_cell(row) for row in rows],
            ["-" if us is None else f"{us:.0f} us" for us in host],
        ]
        lines.append([f"`{op}`", size, *(" / ".join(cells) for cells in columns)])
    header = ["operation", "shape", "pass", "time", "of the limit", "speed vs. the best peer", "CPU time per launch"]
    return f"{table(header, lines)}\n\n{footer(name)}"


def lead_cell(row: dict) -> str:
    ratio = compare.lead(row)
    if ratio is None:
        return "-"
    bold = "" if ratio >= 0.995 else "**"
    return f"{bold}{ratio:.2f} x {compare.best_peer(row)}{bold}"


def baby_table() -> str:
    """The baby's runs: how long, how good, beside two compressors that read the same bytes."""
    rows = []
    for r in map(load, ("baby_llama_cpu", "baby_llama_gpu")):
        bits = [f"{r[key]:.2f}" for key in ("bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte")]
        rows.append([f"`{r['command']}`", r["device"].removeprefix("1 x "), f"{r['train_seconds'] / 60:.1f}", *bits])
    return table(["command", "device", "minutes", "bits per byte", "gzip -9", "xz -9"], rows)


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


# ----------------------------------------------------------------------------------------------------------------------
# Steps on one GPU


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
    """The largest number of tokens a second, and what torchtitan's recipe, if it was measured, does on the same."""
    r = load("step")
    points = done(r["points"])
    best = max((p for p in points if p["arm"] == "nanocria"), key=lambda p: p["tok_per_s"])
    share = f" ({best['mfu']:.0%} MFU)" if best["mfu"] else ""  # of some cards the peak is not known
    text = f"- Llama 3.2 1B trains at {best['tok_per_s']:,.0f} tokens per second{share} on one {r['device']}"
    where = values(best, compare.STEP_PLACE[1:])
    ratio = next((x for x in compare.step_ratios(points) if x["peer"] == "recipe" and tuple(x["at"]) == where), None)
    if not ratio:
        return f"{text}, in {best['peak_gib']:.0f} GiB."
    beside = (
        f"{ratio['tok_per_s']:.2f} times the speed of torchtitan's recipe, in {ratio['peak_gib']:.0%} of its memory"
    )
    return f"{text}: {beside} ({best['peak_gib']:.0f} GiB)."


def steps_short(at=(16, 2048, "none")) -> str:
    """Each trainer without checkpointing at the README's shape, the fastest first."""
    points = [p for p in done(load("step")["points"]) if values(p, compare.STEP_PLACE[1:]) == at]
    ours = next((p["tok_per_s"] for p in points if p["arm"] == "nanocria"), None)
    rows = []
    for p in sorted(points, key=lambda p: -p["tok_per_s"]):
        ratio = f"{p['tok_per_s'] / ours:.2f}" if ours else "-"
        rows.append([with_dtype(p["arm"]), f"{p['tok_per_s']:,.0f}", f"{p['peak_gib']:.1f}", ratio])
    return table(["trainer", "tok/s", "peak GiB", "speed, nanocria = 1"], rows)


def with_dtype(arm: str) -> str:
    """Marks the trainers of `bench.py step` whose weights and moments, too, are bfloat16."""
    return arms.STEP[arm] + " (bf16)" * arm.startswith("hf")


def fp8_sentence() -> str:
    """What float8 brings, and what torchtitan's recipe does with torchao's."""
    found = {values(p, compare.STEP_PLACE): p["tok_per_s"] for p in done(load("step_fp8")["points"])}
    parts = []
    for arm, *at in found:
        if arm == "nanocria-fp8" and {("nanocria", *at), ("recipe-fp8", *at)} <= found.keys():
            fp8, bf16, peer = (found[other, *at] for other in ("nanocria-fp8", "nanocria", "recipe-fp8"))
            where = f"{'at' if parts else 'At'} {at[0]} x {at[1]:,}{'' if parts else ' tokens'}"
            beside = f"{fp8 / peer:.2f} times those of torchtitan's recipe with torchao's float8"
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


# ----------------------------------------------------------------------------------------------------------------------
# Several GPUs


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


def gpus_tables() -> str:
    """Of what was measured: 1B on one GPU and several, 8B beside the recipe, checkpoints beside the training."""
    r, parts = load("gpus"), []
    if r["scaling"]:
        parts += ["Llama 3.2 1B, 16 x 2,048 tokens per GPU, without checkpointing:", scaling_table(r["scaling"])]
    if r["8b"]:
        ranks = " and ".join(str(n) for n in sorted({row["ranks"] for row in r["8b"]}))
        parts += [f"Llama 3.1 8B on {ranks} GPUs:", big_table(r["8b"])]
    for row in r["saves"]:
        if "cost" in row:
            at = "Llama 3.2 1B on {ranks} GPUs, {batch} x {block:,} tokens each".format(**row)
            parts.append(f"{at}: {compare.saves_sentence(row)}.")
    return "\n\n".join([*parts, footer("gpus")])


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps


def sweep_part(name: str) -> str:
    """For each sweep of a record what fits, then all points, which GitHub shows to whoever clicks on the title."""
    r, parts = load(name), []
    title = "All measurements: tokens per second · peak GiB"
    for kind in filter(r.get, compare.KINDS):
        parts += [f"{sweep_report.what_was_swept(r, kind)}:", sweep_report.fits_table(r, kind)]
        parts.append(f"<details><summary>{title}</summary>\n\n{sweep_report.sweep_table(r, kind)}\n\n</details>")
    return "\n\n".join([*parts, f"{footer(name)} {sweep_report.arithmetic(r)}".rstrip()])


# ----------------------------------------------------------------------------------------------------------------------
# The pages

PAGES = {  # page -> its parts: name -> what makes it, the records that it needs, or of which kind of rows
    "README.md": {
        "headline": (headline, ("step:points",)),
        "fits_headline": (lambda: f"- {sweep_report.headline(load('study'))}", ("study",)),
        "fits": (lambda: sweep_report.fits_of_both(load("study")), ("study",)),
        "steps_short": (steps_short, ("step:points",)),
        "fp8": (fp8_sentence, ("step_fp8:points",)),
        "losses": (losses_part, ("losses:runs",)),
    },
    "benchmarks/README.md": {
        "small_model": (small_model_table, ("step:baby",)),
        "baby": (baby_table, ("baby_llama_cpu", "baby_llama_gpu")),
        "breakdown": (breakdown_table, ("step:breakdown",)),
        "gpus": (gpus_tables, ("gpus:scaling",)),
        "snapshot": (snapshot_table, ("snapshot",)),
        **{name: (partial(steps_table, name), (f"{name}:points",)) for name in ("step_h100", "step_fp8")},
        "steps": (partial(steps_table, "step"), ("step:points",)),
        **{name: (partial(sweep_part, name), (name,)) for name in ("study", "sweep", "study_8b")},
        **{name: (partial(kernels_table, name), (name,)) for name in ("kernels", "fp8_linear")},
    },
}


def lacking(need: str) -> str | None:
    """What is not there of a record, or of one kind of its rows."""
    name, _, kind = need.partition(":")
    if not exists(name):
        return f"benchmarks/records/{name}.json"
    return f"row of {kind} in benchmarks/records/{name}.json" if kind and not load(name)[kind] else None


def render(text: str, page: str) -> str:
    """The page with each of its parts made anew. A part whose records exist must be shown, and no other may be."""
    for name in re.findall(r"<!-- (\w+) -->", text):
        if name not in PAGES[page]:
            raise ValueError(f"{page} shows <!-- {name} -->, which is no part of it")
    for name, (part, records) in PAGES[page].items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        missing = list(filter(None, map(lacking, records)))
        if missing and begin in text:
            raise ValueError(f"{page} shows {begin}, but there is no {', '.join(missing)}")
        if missing:
            continue
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page} must hold {begin} and {end} once each")
        before, _, rest = text.partition(begin)
        made = part().replace("benchmarks/records/", "records/") if "/" in page else part()  # links from its folder
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def write_pages() -> None:
    """Writes the tables of all pages, or of none, and draws the plots."""
    from benchmarks import draw

    pages = {page: render((ROOT / page).read_text(), page) for page in PAGES}
    for page, text in pages.items():
        (ROOT / page).write_text(text)
    draw.draw_baby(PLOTS / "baby_llama.png")
    for plot, (name, draw_plot) in draw.PLOTS.items():
        if exists(name):
            draw_plot(load(name), PLOTS / f"{plot}.png")
