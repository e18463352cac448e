"""Watch a piece of code: the operators that it runs and the storages that they use."""

import gc
import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.distributed import local


class Watch(TorchDispatchMode):
    """Counts the operators, and the bytes of all live storages that they have seen, with their peak."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()
        self.storages = {}
        self.peak = 0

    def see(self, x):
        if isinstance(x, torch.Tensor) and not x.is_meta:
            storage = local(x).untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage)

    def now(self):
        storages = [(key, storage) for key, weak in self.storages.items() if (storage := weak()) is not None]
        self.storages = {key: self.storages[key] for key, _ in storages}  # the others are dead
        return sum(storage.nbytes() for _, storage in storages)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops[function.overloadpacket.__name__] += 1
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            self.see(x)
        self.peak = max(self.peak, self.now())
        return out

    def left_beside(self, model):
        """The live bytes beside a model's weights, which must all have been seen."""
        gc.collect()  # the interpreter's launches are cycles that hold their arguments
        return self.now() - bytes_of_weights(model)

    def calls(self, part):
        return sum(n for name, n in self.ops.items() if part in name and "backward" not in name)


def bytes_of_weights(model):
    return sum(p.nbytes for p in model.parameters())
