"""Pinned memory: the CPU's, which a GPU reads and writes by itself, beside all else.

PyTorch's own (pin_memory=True) rounds each tensor up to a power of two, is made ready by one thread and lies in pages
of 4 KiB. Here a tensor takes what it needs, all threads make it ready, and its pages are of 2 MiB where Linux has them.
"""

import contextlib
import math
import mmap

import torch


class _Pages(mmap.mmap):
    """Memory that is pinned until no tensor lies in it any more: it holds its buffer, and so this object."""

    address = None

    def pin(self, address: int, n_bytes: int):
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)))
        self.address = address

    def __del__(self):
        if self.address is not None:
            with contextlib.suppress(Exception):  # at the interpreter's end there is nothing left to do it with
                torch.cuda.synchronize()  # a copy may be on its way
                torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned_empty(shape, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU, pinned. OSError or torch.cuda.CudaError where there is no memory for it."""
    n = math.prod(shape)
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    n_bytes = n * dtype.itemsize
    pages = _Pages(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    pages.madvise(mmap.MADV_DONTFORK)  # a forked process would make the CPU's pages and the GPU's two
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    flat[:: mmap.PAGESIZE].zero_()  # the first touch, by all threads
    pages.pin(flat.data_ptr(), n_bytes)
    return flat.view(dtype).view(shape)
