"""What fits in the card: batch and context grow until nothing fits, beside the frameworks.

    python bench.py                               batches of Llama 3.2 1B, 1,024 tokens a sequence, on the card at hand
    python bench.py --sweep=both --peers=hf,liger          contexts too, at batch 4, and beside two others
    python bench.py --memory_limit_gib=24 --checkpointing=full --offload=none,optimizer,all --arms=all,long
    python bench.py --preset=study                24 GiB, offload=all, full checkpointing: our arms beside hf and liger
    python bench.py --preset=8b                   Llama 3.1 8B, 512 tokens a sequence, on all GPUs, beside the recipe
    python bench.py -- --mlp_chunks=4             what stands behind -- goes to train.py, for ours alone

arms    all: train.py as it is; kernels: without the fused loss; torch: also without the kernels of norms, RoPE, MLP and
        attention; long: all, with --offload_activations=true; or none
peers   hf: transformers' LlamaForCausalLM; liger: with Liger-Kernel's patches; recipe: see benchmarks/peers.py; or
        none. Like ours they keep float32 weights and compute in bfloat16. hf and liger offload all or nothing, through
        FSDP2: where ours has the optimizer on the CPU, they have weights and gradients there too.

Each point is a process of its own, measured on the real step: forward, backward, clip, update. What runs out of memory
is not tried with more. A plot is drawn beside the record. A sweep that was stopped continues where the record of the
same code, card and --steps ends; delete that to measure it again. A config that git does not track is part of the code.
"""

import hashlib
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch

from benchmarks import arms as trainers
from benchmarks import cli, compare, record, runner
from benchmarks.run_shape import cpu_gib_of, refuse_model, resolve, run_of
from configurator import SettingError
from runtime import memory, memory_stats

# settings
preset: Literal["study", "8b"] | None = None  # settings together, which other flags override
sweep: Literal["batch", "seq", "both"] = "batch"  # what grows: batches, contexts
arms = "all"  # ours: all, kernels, torch, long, or none
peers = "none"  # beside them: hf, liger, recipe
config = "config/llama32_1b.py"  # the model
memory_limit_gib: float | None = None  # as if the card had only so many GiB
checkpointing = "none"  # one or several of none, selective, full
offload = "none"  # one or several of none, optimizer, all
batches = ""  # of sweep=batch, one,two,...; nothing: 1 to 112, then doubled until none fits
contexts = ""  # of sweep=seq; nothing: 512 to 131,072
block_size = 1024  # of the batches
batch_size = 4  # of the contexts
steps: int | None = None  # to measure; none: 10, fewer of the long ones
ranks: int | Literal["all"] = 1  # GPUs of a point
at_once: int | Literal["all"] = 1  # points at a time, each on a GPU of its own; they share the CPU memory's bandwidth
keep = ""  # commits whose rows stay although the code has changed since: for changes that cost neither time nor memory
out = ""  # the record; nothing: out/sweep.json, or a preset's in benchmarks/records

BATCHES = [1, 4, 8, 16, 32, 64, 96, 112]  # the study's, then on by doubling
CONTEXTS = [512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 65536, 131072]
PRESETS = {
    "study": ["--sweep=both", "--arms=torch,kernels,all,long", "--peers=hf,liger", "--memory_limit_gib=24",
              "--checkpointing=full", "--offload=all", f"--out={record.RECORDS / 'study.json'}"],
    "8b": ["--config=config/llama31_8b.py", "--block_size=512", "--ranks=all", "--peers=recipe", "--checkpointing=full",
           f"--out={record.RECORDS / 'study_8b.json'}"],
}  # fmt: skip
KEYS = dict.fromkeys(compare.KINDS, compare.SWEEP_PLACE)  # what names a row
UNREAD = {"batch": ("contexts", "batch_size"), "seq": ("batches", "block_size"), "both": ()}
TIMEOUT = 900  # seconds a point may take: half a million tokens a step, attention over 131,072 of them
HEADER = (
    f"{'trainer':<33}{'checkpoints':<13}{'offload':<11}{'batch':>6}{'tokens':>8}"
    f"{'GiB':>7}{'reserved':>10}{'estimate':>10}{'tok/s':>9}{'MFU':>7}"
)


class Series(NamedTuple):
    """What grows until it does not fit."""

    arm: str
    checkpointing: str
    offload: str


# ----------------------------------------------------------------------------------------------------------------------
# Settings


