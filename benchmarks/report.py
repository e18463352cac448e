"""Records in assets/ become the tables and plots of README.md and benchmarks/README.md.

A record is the JSON that a named command wrote, with device, versions and commit. What was measured stands on a page
between two markers, <!-- part --> and <!-- /part -->, and is made from records by the part's function here.
"""

import json
import re
import subprocess
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path

from runtime import run_log

ROOT = Path(__file__).resolve().parent.parent
ASSETS, PLOTS = ROOT / "benchmarks" / "records", ROOT / "benchmarks" / "plots"


def load(name: str) -> dict:
    path = ASSETS / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def exists(name: str) -> bool:
    return (ASSETS / f"{name}.json").exists()


def keep(run_folder: str, name: str) -> None:
    """The summary that a run of train.py left, as the record of that name."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise SystemExit(f"the record's name is {name!r}: letters, digits, _ and -")
    summary = Path(run_folder) / "summary.json"
    if not summary.exists():
        raise SystemExit(f"{summary} is not there: a training run leaves it when it reaches max_iters")
    ASSETS.mkdir(exist_ok=True)
    (ASSETS / f"{name}.json").write_text(summary.read_text())


def commit() -> str:
    """As run_log.git_commit names it, but a record or a page that has been written over changes no code."""
    name = run_log.git_commit()
    command = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/records", ":!benchmarks/plots", ":!*.md"]
    if name.endswith("-dirty") and subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0:
        return name.removesuffix("-dirty")
    return name


def origin(command: str, device: str, packages: tuple[str, ...] = ()) -> dict:
    """What a record of a benchmark begins with; packages are those beside PyTorch and Triton that it ran."""
    versions = run_log.versions("cuda") | {"nanocria": commit()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # not installed, so it was not measured either
    return {"command": command, "device": device, "versions": versions}


# What trains and what measures it: a record goes on where none of it has changed since, whatever was drawn or sampled.
BESIDE = [
    "tests",
    "test_kernels.py",
    "bench.py",
    "convert.py",
    "sample.py",
    "data/tokenizer.py",
    "benchmarks/README.md",
]
BESIDE += [f"benchmarks/{name}.py" for name in ("report", "draw", "losses", "estimate", "kernels", "operations")]
BESIDE += ["benchmarks/libraries.py"]
CODE = [
    ":(glob)*.py",
    "kernels",
    "optimizers",
    "runtime",
    "config",
    "data/files.py",
    "data/tokens.py",
    "benchmarks",
    *(f":!{name}" for name in BESIDE),
]


def same_code(commit: str, other: str) -> bool:
    """Whether two commits, as run_log.git_commit names them, train and measure alike; edited code has no name for it."""
    if any(name == "unknown" or name.endswith("-dirty") for name in (commit, other)):
        return False
    if commit == other:
        return True
    try:
        found = subprocess.run(["git", "diff", "--quiet", commit, other, "--", *CODE], cwd=ROOT, capture_output=True)
    except OSError:  # no git
        return False
    return found.returncode == 0  # 128: a commit that is not in this history


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Training runs


def baby_table() -> str:
    """The baby's runs: how long, how good, beside two compressors that read the same bytes."""
    rows = []
    for name in ("baby_llama_cpu", "baby_llama_gpu"):
        r = load(name)
        bits = [f"{r[key]:.2f}" for key in ("bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte")]
        rows.append([f"`{r['command']}`", r["device"].removeprefix("1 x "), f"{r['train_seconds'] / 60:.1f}", *bits])
    return table(["command", "device", "minutes", "bits per byte", "gzip -9", "xz -9"], rows)


def headline() -> str:
    """The largest number of tokens a second, and what torchtitan's recipe, if it was measured, does on the same."""
    r = load("step")
    done = [point for point in r["points"] if "tok_per_s" in point]
    best = max((p for p in done if p["arm"] == "nanocria"), key=lambda p: p["tok_per_s"])
    where = ("batch", "block", "checkpointing")
    peer = next((p for p in done if p["arm"] == "recipe" and all(p[k] == best[k] for k in where)), None)
    share = f" ({best['mfu']:.0%} MFU)" if best["mfu"] else ""  # of some cards the peak is not known
    text = f"- Llama 3.2 1B trains at {best['tok_per_s']:,.0f} tokens per second{share} on one {r['device']}"
    if not peer:
        return f"{text}, in {best['peak_gib']:.0f} GiB."
    speed, memory = (best[key] / peer[key] for key in ("tok_per_s", "peak_gib"))
    beside = f"{speed:.2f} times the speed of torchtitan's recipe, in {memory:.0%} of its memory"
    return f"{text}: {beside} ({best['peak_gib']:.0f} GiB)."


