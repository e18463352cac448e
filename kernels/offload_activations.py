"""offload_activations: move what activation checkpointing keeps of each layer to CPU memory.

    forward     while layer i computes, what it keeps is copied to pinned memory on a separate stream; when layer i + 1
                keeps its first tensor, the compute stream waits for these copies and frees layer i's GPU memory
    backward    while layer i + 1 computes its gradients, layer i's tensors come back

So the GPU holds the activations of two layers instead of all. The last layer's stay on it: backward needs them first.

Do the copies hide? 'full' keeps a layer's input: 2·C bytes per token. A layer of Llama 3.2 1B computes 120 million
FLOPs per token in forward, 0.2 us on an H200, which copies the token's 4 KiB in 0.08 us. 'selective' also keeps q, k,
v, the attention's output and the MLP's input: 36 KiB per token of 8B, 0.7 us, against 0.7 us of matmuls and the
attention, which grows with the context. So it pays for long sequences, whose attention is then computed only once.

PyTorch passes each tensor kept for backward to one hook, and asks another hook for it in backward. Whole storages are
copied, each once: q, k and v share one, and the norm and its projection keep the same input.

The compute stream frees a storage after it has waited for the copy, so PyTorch's allocator can reuse the memory at
once. (With record_stream it could do so only if the copy had finished when the CPU asked, far ahead of the GPU.)
"""

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from .pinned_memory import pinned_empty


class SavedView(NamedTuple):
    """Stands for a tensor that layer i keeps for backward: a view of its k-th storage."""

    forward: int  # number of the forward pass
    i: int
    k: int
    dtype: torch.dtype
    view: tuple  # offset, size, stride


class OffloadedActivations:
    """Holds what n_layer layers keep, from each forward to its backward, which visits the layers in reverse.

    RuntimeError for a second backward, and for the backward of any forward but the latest.
    """

    def __init__(self, n_layer: int):
        self.last = n_layer - 1
        self.pinned = [[] for _ in range(n_layer)]  # CPU memory, reused in each forward
        self.saved = [None] * n_layer  # the bytes of each layer's storages: pinned, or the last layer's still in place
        self.offloading = {}  # address -> index and storage, of the layer now computing: held until they are copied
        # Layer -> the bytes of its storages back on the GPU, and the event at the end of their copy. Freed when
        # backward has moved on to the previous layer; layer 0's when the next forward begins.
        self.prefetched = {}
        self.stream = None
        self.copied = None
        self.forwards = 0

    @contextlib.contextmanager
    def layer(self, i: int, x: torch.Tensor | None, stay: Iterable[torch.Tensor | None]):
        """Around layer i's forward: what it keeps for backward goes to the CPU, except the tensors in `stay`, its
        weights and tables. x: a tensor that it surely keeps, whose copy can begin at once; or None.
        """
        if i == 0:  # drop what a forward without a finished backward left behind
            wait_for_events(*(event for _, event in self.prefetched.values()))
            self.prefetched = {}
            self.forwards += 1
        self.saved[i] = []
        stays = {tensor.untyped_storage().data_ptr() for tensor in stay if tensor is not None}
        if x is not None:
            self._pack(i, stays, x)
        with saved_tensors_hooks(partial(self._pack, i, stays), self._unpack):
            yield
        if i == self.last:
            self.offloading = {}

    def _pack(self, i: int, stays: set[int], tensor: torch.Tensor) -> SavedView | torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in stays or not (tensor.ndim and tensor.numel() and tensor.is_floating_point()):
            return tensor  # weights, tables; scalars and empty tensors, which may be on the CPU; seeds
        if not self.saved[i]:
            wait_for_events(self.copied)
            self.offloading = {}  # this frees the previous layer's storages
            self.copied = None
        if address not in self.offloading:
            self.offloading[address] = len(self.saved[i]), storage
            copies = storage.is_cuda and i < self.last  # the last layer's are needed first
            self.saved[i].append(self._copy_out(i, bytes_of(storage)) if copies else bytes_of(storage))
        view = tensor.storage_offset(), tensor.size(), tensor.stride()
        return SavedView(self.forwards, i, self.offloading[address][0], tensor.dtype, view)

    def _copy_out(self, i: int, source: torch.Tensor) -> torch.Tensor:
        pinned = self.pinned[i]
        k = len(self.saved[i])
        if k == len(pinned) or len(pinned[k]) != len(source):
            pinned[k:] = [pinned_empty(source.shape, source.dtype)]
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            pinned[k].copy_(source, non_blocking=True)
            self.copied = self.stream.record_event()
        return pinned[k]

    def _unpack(self, packed: SavedView | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        i = packed.i
        if packed.forward != self.forwards or self.saved[i] is None:
            raise RuntimeError("offload_activations: each forward has one backward, before the next forward")
        for later in range(i + 1, self.last + 1):
            self.saved[later] = None
            self.prefetched.pop(later, None)
        for needed in (i, i - 1):  # prefetch the previous layer while this one computes
            if needed >= 0 and needed not in self.prefetched:
                self.prefetched[needed] = self._copy_back(needed)
        storages, arrived = self.prefetched[i]
        wait_for_events(arrived)
        whole = storages[packed.k]
        return torch.empty(0, dtype=packed.dtype, device=whole.device).set_(whole.untyped_storage(), *packed.view)

    def _copy_back(self, i: int) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        if self.stream is None or i == self.last:
            return self.saved[i], None
        storages = [torch.empty(pinned.shape, dtype=pinned.dtype, device="cuda") for pinned in self.saved[i]]
        self.stream.wait_stream(torch.cuda.current_stream())  # earlier kernels may still use that memory
        with torch.cuda.stream(self.stream):
            for storage, pinned in zip(storages, self.saved[i], strict=True):
                storage.copy_(pinned, non_blocking=True)
            return storages, self.stream.record_event()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def wait_for_events(*events: torch.cuda.Event | None) -> None:
    for event in events:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
