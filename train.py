"""Trains a Llama 3. Read it from top to bottom: settings, setup, data, model, optimizer, step, start, loop, end.

Any machine:        python train.py config/baby_llama.py
One GPU:            python train.py config/llama32_1b.py      # of 40 GB; README.md has a table for others
Several GPUs:       torchrun --standalone --nproc_per_node=4 train.py config/llama32_1b.py

The same command again resumes from the newest checkpoint. A flag (--help) or a config file changes a setting below.
"""

import functools
import math
import os
import sys
from typing import Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from configurator import configure
from data.loader import open_dataset, read_ahead
from kernels.fp8_linear import use_fp8
from lora import add_lora
from model import Llama, LlamaConfig, document_starts
from optimizers import new_optimizer, rule_of
from runtime import distributed
from runtime.check_settings import check_schedule, check_settings
from runtime.copy_engines import pick_copy_engines, use_copy_engines
from runtime.device import CUDAGraph, pick_device, pick_dtype, send_to_device
from runtime.distributed import local_world_size, on_all_ranks, print0, rank, stop_on_error, world_size
from runtime.generate import new_sampler
from runtime.memory import RunShape
from runtime.memory_advice import cpu_bytes_to_come, disk_bytes, out_of_memory_message, require_memory
from runtime.resume import check_start, claim, find_start, model_settings, restore, resume_point
from runtime.run_log import RunLog
from runtime.save import Saver
from runtime.stop import Signals, bad_data_ends_this_rank, make_excepthook, on_not_finite

# ----------------------------------------------------------------------------------------------------------------------
# output
out_dir = "out"  # checkpoints, metrics.jsonl and summary.json
init_from = "auto"  # auto: resume if out_dir has a checkpoint, else scratch; resume; scratch; or a folder of weights
eval_interval = 1000  # steps between evaluations (with epochs, at most one epoch); each is followed by a checkpoint
eval_only = False  # evaluate the weights that the run would start from, then exit
eval_iters = 100  # batches per evaluation (of each part of a mix): always the same, spread evenly over the tokens
sample_prompt: str | None = None  # print how the model continues or, for chats, answers this after each evaluation
log_interval = 10  # steps between log lines
keep_last = 2  # checkpoints kept, beside the one being written; 0: none are written
keep_best = False  # keep the checkpoint of the lowest validation loss, too
async_save = True  # write checkpoints while training runs: 12 bytes of CPU memory per trained parameter, 6 if 8-bit
profile = False  # write a trace of three steps and a memory snapshot to out_dir/profile
wandb_log = False  # also log to Weights & Biases, which reads WANDB_PROJECT, WANDB_NAME and WANDB_MODE=offline

# data
dataset = "pystdlib"  # a folder made by a prepare.py: its name under data/, or its path. a:0.7,b:0.3 mixes two or more
batch_size = 8  # sequences per micro-batch, on each rank
block_size = 1024  # tokens per sequence
gradient_accumulation_steps = 1  # micro-batches per step, over all ranks: must be a multiple of the number of ranks
mask_documents = False  # tokens attend only within their own document

# model (Llama 3.2 1B; loaded weights set what no config file or flag names)
n_layer = 16
n_head = 32  # query heads
n_kv_head = 8  # key/value heads: each serves n_head / n_kv_head query heads
n_embd = 2048
ffn_dim = 8192  # width of the gated MLP
vocab_size: int | None = None  # none: the dataset's
rope_theta = 500000.0
rope_scaling: dict | None = None  # for 3.1 and 3.2: see config/llama32_1b.py
norm_eps = 1e-5
tie_embeddings = True  # the output head shares the embedding's weights
kernels: Literal["all", "blocks", "none"] = "all"  # blocks: the loss holds all logits at once; none: plain PyTorch
attention: Literal["auto", "sdpa", "triton"] = "auto"  # auto: the faster one; triton: ours; sdpa: PyTorch's

