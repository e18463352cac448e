"""What fits in the card: batch and context grow until nothing fits, beside the frameworks.

    python bench.py                              batches of Llama 3.2 1B, 1,024 tokens a sequence, on the card at hand
    python bench.py sweep=both peers=hf,liger    contexts too, at batch 4, and beside two others
    python bench.py memory_limit_gib=24 checkpointing=full offload=none,optimizer,all arms=all,long
    python bench.py preset=study                 24 GiB, offload=all, full checkpointing: our arms beside hf and liger
    python bench.py sweep --help                 this text; elsewhere the word sweep may be left out
    python bench.py preset=8b                    Llama 3.1 8B, 512 tokens a sequence, on all GPUs, beside the recipe

sweep=batch|seq|both; batches=..., contexts=... instead of the usual ones; block_size= of the batches, batch_size= of
the contexts; config=, ranks=, steps=, out=. What begins with -- is a setting of train.py, for ours alone. at_once=4:
four points at a time, each on a GPU of its own with its part of the CPU's cores; where AdamW works on the CPU, they
share its memory's bandwidth, and may be slower for it.
arms    all: train.py as it is; kernels: without the fused loss; torch: also without the kernels of norms, RoPE, MLP and
        attention; long: all, with --offload_activations=true; or none
peers   hf: transformers' LlamaForCausalLM; liger: with Liger-Kernel's patches; recipe: see benchmarks/peers.py; or
        none. Like ours they keep float32 weights and compute in bfloat16. hf and liger offload all or nothing, through
        FSDP2: where ours has the optimizer on the CPU, they have weights and gradients there too.

Each point is a process of its own, measured on the real step: forward, backward, clip, update. What runs out of memory
is not tried with more. The record goes to out/sweep.json, or a preset's to assets/, with a plot beside it. A sweep that
was stopped goes on where the record of the same code, card and steps= ends; delete that to measure it again. A config
that git does not track is part of the code: another, or a change of it, begins the record anew. With keep=COMMIT it
goes on though the code has changed since then: for changes that cost neither time nor memory, and the record names both
commits.
"""

import hashlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import estimate, report, step
from benchmarks.swept import ARMS, HEADER, PEERS, PLACE, ROWS, cpu_gib, done, estimated_gib, line, refuse_model, summary
from runtime import memory_stats

BATCHES = [1, 4, 8, 16, 32, 64, 96, 112]  # the study's, then on by doubling
CONTEXTS = [512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 65536, 131072]
PRESETS = {
    "study": ["sweep=both", "arms=torch,kernels,all,long", "peers=hf,liger", "memory_limit_gib=24",
              "checkpointing=full", "offload=all", f"out={report.ASSETS / 'study.json'}"],
    "8b": ["config=config/llama31_8b.py", "block_size=512", "ranks=all", "peers=recipe", "checkpointing=full",
           f"out={report.ASSETS / 'study_8b.json'}"],
}  # fmt: skip
TIMEOUT = 900  # seconds a point may take: half a million tokens a step, attention over 131,072 of them


class Series(NamedTuple):
    """What grows until it does not fit."""

    arm: str
    checkpointing: str
    offload: str


# ----------------------------------------------------------------------------------------------------------------------
# Words


def parse(words: list[str], n_gpus: int) -> tuple[list[str], dict]:
    """The kinds of sweep, and the options; ValueError with a sentence for a slip."""
    flags = [word for word in words if word.startswith("--")]
    words = [word for word in words if not word.startswith("--")]
    asked_for = words
    presets = [word.removeprefix("preset=") for word in words if word.startswith("preset=")]
    words = [*(word for preset in presets for word in PRESETS.get(preset, [])), *words]
    lists = {"arms": ["all"], "peers": [], "checkpointing": ["none"], "offload": ["none"]}
    lists |= {"batches": [], "contexts": [], "keep": []}
    singles = {"sweep": ["batch"], "preset": [], "memory_limit_gib": [], "config": [step.CONFIG], "ranks": ["1"]}
    singles |= {"at_once": ["1"], "block_size": ["1024"], "batch_size": ["4"], "steps": []}
    singles |= {"out": [str(report.ROOT / "out/sweep.json")]}
    choices = {"sweep": ["batch", "seq", "both"], "preset": PRESETS, "arms": [*ARMS, "none"], "peers": [*PEERS, "none"]}
    choices |= {"checkpointing": step.CHECKPOINTING, "offload": estimate.OFFLOAD}
    _, options = step.read_words(words, singles | lists, [], choices)
    for key in ("sweep", "preset"):
        if len(options[key]) > 1:
            raise ValueError(f"{key}={','.join(options[key])}: one at a time" + ", or sweep=both" * (key == "sweep"))
    options |= {key: ",".join(options[key]) for key in singles}
    for key in ("batches", "contexts"):
        options[key] = sorted(step.whole(key, text) for text in options[key])
    for key in ("block_size", "batch_size"):
        options[key] = step.whole(key, options[key])
    options["steps"] = step.whole("steps", options["steps"]) if options["steps"] else None
    options["ranks"] = step.n_gpus_of("ranks", options["ranks"], n_gpus)
    options["at_once"] = step.n_gpus_of("at_once", options["at_once"], n_gpus)
    options["memory_limit_gib"] = gib(options["memory_limit_gib"])
    options["out"] = Path(options["out"])
    options["config"] = estimate.config_path(options["config"])
    refuse(flags, options)
    # the file is there, and train.py takes it; full: no other setting is at odds with it
    named = {"activation_checkpointing": "full", "gradient_accumulation_steps": options["ranks"]}
    estimate.situation(options["config"], options["ranks"], named | estimate.read_flags(flags))
    kinds = list(ROWS) if options["sweep"] == "both" else [options["sweep"]]
    for kind, keys in {"batch": ("batches", "block_size"), "seq": ("contexts", "batch_size")}.items():
        unread = [word for word in asked_for if kind not in kinds and word.partition("=")[0] in keys]
        if unread:
            raise ValueError(f"{unread[0]}: not read by sweep={kinds[0]}: say sweep={kind} or sweep=both")
    return kinds, options | {"flags": flags}


