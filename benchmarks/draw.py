"""The plots of README.md and benchmarks/README.md, each drawn from records alone."""

import math
import textwrap
from collections import Counter
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # into files: no window, no display
import matplotlib.pyplot as plt

from benchmarks import arms as trainers
from benchmarks import compare
from benchmarks.record import load

COLORS = {  # ours stands out; whoever is in several plots has the same color in all
    "nanocria": "#c2410c", "eager": "#9ca3af", "torch": "#4b5563", "compile": "#0f766e", "liger": "#2563eb",
    "liger_fp32": "#93c5fd", "cce": "#9333ea", "sdpa_flash": "#f59e0b", "sdpa_cudnn": "#15803d",
}  # fmt: skip
TRAINERS = {  # of steps, several GPUs and losses
    "nanocria": "#c2410c", "nanocria-fp8": "#f59e0b", "nanocria-zero2": "#fb923c", "nanocria-hybrid": "#7c2d12",
    "nanocria-nccl": "#a8a29e", "nanocria-each": "#57534e", "nanocria-plain": "#7c2d12", "recipe": "#0f766e",
    "recipe-fp8": "#84cc16", "recipe-zero2": "#134e4a", "torchtitan": "#5eead4", "hf": "#9ca3af",
    "hf-compiled": "#4b5563", "hf-liger": "#2563eb", "float32": "#000000",
}  # fmt: skip
SWEEP = {
    "all": "#c2410c", "long": "#db2777", "kernels": "#fb923c", "torch": "#7c2d12",
    "hf": "#9ca3af", "liger": "#2563eb", "recipe": "#0f766e",
}  # fmt: skip
PARTS = ["#1e3a8a", "#2563eb", "#0f766e", "#c2410c", "#9333ea", "#f59e0b", "#9ca3af"]  # of memory
DASHES = ["-", "--", "-.", ":"]
MARKS = dict(zip(("none", "selective", "full"), "osv", strict=True))
PASSES = {"forward": "fwd", "backward": "bwd", "inference": "loss alone", "both": "both"}


