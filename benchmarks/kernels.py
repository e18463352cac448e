"""The kernels against eager PyTorch, torch.compile and the libraries: time, memory and error of each, and the limits.

    python bench.py kernels                              every operation and size
    python bench.py kernels --op=rms_norm,rope           some operations

A row is one operation at one size in one pass. Its limit is the shortest time that the card allows: the bytes that must
move over the rate of a copy, or FLOPs over the rate of a matmul, or for the loss head its three matmuls alone, all
measured in the same run. The error is that of the outputs and gradients against the reference in float64. timing.py
explains how a call is timed, operations.py what is compared.
"""

import math
from collections.abc import Callable

import torch
from torch._functorch import config as functorch_config

from benchmarks import runner, timing
from benchmarks.operations import BF16_CUDA, OPERATIONS, Operation
from benchmarks.settings import read_settings

# settings
op = ""  # operations, one,two; nothing: all of them
out = "out/kernels.json"  # the record


class Problem:
    """Random inputs of an operation, in the form that a function takes. A seed gives all functions the same numbers."""

    def __init__(self, operation: Operation, function: Callable, size: tuple, options: dict, seed=0, wide=False):
        """wide: in float64, but the same numbers, rounded to the options' dtype."""
        self.function = function
        self.options = options
        self.seed = seed
        self.convert = to_double if wide else lambda x: x
        torch.manual_seed(seed)
        tensors, constants = operation.inputs(size, options)
        self.tensors = [self.convert(tensor).requires_grad_() for tensor in operation.tensors_of(function, tensors)]
        self.constants = [self.convert(constant) for constant in constants]
        self.doutputs = []

    def forward(self) -> tuple[torch.Tensor, ...]:
        return tuple_of(self.function(*self.tensors, *self.constants))

    @torch.no_grad()
    def inference(self) -> tuple[torch.Tensor, ...]:
        """Run on tensors that need no gradient: some libraries check requires_grad, not no_grad."""
        return tuple_of(self.function(*(tensor.detach() for tensor in self.tensors), *self.constants))

    def backward(self, outputs, retain_graph=False) -> tuple[torch.Tensor, ...]:
        if not self.tensors:
            return ()
        if not self.doutputs:  # random like the inputs, but independent of them; 1 for a loss, as in loss.backward()
            torch.manual_seed(self.seed + 1_000_000)
            for y in outputs:
                dy = self.convert(torch.randn(y.shape, **self.options)) if y.ndim else torch.ones_like(y)
                self.doutputs.append(dy)
        return torch.autograd.grad(outputs, self.tensors, self.doutputs, retain_graph=retain_graph)

    def both(self) -> tuple[torch.Tensor, ...]:
        outputs = self.forward()
        return *outputs, *self.backward(outputs)

    def call(self, name: str) -> Callable:
        """The call to time for a pass: forward, inference (no autograd), both, or backward, after one forward."""
        if name != "backward":
            return getattr(self, name)
        outputs = self.forward()
        return lambda: self.backward(outputs, retain_graph=True)


def tuple_of(outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def to_double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def exact_results(operation: Operation, size: tuple[int, ...], options: dict) -> tuple[list, tuple]:
    """Outputs and gradients of the reference in float64, for the numbers that every function gets."""
    problem = Problem(operation, operation.reference, size, options, wide=True)
    outputs = problem.forward()
    return [y.detach().double() for y in outputs], problem.backward(outputs)


def largest_error(
    operation: Operation, function: Callable, size: tuple[int, ...], options: dict, exact: tuple
) -> float:
    """The largest relative error ‖result − exact‖ / ‖exact‖ over the outputs and gradients of a function."""
    outputs, gradients = exact
    expected = [*outputs, *operation.tensors_of(function, gradients)]
    results = Problem(operation, function, size, options).both()
    errors = [float((y.detach().double() - x).norm() / x.norm()) for y, x in zip(results, expected, strict=True)]
    assert all(map(math.isfinite, errors)), "its result is not finite"
    return max(errors)


def measure_function(operation: Operation, function: Callable, size: tuple, exact: tuple) -> dict:
    """{pass: {'us', 'graph', 'host_us', 'peak_mib', 'error'}}, or for each pass the exception, and the run continues.
    The peak is of forward and backward together."""
    torch.cuda.empty_cache()
    passes = operation.work(size)
    try:
        error = largest_error(operation, function, operation.checked(size), BF16_CUDA, exact)
        problems = [Problem(operation, function, size, BF16_CUDA)]
        inputs = [*problems[0].tensors, *problems[0].constants]
        n_sets = timing.sets_to_miss_l2(sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor)))
        problems += [Problem(operation, function, size, BF16_CUDA, seed) for seed in range(1, n_sets)]
        problems[0].both()  # compiles, and makes lasting allocations
        result = {"peak_mib": timing.peak_mib(problems[0].both), "error": error}
        times = {}
        for name in passes:
            calls = [problem.call(name) for problem in problems]
            times[name] = {**timing.gpu_time(calls), "host_us": timing.host_us(calls[0]), **result}
        return times
    except Exception as exception:
        return {name: {"failed": f"{type(exception).__name__}: {exception}"[:300]} for name in passes}


def measure_size(name: str, operation: Operation, size: tuple[int, ...], limits: dict) -> list[dict]:
    """The rows of one operation at one size, one per pass."""
    torch.compiler.reset()  # else the next size would count toward the recompilation limit
    exact = exact_results(operation, operation.checked(size), BF16_CUDA)
    compiled = torch.compile(operation.functions["eager"], dynamic=False, fullgraph=True)
    results = {
        label: measure_function(operation, function, size, exact)
        for label, function in (operation.functions | {"compile": compiled}).items()
    }
    rows = []
    for pass_name, work in operation.work(size).items():
        shape = dict(zip(operation.dims.split(), size, strict=True))
        row = {"op": name, "shape": shape, "pass": pass_name, **work}
        row["floor_us"] = floor_us(operation, size, work, limits)
        row["functions"] = {label: result[pass_name] for label, result in results.items()}
        rows.append(row)
    return rows


def floor_us(operation: Operation, size: tuple[int, ...], work: dict, limits: dict) -> float:
    if operation.floor:
        return sum(timing.gpu_time([call])["us"][1] for call in operation.floor(size))
    if "bytes" in work:
        return work["bytes"] / limits["copy_tb_s"] / 1e6
    return work["flops"] / limits["matmul_tflops"] / 1e6


def main(argv: list[str]) -> None:
    s = read_settings(globals(), argv, op=OPERATIONS)
    record = runner.start("kernels", s)
    timing.use_side_stream()
    functorch_config.donated_buffer = False  # compiled backward passes run more than once
    for name in s.op or OPERATIONS:
        for size in OPERATIONS[name].sizes:
            for row in measure_size(name, OPERATIONS[name], size, record.head):
                record.add("rows", {key: row[key] for key in ("op", "shape", "pass")}, row)
    runner.finish(record)
