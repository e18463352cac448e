"""Trains a Llama 3. Read it from top to bottom: settings, setup, data, model, optimizer, loop.

Any machine:        python train.py config/baby_llama.py
One GPU:            python train.py config/llama32_1b.py      # of 40 GB; for others README.md has a table
Several GPUs:       torchrun --standalone --nproc_per_node=4 train.py config/llama32_1b.py

Run the same command again to resume from the newest checkpoint in out_dir. Any setting below is a flag
(--batch_size=32) and may stand in a config file; --help lists them all.
"""

import functools
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import convert
from configurator import configure, find_problem
from data.tokens import Tokens, cpu_cores, prepare_once
from kernels import use_fp8
from model import Llama, LlamaConfig, document_starts
from optimizers.driver import AdamW
from optimizers.on_cpu import OffloadedAdamW
from runtime import checkpoint, distributed, memory, memory_stats
from runtime import copy_engines as collectives
from runtime.cuda_graph import CUDAGraph
from runtime.distributed import local_rank, print0, rank, stop, world_size
from runtime.recompute import recompute
from runtime.run_log import RunLog
from runtime.stream_weights import StreamedWeights

# ----------------------------------------------------------------------------------------------------------------------
# output
out_dir = "out"  # checkpoints, metrics.jsonl and summary.json
init_from = "auto"  # auto: resume if out_dir has a checkpoint, else scratch; or a folder of published weights
eval_interval = 1000  # steps between evaluations; each is followed by a checkpoint
eval_iters = 100  # batches per evaluation: always the same ones, spread evenly over the validation tokens
log_interval = 10  # steps between log lines
keep_last = 2  # checkpoints kept; 0: none are written
async_save = True  # write checkpoints while training goes on: takes 12 to 24 bytes of CPU memory per parameter
profile = False  # write a trace of three steps and of what was in memory to out_dir/profile

# wandb logging
wandb_log = False  # also log to Weights & Biases; WANDB_MODE=offline needs no account
wandb_project = "nanocria"
wandb_run_name = "llama"

# data
dataset = "pystdlib"  # a folder under data/, made by its prepare.py
batch_size = 8  # sequences per micro-batch, on each rank
block_size = 1024  # tokens per sequence
gradient_accumulation_steps = 1  # micro-batches per step, over all ranks: a multiple of the number of ranks
mask_documents = False  # tokens attend only within their own document

# model (Llama 3.2 1B)
n_layer = 16
n_head = 32  # query heads
n_kv_head = 8  # key/value heads: each serves n_head / n_kv_head query heads
n_embd = 2048
ffn_dim = 8192  # width of the gated MLP
vocab_size: int | None = None  # none: the dataset's
rope_theta = 500000.0
rope_scaling: dict | None = None  # 3.1 and 3.2: see config/llama32_1b.py
norm_eps = 1e-5
tie_embeddings = True  # the output head shares the embedding's weights
fused_kernels = True  # false: RMSNorm, RoPE and SwiGLU in plain PyTorch
fused_loss = True  # false: all logits in memory at once
attention: Literal["auto", "sdpa", "triton"] = "auto"  # auto: the faster one; triton: ours; sdpa: PyTorch's

# optimizer: AdamW, cosine schedule
learning_rate = 3e-4  # the peak, after the warm-up
max_iters = 10000  # steps of the whole run
warmup_iters = 100  # steps of linear warm-up
lr_decay_iters: int | None = None  # where the cosine ends; none: max_iters
min_lr: float | None = None  # the learning rate after the decay; none: learning_rate / 10
weight_decay = 0.1  # of matrices; norms are not decayed
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0  # gradients are scaled down to this norm; 0: never

# system
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where there is one
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of compute; auto: bfloat16, on a CPU float32
fp8 = False  # two of three matmuls of the blocks in float8: faster and coarser (RTX 40, H100 and newer; bfloat16)
activation_checkpointing: Literal["none", "selective", "full"] = "none"  # recompute nothing; gate and up; whole blocks
offload: Literal["none", "optimizer", "all"] = "none"  # optimizer: AdamW and gradients in CPU memory; all: weights too
offload_activations = False  # with full checkpointing: keep the blocks' inputs in CPU memory
mlp_chunks: int | None = None  # slices of a recomputed MLP; none: 1, in full checkpointing tokens / max(8192, 4 n_embd)
compile = False  # torch.compile the blocks: a minute at the start
cuda_graph = False  # replay forward-backward and update as CUDA graphs, on one GPU: speeds up launch-bound small models
seed = 1337  # of the weights and of the order of the data

