"""Launches recorded once and replayed as one: a small model's step is hundreds of kernels of a few microseconds each,
and the CPU needs longer to launch them than the GPU to run them.
"""

from collections.abc import Callable

import torch


class CUDAGraph:
    """A function of tensors. The first call records what it launches, and every call replays that on its own inputs.

    The function must launch the same on every call and must not wait for the GPU. Call it once yourself before: then it
    has compiled what it needs and allocated what it keeps.
    """

    pool = None  # of memory, shared by all graphs: what one leaves the next may take

    def __init__(self, function: Callable):
        self.function, self.graph = function, None

    def __call__(self, *inputs: torch.Tensor):
        if self.graph is None:
            torch.cuda.empty_cache()  # a graph cannot use what PyTorch holds in reserve
            CUDAGraph.pool = CUDAGraph.pool or torch.cuda.graph_pool_handle()
            self.inputs, self.graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            # thread_local: what the thread that saves does meanwhile is no part of it
            with torch.cuda.graph(self.graph, pool=CUDAGraph.pool, capture_error_mode="thread_local"):
                self.output = self.function(*self.inputs)
        for mine, new in zip(self.inputs, inputs, strict=True):
            mine.copy_(new)
        self.graph.replay()
        return self.output
