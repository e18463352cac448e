"""Does it learn as well? The losses of Llama 3.2 1B beside those of Hugging Face's model, from the same weights.

    python bench.py losses                      300 steps of 8 x 1,024 tokens: some minutes of an H200
    python bench.py losses arms=nanocria,float32 steps=100 shape=4x512

All arms start from the same weights, read the same tokens at each step and follow the same learning rates; each is a
process of its own.

nanocria         train.py itself: bfloat16 compute, float32 master weights
nanocria-fp8     the same with --fp8=true, two thirds of its blocks' matmuls in float8
nanocria-plain   the same without its kernels: PyTorch's norms, RoPE, MLP, attention and loss
hf               transformers' LlamaForCausalLM with float32 weights and bfloat16 compute, by FSDP2
float32          the same model with everything in float32 (matmuls in TF32): what the others round

bfloat16 alone makes two runs drift apart, so no arm equals float32. What counts is that ours is no farther from it than
Hugging Face's, and on no side of it. Kept in benchmarks/records/losses.json, or out=...
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import convert
from benchmarks import peers, report, step
from data.tokens import Tokens
from data.write import prepare_once
from model import Llama, LlamaConfig, fill
from runtime import memory_stats

CONFIG = step.CONFIG
ARMS = {
    "nanocria": "nanocria",
    "nanocria-fp8": "nanocria, fp8",
    "nanocria-plain": "nanocria, plain PyTorch",
    "hf": "Hugging Face, bfloat16",
    "float32": "Hugging Face, float32",
}
FLAGS = {
    "nanocria": [],
    "nanocria-fp8": ["--fp8=true"],
    "nanocria-plain": ["--fused_kernels=false", "--fused_loss=false", "--attention=sdpa"],
}
REFERENCE = "float32"
ROWS = {"runs": ("arm",)}
SEED, LEARNING_RATE, WARMUP = 1337, 4e-4, 50  # config/llama32_1b.py's rate
BETAS, WEIGHT_DECAY, GRAD_CLIP = (0.9, 0.95), 0.1, 1.0
PACKAGES = ("transformers",)


# ----------------------------------------------------------------------------------------------------------------------
# nanocria: train.py, which records the loss of each step


def nanocria_losses(arm: str, steps: int, batch: int, block: int, config=CONFIG, flags=()) -> dict:
    with tempfile.TemporaryDirectory() as out_dir:
        words = step.train_words(config, batch, block, "none", out_dir)
        words += [f"--learning_rate={LEARNING_RATE}", f"--min_lr={LEARNING_RATE}", f"--warmup_iters={WARMUP}"]
        words += [f"--seed={SEED}", f"--max_iters={steps}", "--log_interval=1", *FLAGS[arm], *flags]
        result = step.train(words, out_dir)
        if "curve" not in result:
            return result
        return {"losses": [loss for _, _, loss in result["curve"]]}


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face's model, on what train.py would have it read


@torch.no_grad()
def begin_as_train_py(model: torch.nn.Module, config: LlamaConfig, device, compute_dtype: torch.dtype) -> None:
    """Gives Hugging Face's model the weights that train.py begins with, rounded as there to the compute dtype."""
    with torch.device("meta"):
        ours = Llama(config).to(compute_dtype)
    ours.to_empty(device=device).init_weights(SEED, device)
    theirs = dict(model.named_parameters())
    for name, weight in ours.named_parameters():
        names = convert.hf_names(name)
        parts = weight.float().split([theirs[hf_name].shape[0] for hf_name in names])  # q, k, v; gate, up
        for hf_name, part in zip(names, parts, strict=True):
            fill(theirs[hf_name], part)


def training_text() -> Tokens:
    folder = report.ROOT / "data" / "pystdlib"
    prepare_once(folder)
    return Tokens(folder, "train")


def blocks_of_steps(steps: int, batch: int, block: int) -> torch.Tensor:
    """What train.py reads in its first epoch: (steps, B, T + 1)."""
    text, rng = training_text(), np.random.default_rng((SEED, 0))
    order, shift = rng.permutation(text.blocks(block, shifted=True)), int(rng.integers(block))
    return torch.from_numpy(text.read(order[: steps * batch], block, shift)).unflatten(0, (steps, batch))


