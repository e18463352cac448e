"""What takes the memory in one step, allocation by allocation: ours against Hugging Face's.

    python bench.py snapshot                                     Llama 3.2 1B, 8 x 2,048 tokens
    python bench.py snapshot --peers=hf,liger --checkpointing=full --offload=optimizer --batch_size=4
    python bench.py snapshot --out=benchmarks/records/snapshot.json            as README.md shows it
    python bench.py snapshot -- --mlp_chunks=4                   arguments after -- go to train.py, for ours alone

Each trainer runs in a separate process. Its fifth step is saved as PyTorch's snapshot, out/NAME.pickle, which
https://pytorch.org/memory_viz can show too, and drawn. An allocation is classified by the Python code that made it and
by its lifetime: what forward leaves for backward is a saved activation, what backward leaves for the update a gradient.
Autograd's own formulas run without Python, so an allocation without Python frames belongs to backward.
"""

import itertools
import pickle
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch

from benchmarks import arms as trainers
from benchmarks import cli, limited, record, runner
from benchmarks import peers as trained
from benchmarks.estimate import resolve
from runtime.watchdog import Watchdog

# settings
peers = "hf"  # to compare with: hf, liger, or none
config = "config/llama32_1b.py"  # the model
batch_size = 8  # sequences
block_size = 2048  # tokens of a sequence
checkpointing: Literal["none", "full"] = "none"  # what backward recomputes
offload: Literal["none", "optimizer", "all"] = "none"  # what CPU memory holds; a peer offloads all or nothing
out = ""  # the record; default: out/snapshot.json

STEP = 5  # by then everything has been allocated once
MAKES_WEIGHTS = {"to_empty", "_apply", "init_weights", "from_config", "build_hf", "fully_shard"}
OF_BACKWARD = {"backward", "_pre_backward", "post_backward", "foreach_reduce", "_root_post_backward_final_callback"}
POINTS = 400  # that the record keeps of a timeline
KEYS = {"arms": ("arm", "batch", "block", "checkpointing", "offload", "flags")}  # what identifies a row


def parse(argv: list[str]) -> SimpleNamespace:
    s = cli.read_settings(globals(), argv, {"peers": ["hf", "liger", "none"]}, "out/snapshot.json", for_train_py=True)
    # Check that the file exists and train.py accepts it.
    named = {"activation_checkpointing": s.checkpointing, "offload": s.offload, "gradient_accumulation_steps": 1}
    resolve(s.config, 1, named, s.flags)
    return s


def at_step(step: int, path: str) -> None:
    """Start to record allocations and frees at the start of STEP, and write them at the start of the next step."""
    if step == STEP:
        options = {"context": "alloc", "stacks": "python", "max_entries": 1_000_000}
        torch.cuda.memory._record_memory_history(clear_history=True, **options)
    if step == STEP + 1:
        torch.cuda.memory._dump_snapshot(path)


def note(path: str, *command: str) -> None:
    """Run the command of train.py or of a peer in this process, and write the record to path."""
    # From here on each allocation has the Python frames that made it.
    torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
    progress, train_step, steps = Watchdog.progress, trained.train_step, itertools.count(1)

    def noting_progress(watchdog, doing):
        if found := re.fullmatch(r"step (\d+): forward and backward", doing):
            at_step(int(found[1]), path)
        progress(watchdog, doing)

    def noting_step(*arguments):
        at_step(next(steps), path)
        return train_step(*arguments)

    Watchdog.progress, trained.train_step = noting_progress, noting_step  # ours, a peer's
    limited.run_here(*command)


class Block(NamedTuple):
    """Memory that lives from one entry of the trace to another; start is -1 if it was allocated before the trace."""

    start: int
    end: int
    bytes: int
    frames: list  # Python frames, innermost first


def blocks(snapshot: dict) -> tuple[list[Block], int]:
    """All blocks that lived during the trace of the device that has one, and the number of entries in the trace."""
    device, trace = max(enumerate(snapshot["device_traces"]), key=lambda pair: len(pair[1]))
    living, found = {}, []
    for i, entry in enumerate(trace):
        if entry["action"] == "alloc":
            living[entry["addr"]] = (i, entry["size"], entry.get("frames", []))
        elif entry["action"] == "free_requested":
            start, size, frames = living.pop(entry["addr"], (-1, entry["size"], []))
            found.append(Block(start, i, size, frames))
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment.get("device", device) == device else []:
            if block["state"] == "active_allocated" and block["address"] not in living:
                living[block["address"]] = (-1, block["requested_size"], block.get("frames", []))
    found += [Block(start, len(trace), size, frames) for start, size, frames in living.values()]
    return found, len(trace)


