"""The trainers that are compared: nanocria's settings, the peers of peers.py, and how a peer's steps are measured.

PyTorch's allocator uses expandable segments, as in train.py.
"""

import gc
import itertools
import statistics

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from benchmarks.peers import LEARNING_RATE, PEERS, Trainer, trained_parameters
from benchmarks.settings import ROOT
from benchmarks.timing import mark
from configurator import preview
from data.loader import open_dataset
from data.pystdlib.prepare import N_VOCAB
from model import Llama, LlamaConfig
from runtime.device import peak_flops, pick_device
from runtime.distributed import all_reduce_max, all_reduce_sum, rank, world_size

SEED = 1337
PLAIN = "--kernels=none --attention=sdpa"
LORA = "--lora_rank=16"
QLORA = f"{LORA} --quantize_base=nf4"
FP8 = "--fp8=true"
OF_8 = "--gradient_accumulation_steps=8 --cooldown_iters=0"  # config/linux_114m.py's step in 8 micro-batches
NANOCRIA = {
    "nanocria": Trainer("nanocria"),
    "nanocria-fp8": Trainer("nanocria, fp8", flags=FP8),
    "nanocria-float32": Trainer("nanocria, float32", flags="--dtype=float32"),
    "nanocria-long": Trainer("nanocria, activations on the CPU", flags="--offload_activations=true"),
    "nanocria-unfused": Trainer("nanocria, unfused loss", flags="--kernels=blocks"),
    "nanocria-plain": Trainer("nanocria, plain PyTorch", flags=PLAIN),
    "nanocria-lora": Trainer("nanocria, LoRA", flags=LORA),
    "nanocria-lora-fp8": Trainer("nanocria, LoRA, float8", flags=f"{LORA} {FP8}"),
    "nanocria-qlora": Trainer("nanocria, QLoRA", flags=QLORA),
    "nanocria-qlora-fp8": Trainer("nanocria, QLoRA, float8", flags=f"{QLORA} {FP8}"),
    "nanocria-galore": Trainer("nanocria, GaLore", flags="--optimizer=galore"),
    "nanocria-zero2": Trainer("nanocria, ZeRO-2", flags="--sharding=zero2"),
    "nanocria-nccl": Trainer("nanocria, NCCL alone", flags="--copy_engines=false"),
    "nanocria-adamw": Trainer("nanocria, AdamW", flags=f"--optimizer=adamw {OF_8}"),
    "nanocria-muon": Trainer("nanocria, Muon", flags=f"--optimizer=muon {OF_8}"),
    "nanocria-normuon": Trainer("nanocria, NorMuon", flags=f"--optimizer=normuon {OF_8}"),
    "nanocria-soapmuon": Trainer("nanocria, SoapMuon", flags=f"--optimizer=soapmuon {OF_8}"),
}
TRAINERS = NANOCRIA | PEERS


def llama_config(path: str, **changes) -> LlamaConfig:
    """The model that a config file of train.py describes, with pystdlib's vocabulary if the file does not set one."""
    settings = preview(ROOT / "train.py", [str(ROOT / path)]) | changes
    settings["vocab_size"] = settings["vocab_size"] or N_VOCAB
    return LlamaConfig(**{name: settings[name] for name in LlamaConfig.__dataclass_fields__})


# --- The step, and its measurement ---


def train_step(model: nn.Module, loss_of, optimizer, sequences: torch.Tensor) -> torch.Tensor:
    """Launch forward, backward, clip and update on sequences (B, T + 1); return the loss, which may be on its way."""
    loss = loss_of(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())
    loss.backward()
    grads = [parameter.grad for parameter in trained_parameters(model)]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
    optimizer.step()
    del grads
    optimizer.zero_grad()
    return loss.detach()


def batches(n_batches: int, batch: int, block: int, device) -> torch.Tensor:
    """This rank's tokens (n_batches, B, T + 1) of pystdlib: the same as train.py reads.

    A matmul's speed depends on its numbers, and random tokens would give other gradients of the logits.
    """
    text, _ = open_dataset("pystdlib", block, SEED)
    tokens = text.sequences(0, n_batches * world_size * batch).unflatten(0, (n_batches, world_size, batch))
    return tokens[:, rank].to(device)


def mfu(config: LlamaConfig, tok_per_s: float, frozen: bool) -> float | None:
    """MFU of one GPU, by train.py's count of FLOPs; None if the card's peak is unknown. frozen: under adapters."""
    peak = peak_flops(torch.cuda.get_device_name())
    with torch.device("meta"):
        model = Llama(config).requires_grad_(not frozen)
    return model.flops_per_token(config.block_size) * tok_per_s / peak if peak else None


def measure(
    trainer: str, config: str, batch: int, block: int, checkpointing: str, steps: int, warmup: int, history=""
) -> dict:
    """Train a peer for warmup + steps: the median step, the peak memory of the rank that needs most, and tokens per
    second and losses over all ranks. batch: per rank. warmup 5: any later step is as fast as the fifth. history: a file
    for PyTorch's record of all allocations.

    As in train.py nothing waits for the GPU: it is asked for times and losses at the end.
    """
    device = torch.device(pick_device("auto"))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    c = llama_config(config, block_size=block)
    model, loss_of, optimizer = TRAINERS[trainer].build(c, checkpointing, device)
    if history:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    losses = []
    ends = []
    data = batches(warmup + steps, batch, block, device)
    data[-1] = data[0]  # the same tokens in the first and the last step, so that their losses are comparable
    for step, sequences in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 10)  # without a warm-up 8B's loss first rises
        if step == warmup:
            gc.collect()
            gc.disable()  # as in torchtitan: no collection in the middle of a step
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            ends = [mark()]
        losses.append(train_step(model, loss_of, optimizer, sequences))
        ends.append(mark())
    if history:
        torch.cuda.memory._dump_snapshot(history)
    torch.cuda.synchronize()
    ms = statistics.median(began.elapsed_time(end) for began, end in itertools.pairwise(ends))
    tok_per_s = world_size * batch * block / ms * 1000
    first_and_last = torch.stack([losses[0], losses[-1]]) / world_size
    all_reduce_sum(first_and_last)
    first, last = (loss.item() for loss in first_and_last)
    if not last < first:  # or NaN
        return {"failed": f"it does not train: its loss went from {first} to {last}"}
    own_peaks = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
    peak_gib, reserved_gib = all_reduce_max(own_peaks)  # reserved: CUDA graphs too
    return {
        "ms_per_step": ms, "tok_per_s": tok_per_s, "mfu": mfu(c, tok_per_s / world_size, "lora" in trainer),
        "peak_gib": peak_gib, "reserved_gib": reserved_gib, "first_loss": first, "last_loss": last,
    }  # fmt: skip