def gib(text: str) -> float | None:
    if text and (not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text)):
        raise ValueError(f"memory_limit_gib={text}: a number of GiB, as in memory_limit_gib=24")
    return float(text) if text else None


def refuse(flags: list[str], options: dict) -> None:
    """What contradicts itself, or what a peer cannot do."""
    said = estimate.read_flags(flags)
    estimate.refuse_words(said, "the sweep sets it;")
    step.refuse_flags(said)
    refuse_model(said, options["peers"])
    if options["at_once"] > 1 and options["ranks"] > 1:
        raise ValueError(f"at_once={options['at_once']}: each point has {options['ranks']} GPUs by ranks=")
    if "recipe" in options["peers"] and options["offload"] != ["none"]:
        raise ValueError("peers=recipe: it offloads nothing, so it is compared with offload=none alone")
    if {"hf", "liger"} & set(options["peers"]) and "selective" in options["checkpointing"]:
        raise ValueError("checkpointing=selective: Hugging Face knows only none and full; leave out peers=hf,liger")


def all_series(options: dict) -> list[Series]:
    """Ours before the peers; what a peer offloads is all or nothing."""
    found = []
    for checkpointing, offload in itertools.product(options["checkpointing"], options["offload"]):
        found += [Series(arm, checkpointing, offload) for arm in options["arms"] if arm in ARMS]
        offload = "none" if offload == "none" else "all"
        found += [Series(peer, checkpointing, offload) for peer in options["peers"] if peer in PEERS]
    return list(dict.fromkeys(found))


# ----------------------------------------------------------------------------------------------------------------------
# Points


def measured(kinds: list[str], options: dict, known: dict | None = None):
    """Kind and row after row: the series in turn at each size, until each has met a size that it does not manage.

    known: rows that need not be measured, by place. What one sweep has measured, the next one knows.
    """
    missing, known = set(), dict(known or {})
    for kind in kinds:
        going = all_series(options)
        for batch, block in sizes(kind, options):
            going = [series for series in going if series.arm not in missing]
            if not going:
                break
            cpu_gib = memory_stats.cpu_available() / 2**30 / options["at_once"]  # nothing runs now

            def measure(series, gpu, batch=batch, block=block, cpu_gib=cpu_gib):
                row = place(series, batch, block, options)
                if series.arm in missing:
                    return None
                row = known.get(tuple(row.values())) or point(row, series, options, gpu, cpu_gib)
                missing.update({series.arm} if "missing" in row else set())
                return row

            for series, row in zip(going, step.spread(measure, going, options["at_once"]), strict=True):
                if row is None:
                    continue
                if "tok_per_s" not in row:
                    going = [other for other in going if other != series]
                if "oom" in row:
                    known[tuple(row[key] for key in PLACE)] = row
                yield kind, row


def sizes(kind: str, options: dict):
    """Batch and block, growing; batches without an end."""
    if kind == "seq":
        return ((options["batch_size"], block) for block in options["contexts"] or CONTEXTS)
    doubled = (2**k * BATCHES[-1] for k in itertools.count(1))
    return ((batch, options["block_size"]) for batch in options["batches"] or itertools.chain(BATCHES, doubled))


