"""Masters and states in a file on an NVMe drive: CPU memory holds only those being updated.

All else is as in OnCPU, and so are the losses, bit for bit. An update goes through pieces of at most 4 million
elements, in the order of forward, with a ring of buffers:

    drive     reads pieces i + 1, i + 2, ...                            writes pieces i - 1, i - 2, ...
    CPU                                          updates piece i

For n parameters a step reads 12n bytes and writes 12n (the float32 master 4, two moments 8); with 8-bit moments 6.03n
each. The master is stored whole, although a bfloat16 parameter is its upper half: here ties round to even, so parameter
and lower half together do not tell which of two masters they came from. CPU memory holds the gradients, 2n bytes, with
offload = 'all' the parameters, 2n, and the buffers. With several micro-batches per step it also holds their sums, 4n:
in the file these would move 8n bytes in each micro-batch, and a larger batch_size needs none.

The file is the run's working state and nothing else: a run that is killed resumes from its checkpoint. Masters and
states are tensors whose memory is the file (optimizers/state_file.py). A checkpoint is written from them, and read into
them, through the page cache, as if they were in memory. Training waits for it, because a copy would take the memory
that the file saves. Updates bypass the page cache.
"""

import math
from concurrent.futures import Future
from typing import NamedTuple

import torch

from optimizers.on_cpu import OnCPU
from optimizers.optimizer import new_state
from optimizers.state_file import PAGE, THREADS, StateFile, page_aligned, whole_pages
from runtime.distributed import local, shard_like

PIECE = 2**22  # elements: 16 MB of each float32 tensor
BUFFERS = THREADS + 1  # one is updated while each thread fills or empties another


class Piece(NamedTuple):
    """Some rows of a parameter, and their tensors in the file: "" is the master."""

    rows: slice
    in_file: dict[str, torch.Tensor]
    in_memory: dict[str, torch.Tensor]  # the same tensors, in one of the buffers
    pages: dict[str, torch.Tensor]  # their memory in whole pages


def rows_at_once(tensors: list[torch.Tensor]) -> int:
    """How many rows a piece has, so that it begins at a page in each tensor's part of the file."""
    n_rows = len(tensors[0])
    n = max(x.numel() for x in tensors)
    step = math.lcm(*(PAGE // math.gcd(PAGE, x.nbytes // n_rows) for x in tensors))
    return max(PIECE * n_rows // n // step, 1) * step


class OnDisk(OnCPU):
    """file: this rank's; streamed: as for OnCPU."""

    async_save = False

    def __init__(self, model, rule, *, file: StateFile, **options):
        self.file = file
        super().__init__(model, rule, **options)
        names = [name for group in self.groups.values() for name in group]  # in the order of the updates
        cuts = [(name, rows, in_file) for name in names for rows, in_file in self._cut(name)]
        n_bytes = max((sum(whole_pages(x.nbytes) for x in in_file.values()) for _, _, in_file in cuts), default=0)
        self.buffers = [page_aligned(n_bytes) for _ in range(min(BUFFERS, len(cuts)))]
        self.pieces = [self._piece(rows, in_file, i % BUFFERS) for i, (_, rows, in_file) in enumerate(cuts)]
        self.pieces_of = {name: [i for i, cut in enumerate(cuts) if cut[0] == name] for name in names}
        self.moving: dict[int, Future] = {}  # fills the buffer of piece i; past the last piece, empties it
        self.used_as_tensors = True  # since the last update; at first, to copy the parameters into them

    def _master(self, parameter):
        master = super()._master(parameter)
        self.file.let_go()  # else the page cache would hold all masters at once
        return master

    def _new_state(self, parameter, shape, dtype):
        like = new_state(parameter, shape, dtype, "meta")
        return shard_like(like, self.file.zeros(local(like).shape, dtype))

    def _cut(self, name):
        """Yields the rows of each piece of a parameter, and the parts of the file that hold their tensors."""
        master, states = self.local_states(name)
        if not master.numel():  # a rank may hold nothing of a small parameter
            return
        in_file = {state: x for state, x in {"": master, **states}.items() if self.file.holds(x)}
        n_rows = rows_at_once(list(in_file.values()))
        for first in range(0, len(master), n_rows):
            rows = slice(first, first + n_rows)
            yield rows, {state: x[rows] for state, x in in_file.items()}

    def _piece(self, rows, in_file, buffer):
        pages = {}
        in_memory = {}
        free = self.buffers[buffer]
        for state, x in in_file.items():
            pages[state], free = free.tensor_split([whole_pages(x.nbytes)])
            in_memory[state] = pages[state][: x.nbytes].view(x.dtype).view(x.shape)
        return Piece(rows, in_file, in_memory, pages)

    # ------------------------------------------------------------------------------------------------------------------
    # The update

    def finish(self):
        super().finish()
        self._finish_moving()
        self.used_as_tensors = True

    def apply(self, scale, lr, t):
        if self.used_as_tensors:
            self.file.let_go()
        self.used_as_tensors = False
        super().apply(scale, lr, t)

    def _step(self, name, new, grad, scalars):
        for i in self.pieces_of[name]:
            if i == 0:
                self._finish_moving()  # the last update may still be writing
                for ahead in range(len(self.buffers)):
                    self.moving[ahead] = self.file.threads.submit(self._read, self.pieces[ahead])
            self.moving.pop(i).result()
            rows = self.pieces[i].rows
            states = dict(self.pieces[i].in_memory)
            master = states.pop("", None)
            if master is None:  # the parameter is its own master
                master = local(self.masters[name])[rows]
            self.rule.step_on_cpu(new[rows], grad[rows], master, states, *scalars)
            self.moving[i + BUFFERS] = self.file.threads.submit(self._write_and_read_ahead, i)

    def _finish_moving(self):
        while self.moving:
            self.moving.popitem()[1].result()

    def _read(self, piece: Piece):
        for state, x in piece.in_file.items():
            self.file.read(x, piece.pages[state])

    def _write_and_read_ahead(self, i: int):
        """Empties the buffer of piece i, and fills it for the next piece that uses it."""
        for state, x in self.pieces[i].in_file.items():
            self.file.write(x, self.pieces[i].pages[state])
        if i + BUFFERS < len(self.pieces):
            self._read(self.pieces[i + BUFFERS])
