"""The kernels against eager PyTorch, torch.compile and the libraries: time, memory and error of each, and the limits.

    python bench.py kernels                              every operation and size, to benchmarks/records/kernels.json
    python bench.py kernels --op=rms_norm,rope           some operations, to out/kernels.json

A row is one operation at one size in one pass. Its limit is the shortest time that the card allows: the bytes that must
move over the rate of a copy, or FLOPs over the rate of a matmul, or for the loss head its three matmuls alone, all
measured in the same run. The error is that of the outputs and gradients against eager PyTorch's. timing.py explains how
a call is timed, operations.py what is compared.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch._functorch import config as functorch_config

from benchmarks import runner, timing
from benchmarks.operations import BF16_CUDA, OPERATIONS, Operation, tuple_of
from benchmarks.settings import read_settings

# settings
op = ""  # operations, one,two; nothing: all of them
out = ""  # the record; default: benchmarks/records/kernels.json if all operations are measured, else out/kernels.json


class Problem:
    """Random inputs of an operation, in the form that a function takes. A seed gives all functions the same numbers."""

    def __init__(self, operation: Operation, name: str, size: tuple, options: dict, seed=0):
        self.function = operation.functions[name]
        self.options = options
        self.seed = seed
        torch.manual_seed(seed)
        tensors, self.constants = operation.inputs(size, options)
        if operation.unpack and name != "nanocria":
            tensors = operation.unpack(*tensors)
        self.tensors = [tensor.requires_grad_() for tensor in tensors]
        self.doutputs = None

    def forward(self) -> tuple[torch.Tensor, ...]:
        return tuple_of(self.function(*self.tensors, *self.constants))

    @torch.no_grad()
    def inference(self) -> tuple[torch.Tensor, ...]:
        """Run on tensors that need no gradient: some libraries check requires_grad, not no_grad."""
        return tuple_of(self.function(*(tensor.detach() for tensor in self.tensors), *self.constants))

    def backward(self, outputs, retain_graph=False) -> tuple[torch.Tensor, ...]:
        if not self.tensors:
            return ()
        self.doutputs = self.doutputs or self.random_gradients(outputs)
        return torch.autograd.grad(outputs, self.tensors, self.doutputs, retain_graph=retain_graph)

    def random_gradients(self, outputs) -> list[torch.Tensor]:
        """Random like the inputs, but independent of them; 1 for a loss, as in loss.backward()."""
        torch.manual_seed(self.seed + 1_000_000)
        return [torch.randn(y.shape, **self.options) if y.ndim else torch.ones_like(y) for y in outputs]

    def both(self) -> tuple[torch.Tensor, ...]:
        outputs = self.forward()
        return *outputs, *self.backward(outputs)

    def call(self, name: str) -> Callable:
        """The call to time for a pass: forward, inference (no autograd), both, or backward, after one forward."""
        if name != "backward":
            return {"forward": self.forward, "inference": self.inference, "both": self.both}[name]
        outputs = self.forward()
        return lambda: self.backward(outputs, retain_graph=True)


def results(operation: Operation, name: str, size: tuple[int, ...], options: dict) -> list[torch.Tensor]:
    """A function's outputs and gradients, for the numbers and in the form that every function gets."""
    problem = Problem(operation, name, size, options)
    outputs = problem.forward()
    gradients = problem.backward(outputs)
    if operation.unpack and name == "nanocria":
        gradients = operation.unpack(*gradients)
    return [x.detach() for x in (*outputs, *gradients)]


def largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative difference ‖found − expected‖ / ‖expected‖ over the outputs and gradients of a function."""
    errors = [float((y.float() - x.float()).norm() / x.float().norm()) for y, x in zip(found, expected, strict=True)]
    if not all(map(math.isfinite, errors)):
        raise ValueError("its result is not finite")
    return max(errors)


def time_function(operation: Operation, name: str, size: tuple[int, ...], passes: list[str], options: dict) -> dict:
    """{pass: {'us', 'graph', 'host_us', 'peak_mib'}}; the peak is of forward and backward together."""
    problems = [Problem(operation, name, size, options)]
    inputs = [*problems[0].tensors, *problems[0].constants]
    n_sets = timing.sets_to_miss_l2(sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor)))
    problems += [Problem(operation, name, size, options, seed) for seed in range(1, n_sets)]
    problems[0].both()  # compiles, and makes lasting allocations
    peak = timing.peak_mib(problems[0].both)
    times = {}
    for pass_name in passes:
        calls = [problem.call(pass_name) for problem in problems]
        times[pass_name] = {**timing.gpu_time(calls), "host_us": timing.host_us(calls[0]), "peak_mib": peak}
    return times


def measure_function(operation: Operation, name: str, size: tuple, passes: list[str], options: dict, eager) -> dict:
    """time_function() plus the error against eager's results, if it had any, or for each pass the first line of the
    exception. The run continues."""
    try:
        error = largest_error(results(operation, name, size, options), eager) if eager else None
        times = time_function(operation, name, size, passes, options)
        return {pass_name: time | {"error": error} for pass_name, time in times.items()}
    except Exception as exception:
        lines = str(exception).splitlines() or [""]
        return {pass_name: {"failed": f"{type(exception).__name__}: {lines[0]}"} for pass_name in passes}
    finally:
        torch.cuda.empty_cache()


def measure_size(name: str, operation: Operation, size: tuple[int, ...], limits: dict, options: dict) -> list[dict]:
    """The rows of one operation at one size, one per pass."""
    torch.compiler.reset()  # else the next size would count toward the recompilation limit
    passes = operation.work(size)
    compiled = torch.compile(operation.functions["eager"], dynamic=False, fullgraph=True)
    operation = replace(operation, functions=operation.functions | {"compile": compiled})
    try:
        eager = results(operation, "eager", size, options)
    except torch.OutOfMemoryError:  # eager's own row says so
        eager = None
    measured = {label: measure_function(operation, label, size, list(passes), options, eager)
                for label in operation.functions}  # fmt: skip
    rows = []
    for pass_name, work in passes.items():
        row = {"op": name, "shape": operation.shape(size), "pass": pass_name, **work}
        row["floor_us"] = floor_us(operation, size, work, limits)
        row["functions"] = {label: result[pass_name] for label, result in measured.items()}
        rows.append(row)
    return rows


def floor_us(operation: Operation, size: tuple[int, ...], work: dict, limits: dict) -> float:
    if operation.floor:
        return sum(timing.gpu_time([call])["us"][1] for call in operation.floor(size))
    if "bytes" in work:
        return work["bytes"] / limits["copy_tb_s"] / 1e6
    return work["flops"] / limits["matmul_tflops"] / 1e6


def parse(argv: list[str]) -> SimpleNamespace:
    some = any(word.startswith("--op") for word in argv)
    out = "out/kernels.json" if some else "benchmarks/records/kernels.json"  # README's record is of complete runs
    s = read_settings(globals(), argv, {"op": OPERATIONS}, out)
    s.op = s.op or list(OPERATIONS)
    return s


def main(argv: list[str]) -> None:
    s = parse(argv)
    record = runner.start("kernels", s, n_gpus=1)
    timing.use_side_stream()
    functorch_config.donated_buffer = False  # compiled backward passes run more than once
    for name in s.op:
        for size in OPERATIONS[name].sizes:
            for row in measure_size(name, OPERATIONS[name], size, record.data, BF16_CUDA):
                record.add("rows", {key: row[key] for key in ("op", "shape", "pass")}, row)
    runner.finish(record)