# ---------------------------------------------------------------------------------------------------------------------
# Where a record comes from

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
    """On what a record was measured, what that card reaches, and where the commands and commits stand."""
    r, path = load(name), f"benchmarks/records/{name}.json"
    rows = [row for rows in r.values() if isinstance(rows, list) for row in rows]
    arms = {row.get("arm") for row in rows}
    packages = [
        f"{title} {r['versions'][package].partition('+')[0]}"
        for package, title in NAMES.items()
        if package in r["versions"] and ARMS_OF.get(package, arms) & arms
    ]
    number, _, device = r["device"].rpartition(" x ")
    many = number not in ("", "1")
    measured = f"Measured on {number if many else 'one'} {device}{'s' * many}"
    limits = f"; copies {r['copy_tb_s']:.2f} TB/s, matmuls {r['matmul_tflops']:.0f} TFLOP/s" if "copy_tb_s" in r else ""
    link = f"[{path}]({path})"
    origin = f"Commands and commits: {link}" if " && " in r["command"] else f"Command: `{r['command']}`; commit: {link}"
    return f"{measured} with {', '.join(packages)}{limits}. {origin}."


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: rows of `bench.py kernels`


def shape(row: dict) -> str:
    return " ".join(f"{letter}{number}" for letter, number in row["shape"].items())


def row_name(row: dict) -> str:
    return f"{row['op']} {shape(row)} {row['pass']}"


def median_us(result: dict) -> float | None:
    """The median of an arm's times; None for an arm that failed or was not there."""
    return result["us"][1] if "us" in result else None


def duration(result: dict) -> str:
    us = median_us(result)
    if us is None:
        return "-"
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def share(row: dict, arm: str = "nanocria") -> float | None:
    """How much of the limit an arm reaches: the shortest time that the card allows over its own."""
    us = median_us(row["arms"].get(arm, {}))
    return row["floor_us"] / us if us else None


def best_peer(row: dict) -> str | None:
    """The fastest arm that is not ours."""
    times = {arm: median_us(r) for arm, r in row["arms"].items() if not arm.startswith("nanocria") and median_us(r)}
    return min(times, key=times.get, default=None)


def lead(row: dict) -> float | None:
    """The best peer's time over ours: below 1 where it is faster."""
    ours, peer = share(row), best_peer(row)
    return ours / share(row, peer) if ours and peer else None


def lead_cell(row: dict) -> str:
    ratio = lead(row)
    if ratio is None:
        return "-"
    return f"{ratio:.2f} x {best_peer(row)}" if ratio >= 0.995 else f"**{ratio:.2f} x {best_peer(row)}**"


def kernels_table(name: str) -> str:
    """A line an operation and size, its passes beside each other; bold is where a peer is faster than ours."""
    lines = []
    for (op, size), rows in groupby(load(name)["rows"], key=lambda row: (row["op"], shape(row))):
        rows = list(rows)
        ours = [row["arms"].get("nanocria", {}) for row in rows]
        columns = [
            [row["pass"] for row in rows],
            [duration(result) for result in ours],
            [percent(share(row)) for row in rows],
            [lead_cell(row) for row in rows],
            [f"{result['host_us']:.0f} us" if "host_us" in result else "-" for result in ours],
        ]
        lines.append([f"`{op}`", size, *(" / ".join(cells) for cells in columns)])
    header = ["operation", "shape", "pass", "time", "of the limit", "speed vs. the best peer", "CPU time per launch"]
    return table(header, lines) + "\n\n" + footer(name)


# ---------------------------------------------------------------------------------------------------------------------
# Steps: points of `bench.py step`


def steps_table(name: str) -> str:
    from benchmarks import step

    return f"Tokens per second · peak GiB:\n\n{step.step_table(load(name))}\n\n{footer(name)}"


