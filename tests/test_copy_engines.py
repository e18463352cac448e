"""The signals of copy engines, between threads that stand for the ranks of GPUs; test_distributed.py has real ones."""

import ctypes
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime import copy_engines
from runtime.copy_engines import CopyEngineAllGather, CopyEngineReduceScatter, pick_copy_engines

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")  # the interpreter does not support threads
RANKS = 3


@pytest.fixture
def gpus(monkeypatch):
    """Buffers and signals in CPU memory; a stream is a thread. Reading a buffer takes a while."""
    together = [None] * RANKS
    barrier = threading.Barrier(RANKS, timeout=100)
    state = SimpleNamespace(misplaced=0)

    def rendezvous(buffer, rank):
        together[rank] = buffer, torch.zeros(2 * RANKS, dtype=torch.int32)
        barrier.wait()
        buffers, pads = zip(*together, strict=True)
        barrier.wait()

        def get_buffer(other, shape, dtype, offset):
            time.sleep(0.002 * random.random())
            return buffers[other].roll(-state.misplaced)[offset:][: shape.numel()]

        handle = SimpleNamespace(world_size=RANKS, rank=rank, get_buffer=get_buffer)
        handle.signal_pad_ptrs = [pad.data_ptr() for pad in pads]
        handle.kept = pads
        return handle

    def on_stream(operation, address, value):
        signal = ctypes.c_int32.from_address(address)
        end = time.monotonic() + 100
        if operation == "cuStreamWriteValue32":
            signal.value = value
        while signal.value < value:
            assert time.monotonic() < end, "it waits forever"
            time.sleep(0.0001)

    fake = SimpleNamespace(empty=torch.zeros, rendezvous=rendezvous)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", fake)
    monkeypatch.setattr(dist, "_symmetric_memory", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(copy_engines, "on_stream", on_stream)
    return state


def on_every_rank(function):
    groups = [SimpleNamespace(rank=lambda i=i: i, size=lambda: RANKS, group_name=i) for i in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(function, groups))


@pytest.mark.parametrize("gathers, reductions", [(1, 1), (3, 2)])
def test_copy_engines_gather_and_reduce_exactly_however_often_buffers_are_reused(gpus, gathers, reductions):
    def work(group):
        me = group.rank()
        random_times = random.Random(group.rank())
        gather = CopyEngineAllGather(group, gathers, 60)
        scatter = CopyEngineReduceScatter(group, reductions, 60)
        for turn in range(15):
            time.sleep(0.004 * random_times.random())
            n = 20 - turn % 4
            values = torch.arange(RANKS)
            out = gather.allocate((RANKS * n,), dtype=torch.float32, device="cpu")
            gather(out, out.view(RANKS, n)[me].fill_(100 * turn + me), group)
            assert torch.equal(out.view(RANKS, n), (100 * turn + values)[:, None].expand(RANKS, n).float())
        for turn in range(15):
            given = scatter.allocate((RANKS * n,), dtype=torch.float32, device="cpu")
            given.view(RANKS, n).copy_((turn * values + me)[:, None])
            total = scatter.allocate((n,), dtype=torch.float32, device="cpu")
            scatter(total, given, group, dist.ReduceOp.AVG)
            assert total.eq(turn * me + 1).all(), (turn, me, total)

    on_every_rank(work)


@pytest.mark.parametrize("misplaced", [0, 1])
def test_the_first_transfer_is_checked(gpus, misplaced):
    gpus.misplaced = misplaced

    def check(group):
        try:
            assert copy_engines.check_transfer("cpu", group)
        except (RuntimeError, ValueError) as error:
            return str(error)

    assert on_every_rank(check) == [misplaced and "what arrives is not what was sent" or None] * RANKS


def test_where_copy_engines_fail_nccl_communicates(gpus, monkeypatch, capsys):
    monkeypatch.setattr(copy_engines, "can_copy", lambda *_: True)
    monkeypatch.delattr(sys.modules["torch.distributed._symmetric_memory"], "empty")  # another version of PyTorch
    assert pick_copy_engines(None, "cpu", SimpleNamespace(size=lambda: 2, rank=lambda: 0), "none") is False
    assert "NCCL communicates, because copy engines do not work here" in capsys.readouterr().err
