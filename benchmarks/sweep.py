"""What fits on the card: batch and context grow until nothing fits, against other trainers.

    python bench.py                               batches of Llama 3.2 1B, sequences of 1,024 tokens, on this card
    python bench.py --sweep=both --trainers=nanocria,hf-masters,hf-liger-masters     contexts too, and two others
    python bench.py --memory_limit_gib=24 --checkpointing=full --offload=none,optimizer,all
    python bench.py --preset=study                24 GiB, offload=all, full checkpointing: beside Hugging Face and Liger
    python bench.py --preset=8b                   Llama 3.1 8B, sequences of 512 tokens, on all GPUs, beside the recipe
    python bench.py --preset=finetune             24 GiB, Llama 3.1 8B with adapters, beside peft and bitsandbytes: the
                                                  fastest settings at each size
    python bench.py -- --mlp_chunks=4             arguments after -- go to train.py, for nanocria alone

benchmarks/trainers.py describes the trainers. hf-masters and hf-liger-masters keep float32 weights and compute in
bfloat16, as nanocria; hf-offload and hf-liger-offload also keep everything in CPU memory, as --offload=all.

Each point is a separate process, measured on the real step: forward, backward, clip, update. A series ends at the first
size that fails. A plot is drawn beside the record. A sweep that was stopped continues where the record of the same code
and card ends.
"""

import itertools
import shlex
from types import SimpleNamespace
from typing import Literal

import torch

from benchmarks import runner, settings
from benchmarks.estimate import cpu_gib_of, resolve, run_of
from benchmarks.records import Record
from benchmarks.trainers import TRAINERS
from configurator import SettingError
from model import LlamaConfig
from runtime import memory, memory_stats

# settings
preset: Literal["study", "8b", "finetune"] | None = None  # a set of settings, which other flags override
sweep: Literal["batch", "seq", "both"] = "batch"  # what grows: batches, contexts
trainers = "nanocria"  # one or several of trainers.py
config = "config/llama32_1b.py"  # the model
memory_limit_gib: float | None = None  # as if the card had only so many GiB
checkpointing = "none"  # one or several of none, selective, full
offload = "none"  # of nanocria: one or several of none, optimizer, all
batches = ""  # for sweep=batch, one,two,...; default: 1 to 112, then doubled until none fits
contexts = ""  # for sweep=seq; default: 512 to 131,072
block_size = 1024  # of the batches
batch_size = 4  # of the contexts
steps: int | None = None  # to measure; none: 10, fewer if they are long
ranks: int | Literal["all"] = 1  # GPUs of a point
keep = False  # keep rows measured with older code: for changes that affect neither time nor memory
out = ""  # the record; default: out/sweep.json, or a preset's in benchmarks/records

BATCHES = [1, 4, 8, 16, 32, 64, 96, 112]  # the study's; then doubled
CONTEXTS = [512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 65536, 131072]
PRESETS = {
    "study": ["--sweep=both", "--memory_limit_gib=24", "--checkpointing=full", "--offload=all",
              "--trainers=nanocria-plain,nanocria-unfused,nanocria,nanocria-long,hf-offload,hf-liger-offload",
              f"--out={settings.RECORDS / 'study.json'}"],
    "8b": ["--config=config/llama31_8b.py", "--block_size=512", "--ranks=all", "--trainers=nanocria,recipe",
           "--checkpointing=full", f"--out={settings.RECORDS / 'study_8b.json'}"],
    "finetune": ["--config=config/llama31_8b.py", "--memory_limit_gib=24",
                 f"--out={settings.RECORDS / 'finetune.json'}"],
}  # fmt: skip
ON_CPU = "--offload_activations=true"
FP8 = "nanocria-lora-fp8,nanocria-qlora-fp8"
FINETUNE = [  # the fastest settings at each size: trainers, (batch, block), checkpointing, flags of nanocria
    ("nanocria-qlora,nanocria-lora-fp8,nanocria-qlora-fp8", (2, 2048), "none", "--cuda_graph=true"),
    ("nanocria-lora", (2, 2048), "selective", "--cuda_graph=true"),
    ("nanocria-qlora", (2, 2048), "full", ON_CPU),  # the leanest
    ("hf-liger-qlora", (2, 2048), "none", ""),  # no other of theirs fits
    ("hf-liger-lora,hf-liger-qlora", (2, 2048), "full", ""),
    *((f"nanocria-qlora,{FP8}", shape, "selective", ON_CPU) for shape in ((1, 8192), (4, 8192), (1, 32768))),
    *(("hf-liger-qlora", shape, "full", "") for shape in ((1, 8192), (4, 8192), (1, 32768), (1, 65536))),
    ("nanocria-qlora,nanocria-qlora-fp8", (1, 131072), "full", ON_CPU),
]
LISTS = {
    "trainers": TRAINERS, "checkpointing": settings.CHECKPOINTING, "offload": settings.OFFLOAD,
    "batches": settings.whole_number, "contexts": settings.whole_number,
}  # fmt: skip


