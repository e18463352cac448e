"""FSDP's all-gather and reduce-scatter over NVLink by the GPUs' copy engines, overlapped with the matmuls.

NCCL's kernels occupy some multiprocessors while they run. cuBLAS gives one program on each multiprocessor an equal
share of the work: where one is occupied, its program starts late and the matmul ends that much later. So NCCL does not
hide behind matmuls: 16 x 2,048 tokens of Llama 3.2 1B on 4 H200s took 6% longer per token than on one.

A copy engine moves memory without a kernel. Ranks of one host map each other's buffers (symmetric memory). Each rank
signals that its buffer is full, waits for the others' signals and copies what it needs from their buffers:

    all-gather        from every other rank, its shard
    reduce-scatter    from every other rank, its gradient of this rank's shard, in bfloat16, half of float32's bytes;
                      one kernel adds them to the rank's own in float32 and rounds once

This is as exact as a reduction in float32, because a rank's gradient is bfloat16 either way. Signals need no kernel
either: the stream writes a number to another GPU's memory or waits for one in its own (cuStreamWriteValue32,
cuStreamWaitValue32). A polling kernel would occupy a multiprocessor, as NCCL's do.

Each rank also signals when it has read a buffer. The owner waits for all of these signals before it fills the buffer
again. The layers have several buffers, used in turn, so that this wait never blocks:

    gathers of layers       three buffers: k overwrites k - 3. FSDP has waited for k - 2, which ended when all ranks had
                            signaled that their k - 2 was full: so all had read k - 3
    reductions of layers    two buffers: k overwrites k - 2. FSDP has waited for k - 1, so all had read k - 2

The root has one buffer for gathers and one for reductions (an untied embedding and head share them). In an evaluation
the next embedding directly follows the head, so there it does block.

PyTorch's private symmetric memory is imported when the first buffer is made, by check_transfer: if that fails, NCCL
communicates, or with copy_engines=true the run ends.
"""

import ctypes
import functools
import sys

import torch
import torch.distributed as dist

from kernels import add_ranks
from model import Llama
from runtime import memory_stats
from runtime.distributed import all_reduce_max, local_rank, local_world_size, on_all_ranks, print0, stop, world_size


def can_copy(device: str, shard_ranks: int, offload: str) -> bool:
    """True if copy engines can serve all ranks: those that share a copy of the model reach each other's GPU memory."""
    possible = (
        device != "cpu" and shard_ranks > 1 and offload != "all" and local_world_size % shard_ranks == 0
        and all(torch.cuda.can_device_access_peer(local_rank, i) for i in range(local_world_size) if i != local_rank)
    )  # fmt: skip
    return all_reduce_max([not possible])[0] == 0


def pick_copy_engines(wanted: bool | None, device: str, group: dist.ProcessGroup | None, offload: str) -> bool:
    """Whether to use copy engines. wanted None: if they work; True: end a multi-rank run if not. All ranks call it."""
    possible = can_copy(device, group.size() if group else 1, offload)
    if wanted and world_size > 1 and not possible:
        stop("copy_engines needs a model's GPUs on one host, able to reach each other's memory, and no offload=all")
    if not possible or wanted is False:
        return False
    try:
        on_all_ranks(lambda: check_transfer(device, group))
    except (OSError, ValueError) as error:
        if wanted:
            stop(f"copy_engines do not work here: {error}")
        print0(f"NCCL communicates, because copy engines do not work here: {error}", file=sys.stderr)
        return False
    return True


def check_transfer(device: str, group: dist.ProcessGroup) -> tuple:
    """Gather and reduce small numbers, three times through the same buffers. RuntimeError if the results are wrong.

    Returns the owners of the buffers: keep them until all ranks are done.
    """
    n = 1024
    dtype = torch.bfloat16
    me = group.rank()
    numel = group.size() * n
    gather = CopyEngineAllGather(group, 1, numel)
    scatter = CopyEngineReduceScatter(group, 1, numel)
    ranks = torch.arange(group.size(), device=device).repeat_interleave(n)
    for turn in range(3):
        gathered = gather.allocate((numel,), dtype=dtype, device=device)
        gather(gathered, gathered.view(-1, n)[me].fill_(turn + me), group)
        summands = scatter.allocate((numel,), dtype=dtype, device=device).copy_(gathered)
        total = scatter.allocate((n,), dtype=dtype, device=device)
        scatter(total, summands, group, dist.ReduceOp.SUM)
        if not (gathered == ranks + turn).all() or not (total == group.size() * (turn + me)).all():
            raise RuntimeError("what arrives is not what was sent")
    return gather, scatter