def parse(argv: list[str], n_gpus: int) -> SimpleNamespace:
    given = cli.read_settings(globals(), argv, for_train_py=True)
    s = cli.read_settings(globals(), [*PRESETS.get(given.preset, []), *argv], for_train_py=True)
    s.given, s.command = given.given, given.command
    unread = [name for name in s.given if name in UNREAD[s.sweep]]
    if unread:
        raise SettingError(f"--{unread[0]} is not read by --sweep={s.sweep}: say --sweep=both, or the other one")
    for name, known in {
        "arms": [*trainers.SWEEP_FLAGS, "none"], "peers": [*trainers.SWEEP_PEERS, "none"],
        "checkpointing": runner.CHECKPOINTING, "offload": runner.OFFLOAD,
    }.items():  # fmt: skip
        setattr(s, name, cli.one_of(name, getattr(s, name), known))
    s.batches, s.contexts = (sorted(cli.whole_numbers(n, getattr(s, n))) for n in ("batches", "contexts"))
    cli.at_least_one(s, "block_size", "batch_size", "steps")
    s.ranks, s.at_once = (cli.n_gpus(n, getattr(s, n), n_gpus) for n in ("ranks", "at_once"))
    s.out, s.config = record.default_out(s.out, "sweep", "out"), cli.config_path(s.config)
    refuse(s)
    # The file exists, and train.py takes it. full: no other setting is at odds with it.
    named = {"activation_checkpointing": "full", "gradient_accumulation_steps": s.ranks}
    resolve(s.config, s.ranks, named, s.flags)
    return s


def refuse(s: SimpleNamespace) -> None:
    """What contradicts itself, or what a peer cannot do."""
    if s.memory_limit_gib is not None and not 0 < s.memory_limit_gib < 1e4:
        raise SettingError(f"--memory_limit_gib={s.memory_limit_gib:g}: a number of GiB, as in --memory_limit_gib=24")
    cli.refuse_flags(s, ("batch_size", "block_size", "activation_checkpointing", "offload"))
    refuse_model(s)
    if s.at_once > 1 and s.ranks > 1:
        raise SettingError(f"--at_once={s.at_once}: each point has {s.ranks} GPUs by --ranks")
    if "recipe" in s.peers and s.offload != ["none"]:
        raise SettingError("--peers=recipe: it offloads nothing, so it is compared with --offload=none alone")
    if {"hf", "liger"} & set(s.peers) and "selective" in s.checkpointing:
        raise SettingError(
            "--checkpointing=selective: Hugging Face knows only none and full; leave out --peers=hf,liger"
        )


def all_series(s: SimpleNamespace) -> list[Series]:
    """Ours before the peers; what a peer offloads is all or nothing."""
    found = []
    for checkpointing, offload in itertools.product(s.checkpointing, s.offload):
        found += [Series(arm, checkpointing, offload) for arm in s.arms if arm != "none"]
        offload = "none" if offload == "none" else "all"
        found += [Series(peer, checkpointing, offload) for peer in s.peers if peer != "none"]
    return list(dict.fromkeys(found))


# ----------------------------------------------------------------------------------------------------------------------
# Points


def measured(s: SimpleNamespace, known: dict | None = None):
    """Kind and row after row: the series in turn at each size, until each has met a size that it does not manage.

    known: rows that need not be measured, by place. What one sweep has measured, the next one knows.
    """
    missing, known = set(), dict(known or {})
    for kind in compare.KINDS if s.sweep == "both" else [s.sweep]:
        going = all_series(s)
        for batch, block in sizes(kind, s):
            going = [series for series in going if series.arm not in missing]
            if not going:
                break
            there = memory_stats.cpu_available() / 2**30 / s.at_once  # nothing runs now

            def measure(series, gpu, batch=batch, block=block, there=there):
                row = place(series, batch, block, s)
                if series.arm in missing:
                    return None
                row = known.get(tuple(row.values())) or point(row, s, gpu, there)
                missing.update({series.arm} if "missing" in row else set())
                return row

            for series, row in zip(going, runner.spread(measure, going, s.at_once), strict=True):
                if row is None:
                    continue
                if "tok_per_s" not in row:
                    going = [other for other in going if other != series]
                if "oom" in row:
                    known[compare.values(row, compare.SWEEP_PLACE)] = row
                yield kind, row


def sizes(kind: str, s: SimpleNamespace):
    """Batch and block, growing; batches without an end."""
    if kind == "seq":
        return ((s.batch_size, block) for block in s.contexts or CONTEXTS)
    doubled = (2**k * BATCHES[-1] for k in itertools.count(1))
    return ((batch, s.block_size) for batch in s.batches or itertools.chain(BATCHES, doubled))


def place(series: Series, batch: int, block: int, s: SimpleNamespace) -> dict:
    """What names a row."""
    flags = shlex.join(s.flags) if series.arm in trainers.SWEEP_FLAGS else ""
    where = (s.config, series.arm, s.ranks, batch, block, series.checkpointing, series.offload)
    return dict(zip(compare.SWEEP_PLACE, (*where, s.memory_limit_gib, flags), strict=True))