def backward_span(found: list[Block]) -> tuple[int, int]:
    """The entries between which backward runs: from its first allocation to the first allocation after it."""
    of_backward = [block.start for block in found if block.start >= 0 and in_backward(block.frames)]
    later = [block.start for block in found if block.start > max(of_backward)]
    return min(of_backward), min(later, default=max(block.end for block in found))


def in_backward(frames: list) -> bool:
    """Autograd's own formulas have no Python frames; our functions and FSDP's hooks have known names."""
    return not frames or any(frame["name"] in OF_BACKWARD for frame in frames)


def in_loss_head(frames: list) -> bool:
    # the head of transformers' model is the linear layer that no other module of its file calls
    head = is_linear(frames) and sum(frame["filename"].endswith("modeling_llama.py") for frame in frames) == 1
    return head or any(re.search(r"cross_entropy|loss_utils\.py", f["filename"] + f["name"]) for f in frames)


def is_linear(frames: list) -> bool:
    return bool(frames) and frames[0]["filename"].endswith("linear.py")


def part_of(block: Block, backward: tuple[int, int], logits_bytes: int) -> str:
    """logits_bytes: size of whole logits, and so of their gradients; 0 if the logits are never whole."""
    files, names = [frame["filename"] for frame in block.frames], {frame["name"] for frame in block.frames}
    if any("/fsdp/" in file for file in files):
        return "gradients" if "foreach_reduce" in names else "weights"
    if any(Path(file).name == "stream_weights.py" for file in files):
        return "weights"
    if block.start < 0:
        if any("optimizers/" in file or "torch/optim/" in file for file in files):
            return "optimizer"
        return "weights" if names & MAKES_WEIGHTS else "other"
    if in_loss_head(block.frames):
        return "loss head"
    if block.start < backward[0]:
        return "saved activations" if block.end > backward[0] else "temporary"
    if block.start < backward[1]:
        if block.end >= backward[1]:
            return "gradients"
        return "loss head" if 0 < logits_bytes <= block.bytes else "temporary"
    return "temporary"


def timeline(snapshot: dict) -> dict[str, list[int]]:
    """Bytes of each part after each entry of the trace; the first number is before the trace."""
    found, n_entries = blocks(snapshot)
    backward = backward_span(found)
    logits = [block.bytes for block in found if is_linear(block.frames) and in_loss_head(block.frames)]
    changes = {part: [0] * (n_entries + 2) for part in trainers.SNAPSHOT_PARTS}
    for block in found:
        change = changes[part_of(block, backward, max(logits, default=0))]
        change[block.start + 1] += block.bytes
        change[block.end + 1] -= block.bytes
    return {part: list(itertools.accumulate(change[:-1])) for part, change in changes.items()}


def summarized(totals: dict[str, list[int]]) -> dict:
    """GiB at the peak, and the timeline in at most about POINTS points, including the peak."""
    together = [sum(values) for values in zip(*totals.values(), strict=True)]
    peak = max(range(len(together)), key=together.__getitem__)
    kept = sorted({*range(0, len(together), max(1, len(together) // POINTS)), peak})
    return {
        "peak_gib": together[peak] / 2**30,
        "at_peak": {part: values[peak] / 2**30 for part, values in totals.items()},
        "at": kept,
        "gib": {part: [round(values[i] / 2**30, 3) for i in kept] for part, values in totals.items()},
    }


def measured(s: SimpleNamespace):
    for arm in ["all", *(peer for peer in s.peers if peer != "none")]:
        path = record.ROOT / "out" / f"snapshot_{arm}.pickle"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        offload = s.offload if arm == "all" or s.offload == "none" else "all"
        at = {"batch": s.batch_size, "block": s.block_size, "checkpointing": s.checkpointing}
        flags = s.flags if arm == "all" else []
        before = ["-m", "benchmarks.snapshot", str(path)]
        options = {"config": s.config, "steps": 2, "warmup": STEP - 1, "before": before}
        result = runner.sweep_point(arm, offload, flags, **at, **options)
        if "peak_gib" in result:
            totals = timeline(pickle.loads(path.read_bytes()))
            result = summarized(totals) | {"allocator_peak_gib": result["peak_gib"]}
        yield "arms", {"arm": arm, **at, "offload": offload, "flags": shlex.join(flags), **result}


def main(argv: list[str]) -> None:
    runner.measure("snapshot", parse(argv), KEYS, measured, trainers.SWEEP, plot="draw_snapshot")


if __name__ == "__main__":
    note(*sys.argv[1:])