def draw_baby(path: Path) -> None:
    """Training loss in bits per byte over seconds, CPU and GPU, with gzip and xz as lines to cross."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6), dpi=150)
    for name, color in (("baby_llama_cpu", "tab:blue"), ("baby_llama_gpu", "tab:green")):
        r = load(name)
        _, seconds, losses = zip(*r["curve"], strict=True)
        label = f"{r['device'].removeprefix('1 x ')}: {r['bits_per_byte']:.2f} on validation"
        axes.plot(seconds, [loss / math.log(2) for loss in losses], color=color, label=label)
        axes.plot(seconds[-1], r["bits_per_byte"], "o", color=color)
    for name, style in (("gzip", "--"), ("xz", ":")):
        level = load("baby_llama_cpu")[f"{name}_bits_per_byte"]
        axes.axhline(level, color="gray", linestyle=style, linewidth=1)
        axes.annotate(
            f"{name} -9", (1.01, level), xycoords=("axes fraction", "data"), color="gray", fontsize=8, va="center"
        )
    axes.set(xlabel="seconds of training", ylabel="bits per byte", xscale="log", ylim=(1, 3.5))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title("A 0.8-million-parameter Llama learns Python (lines: training, dots: validation)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, path)


def draw_kernels_speed(record: dict, path: Path) -> None:
    """A panel an operation: TB/s or TFLOP/s of each arm at each size and pass, and the limit as a line."""
    figure, panels = operations_grid(record)
    for axes, op, rows in panels:
        work, unit = ("bytes", "TB/s") if "bytes" in rows[0] else ("flops", "TFLOP/s")
        draw_bars(axes, rows, partial(speed, work=work))
        for place, row in enumerate(rows):
            limit = row[work] / row["floor_us"] / 1e6
            axes.hlines(limit, place - 0.5, place + 0.5, color="black", linewidth=1, label="limit of the card")
        ticks = [f"{wrapped_shape(row)}\n{PASSES[row['pass']]}" for row in rows]
        axes.set(title=op, ylabel=unit, xlabel="shape and pass", xticks=range(len(rows)), xticklabels=ticks)
    title = "Speed of forward and backward: higher is better; the line is what a copy, or the matmuls alone, reach"
    finish(figure, panels, title, path)


def speed(row: dict, arm: str, work: str) -> float | None:
    us = compare.median_us(row, arm)
    return row[work] / us / 1e6 if us else None


def draw_kernels_memory(record: dict, path: Path) -> None:
    """A panel an operation: MiB that forward and backward of each arm peak at above the inputs."""
    figure, panels = operations_grid(record)
    for axes, op, rows in panels:
        rows = [list(same)[-1] for _, same in groupby(rows, key=compare.shape)]  # all passes of a size share one peak
        draw_bars(axes, rows, lambda row, arm: row["arms"].get(arm, {}).get("peak_mib"))
        axes.set(title=op, ylabel="MiB", xlabel="shape", xticks=range(len(rows)), xticklabels=map(wrapped_shape, rows))
    finish(figure, panels, "Peak memory of forward and backward above their inputs: lower is better", path)


def operations_grid(record: dict):
    """A figure two panels wide, and for each panel its axes, operation and rows."""
    operations = [(op, list(rows)) for op, rows in groupby(record["rows"], key=lambda row: row["op"])]
    height = math.ceil(len(operations) / 2)
    figure, grid = plt.subplots(height, 2, figsize=(12, 2.7 * height + 1), dpi=120, squeeze=False, layout="constrained")
    for axes in grid.flat[len(operations) :]:
        axes.set_visible(False)
    return figure, [(axes, *operation) for axes, operation in zip(grid.flat, operations, strict=False)]


def draw_bars(axes, rows: list[dict], value) -> None:
    """At each row's place one bar an arm, value(row, arm) high. Arms of one size alone are left to the record."""
    arms = [arm for arm in COLORS if any(arm in row["arms"] for row in rows)]
    width = 0.8 / max(len(arms), 1)
    for index, arm in enumerate(arms):
        bars = [(place, value(row, arm)) for place, row in enumerate(rows) if value(row, arm) is not None]
        places = [place + (index - (len(arms) - 1) / 2) * width for place, _ in bars]
        axes.bar(places, [height for _, height in bars], width, color=COLORS[arm], label=arm)


def wrapped_shape(row: dict) -> str:
    """Two or three numbers one a line, five in three lines."""
    return compare.shape(row).replace(" ", "\n") if len(row["shape"]) < 4 else textwrap.fill(compare.shape(row), 9)


def finish(figure, panels, title: str, path: Path) -> None:
    """The title, and one legend for all panels, above them."""
    handles = {}
    for axes, _, _ in panels:
        axes.tick_params(axis="x", labelsize=8 if len(axes.get_xticks()) <= 10 else 6)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    legend = {"loc": "outside upper center", "ncols": len(handles), "fontsize": 9, "frameon": False}
    figure.legend(handles.values(), handles.keys(), title=title, title_fontsize=12, **legend)
    save(figure, path)


def draw_steps(record: dict, path: Path) -> None:
    """Tokens a second against peak GiB: a panel for each shape, a color for each arm, a mark for each checkpointing."""
    done = [point for point in record["points"] if "ms_per_step" in point]
    shapes = list(dict.fromkeys((point["batch"], point["block"]) for point in done))
    size = (max(3.2 * len(shapes), 6.4), 4)
    figure, panels = plt.subplots(1, len(shapes), figsize=size, dpi=150, sharey=True, squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        draw_arms(axes, [p for p in done if (p["batch"], p["block"]) == shape])
        axes.set_title(f"{shape[0]} x {shape[1]:,} tokens", fontsize=10)
        axes.set(xlabel="peak memory, GiB", xlim=(0, None))
    first = figure.axes[0]
    first.set(ylabel="thousand tokens per second", ylim=(0, max(p["tok_per_s"] for p in done) / 940))
    arms = {p["arm"] for p in done}
    for arm, title in trainers.STEP.items():
        if arm in arms:
            first.plot([], [], color=TRAINERS[arm], label=title + " (bf16)" * arm.startswith("hf"))
    for checkpointing, mark in MARKS.items():
        first.plot([], [], mark, color="gray", label=f"checkpointing: {checkpointing}")
    figure.legend(*first.get_legend_handles_labels(), fontsize=8, frameon=False, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.18, 1, 1))
    save(figure, path)


