"""Pinned CPU memory: a GPU copies from and to it by itself, while CPU and GPU compute.

PyTorch's own (pin_memory=True) rounds each tensor up to a power of two, and one thread prepares it in pages of 4 KiB.
Here a tensor takes only its own size, several threads prepare it if large, in pages of 2 MiB if Linux has them.
"""

import contextlib
import math
import mmap

import torch

MADV_WIPEONFORK = 18  # Linux's; missing in Python's mmap


class _Pages(mmap.mmap):
    """Memory that stays pinned while any tensor uses it; the tensors keep this object alive."""

    address = None
    device = None

    def pin(self, address: int, n_bytes: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)):
            with contextlib.suppress(Exception):  # absorb the error: CUDA reports it again in the next call
                torch.zeros(1, device="cuda")
            return False
        self.address = address
        self.device = torch.cuda.current_device()
        return True

    def __del__(self):
        if self.address is not None:
            with contextlib.suppress(Exception):  # after an error of CUDA, or at the interpreter's end
                torch.cuda.synchronize(self.device)  # a copy may still be running
                torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned_empty(shape, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous pinned tensor on the CPU. OSError if there is not enough memory that can be pinned."""
    n = math.prod(shape)
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    n_bytes = n * dtype.itemsize
    pages = _Pages(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked process would share these pages, and the first of the two to write would get a copy, unseen by the GPU.
    for advice in (mmap.MADV_HUGEPAGE, MADV_WIPEONFORK):
        with contextlib.suppress(OSError):  # a kernel without this advice
            pages.madvise(advice)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    flat[::512].zero_()  # touches each page several times: enough elements to use several threads
    if pages.pin(flat.data_ptr(), n_bytes):
        return flat.view(dtype).view(shape)
    del flat, pages
    try:  # the only way under confidential computing
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"{n_bytes / 2**30:.2f} GiB of CPU memory cannot be pinned: {reason}") from error