def point(row: dict, s: SimpleNamespace, gpu: int, there: float) -> dict:
    """The row of this place, with what was measured there or why nothing was. there: GiB of CPU memory."""
    arm, offload = row["arm"], row["offload"]
    ours = arm in trainers.SWEEP_FLAGS
    try:
        row |= {"estimated_gib": memory.peak_gib(*run_of(row))} if ours else {}
    except SettingError as error:  # train.py would not take it
        return row | {"failed": str(error)}
    needed = cpu_gib_of(row)
    if needed > there:
        sentence = f"offload={offload} needs {needed:.1f} GiB of CPU memory, this machine has {there:.1f}"
        return row | {"failed": sentence + f" for each of {s.at_once} points at once" * (s.at_once > 1)}
    warmup, steps = n_steps(row["batch"] * row["block"])
    row |= {"steps": s.steps or steps}
    at = (row["config"], row["batch"], row["block"], row["checkpointing"], row["steps"])
    beside = {"gpu": gpu, "gpus": s.at_once} if s.at_once > 1 else {}
    common = {"ranks": s.ranks, "warmup": warmup}
    common["launch"] = runner.limited(s.memory_limit_gib, TIMEOUT, **beside)
    if ours:
        result = runner.train_point(*at, flags=[f"--offload={offload}", *trainers.SWEEP_FLAGS[arm], *s.flags], **common)
    else:
        result = runner.peer_point(trainers.SWEEP_PEERS[arm][offload], *at, **common)
    return row | {"oom": False} | result | ({"at_once": s.at_once} if s.at_once > 1 else {})


def n_steps(tokens: int) -> tuple[int, int]:
    """To warm up, and to measure: fewer of the long ones. 4 x 131,072 tokens take a minute."""
    return (2 if tokens < 2**18 else 1), max(1, min(10, 2**19 // tokens))


def known_rows(new: dict, out: Path, steps: int | None) -> dict:
    """What a record has already that the new one continues, by place: what was measured over as many steps."""
    old = record.read_record(out)
    if not record.continues(old, new) or "dirty" in new["versions"]["nanocria"]:  # that names no code
        return {}
    found = {}
    for row in (row for kind in KEYS for row in old[kind]):
        usual = n_steps(row["batch"] * row["block"])[1]
        if row.get("oom") or row.get("steps", usual) == (steps or usual):
            found[compare.values(row, compare.SWEEP_PLACE)] = row
    return found


def untracked(config: str) -> dict:
    """What names the version of a config that git does not track, and so no commit does."""
    path = record.ROOT / config
    command = ["git", "ls-files", "--error-unmatch", "--", str(path)]
    try:
        if subprocess.run(command, cwd=record.ROOT, capture_output=True).returncode == 0:
            return {}
    except OSError:  # no git
        pass
    return {"config": f"{config} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"}


# ----------------------------------------------------------------------------------------------------------------------
# What is printed


def line(row: dict, _: dict | None = None) -> str:
    """A row as one reads it while the sweep goes on: GiB is the peak of what PyTorch allocated."""
    title = trainers.SWEEP[row["arm"]]
    where = f"{title:<33}{row['checkpointing']:<13}{row['offload']:<11}{row['batch']:>6}{row['block']:>8}"
    peak, reserved, estimated = (
        "-" if row.get(key) is None else f"{row[key]:.1f}" for key in ("peak_gib", "reserved_gib", "estimated_gib")
    )
    if "tok_per_s" not in row:
        return f"{where}{'-':>7}{'-':>10}{estimated:>10}  {runner.trouble(row)}"
    return f"{where}{peak:>7}{reserved:>10}{estimated:>10}{row['tok_per_s']:9,.0f}{compare.mfu(row):>7}"


def summary(found: dict, out: Path, failed: list[dict]) -> dict:
    fits = []
    for kind in KEYS:
        for name, rows in compare.by_series(found[kind], kind).items():
            end = compare.largest(rows, kind, rows[0]["arm"])
            size = end[compare.VARIES[kind]] if end else 0
            fits.append(dict(zip(compare.SERIES, name, strict=True)) | {f"largest_{kind}": size})
    off = max((abs(deviation) for _, deviation in compare.deviations(found)), default=None)
    ratios = [ratio for kind in KEYS for ratio in compare.sweep_ratios(found[kind])]
    return {"record": str(out), "failed": failed, "largest": fits, "estimate_off": off, "ratios": ratios}


def draw(found: dict, path: Path) -> None:
    try:
        from benchmarks import draw
    except ImportError as error:
        print(f"no plot: {error} (pip install matplotlib)")
        return
    if any(compare.done(found[kind]) for kind in KEYS):
        draw.draw_sweep(found, path)
        print(f"plot: {path}")


def main(argv: list[str]) -> None:
    n_gpus = torch.cuda.device_count()
    s = parse(argv, n_gpus)
    if not n_gpus:
        sys.exit(
            "a sweep needs a CUDA GPU, and torch finds none. Without one:\n"
            "  python bench.py estimate --card=4090      what fits in a card, by arithmetic"
        )
    if s.memory_limit_gib:
        held, printed = runner.limited(s.memory_limit_gib)([])  # elsewhere, so that this process takes none of the card
        if held is None:
            sys.exit(printed.strip())
    new = runner.begin("", s.command, KEYS, at_once=s.at_once)
    new["device"] = f"{s.ranks} x {new['device']}"
    new["versions"] |= untracked(s.config)
    record.keep_rows(s.keep, new, s.out)
    known = known_rows(new, s.out, s.steps)
    if known:
        print(f"{s.out} has {len(known)} points already: delete it to measure them again")
    print(HEADER)
    found, failed = record.fill(new, measured(s, known), s.out, KEYS, line)
    draw(found, s.out.with_suffix(".png"))
    print(json.dumps(summary(found, s.out, failed)))
