"""What FSDP gathers and reduces together, and how: over NVLink by the GPUs' copy engines, beside the matmuls.

NCCL's kernels occupy some of the multiprocessors while they run. A matmul of cuBLAS begins with one program on each of
them and gives each the same share of the work: where one is taken, its program starts late, and the matmul ends as
much later. So what looks hidden behind the matmuls is not: 16 x 2,048 tokens of Llama 3.2 1B on 4 H200s took 6% longer
for a token than on one.

A copy engine moves memory without a program. Ranks of one host map each other's buffers (symmetric memory); a rank says
that its buffer is full, waits until the others have said so, and pulls what it needs from theirs:

    all-gather        from each of the others its shard
    reduce-scatter    from each of the others its gradient of this rank's shard, in bfloat16, half of float32's bytes;
                      one kernel adds them to the rank's own in float32 and rounds once

which is as exact as a reduction in float32: what a rank contributes is a bfloat16 gradient either way. Saying and
waiting take no program either: they are a number that the stream writes to another GPU's memory, and one that it waits
for in its own (cuStreamWriteValue32, cuStreamWaitValue32). A kernel that waits in a loop would be the same burden as
NCCL's.

A buffer may be filled again once all other ranks have pulled from it. A rank pulls in order, so one that says "my
number k is full" has read all of number k - 1. It follows, without another message:

    gathers of layers       three buffers: k overwrites k - 3. FSDP has waited for k - 2, which ended when all ranks had
                            said that their k - 2 was full: so all had read k - 3
    reductions of layers    two buffers: k overwrites k - 2. FSDP has waited for k - 1, so all had read k - 2

The root has one buffer for gathers and one for reductions (an untied embedding and head share them), and nothing need
come between two uses: in an evaluation the next embedding follows the head. There each rank also says when it has read
a buffer, and whoever fills it waits until all have.
"""

import ctypes
import functools

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from kernels import add_ranks
from model import Llama
from runtime import distributed

buffer_bytes = 0  # bytes of all buffers, which PyTorch's memory statistics do not count


def shard(model: Llama, keep_blocks: bool = False, **options) -> None:
    """Makes the groups of parameters that FSDP gathers together, and whose gradients it reduces together.

    Each block is a group; keep_blocks: it stays whole from forward to backward. A tied head is the embedding, needed
    first and last, so it stays whole in the root group. An untied embedding is a group of its own, which only forward
    needs whole. The final norm and an untied head are another, whole from the end of forward to the beginning of
    backward: its gradients are reduced during the blocks' backward. options: fully_shard's.
    """
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=not keep_blocks, **options)
    if not model.config.tie_embeddings:
        fully_shard(model.tok_embeddings, reshard_after_forward=True, **options)
        model.tok_embeddings.set_unshard_in_backward(False)
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # what is left


