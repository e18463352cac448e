"""Pinned CPU memory, which a GPU copies from and to by itself, while CPU and GPU compute.

PyTorch's own (pin_memory=True) rounds each tensor up to a power of two, is made ready by one thread and lies in pages
of 4 KiB. Here a tensor takes what it needs, several threads make a large one ready, and its pages are of 2 MiB where
Linux has them.
"""

import contextlib
import math
import mmap

import torch

MADV_WIPEONFORK = 18  # Linux's; Python does not name it
NEVER_FREED = []


class _Pages(mmap.mmap):
    """Memory that is pinned until no tensor lies in it any more: those hold its buffer, and so this object."""

    address = device = None

    def pin(self, address: int, n_bytes: int) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)):
            with contextlib.suppress(Exception):  # CUDA tells of the error once more, whoever asks next
                torch.zeros(1, device="cuda")
            return False
        self.address, self.device = address, torch.cuda.current_device()
        return True

    def __del__(self):
        if self.address is None:
            return
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self.device)  # a copy may be on its way
        with contextlib.suppress(Exception):
            if int(torch.cuda.cudart().cudaHostUnregister(self.address)) == 0:
                return
        NEVER_FREED.append(self)  # others must not get addresses that CUDA takes for these


def pinned_empty(shape, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU, pinned. OSError where there is no memory for it, or none that can be pinned."""
    n = math.prod(shape)
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    n_bytes = n * dtype.itemsize
    pages = _Pages(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked process would share these pages, and whoever wrote first would get a copy: the GPU would not know.
    for advice in (mmap.MADV_HUGEPAGE, MADV_WIPEONFORK):
        with contextlib.suppress(OSError):  # a kernel that does not know it
            pages.madvise(advice)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    flat[::512].zero_()  # the first touch of each page, more often than once so that PyTorch takes several threads
    if pages.pin(flat.data_ptr(), n_bytes):
        return flat.view(dtype).view(shape)
    del flat, pages
    try:  # as under confidential computing, which knows no other way
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"{n_bytes / 2**30:.2f} GiB of the CPU's memory cannot be pinned: {reason}") from error
