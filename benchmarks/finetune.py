"""Does a finetune learn the same as others'? Published weights on conversations: ours, transformers' and peft's.

    python bench.py finetune --init_from=FOLDER --dataset=data/chat                 200 steps of 4 x 1,024 tokens
    python bench.py finetune --init_from=FOLDER --trainers=nanocria-lora,hf-lora,hf-lora-again --steps=300 --rate=2e-4

nanocria         train.py config/sft.py: conversations packed into blocks; bfloat16 with float32 masters, or float32
nanocria-lora    the same with adapters of rank 16; nanocria-qlora: on a base in NF4; -fp8: with --fp8=true
hf               transformers' model with the same weights, on the same conversations, unpacked and padded; its
                 bfloat16 has float32 masters too. hf-again repeats it, to show how far two runs of one trainer differ
hf-lora          peft's adapters on it, in float32 under autocast, with the same initial values

All use the same learning rates and initial weights. A training loss is the mean over the step's answer tokens, a
validation loss over those of all validation conversations. --measure=packing: how many targets per second our model
learns from packed blocks, and from micro-batches of as many tokens with every conversation padded to the longest.
"""

import math
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks import losses, runner, timing
from benchmarks.peers import with_peft
from benchmarks.settings import read_settings
from benchmarks.trainers import NANOCRIA, SEED
from configurator import SettingError
from data.loader import Packed, open_dataset
from lora import add_lora
from model import document_starts
from runtime.checkpoint import load_model
from runtime.device import pick_device

# settings
init_from = ""  # a folder of published weights
dataset = "chat"  # conversations, made by data/chat/prepare.py with that folder's tokenizer
measure = "losses,packing"  # what to measure
trainers = "nanocria,hf,hf-again,nanocria-float32,hf-float32"  # also: nanocria-lora, -qlora, -fp8, hf-lora, -again
steps = 200  # of training
rate = 2e-5  # the learning rate after a warm-up of 20 steps; then it falls to zero along a cosine
out = "out/finetune_losses.json"  # the record

HUGGING_FACE = ["hf", "hf-again", "hf-float32", "hf-lora", "hf-lora-again"]
WARMUP_ITERS = 20
EVALUATIONS = 4
BATCH = 4  # packed sequences of a step
BLOCK = 1024  # tokens of each
PADDED_ROWS = 16  # of a padded micro-batch
Conversations = list[tuple[torch.Tensor, torch.Tensor]]  # tokens (n,) and targets (n,): the next token, or -100


def train_finetune(trainer: str, folder: str, dataset: str, batch: int, block: int, steps: int, rate: float, flags=()):
    """losses.train_losses() of a finetune."""
    _, val = open_dataset(dataset, block, SEED, mask_documents=True)
    return losses.train_losses(
        steps, batch, block, "config/sft.py", [*NANOCRIA[trainer].flags.split(), *flags],
        init_from=folder, dataset=dataset, learning_rate=rate, min_lr=0.0, warmup_iters=WARMUP_ITERS, dtype="bfloat16",
        eval_interval=max(steps // EVALUATIONS, 1), eval_iters=-(-val.n_blocks // batch),
    )  # fmt: skip


# --- The peers ---


def conversations(data: Packed, blocks: torch.Tensor) -> Conversations:
    """The conversations in packed blocks (B, T + 1), each up to its last target."""
    chats = []
    for tokens, targets, doc_starts in zip(*data.unpack(blocks), strict=True):
        cuts = doc_starts.nonzero().flatten().tolist()[1:]  # the first begins the block
        for x, y in zip(tokens.tensor_split(cuts), targets.tensor_split(cuts), strict=True):
            is_target = (y >= 0).nonzero()
            if len(is_target):  # else it is padding
                end = is_target[-1] + 1
                chats.append((x[:end], y[:end]))
    return chats


def padded_length(chats: Conversations) -> int:
    """The length of the longest, rounded up to a multiple of 64."""
    return -(-max(len(tokens) for tokens, _ in chats) // 64) * 64


def padded(chats: Conversations, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (B, padded_length) of conversations. Padding is on the right, so no token sees it."""
    length = padded_length(chats)
    tokens = torch.stack([F.pad(x, (0, length - len(x))) for x, _ in chats])
    targets = torch.stack([F.pad(y, (0, length - len(y)), value=-100) for _, y in chats])
    return tokens.to(device), targets.to(device)


def build_peer(trainer: str, folder: str, device: torch.device) -> torch.nn.Module:
    import transformers

    dtype = torch.float32 if "float32" in trainer else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).train()
    if "lora" in trainer:  # peft's adapters, with the initial values of train.py's
        model = with_peft(model)
        ours = load_model(folder, device, dtype)
        add_lora(ours, 16, 32)
        theirs = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
        losses.begin_as_train_py(ours, theirs, device)
    return model


def learning_rate(step: int, steps: int, rate: float) -> float:
    """train.py's schedule with config/sft.py."""
    if step < WARMUP_ITERS:
        return rate * (step + 1) / (WARMUP_ITERS + 1)
    return rate * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_ITERS) / (steps - WARMUP_ITERS)))