def use_copy_engines(model: Llama, group: dist.ProcessGroup, reduce: bool) -> None:
    """Make FSDP use these collectives among the ranks of group, which must reach each other's memory.

    reduce: the reduce-scatter too. FSDP must then hand over gradients in bfloat16 (reduce_dtype None), which rules out
    sums over micro-batches before it, the replicas of hybrid sharding, and float16's small numbers.
    """

    def numel(*modules):
        """Elements gathered for these modules: every rank sends the same number of rows of a parameter, padded."""
        parameters = (parameter for module in modules for parameter in module.parameters())
        return sum(-(-p.shape[0] // group.size()) * group.size() * p.shape[1:].numel() for p in parameters)

    ends = [model] if model.config.tie_embeddings else [model.tok_embeddings, model.lm_head]
    head = [module for name, module in model.named_children() if name not in ("layers", "tok_embeddings")]
    for groups, gathers, reductions, largest in (
        (model.layers, 3, 2, numel(model.layers[0])),
        (ends, 1, 1, numel(*head)),  # the embedding is as large as the head, or is the head
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
    """cuStreamWriteValue32: *address = value, after earlier work. cuStreamWaitValue32: wait until *address >= value."""
    stream = torch.cuda.current_stream().cuda_stream
    function = getattr(cuda_driver(), f"{operation}_v2")
    arguments = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0)
    if error := function(*arguments):
        raise RuntimeError(f"{operation} failed with CUDA error {error}: pass --copy_engines=false")


class Buffers:
    """Symmetric memory of one group of ranks: `count` buffers used in turn, each of `largest` elements."""

    def __init__(self, group: dist.ProcessGroup, count: int, largest: int):
        self.group = group
        self.count = count
        self.largest = largest
        self.buffers = []
        self.turn = 0
        self.handles = {}  # by address
        self.times_full = {}

    def next(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first numel elements of the next buffer, for the current stream to fill.

        Every rank must call it in the same order. The first use of a buffer waits for the other ranks.
        """
        if len(self.buffers) < self.count:
            import torch.distributed._symmetric_memory as symmetric_memory

            buffer = symmetric_memory.empty(self.largest, dtype=dtype, device=device)
            torch.cuda.synchronize()  # else zeroing it and its signals could erase another rank's first signal
            self.handles[buffer.data_ptr()] = symmetric_memory.rendezvous(buffer, self.group.group_name)
            self.times_full[buffer.data_ptr()] = 0
            self.buffers.append(buffer)
            memory_stats.uncounted_bytes += buffer.nbytes
        buffer = self.buffers[self.turn % self.count]
        self.turn += 1
        assert numel <= len(buffer) and dtype == buffer.dtype, (numel, dtype, buffer.shape, buffer.dtype)
        pads, me, others = self._signals(buffer)
        for other in others:  # wait until it has read the old content
            on_stream("cuStreamWaitValue32", pads[me] + 4 * (len(pads) + other), self.times_full[buffer.data_ptr()])
        return buffer[:numel]

    def _signals(self, buffer: torch.Tensor) -> tuple[list[int], int, list[int]]:
        """The signal pads of all ranks, this rank, and the other ranks, in an order that starts at a different one on
        each rank. A pad has two counters per rank: how often its buffer was full, and how often it has read this one.
        """
        handle = self.handles[buffer.data_ptr()]
        others = [(handle.rank + step) % handle.world_size for step in range(1, handle.world_size)]
        return handle.signal_pad_ptrs, handle.rank, others

    def pull(self, buffer: torch.Tensor, rows: torch.Tensor, offset_of) -> None:
        """Signal that this rank's buffer is full, then copy from the others' buffers: rows[i] (n,) gets n elements of
        rank me + 1 + i (mod the number of ranks), once its buffer is full, starting at offset_of(that rank).
        """
        pads, me, others = self._signals(buffer)
        handle = self.handles[buffer.data_ptr()]
        self.times_full[buffer.data_ptr()] += 1
        times_full = self.times_full[buffer.data_ptr()]
        for other in others:
            on_stream("cuStreamWriteValue32", pads[other] + 4 * me, times_full)
        for row, other in zip(rows, others, strict=True):
            on_stream("cuStreamWaitValue32", pads[me] + 4 * other, times_full)
            row.copy_(handle.get_buffer(other, row.shape, row.dtype, offset_of(other)))
            on_stream("cuStreamWriteValue32", pads[other] + 4 * (len(pads) + me), times_full)


class CopyEngineAllGather:  # torch.distributed.fsdp's AllGather, whose module is private
    def __init__(self, group: dist.ProcessGroup, count: int, largest: int):
        self.buffers = Buffers(group, count, largest)

    def allocate(self, size, *, dtype, device):
        return self.buffers.next(size[0], dtype, device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """FSDP has copied this rank's shard, input_tensor, to its place in output_tensor, the buffer."""
        n = input_tensor.numel()
        rank = group.rank()
        rows = output_tensor.view(-1, n)
        self.buffers.pull(output_tensor, [*rows[rank + 1 :], *rows[:rank]], lambda other: other * n)


class CopyEngineReduceScatter:  # torch.distributed.fsdp's ReduceScatter
    def __init__(self, group: dist.ProcessGroup, count: int, largest: int):
        self.buffers = Buffers(group, count, largest)
        self.filling = False

    def allocate(self, size, *, dtype, device):
        """FSDP allocates the input, then the output, then reduces."""
        if self.filling:
            return torch.empty(size, dtype=dtype, device=device)
        self.filling = True
        return self.buffers.next(size[0], dtype, device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        n = output_tensor.numel()
        rank = group.rank()
        received = torch.empty(group.size() - 1, n, dtype=input_tensor.dtype, device=input_tensor.device)
        self.buffers.pull(input_tensor, received, lambda other: rank * n)
        self.filling = False
        scale = 1 / group.size() if op == dist.ReduceOp.AVG else 1.0
        add_ranks(input_tensor.view(-1, n)[rank], received, scale, output_tensor)