# optimizer
optimizer: Literal["adamw", "muon", "normuon", "soapmuon", "galore"] = "adamw"  # the others: 2-D weights in blocks only
galore_rank = 128  # galore: columns of the projected gradients
learning_rate = 3e-4  # the peak, after the warm-up
max_iters = 10000  # steps of the whole run
epochs: int | None = None  # passes over the training data, instead of max_iters: the one that is named later counts
warmup_iters = 100  # steps of linear warm-up
lr_schedule: Literal["cosine", "linear", "wsd"] = "cosine"  # wsd: constant, then linear over the last cooldown_iters
lr_decay_iters: int | None = None  # step at which the cosine or the line ends; none: max_iters
cooldown_iters = 0  # steps of wsd's decay, which ends at max_iters
min_lr: float | None = None  # the learning rate after the decay; none: learning_rate / 10
weight_decay = 0.1  # for 2-D weights; norms are not decayed
optimizer_bits: Literal[32, 8] = 32  # for AdamW's moments; 8: a quarter of the memory, slightly coarser
grad_clip = 1.0  # max gradient norm; 0 disables clipping

# finetuning with LoRA: init_from names the weights, which stay frozen; a checkpoint holds only the adapters
lora_rank = 0  # rank of the adapters on all projections of the blocks; 0: train all weights
lora_alpha = 32.0  # adapters are scaled by lora_alpha / lora_rank
quantize_base: Literal["none", "nf4"] = "none"  # nf4: hold the frozen projections in 4 bits (QLoRA)

# system
device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if available
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of compute; auto: bfloat16 or float16, CPU: float32
fp8 = False  # float8 for the blocks' matmuls, except weight gradients: faster, coarser (RTX 40, L4, H100 or newer)
activation_checkpointing: Literal["none", "selective", "full"] = "none"  # recompute gate and up, or the whole block
offload: Literal["none", "optimizer", "all"] = "none"  # optimizer: AdamW and gradients in CPU memory; all: weights too
offload_dir: str | None = None  # keep AdamW's state in this folder on an NVMe drive instead of in CPU memory
offload_activations = False  # move to CPU memory what selective or full checkpointing keeps of each block
mlp_chunks: int | None = None  # token chunks of the recomputed MLP: more take less memory; none: kernels/execution.py
compile = False  # torch.compile the blocks: takes a minute at the start
cuda_graph = False  # replay forward-backward and update as CUDA graphs, on one GPU: speeds up launch-bound small models
seed = 1337  # for the initial weights and the order of the data

# several GPUs
sharding: Literal["zero3", "zero2", "hybrid"] = "zero3"  # zero2: blocks stay gathered; hybrid: one copy per machine
sync_every_micro_batch = True  # false: reduce gradients once per step, with all of them in float32 on every rank
copy_engines: bool | None = None  # communicate by copy engine instead of NCCL; none: if the GPUs support it
timeout = 600.0  # seconds that a rank waits for the others before it ends the run

settings, named = configure(globals(), sys.argv[1:])  # named: those that a config file or flag sets

# ----------------------------------------------------------------------------------------------------------------------
# Setup: one process per GPU, rank `rank` of `world_size`. Without torchrun: rank 0 of 1.
signals = Signals()  # until signals.listen() below, Ctrl-C ends the run at once
phase = "starting"  # what the run is doing, and the step that it is at: for messages
step = 0
out_dir = os.path.expanduser(out_dir)  # a shell does not expand the ~ of --out_dir=~/runs
device = pick_device(device)
dtype = pick_dtype(dtype, device)
cuda_graph = cuda_graph and device != "cpu"
torch.set_float32_matmul_precision("high")  # TF32 for float32 matmuls
distributed.init_distributed(device, timeout)  # sets an excepthook of its own
sys.excepthook = make_excepthook(
    lambda: f"step {step}, {phase}", lambda: out_of_memory_message(config, run_shape, device)
)
distributed.require_same_on_all_ranks(settings | distributed.code_of_this_rank())
lock_file = None if eval_only else claim(out_dir)  # open, so locked, until the run ends
start = find_start(out_dir, init_from, eval_only)  # a checkpoint, a folder of published weights, or None
from_weights = model_settings(start, named)  # n_layer and others that no config file or flag names
globals().update(from_weights)
settings |= from_weights
check_settings(settings | {"dtype": dtype, "cuda_graph": cuda_graph}, world_size)
micro_steps = gradient_accumulation_steps // world_size  # on this rank
sync_every_micro_batch = sync_every_micro_batch or world_size == 1
sequences_per_step = batch_size * gradient_accumulation_steps
first_step, sequences_read = resume_point(start, block_size)
# Step s begins with sequence earlier_sequences + s * sequences_per_step: not 0 only if the batch size was changed.
earlier_sequences = sequences_read - first_step * sequences_per_step
mesh = distributed.device_mesh(device, sharding == "hybrid", timeout) if world_size > 1 else None
copy_engines = pick_copy_engines(copy_engines, device, mesh and mesh["shard"].get_group(), offload)