def fp8_sentence() -> str:
    """What float8 brings, and what torchtitan's recipe does with torchao's."""
    from benchmarks import step

    found = {step.place(p): p["tok_per_s"] for p in load("step_fp8")["points"] if "tok_per_s" in p}
    parts = []
    for arm, *at in found:
        if arm == "nanocria-fp8" and {("nanocria", *at), ("recipe-fp8", *at)} <= found.keys():
            fp8, bf16, peer = (found[other, *at] for other in ("nanocria-fp8", "nanocria", "recipe-fp8"))
            where = f"At {at[0]} x {at[1]:,} tokens" if not parts else f"at {at[0]} x {at[1]:,}"
            parts.append(f"{where} {fp8:,.0f} tokens per second ({fp8 / bf16:.2f} times bfloat16's, {fp8 / peer:.2f} "
                         "times those of torchtitan's recipe with torchao's float8)")  # fmt: skip
    return "; ".join(parts) + "."


SHORT_AT = (16, 2048, "none")


def steps_short() -> str:
    """Each trainer without checkpointing at the README's shape, the fastest first."""
    from benchmarks import step

    points = [p for p in load("step")["points"] if "tok_per_s" in p and step.place(p)[1:] == SHORT_AT]
    points.sort(key=lambda p: -p["tok_per_s"])
    ours = next((p["tok_per_s"] for p in points if p["arm"] == "nanocria"), None)
    rows = [
        [
            with_dtype(p["arm"], step.ARMS[p["arm"]]),
            f"{p['tok_per_s']:,.0f}",
            f"{p['peak_gib']:.1f}",
            f"{p['tok_per_s'] / ours:.2f}" if ours else "-",
        ]
        for p in points
    ]
    return table(["trainer", "tok/s", "peak GiB", "speed, nanocria = 1"], rows)


def with_dtype(arm: str, title: str) -> str:
    """Marks the trainers of `bench.py step` whose weights and moments, too, are bfloat16."""
    return title + " (bf16)" * arm.startswith("hf")


def small_model_table() -> str:
    """The steps of the small model, where a step is hundreds of launches of a few microseconds."""
    from benchmarks import step

    points = [p for p in load("step")["baby"] if "ms_per_step" in p]
    rows = [
        [step.ARMS.get(p["arm"], f"`{p['arm']}`"), f"{p['ms_per_step']:.2f}", f"{p['tok_per_s']:,.0f}"] for p in points
    ]
    return table(["trainer", "ms per step", "tok/s"], rows)


def breakdown_table() -> str:
    from benchmarks import step

    return step.breakdown_table(load("step"))


def losses_part() -> str:
    from benchmarks import losses

    r = load("losses")
    first = r["runs"][0]
    at = f"Llama 3.2 1B, {first['steps']} steps of {first['batch']} x {first['block']:,} tokens"
    means = "means over the last third of them, the distance regardless of sign"
    return f"{at}; {means}:\n\n{losses.losses_table(r)}\n\n{footer('losses')}"


# ---------------------------------------------------------------------------------------------------------------------
# Several GPUs: rows of `bench.py gpus`


def gpus_tables() -> str:
    """Of what was measured: 1B on one GPU and several, 8B beside the recipe, checkpoints beside the training."""
    from benchmarks import gpus

    r, parts = load("gpus"), []
    if r["scaling"]:
        parts += ["Llama 3.2 1B, 16 x 2,048 tokens per GPU, without checkpointing:", gpus.scaling_table(r)]
    if r["8b"]:
        ranks = " and ".join(str(n) for n in sorted({row["ranks"] for row in r["8b"]}))
        parts += [f"Llama 3.1 8B on {ranks} GPUs:", gpus.big_table(r)]
    for row in r["saves"]:
        if "cost" in row:
            at = f"Llama 3.2 1B on {row['ranks']} GPUs, {row['batch']} x {row['block']:,} tokens each"
            parts.append(f"{at}: {gpus.saves_sentence(row)}.")
    return "\n\n".join([*parts, footer("gpus")])


# ---------------------------------------------------------------------------------------------------------------------
# What fits: rows of the sweeps of `bench.py`


