"""Validate train.py's settings before anything is allocated: each one's limits, and combinations that do not work."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from optimizers.rules import rule_of
from runtime.distributed import stop

AT_LEAST = {
    1: ("batch_size", "block_size", "gradient_accumulation_steps", "max_iters", "lr_decay_iters", "eval_interval",
        "eval_iters", "log_interval", "timeout", "galore_rank", "galore_interval", "n_layer", "n_head", "n_kv_head",
        "n_embd", "ffn_dim", "vocab_size"),
    0: ("warmup_iters", "cooldown_iters", "learning_rate", "min_lr", "weight_decay", "grad_clip", "keep_last", "seed",
        "galore_scale", "lora_rank"),
}  # fmt: skip


def check_settings(settings: Mapping, world_size: int) -> None:
    problem = find_problem(settings, world_size, sys.argv)
    if problem:
        stop(problem)


def find_problem(settings: Mapping, world_size: int, argv: Sequence[str] = ()) -> str | None:
    """Return a sentence that says why train.py cannot run these settings on world_size ranks; None if it can.

    argv: the command line. A flag without effect is a user error there; a config file may leave a setting unused.
    """
    for least, names in AT_LEAST.items():
        for name in names:
            if settings[name] is not None and settings[name] < least:
                return f"{name} is {settings[name]}: it must be at least {least}"
    s = SimpleNamespace(**settings)
    head_dim = s.n_embd / max(s.n_head, 1)
    smallest = min(s.n_embd, s.ffn_dim, s.n_kv_head * head_dim)  # the smallest side of a block's matrices
    projects = s.optimizer == "galore"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # torch.compile's
    micro_batches, nf4 = s.gradient_accumulation_steps, s.base_dtype == "nf4"
    held = "base_dtype=nf4" if nf4 else "a frozen base in float8 (fp8)" if s.fp8 and s.lora_rank else None
    problems = {  # sentence -> whether it holds
        f"seed is {s.seed}: it must be below 2**63": s.seed >= 2**63,
        f"lr_decay_iters is {s.lr_decay_iters}, within the warm-up of {s.warmup_iters} steps: let the cosine end later":
            s.lr_decay_iters is not None and s.lr_decay_iters < min(s.warmup_iters, s.max_iters),
        f"min_lr is {s.min_lr}, above learning_rate, {s.learning_rate}: the decay is from learning_rate to min_lr":
            s.min_lr is not None and s.min_lr > s.learning_rate,
        f"warmup_iters {s.warmup_iters} and cooldown_iters {s.cooldown_iters} are more steps than max_iters, "
        f"{s.max_iters}: the first steps warm up, the last cool down":
            s.lr_schedule == "wsd" and s.cooldown_iters + s.warmup_iters > s.max_iters,
        f"cooldown_iters is {s.cooldown_iters}, which only lr_schedule wsd uses: add --lr_schedule=wsd":
            s.lr_schedule != "wsd" and s.cooldown_iters > 0,
        f"optimizer={s.optimizer} works with offload=none: it has no update on the CPU":
            s.offload != "none" and not rule_of(settings).supports_offload,
        f"galore_rank is {s.galore_rank}, but the smallest matrix has a side of {smallest:g}: choose a lower rank":
            projects and s.galore_rank > smallest,
        f"optimizer={s.optimizer} needs the CPU when it chooses a projection: add --cuda_graph=false":
            projects and s.cuda_graph,
        "optimizer=galore works with dtype bfloat16 or float32: an overflow would leave it without a projection":
            s.optimizer == "galore" and s.dtype == "float16",
        f"beta1 is {s.beta1} and beta2 {s.beta2}: both must be at least 0 and below 1":
            not (0 <= s.beta1 < 1 and 0 <= s.beta2 < 1),
        "out_dir is empty: name a folder for the checkpoints": not s.out_dir,
        "dataset is empty: name a folder under data/, or the path of another": not s.dataset,
        f"gradient_accumulation_steps is {micro_batches}: make it a multiple of the {world_size} ranks, as in "
        f"--gradient_accumulation_steps={max(micro_batches // world_size, 1) * world_size}":
            micro_batches % world_size != 0,
        "offload_activations does not work with compile or cuda_graph: add --compile=false --cuda_graph=false":
            s.offload_activations and (s.compile or s.cuda_graph),
        f"offload_dir is {s.offload_dir!r}, but nothing is offloaded: add --offload=optimizer or --offload=all":
            s.offload_dir is not None and s.offload == "none",
        "mask_documents works with attention auto or triton: PyTorch's does not support it":
            s.mask_documents and s.attention == "sdpa",
        f"mask_documents works with heads of size 16, 32, 64 or 128, not {head_dim:g}":  # kernels/flash_attention.py's
            s.mask_documents and head_dim not in (16, 32, 64, 128),
        "optimizer_bits=8 cuts the weights' rows into blocks of 256: n_embd and ffn_dim must be multiples of 256":
            s.optimizer_bits == 8 and (s.n_embd % 256 or s.ffn_dim % 256),
        f"lora_alpha is {s.lora_alpha}: it must be above 0": s.lora_alpha <= 0,
        f"lora_rank is {s.lora_rank}, above n_embd or ffn_dim: such adapters are larger than the weights they adapt":
            s.lora_rank > min(s.n_embd, s.ffn_dim),
        "base_dtype=nf4 is for the frozen weights under adapters: add --lora_rank=16": not s.lora_rank and nf4,
        "lora_rank works with optimizer=adamw and optimizer_bits=32: adapters have few states":
            s.lora_rank > 0 and (s.optimizer != "adamw" or s.optimizer_bits != 32),
        f"{held} stays on the GPU: add --offload=optimizer or --offload=none": held and s.offload == "all",
        f"{held} must be gathered by NCCL: drop copy_engines": held and s.copy_engines is True,
        f"--compile=true needs a C++ compiler on a CPU, but there is no {compiler}: install one, or set CXX":
            s.compile and s.device == "cpu" and not shutil.which(compiler),
        "cuda_graph needs one GPU and offload=none: add --cuda_graph=false":
            s.cuda_graph and (world_size > 1 or s.offload != "none"),
    }  # fmt: skip
    flags = {word.partition("=")[0] for word in argv}
    for setting, value, unused, names in (
        ("lora_rank", 16, not s.lora_rank, ["lora_alpha"]),
        ("optimizer", "galore", not projects, ["galore_rank", "galore_interval"]),
        ("optimizer", "galore", s.optimizer != "galore", ["galore_scale"]),
        ("lr_schedule", "cosine", s.lr_schedule != "cosine", ["lr_decay_iters"]),
        ("wandb_log", "true", not s.wandb_log, ["wandb_project", "wandb_run_name"]),
    ):
        for name in names if unused and f"--{setting}" not in flags else []:  # a sweep passes --lora_rank=0 too
            problems[f"--{name} has no effect without --{setting}={value}: add that"] = f"--{name}" in flags
    return next((sentence for sentence, holds in problems.items() if holds), None)
