"""What fits on the card: batch and context grow until nothing fits, against other trainers.

    python bench.py                               batches of Llama 3.2 1B, sequences of 1,024 tokens, on this card
    python bench.py --sweep=both --trainers=nanocria,hf-masters,hf-liger-masters     contexts too, and two others
    python bench.py --memory_limit_gib=24 --checkpointing=full --offload=optimizer
    python bench.py --preset=study                24 GiB, offload=all, full checkpointing: beside Hugging Face and Liger
    python bench.py --preset=finetune             24 GiB, Llama 3.1 8B with adapters, beside peft, bitsandbytes and
                                                  unsloth (or --trainers=some): the fastest settings at each size
    python bench.py -- --mlp_chunks=4             arguments after -- go to train.py, for nanocria alone

trainers.py and peers.py describe the trainers. hf-masters and hf-liger-masters keep float32 weights and compute in
bfloat16, as nanocria; hf-offload and hf-liger-offload also keep everything in CPU memory, as --offload=all.

Each point is a separate process, measured on the real step: forward, backward, clip, update. A series ends at the first
size that fails. A plot of what grows is drawn beside the record. A sweep that was stopped continues where its record
ends.
"""

import itertools
import shlex
from types import SimpleNamespace
from typing import Literal

from benchmarks import runner
from benchmarks.peers import PEERS
from benchmarks.records import Record
from benchmarks.settings import read_settings
from benchmarks.tables import is_measured
from benchmarks.trainers import TRAINERS, llama_config

# settings
preset: Literal["study", "finetune"] | None = None  # a set of settings, which other flags override
sweep: Literal["batch", "seq", "both"] = "batch"  # what grows: batches, contexts
trainers = "nanocria"  # one or several of trainers.py
config = "config/llama32_1b.py"  # the model
memory_limit_gib: float | None = None  # as if the card had only so many GiB
checkpointing: Literal["none", "selective", "full"] = "none"  # what backward recomputes; not Hugging Face: selective
offload: Literal["none", "optimizer", "all"] = "none"  # of nanocria
batches = "1,4,8,16,32,64,96,112,224,448,896,1792,3584,7168,14336,28672,57344,114688,229376"  # for sweep=batch
contexts = "512,1024,2048,4096,8192,12288,16384,24576,32768,65536,131072"  # for sweep=seq
block_size = 1024  # of the batches
batch_size = 4  # of the contexts
out = "out/sweep.json"  # the record; of a preset another

ON_CPU = "--offload_activations=true"
QLORA_AND_FP8 = ["nanocria-qlora", "nanocria-lora-fp8", "nanocria-qlora-fp8"]
LONG = [(1, 8192), (4, 8192), (1, 32768)]
FINETUNE = [  # the fastest settings at each size: trainers, (batch, block) of each, checkpointing, flags of nanocria
    (QLORA_AND_FP8, [(2, 2048)], "none", "--cuda_graph=true"),
    (["nanocria-lora"], [(2, 2048)], "selective", "--cuda_graph=true"),
    (["nanocria-qlora"], [(2, 2048)], "full", ON_CPU),  # the leanest
    (["hf-liger-qlora"], [(2, 2048)], "none", ""),  # no other of theirs fits
    (["hf-liger-lora", "hf-liger-qlora"], [(2, 2048)], "full", ""),
    (QLORA_AND_FP8, LONG, "selective", ON_CPU),
    (["hf-liger-qlora"], [*LONG, (1, 65536)], "full", ""),
    (["nanocria-qlora", "nanocria-qlora-fp8"], [(1, 131072)], "full", ON_CPU),
    (["unsloth-qlora"], [(2, 2048)], "none", ""),
    (["unsloth-qlora", "unsloth-qlora-long"], [(2, 2048), *LONG], "full", ""),
]
PRESETS = {
    "study": ["--sweep=both", "--memory_limit_gib=24", "--checkpointing=full", "--offload=all",
              "--trainers=nanocria-plain,nanocria-unfused,nanocria,nanocria-long,hf-offload,hf-liger-offload",
              "--out=out/study.json"],
    "finetune": ["--config=config/llama31_8b.py", "--memory_limit_gib=24", "--out=out/finetune.json",
                 "--trainers=" + ",".join(dict.fromkeys(name for names, *_ in FINETUNE for name in names))],
}  # fmt: skip


def grow(s: SimpleNamespace, record: Record) -> None:
    """At each size all trainers in turn, so that a card that warms up favors none, until each has met one that
    fails."""
    sizes = {
        "batch": [(batch, s.block_size) for batch in s.batches],
        "seq": [(s.batch_size, block) for block in s.contexts],
    }
    for kind in ("batch", "seq") if s.sweep == "both" else (s.sweep,):
        growing = list(s.trainers)
        for (batch, block), trainer in itertools.product(sizes[kind], s.trainers):
            if trainer in growing:
                point = point_of(s.config, trainer, batch, block, s.checkpointing, s.flags, s.memory_limit_gib)
                row = record.measure(kind, point, measure_point, **point)
                if not is_measured(row):
                    growing.remove(trainer)


def finetune(s: SimpleNamespace, record: Record) -> None:
    for trainers, shapes, checkpointing, flags in FINETUNE:
        chosen = [name for name in trainers if name in s.trainers]
        for (batch, block), trainer in itertools.product(shapes, chosen):
            flags_of_point = [*flags.split(), *s.flags]
            point = point_of(s.config, trainer, batch, block, checkpointing, flags_of_point, s.memory_limit_gib)
            record.measure("batch", point, measure_point, **point)


def point_of(
    config: str, trainer: str, batch: int, block: int, checkpointing: str, flags: list[str], limit_gib: float | None
) -> dict:
    """What identifies a row of a sweep, and measure_point()'s arguments. flags: of train.py."""
    return {
        "config": config, "trainer": trainer, "ranks": 1, "batch": batch, "block": block,
        "checkpointing": checkpointing, "limit_gib": limit_gib,
        "flags": "" if trainer in PEERS else shlex.join(flags),
    }  # fmt: skip


def measure_point(flags: str, **point) -> dict:
    """The measurement at this point, or why there is none. Long steps are few: 4 x 131,072 tokens take a minute."""
    tokens = point["batch"] * point["block"]
    steps = max(1, min(10, 2**19 // tokens))
    warmup = 2 if tokens < 2**18 else 1
    warmup += "--cuda_graph=true" in flags  # the step that records the graph takes longer
    return runner.train_steps(**point, steps=steps, warmup=warmup, flags=shlex.split(flags))


def main(argv: list[str]) -> None:
    preset = read_settings(globals(), argv, for_train_py=True).preset
    lists = {"trainers": TRAINERS, "batches": int, "contexts": int}
    s = read_settings(globals(), [*PRESETS.get(preset, []), *argv], for_train_py=True, **lists)
    s.argv = argv  # for the record
    if s.offload != "none":
        s.flags = [f"--offload={s.offload}", *s.flags]
    llama_config(s.config)  # a SettingError now, not after the card has been measured
    record = runner.start("sweep", s)
    if s.preset == "finetune":
        finetune(s, record)
        runner.finish(record)
    else:
        grow(s, record)
        runner.finish(record, plot="plot_sweep")
