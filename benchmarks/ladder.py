"""The ladder: each memory technique on top of the previous one: what it saves, what it costs, its effect on the loss.

    python bench.py ladder                                     Llama 3.2 1B, 3B and 3.1 8B, as if on a 24 GiB card
    python bench.py ladder --models=1b --measure=losses        the losses after 300 steps of 8 x 1,024 tokens
    python bench.py ladder --techniques=bf16,adamw8bit,qlora --memory_limit_gib=16

A technique has the settings of the one that it builds on, plus its own. Two steps are measured: with one sequence of
1,024 tokens, for the least memory that it needs, and with the largest batch that fits, for its best speed. Adapters
train on random weights, which are as fast as any. The techniques hf_... are Hugging Face's model with Liger-Kernel, in
pure bfloat16 with full checkpointing, for techniques that another package has.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

from benchmarks import losses, runner, sweep
from benchmarks.estimate import cpu_gib, outside_gib, resolve
from benchmarks.records import Record
from benchmarks.settings import read_settings
from benchmarks.tables import is_measured
from configurator import SettingError
from model import LlamaConfig
from runtime import memory_advice
from runtime.memory import RunShape

# settings
models = "1b,3b,8b"  # one or several
techniques = ""  # by name; nothing: all
measure = "fits,losses"  # what to measure: losses only of the first model
memory_limit_gib = 24.0  # as if the card had only so many GiB
offload_dir = ""  # a folder on an NVMe drive, for the technique that needs one; nothing: it is left out
out = "out/ladder.json"  # the record

TECHNIQUES = {  # the technique that it builds on, its own settings of train.py
    "plain": ("", "--dtype=float32 --kernels=none --attention=sdpa --activation_checkpointing=none"),  # PyTorch
    "kernels": ("plain", "--kernels=blocks --attention=auto"),
    "loss": ("kernels", "--kernels=all"),
    "checkpointing": ("loss", "--activation_checkpointing=full"),
    "bf16": ("checkpointing", "--dtype=bfloat16"),
    "adamw8bit": ("bf16", "--optimizer_bits=8"),
    "galore": ("adamw8bit", "--optimizer=galore --galore_rank=128"),  # float32 moments: 8 bits need 256
    "offload_optimizer": ("adamw8bit", "--offload=optimizer"),
    "offload_all": ("offload_optimizer", "--offload=all"),  # the weights too
    "offload_activations": ("offload_all", "--offload_activations=true"),
    "nvme": ("offload_activations", ""),  # --offload_dir
    "lora": ("bf16", "--lora_rank=16 --lora_alpha=32"),
    "lora_fp8": ("lora", "--fp8=true"),
    "qlora": ("lora", "--quantize_base=nf4"),
    "qlora_fp8": ("qlora", "--fp8=true"),
}
PEERS = {  # how another package does it: the technique, the trainer
    "hf_adamw8bit": ("adamw8bit", "hf-liger-8bit"),
    "hf_galore": ("galore", "hf-liger-galore"),
    "hf_lora": ("lora", "hf-liger-lora"),
    "hf_qlora": ("qlora", "hf-liger-qlora"),
}
CONFIGS = {"1b": "config/llama32_1b.py", "3b": "config/llama32_3b.py", "8b": "config/llama31_8b.py"}
BLOCK_SIZE = 1024  # tokens of a sequence
BATCHES_TO_TRY = sorted(m * 2**k for m in (2, 3) for k in range(11))  # to search for the largest that fits


def settings_of(technique: str, s: SimpleNamespace) -> dict:
    """Settings of train.py: those of the techniques below, then its own."""
    on, flags = TECHNIQUES[technique]
    settings = settings_of(on, s) if on else {}
    settings |= dict(flag.removeprefix("--").split("=") for flag in flags.split())
    return settings | ({"offload_dir": s.offload_dir} if technique == "nvme" else {})


def resolved(model: str, technique: str, s: SimpleNamespace) -> tuple[LlamaConfig, RunShape]:
    """The model, and the RunShape of a technique with one sequence."""
    one_sequence = {"batch_size": 1, "block_size": BLOCK_SIZE, "gradient_accumulation_steps": 1}
    return resolve(CONFIGS[model], 1, settings_of(technique, s) | one_sequence)


def measure_fits(model: str, name: str, s: SimpleNamespace, record: Record) -> None:
    """One sequence; then batches from the estimate upwards while they fit, or downwards until one fits."""

    def fits(batch: int) -> bool:
        return is_measured(measure_batch(model, name, batch, s, record))

    if not fits(1):
        return
    technique = PEERS[name][0] if name in PEERS else name
    config, shape = resolved(model, technique, s)
    largest = memory_advice.largest_batch(config, shape, s.memory_limit_gib - outside_gib(shape))
    start = max(bisect_right(BATCHES_TO_TRY, largest) - 1, 0)
    first_fits = fits(BATCHES_TO_TRY[start])
    for batch in BATCHES_TO_TRY[start + 1 :] if first_fits else reversed(BATCHES_TO_TRY[:start]):
        if fits(batch) != first_fits:
            return


def measure_batch(model: str, name: str, batch: int, s: SimpleNamespace, record: Record) -> dict:
    if name in PEERS:
        _, trainer = PEERS[name]
        settings = {"activation_checkpointing": "full"}
        pinned_gib = 0.0
    else:
        trainer = "nanocria"
        settings = settings_of(name, s)
        config, shape = resolved(model, name, s)
        pinned_gib = cpu_gib(config, replace(shape, batch_size=batch))
    checkpointing = settings.pop("activation_checkpointing")
    flags = [f"--{name}={value}" for name, value in settings.items()]
    point = sweep.point_of(CONFIGS[model], trainer, batch, BLOCK_SIZE, checkpointing, flags, s.memory_limit_gib)
    key = {"model": model, "technique": name, "batch": batch}
    return record.measure("points", key, lambda: point | {"cpu_gib": pinned_gib} | sweep.measure_point(**point))


def measure_losses(model: str, technique: str, s: SimpleNamespace, record: Record) -> None:
    """On the whole card."""
    settings = settings_of(technique, s)
    if "lora_rank" not in settings:  # adapters of a random model learn nothing
        key = {"model": model, "technique": technique}
        record.measure("losses", key, losses.train_losses, 300, 8, BLOCK_SIZE, CONFIGS[model], **settings)


def main(argv: list[str]) -> None:
    lists = {"models": CONFIGS, "measure": ("fits", "losses"), "techniques": TECHNIQUES | PEERS}
    s = read_settings(globals(), argv, **lists)
    s.techniques = s.techniques or [name for name in TECHNIQUES | PEERS if name != "nvme" or s.offload_dir]
    if "nvme" in s.techniques and not s.offload_dir:
        raise SettingError("--techniques=nvme needs a folder on an NVMe drive, as in --offload_dir=/mnt/nvme")
    record = runner.start("ladder", s)
    if "fits" in s.measure:
        for model, name in product(s.models, s.techniques):
            measure_fits(model, name, s, record)
    if "losses" in s.measure:
        for technique in s.techniques:
            if technique in TECHNIQUES:
                measure_losses(s.models[0], technique, s, record)
    runner.finish(record)