# ----------------------------------------------------------------------------------------------------------------------
# Data: sequence i of the run is a function of (seed, i) alone. So a step's batch is the same for any number of ranks
# and micro-batches, and the only loader state a resumed run needs is the number of sequences read.
phase = "opening the dataset"
with stop_on_error():  # an OSError or ValueError ends the run with its message
    train_data, val_data = on_all_ranks(lambda: open_dataset(dataset, block_size, seed, vocab_size, mask_documents))
if epochs:
    max_iters = first_step + math.ceil((epochs * train_data.n_blocks - sequences_read) / sequences_per_step)
    eval_interval = min(eval_interval, math.ceil(train_data.n_blocks / sequences_per_step))
    settings |= {"max_iters": max_iters, "eval_interval": eval_interval}
    check_schedule(settings)
distributed.require_same_on_all_ranks({f"the dataset's {name}": value for name, value in train_data.meta.items()})


def make_batch(sequences: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The model's inputs of sequences (B, T + 1): tokens, targets (B, T); with mask_documents also doc_starts."""
    tokens, targets, marks = train_data.unpack(send_to_device(sequences, device))  # marks: tokens, or a chat's mask
    return (tokens, targets, document_starts(marks, train_data.doc_start)) if mask_documents else (tokens, targets)


# ----------------------------------------------------------------------------------------------------------------------
# Model: build on meta, shard with FSDP, materialize, initialize. With several ranks, none ever holds the whole model.
phase = "building the model"
with stop_on_error():
    config = LlamaConfig(
        n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd, ffn_dim=ffn_dim,
        vocab_size=train_data.vocab_size, block_size=block_size, rope_theta=rope_theta, rope_scaling=rope_scaling,
        norm_eps=norm_eps, tie_embeddings=tie_embeddings,
    )  # fmt: skip
    check_start(start, config, settings, train_data.meta)  # before allocating anything large
    run_shape = RunShape.of(
        settings, dtype=dtype, cuda_graph=cuda_graph, micro_steps=micro_steps, world_size=world_size,
        shard_ranks=local_world_size if sharding == "hybrid" else world_size, copy_engines=copy_engines,
        sync_every_micro_batch=sync_every_micro_batch, rule=rule_of(settings),
    )  # fmt: skip
    require_memory(config, run_shape, device)
    with torch.device("meta"):
        model = Llama(config, run_shape.how).to(getattr(torch, dtype))
    if fp8:
        use_fp8(model, device)
    if lora_rank:
        add_lora(model, lora_rank, lora_alpha, quantize_base)
if compile:
    for layer in model.layers:
        layer.compile()
if world_size > 1:
    # Gradients are summed over the ranks in float32. The copy engines' kernel does that from bfloat16 inputs.
    reduce_dtype = None if run_shape.copy_engines_reduce else torch.float32
    # cast_forward_inputs=True would round the RoPE tables to bfloat16
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload_policy = CPUOffloadPolicy(pin_memory=device != "cpu") if offload == "all" else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload_policy)
    for layer in model.layers:  # gather a block just before it computes; zero2 keeps it until its backward
        shard(layer, reshard_after_forward=sharding != "zero2")
    if not tie_embeddings:
        shard(model.tok_embeddings, reshard_after_forward=True)
        model.tok_embeddings.set_unshard_in_backward(False)  # backward does not read it
        shard([model.norm, model.lm_head], reshard_after_forward=False)  # reduced during the blocks' backward
    shard(model, reshard_after_forward=False)  # the rest. A tied head is the embedding: needed first and last
    if run_shape.copy_engines_gather:
        use_copy_engines(model, mesh["shard"].get_group(), reduce=run_shape.copy_engines_reduce)
