"""kernels/pinned_memory.py: tensors in pinned memory behave like any other, and the pages go with the last of them."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from kernels import pinned_memory

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("shape", [(), (0, 4), (5, 7), (2**20 + 1,)], ids=str)
def test_pinned_tensor_is_a_tensor_like_any_other(monkeypatch, shape, dtype=torch.bfloat16):
    if not torch.cuda.is_available():
        monkeypatch.setattr(pinned_memory._Pages, "pin", lambda *_: True)
    x = pinned_memory.pinned_empty(shape, dtype)
    assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and x.device.type == "cpu"
    assert x.data_ptr() % mmap.PAGESIZE == 0
    values = torch.randn(shape).to(dtype)
    assert torch.equal(x.copy_(values), values) and torch.equal(x.clone().sum(), values.sum())


def test_pages_are_unregistered_with_the_last_tensor_in_them(monkeypatch):
    gc.collect()  # earlier tests' memory is CUDA's to unregister
    calls = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *arguments: calls.append(("register", *arguments)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda i: calls.append(("wait", i)))
    x = pinned_memory.pinned_empty((3, 100), torch.float32)
    address = x.data_ptr()
    assert calls == [("register", address, 1200, 0)]
    part = x[1:, 50].view(-1)
    del x
    gc.collect()
    assert part.zero_().sum() == 0 and len(calls) == 1
    del part
    gc.collect()
    assert calls[1:] == [("wait", 3), ("unregister", address)]


@needs_gpu
def test_gpu_copies_from_and_to_pinned_memory():
    for _ in range(3):
        x = pinned_memory.pinned_empty((1000, 1001), torch.float32)
        assert x.is_pinned() and x[1:].is_pinned()
        x.copy_(torch.randn(1000, 1001))
        on_gpu = x.to("cuda", non_blocking=True)
        back = pinned_memory.pinned_empty(x.shape, x.dtype).copy_(2 * on_gpu, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, 2 * x)
        assert torch.ones(3, device="cuda").sum() == 3
        del x, back  # else to register the same addresses again would fail
        gc.collect()
