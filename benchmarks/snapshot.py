"""What holds the memory in a training step: ours and others', for PyTorch's memory viewer.

    python bench.py snapshot                                     Llama 3.2 1B, 8 x 2,048 tokens
    python bench.py snapshot --trainers=nanocria,hf-masters,hf-liger-masters --checkpointing=full --batch_size=4
    python bench.py snapshot -- --mlp_chunks=4                   arguments after -- go to train.py, for ours alone

Each trainer runs eleven steps in a separate process. PyTorch records the allocations, with the Python code that made
them: out/snapshot_NAME.html shows them in a browser, out/snapshot_NAME.pickle at https://pytorch.org/memory_viz. The
plot out/snapshot.png shows the memory in use over the last allocations and frees.
"""

import itertools
import pickle
from typing import Literal

from torch.cuda import _memory_viz

from benchmarks import runner
from benchmarks.settings import ROOT, read_settings
from benchmarks.trainers import TRAINERS

# settings
trainers = "nanocria,hf-masters"  # one or several of trainers.py
config = "config/llama32_1b.py"  # the model
batch_size = 8  # sequences
block_size = 2048  # tokens of a sequence
checkpointing: Literal["none", "selective", "full"] = "none"  # what backward recomputes
offload: Literal["none", "optimizer", "all"] = "none"  # of nanocria
out = "out/snapshot.json"  # the record

STEPS = 9  # together one more than train.py records
MOST_POINTS = 400  # that the record keeps of a timeline


def timeline(snapshot: dict) -> list[int]:
    """Bytes in use after each of the recorded allocations and frees."""
    trace = max(snapshot["device_traces"], key=len)
    signs = {"alloc": 1, "free_requested": -1}
    changes = [signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    at_the_end = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    return list(itertools.accumulate(changes, initial=at_the_end - sum(changes)))[1:]


def last_steps(totals: list[int]) -> dict:
    """The timeline of about the last two steps, in at most about MOST_POINTS points, in GiB, and its peak."""
    totals = totals[-len(totals) // 5 :]
    peak = totals.index(max(totals))
    indices = sorted({*range(0, len(totals), max(1, len(totals) // MOST_POINTS)), peak})
    return {
        "peak_gib": totals[peak] / 2**30, "at": indices, "gib": [round(totals[i] / 2**30, 3) for i in indices],
    }  # fmt: skip


def measure(trainer: str, flags: list[str], **point) -> dict:
    path = ROOT / "out" / f"snapshot_{trainer}.pickle"
    path.parent.mkdir(exist_ok=True)
    row = runner.train_steps(trainer, **point, steps=STEPS, warmup=2, flags=flags, history=str(path))
    if "peak_gib" not in row:
        return row
    snapshot = pickle.loads(path.read_bytes())
    path.with_suffix(".html").write_text(_memory_viz.trace_plot(snapshot))
    return last_steps(timeline(snapshot)) | {"allocator_peak_gib": row["peak_gib"]}


def main(argv: list[str]) -> None:
    s = read_settings(globals(), argv, for_train_py=True, trainers=TRAINERS)
    record = runner.start("snapshot", s)
    point = {"batch": s.batch_size, "block": s.block_size, "checkpointing": s.checkpointing}
    flags = [f"--offload={s.offload}", *s.flags]
    for trainer in s.trainers:
        key = {"trainer": trainer, **point, "flags": " ".join(flags)}
        record.measure("rows", key, measure, trainer, flags, config=s.config, **point)
    runner.finish(record, plot="plot_snapshot")