def draw_losses(record: dict, path: Path) -> None:
    """Left the loss of each trainer; right how far it is from the float32 run's, averaged over ten steps."""
    rows = [row for row in record["runs"] if "losses" in row]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), dpi=150)
    for row in rows:
        style = {"color": TRAINERS[row["arm"]], "linewidth": 1.2}
        left.plot(range(1, row["steps"] + 1), row["losses"], label=trainers.LOSSES[row["arm"]], **style)
        found = compare.differences(row, rows) or []
        tens = [found[i : i + 10] for i in range(0, len(found), 10)]
        right.plot([10 * i + 5 for i in range(len(tens))], [sum(ten) / len(ten) for ten in tens], **style)
    right.axhline(0, **style | {"color": TRAINERS[compare.REFERENCE]})
    where = "{batch} x {block:,} tokens".format(**rows[0])
    left.set(xlabel="step", ylabel="training loss", title=f"Llama 3.2 1B, {where} a step")
    right.set(xlabel="step", ylabel="loss minus that of float32", title="mean of ten steps")
    left.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, path)


def draw_gpus(record: dict, path: Path) -> None:
    """Tokens a second of a GPU: left over the number of GPUs, from one by itself; right, of 8B, with its peak GiB."""
    rows = [row for row in record["scaling"] if "tok_per_s" in row]
    big = [row for row in record["8b"] if "tok_per_s" in row]
    figure, axes = plt.subplots(1, 1 + bool(big), figsize=(10, 4.2), dpi=150, squeeze=False)
    left, *rest = axes[0]
    arms = {row["arm"] for row in [*rows, *big]}
    for arm, title in trainers.GPUS.items():
        of_arm = [row for row in rows if row["arm"] == arm and row["ranks"] > 1]
        alone = [row for row in rows if of_arm and row["arm"] == arm.partition("-")[0] and row["ranks"] == 1]
        line = sorted([*alone, *of_arm], key=lambda row: row["ranks"])
        at = [row["ranks"] for row in line], [row["tok_per_s"] / row["ranks"] / 1000 for row in line]
        if arm in arms:
            left.plot(*at, "o-", markersize=4, color=TRAINERS[arm], label=title)
    left.set(xlabel="GPUs", ylabel="thousand tokens per second per GPU", xticks=sorted({row["ranks"] for row in rows}))
    left.set_ylim(0, 1.1 * max(row["tok_per_s"] / row["ranks"] / 1000 for row in rows))
    left.set_title("Llama 3.2 1B, 16 x 2,048 tokens per GPU", fontsize=10)
    for right in rest:
        draw_8b(right, big)
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, frameon=False, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    save(figure, path)


def draw_8b(axes, rows: list[dict]) -> None:
    """For each shape and checkpointing a bar an arm, tokens a second of a GPU high, its peak written on it."""
    places = list(dict.fromkeys((row["batch"], row["block"], row["checkpointing"]) for row in rows))
    width = 0.8 / len({row["arm"] for row in rows})
    for place, setting in enumerate(places):
        here = [row for row in rows if (row["batch"], row["block"], row["checkpointing"]) == setting]
        for index, row in enumerate(here):
            at = place + width * (index - (len(here) - 1) / 2)
            bars = axes.bar(at, row["tok_per_s"] / row["ranks"] / 1000, width, color=TRAINERS[row["arm"]])
            axes.bar_label(bars, [f"{row['peak_gib']:.0f} GiB"], fontsize=6, padding=1)
    ticks = [f"{batch} x {block:,}\n{checkpointing}" for batch, block, checkpointing in places]
    axes.set(ylabel="thousand tokens per second per GPU", xlabel="sequences x tokens per GPU, checkpointing")
    axes.set_xticks(range(len(places)), ticks, fontsize=7)
    ranks = " or ".join(str(n) for n in sorted({row["ranks"] for row in rows}))
    axes.set_title(f"Llama 3.1 8B on {ranks} GPUs, and the peak memory of each", fontsize=10)


