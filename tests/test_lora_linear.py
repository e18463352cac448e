"""Low-rank adapters on a frozen weight, as it is or in NF4, in the fused functions that use it.

Against plain autograd of y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ, written out for each matrix packed in the weight.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import kernels
import kernels.launch
from kernels import Linear, LoRALinear, NF4LoRALinear, dequantize_nf4, quantize_nf4, reference
from test_kernels import DEVICE, EPS, FP64, Norm, randn
from tests.watch import Watch

RANK = 3
ALPHA = 5.0
QKV = (16, 8, 4, 4)  # n_in, then the rows of each packed matrix
GATE_UP = (16, 8, 8)
DOWN = (8, 16)
SLICES = [{}, {"save_gate_up": False}, {"save_gate_up": False, "chunks": 3}]


def adapted(n_in, *rows, kind=LoRALinear):
    layer = kind(Linear(n_in, *rows).to(DEVICE, FP64), RANK, ALPHA)
    torch.nn.init.normal_(layer.lora_b)
    return layer


def written_out(x, layer):
    ys = []
    weight = layer.read_weight(x, *layer.tensors()[:-2])
    matrices = zip(weight.split(layer.rows), layer.lora_a.split(RANK), layer.lora_b.split(layer.rows), strict=True)
    for w, a, b in matrices:
        ys.append(x @ w.T + ALPHA / RANK * (x @ a.T @ b.T))
    return torch.cat(ys, dim=-1)


def add_norm_linear_truth(x, delta, norm, layer):
    normed = F.rms_norm(x + delta, norm.weight.shape, norm.weight, norm.eps)
    return written_out(normed, layer), x + delta


def add_norm_mlp_truth(x, delta, norm, gate_up_proj, down_proj):
    gate_up, total = add_norm_linear_truth(x, delta, norm, gate_up_proj)
    gate, up = gate_up.chunk(2, dim=-1)
    return written_out(F.silu(gate) * up, down_proj), total


def inputs_of(*shape):
    """x, delta and the weight of a norm."""
    return [randn(*size, dtype=FP64).requires_grad_() for size in (shape, shape, shape[-1:])]


def run_fused(function, inputs, layers):
    """The outputs, then the gradients of the inputs and of the adapters."""
    x, delta, norm_weight = inputs
    outputs = function(x, delta, Norm(norm_weight, EPS), *layers)
    return with_gradients(outputs, inputs, layers)


def with_gradients(outputs, inputs, layers):
    leaves = [*inputs, *(t for layer in layers for t in (layer.lora_a, layer.lora_b))]
    torch.manual_seed(7)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [randn(*y.shape, dtype=FP64) for y in outputs])]


def assert_close(found, expected):
    for i, (x, true) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == true.shape
        error = ((x - true).norm() / true.norm()).item()
        assert error < 1e-13, f"tensor {i}: relative error {error:.1e}"


def test_nf4_holds_each_packed_matrix_by_itself():
    base = Linear(*QKV).to(DEVICE, FP64)
    layer = NF4LoRALinear(base, RANK, ALPHA)
    matrices = base.weight.detach().split(base.rows)
    expected = [dequantize_nf4(quantize_nf4(w), torch.empty_like(w)) for w in matrices]
    assert torch.equal(layer.read_weight(base.weight, *layer.tensors()[:-2]), torch.cat(expected))


@pytest.mark.parametrize("kind", [LoRALinear, NF4LoRALinear])
@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("name, truth, shapes, options", [
    ("add_norm_linear", add_norm_linear_truth, [QKV], {}),
    *(("add_norm_mlp", add_norm_mlp_truth, [GATE_UP, DOWN], options) for options in SLICES),
], ids=["add_norm_linear", "add_norm_mlp", "recomputed", "in chunks"])  # fmt: skip
def test_lora_in_fused_functions_matches_autograd_in_float64(name, truth, shapes, options, ops, kind):
    layers = [adapted(*shape, kind=kind) for shape in shapes]
    inputs = inputs_of(2, 5, 16)
    fused = functools.partial(getattr(ops, name), **options)
    assert_close(run_fused(fused, inputs, layers), run_fused(truth, inputs, layers))


@pytest.mark.parametrize("options", SLICES, ids=str)
def test_a_frozen_base_costs_no_matmul_for_its_gradient(options):
    """With the adapters frozen too, backward has only the products for dx, and those that repeat forward."""
    x, delta, norm_weight = inputs_of(4, 16)
    counts = []
    for layers in ((Linear(16, 16), Linear(8, 16)), (adapted(*GATE_UP), adapted(*DOWN))):
        layers = [layer.to(DEVICE, FP64).requires_grad_(False) for layer in layers]
        with Watch() as seen:
            y, _ = kernels.add_norm_mlp(x, delta, Norm(norm_weight), *layers, **options)
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
    layers = [adapted(*GATE_UP), adapted(*DOWN)]
    inputs = inputs_of(2, 5, 16)

    def function(x, delta, norm_weight):
        return kernels.add_norm_mlp(x, delta, Norm(norm_weight), *layers, **options)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    found, expected = (with_gradients(f(*inputs), inputs, layers) for f in (compiled, function))
    assert_close(found, expected)
