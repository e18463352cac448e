"""Low-rank adapters on a frozen weight: the projection alone, and in the fused functions that use it.

Against plain autograd of y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ, written out for each matrix packed in the weight.
"""

import pytest
import torch
import torch.nn.functional as F

import kernels
import kernels.launch
from kernels import Linear, LoRALinear
from test_kernels import EPS, Norm
from tests.watch import Watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP64 = torch.float64
SLICES = [{}, {"save_gate_up": False}, {"save_gate_up": False, "chunks": 3}]
each_ops = pytest.mark.parametrize("ops", [kernels, kernels.reference], ids=["kernels", "reference"])


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=FP64)


def adapted(n_in, *rows, rank=3, alpha=5.0, dtype=FP64):
    layer = LoRALinear(Linear(n_in, *rows), rank, alpha).to(DEVICE, dtype)
    torch.nn.init.normal_(layer.lora_b)
    return layer


def written_out(layer, x, rows, rank=3, alpha=5.0):
    ys = []
    for w, a, b in zip(layer.weight.split(rows), layer.lora_a.split(rank), layer.lora_b.split(rows), strict=True):
        ys.append(x @ w.T + alpha / rank * (x @ a.T @ b.T))
    return torch.cat(ys, dim=-1)


def norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def add_norm(function, x, residual, norm_weight, *layers, **options):
    """A fused function of these tensors."""
    return function(x, residual, Norm(norm_weight), *layers, **options)


def gradients(function, inputs, layers):
    leaves = [*inputs, *(t for layer in layers for t in (layer.lora_a, layer.lora_b))]
    outputs = function(*inputs)
    torch.manual_seed(7)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [randn(*y.shape) for y in outputs])]


def assert_close(found, expected):
    for i, (x, true) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == true.shape
        error = ((x - true).norm() / true.norm()).item()
        assert error < 1e-13, f"tensor {i}: relative error {error:.1e}"


def inputs_of(*shape):
    return [randn(*shape).requires_grad_() for _ in range(2)] + [randn(shape[-1]).requires_grad_()]


@pytest.mark.parametrize("triton", [True, False], ids=["kernels", "without Triton"])
def test_lora_linear_matches_autograd_in_float64(triton, monkeypatch):
    if not triton and DEVICE == "cpu":
        monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    layer = adapted(12, 8, 4, 4)
    rows = (8, 4, 4)
    x = randn(2, 5, 12).requires_grad_()
    expected = gradients(lambda x: (written_out(layer, x, rows),), [x], [layer])
    assert_close(gradients(lambda x: (layer(x),), [x], [layer]), expected)
    assert_close(gradients(lambda x: (layer.reference(x),), [x], [layer]), expected)


@each_ops
def test_lora_in_add_norm_linear_matches_autograd_in_float64(ops):
    layer = adapted(12, 8, 4, 4)
    rows = (8, 4, 4)
    inputs = inputs_of(2, 5, 12)

    def truth(x, residual, norm_weight):
        return written_out(layer, norm(x + residual, norm_weight), rows), x + residual

    found = gradients(lambda *x: add_norm(ops.add_norm_linear, *x, layer), inputs, [layer])
    assert_close(found, gradients(truth, inputs, [layer]))
    assert layer.weight.grad is None


@each_ops
@pytest.mark.parametrize("options", SLICES, ids=str)
def test_lora_in_add_norm_mlp_matches_autograd_in_float64(options, ops):
    gate_up = adapted(12, 8, 8)
    down = adapted(8, 12)
    inputs = inputs_of(2, 5, 12)

    def truth(x, residual, norm_weight):
        gate, up = written_out(gate_up, norm(x + residual, norm_weight), (8, 8)).chunk(2, dim=-1)
        return written_out(down, F.silu(gate) * up, (12,)), x + residual

    found = gradients(lambda *x: add_norm(ops.add_norm_mlp, *x, gate_up, down, **options), inputs, [gate_up, down])
    assert_close(found, gradients(truth, inputs, [gate_up, down]))


@pytest.mark.parametrize("options", SLICES, ids=str)
def test_a_frozen_base_costs_no_matmul_for_its_gradient(options):
    """With the adapters frozen too, backward has only the products for dx, and those that repeat forward."""
    gate_up = adapted(12, 8, 8)
    down = adapted(8, 12)
    (x, residual, norm_weight) = inputs_of(4, 12)
    counts = []
    for layers in ((Linear(12, 16), Linear(8, 12)), (gate_up, down)):
        layers = [layer.to(DEVICE, FP64).requires_grad_(False) for layer in layers]
        with Watch() as seen:
            y, _ = kernels.add_norm_mlp(x, residual, Norm(norm_weight), *layers, **options)
            y.sum().backward()
        counts.append(sum(n for name, n in seen.ops.items() if name in ("mm", "linear", "accumulate", "addmm_")))
    dense, lora = counts
    n_slices = options.get("chunks", 1)
    again = not options.get("save_gate_up", True)
    # x Aᵀ of both, and into y for gate, up and down; again for gate_up if it is recomputed; dy B, and into dx
    assert lora - dense == n_slices * (2 + 3 + 3 * again + 3 + 2), seen.ops


@pytest.mark.parametrize("options", SLICES if DEVICE == "cuda" else SLICES[::2], ids=str)
def test_lora_compiles_into_one_graph(options, monkeypatch):
    """On a GPU the kernels; the interpreter cannot be traced, so elsewhere the references."""
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    gate_up = adapted(12, 8, 8)
    down = adapted(8, 12)
    inputs = inputs_of(2, 5, 12)
    function = lambda *x: add_norm(kernels.add_norm_mlp, *x, gate_up, down, **options)  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_close(gradients(compiled, inputs, [gate_up, down]), gradients(function, inputs, [gate_up, down]))
