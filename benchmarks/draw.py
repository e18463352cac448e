"""Draw the plots of README.md and benchmarks/README.md, each from records alone."""

import math
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files: needs no window or display
import matplotlib.pyplot as plt

from benchmarks import arms as trainers
from benchmarks import compare
from data.files import atomic_write

COLORS = {  # of kernels. Ours stands out; an arm has the same color in all plots
    "nanocria": "#c2410c", "eager": "#9ca3af", "torch": "#4b5563", "compile": "#0f766e", "liger": "#2563eb",
    "liger_fp32": "#93c5fd", "cce": "#9333ea", "sdpa_flash": "#f59e0b", "sdpa_cudnn": "#15803d",
}  # fmt: skip
TRAINERS = {
    "nanocria": "#c2410c", "nanocria-fp8": "#f59e0b", "nanocria-zero2": "#fb923c", "nanocria-hybrid": "#7c2d12",
    "nanocria-nccl": "#a8a29e", "nanocria-each": "#57534e", "nanocria-plain": "#7c2d12", "recipe": "#0f766e",
    "recipe-fp8": "#84cc16", "recipe-zero2": "#134e4a", "torchtitan": "#5eead4", "hf": "#9ca3af",
    "hf-compiled": "#4b5563", "hf-liger": "#2563eb", "float32": "#000000", "all": "#c2410c", "long": "#db2777",
    "kernels": "#fb923c", "torch": "#7c2d12", "liger": "#2563eb", "lora": "#f59e0b",
    "lora-fp8": "#a16207", "qlora": "#c2410c", "qlora-fp8": "#7c2d12",
    "peft": "#2563eb", "peft-qlora": "#1e3a8a", "liger-8bit": "#0f766e", "liger-galore": "#84cc16",
}  # fmt: skip
PARTS = ["#1e3a8a", "#2563eb", "#0f766e", "#c2410c", "#9333ea", "#f59e0b", "#9ca3af"]  # of memory
DASHES = ["-", "--", "-.", ":"]
MODELS = {"config/llama32_1b.py": "Llama 3.2 1B", "config/llama31_8b.py": "Llama 3.1 8B"}
MARKS = dict(zip(("none", "selective", "full"), "osv", strict=True))
PASSES = {"forward": "fwd", "backward": "bwd", "inference": "loss alone", "both": "both"}
plt.rcParams |= {"figure.dpi": 150, "figure.constrained_layout.use": True, "legend.fontsize": 8}
plt.rcParams |= {"legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False}


def panels(n: int, size: tuple[float, float], **options):
    """A figure and its n axes, side by side."""
    figure, axes = plt.subplots(1, n, figsize=size, squeeze=False, **options)
    return figure, axes[0]


def finish(figure, path: Path, legend=None, **options) -> None:
    """Save the figure, with one legend (handles, labels) below all panels, or at `loc`."""
    if legend:
        figure.legend(*legend, **{"ncols": 3, "loc": "outside lower center"} | options)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:])
    plt.close(figure)


def speed(row: dict) -> float:
    """Thousand tokens per second."""
    return row["tok_per_s"] / 1000


def draw_line(axes, rows: list[dict], x: str, y: Callable | str, *style, **options):
    """A line through rows: x is a key, y a key or a function of a row."""
    heights = [y(row) if callable(y) else row[y] for row in rows]
    return axes.plot([row[x] for row in rows], heights, *style, **options)[0]


# --- Training runs ---


def draw_baby(runs: list[dict], path: Path) -> None:
    """Training loss in bits per byte over seconds, on a CPU and a GPU, with gzip and xz as lines to cross."""
    figure, (axes,) = panels(1, (7.5, 3.6))
    for r in runs:
        _, seconds, losses = zip(*r["curve"], strict=True)
        trainer = f"{r['device'].removeprefix('1 x ')}, {r['settings']['optimizer']}"
        label = f"{trainer}: {r['bits_per_byte']:.2f} on validation"
        (line,) = axes.plot(seconds, [loss / math.log(2) for loss in losses], label=label)
        axes.plot(seconds[-1], r["bits_per_byte"], "o", color=line.get_color())
    for name, style in (("gzip", "--"), ("xz", ":")):
        level, at = runs[0][f"{name}_bits_per_byte"], ("axes fraction", "data")
        axes.axhline(level, color="gray", linestyle=style, linewidth=1)
        axes.annotate(f"{name} -9", (1.01, level), xycoords=at, color="gray", fontsize=8, va="center")
    axes.set(xlabel="seconds of training", ylabel="bits per byte", xscale="log", ylim=(1, 3.5))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title("A 0.8-million-parameter Llama learns Python (lines: training, dots: validation)", fontsize=10)
    axes.legend(loc="lower left", bbox_to_anchor=(0.34, 0))
    finish(figure, path)