def peer_finetune(trainer: str, folder: str, dataset: str, batch: int, block: int, steps: int, rate: float) -> dict:
    """train_finetune() of a peer; on the CPU if there is no GPU."""
    device = torch.device(pick_device("auto"))
    torch.set_float32_matmul_precision("high")
    train, val = open_dataset(dataset, block, SEED, mask_documents=True)
    model = build_peer(trainer, folder, device)
    masters = {p: p.detach().float() for p in model.parameters() if p.requires_grad}  # in float32: p itself
    optimizer = torch.optim.AdamW(masters.values(), betas=(0.9, 0.95), weight_decay=0.0)

    def losses_of(chats: Conversations):
        """The sum of each micro-batch's losses over the number of all targets."""
        n_targets = sum(int((targets >= 0).sum()) for _, targets in chats)
        for i in range(0, len(chats), PADDED_ROWS):
            tokens, targets = padded(chats[i : i + PADDED_ROWS], device)
            autocast = "lora" in trainer and "float32" not in trainer
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logits = model(input_ids=tokens).logits
            yield F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / n_targets

    def evaluate() -> float:
        with torch.no_grad():
            chats = conversations(val, val.read(range(val.n_blocks)))
            return sum(loss.double() for loss in losses_of(chats)).item()

    step_losses = []
    evaluations = [(0, evaluate())]
    for step in range(steps):
        total = 0.0
        for loss in losses_of(conversations(train, train.sequences(step * batch, batch))):
            loss.backward()
            total += loss.detach()
            for p, master in masters.items():
                master.grad = p.grad.float() + (0 if master.grad is None else master.grad)
                p.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, rate)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
        step_losses.append(float(total))
        if (step + 1) % max(steps // EVALUATIONS, 1) == 0:
            evaluations.append((step + 1, evaluate()))
    return {"losses": step_losses, "val": evaluations}


# --- Packing ---


def full_batches(chats: Conversations, n_tokens: int) -> Iterator[Conversations]:
    """Batches of as many conversations as fit into n_tokens when padded to the longest, in random order."""
    batch = []
    for chat in random.Random(0).sample(chats, len(chats)):
        if batch and (len(batch) + 1) * padded_length([*batch, chat]) > n_tokens:
            yield batch
            batch = []
        batch.append(chat)
    yield batch


def learn(trainer: str, folder: str, dataset: str, batch: int, block: int) -> dict:
    """Targets per second of our model's forward and backward over the training data, packed or padded."""
    device = torch.device(pick_device("auto"))
    model = load_model(folder, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    data, _ = open_dataset(dataset, block, SEED, mask_documents=True)
    if trainer == "packed":
        unpacked = [data.unpack(data.read(range(i, i + batch))) for i in range(0, data.n_blocks - batch + 1, batch)]
        inputs = [(x, y, document_starts(marks, data.doc_start)) for x, y, marks in unpacked]
    else:
        chats = conversations(data, data.read(range(data.n_blocks)))
        inputs = [padded(some, "cpu") for some in full_batches(chats, batch * block)]
    n_targets = sum(int((x[1] >= 0).sum()) for x in inputs)
    inputs = [[x.to(device).contiguous() for x in each] for each in inputs]

    def read_all():
        for each in inputs:
            model(*each).backward()
            model.zero_grad()

    timing.wall_seconds(read_all, device)  # compiles for each shape
    seconds = timing.wall_seconds(read_all, device)
    return {"targets_per_s": n_targets / seconds}


def main(argv: list[str]) -> None:
    s = read_settings(globals(), argv, trainers=[*NANOCRIA, *HUGGING_FACE], measure=("losses", "packing"))
    if not s.init_from:
        raise SettingError("--init_from= is empty: name a folder of published weights")
    record = runner.start("finetune", s)
    data = {"folder": s.init_from, "dataset": s.dataset, "batch": BATCH, "block": BLOCK}
    if "losses" in s.measure:
        for trainer in s.trainers:
            key = {"trainer": trainer, **data, "steps": s.steps, "rate": s.rate}
            if trainer in NANOCRIA:
                record.measure("runs", key, train_finetune, **key)
            else:
                record.measure("runs", key, runner.call, "finetune.peer_finetune", **key)
    if "packing" in s.measure:
        for trainer in ("packed", "padded"):
            key = {"trainer": trainer, **data}
            record.measure("packing", key, runner.call, "finetune.learn", **key)
    runner.finish(record)