# several GPUs
sharding: Literal["zero3", "zero2", "hybrid"] = "zero3"  # zero2: blocks stay gathered; hybrid: see shard_ranks
shard_ranks: int | None = None  # hybrid: ranks that shard one copy of the model; none: those of one machine
sync_every_micro_batch = True  # false: reduce gradients once per step, with all of them in float32 on every rank
copy_engines: bool | None = None  # communicate by copy engine instead of NCCL; none: where the GPUs can
timeout = 600.0  # seconds without progress after which the waiting ranks say which one they wait for and end the run
# ----------------------------------------------------------------------------------------------------------------------
settings = configure(globals(), sys.argv[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Setup: one process a GPU, a rank of world_size; alone, rank 0 of 1 (ranks.py).
master = rank == 0
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell's background job ignores Ctrl-C: keep it so
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the loop begins there is nothing to save

if device == "auto":
    device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda" and not torch.cuda.is_available():
    stop("--device=cuda, but torch finds no CUDA device: use --device=cpu, or install a torch built for your driver")
cuda_graph = cuda_graph and device != "cpu"
problem = find_problem(globals(), world_size)
if problem:
    stop(problem)
lr_decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
min_lr = learning_rate / 10 if min_lr is None else min_lr
if sharding != "hybrid":
    shard_ranks = world_size
elif shard_ranks is None:
    shard_ranks = distributed.local_world_size
micro_steps = gradient_accumulation_steps // world_size
sync_every_micro_batch = sync_every_micro_batch or world_size == 1
sequences_per_step = batch_size * gradient_accumulation_steps
tokens_per_step = sequences_per_step * block_size

torch.set_float32_matmul_precision("high")  # TF32 where something is float32
if device == "cuda":
    n_gpus = torch.cuda.device_count()
    if distributed.local_world_size > n_gpus:
        stop(
            f"{distributed.local_world_size} ranks on this machine need a GPU each, but torch finds {n_gpus} CUDA devices"
        )
    torch.cuda.set_device(local_rank)
    memory_stats.let_segments_grow()
    device = f"cuda:{local_rank}"
if dtype == "auto" and device == "cpu":
    dtype = "float32"
elif dtype == "auto":  # a GPU older than Ampere computes no bfloat16
    dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
compute_dtype = getattr(torch, dtype)

out_dir = os.path.expanduser(out_dir)  # a shell leaves the ~ of --out_dir=~/runs as it is
if convert.holds_weights(out_dir):
    stop(f"{out_dir} holds published weights, which sample.py would read: name a folder for the run alone")
try:
    lock_file = checkpoint.claim(out_dir) if master else None
except (OSError, ValueError) as error:
    stop(str(error))

watch, interruption = distributed.meet(device, timeout), distributed.Interruption()
distributed.must_agree({name: value for name, value in settings.items() if not name.startswith("wandb_")})
can_copy = collectives.can_copy(device, shard_ranks, offload)
if copy_engines and world_size > 1 and not can_copy:
    stop("copy_engines needs a model's GPUs on one host, where they reach each other's memory, and no offload=all")
copy_engines = can_copy and copy_engines is not False
if offload != "none":  # the CPU's cores, of which torchrun gives each rank one
    torch.set_num_threads(max(1, cpu_cores() // distributed.local_world_size))

# Where the run starts from. What is impossible is refused before anything is built.
checkpoint.require_one_folder(out_dir)
found = checkpoint.newest_of_all(out_dir)
restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # torchrun --max-restarts: the same run
if found and init_from == "scratch" and not restarted:
    stop(f"{found} is there from an earlier run: --init_from=resume goes on with it, --out_dir=... starts elsewhere")
published = init_from not in ("auto", "scratch", "resume")  # weights to begin with
init_from = os.path.expanduser(init_from)
if published and not found and not convert.holds_weights(init_from):
    lacks = "has no config.json" if os.path.isdir(init_from) else "is no folder"
    expected = "auto, scratch, resume, or a folder with Hugging Face's or Meta's weights"
    stop(f"{init_from!r} {lacks}: init_from is {expected}")
if not found and init_from == "resume":
    stop(f"{out_dir} holds no checkpoint to resume: --init_from=scratch starts a new run")

# ----------------------------------------------------------------------------------------------------------------------
# Data: the batch of a step is a function of (seed, step) alone, so it is the same for any number of ranks and
# micro-batches, and a resumed run needs no loader state.
folder = os.path.expanduser(dataset).removeprefix("./").removeprefix("data/")
data_dir = Path(__file__).resolve().parent / "data" / folder
try:
    if folder.rstrip("/") == "pystdlib":  # the one dataset that needs nothing but Python
        for mine in (master, local_rank == 0):  # the machines may share the folder, or have one each
            if mine:
                prepare_once(data_dir)
            if world_size > 1:
                dist.barrier()
    train_tokens, val_tokens = Tokens(data_dir, "train"), Tokens(data_dir, "val")
    n_train_blocks = train_tokens.blocks(block_size, shifted=True)
    n_val_blocks = val_tokens.blocks(block_size)
except (OSError, ValueError) as error:
    stop(str(error))
distributed.must_agree({f"the dataset's {name}": value for name, value in train_tokens.meta.items()})
end_of_text = train_tokens.meta["end_of_text"]
if vocab_size is None:
    vocab_size = train_tokens.meta["vocab_size"]
if vocab_size < train_tokens.meta["vocab_size"]:
    needed = train_tokens.meta["vocab_size"]
    stop(f"vocab_size is {vocab_size}, but {data_dir} was prepared with {needed}: set it to that, or leave it out")


@functools.lru_cache(maxsize=2)
def epoch_order(epoch: int):
    """A shuffle of all blocks, and where the first one starts: each epoch cuts the text at other places."""
    rng = np.random.default_rng((seed, epoch))
    return rng.permutation(n_train_blocks), int(rng.integers(block_size))


def read(split: Tokens, indices, shift: int | None = None) -> torch.Tensor:
    """Blocks (len(indices), T + 1) int64. ValueError where one holds a token that the embedding does not have."""
    return torch.from_numpy(split.read(indices, block_size, shift, vocab_size))


def to_device(blocks: torch.Tensor):
    """Blocks (B, T + 1) to tokens and targets, both (B, T) on the device; with mask_documents also their starts."""
    if device != "cpu":
        blocks = blocks.pin_memory().to(device, non_blocking=True)
    tokens, targets = blocks[:, :-1], blocks[:, 1:]
    return (tokens, targets, document_starts(tokens, end_of_text)) if mask_documents else (tokens, targets)


def get_batch(step: int, micro_step: int):
    """This rank's share of a step: the sequences of a step are numbered on from those of the step before."""
    first = step * sequences_per_step + (micro_step * world_size + rank) * batch_size
    epochs, positions = np.divmod(np.arange(first, first + batch_size), n_train_blocks)
    blocks = []
    for epoch in np.unique(epochs):
        order, shift = epoch_order(int(epoch))
        blocks.append(read(train_tokens, order[positions[epochs == epoch]], shift))
    return to_device(torch.cat(blocks))


def get_batches(step: int):
    """Those of all micro-batches of a step: a few megabytes."""
    return [get_batch(step, micro_step) for micro_step in range(micro_steps)]


# ----------------------------------------------------------------------------------------------------------------------
# Model: shapes first, on no device; then sharded; then memory; then weights. No rank ever holds the whole model.
try:
    config = LlamaConfig(**{name: globals()[name] for name in LlamaConfig.__dataclass_fields__})
    with torch.device("meta"):
        model = Llama(config).to(compute_dtype)
    model.set_operations(fused_kernels, fused_loss, attention)
    if fp8:
        use_fp8(model, device)
    recompute(model, activation_checkpointing, mlp_chunks, offload_activations)
except ValueError as error:
    stop(str(error))
plan = memory.Plan(**{name: globals()[name] for name in memory.Plan.__dataclass_fields__})


def must_fit(n_bytes: float, what: str, cure: str):
    """Refuses what would need more CPU memory than is free: the system would end the run without a word."""
    n_bytes *= distributed.local_world_size
    lacking = distributed.maximum([n_bytes - memory_stats.cpu_available()])[0]
    if lacking > 0:
        needed, free = n_bytes / 2**30, (n_bytes - lacking) / 2**30
        stop(f"{what} {needed:.1f} GiB of CPU memory, and only {free:.1f} GiB are available: {cure}")


if device == "cpu":
    plain = replace(plan, fused_kernels=False, fused_loss=False, offload="none")
    step_bytes = 2**30 * memory.peak_gib(config, plain)
    must_fit(step_bytes, "a step needs", "use a smaller model (config/baby_llama.py), smaller batches or a GPU")
else:
    offloaded_bytes = sum(part.bytes for part in memory.cpu_parts(config, plan))
    must_fit(offloaded_bytes, "what is offloaded needs", "offload less, or shard")
read_bytes = 16 * micro_steps * batch_size * (block_size + 1)  # int64, read and copied
must_fit(read_bytes, "the tokens of a step take", "lower gradient_accumulation_steps")
card_gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device != "cpu" else None
sys.excepthook = distributed.last_words(watch, out_dir, lambda: memory.say_out_of_memory(config, plan, card_gib))

n_params = model.n_params()
if compile:
    for layer in model.layers:
        layer.compile()
if world_size > 1:
    mesh = collectives.mesh(device, shard_ranks if sharding == "hybrid" else None, timeout)
    # Gradients are summed over the ranks in float32. NCCL does so only where reduce_dtype says it; the copy engines'
    # kernel always does, and must be given the bfloat16 gradients unconverted (collectives.py).
    reduce_dtype = None if plan.copy_engines_reduce else torch.float32
    options = {
        "mesh": mesh,
        # cast_forward_inputs would round the fp32 cos and sin that the blocks are handed.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu") if offload == "all" else OffloadPolicy(),
    }
    collectives.shard(model, keep_blocks=sharding == "zero2", **options)
    if copy_engines:
        collectives.use_copy_engines(model, mesh["shard"].get_group(), reduce=plan.copy_engines_reduce)
model.to_empty(device="cpu" if offload == "all" else device)
model.init_weights(seed, device)

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer: AdamW with float32 master weights; a bfloat16 parameter is the upper half of one (optimizer.py).
options = {"betas": (beta1, beta2), "weight_decay": weight_decay}
try:
    weights = StreamedWeights(model, device) if plan.streamed else None  # else FSDP moves them
    optimizer = AdamW(model, **options) if offload == "none" else OffloadedAdamW(model, **options, weights=weights)
except OSError as error:  # of pinned memory, perhaps this rank's alone
    print(f"rank {rank}: --offload={offload}: {error}", file=sys.stderr, flush=True)
    sys.exit(1)
# float16 holds nothing below 6e-8, where many gradients live: they are computed 2^16 times too large and scaled back.
# The scale halves when they overflow and doubles after 2,000 steps without.
loss_scale = 2.0**16 if dtype == "float16" else 1.0
loss_scale_since = 0  # the step that changed it last


def learning_rate_at(step: int) -> float:
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    progress = min((step - warmup_iters) / max(lr_decay_iters - warmup_iters, 1), 1.0)
    return min_lr + (learning_rate - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


# ----------------------------------------------------------------------------------------------------------------------
# Resume
MODEL_SETTINGS = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim", "vocab_size", "tie_embeddings", "rope_theta",
                  "rope_scaling", "norm_eps")  # fmt: skip
HARMLESS_SETTINGS = ("out_dir", "init_from", "eval_interval", "eval_iters", "log_interval", "keep_last", "wandb_log",
                     "wandb_project", "wandb_run_name", "device", "compile", "cuda_graph", "sharding", "shard_ranks",
                     "sync_every_micro_batch", "async_save", "profile", "offload", "copy_engines",
                     "activation_checkpointing", "offload_activations", "mlp_chunks", "timeout")  # fmt: skip
first_step, changed, resume_seconds = 0, [], None


def refuse_another_model(path: Path, model: dict, tokenizer: str, other: str):
    # A setting that is newer than the checkpoint had the effect of its default.
    model = {name: field.default for name, field in LlamaConfig.__dataclass_fields__.items()} | model
    differing = [name for name in MODEL_SETTINGS if model[name] != getattr(config, name)]
    if differing:
        differences = ", ".join(f"{name} {model[name]} (this run: {getattr(config, name)})" for name in differing)
        flags = " ".join(shlex.quote(f"--{name}={model[name]}") for name in differing)
        stop(f"{path} has {differences}: pass {flags}, or change {other}")
    if tokenizer != train_tokens.meta["tokenizer"]:
        now = train_tokens.meta["tokenizer"]
        stop(f"{path} was trained on {tokenizer} tokens, {data_dir} holds {now} tokens: change dataset or {other}")


if published and not found:
    try:
        model_settings, tokenizer = convert.read_config(init_from)
        if tokenizer is None:  # the user's word is taken for it
            tokenizer, known = train_tokens.meta["tokenizer"], train_tokens.meta["vocab_size"]
            said = f"{init_from} does not say its tokenizer, which must be the data's: {tokenizer}, {known:,} tokens"
            if vocab_size == known != model_settings["vocab_size"]:
                stop(f"{said}. If so, pass --vocab_size={model_settings['vocab_size']}; else prepare the data with it")
            print0(said)
        refuse_another_model(init_from, model_settings, tokenizer, "init_from")
        convert.load(init_from, optimizer)
    except (OSError, ValueError) as error:
        stop(str(error))
if found:
    began = time.perf_counter()
    try:
        found, meta, damaged = checkpoint.load_newest(
            out_dir,
            optimizer,
            lambda path, meta: refuse_another_model(path, meta["model"], meta["dataset"]["tokenizer"], "out_dir"),
        )
    except (OSError, ValueError) as error:
        stop(str(error))
    for sentence in damaged:
        print0(f"{sentence}. Going back to {found}")
    resume_seconds = time.perf_counter() - began
    first_step = loss_scale_since = meta["step"]
    if dtype == meta["dtype"] == "float16":
        loss_scale, loss_scale_since = meta["loss_scale"], meta["loss_scale_since"]
    was = {"mask_documents": False} | meta["settings"] | {"dtype": meta["dtype"]}  # which older checkpoints lack
    changed = [
        f"{name} {was.get(name)} -> {value}"
        for name, value in (settings | {"dtype": dtype}).items()
        if was.get(name) != value and name not in HARMLESS_SETTINGS
    ]
    if published and settings["init_from"] != was["init_from"]:
        changed.append(f"init_from {was['init_from']} -> {settings['init_from']} (not read: the run has begun)")
    changed += [
        f"the dataset's {name} {meta['dataset'].get(name)} -> {value}"
        for name, value in train_tokens.meta.items()
        if meta["dataset"].get(name, value) != value and name not in ("files", "script")
    ]


saver = checkpoint.Saver(out_dir, optimizer, keep_last, async_save, memory.cpu_bytes_to_come(config, plan))


def start_saving(step: int, val_loss: float | None):
    meta = {
        "val_loss": val_loss,
        "dtype": dtype,
        "loss_scale": loss_scale,
        "loss_scale_since": loss_scale_since,
        "model": asdict(config),
        "settings": settings,
        "dataset": train_tokens.meta,
        "versions": log.versions,
    }
    saver.start(step, meta)


# ----------------------------------------------------------------------------------------------------------------------
# What runs, what will train, what it will take
log = RunLog(out_dir, device, dtype, tokens_per_step, model.flops_per_token(block_size))
estimated_gib = memory.peak_gib(config, plan)
epochs = tokens_per_step * max_iters / len(train_tokens)
versions = ", ".join(f"{name} {version}" for name, version in log.versions.items())
print0("runs on  ", f"{world_size} x {log.device_name};", versions)
computes = f"{dtype} compute" + ", projections in float8" * fp8
print0("model    ", f"{n_params:,} parameters; float32 weights, {computes}")
if device != "cpu":
    print0("memory   ", f"about {estimated_gib:.1f} GiB of {card_gib:.1f} GiB; ", end="")
    print0(f"activation checkpointing: {activation_checkpointing}; offload: {offload}")
print0("data     ", f"{data_dir}: {len(train_tokens):,} tokens; {max_iters:,} steps read them {epochs:.2f} times")
if vocab_size > train_tokens.meta["vocab_size"]:
    print0("         ", f"its vocabulary is {train_tokens.meta['vocab_size']:,} of the model's {vocab_size:,} tokens")
print0("step     ", f"{tokens_per_step:,} tokens = {batch_size} sequences x {block_size:,} tokens", end="")
print0(f" x {micro_steps} micro-batches x {world_size} ranks")
if warmup_iters >= max_iters:
    print0("warm-up  ", f"of {warmup_iters:,} steps, as long as the run: the learning rate never reaches its peak")
if device == "cpu" and model.flops_per_token(block_size) * tokens_per_step > 1e14:
    print0("on a CPU ", "each step will take many minutes: config/baby_llama.py is made for CPUs")
if published and not found:
    print0("begins   ", f"with the weights of {init_from}")
if found:
    print0("resumes  ", found, *(["with", ", ".join(changed), "changed"] if changed else []))

wandb_options = {"project": wandb_project, "name": wandb_run_name, "config": settings} if wandb_log else {}
try:
    log.open(first_step, **wandb_options)
except OSError as error:
    stop(f"cannot write to out_dir {out_dir}: {error.strerror}")

# ----------------------------------------------------------------------------------------------------------------------
# Loop
n_eval_blocks = min(eval_iters * batch_size, n_val_blocks)


@torch.no_grad()
def evaluate() -> float | None:
    """The mean loss over n_eval_blocks blocks of the validation tokens, always the same ones. None if interrupted."""
    total = torch.zeros(2, device=device)  # sum of the losses, number of targets
    chosen = np.arange(n_eval_blocks) * n_val_blocks // n_eval_blocks
    for first in range(0, n_eval_blocks, batch_size * world_size):
        watch.at(f"step {step}: evaluation")
        rows = first + rank * batch_size + np.arange(batch_size)
        try:
            blocks = read(val_tokens, chosen[rows % n_eval_blocks])
        except ValueError as error:
            interruption.unreadable(error)
        if interruption.agreed(device):
            return None
        tokens, targets, *starts = to_device(blocks)
        # All ranks run equally many forwards, or FSDP would wait forever: rows past the end are read but do not count.
        surplus = torch.from_numpy(rows >= n_eval_blocks).to(device)
        targets = targets.masked_fill(surplus[:, None], -100)
        n_targets = (targets != -100).sum()
        total += torch.stack([model(tokens, targets, *starts) * n_targets, n_targets])
    if world_size > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


def forward_backward(*batch):
    """One micro-batch: returns its share of the step's loss, and leaves its share of the gradients.

    With cuda_graph the first step calls this function itself; after it the name forward_backward is bound to a
    CUDAGraph that records and replays it. The same goes for update.
    """
    loss = model(*batch) / micro_steps
    (loss / optimizer.inverse_loss_scale).backward()  # by a tensor: a CUDA graph replays with what is in it then
    # One micro-batch needs no sum; with sync_every_micro_batch=false FSDP adds them up itself, in float32 too.
    if micro_steps > 1 and sync_every_micro_batch:
        optimizer.accumulate()
    return loss.detach()


def compute_gradients(step: int):
    """Forward and backward of a step, whose micro-batches are in `batches`: returns its loss, leaves its gradients.

    Then, while the GPU is at work, it reads the next step's into `batches`.
    """
    global batches, data_seconds
    loss = torch.zeros((), device=device)
    for micro_step, batch in enumerate(batches):
        if not sync_every_micro_batch:
            model.set_requires_gradient_sync(micro_step + 1 == micro_steps)
        watch.at(f"step {step + 1}: forward and backward")
        loss += forward_backward(*batch)
    if step + 1 < max_iters and not interruption.bad_data:
        watch.at(f"step {step + 1}: reading data")
        began = time.perf_counter()
        try:
            batches = get_batches(step + 1)
        except ValueError as error:
            interruption.unreadable(error)
        data_seconds += time.perf_counter() - began
    return loss


def in_turn(step: int) -> bool:
    """Whether a step may start only once the loss and the gradient norm of the one before have reached the CPU."""
    return (
        device == "cpu"
        or offload != "none"  # the CPU has waited for the GPU already
        or dtype == "float16"  # its loss scale depends on the step before
        or step == first_step + 1  # or the first step's compiling would be timed with the second
        or step % eval_interval == 0
        or step == max_iters
        or (world_size == 1 and interruption.here)
        or (profile and step - first_step in (7, 10))  # a trace begins and ends between two steps
    )


def send_to_cpu(values):
    """Returns a function that waits until they have arrived, and returns them as a list."""
    values = values.to("cpu", non_blocking=True)
    if device == "cpu":
        return values.tolist
    arrived = torch.cuda.Event()
    arrived.record()

    def wait():
        arrived.synchronize()
        return values.tolist()

    return wait


def update():
    """Clips, moves the weights and frees the gradients; returns their norm."""
    grad_norm = optimizer.update(grad_clip)
    optimizer.zero_grad()
    return grad_norm


def stop_without_update(loss: float, grad_norm: float):
    """Ends a run whose loss or gradients are no numbers any more; waits for a save that is still being written."""
    if saver.running():
        watch.rest(f"step {step}: saving")
        print0(f"step {step:05d} | {saver.outcome()}")
    before = checkpoint.newest(out_dir)
    if device != "cpu":
        torch.cuda.synchronize()  # other ranks wait in collectives that this one has queued
    clip = "a lower grad_clip" if grad_clip else "--grad_clip=1"
    stop(
        f"step {step + 1}: the loss is {loss} and the gradient norm {grad_norm}, so the weights were not updated. "
        f"Try a lower learning_rate, a longer warmup_iters or {clip}, "
        + (f"from {before} with --init_from=resume" if before else "from the start: no checkpoint was saved yet")
    )


def traced(profiler):
    torch.profiler.tensorboard_trace_handler(f"{out_dir}/profile", worker_name=f"rank{rank}")(profiler)
    memory_stats.dump(Path(out_dir) / "profile" / f"rank{rank}.memory.pickle")
    traces = "*.json for https://ui.perfetto.dev or TensorBoard"
    if device != "cpu":
        traces += ", *.pickle, what was in memory, for https://pytorch.org/memory_viz"
    print0(f"step {step:05d} | three steps traced to {out_dir}/profile: {traces}")


interruption.listen()
val_loss = None
step = first_step  # how many are done
stopping = 0  # the signal that ends the run, or BAD_DATA: the same on all ranks
if found and meta["val_loss"] is None and (step % eval_interval == 0 or step == max_iters):  # a signal came instead
    val_loss = evaluate()
    if val_loss is None:
        stopping = interruption.agreed(device)
    else:
        checkpoint.set_val_loss(found, val_loss)
        log.record({"step": step, "val_loss": val_loss})
        print0(f"step {step:05d} | val loss {val_loss:.4f} ({n_eval_blocks} blocks)")
logged_at, logged_step, peak_gib = time.perf_counter(), first_step, None
data_seconds = 0.0  # spent reading, while the GPU works, since the last log line; the slowest rank's is shown
profiler = torch.profiler.profile(
    # three steps, after the kernels have been compiled and the allocator has settled
    schedule=torch.profiler.schedule(wait=5, warmup=2, active=3, repeat=1),
    on_trace_ready=traced,
)
memory_stats.record_history()  # for ten steps, 2 us an allocation: most runs that do not fit find out in the first
if step == max_iters:
    print0(f"nothing left to do: {found} is at step {step}, max_iters is {max_iters}. ", end="")
    print0("A larger --max_iters trains on, another --out_dir starts a run of its own")
elif not stopping:
    try:
        batches = get_batches(step)
    except ValueError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    if profile:
        profiler.start()
# The GPU must not wait for the CPU. So once a step's update is queued, the next step's forward and backward are queued
# behind it, and only then does the CPU ask for this step's numbers:
#
#     CPU   queues update 7, forward and backward 8 | waits for the numbers of 7, logs them | queues update 8, ...
#     GPU   ... backward 7, update 7, | forward 8, ...
#
# Not always: see in_turn. If the numbers end the run, what was queued is dropped.
ahead = None  # the loss of the next step, where that is queued
while step < max_iters and not stopping:
    started = time.perf_counter()
    # A rank's gradients are world_size times its share of the step's, until FSDP averages them: float16 must hold them.
    optimizer.set_step(learning_rate_at(step), loss_scale / world_size if dtype == "float16" else 1.0)
    loss_on_device = ahead if ahead is not None else compute_gradients(step)
    watch.at(f"step {step + 1}: update")
    saver.wait_for_copy()
    grad_norm = update()
    # Ctrl-C may reach the ranks at different steps: one is enough, and here all learn of it at the same step.
    totals = torch.stack([loss_on_device, torch.full_like(loss_on_device, float(interruption.here))])
    if world_size > 1:
        dist.all_reduce(totals)
        totals /= world_size
    # To log another number of the GPU's, add it to this stack and pass it to log.line as name=number.
    wait_for_numbers = send_to_cpu(torch.stack([*totals, grad_norm.to(device)]))
    if cuda_graph and step == first_step:  # the first step was an ordinary one: it has compiled and allocated
        forward_backward, update = CUDAGraph(forward_backward), CUDAGraph(update)
    ahead = None if in_turn(step + 1) else compute_gradients(step + 1)
    watch.at(f"step {step + 1}: waiting for the GPU")
    loss, stopping, grad_norm = wait_for_numbers()
    if math.isfinite(grad_norm):
        optimizer.updates += 1
        if dtype == "float16" and step - loss_scale_since >= 2000:
            loss_scale, loss_scale_since = loss_scale * 2, step
    elif math.isfinite(loss) and dtype == "float16" and loss_scale > 1:
        loss_scale, loss_scale_since = loss_scale / 2, step
        print0(f"step {step + 1:05d} | float16 overflowed: weights not updated, loss scale now {loss_scale:g}")
    else:
        stop_without_update(loss, grad_norm)
    step += 1
    log.step_seconds.append(time.perf_counter() - started)
    if profile and step <= first_step + 10:
        profiler.step()
    if step == first_step + 10:
        memory_stats.stop_history()

    if step % log_interval == 0 or step in (first_step + 10, max_iters):  # the tenth: soon, as a sign of life
        now = time.perf_counter()
        seconds = (now - logged_at) / (step - logged_step)
        # Asked on the CPU: the GPU is busy with the next step already.
        used_gib = memory_stats.used_gib(device) + collectives.buffer_bytes / 2**30
        peak_gib, data_ms = distributed.maximum([used_gib, 1000 * data_seconds / (step - logged_step)])
        logged_at, logged_step, data_seconds = now, step, 0.0
        log.line(step, max_iters, loss, learning_rate_at(step - 1), grad_norm, seconds, peak_gib, data_ms)

    if saver.done():
        print0(f"step {step:05d} | {saver.outcome()}")
    if stopping or step % eval_interval == 0 or step == max_iters:
        began = time.perf_counter()
        val_loss = evaluate() if not stopping else None
        if val_loss is not None:
            log.record({"step": step, "val_loss": val_loss})
        stopping = interruption.agreed(device)
        result = "interrupted" if val_loss is None else f"val loss {val_loss:.4f} ({n_eval_blocks} blocks)"
        kept = "nothing saved"
        if keep_last:
            watch.rest(f"step {step}: saving")  # a disk may take longer than a step
            if saver.running():
                print0(f"step {step:05d} | {saver.outcome()}")
            start_saving(step, val_loss)
            last = stopping or step == max_iters
            kept = saver.outcome() if last or saver.done() else "saving"
        print0(f"step {step:05d} | {result} | {kept}")
        logged_at += time.perf_counter() - began  # not the training's time

# ----------------------------------------------------------------------------------------------------------------------
# The end
watch.rest("ending")
if stopping and keep_last and (step < max_iters or val_loss is None):
    cure = "prepare the data again, then " if stopping == interruption.BAD_DATA else ""
    print0(f"{cure}run the same command again to resume")
if profile and first_step < step < first_step + 10:
    profiler.stop()
    print0("the profile is incomplete: it traces the eighth to tenth step of a run, and this one ended sooner")
if step == max_iters and val_loss is not None:
    log.summary(
        peak_gib, val_loss, val_tokens if n_eval_blocks == n_val_blocks else None,
        settings=settings, n_params=n_params, estimated_gib=estimated_gib,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30 if device != "cpu" else None,
        save_seconds=saver.seconds, resume_seconds=resume_seconds,
    )  # fmt: skip
    if keep_last and not saver.error:
        print0(f"next: python sample.py --out_dir={shlex.quote(out_dir)}")
log.close()
if master:
    lock_file.close()
code = 128 + stopping if stopping else 0  # as if the signal had ended it, for whoever started it
if stopping == interruption.BAD_DATA:
    code = 1
if saver.error:
    before = "the one before" if checkpoint.newest(out_dir) else "the start"
    print0(f"the last checkpoint was not written ({saver.error}). Fix that; the same command continues from {before}")
    code = 1
watch.stop()
distributed.part(code)