def draw_sweep(record: dict, path: Path) -> None:
    """A column for batches and one for contexts; tokens a second above peak memory, both against the size."""
    kinds = [kind for kind in compare.KINDS if compare.done(record[kind])]
    figure, grid = plt.subplots(2, len(kinds), figsize=(5 * len(kinds) + 1, 7.5), dpi=150, squeeze=False, sharex="col")
    drawn = [row for kind in kinds for row in record[kind]]
    names, handles = compare.labels(drawn), {}
    for kind, (speed, memory) in zip(kinds, grid.T, strict=True):
        rows = record[kind]
        used = Counter()
        for series, of_series in compare.by_series(rows, kind).items():
            arm = of_series[0]["arm"]
            style = {"color": SWEEP[arm], "linestyle": DASHES[used[arm] % len(DASHES)]}
            used[arm] += 1
            handles |= {names[series]: draw_series(speed, memory, of_series, kind, style)}
        limit = rows[0]["limit_gib"]
        if limit:
            memory.axhline(limit, color="black", linewidth=1)
            memory.annotate(f"limit: {limit:g} GiB", (0.02, limit), xycoords=("axes fraction", "data"), fontsize=8,
                            xytext=(0, 3), textcoords="offset points")  # fmt: skip
        elsewhere = f"sequences of {rows[0]['block']:,} tokens" if kind == "batch" else f"batch {rows[0]['batch']}"
        speed.set(ylabel="thousand tokens per second", ylim=(0, None), title=f"{compare.SIZE[kind]} grows, {elsewhere}")
        unit = "batch, sequences" if kind == "batch" else "context, tokens"
        memory.set(xlabel=unit, ylabel="peak memory, GiB", ylim=(0, None), xscale="log")
        sizes = sorted({row[compare.VARIES[kind]] for row in rows})
        memory.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=60, fontsize=7)
        memory.minorticks_off()
    marks = {"out of memory": ("oom", "x"), "memory.py's estimate": ("estimated_gib", ".")}
    for name, (key, mark) in marks.items():
        if any(row.get(key) for row in drawn):
            handles[name] = grid[0, 0].plot([], [], mark, color="black")[0]
    figure.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.03 + 0.022 * math.ceil(len(handles) / 3), 1, 1))
    save(figure, path)


def draw_fits(record: dict, path: Path) -> None:
    """The README's: tokens a second as the batch grows, left, and as the context does; a cross is out of memory."""
    kinds = [kind for kind in compare.KINDS if compare.done(record[kind])]
    figure, panels = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4.2), dpi=150, squeeze=False, sharey=True)
    for axes, kind in zip(panels[0], kinds, strict=True):
        key, first = compare.VARIES[kind], record[kind][0]
        for arm in ("all", "long", "liger", "hf"):
            draw_until_out_of_memory(axes, [row for row in record[kind] if row["arm"] == arm], key, arm)
        unit = f"sequences of {first['block']:,} tokens" if kind == "batch" else f"tokens, at batch {first['batch']}"
        axes.set(xlabel=f"{compare.SIZE[kind]}, {unit}", xscale="log", ylim=(0, None))
        sizes = sorted({row[key] for row in record[kind]})
        sizes = [size for size, after in pairwise([*sizes, math.inf]) if after > 1.2 * size]  # or they would touch
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=60, fontsize=8)
        axes.minorticks_off()
    panels[0][0].set(ylabel="thousand tokens per second")
    panels[0][0].plot([], [], "x", color="black", markeredgewidth=2, label="out of memory")
    limit, device = record[kinds[0]][0]["limit_gib"], record["device"].removeprefix("1 x ").removeprefix("NVIDIA ")
    figure.suptitle(f"Llama 3.2 1B within {limit:g} GiB of GPU memory (one {device} limited to that)", fontsize=12)
    figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=9, frameon=False, ncols=5, loc="lower center")
    figure.align_xlabels()
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, path)