def place(series: Series, batch: int, block: int, options: dict) -> dict:
    """What names a row."""
    where = (options["config"], series.arm, options["ranks"], batch, block, series.checkpointing, series.offload)
    flags = shlex.join(options["flags"]) if series.arm in ARMS else ""
    return dict(zip(PLACE, (*where, options["memory_limit_gib"], flags), strict=True))


def point(row: dict, series: Series, options: dict, gpu: int, there: float) -> dict:
    """The row of this place, with what was measured there or why nothing was. there: GiB of CPU memory."""
    ours, ranks, tokens = series.arm in ARMS, options["ranks"], row["batch"] * row["block"]
    try:
        row |= {"estimated_gib": estimated_gib(row)} if ours else {}
    except ValueError as error:  # train.py would not take it
        return row | {"failed": str(error)}
    needed, at_once = cpu_gib(row), options["at_once"]
    if needed > there:
        sentence = f"offload={series.offload} needs {needed:.1f} GiB of CPU memory, this machine has {there:.1f}"
        sentence += f" for each of {at_once} points at once" * (at_once > 1)
        return row | {"failed": sentence}
    warmup, steps = n_steps(tokens)
    row |= {"steps": options["steps"] or steps}
    at = (row["config"], row["batch"], row["block"], series.checkpointing, row["steps"])
    common = {"ranks": ranks, "warmup": warmup, "launch": launcher(options, gpu)}
    if ours:
        flags = shlex.join([f"--offload={series.offload}", *ARMS[series.arm], *options["flags"]])
        result = step.nanocria_point(*at, flag=flags, **common)
    else:
        result = step.peer_point(PEERS[series.arm][series.offload], *at, **common)
    return row | {"oom": False} | result | ({"at_once": at_once} if at_once > 1 else {})


def n_steps(tokens: int) -> tuple[int, int]:
    """To warm up, and to measure: fewer of the long ones. 4 x 131,072 tokens take a minute."""
    return (2 if tokens < 2**18 else 1), max(1, min(10, 2**19 // tokens))


def known_rows(new: dict, out: Path, steps: int | None) -> dict:
    """What a record has already that the new one continues, by place: what was measured over as many steps."""
    old = step.read_record(out)
    if not step.continues(old, new) or "dirty" in new["versions"]["nanocria"]:  # that names no code
        return {}
    rows = [(row, n_steps(row["batch"] * row["block"])[1]) for kind in ROWS for row in old[kind]]
    rows = [row for row, usual in rows if row.get("oom") or row.get("steps", usual) == (steps or usual)]
    return {tuple(row[key] for key in PLACE): row for row in rows}


def untracked(config: str) -> dict:
    """What names the version of a config that git does not track, and so no commit does."""
    path = report.ROOT / config
    command = ["git", "ls-files", "--error-unmatch", "--", str(path)]
    try:
        if subprocess.run(command, cwd=report.ROOT, capture_output=True).returncode == 0:
            return {}
    except OSError:  # no git
        pass
    return {"config": f"{config} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"}


def launcher(options: dict, gpu: int):
    """step.run, held to a part of the card."""
    gib, at_once = options["memory_limit_gib"], options["at_once"]
    limit = ["-m", "benchmarks.limited", f"{gib:g}"] if gib else []
    beside = {"gpu": gpu, "gpus": at_once} if at_once > 1 else {}
    return lambda command, ranks=1: step.run([*limit, *command], ranks, TIMEOUT, **beside)


def main(words: list[str]) -> None:
    n_gpus = torch.cuda.device_count()
    try:
        kinds, options = parse(words, n_gpus)
    except ValueError as error:
        sys.exit(str(error))
    if not n_gpus:
        sys.exit(
            "a sweep needs a CUDA GPU, and torch finds none. Without one:\n"
            "  python bench.py estimate card=4090      what fits in a card, by arithmetic"
        )
    if options["memory_limit_gib"]:
        held, printed = launcher(options, 0)([])  # elsewhere, so that this process takes none of the card
        if held is None:
            sys.exit(printed.strip())
    out = options["out"]
    new = step.begin("", words, ROWS)
    new["device"] = f"{options['ranks']} x {new['device']}"
    new["versions"] |= untracked(options["config"])
    step.keep(options["keep"], new, out)
    known = known_rows(new, out, options["steps"])
    if known:
        print(f"{out} has {len(known)} points already: delete it to measure them again")
    print(HEADER)
    record, failed = step.fill(new, measured(kinds, options, known), out, ROWS, lambda row, _: line(row))
    draw(record, out.with_suffix(".png"))
    print(json.dumps(summary(record, out, failed)))


def draw(record: dict, path: Path) -> None:
    try:
        from benchmarks import draw
    except ImportError as error:
        print(f"no plot: {error} (pip install matplotlib)")
        return
    if any(done(record[kind]) for kind in ROWS):
        draw.draw_sweep(record, path)
        print(f"plot: {path}")