def sweep_part(name: str) -> str:
    """Of a record of benchmarks/sweep.py: for each of its sweeps what fits, then all points."""
    from benchmarks import swept

    r, parts = load(name), []
    for kind in filter(r.get, swept.ROWS):
        parts += [f"{swept.what_was_swept(r, kind)}:", swept.fits_table(r, kind)]
        parts += [folded("All measurements: tokens per second · peak GiB", swept.sweep_table(r, kind))]
    return "\n\n".join([*parts, f"{footer(name)} {swept.arithmetic(r)}".rstrip()])


def folded(title: str, text: str) -> str:
    """GitHub shows the title, and the text to whoever clicks on it."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def fits_headline() -> str:
    from benchmarks import swept

    return f"- {swept.headline(load('study'))}"


def fits_table() -> str:
    from benchmarks import swept

    return swept.fits_of_both(load("study"))


def snapshot_table() -> str:
    from benchmarks import snapshot

    return f"{snapshot.parts_table(load('snapshot'))}\n\n{footer('snapshot')}"


# ---------------------------------------------------------------------------------------------------------------------
# The pages

PAGES = {  # page -> its parts: name -> what makes it, the records that it needs, or of which kind of rows
    "README.md": {
        "headline": (headline, ("step:points",)),
        "fits_headline": (fits_headline, ("study",)),
        "fits": (fits_table, ("study",)),
        "steps_short": (steps_short, ("step:points",)),
        "fp8": (fp8_sentence, ("step_fp8:points",)),
        "losses": (losses_part, ("losses:runs",)),
    },
    "benchmarks/README.md": {
        "steps": (partial(steps_table, "step"), ("step:points",)),
        "step_h100": (partial(steps_table, "step_h100"), ("step_h100:points",)),
        "small_model": (small_model_table, ("step:baby",)),
        "baby": (baby_table, ("baby_llama_cpu", "baby_llama_gpu")),
        "breakdown": (breakdown_table, ("step:breakdown",)),
        "study": (partial(sweep_part, "study"), ("study",)),
        "sweep": (partial(sweep_part, "sweep"), ("sweep",)),
        "study_8b": (partial(sweep_part, "study_8b"), ("study_8b",)),
        "gpus": (gpus_tables, ("gpus:scaling",)),
        "step_fp8": (partial(steps_table, "step_fp8"), ("step_fp8:points",)),
        "kernels": (partial(kernels_table, "kernels"), ("kernels",)),
        "fp8_linear": (partial(kernels_table, "fp8_linear"), ("fp8_linear",)),
        "snapshot": (snapshot_table, ("snapshot",)),
    },
}


def lacking(need: str) -> str | None:
    """What is not there of a record, or of one kind of its rows."""
    name, _, kind = need.partition(":")
    if not exists(name):
        return f"benchmarks/records/{name}.json"
    return f"row of {kind} in benchmarks/records/{name}.json" if kind and not load(name)[kind] else None


def render(text: str, page: str) -> str:
    """The page with each of its parts made anew. A part whose records are kept must be shown, and no other may be."""
    up = "../" * page.count("/")  # to the root
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
        made = part() if not up else part().replace("benchmarks/records/", "records/")
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def write_pages() -> None:
    """Writes the tables of all pages, or of none, and draws the plots."""
    from benchmarks import draw

    pages = {page: render((ROOT / page).read_text(), page) for page in PAGES}
    for page, text in pages.items():
        (ROOT / page).write_text(text)
    draw.draw_baby(PLOTS / "baby_llama.png")
    if exists("kernels"):
        draw.draw_kernels_speed(load("kernels"), PLOTS / "kernels_speed.png")
        draw.draw_kernels_memory(load("kernels"), PLOTS / "kernels_memory.png")
    if exists("step"):
        draw.draw_steps(load("step"), PLOTS / "step.png")
    if exists("losses"):
        draw.draw_losses(load("losses"), PLOTS / "losses.png")
    if exists("gpus"):
        draw.draw_gpus(load("gpus"), PLOTS / "gpus.png")
    if exists("study"):
        draw.draw_fits(load("study"), PLOTS / "fits.png")
    for name in ("study", "sweep", "study_8b"):
        if exists(name):
            draw.draw_sweep(load(name), PLOTS / f"{name}.png")
    if exists("snapshot"):
        draw.draw_snapshot(load("snapshot"), PLOTS / "snapshot.png")