def peer_losses(arm: str, steps: int, batch: int, block: int, config=CONFIG, compute_dtype="bfloat16", **changes):
    """The loss of each step; on the CPU where there is no GPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        memory_stats.let_segments_grow()
    torch.set_float32_matmul_precision("high")
    c = peers.llama_config(config, block_size=block, **changes)
    if arm == "hf":
        model, loss_of = peers.build_hf_masters(c, "none", device)
    else:
        model, loss_of = peers.build_hf(c, "full", device, dtype=torch.float32)  # recomputed: or it would not fit
    begin_as_train_py(model, c, device, getattr(torch, compute_dtype))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)
    losses = []
    for i, blocks in enumerate(blocks_of_steps(steps, batch, block).to(device)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (i + 1) / (WARMUP + 1))
        tokens, targets = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
        losses.append(peers.train_step(model, loss_of, optimizer, tokens, targets)[0])
    return {"losses": losses}


# ----------------------------------------------------------------------------------------------------------------------
# The record


def parse(words: list[str]) -> dict:
    options = {"arms": list(ARMS), "steps": ["300"], "shape": ["8x1024"], "out": [str(report.ASSETS / "losses.json")]}
    _, options = step.read_words(words, options, [], {"arms": ARMS})
    batch, block = step.shape(",".join(options["shape"]), "shape")
    steps = step.whole("steps", ",".join(options["steps"]))
    n_blocks = training_text().blocks(block, shifted=True)
    if steps * batch > n_blocks:
        raise ValueError(f"steps={steps}: with {batch} x {block} tokens, pystdlib has enough for {n_blocks // batch}")
    return options | {"steps": steps, "at": (steps, batch, block), "out": Path(",".join(options["out"]))}


def measured(options: dict):
    for arm in options["arms"]:
        spec = dict(zip(("arm", "steps", "batch", "block"), (arm, *options["at"]), strict=True))
        if arm in FLAGS:
            result = nanocria_losses(**spec)
        else:
            result, printed = step.run(["-m", "benchmarks.losses", json.dumps(spec)])
            result = result or step.failure(printed)
        yield "runs", spec | result


def differences(row: dict, rows: list[dict]) -> list[float] | None:
    """Of each step's loss from that of the reference; None without it, or for the reference itself."""
    reference = next((r for r in rows if r["arm"] == REFERENCE and "losses" in r), None)
    if reference is None or row is reference or "losses" not in row:
        return None
    return [loss - other for loss, other in zip(row["losses"], reference["losses"], strict=True)]


def last_third(values: list[float]) -> list[float]:
    return values[-max(len(values) // 3, 1) :]


def cells(row: dict, rows: list[dict]) -> list[str]:
    """The mean loss over the last third of the steps; the mean and the mean size of its differences there."""
    found = differences(row, rows)
    last = [f"{statistics.fmean(last_third(row['losses'])):.4f}"]
    if found is None:
        return [*last, "-", "-"]
    found = last_third(found)
    return [*last, f"{statistics.fmean(found):+.4f}", f"{statistics.fmean(map(abs, found)):.4f}"]


def losses_table(record: dict) -> str:
    rows = [[ARMS[row["arm"]], *cells(row, record["runs"])] for row in record["runs"] if "losses" in row]
    return report.table(["trainer", "loss", "minus float32's", "distance from float32's"], rows)


def line(row: dict, record: dict) -> str:
    name = f"{ARMS[row['arm']]:<26}"
    if "losses" not in row:
        return f"{name} {step.trouble(row)}"
    loss, mean, size = cells(row, record["runs"])
    return f"{name} first loss {row['losses'][0]:.4f}, last third {loss}, minus float32's {mean}, distance {size}"


def main(words: list[str]) -> None:
    try:
        options = parse(words)
    except ValueError as error:
        sys.exit(str(error))
    new = step.begin("losses", words, ROWS, PACKAGES)
    record, failed = step.fill(new, measured(options), options["out"], ROWS, line)
    print("\n" + losses_table(record))
    print(json.dumps({"record": str(options["out"]), "failed": failed}))


if __name__ == "__main__":
    try:
        found = peer_losses(**json.loads(sys.argv[1]))
    except ImportError as error:
        found = {"missing": str(error)}
    print("\n" + json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
