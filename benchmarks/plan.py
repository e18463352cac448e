"""What more GPUs than were measured would reach: a step's time from its parts and the rates of the links.

    python bench.py plan        the table of benchmarks/README.md

A step of n GPUs takes the computation of one, longer by a measured factor; its share of the update; and what of the
communication is not hidden. ZeRO-3 moves the weights three times: a gather in forward, a gather and a reduction of
gradients in backward. What takes longer than the computation beside it is waited for, and so are the first gather and
the last reduction, of the embedding. With hybrid sharding the three stay within a machine, and each GPU's part of the
gradients is summed over the machines.
"""

from dataclasses import dataclass, replace

from benchmarks.settings import read_settings
from benchmarks.tables import markdown

GPUS_OF_A_MACHINE = 8
NVLINK = 336e9  # bytes per second into each GPU of a machine, measured in a gather on four H200s
NETWORK = 45e9  # bytes per second into each GPU from other machines: 90% of a link of 400 Gbit/s per GPU
HOP = 10e-6  # seconds from one rank to the next in a ring over machines: an assumption
TOGETHER = 1.045  # computation on several GPUs over that on one: FSDP's copies, shared bandwidth, the slowest card
FORWARD = 1 / 3  # of the computation


@dataclass(frozen=True)
class MeasuredStep:
    """A step of one GPU as measured. compute: seconds of forward and backward. update: of the whole model."""

    name: str
    parameters: float
    embedding: float  # parameters of it
    groups: int  # that are gathered one after another: blocks, embedding and head
    tokens: int
    compute: float
    update: float


# Records: gpus (441.2 ms on one GPU) and step (an update of 8.9 ms). 8B: from the 701.1 ms of its step on four GPUs.
LLAMA_1B = MeasuredStep("1B, 16 x 2,048", 1.236e9, 0.263e9, 17, 16 * 2048, 0.4323, 0.0089)
LLAMA_8B = MeasuredStep("8B, 2 x 4,096", 8.03e9, 0.525e9, 34, 2 * 4096, 0.6524, 0.0578)
QUARTER = replace(LLAMA_1B, name="1B, 4 x 2,048", tokens=4 * 2048, compute=LLAMA_1B.compute / 4)
SIXTEENTH = replace(LLAMA_1B, name="1B, 1 x 2,048", tokens=2048, compute=LLAMA_1B.compute / 16)


def seconds(step: MeasuredStep, n: int, hybrid: bool = False) -> float:
    """Seconds of a step on n GPUs, each with step.tokens; n is at most 8 or a multiple of it."""
    if n == 1:
        return step.compute + step.update
    machines = max(n // GPUS_OF_A_MACHINE, 1)
    sharded_over = n // machines if hybrid else n
    crosses = machines > 1 and not hybrid
    rate = min(NVLINK, GPUS_OF_A_MACHINE * NETWORK) if crosses else NVLINK  # a ring enters a machine by all its links
    hops = step.groups * (n - 1) * HOP if crosses else 0.0

    def move(parameters: float) -> float:
        """Seconds to gather or reduce bfloat16 weights of all ranks."""
        return 2 * parameters * (1 - 1 / sharded_over) / rate

    sum_over_machines = 0.0
    if hybrid:  # a ring of the machines: each float32 gradient of this GPU's part goes out and comes back
        part = 4 * step.parameters / GPUS_OF_A_MACHINE
        sum_over_machines = 2 * part * (1 - 1 / machines) / NETWORK + 2 * step.groups * (machines - 1) * HOP
    compute = step.compute * TOGETHER
    one_way = move(step.parameters) + hops
    forward = max(compute * FORWARD, one_way)
    backward = max(compute * (1 - FORWARD), 2 * one_way + sum_over_machines)
    return forward + backward + 2 * move(step.embedding) + step.update / sharded_over


def plan_table() -> str:
    lines = []
    for step in (LLAMA_8B, LLAMA_1B, QUARTER, SIXTEENTH):
        for n in (8, 64, 512):
            kinds = [seconds(step, n), seconds(step, n, hybrid=True)]
            shares = [seconds(step, 1) / time for time in kinds]
            cells = [f"{n * step.tokens / time:,.0f} · {share:.2f}" for time, share in zip(kinds, shares, strict=True)]
            lines.append([step.name, str(n), f"{n * step.tokens / 1e6:.2f}", *cells])
    return markdown(["each GPU", "GPUs", "million tokens per step", "ZeRO-3", "hybrid"], lines)


def main(argv: list[str]) -> None:
    read_settings(globals(), argv)  # there are none, but --help
    print(plan_table())
