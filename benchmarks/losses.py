"""Does it learn as well? The losses of Llama 3.2 1B against those of Hugging Face's model, from the same weights.

    python bench.py losses                      300 steps of 8 x 1,024 tokens: some minutes of an H200
    python bench.py losses --trainers=nanocria,float32 --steps=100 --batch_size=4

nanocria         train.py itself: bfloat16 compute, float32 master weights
nanocria-fp8     the same with --fp8=true, two thirds of its blocks' matmuls in float8
nanocria-plain   the same without its kernels: PyTorch's norms, RoPE, MLP, attention and loss
hf               transformers' LlamaForCausalLM with float32 weights and bfloat16 compute, by FSDP2
float32          the same model with everything in float32 (matmuls in TF32): the reference, without bfloat16 rounding
nanocria-galore  train.py with --optimizer=galore, of rank 128; this and the next run only if named
hf-galore        float32 with galore-torch's optimizer, set to project the same side and take steps of the same size

All start from the same weights, read the same tokens and use the same learning rates. bfloat16 alone makes two runs
drift apart, so none equals float32. What counts is that ours is no farther from it than Hugging Face's, and not biased
to one side.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks import runner
from benchmarks.peers import ADAMW, hf_masters, hf_model
from benchmarks.settings import ROOT, read_settings
from benchmarks.trainers import NANOCRIA, SEED, batches, llama_config, train_step
from configurator import preview
from model import Llama, fill
from runtime.device import pick_device
from runtime.hf import hf_rows
from runtime.loss_plot import read_losses

# settings
trainers = "nanocria,nanocria-fp8,nanocria-plain,hf,float32"
steps = 300  # of training
batch_size = 8  # sequences of a step
block_size = 1024  # tokens of a sequence
out = "out/losses.json"  # the record

LEARNING_RATE = 4e-4  # config/llama32_1b.py's
WARMUP = 50


def train_losses(steps: int, batch: int, block: int, config=runner.CONFIG, flags=(), **settings) -> dict:
    """train.py's loss at each step, and (step, loss) at each evaluation. settings: of train.py."""
    settings = {"learning_rate": LEARNING_RATE, "min_lr": LEARNING_RATE, "warmup_iters": WARMUP} | settings
    argv = runner.train_argv(config, batch, block, "none", seed=SEED, max_iters=steps, **settings)
    with tempfile.TemporaryDirectory() as out_dir:
        summary = runner.train([*argv, *flags], out_dir)
        if "curve" not in summary:
            return summary
        run = read_losses(Path(out_dir))
    return {"losses": [loss for *_, loss in run.train], "val": [(step, loss) for step, *_, loss in run.val]}


@torch.no_grad()
def begin_as_train_py(ours: Llama, theirs: dict[str, torch.Tensor], device) -> None:
    """Give Hugging Face's parameters, by name, the initial values of train.py's trained parameters. Empties `theirs`:
    AssertionError if it has others.
    """
    ours.to_empty(device=device).init_weights(SEED, device)
    for name, parameter in ours.named_parameters():
        for row in hf_rows(name, parameter, ours.config) if parameter.requires_grad else []:
            fill(theirs.pop(row.name), row.tensor)
    assert not theirs, f"they train what train.py does not: {list(theirs)}"


def peer_losses(trainer: str, steps: int, batch: int, block: int, config=runner.CONFIG) -> dict:
    """The losses of Hugging Face's model on the tokens that train.py would read; on the CPU if there is no GPU."""
    device = torch.device(pick_device("auto"))
    torch.set_float32_matmul_precision("high")
    c = llama_config(config, block_size=block)
    settings = preview(ROOT / "train.py", [str(ROOT / config)])
    compute_dtype = settings["dtype"].replace("auto", "bfloat16")
    if trainer == "hf":
        model, loss_of, _ = hf_masters(c, "none", device)
    else:
        model, loss_of = hf_model(c, "full", device, dtype=torch.float32)  # full: else it would not fit
    with torch.device("meta"):
        ours = Llama(c).to(getattr(torch, compute_dtype))  # rounded to the compute dtype, as in train.py
    begin_as_train_py(ours, dict(model.named_parameters()), device)
    optimizer = make_optimizer(trainer, model, settings["galore_rank"])
    losses = []
    for i, sequences in enumerate(batches(steps, batch, block, device)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (i + 1) / (WARMUP + 1))
        losses.append(train_step(model, loss_of, optimizer, sequences))
    return {"losses": torch.stack(losses).tolist()}


def make_optimizer(trainer: str, model: torch.nn.Module, rank: int) -> torch.optim.Optimizer:
    """AdamW with train.py's settings; for hf-galore, with its projection on the layers' matrices."""
    groups = []
    for name, p in model.named_parameters():
        groups.append({"params": [p], "weight_decay": ADAMW["weight_decay"] * (p.ndim > 1)})
        if trainer == "hf-galore" and p.ndim > 1 and ".layers." in name:
            scale = (p.shape[1] / rank) ** 0.5
            groups[-1] |= {"rank": rank, "update_proj_gap": 200, "scale": scale, "proj_type": "right"}
    if trainer != "hf-galore":
        return torch.optim.AdamW(groups, **ADAMW)
    from galore_torch import GaLoreAdamW

    return GaLoreAdamW(groups, **ADAMW, eps=1e-8, no_deprecation_warning=True)


def main(argv: list[str]) -> None:
    s = read_settings(globals(), argv, trainers=[*NANOCRIA, "hf", "float32", "hf-galore"])
    record = runner.start("losses", s)
    for trainer in s.trainers:
        key = {"trainer": trainer, "steps": s.steps, "batch": s.batch_size, "block": s.block_size}
        if trainer in NANOCRIA:
            flags = NANOCRIA[trainer].flags.split()
            record.measure("runs", key, train_losses, s.steps, s.batch_size, s.block_size, flags=flags)
        else:
            record.measure("runs", key, runner.call, "losses.peer_losses", **key)
    runner.finish(record)