def parse(argv: list[str], n_gpus: int) -> SimpleNamespace:
    typed = settings.read_settings(globals(), argv, for_train_py=True)
    s = settings.read_settings(
        globals(), [*PRESETS.get(typed.preset, []), *argv], LISTS, "out/sweep.json", for_train_py=True
    )
    s.command = typed.command
    s.ranks = max(n_gpus, 1) if s.ranks == "all" else s.ranks
    if s.ranks > max(n_gpus, 1):
        raise SettingError(f"--ranks={s.ranks}: torch sees {n_gpus} GPU(s)")
    refuse_another_model(s)
    # Check that the file exists and train.py accepts it. full: it conflicts with no other setting.
    resolve(s.config, s.ranks, {"activation_checkpointing": "full", "gradient_accumulation_steps": s.ranks}, s.flags)
    return s


def refuse_another_model(s: SimpleNamespace) -> None:
    peers = [trainer for trainer in s.trainers if TRAINERS[trainer].build]
    for name in (flag.removeprefix("--").partition("=")[0] for flag in s.flags):
        if peers and name in LlamaConfig.__dataclass_fields__:
            raise SettingError(f"-- --{name}: {peers[0]} would train another model; write it in a config")


def all_series(s: SimpleNamespace) -> list[tuple[str, str, str]]:
    """Trainer, checkpointing and offload of each series, without what a peer cannot do: of the peers only the recipe
    has selective checkpointing, and each has one offload."""
    series = []
    for checkpointing, offload, trainer in itertools.product(s.checkpointing, s.offload, s.trainers):
        if TRAINERS[trainer].build:
            offload = "all" if trainer.endswith("offload") else "none"
        if checkpointing != "selective" or not trainer.startswith("hf"):
            series.append((trainer, checkpointing, offload))
    return list(dict.fromkeys(series))


def grow(s: SimpleNamespace, record: Record) -> None:
    """At each size the series in turn, so that a card that warms up favors none, until each has met one that fails."""
    for kind in ("batch", "seq") if s.sweep == "both" else (s.sweep,):
        going = all_series(s)
        for batch, block in sizes(kind, s):
            for series in list(going):
                point = point_of(*series, batch, block, s)
                row = record.measure(kind, point, measure_point, point, s.steps)
                if "tok_per_s" not in row:
                    going.remove(series)
            if not going:
                break


def sizes(kind: str, s: SimpleNamespace):
    """Batch and block, in growing order; batches without end."""
    if kind == "seq":
        return ((s.batch_size, block) for block in sorted(s.contexts) or CONTEXTS)
    doubled = (2**k * BATCHES[-1] for k in itertools.count(1))
    return ((batch, s.block_size) for batch in sorted(s.batches) or itertools.chain(BATCHES, doubled))


def point_of(trainer: str, checkpointing: str, offload: str, batch: int, block: int, s: SimpleNamespace) -> dict:
    """What identifies a row of a sweep."""
    return {
        "config": s.config, "trainer": trainer, "ranks": s.ranks, "batch": batch, "block": block,
        "checkpointing": checkpointing, "offload": offload, "limit_gib": s.memory_limit_gib,
        "flags": "" if TRAINERS[trainer].build else shlex.join(s.flags),
    }  # fmt: skip


def measure_point(point: dict, steps: int | None = None) -> dict:
    """The measurement at this point, or why there is none. steps: to measure; None: n_steps()."""
    trainer = TRAINERS[point["trainer"]]
    try:
        estimated = {} if trainer.build else {"estimated_gib": memory.peak_gib(*run_of(point))}
    except SettingError as error:  # train.py would reject it
        return {"failed": str(error)}
    needed = cpu_gib_of(point)
    available = memory_stats.cpu_available() / 2**30
    if needed > available:
        return {"failed": f"it needs {needed:.1f} GiB of CPU memory, this machine has {available:.1f}"}
    warmup, usual = n_steps(point["batch"] * point["block"])
    warmup += "--cuda_graph=true" in point["flags"]  # the step that records the graph takes longer
    flags = [f"--offload={point['offload']}", *shlex.split(point["flags"])]
    if "--lora_rank" in f"{trainer.flags} {point['flags']}":
        flags.append(f"--init_from={runner.random_base(point['config']).name}")
    at = {key: point[key] for key in ("config", "batch", "block", "checkpointing", "ranks", "limit_gib")}
    return estimated | runner.train_steps(point["trainer"], steps or usual, flags, warmup, **at)


def n_steps(tokens: int) -> tuple[int, int]:
    """Steps to warm up, and to measure: fewer if they are long. 4 x 131,072 tokens take a minute."""
    return (2 if tokens < 2**18 else 1), max(1, min(10, 2**19 // tokens))


def finetune(s: SimpleNamespace, record: Record) -> None:
    more = s.flags
    for trainers, (batch, block), checkpointing, flags in FINETUNE:
        s.flags = [*flags.split(), *more]
        for trainer in trainers.split(","):
            point = point_of(trainer, checkpointing, "none", batch, block, s)
            record.measure("batch", point, measure_point, point, s.steps)


def main(argv: list[str]) -> None:
    s = parse(argv, torch.cuda.device_count())
    record = runner.start("sweep", s, n_gpus=s.ranks)
    measure = finetune if s.preset == "finetune" else grow
    measure(s, record)
    runner.finish(record, plot="study")