model.to_empty(device="cpu" if offload == "all" else device)
model.init_weights(seed, device)

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer: an update rule, and the place where its state and the float32 master weights live
with stop_on_error():  # in case memory cannot be pinned
    optimizer = new_optimizer(model, run_shape.rule, offload, offload_dir, disk_bytes(config, run_shape), device,
                              grad_clip=grad_clip, scales_loss=dtype == "float16")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The step: forward_backward() on each micro-batch, then update()
def forward_backward(loss_weight: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
    """One micro-batch: adds to the gradients, returns its share of the step's loss. loss_weight: see read_step()."""
    loss = model(*batch) * loss_weight / micro_steps
    optimizer.scale(loss).backward()
    if micro_steps > 1 and sync_every_micro_batch:
        optimizer.accumulate()  # in float32. With sync_every_micro_batch=false FSDP does that
    return loss.detach()


update = optimizer.update  # clips, changes the weights and frees the gradients; returns their norm
if cuda_graph:  # of each, the first call runs eagerly, the second is captured, later ones are replayed
    forward_backward = CUDAGraph(forward_backward)
    update = CUDAGraph(update)


def learning_rate_at(step: int) -> float:
    final = learning_rate / 10 if min_lr is None else min_lr
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if lr_schedule == "wsd":
        return final + (learning_rate - final) * min((max_iters - step) / (cooldown_iters + 1), 1.0)
    progress = min((step - warmup_iters) / max((lr_decay_iters or max_iters) - warmup_iters, 1), 1.0)
    share = 1 - progress if lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return final + (learning_rate - final) * share


# ----------------------------------------------------------------------------------------------------------------------
# Start: from scratch, from published weights, or from the newest checkpoint
phase = "starting"
log = RunLog(out_dir, device, dtype, tokens_per_step=sequences_per_step * block_size, max_iters=max_iters,
             flops_per_token=model.flops_per_token(block_size), log_interval=log_interval, profile=profile)  # fmt: skip
log.header(model, run_shape, train_data, earlier_sequences + max_iters * sequences_per_step)
run_info = {"settings": settings, "dtype": dtype, "dataset": train_data.meta, "versions": log.versions}  # for run.json
began_with, resume_seconds, hf_files = restore(start, model, optimizer, train_data, run_info)
settings["init_from"] = began_with  # where the weights came from at first, also after resumes
show_sample = new_sampler(sample_prompt, train_data, hf_files)
saver = Saver(out_dir, lock_file, optimizer, config, hf_files, keep_last=keep_last, keep_best=keep_best,
              async_save=async_save, timeout=timeout, reserved=cpu_bytes_to_come(config, run_shape))  # fmt: skip
if not eval_only:
    log.open(first_step, functools.partial(on_not_finite, optimizer, saver), settings if wandb_log else None)
n_eval_sequences = [min(eval_iters * batch_size, part.n_blocks) for part in val_data.parts]  # of each dataset


def read_step(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of a step: a loss weight and sequences (B, T + 1). The weight is 1 for text; for chats,
    targets / mean targets per micro-batch, so that every answer token counts the same."""
    first = earlier_sequences + step * sequences_per_step
    loss_weights = train_data.loss_weights(first, gradient_accumulation_steps, batch_size)
    mine = range(rank, gradient_accumulation_steps, world_size)
    return [(loss_weights[i], train_data.sequences(first + i * batch_size, batch_size)) for i in mine]


@torch.no_grad()
def evaluate() -> list[float] | None:
    """Each dataset's mean loss over n_eval_sequences, always the same ones. None if a signal interrupts it."""
    totals = torch.zeros(len(n_eval_sequences), 2, dtype=torch.float64, device=device)  # float32 would depend on ranks
    for part, n_sequences, total in zip(val_data.parts, n_eval_sequences, totals, strict=True):  # losses, targets
        for first in distributed.progress(range(0, n_sequences, batch_size * world_size), "evaluating, batches"):
            if signals.received_anywhere():
                return None
            rows = range(first + rank * batch_size, first + (rank + 1) * batch_size)
            with bad_data_ends_this_rank():
                tokens, targets, *doc_starts = make_batch(part.read_evenly(rows, n_sequences))
            # FSDP needs equally many forwards on all ranks: rows past the end are computed but not counted.
            surplus = torch.tensor([row >= n_sequences for row in rows], device=device)
            targets = targets.masked_fill(surplus[:, None], -100)
            n_targets = (targets != -100).sum()
            total += torch.stack([model(tokens, targets, *doc_starts).double() * n_targets, n_targets])
    distributed.all_reduce_sum(totals)
    return (totals[:, 0] / totals[:, 1]).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Loop: nothing in a step waits for the GPU; the log reads its numbers every log_interval steps. A step that is not
# finite changes no weight, so learning of it some steps late does no harm.
# To log another number, a scalar on the device, add name=number to log.step(): it prints the mean since the last line.
signals.listen()
step = first_step
val_loss = None
unevaluated = not eval_only and resume_seconds is not None and start.run.get("val_loss") is None  # a signal came first
if eval_only or (start is not None and step == 0):  # given weights: their loss, for comparison
    phase = "evaluating"
    with log.paused():
        _, result = log.evaluation(step, evaluate(), val_data.shares, sum(n_eval_sequences))
        print0(f"step {step:05d} | {result}")
        show_sample(model)
last_step = step if eval_only else max_iters
batches = read_ahead(read_step, range(step, last_step))  # a thread reads the next step while this one computes
while True:
    stopping = signals.received_anywhere()
    if (step > first_step or unevaluated) and (stopping or step % eval_interval == 0 or step == last_step):
        with log.paused():
            phase = "evaluating"
            losses = None if stopping else evaluate()
            stopping = losses is None
            val_loss, result = log.evaluation(step, losses, val_data.shares, sum(n_eval_sequences))
            phase = "saving"
            run = run_info | {"val_loss": val_loss, "sequences": earlier_sequences + step * sequences_per_step}
            saved = saver.save(step, run, wait=stopping or step == last_step)
            print0(f"step {step:05d} | {result} | {saved}")
            if not stopping:
                show_sample(model)
    if stopping or step == last_step:
        break
    phase = "training"
    lr = learning_rate_at(step)
    optimizer.lr.fill_(lr)
    loss = torch.zeros((), device=device)  # this rank's share
    with log.reading(), bad_data_ends_this_rank():
        micro_batches = next(batches)
    for i, (loss_weight, sequences) in enumerate(micro_batches):
        if not sync_every_micro_batch:
            model.set_requires_gradient_sync(i + 1 == micro_steps)
        loss += forward_backward(send_to_device(loss_weight, device), *make_batch(sequences))
    saver.wait_for_copy()  # of the weights, by a save in the background
    grad_norm = update()
    step += 1
    log.step(step, lr, loss=loss, grad_norm=grad_norm)
    saver.report(step)

# ----------------------------------------------------------------------------------------------------------------------
# The end
phase = "ending"
if stopping and keep_last and step > first_step and not saver.error:
    with_flag = " with --init_from=resume" if init_from == "scratch" else ""  # scratch would be refused
    print0(f"run the same command again{with_flag} to resume")
if step == last_step and val_loss is not None:
    log.summary(val_loss, val_data, sum(n_eval_sequences) * block_size, settings=settings,
                save_seconds=saver.seconds, resume_seconds=resume_seconds)  # fmt: skip
    if keep_last and not saver.error:
        log.next_command(chat=bool(train_data.tokens.masks), best=saver.best)
log.close()
distributed.end_together(1 if saver.error else signals.exit_code)  # 1: the last checkpoint was not written