def mesh(device: str, shard_ranks: int | None, timeout: float) -> DeviceMesh:
    """All ranks in one dimension, "shard"; or of shard_ranks, and before it a dimension "replicate" for the copies."""
    shape, names = (distributed.world_size,), ("shard",)
    if shard_ranks is not None:
        shape, names = (distributed.world_size // shard_ranks, shard_ranks), ("replicate", "shard")
    made = init_device_mesh("cpu" if device == "cpu" else "cuda", shape, mesh_dim_names=names)
    for name in names:  # else these groups would give up after PyTorch's half an hour, before the watch
        dist.distributed_c10d._set_pg_timeout(distributed.patience(timeout), made[name].get_group())
    return made


def can_copy(device: str, shard_ranks: int, offload: str) -> bool:
    """Whether the GPUs of all ranks reach the memory of those that share a copy of the model, over NVLink or PCIe."""
    possible = (
        device != "cpu" and shard_ranks > 1 and offload != "all" and distributed.local_world_size % shard_ranks == 0
    )
    others = [other for other in range(distributed.local_world_size) if other != distributed.local_rank]
    possible = possible and torch.version.cuda is not None  # NVIDIA's
    possible = possible and all(torch.cuda.can_device_access_peer(distributed.local_rank, other) for other in others)
    return distributed.maximum([not possible])[0] == 0  # of every rank


def use_copy_engines(model: Llama, group: dist.ProcessGroup, reduce: bool) -> None:
    """Gives FSDP these collectives among the ranks of group, which must reach each other's memory.

    reduce: the reduce-scatter too. FSDP must then hand over gradients as they are (reduce_dtype None), which rules out
    what would add to them before: sums over micro-batches, copies of hybrid sharding, float16's small numbers.
    """

    def numel(*modules):
        """Elements that are gathered for them: each rank gives equally many rows of a parameter, padded if need be."""
        parameters = (parameter for module in modules for parameter in module.parameters())
        return sum(-(-p.shape[0] // group.size()) * group.size() * p.shape[1:].numel() for p in parameters)

    ends = [model] if model.config.tie_embeddings else [model.tok_embeddings, model.lm_head]
    for groups, gathers, reductions, largest in (
        (model.layers, 3, 2, numel(model.layers[0])),
        (ends, 1, 1, numel(model.norm, model.lm_head)),  # the embedding is as large as the head, or is the head
    ):
        gather = CopyEngineAllGather(group, gathers, largest)
        scatter = CopyEngineReduceScatter(group, reductions, largest)
        for module in groups:
            module.set_custom_all_gather(gather)
            if reduce:
                module.set_custom_reduce_scatter(scatter)


@functools.cache
def cuda_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def on_stream(operation: str, address: int, value: int) -> None:
    """cuStreamWriteValue32: *address = value, after all before it. cuStreamWaitValue32: until *address >= value."""
    stream = torch.cuda.current_stream().cuda_stream
    function = getattr(cuda_driver(), f"{operation}_v2")
    arguments = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0)
    if error := function(*arguments):
        raise RuntimeError(f"{operation} answers with CUDA's error {error}: --copy_engines=false does without it")


class Buffers:
    """Symmetric memory of one group of ranks: `count` buffers that take turns, each of `largest` elements."""

    def __init__(self, group: dist.ProcessGroup, count: int, largest: int):
        self.group, self.count, self.largest = group, count, largest
        self.buffers, self.turn, self.handles, self.times_full = [], 0, {}, {}

    def next(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first numel elements of the buffer whose turn it is, for the current stream to fill.

        Every rank asks for the same ones in the same order; the first use of a buffer waits for the other ranks.
        """
        global buffer_bytes
        if len(self.buffers) < self.count:
            buffer = symmetric_memory.empty(self.largest, dtype=dtype, device=device)
            torch.cuda.synchronize()  # else its zeroing, signal pad included, could erase another rank's first signal
            self.handles[buffer.data_ptr()] = symmetric_memory.rendezvous(buffer, self.group.group_name)
            self.times_full[buffer.data_ptr()] = 0
            self.buffers.append(buffer)
            buffer_bytes += buffer.nbytes
        buffer = self.buffers[self.turn % self.count]
        self.turn += 1
        if self.count == 1:
            pads, me, others = self._signals(buffer)
            for other in others:
                on_stream("cuStreamWaitValue32", pads[me] + 4 * (len(pads) + other), self.times_full[buffer.data_ptr()])
        return buffer[:numel]

    def _signals(self, buffer: torch.Tensor) -> tuple[list[int], int, list[int]]:
        """The pads of all ranks, this rank, and the others, each rank beginning with another one.

        A pad has two numbers for each rank: how often that rank's buffer was full, and how often it has read this one.
        """
        handle = self.handles[buffer.data_ptr()]
        n_ranks, me = handle.world_size, handle.rank
        return handle.signal_pad_ptrs, me, [(me + step) % n_ranks for step in range(1, n_ranks)]

    def pull(self, buffer: torch.Tensor, rows: torch.Tensor, offset_of) -> None:
        """Says that this rank's buffer is full, and copies from the others': into rows[i] (n,), from rank me + 1 + i
        (mod the number of ranks) once that rank's buffer is full, n elements from offset_of(that rank) on.
        """
        pads, me, others = self._signals(buffer)
        handle, times_full = self.handles[buffer.data_ptr()], self.times_full[buffer.data_ptr()] + 1
        self.times_full[buffer.data_ptr()] = times_full
        for other in others:
            on_stream("cuStreamWriteValue32", pads[other] + 4 * me, times_full)
        for row, other in zip(rows, others, strict=True):
            on_stream("cuStreamWaitValue32", pads[me] + 4 * other, times_full)
            row.copy_(handle.get_buffer(other, row.shape, row.dtype, offset_of(other)))
            if self.count == 1:
                on_stream("cuStreamWriteValue32", pads[other] + 4 * (len(pads) + me), times_full)


class CopyEngineAllGather(AllGather):
    def __init__(self, group: dist.ProcessGroup, count: int, largest: int):
        self.buffers = Buffers(group, count, largest)

    def allocate(self, size, *, dtype, device):
        return self.buffers.next(size[0], dtype, device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """FSDP has copied the rank's own shard, input_tensor, to its place in output_tensor, the buffer."""
        n, rank = input_tensor.numel(), group.rank()
        rows = output_tensor.view(-1, n)
        self.buffers.pull(output_tensor, [*rows[rank + 1 :], *rows[:rank]], lambda other: other * n)


class CopyEngineReduceScatter(ReduceScatter):
    def __init__(self, group: dist.ProcessGroup, count: int, largest: int):
        self.buffers, self.wanted = Buffers(group, count, largest), "input"

    def allocate(self, size, *, dtype, device):
        """FSDP asks for the input, and then for the output."""
        if self.wanted == "input":
            self.wanted = "output"
            return self.buffers.next(size[0], dtype, device)
        self.wanted = "input"
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        n, rank = output_tensor.numel(), group.rank()
        received = torch.empty(group.size() - 1, n, dtype=input_tensor.dtype, device=input_tensor.device)
        self.buffers.pull(input_tensor, received, lambda other: rank * n)
        scale = 1 / group.size() if op == dist.ReduceOp.AVG else 1.0
        add_ranks(input_tensor.view(-1, n)[rank], received, scale, output_tensor)
