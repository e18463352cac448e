"""CUDA graphs: kernel launches recorded once and replayed together. A small model's step is hundreds of kernels of a
few microseconds each: launching them takes the CPU longer than running them takes the GPU.
"""

import weakref
from collections.abc import Callable

import torch


class CUDAGraph:
    """A function of tensors. The first call just runs it, the second records its kernels, later calls replay them.

    The first call compiles the kernels and allocates what the function keeps. From then on the function must launch the
    same kernels on every call and must not wait for the GPU.
    """

    recorded = weakref.WeakSet()  # a new graph shares the memory pool of those still alive

    def __init__(self, function: Callable):
        self.function, self.graph, self.warm = function, None, False

    def __call__(self, *inputs: torch.Tensor):
        if not self.warm:
            self.warm = True
            return self.function(*inputs)
        if self.graph is None:
            pool = next((other.graph.pool() for other in CUDAGraph.recorded), None)
            self.inputs, self.graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            # thread_local: the saving thread may call CUDA meanwhile
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.output = self.function(*self.inputs)
            CUDAGraph.recorded.add(self)
        for mine, new in zip(self.inputs, inputs, strict=True):
            mine.copy_(new)
        self.graph.replay()
        return self.output