def draw_linux(runs: list[dict], path: Path) -> None:
    """Validation loss in bits per byte over tokens and over minutes of training, with xz as a line to cross."""
    figure, (left, right) = panels(2, (10, 3.6), sharey=True)
    for r in runs:
        bits = r["bits_per_byte"] / r["val_loss"]  # per unit of loss
        points = [(compare.tokens_of(r, step) / 1e6, s / 60, bits * loss) for step, s, loss in r["val_curve"]]
        tokens, minutes, heights = zip(*points, strict=True)
        label = "{optimizer}, {learning_rate:g}, warm-up {warmup_iters}: {bits:.3f}"
        label = "float8, " * r["settings"]["fp8"] + label.format(**r["settings"], bits=r["bits_per_byte"])
        for axes, x in ((left, tokens), (right, minutes)):
            axes.plot(x, heights, "o-", markersize=4, label=label)
    for axes, unit in ((left, "million tokens"), (right, "minutes of training")):
        axes.axhline(r["xz_bits_per_byte"], color="gray", linestyle=":", linewidth=1, label="xz -9")
        axes.set(xlabel=unit)
    ticks = [0.6, 0.8, 1.0, 1.5, 2.0]
    left.set(ylabel="bits per byte of unseen files", yscale="log", yticks=ticks, yticklabels=ticks)
    left.minorticks_off()
    left.legend()
    figure.suptitle("114 million parameters learn the Linux kernel's source", fontsize=10)
    finish(figure, path)


def draw_losses(record: dict, path: Path) -> None:
    """Left: the loss of each trainer. Right: its difference from the float32 run's, averaged over ten steps."""
    rows = [row for row in record["runs"] if "losses" in row and row["arm"] in TRAINERS]  # not GaLore's
    figure, (left, right) = panels(2, (10, 3.6))
    for row in rows:
        style = {"color": TRAINERS[row["arm"]], "linewidth": 1.2}
        left.plot(range(1, row["steps"] + 1), row["losses"], label=trainers.LOSSES[row["arm"]], **style)
        found = compare.differences(row, rows) or []
        tens = [found[i : i + 10] for i in range(0, len(found), 10)]
        right.plot([10 * i + 5 for i in range(len(tens))], [sum(ten) / len(ten) for ten in tens], **style)
    right.axhline(0, **style | {"color": TRAINERS[compare.REFERENCE]})
    title = "Llama 3.2 1B, {batch} x {block:,} tokens a step".format(**rows[0])
    left.set(xlabel="step", ylabel="training loss", title=title)
    right.set(xlabel="step", ylabel="loss minus that of float32", title="mean of ten steps")
    left.legend()
    finish(figure, path)


# --- Kernels ---


def draw_kernels(record: dict, path: Path, memory=False) -> None:
    """A panel for each operation: TB/s or TFLOP/s of each arm at each size and pass, with the limit as a line; or the
    peak MiB of forward and backward above the inputs."""
    title = "Speed of forward and backward: higher is better; the line is what a copy, or the matmuls alone, reach"
    title = "Peak memory of forward and backward above their inputs: lower is better" if memory else title
    operations, handles = [(op, list(rows)) for op, rows in groupby(record["rows"], key=lambda row: row["op"])], {}
    height = math.ceil(len(operations) / 2)
    figure, grid = plt.subplots(height, 2, figsize=(12, 2.7 * height + 1), dpi=120, squeeze=False)
    for axes in grid.flat[len(operations) :]:
        axes.set_visible(False)
    for axes, (op, rows) in zip(grid.flat, operations, strict=False):
        (draw_peaks if memory else draw_speeds)(axes, rows)
        axes.set(title=op)
        axes.tick_params(axis="x", labelsize=8 if len(axes.get_xticks()) <= 10 else 6)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    options = {"loc": "outside upper center", "ncols": len(handles), "fontsize": 9}
    finish(figure, path, (handles.values(), handles.keys()), title=title, title_fontsize=12, **options)


