"""A file on an NVMe drive that holds a rank's optimizer state: read and written directly, or used as tensors.

    file = open_state_file(offload_dir, n_bytes)     # reserves space; ends the run if it cannot
    x = file.zeros((4096, 4096), torch.float32)      # a tensor whose memory is the file
    file.read(x[:64], memory)                        # from the drive into memory from page_aligned()
    file.write(x[:64], memory)
    file.let_go()                                    # before read() and write(), after tensors were used

The file has no name: the system frees it when the process ends, whatever ends it. So no run ever reads another run's
half-written state, and two runs may share a folder if there is room.

read() and write() are direct (O_DIRECT): the drive copies from and to the memory, bypassing the page cache, and
lengths, offsets and addresses are multiples of 4 KiB. The tensors are the same bytes through the page cache, for
single passes over them: checkpoints. The two ways never mix: let_go() writes the page cache's changes to the drive and
empties it.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.distributed import on_all_ranks, print0, stop_on_error

PAGE = 4096  # direct I/O reads and writes multiples of this
THREADS = 4  # to read and write


def whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE) * PAGE


def page_aligned(n_bytes: int) -> torch.Tensor:
    """Whole pages of memory, at least n_bytes, as uint8."""
    pages = mmap.mmap(-1, whole_pages(n_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without it; large pages are pinned faster for a transfer
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class StateFile:
    def __init__(self, folder: str, n_bytes: int):
        """Reserve n_bytes on the folder's drive; zeros() reserves more. OSError if it cannot."""
        self.end = 0  # of the tensors so far
        self.threads = ThreadPoolExecutor(THREADS)
        try:
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
            fcntl.fcntl(self.file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.posix_fallocate(self.file.fileno(), 0, max(n_bytes, PAGE))
            # Longer than reserved: a hole takes no room, and the file is mapped only once.
            size = 2 * whole_pages(n_bytes) + 2**26
            self.file.truncate(size)
            self.mapping = mmap.mmap(self.file.fileno(), size)
        except OSError as error:
            needed = f"offload_dir {folder} cannot take the state, {n_bytes / 2**30:.1f} GiB"
            why = "its file system has no direct I/O" if error.errno == errno.EINVAL else error.strerror
            raise OSError(f"{needed}: {why}") from error
        self.bytes = torch.frombuffer(self.mapping, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is the file's next pages."""
        begin = self.end
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes:
            self.end += whole_pages(n_bytes)
            os.posix_fallocate(self.file.fileno(), begin, self.end - begin)  # no-op if it is reserved
        return self.bytes[begin : begin + n_bytes].view(dtype).view(shape)

    def holds(self, x: torch.Tensor) -> bool:
        return x.untyped_storage().data_ptr() == self.bytes.data_ptr()

    def read(self, x: torch.Tensor, memory: torch.Tensor) -> None:
        """Fill memory, from page_aligned(x.nbytes), with what the drive holds of x.

        x: a tensor in the file, or rows of one that begin at a page. OSError here and in write() if the drive fails.
        """
        self._move(os.preadv, x, memory)

    def write(self, x: torch.Tensor, memory: torch.Tensor) -> None:
        self._move(os.pwritev, x, memory)

    def let_go(self) -> None:
        """Write changes made through tensors to the drive, and empty the page cache, which read() must not hit."""
        self.mapping.flush()
        self.mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _move(self, system_call, x, memory):
        """os.preadv or os.pwritev of whole pages. Both release the GIL."""
        buffer = memoryview(memory[: whole_pages(x.nbytes)].numpy())
        offset = x.data_ptr() - self.bytes.data_ptr()
        while buffer:
            n = system_call(self.file.fileno(), [buffer], offset)
            assert n, f"the file of offload_dir ends at byte {offset}"
            buffer = buffer[n:]
            offset += n


def open_state_file(offload_dir: str, n_bytes: float) -> StateFile:
    """A file for n_bytes of this rank's state, all read and written in each step.

    Ends the run if there is no room or no folder. Every rank must call it.
    """
    folder = os.path.expanduser(offload_dir)
    with stop_on_error():
        file = on_all_ranks(lambda: StateFile(folder, math.ceil(n_bytes)))
    print0(f"offload   {n_bytes / 2**30:.1f} GiB of each rank's state in {folder}")
    return file
