"""FSDP's two collectives without the GPU's multiprocessors: over NVLink by its copy engines, beside the matmuls.

NCCL's kernels occupy some of the multiprocessors while they run. A matmul of cuBLAS begins with one program on each of
them and gives each the same share of the work: where one is taken, its program starts late, and the matmul ends as
much later. So what looks hidden behind the matmuls is not: 16 x 2,048 tokens of Llama 3.2 1B on 4 H200s took 6% longer
for a token than on one.

A copy engine moves memory without a program. Ranks of one host map each other's buffers (symmetric memory); a rank says
that its buffer is full and pulls what it needs from the others:

    all-gather        from each of the others its shard
    reduce-scatter    from each of the others its gradient of this rank's shard, in bfloat16, half of float32's bytes;
                      their sum, in float32 and in the order of the ranks, is rounded once

which is as exact as a reduction in float32: what a rank contributes is a bfloat16 gradient either way.

A buffer may be filled again once the others have read it. They have when they answer at the meeting of a later
collective, for each works through its own in order; so buffers take turns, and FSDP's order does the rest: it fills the
next-but-one after the collective before has ended.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

taken = 0  # bytes of all buffers, which PyTorch's memory statistics do not count


def use_copy_engines(model: FSDPModule, layers: list[FSDPModule], group: dist.ProcessGroup, reduce: bool) -> None:
    """Gives FSDP these collectives among the ranks of group, which must reach each other's memory.

    reduce: the reduce-scatter too. FSDP must then hand over gradients as they are (reduce_dtype None), which rules out
    what would add to them before: sums over micro-batches, copies of hybrid sharding, float16's small numbers.
    """
    gather, scatter = CopyEngineAllGather(group, 3), CopyEngineReduceScatter(group, 2)
    for layer in layers:
        layer.set_custom_all_gather(gather)
        if reduce:
            layer.set_custom_reduce_scatter(scatter)
    model.set_custom_all_gather(CopyEngineAllGather(group, 1))
    if reduce:
        model.set_custom_reduce_scatter(CopyEngineReduceScatter(group, 1))


class Buffers:
    """Symmetric memory of one group of ranks: for each size `count` buffers that take turns."""

    def __init__(self, group: dist.ProcessGroup, count: int):
        self.group, self.count = group, count
        self.buffers, self.turn, self.handles = {}, {}, {}

    def next(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Every rank asks for the same ones in the same order; a first time it waits for the others."""
        global taken
        key = numel, dtype
        turn = self.turn[key] = self.turn.get(key, -1) + 1
        buffers = self.buffers.setdefault(key, [])
        if turn < self.count:
            buffer = symmetric_memory.empty(numel, dtype=dtype, device=device)
            torch.cuda.synchronize()  # it is being zeroed, and with it a signal that another rank might send at once
            self.handles[buffer.data_ptr()] = symmetric_memory.rendezvous(buffer, self.group.group_name)
            buffers.append(buffer)
            taken += buffer.nbytes
        return buffers[turn % self.count]

    def pull(self, buffer: torch.Tensor, out: torch.Tensor, offset_of) -> None:
        """Once all ranks have filled theirs: out[r] (ranks, n) from rank r's buffer, beginning at offset_of(r)."""
        handle = self.handles[buffer.data_ptr()]
        handle.barrier()
        for step in range(1, handle.world_size):  # each begins with its neighbour, so that they do not all ask one
            peer = (handle.rank + step) % handle.world_size
            out[peer].copy_(handle.get_buffer(peer, out[peer].shape, out.dtype, offset_of(peer)))


class CopyEngineAllGather(AllGather):
    def __init__(self, group: dist.ProcessGroup, count: int):
        self.buffers = Buffers(group, count)

    def allocate(self, size, *, dtype, device):
        return self.buffers.next(size[0], dtype, device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """FSDP has copied the rank's own shard, input_tensor, to its place in output_tensor, the buffer."""
        n = input_tensor.numel()
        self.buffers.pull(output_tensor, output_tensor.view(-1, n), lambda peer: peer * n)


class CopyEngineReduceScatter(ReduceScatter):
    def __init__(self, group: dist.ProcessGroup, count: int):
        self.buffers, self.wanted = Buffers(group, count), "input"

    def allocate(self, size, *, dtype, device):
        """FSDP asks for the input, and then for the output."""
        if self.wanted == "input":
            self.wanted = "output"
            return self.buffers.next(size[0], dtype, device)
        self.wanted = "input"
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        n, rank = output_tensor.numel(), group.rank()
        received = torch.empty(group.size(), n, dtype=input_tensor.dtype, device=input_tensor.device)
        received[rank].copy_(input_tensor.view(-1, n)[rank])
        self.buffers.pull(input_tensor, received, lambda peer: rank * n)
        total = received.sum(0, dtype=torch.float32)
        output_tensor.copy_(total.div_(group.size()) if op == dist.ReduceOp.AVG else total)