def draw_speeds(axes, rows: list[dict]) -> None:
    work, unit = ("bytes", "TB/s") if "bytes" in rows[0] else ("flops", "TFLOP/s")
    draw_bars(axes, rows, lambda row, arm: (us := compare.times(row).get(arm)) and row[work] / us / 1e6)
    for place, row in enumerate(rows):
        limit = row[work] / row["floor_us"] / 1e6
        axes.hlines(limit, place - 0.5, place + 0.5, color="black", linewidth=1, label="limit of the card")
    ticks = [f"{wrapped_shape(row)}\n{PASSES[row['pass']]}" for row in rows]
    axes.set(ylabel=unit, xlabel="shape and pass", xticks=range(len(rows)), xticklabels=ticks)


def draw_peaks(axes, rows: list[dict]) -> None:
    rows = [list(same)[-1] for _, same in groupby(rows, key=compare.shape)]  # all passes of a size share one peak
    draw_bars(axes, rows, lambda row, arm: row["arms"].get(arm, {}).get("peak_mib"))
    axes.set(ylabel="MiB", xlabel="shape", xticks=range(len(rows)), xticklabels=map(wrapped_shape, rows))


def draw_bars(axes, rows: list[dict], value) -> None:
    """At each row's place, one bar of height value(row, arm) for each arm that has a color."""
    arms = [arm for arm in COLORS if any(arm in row["arms"] for row in rows)]
    width = 0.8 / max(len(arms), 1)
    for index, arm in enumerate(arms):
        places = [place + (index - (len(arms) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(places, [value(row, arm) or math.nan for row in rows], width, color=COLORS[arm], label=arm)


def wrapped_shape(row: dict) -> str:
    return textwrap.fill(compare.shape(row), 9, break_long_words=False)


# --- Steps, on one GPU and on several ---


def draw_steps(record: dict, path: Path) -> None:
    """Tokens per second against peak GiB: a panel per shape, a color per arm, a mark per checkpointing mode."""
    points = compare.done(record["points"])
    shapes = list(dict.fromkeys((point["batch"], point["block"]) for point in points))
    figure, axes_of = panels(len(shapes), (max(3.2 * len(shapes), 6.4), 4), sharey=True)
    for axes, shape in zip(axes_of, shapes, strict=True):
        for arm, color in TRAINERS.items():
            here = [p for p in points if p["arm"] == arm and (p["batch"], p["block"]) == shape]
            draw_line(axes, here, "peak_gib", speed, color=color, linewidth=0.8)
            for p in here:
                axes.plot(p["peak_gib"], speed(p), MARKS[p["checkpointing"]], color=color)
        axes.set_title(f"{shape[0]} x {shape[1]:,} tokens", fontsize=10)
        axes.set(xlabel="peak memory, GiB", xlim=(0, None))
    first = axes_of[0]
    first.set(ylabel="thousand tokens per second", ylim=(0, max(p["tok_per_s"] for p in points) / 940))
    for arm in (arm for arm in trainers.STEP if any(p["arm"] == arm for p in points)):
        # (bf16): weights and moments are bfloat16 too
        first.plot([], [], color=TRAINERS[arm], label=trainers.STEP[arm] + " (bf16)" * arm.startswith("hf"))
    for checkpointing, mark in MARKS.items():
        first.plot([], [], mark, color="gray", label=f"checkpointing: {checkpointing}")
    finish(figure, path, first.get_legend_handles_labels())


def draw_gpus(record: dict, path: Path) -> None:
    """Tokens per second per GPU. Left: over the number of GPUs, from one alone. Right: for 8B, with its peak GiB."""
    rows, big = compare.done(record["scaling"]), compare.done(record["8b"])
    figure, (left, right) = panels(2, (10, 4.2))
    for arm in (arm for arm in trainers.GPUS if any(row["arm"] == arm for row in [*rows, *big])):
        of_arm = [row for row in rows if row["arm"] == arm and row["ranks"] > 1]
        alone = [row for row in rows if of_arm and row["arm"] == arm.partition("-")[0] and row["ranks"] == 1]
        line = sorted([*alone, *of_arm], key=lambda row: row["ranks"])
        style = {"markersize": 4, "color": TRAINERS[arm], "label": trainers.GPUS[arm]}
        draw_line(left, line, "ranks", speed_of_each, "o-", **style)
    left.set(xlabel="GPUs", xticks=sorted({row["ranks"] for row in rows}))
    left.set(ylabel="thousand tokens per second per GPU", ylim=(0, 1.1 * max(map(speed_of_each, rows))))
    left.set_title("Llama 3.2 1B, 16 x 2,048 tokens per GPU", fontsize=10)
    draw_8b(right, big)
    finish(figure, path, left.get_legend_handles_labels())


def speed_of_each(row: dict) -> float:
    return row["tok_per_s"] / row["ranks"] / 1000


def draw_8b(axes, rows: list[dict]) -> None:
    """For each shape and checkpointing, a bar per arm: tokens per second per GPU, labelled with the peak memory."""
    places = {}
    for row in rows:
        places.setdefault("{batch} x {block:,}\n{checkpointing}".format(**row), []).append(row)
    width = 0.8 / len({row["arm"] for row in rows})
    for place, here in enumerate(places.values()):
        for index, row in enumerate(here):
            at = place + width * (index - (len(here) - 1) / 2)
            bars = axes.bar(at, speed_of_each(row), width, color=TRAINERS[row["arm"]])
            axes.bar_label(bars, [f"{row['peak_gib']:.0f} GiB"], fontsize=6, padding=1)
    axes.set(ylabel="thousand tokens per second per GPU", xlabel="sequences x tokens per GPU, checkpointing")
    axes.set_xticks(range(len(places)), places, fontsize=7)
    axes.set_title(f"Llama 3.1 8B on {rows[0]['ranks']} GPUs, and the peak memory of each", fontsize=10)


# --- Memory ---


def draw_sweep(record: dict, path: Path, only: tuple[str, ...] = ()) -> None:
    """A column for batches and one for contexts: tokens per second against the size, and below it the peak memory.

    only: draw just these trainers, and just their speed, for README.md; empty: all, and their memory.
    """
    kinds = [kind for kind in compare.KINDS if compare.done(record[kind])]
    height, handles, first = 1 if only else 2, {}, record[kinds[0]][0]
    options = {"figsize": (5 * len(kinds) + 1, 2.8 * height + 1.8), "sharex": "col", "sharey": "row"}
    figure, grid = plt.subplots(height, len(kinds), squeeze=False, **options)
    for kind, column in zip(kinds, grid.T, strict=True):
        used = Counter(long=1)  # dashed, because it coincides with nanocria's
        for title, series in compare.by_series(record, kind).items():
            if (arm := series[0]["arm"]) in (only or trainers.SWEEP):
                style = {"color": TRAINERS[arm], "linestyle": DASHES[used[arm] % len(DASHES)]}
                used[arm] += 1
                handles |= {title: draw_series(column, series, compare.VARIES[kind], style)}
        unit = "sequences of {block:,} tokens" if kind == "batch" else "tokens, at batch {batch}"
        column[0].set(ylabel="thousand tokens per second", ylim=(0, None))
        column[-1].set(xlabel=f"{compare.SIZE[kind]}, {unit.format(**record[kind][0])}", xscale="log")
        sizes = sorted({row[compare.VARIES[kind]] for row in record[kind]})
        column[-1].set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=60, fontsize=7)
        column[-1].minorticks_off()
        for below in column[1:]:
            below.set(ylabel="peak memory, GiB", ylim=(0, None))
            if first["limit_gib"]:
                below.axhline(first["limit_gib"], color="black", linewidth=1)
    drawn = [row for kind in kinds for row in record[kind]]
    if any(row.get("oom") for row in drawn):
        handles["out of memory"] = grid[0, 0].plot([], [], "x", color="black")[0]
    if not only and any("estimated_gib" in row for row in drawn):
        handles["memory.py's estimate"] = grid[0, 0].plot([], [], ".", color="black")[0]
    within = f" within {first['limit_gib']:g} GiB" if first["limit_gib"] else ""
    device = record["device"].replace("1 x", "one")
    figure.suptitle(f"{MODELS.get(first['config'], first['config'])}{within} on {device}", fontsize=11)
    finish(figure, path, (handles.values(), handles.keys()))


def draw_series(column, rows: list[dict], size: str, style: dict):
    """The lines of one series, with a cross where it ran out of memory and black points for the estimates."""
    fits, ends = compare.done(rows), [row for row in rows if row.get("oom")]
    style = {"marker": "o", "markersize": 3.5} | style
    cross = {"marker": "x", "color": style["color"], "linestyle": ":", "linewidth": 1, "markevery": [-1]}
    handle, top = draw_line(column[0], fits, size, speed, **style), fits[-1]["peak_gib"] if fits else 0
    for row in ends:
        draw_line(column[0], [*fits[-1:], row | {"tok_per_s": 0}], size, speed, clip_on=False, **cross)
    for below in column[1:]:
        draw_line(below, fits, size, "peak_gib", **style)
        for row in ends:
            below.plot(row[size], row["limit_gib"] or top, **cross)
        estimated = [row for row in fits if "estimated_gib" in row]
        draw_line(below, estimated, size, "estimated_gib", ".", color="black", markersize=2.5, zorder=3)
    return handle


def draw_snapshot(record: dict, path: Path) -> None:
    """What takes the memory during one step, stacked: a panel for each trainer."""
    rows = [row for row in record["arms"] if "peak_gib" in row]
    figure, axes_of = panels(len(rows), (4.5 * len(rows) + 1.5, 4.5), sharey=True)
    for axes, row in zip(axes_of, rows, strict=True):
        axes.stackplot(row["at"], *row["gib"].values(), labels=row["gib"], colors=PARTS)
        axes.axhline(row["peak_gib"], color="black", linewidth=0.8, linestyle="--")
        where = "{batch} x {block:,} tokens, checkpointing {checkpointing}, offload {offload}".format(**row)
        axes.set_title(f"{trainers.SWEEP[row['arm']]}: {row['peak_gib']:.1f} GiB\n{where}", fontsize=9)
        axes.set(xlabel="allocations and frees of one step, in their order")
    axes_of[0].set(ylabel="GiB")
    handles, names = axes_of[0].get_legend_handles_labels()
    finish(figure, path, (handles[::-1], names[::-1]), ncols=1, loc="outside right center")


def draw_ladder(record: dict, path: Path) -> None:
    """A panel for each model: tokens per second at the largest batch over the memory that one sequence needs."""
    found = compare.by_rung(record["points"])
    ladders = {model: rungs for model, rungs in found.items() if len(rungs) > 1}  # more than one rung
    if not ladders:
        return
    figure, axes_of = panels(len(ladders), (5 * len(ladders), 5))
    for axes, (model, rungs) in zip(axes_of, ladders.items(), strict=True):
        alone = {rung: fits for rung, fits in rungs.items() if fits and fits[0]["batch"] == 1}
        places = {rung: (fits[0]["peak_gib"], speed(fits[-1])) for rung, fits in alone.items()}
        most = [max(numbers) for numbers in zip(*places.values(), strict=True)]
        for i, (rung, at) in enumerate(places.items(), 1):
            title, on, _, peer = trainers.RUNGS[rung]
            if on in places and not peer:
                axes.plot(*zip(places[on], at, strict=True), "-", color="#9ca3af", linewidth=1, zorder=1)
            axes.plot(*at, "s" if peer else "o", color=TRAINERS[peer or "nanocria"], label=f"{i}  {title}")
            apart = [[abs(x - y) / z for x, y, z in zip(at, other, most, strict=True)] for other in places.values()]
            below = any(max(gap) < 0.03 for gap in apart[: i - 1])  # if an earlier point nearly coincides
            offset, sides = (-4, {"ha": "right", "va": "top"}) if below else (4, {})
            axes.annotate(str(i), at, (offset, offset), textcoords="offset points", fontsize=8, **sides)
        axes.set(xlabel="peak GiB of one sequence", ylabel="thousand tokens per second at the largest batch")
        axes.set(title=f"Llama {model.upper()}", xlim=(0, 1.08 * most[0]), ylim=(0, 1.08 * most[1]))
        axes.legend(fontsize=6, handlelength=0, loc="lower center", labelspacing=0.3)
    finish(figure, path)


PLOTS = {  # name -> its record, and the function that draws it
    "baby_llama": ("baby_llama*", draw_baby),
    "linux_114m": ("linux_114m*", draw_linux),
    "kernels_speed": ("kernels", draw_kernels),
    "kernels_memory": ("kernels", partial(draw_kernels, memory=True)),
    "step": ("step", draw_steps),
    "losses": ("losses", draw_losses),
    "gpus": ("gpus", draw_gpus),
    "fits": ("study", partial(draw_sweep, only=trainers.SHOWN)),
    **{name: (name, draw_sweep) for name in ("study", "sweep", "study_8b")},
    "snapshot": ("snapshot", draw_snapshot),
    "ladder": ("ladder", draw_ladder),
}