def draw_until_out_of_memory(axes, rows: list[dict], key: str, arm: str) -> None:
    """Tokens a second over the size, then dots down to a cross; ours in front of ours with activations on the CPU."""
    fits = sorted(compare.done(rows), key=lambda row: row[key])
    x, y = [row[key] for row in fits], [row["tok_per_s"] / 1000 for row in fits]
    style = {"color": SWEEP[arm], "zorder": 3 if arm == "all" else 2}
    line = {"linestyle": "--" if arm == "long" else "-", "label": trainers.SWEEP[arm]}
    axes.plot(x, y, marker="o", markersize=4, **line, **style)
    for row in rows:
        if row.get("oom") and fits:
            axes.plot([x[-1], row[key]], [y[-1], 0], ":", linewidth=1, **style)
            axes.plot(row[key], 0, "x", markersize=8, markeredgewidth=2, clip_on=False, **style)


def draw_series(speed, memory, rows: list[dict], kind: str, style: dict):
    """Its two lines; where it ran out of memory, crosses; its estimates as black points."""
    key, fits = compare.VARIES[kind], compare.done(rows)
    sizes = [row[key] for row in fits]
    (handle,) = speed.plot(sizes, [row["tok_per_s"] / 1000 for row in fits], marker="o", markersize=3.5, **style)
    memory.plot(sizes, [row["peak_gib"] for row in fits], marker="o", markersize=3.5, **style)
    for row in rows:
        if row.get("oom"):
            top = row["limit_gib"] or max((r["peak_gib"] for r in fits), default=0)
            memory.plot(row[key], top, "x", color=style["color"])
            speed.plot(row[key], 0, "x", color=style["color"], clip_on=False)
    estimated = [(row[key], row["estimated_gib"]) for row in fits if "estimated_gib" in row]
    memory.plot(*zip(*estimated, strict=True) if estimated else ((), ()), ".", color="black", markersize=2.5, zorder=3)
    return handle


def draw_snapshot(record: dict, path: Path) -> None:
    """What holds the memory during one step, stacked: a panel for each trainer."""
    rows = [row for row in record["arms"] if "peak_gib" in row]
    size = (4.5 * len(rows) + 1.5, 4.5)
    figure, panels = plt.subplots(1, len(rows), figsize=size, dpi=150, sharey=True, squeeze=False, layout="constrained")
    for axes, row in zip(panels[0], rows, strict=True):
        axes.stackplot(row["at"], *row["gib"].values(), labels=row["gib"], colors=PARTS)
        axes.axhline(row["peak_gib"], color="black", linewidth=0.8, linestyle="--")
        where = (
            f"{row['batch']} x {row['block']:,} tokens, checkpointing {row['checkpointing']}, offload {row['offload']}"
        )
        axes.set_title(f"{trainers.SWEEP[row['arm']]}: {row['peak_gib']:.1f} GiB\n{where}", fontsize=9)
        axes.set(xlabel="allocations and frees of one step, in their order")
    panels[0][0].set(ylabel="GiB")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], fontsize=8, frameon=False, loc="outside right center")
    save(figure, path)


def draw_arms(axes, points: list[dict]) -> None:
    for arm, color in TRAINERS.items():
        here = [p for p in points if p["arm"] == arm]
        x, y = [p["peak_gib"] for p in here], [p["tok_per_s"] / 1000 for p in here]
        axes.plot(x, y, color=color, linewidth=0.8)
        for p, *at in zip(here, x, y, strict=True):
            axes.plot(*at, MARKS[p["checkpointing"]], color=color)


def save(figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


PLOTS = {  # name -> the record that it is drawn from, and how
    "kernels_speed": ("kernels", draw_kernels_speed),
    "kernels_memory": ("kernels", draw_kernels_memory),
    "step": ("step", draw_steps),
    "losses": ("losses", draw_losses),
    "gpus": ("gpus", draw_gpus),
    "fits": ("study", draw_fits),
    **{name: (name, draw_sweep) for name in ("study", "sweep", "study_8b")},
    "snapshot": ("snapshot", draw_snapshot),
}
