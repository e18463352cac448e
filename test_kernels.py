"""The kernels against float64, and against what breaks kernels.

    pytest test_kernels.py                          no GPU: through Triton's interpreter, about two minutes
    pytest test_kernels.py -n 4 --dist loadgroup    on a GPU: natively, and again at full size

A result is held to two numbers. Its relative error ‖out − truth‖ / ‖truth‖, against PyTorch's own operators in float64
on the same rounded inputs, is at most 1.2 times that of the same operators in fp32 rounded once, plus one unit of
rounding. Its mean signed error is near zero: truncation passes the first check and fails this one.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"  # before anything imports Triton

import triton
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import linear_cross_entropy, reference, rms_norm
from kernels.fp8_linear import quantize, transpose
from kernels.launch import use_triton

HAS_GPU = torch.cuda.is_available()
adamw_file = sys.modules["kernels.adamw"]
cross_entropy_file = sys.modules["kernels.cross_entropy"]  # the package's attribute of that name is the function
if not HAS_GPU:
    cross_entropy_file.LOSS_WARPS = cross_entropy_file.GRADIENT_WARPS = 4  # the interpreter takes long over long rows
BLOCK = 512 * cross_entropy_file.GRADIENT_WARPS  # logits that a program of the loss takes at once
DEVICE = "cuda" if HAS_GPU else "cpu"
EPS = 1e-5
WIDE = 2 * BLOCK + 4  # a row that no loop over blocks takes in fewer than three steps
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf and NaN
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")


def full_size(test):
    """One at a time: PyTorch's own cross-entropy takes 70 GB there."""
    return needs_gpu(pytest.mark.xdist_group("full size")(test))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---------------------------------------------------------------------------------------------------------------------
# What is tested: each function, the same from PyTorch's own operators, and inputs for it


def randn(*shape, dtype=FP32):
    return torch.randn(shape, dtype=FP64 if dtype == FP64 else FP32, device=DEVICE).to(dtype)


def wide(x):
    return x if x.dtype == FP64 else x.float()


def rms_norm_oracle(x, weight):
    return F.rms_norm(wide(x), weight.shape, weight.to(wide(x).dtype), EPS).to(x.dtype)


def add_rms_norm_oracle(x, residual, weight):
    return rms_norm_oracle(x + residual, weight), x + residual


def layer_norm_oracle(x, weight, bias):
    weight, bias = weight.to(wide(x).dtype), bias.to(wide(x).dtype)
    return F.layer_norm(wide(x), weight.shape, weight, bias, EPS).to(x.dtype)


def rope_oracle(qkv, cos, sin, n_head):
    turn = torch.complex(cos, sin).unsqueeze(-2)  # a pair is a complex number, and a rotation multiplies it

    def rotate(x):
        half = x.shape[-1] // 2
        y = torch.complex(wide(x)[..., :half], wide(x)[..., half:]) * turn
        return torch.cat([y.real, y.imag], dim=-1).to(x.dtype)

    q, k, v = qkv.tensor_split((n_head, (n_head + qkv.shape[2]) // 2), dim=2)
    return rotate(q), rotate(k), v.clone()


def glu_oracle(gate_up, activation):
    gate, up = wide(gate_up).tensor_split(2, dim=-1)
    return (activation(gate) * up).to(gate_up.dtype)


def cross_entropy_oracle(
    logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean", chunk_tokens=None
):
    logits, live = wide(logits), targets != ignore_index
    losses = F.cross_entropy(
        logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    losses = losses + z_loss * torch.where(live, logits.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (live.sum().clamp(min=1) if reduction == "mean" else 1)


class Given:
    """A projection whose weight need not be a parameter, made anew where the compiler looks: it knows no new module."""

    def __init__(self, weight):
        self.weight = weight

    check, reference, tensors = kernels.Linear.check, kernels.Linear.reference, kernels.Linear.tensors
    project, input_gradient = staticmethod(kernels.Linear.project), staticmethod(kernels.Linear.input_gradient)
    weight_gradients = staticmethod(kernels.Linear.weight_gradients)


def rms_norm_linear(x, residual, norm_weight, weight, eps=EPS, ops=kernels):
    return ops.rms_norm_linear(x, residual, norm_weight, eps, Given(weight))


def swiglu_mlp(x, residual, norm_weight, gate_up_weight, down_weight, eps=EPS, ops=kernels, **options):
    return ops.swiglu_mlp(x, residual, norm_weight, eps, Given(gate_up_weight), Given(down_weight), **options)


def rms_norm_linear_oracle(x, residual, norm_weight, weight):
    return rms_norm_oracle(x + residual, norm_weight) @ weight.T, x + residual


def swiglu_mlp_oracle(x, residual, norm_weight, gate_up_weight, down_weight):
    gate_up = rms_norm_oracle(x + residual, norm_weight) @ gate_up_weight.T
    return glu_oracle(gate_up, F.silu) @ down_weight.T, x + residual


def linear_cross_entropy_oracle(x, weight, targets, **options):
    return cross_entropy_oracle(x @ weight.T, targets, **options)


def rope_inputs(rows, width, dtype, heads=6, kv_heads=2):
    """Two sequences of rows tokens, q, k and v in one packed projection, cos and sin fp32."""
    half = min(width, 64)
    qkv = randn(2, rows, heads + 2 * kv_heads, 2 * half, dtype=dtype)
    angles = torch.rand(rows, half, dtype=FP64 if dtype == FP64 else FP32, device=DEVICE) * 100
    return (qkv,), (angles.cos(), angles.sin())


def rope_of(n_head):
    return Operation(partial(kernels.rope, n_head=n_head), partial(rope_oracle, n_head=n_head), rope_inputs)


def half_block_inputs(n, c, dtype, *shapes):
    """x, residual and norm weight for n rows of c, and matrices that keep the size of what they multiply."""
    matrices = [randn(*shape, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]
    return (randn(n, c, dtype=dtype), randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype), *matrices), ()


def loss_targets(rows, n_vocab):
    targets = torch.randint(n_vocab, (rows,), device=DEVICE)
    targets[:1], targets[1::3] = n_vocab - 1, -100
    return targets


class Operation(NamedTuple):
    function: Callable
    oracle: Callable
    inputs: Callable | None = None  # (rows, width, dtype) -> differentiable tensors, constants

    @property
    def rounds_dx_thrice(self):
        """The chunked loss rounds dlogits, their product with the head, and that times the scale; dW only once.

        Roundings of few mantissas by one factor, and of many dlogits near the same -ε/V, do not average out.
        """
        function = getattr(self.function, "func", self.function)
        return function in (linear_cross_entropy, LOSSES["linear_cross_entropy"])


def gate_up_inputs(rows, width, dtype):
    return (2 * randn(rows, 2 * width, dtype=dtype),), ()


loss_options = {"label_smoothing": 0.1, "z_loss": 0.01}
# fmt: off
OPERATIONS = {
    "rms_norm": Operation(
        partial(kernels.rms_norm, eps=EPS), rms_norm_oracle,
        lambda n, c, dtype: ((randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype)), ())),
    "add_rms_norm": Operation(
        partial(kernels.add_rms_norm, eps=EPS), add_rms_norm_oracle,
        lambda n, c, dtype: ((randn(n, c, dtype=dtype), randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype)), ())),
    "layer_norm": Operation(
        partial(kernels.layer_norm, eps=EPS), layer_norm_oracle,
        lambda n, c, dtype: ((3 + randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype), randn(c, dtype=dtype)), ())),
    "rope": rope_of(n_head=6),
    "rms_norm_linear": Operation(
        partial(rms_norm_linear, eps=EPS), rms_norm_linear_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (24, c))),
    "swiglu_mlp": Operation(
        partial(swiglu_mlp, eps=EPS), swiglu_mlp_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (48, c), (20, 24))),
    "swiglu_mlp_recomputed": Operation(
        partial(swiglu_mlp, eps=EPS, keep_gate_up=False), swiglu_mlp_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (48, c), (20, 24))),
    "swiglu_mlp_in_chunks": Operation(
        partial(swiglu_mlp, eps=EPS, keep_gate_up=False, chunks=3), swiglu_mlp_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (48, c), (20, 24))),
    "swiglu": Operation(partial(kernels.swiglu), partial(glu_oracle, activation=F.silu), gate_up_inputs),
    "geglu_tanh": Operation(
        partial(kernels.geglu, approximate="tanh"),
        partial(glu_oracle, activation=partial(F.gelu, approximate="tanh")), gate_up_inputs),
    "geglu_none": Operation(
        partial(kernels.geglu, approximate="none"), partial(glu_oracle, activation=F.gelu), gate_up_inputs),
    "cross_entropy": Operation(
        partial(kernels.cross_entropy, **loss_options), partial(cross_entropy_oracle, **loss_options),
        lambda n, v, dtype: ((3 * randn(n, v, dtype=dtype),), (loss_targets(n, v),))),
    "linear_cross_entropy": Operation(
        partial(linear_cross_entropy, **loss_options, chunk_tokens=5),
        partial(linear_cross_entropy_oracle, **loss_options),
        lambda n, v, dtype: ((randn(n, 24, dtype=dtype), randn(v, 24, dtype=dtype)), (loss_targets(n, v),))),
}
# fmt: on
MATMULS = (
    "rms_norm_linear",
    "swiglu_mlp",
    "swiglu_mlp_recomputed",
    "swiglu_mlp_in_chunks",
    "linear_cross_entropy",
)  # fmt: skip
ROW_OPERATIONS = [name for name in OPERATIONS if name not in ("cross_entropy", *MATMULS)]
each_operation = pytest.mark.parametrize("name", OPERATIONS)

# The two losses through one signature, f(logits, targets, **options): a head of ones on the diagonal is no head.
LOSSES = {
    "cross_entropy": kernels.cross_entropy,
    "linear_cross_entropy": lambda logits, targets, **options: linear_cross_entropy(
        logits, torch.eye(logits.shape[1], dtype=logits.dtype, device=DEVICE), targets, chunk_tokens=3, **options
    ),
    "cross_entropy_reference": reference.cross_entropy,
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


# ---------------------------------------------------------------------------------------------------------------------
# How it is compared


def run(function, inputs, constants=(), upstream=None):
    """The outputs, then the gradients of the inputs, for random gradients of the outputs (drawn first if not given)."""
    leaves = [x.detach().requires_grad_() for x in inputs]  # detach keeps the strides
    outputs = function(*leaves, *constants)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if upstream is None:
        upstream = draw_upstream(outputs)
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def one():
    return [torch.ones((), device=DEVICE)]


def draw_upstream(outputs):
    return [randn(*y.shape, dtype=y.dtype) for y in outputs]


def widened(tensors):
    return [x.double() if x.is_floating_point() else x for x in tensors]


def relative_error(out, truth):
    return ((out.double() - truth).norm() / truth.norm().clamp(min=1e-300)).item()


def rounding(dtype):
    """One unit of it. fp32 and fp64 are summed in themselves, where a few units depend on the order.

    The interpreter cuts bf16 off where the hardware rounds.
    """
    return torch.finfo(dtype).eps * {FP16: 0.5, BF16: 0.5 if HAS_GPU else 1, FP32: 8, FP64: 32}[dtype]


def assert_close(what, out, truth, eager, bias_units=0.25):
    assert out.shape == truth.shape, f"{what}: {tuple(out.shape)}, expected {tuple(truth.shape)}"
    assert out.dtype == eager.dtype, f"{what}: {out.dtype}, expected {eager.dtype}"
    if out.numel() == 0:
        return
    unit = rounding(out.dtype)
    difference = out.double() - truth
    numbers = f"{what}: max difference {difference.abs().max():.3e}, mean difference {difference.mean():.3e}"
    if truth.abs().max() < 1e-200:  # LayerNorm over one column has no gradient; rounding is blown up by 1 / sqrt(EPS)
        assert difference.abs().max() <= unit / EPS**0.5, f"{numbers}, expected zeros"
        return
    error, limit = relative_error(out, truth), 1.2 * relative_error(eager, truth) + unit
    assert error <= limit, f"{numbers}, relative error {error:.3e} over the limit {limit:.3e}"
    if out.dtype == BF16 and not HAS_GPU:
        return  # the interpreter truncates where the hardware rounds
    scale = max(unit * truth.abs().mean().item(), (eager.double() - truth).square().mean().sqrt().item())
    limit = ((bias_units if out.dtype in (FP16, BF16) else 2) + 4 / out.numel() ** 0.5) * scale + 1e-300
    for which, signed in (("", difference), ("towards zero ", difference * truth.sign())):
        bias = signed.mean().abs().item()
        assert bias <= limit, f"{numbers}, mean signed error {which}{bias:.3e} over the limit {limit:.3e}"


def assert_matches_float64(operation, inputs, constants, upstream=None, truth=None):
    if upstream is None:
        upstream = draw_upstream(run(operation.oracle, inputs, constants)[: -len(inputs)])
    ours = run(operation.function, inputs, constants, upstream)
    eager = run(operation.oracle, inputs, constants, upstream)
    truth = truth or run(operation.oracle, widened(inputs), widened(constants), widened(upstream))
    for i, (out, exact, rounded) in enumerate(zip(ours, truth, eager, strict=True)):
        which = f"output {i}" if i < len(upstream) else f"gradient of input {i - len(upstream)}"
        assert_close(which, out, exact, rounded, 1 if operation.rounds_dx_thrice and i == len(upstream) else 0.25)
    return ours


def assert_same(ours, expected, what):
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if not torch.equal(a, b):
            difference = (a.double() - b.double()).abs()
            numbers = f"max difference {difference.max():.3e}, mean difference {difference.mean():.3e}"
            raise AssertionError(f"{what}: result {i} of (outputs, gradients) differs: {numbers}")


# ---------------------------------------------------------------------------------------------------------------------
# Right numbers


def test_without_triton_the_references_run():
    """As on macOS, where there is none: training, with every way to checkpoint."""
    code = """
import sys; sys.modules["triton"] = None
import torch, model
from optimizers import adamw, on_gpu, optimizer
from runtime.recompute import recompute
for mode in ("none", "selective", "full"):
    llama = model.Llama(model.LlamaConfig(1, 4, 2, 64, 48, 50, 8)); llama.init_weights(0)
    llama.set_operations(attention="triton"); recompute(llama, mode)
    driver = optimizer.Optimizer(llama, adamw.AdamW(), on_gpu.OnGPU(), grad_clip=1.0)
    tokens = torch.arange(8)[None]
    before = llama(tokens, tokens)
    before.backward(); driver.step(0.01)
    assert llama(tokens, tokens) < before
list(llama.generate(tokens[:, :2], 3))
print("trained")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout == "trained\n", done.stderr[-2000:]


def test_these_tests_run_the_triton_kernels_and_not_the_references():
    assert use_triton(torch.empty(1, device=DEVICE)), "kernels were imported before TRITON_INTERPRET was set"


def written_outside(monkeypatch, function, inputs, constants, upstream):
    """Runs function with a guard behind every buffer that is allocated; for each, whether it was written over."""
    empty, guards = torch.empty, []

    def guarded_empty(*shape, dtype=FP32, device=None):
        shape = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        memory = empty(shape.numel() + 8192, dtype=dtype, device=device).fill_(77)
        guards.append(memory[shape.numel() :])
        return memory[: shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded_empty(x.shape, dtype=x.dtype, device=x.device))
    run(function, inputs, constants, upstream)
    monkeypatch.undo()
    return [bool((guard != 77).any()) for guard in guards]


@each_operation
def test_nothing_is_written_outside_the_results(name, monkeypatch):
    inputs, constants = OPERATIONS[name].inputs(5, 70, FP32)
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    written = written_outside(monkeypatch, OPERATIONS[name].function, inputs, constants, upstream)
    assert written, "the kernels allocate in another way now: guard that"
    assert not any(written), f"{name} wrote past the end of a buffer: {written}"


SHAPES = [
    (5, 1, FP32), (7, 3, FP32), (1, 64, FP16), (6, 70, FP16), (6, 70, BF16), (6, 128, FP64),
    (37, 257, FP32), (37, 257, FP16), (9, WIDE, FP32), (9, WIDE, BF16),
]  # fmt: skip


@each_operation
@pytest.mark.parametrize("rows, width, dtype", SHAPES, ids=lambda v: str(v).removeprefix("torch."))
def test_forward_and_every_gradient_match_float64(name, rows, width, dtype):
    assert_matches_float64(OPERATIONS[name], *OPERATIONS[name].inputs(rows, width, dtype))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "swiglu", "cross_entropy"])
def test_leading_dimensions_come_back(name):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    function = partial(OPERATIONS[name].function, **({"reduction": "none"} if name == "cross_entropy" else {}))
    flat = run(function, inputs, constants)
    upstream = draw_upstream(flat[: -len(inputs)])
    flat = run(function, inputs, constants, upstream)
    for lead in ((2, 3), (3, 1, 2)):

        def shaped(x, lead=lead):
            return x.unflatten(0, lead) if x.shape[0] == 6 else x

        ours = run(function, *([shaped(x) for x in tensors] for tensors in (inputs, constants, upstream)))
        assert_same(ours, [shaped(x) for x in flat], f"{name}, rows {lead}")


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
@pytest.mark.parametrize("x_dtype, weight_dtype", [(FP16, FP32), (BF16, FP32), (FP32, FP16), (FP64, FP32)], ids=str)
def test_norms_take_weights_of_another_dtype(name, x_dtype, weight_dtype):
    inputs, constants = OPERATIONS[name].inputs(33, 257, x_dtype)
    assert_matches_float64(OPERATIONS[name], [x if x.ndim == 2 else x.to(weight_dtype) for x in inputs], constants)


def test_the_eps_is_1e_5_unless_given():
    x, weight = 1e-3 * randn(4, 33), 1 + randn(33)
    torch.testing.assert_close(rms_norm(x, weight), F.rms_norm(x, weight.shape, weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "norm" in name or "mlp" in name])
def test_the_eps_that_is_given_is_used_forward_and_backward(name, monkeypatch):
    monkeypatch.setitem(globals(), "EPS", 0.3)  # the oracles'
    operation = OPERATIONS[name]
    given = operation._replace(function=partial(operation.function, eps=0.3))
    assert_matches_float64(given, *operation.inputs(9, 33, FP32))


@pytest.mark.parametrize("dtype", [FP16, FP32] + [BF16] * HAS_GPU, ids=str)
def test_add_rms_norm_equals_its_two_steps_bit_for_bit(dtype):
    for width in (70, 4096):
        (x, residual, weight), _ = OPERATIONS["add_rms_norm"].inputs(9, width, dtype)
        normed, total = kernels.add_rms_norm(x, residual, weight)
        assert_same((normed, total), (rms_norm(x + residual, weight), x + residual), "add_rms_norm")


def test_add_rms_norm_gives_x_and_residual_gradients_of_their_own():
    (x, residual, weight), _ = OPERATIONS["add_rms_norm"].inputs(4, 8, FP32)
    x.requires_grad_(), residual.requires_grad_()
    sum(y.sum() for y in kernels.add_rms_norm(x, residual, weight)).backward()
    assert x.grad.data_ptr() != residual.grad.data_ptr(), "clipping one in place would clip the other"


def test_add_rms_norm_needs_neither_output_nor_two_inputs():
    """The gradient through one output alone, and of one tensor given twice."""
    (x, residual, weight), _ = OPERATIONS["add_rms_norm"].inputs(4, 8, FP64)
    for unused in (0, 1):
        operation = Operation(
            lambda *a, i=1 - unused: kernels.add_rms_norm(*a, EPS)[i],
            lambda *a, i=1 - unused: add_rms_norm_oracle(*a)[i] + 0 * a[2].sum(),
        )
        assert_matches_float64(operation, (x, residual, weight), ())
    twice = Operation(lambda x, w: kernels.add_rms_norm(x, x, w), lambda x, w: add_rms_norm_oracle(x, x, w))
    assert_matches_float64(twice, (x, weight), ())


def test_rope_takes_positions_of_each_batch():
    inputs, (cos, sin) = rope_inputs(3, 5, FP32)
    angles = torch.rand(2, 3, 5, device=DEVICE) * 100
    assert_matches_float64(OPERATIONS["rope"], inputs, (angles.cos(), angles.sin()))
    strided = [torch.rand(5, 3, 2, device=DEVICE).permute(2, 1, 0) for _ in range(2)]
    assert_matches_float64(OPERATIONS["rope"], inputs, strided)
    assert_matches_float64(OPERATIONS["rope"], inputs, (cos[:, :1].expand(3, 5), sin[:, :1].expand(3, 5)))


def test_rope_takes_any_number_of_heads():
    for heads, kv_heads in ((1, 1), (3, 3), (5, 1)):
        assert_matches_float64(rope_of(heads), *rope_inputs(3, 3, FP32, heads, kv_heads))


def test_large_values_do_not_overflow_on_the_way():
    for name in ("swiglu", "geglu_tanh", "geglu_none"):
        (gate_up,), _ = OPERATIONS[name].inputs(4, 70, FP32)
        assert_matches_float64(OPERATIONS[name], (100 * gate_up,), ())
    for name in ("rms_norm", "layer_norm"):  # the squares are past fp16
        inputs, _ = OPERATIONS[name].inputs(4, 70, FP16)
        assert_matches_float64(OPERATIONS[name], (3000 * inputs[0], *inputs[1:]), ())
    (logits,), (targets,) = OPERATIONS["cross_entropy"].inputs(4, 70, FP32)
    assert_matches_float64(OPERATIONS["cross_entropy"], (1000 * logits,), (targets,))


def test_layer_norm_keeps_the_variance_of_rows_far_from_zero():
    (x, weight, bias), _ = OPERATIONS["layer_norm"].inputs(4, 257, FP32)
    ours = kernels.layer_norm(x + 1000, weight, bias, EPS)
    torch.testing.assert_close(ours, F.layer_norm(x + 1000, weight.shape, weight, bias, EPS), rtol=1e-3, atol=1e-3)


@each_operation
def test_gradcheck_in_float64(name):
    inputs, constants = OPERATIONS[name].inputs(3, 3, FP64)
    if name == "rope":
        inputs, constants = rope_inputs(1, 1, FP64, heads=6, kv_heads=1)
    if name == "linear_cross_entropy":
        inputs = [x[:, :4] for x in inputs]
    function = OPERATIONS[name].function
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    # Along random directions: element by element takes a thousand forwards, and every element is compared elsewhere.
    assert torch.autograd.gradcheck(lambda *leaves: function(*leaves, *constants), leaves, fast_mode=True)


@each_operation
def test_references_match_float64_too(name):
    ours = OPERATIONS[name].function
    options = {key: value for key, value in ours.keywords.items() if key != "chunk_tokens"}
    fallback = partial(getattr(reference, ours.func.__name__), **options)
    if ours.func in (rms_norm_linear, swiglu_mlp):
        fallback = partial(ours, ops=reference)
    for dtype in (FP64, FP32, FP16):
        assert_matches_float64(OPERATIONS[name]._replace(function=fallback), *OPERATIONS[name].inputs(6, 70, dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Any strides, any rows


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def spread_rows(x):
    wider = poisoned(*x.shape[:-1], x.shape[-1] + 13, dtype=x.dtype)
    wider[..., 5:-8] = x
    return wider[..., 5:-8]


def spread_columns(x):
    wider = poisoned(*x.shape[:-1], 3 * x.shape[-1], dtype=x.dtype)
    wider[..., 1::3] = x
    return wider[..., 1::3]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def reversed_dimensions(x):
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


STRIDES = [spread_rows, spread_columns, transposed, reversed_dimensions]


@each_operation
@pytest.mark.parametrize("restride", STRIDES)
def test_strides_of_inputs_and_gradients_change_nothing(name, restride):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    if name == "linear_cross_entropy":  # small integers, so that no order of a matmul's sum rounds
        inputs = [x.round() for x in inputs]
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    packed = run(OPERATIONS[name].function, [x.contiguous() for x in inputs], constants, upstream)
    ours = run(
        OPERATIONS[name].function,
        [restride(x) for x in inputs],
        [restride(t.double()).to(t.dtype) if t.ndim == 1 else restride(t) for t in constants],
        [restride(g) if g.ndim else g for g in upstream],
    )
    if name in MATMULS or HAS_GPU:  # natively, a strided row lies otherwise in registers: another order of the sum
        for a, b in zip(ours, packed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    else:
        assert_same(ours, packed, restride.__name__)


@each_operation
def test_gradients_of_stride_0(name):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    outputs = run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)]
    assert_matches_float64(OPERATIONS[name], inputs, constants, [randn().expand(y.shape) for y in outputs])
    if outputs[0].ndim:
        rows = [randn(*y.shape[:-1], 1).expand(y.shape) for y in outputs]
        assert_matches_float64(OPERATIONS[name], inputs, constants, rows)


@each_operation
def test_inputs_of_stride_0(name):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    expanded = [x[:1].expand(x.shape) for x in inputs]
    if name == "linear_cross_entropy":
        expanded[1] = inputs[1]  # equal weights of a head make gradients that cancel to nothing
    assert_matches_float64(OPERATIONS[name], expanded, constants)


@each_operation
def test_zero_rows_give_empty_results_and_zero_weight_gradients(name):
    inputs, constants = OPERATIONS[name].inputs(4, 20, FP32)
    n_weights = {"linear_cross_entropy": 1, "rms_norm_linear": 2}.get(name, 3 if name in MATMULS else 0)
    inputs = [x[:0] if x.ndim > 1 and i < len(inputs) - n_weights else x for i, x in enumerate(inputs)]
    constants = [t if name == "rope" else t[:0] for t in constants]
    for result in run(OPERATIONS[name].function, inputs, constants):
        assert (result == 0).all(), f"{name} of no rows holds {result.abs().max()}"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@each_loss
def test_a_loss_of_zero_rows_is_zero(loss, reduction):
    no_targets = torch.empty(0, dtype=torch.int64, device=DEVICE)
    value, gradient = run(partial(loss, reduction=reduction), [torch.empty(0, 7, device=DEVICE)], [no_targets])
    assert value == 0, f"loss of no rows: {value}"
    assert gradient.shape == (0, 7)


@pytest.mark.parametrize("name", ROW_OPERATIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_row_with_nan_or_inf_changes_no_other_row(name, poison):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    clean = run(OPERATIONS[name].function, inputs, constants, upstream)
    rows = 1 if name == "rope" else 0
    dirty_inputs = [x.clone() for x in inputs]
    dirty_inputs[0].select(rows, 2)[..., 3] = poison
    dirty = run(OPERATIONS[name].function, dirty_inputs, constants, upstream)
    others = [i for i in range(6) if i != 2]
    for i, (a, b) in enumerate(zip(dirty, clean, strict=True)):
        if a.ndim > 1:
            kept = torch.tensor(others, device=DEVICE)
            assert torch.equal(a.index_select(rows, kept), b.index_select(rows, kept)), f"{name}: result {i} spread"
    assert not dirty[0].select(rows, 2).isfinite().all(), f"{name} hid a {poison}"


def apart(base, packed, dim, start, stride):
    """packed's values, so many elements apart along dim (4 long): with 2³⁰ the last lies past 2³¹."""
    strides = list(torch.empty(packed.shape, device="meta").stride())
    strides[dim] = stride
    return base.as_strided(packed.shape, strides, start).copy_(packed)


def run_apart(base, dim, stride, function, inputs, constants, upstream):
    spread = [
        x if x.ndim < 2 or x.shape[dim] != 4 else apart(base, x, dim, 100 * i, stride)
        for i, x in enumerate([*inputs, *upstream])
    ]
    return run(function, spread[: len(inputs)], constants, spread[len(inputs) :])


def compare_far_apart():
    """Every dimension of every row operation's inputs and gradients, stretched past 2³¹ elements in turn."""
    torch.manual_seed(0)
    base = torch.empty(3 * 2**30 + 1024, dtype=BF16, device=DEVICE)  # virtual on a CPU: few of its pages are touched
    for name in ROW_OPERATIONS + ["cross_entropy"]:
        operation = OPERATIONS[name]
        for dim in (0, 1, 2, 3, -2) if name == "rope" else (0, 1):
            if name == "rope":  # heads, dimension 2, are stretched twice: 4 packed, then 4 of q, of k and of v
                operation, n_heads = (rope_of(4), 12) if dim == -2 else (rope_of(2), 4)
                sizes = [2, 2, n_heads, 2]
                sizes[dim] = n_heads if dim in (2, -2) else 4
                qkv = randn(*sizes, dtype=BF16)
                angles = torch.rand(qkv.shape[1], qkv.shape[3] // 2, device=DEVICE)
                inputs, constants = (qkv,), (angles.cos(), angles.sin())
            else:
                inputs, constants = operation.inputs(4, 2 if "glu" in name else 4, BF16)
            upstream = draw_upstream(run(operation.function, inputs, constants)[: -len(inputs)])
            print(name, "dimension", dim, flush=True)
            arguments = operation.function, inputs, constants, upstream
            ours = run_apart(base, dim, 2**30, *arguments)
            # Triton orders a row's sum by what divides the strides: cross_entropy's bits are those of like strides.
            expected = run_apart(base, dim, 2**10, *arguments) if name == "cross_entropy" else run(*arguments)
            assert_same(ours, expected, f"{name}, dimension {dim}")
    print("all compared")


def in_another_process(code, **environment):
    """What it printed; a crash there is a failure here."""
    done = subprocess.run(
        [sys.executable, "-c", f"import test_kernels; {code}"],
        cwd=Path(__file__).parent, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode} after {done.stdout[-300:]!r}\n{done.stderr[-3000:]}"
    return done.stdout


def test_strides_past_2_to_the_31():
    assert "all compared" in in_another_process("test_kernels.compare_far_apart()")


@full_size
@pytest.mark.parametrize("name", [*ROW_OPERATIONS, "cross_entropy"])
def test_results_past_2_to_the_31_elements(name):
    """One row, expanded to so many that the packed results pass 2³¹ elements: each must be the first."""
    columns = {"rope": 64, "cross_entropy": 128256}.get(name, 32768)
    per_row = {"rope": 10 * 128, "swiglu": 65536, "geglu_tanh": 65536, "geglu_none": 65536}.get(name, columns)
    rows = 2**31 // per_row + 2
    inputs, constants = OPERATIONS[name].inputs(1, columns, BF16)
    if name == "rope":
        inputs = [x[:1].expand(1, rows, *x.shape[2:]) for x in inputs]
        constants = [t.expand(rows, columns) for t in constants]
    else:
        inputs = [x.expand(rows, x.shape[1]) if x.ndim > 1 else x for x in inputs]
        constants = [t.expand(rows) for t in constants]
    dim = 1 if name == "rope" else 0
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = OPERATIONS[name].function(*leaves, *constants)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [randn().to(y.dtype).expand(y.shape) for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    for result in (*outputs, *gradients):
        if result.ndim > 1:
            for row in (rows // 2, rows - 2, rows - 1):
                assert torch.equal(result.select(dim, 0), result.select(dim, row)), f"{name}: row {row} of {rows}"


@full_size
def test_a_chunk_of_logits_past_2_to_the_31_elements():
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(16896, 128256, BF16)
    one_chunk, chunks = (
        run(partial(linear_cross_entropy, chunk_tokens=size), (x, weight), (targets,), one()) for size in (16896, 2048)
    )
    for what, a, b in zip(("loss", "dx", "dW"), one_chunk, chunks, strict=True):
        assert relative_error(a, b.double()) < 1e-2, f"{what}: relative difference {relative_error(a, b.double())}"


# ---------------------------------------------------------------------------------------------------------------------
# The two losses: options, labels, scale


def loss_inputs(rows=11, n_vocab=70, dtype=FP32):
    return OPERATIONS["cross_entropy"].inputs(rows, n_vocab, dtype)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        pytest.param(loss, reduction, id=f"{name}-{reduction}")
        for name, loss in LOSSES.items()
        for reduction in (["mean", "sum"] if name == "linear_cross_entropy" else ["mean", "sum", "none"])
    ],
)
def test_losses_match_float64_with_every_option(loss, reduction, z_loss, label_smoothing):
    options = {"reduction": reduction, "z_loss": z_loss, "label_smoothing": label_smoothing}
    for dtype in (FP32, FP16):
        operation = Operation(partial(loss, **options), partial(cross_entropy_oracle, **options))
        assert_matches_float64(operation, *loss_inputs(dtype=dtype))


@pytest.mark.parametrize("ignore_index", [0, 7, 69, -1, 2**40])
@each_loss
def test_ignore_index_is_any_number_in_range_or_not(loss, ignore_index):
    (logits,), (targets,) = loss_inputs()
    targets = targets.where(targets != -100, ignore_index)
    targets[2] = 0
    options = {"ignore_index": ignore_index, "label_smoothing": 0.1}
    operation = Operation(partial(loss, **options), partial(cross_entropy_oracle, **options))
    _, gradient = assert_matches_float64(operation, (logits,), (targets,))
    assert (gradient[targets == ignore_index] == 0).all(), "an ignored row has a gradient"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@each_loss
def test_only_ignored_rows_give_loss_0_and_zero_gradients(loss, reduction):
    (logits,), (targets,) = loss_inputs()
    options = {"reduction": reduction, **loss_options}
    value, gradient = run(partial(loss, **options), (logits,), (torch.full_like(targets, -100),))
    assert value == 0 and (gradient == 0).all(), f"loss {value}, largest gradient {gradient.abs().max()}"


@each_loss
def test_an_ignored_row_leaves_no_trace(loss):
    (logits,), (targets,) = loss_inputs()
    clean, _ = run(loss, (logits,), (targets,), one())
    logits[targets == -100] = 1e4 if loss is LOSSES["linear_cross_entropy"] else float("nan")
    value, gradient = run(loss, (logits,), (targets,), one())
    assert torch.equal(value, clean), f"loss {value}, without the ignored rows {clean}"
    assert (gradient[targets == -100] == 0).all()


@pytest.mark.parametrize("target", [-1, 70, -(2**40), 2**40])
@each_loss
def test_a_target_out_of_range_makes_the_loss_nan_and_touches_no_other_row(loss, target):
    (logits,), (targets,) = loss_inputs()
    _, clean = run(partial(loss, reduction="sum"), (logits,), (targets,), one())
    targets[5] = target
    value, gradient = run(partial(loss, reduction="sum"), (logits,), (targets,), one())
    others = torch.arange(len(targets), device=DEVICE) != 5
    assert value.isnan(), f"loss {value}"
    assert gradient[5].isnan().any()
    assert torch.equal(gradient[others], clean[others]), "a neighbour's gradient changed"
    if loss is not LOSSES["linear_cross_entropy"]:
        losses = loss(logits, targets, reduction="none")
        assert losses[5].isnan() and losses[others].isfinite().all(), f"losses {losses}"


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("column", [0, 12, WIDE - 1, slice(None)], ids=str)
@pytest.mark.parametrize("loss", [kernels.cross_entropy, reference.cross_entropy], ids=["kernel", "reference"])
def test_a_row_of_logits_with_nan_or_inf_turns_nan_and_no_other(loss, column, poison):
    (logits,), (targets,) = loss_inputs(rows=4, n_vocab=WIDE)
    targets[:] = torch.tensor([WIDE - 1, 12, 12, 0])
    scale = [torch.ones(4, device=DEVICE)]
    clean = run(partial(loss, reduction="none"), (logits,), (targets,), scale)
    logits[2, column] = poison
    losses, gradient = run(partial(loss, reduction="none"), (logits,), (targets,), scale)
    assert losses[2].isnan(), f"the row with {poison} has loss {losses[2]}"
    assert gradient[2].isnan().any()
    assert_same((losses[[0, 1, 3]], gradient[[0, 1, 3]]), [c[[0, 1, 3]] for c in clean], "another row")


def test_a_nan_row_of_x_changes_no_other_row_of_linear_cross_entropy():
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(11, 70, FP32)
    _, clean, _ = run(linear_cross_entropy, (x, weight), (targets,), one())
    x[5] = float("nan")
    value, dx, _ = run(linear_cross_entropy, (x, weight), (targets,), one())
    others = torch.arange(11, device=DEVICE) != 5
    assert value.isnan() and dx[5].isnan().all()
    assert torch.equal(dx[others], clean[others]), "a neighbour's gradient changed"


@pytest.mark.parametrize("masked", [slice(0, BLOCK), slice(60, WIDE - 1), slice(1, 2)], ids=str)
def test_logits_of_minus_inf_are_a_mask(masked):
    """As in PyTorch: a vocabulary masked in part gives a finite loss, also where a whole block of it is masked."""
    logits, targets = randn(3, WIDE), torch.tensor([WIDE - 1, WIDE - 1, 5], device=DEVICE)
    logits[1, masked] = float("-inf")
    operation = Operation(kernels.cross_entropy, cross_entropy_oracle)
    value, gradient = assert_matches_float64(operation, (logits,), (targets,))
    assert value.isfinite() and gradient.isfinite().all()


def test_the_gradient_of_a_cross_entropy_is_ready_before_backward():
    """The loss differentiated as it stands costs no second look at the logits: here they are gone by then."""
    for reduction in ("mean", "sum"):
        (logits,), (targets,) = OPERATIONS["cross_entropy"].inputs(11, 70, FP32)
        expected = run(partial(kernels.cross_entropy, reduction=reduction), (logits,), (targets,), one())[1]
        logits.requires_grad_()
        loss = kernels.cross_entropy(logits, targets, reduction=reduction)
        logits.data.fill_(float("nan"))
        assert_same(torch.autograd.grad(loss, logits), (expected,), reduction)


def test_without_autograd_a_cross_entropy_computes_no_gradient(monkeypatch):
    (logits,), (targets,) = OPERATIONS["cross_entropy"].inputs(11, 70, FP32)
    logits.requires_grad_()
    expected = kernels.cross_entropy(logits, targets).detach()
    asked = []
    original = cross_entropy_file.losses_of_rows
    monkeypatch.setattr(cross_entropy_file, "losses_of_rows", lambda *args: asked.append(args[4:]) or original(*args))
    with torch.no_grad():
        loss = kernels.cross_entropy(logits, targets)
    assert asked == [()], "the gradient's tensor was given"
    assert_same((loss,), (expected,), "loss")


def test_a_cross_entropy_is_differentiated_as_often_and_as_scaled_as_one_likes():
    (logits,), (targets,) = OPERATIONS["cross_entropy"].inputs(11, 70, FP32)
    logits.requires_grad_()
    loss = kernels.cross_entropy(logits, targets)
    truth = run(reference.cross_entropy, (logits.detach().double(),), (targets,), widened(one()))[1]
    gradients = [torch.autograd.grad(factor * loss, logits, retain_graph=True)[0] for factor in (1, 1, 3, 1)]
    assert len({gradient.data_ptr() for gradient in gradients}) == 4, "a gradient handed out before was overwritten"
    for factor, gradient in zip((1, 1, 3, 1), gradients, strict=True):
        assert relative_error(gradient, factor * truth) < 1e-6, f"times {factor}"


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_fp16_gradients_do_not_underflow_before_the_loss_scale(name):
    """p/n is below what fp16 can hold, p/n times the loss scale is not. The targets' own entries would hide it."""
    rows, n_vocab, scale = (16384, 2000, 2.0**18) if HAS_GPU else (64, 2000, 2.0**10)
    logits, targets = 0.1 * randn(rows, n_vocab, dtype=FP16), torch.randint(n_vocab, (rows,), device=DEVICE)
    upstream = [torch.tensor(scale, device=DEVICE)]
    loss = {"cross_entropy": LOSSES[name], "linear_cross_entropy": linear_cross_entropy}[name]
    head = [torch.eye(n_vocab, dtype=FP16, device=DEVICE)] if name == "linear_cross_entropy" else []
    gradient = run(loss, (logits, *head), (targets,), upstream)[1]
    truth = run(cross_entropy_oracle, (logits.double(),), (targets,), widened(upstream))[1]
    rest = torch.ones_like(truth).scatter_(1, targets[:, None], 0)
    error = relative_error(gradient * rest, truth * rest)
    assert error < 1e-3, f"relative error {error:.2e} beside the targets, largest {(truth * rest).abs().max():.2e}"


def test_a_loss_scale_beyond_fp16_scales_fp16_gradients():
    """The scale is a tensor: on CUDA a scalar one would be rounded to fp16, and 2^17 to infinity, before it is used."""
    x, weight, targets = randn(8, 16, dtype=FP16), 1e-3 * randn(40, 16, dtype=FP16), torch.arange(8, device=DEVICE)
    upstream = [torch.tensor(2.0**17, device=DEVICE)]
    _, dx = run(partial(linear_cross_entropy, reduction="sum"), (x,), (weight, targets), upstream)
    oracle = partial(linear_cross_entropy_oracle, reduction="sum")
    _, truth = run(oracle, (x.double(),), (weight.double(), targets), widened(upstream))
    assert relative_error(dx, truth) < 1e-3, f"largest {dx.abs().max():.3e}, expected {truth.abs().max():.3e}"


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 11, 12, 1000, None])
def test_any_chunk_size_gives_the_same_loss_and_gradients(chunk_tokens):
    operation = Operation(partial(linear_cross_entropy, chunk_tokens=chunk_tokens), linear_cross_entropy_oracle)
    for dtype in (FP16, FP32, FP64):
        assert_matches_float64(operation, *OPERATIONS["linear_cross_entropy"].inputs(11, 69, dtype))


def test_the_weight_gradient_is_summed_in_fp32_over_the_chunks():
    """3,200 + 8.125 is 3,208 in fp16: one token a chunk would round at every addition."""
    rows = 400
    x, weight = torch.full((rows, 1), 16.25, dtype=FP16, device=DEVICE), torch.zeros(2, 1, dtype=FP16, device=DEVICE)
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    function = partial(linear_cross_entropy, chunk_tokens=1, reduction="sum")
    _, _, dweight = run(function, (x, weight), (targets,), one())
    assert dweight.flatten().tolist() == [-8.125 * rows, 8.125 * rows]


def test_a_weight_gradient_summed_in_bf16_is_close_and_given_once():
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(40, 70, BF16)
    narrow = partial(linear_cross_entropy, chunk_tokens=5, fp32_dweight=False)
    exact = run(linear_cross_entropy_oracle, widened((x, weight)), (targets,), widened(one()))
    for ours, truth in zip(run(narrow, (x, weight), (targets,), one()), exact, strict=True):
        assert relative_error(ours, truth) < 4 * rounding(BF16)
    loss = narrow(x.requires_grad_(), weight.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_the_gradient_of_x_may_take_the_memory_of_that_of_y(name):
    inputs, _ = OPERATIONS[name].inputs(6, 20, BF16)
    upstream = draw_upstream(run(OPERATIONS[name].function, inputs)[: -len(inputs)])
    expected = run(OPERATIONS[name].function, inputs, upstream=[x.clone() for x in upstream])
    overwriting = partial(getattr(kernels, name), overwrite_dy=True)
    assert_same(run(overwriting, inputs, upstream=upstream), expected, name)
    dx = expected[-len(inputs)]
    assert torch.equal(upstream[0], dx), "it took memory of its own"
    strided = [x.T.contiguous().T for x in upstream[:1]] + upstream[1:]
    before = strided[0].clone()
    run(overwriting, inputs, upstream=strided)
    assert torch.equal(strided[0], before), "what is not contiguous stays"


@pytest.mark.parametrize("options", [{}, {"fp32_dweight": False}], ids=str)
def test_x_may_become_its_own_gradient(options):
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(40, 70, BF16)
    chunked = partial(linear_cross_entropy, chunk_tokens=7, **options)
    _, dx, dweight = run(chunked, (x, weight), (targets,), one())
    leaf, weight = x.clone().requires_grad_(), weight.requires_grad_()
    hidden, met = leaf.clone(), []
    hidden.register_hook(lambda gradient: met.append(gradient.data_ptr()))
    chunked(hidden, weight, targets, overwrite_x=True).backward()
    assert torch.equal(leaf.grad, dx) and torch.equal(weight.grad, dweight)
    assert met == [hidden.data_ptr()], "it took memory of its own"
    strided = leaf.detach().T.contiguous().T  # not overwritten
    before = strided.clone()
    _, dx, dweight = run(chunked, (strided, weight), (targets,), one())
    assert_same(run(partial(chunked, overwrite_x=True), (strided, weight), (targets,), one())[1:], (dx, dweight), "")
    assert torch.equal(strided, before)
    read_again = leaf.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (read_again.square().sum() + chunked(read_again, weight, targets, overwrite_x=True)).backward()


def test_targets_of_any_integer_type_and_stride():
    (logits,), (targets,) = loss_inputs()
    strided = torch.full((11, 3), 10**6, device=DEVICE)
    strided[:, 1] = targets
    for name in ("cross_entropy", "linear_cross_entropy"):
        expected = run(LOSSES[name], (logits,), (targets,), one())
        for other in (targets.int(), targets.to(torch.int16), strided[:, 1]):
            assert_same(run(LOSSES[name], (logits,), (other,), one()), expected, f"{name}, {other.dtype}")
    unsigned = torch.arange(11, dtype=torch.uint8, device=DEVICE) + 156 - 5  # 156 is -100 where 8 bits wrap
    wide_logits = randn(11, 200)
    for loss in LOSSES.values():
        expected = run(loss, (wide_logits,), (unsigned.long(),), one())
        assert_same(run(loss, (wide_logits,), (unsigned,), one()), expected, "uint8")


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of several ranks


@pytest.mark.parametrize("n", [1, 2048, 5000])
@pytest.mark.parametrize("add_ranks", [kernels.add_ranks, reference.add_ranks], ids=["kernel", "reference"])
def test_gradients_of_the_ranks_are_added_in_float32(add_ranks, n):
    own, received = randn(n, dtype=BF16), randn(3, n, dtype=BF16)
    out = torch.empty_like(own)
    add_ranks(own, received, 0.25, out)
    mean = torch.cat([own[None], received]).double().mean(0)
    half_a_bit = 2**-8 if HAS_GPU or add_ranks is reference.add_ranks else 2**-7  # the interpreter truncates
    assert ((out.double() - mean).abs() <= half_a_bit * mean.abs() + 1e-6).all()


def test_gradients_that_do_not_fit_are_refused():
    own, received = randn(8), randn(3, 8)
    with pytest.raises(ValueError, match=r"received \(3, 4\), out \(8,\): expected \(n,\), \(ranks - 1, n\)"):
        kernels.add_ranks(own, received[:, :4].contiguous(), 1.0, own.clone())
    with pytest.raises(ValueError, match="contiguous"):
        kernels.add_ranks(own, randn(8, 3).t(), 1.0, own.clone())


# ---------------------------------------------------------------------------------------------------------------------
# AdamW


def adamw_arguments(n, dtype):
    w = randn(n)
    return w.to(dtype) if dtype != FP32 else w, randn(n, dtype=dtype), w, randn(n), randn(n).square()


def step_scalars(scale, lr=0.1, t=3, betas=(0.9, 0.95)):
    return torch.tensor([scale, lr, 1 / (1 - betas[0] ** t), (1 - betas[1] ** t) ** -0.5], device=DEVICE)


def cpu_adamw(parameter, grad, w, m, v, scalars, *options):
    """Over the gradient's own memory, as optimizers/on_cpu.py may call it."""
    tensors = [x.cpu() for x in (parameter, grad, w, m, v)]
    tensors[0] = tensors[2] if parameter is w else tensors[1] if grad.dtype == parameter.dtype else tensors[0]
    adamw_file.adamw_on_cpu(*tensors, scalars[0].item(), scalars[1].item(), 3, *options)
    for x, new in zip((parameter, w, m, v), (tensors[0], *tensors[2:]), strict=True):
        x.copy_(new)


def cpu_adamw_in_pieces(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_file, "c_library", lambda: None)  # no C compiler
        patch.setattr(adamw_file, "CPU_CHUNK", 700)
        cpu_adamw(*arguments)


def test_adamw_on_cpu_refuses_what_does_not_fit_and_keeps_a_nan():
    options = 1.0, 0.1, 1, 0.9, 0.95, 1e-8, 0.1
    w, m, v = torch.ones(8), torch.zeros(8), torch.zeros(8)
    bf16 = torch.ones(8, dtype=BF16)
    for tensors, message in (
        ((bf16, w, torch.zeros(8, dtype=torch.int16), m, v), r"w is torch.int16 \(8,\)"),
        ((bf16, w, w, m[:4], v), r"m is torch.float32 \(4,\)"),
        ((bf16, w, w, m, v[::2]), r"v is torch.float32 \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            adamw_file.adamw_on_cpu(*tensors, *options)
    m.view(torch.int32)[:4] = 0x7FFFFFFF  # CUDA's NaN, which rounding would carry over into -0
    adamw_file.adamw_on_cpu(bf16, torch.ones(8), w, m, v, *options)
    assert bf16.isnan().tolist() == [True] * 4 + [False] * 4


ADAMWS = {"kernel": kernels.adamw, "reference": reference.adamw, "C": cpu_adamw, "pieces": cpu_adamw_in_pieces}


@pytest.mark.parametrize("dtype, of_grad", [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("adamw", ADAMWS.values(), ids=ADAMWS)
def test_adamw_is_pytorchs(adamw, dtype, of_grad):
    if adamw is cpu_adamw and adamw_file.c_library() is None:
        pytest.skip("no C compiler with OpenMP here")
    parameter, grad, w, m, v = adamw_arguments(3001, dtype)
    grad = grad.to(of_grad)
    theirs = torch.nn.Parameter(w.double())
    theirs.grad = 0.25 * grad.double()
    torch_adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    torch_adamw.state[theirs] = {"step": torch.tensor(2.0), "exp_avg": m.double(), "exp_avg_sq": v.double()}
    torch_adamw.step()
    adamw(parameter, grad, w, m, v, step_scalars(0.25), 0.9, 0.95, 1e-8, 0.1)
    for ours, exact in (
        (w, theirs),
        (m, torch_adamw.state[theirs]["exp_avg"]),
        (v, torch_adamw.state[theirs]["exp_avg_sq"]),
    ):
        torch.testing.assert_close(ours.double(), exact.detach(), rtol=2e-6, atol=1e-6)
    if dtype == BF16 and not HAS_GPU and adamw is kernels.adamw:  # the interpreter truncates
        torch.testing.assert_close(parameter.float(), w, rtol=2**-7, atol=0)
    else:
        assert torch.equal(parameter, w.to(dtype)), "the parameter is not the rounded w"


SOME_BITS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3F80_8000, 0x3F81_8000, 0x7F7F_FFFF, 0x7F80_0000]


def test_the_halves_of_a_float32_are_all_of_it():
    bits = torch.tensor([*SOME_BITS, *torch.randint(2**31 - 2**23, (5000,)).tolist()], dtype=torch.int32, device=DEVICE)
    w = torch.cat([bits, bits | -(2**31)]).view(FP32)  # negative ones too
    w = w[~w.isnan()]
    parameter, low = torch.empty_like(w, dtype=BF16), torch.empty_like(w, dtype=torch.int16)
    adamw_file.split_halves(w, parameter, low)
    assert torch.equal(adamw_file.merge_halves(parameter, low).view(torch.int32), w.view(torch.int32))
    rounded, is_middle = w.to(BF16), low == -0x8000
    assert torch.equal(parameter[~is_middle], rounded[~is_middle]), "the upper half is not the nearest bfloat16"
    assert (parameter[is_middle].double().abs() >= w[is_middle].double().abs()).all()
    nan = torch.tensor([0x7FFF_FFFF, 0x7F80_0001, -1, -0x7F_FFFF], dtype=torch.int32, device=DEVICE).view(FP32)
    adamw_file.split_halves(nan, parameter[:4], low[:4])
    merged = adamw_file.merge_halves(parameter, low)[:4]
    assert nan.isnan().all() and parameter[:4].isnan().all() and merged.isnan().all()


@pytest.mark.parametrize("of_grad", [BF16, FP32], ids=str)
@pytest.mark.parametrize("adamw", [kernels.adamw, reference.adamw], ids=["kernel", "reference"])
def test_adamw_in_halves_is_adamw(adamw, of_grad):
    parameter, grad, w, m, v = adamw_arguments(3001, BF16)
    grad = grad.to(of_grad)
    w[0], v[1] = float("nan"), float("nan")  # what is broken must show in the parameter
    low = torch.empty_like(w, dtype=torch.int16)
    adamw_file.split_halves(w, parameter, low)
    halves = [parameter, grad, low, m.clone(), v.clone()]
    for scale in (0.25, float("inf"), 0.5):
        adamw(*halves, step_scalars(scale), 0.9, 0.95, 1e-8, 0.1)
        adamw(parameter.clone(), grad, w, m, v, step_scalars(scale), 0.9, 0.95, 1e-8, 0.1)
    for ours, whole in ((adamw_file.merge_halves(parameter, low), w), (halves[3], m), (halves[4], v)):
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert parameter[:2].isnan().all() and parameter[2:].isfinite().all()


@pytest.mark.parametrize(
    "compiler, builds", [("false", False), ("there_is_no_such_compiler", False), ("{} -m64", True)]
)
def test_adamw_in_c_is_built_by_the_compiler_named(compiler, builds, monkeypatch, capsys):
    found = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if builds and (found is None or platform.machine() != "x86_64"):
        pytest.skip("no C compiler that knows -m64 here")
    monkeypatch.setenv("CC", compiler.format(found))
    assert (adamw_file.c_library.__wrapped__() is not None) == builds
    assert ("kernels/adamw.c was not built" in capsys.readouterr().err) != builds


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
@pytest.mark.parametrize("adamw", [kernels.adamw, reference.adamw], ids=["kernel", "reference"])
def test_adamw_changes_nothing_where_the_scale_is_not_finite(adamw, scale):
    tensors = adamw_arguments(3000, FP16)
    before = [x.clone() for x in tensors]
    adamw(*tensors, step_scalars(scale), 0.9, 0.95, 1e-8, 0.1)
    assert_same(tensors, before, f"scale {scale}")


@full_size
def test_adamw_past_2_to_the_31_elements():
    n = 2**31 + 1000
    grad, w = torch.ones(n, dtype=BF16, device=DEVICE), torch.ones(n, device=DEVICE)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    parameter = w.bfloat16()
    kernels.adamw(parameter, grad, w, m, v, step_scalars(1.0), 0.9, 0.95, 1e-8, 0.1)
    for x in (parameter, w, m, v):
        assert x[0] == x[-1] and (x[0] != 1), "the last element is not treated as the first"


# ---------------------------------------------------------------------------------------------------------------------
# What autograd, the compiler and the machine may ask


@each_operation
def test_two_runs_are_equal_bit_for_bit(name):
    inputs, constants = OPERATIONS[name].inputs(*((3000, 1000) if HAS_GPU else (40, 257)), FP32)
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    first, *others = (run(OPERATIONS[name].function, inputs, constants, upstream) for _ in range(5 if HAS_GPU else 2))
    for other in others:
        assert_same(other, first, name)


@each_operation
def test_a_second_derivative_is_refused_rather_than_wrong(name):
    inputs, constants = OPERATIONS[name].inputs(4, 6, FP32)
    leaves = [x.requires_grad_() for x in inputs]
    outputs = OPERATIONS[name].function(*leaves, *constants)
    total = sum(y.sum() for y in outputs) if isinstance(outputs, tuple) else outputs.sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, leaves, create_graph=True)


@each_operation
def test_backward_twice_gives_the_same_gradients_and_overwrites_nothing(name):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = OPERATIONS[name].function(*leaves, *constants)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = draw_upstream(outputs)
    kept = [x.detach().clone() for x in (*outputs, *upstream)]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    first_kept = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert_same(second, first_kept, "the second backward:")
    assert_same([*first, *leaves, *outputs, *upstream], [*first_kept, *inputs, *kept], "something was overwritten:")


@each_operation
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(name):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    full = run(OPERATIONS[name].function, inputs, constants, upstream)[len(upstream) :]
    for mask in range(1, 2 ** len(inputs)):
        leaves = [x.detach().clone().requires_grad_(bool(mask >> i & 1)) for i, x in enumerate(inputs)]
        outputs = OPERATIONS[name].function(*leaves, *constants)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        live = [(y, g) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
        torch.autograd.backward(*zip(*live, strict=True))
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:
                assert_same([leaf.grad], [full[i]], f"gradient of input {i}, mask {mask:b}:")
            else:
                assert leaf.grad is None


def profile(function):
    """How many matrix products it ran, and the largest piece of memory it took at once, in bytes."""
    function()  # the first run takes cuBLAS's workspace
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * HAS_GPU
    with torch.profiler.profile(activities=activities, profile_memory=True) as record:
        function()
    memory = "self_device_memory_usage" if HAS_GPU else "self_cpu_memory_usage"
    products = sum(event.name in ("aten::mm", "aten::addmm") for event in record.events())
    return products, max(getattr(event, memory) for event in record.events())


@pytest.mark.parametrize("need_dx, need_dweight", [(True, True), (True, False), (False, True), (False, False)])
def test_linear_cross_entropy_computes_nothing_that_is_not_needed(need_dx, need_dweight):
    """Three chunks: a product each for the logits, for dX and for dW, and no fp32 (V, C) for a frozen weight."""
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(9, 500, FP32)
    x.requires_grad_(need_dx), weight.requires_grad_(need_dweight)

    def step():
        loss = linear_cross_entropy(x, weight, targets, chunk_tokens=3)
        if loss.requires_grad:
            loss.backward()

    products, largest = profile(step)
    assert products == 3 * (1 + need_dx + need_dweight), f"{products} matrix products"
    assert need_dweight or largest < 4 * weight.numel(), f"{largest} bytes at once with a frozen weight"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_no_gradients(context):
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(9, 500, FP32)
    x.requires_grad_(), weight.requires_grad_()
    with context():
        products, largest = profile(lambda: linear_cross_entropy(x, weight, targets, chunk_tokens=3))
    assert products == 3, f"{products} matrix products for 3 chunks of logits"
    assert largest < 4 * weight.numel(), f"{largest} bytes at once: the weight's gradient?"


def test_linear_cross_entropy_never_holds_all_logits():
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(64, 500, FP32)
    x.requires_grad_(), weight.requires_grad_()
    _, largest = profile(lambda: linear_cross_entropy(x, weight, targets, chunk_tokens=8).backward())
    assert largest < 64 * 500 * 4, f"{largest} bytes at once"


@full_size
def test_linear_cross_entropy_peak_memory_at_full_size():
    x, weight = randn(16384, 2048, dtype=BF16), randn(128256, 2048, dtype=BF16)
    targets = torch.randint(128256, (16384,), device=DEVICE)
    x.requires_grad_(), weight.requires_grad_()
    linear_cross_entropy(x[:300], weight, targets[:300]).backward()  # cuBLAS takes its workspace
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets).backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    assert peak < 2.1, f"{peak:.3f} GiB above the inputs"
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, targets, chunk_tokens=512, fp32_dweight=False).backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert peak < 700, f"{peak:.0f} MiB above the inputs at the least"


@each_operation
def test_activation_checkpointing_gives_the_same_gradients(name):
    inputs, constants = OPERATIONS[name].inputs(6, 20, FP32)
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    checkpointed = partial(checkpoint, OPERATIONS[name].function, use_reentrant=False)
    plain = run(OPERATIONS[name].function, inputs, constants, upstream)
    assert_same(run(checkpointed, inputs, constants, upstream), plain, name)


def compare_compiled(name, backend):
    inputs, constants = OPERATIONS[name].inputs(6, 64, FP32)
    upstream = draw_upstream(run(OPERATIONS[name].oracle, inputs, constants)[: -len(inputs)])
    torch.compiler.reset()
    compiled = torch.compile(OPERATIONS[name].function, fullgraph=True, backend=backend)
    results = run(compiled, inputs, constants, upstream)
    for a, b in zip(results, run(OPERATIONS[name].function, inputs, constants, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    print(name, "compiled")


# Compute capability, and the bytes of shared memory that a program may take.
CARDS = {"RTX 4090": (89, 101376), "RTX 5090": (120, 101376), "A100": (80, 166912), "H100": (90, 232448)}


def compile_for(card):
    """Compiles what forward and backward of the operations launch on another GPU, and says what does not fit there.

    Triton needs no GPU for it, only a driver that names one. Nothing runs: the results are uninitialised memory.
    """
    capability, shared = CARDS[card]
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target,
        )
    )  # fmt: skip
    launch, sizes = triton.runtime.jit.JITFunction.run, {}

    def compile_only(kernel, *arguments, warmup, **options):
        compiled = launch(kernel, *arguments, warmup=True, **options)
        at = kernel.__name__, case
        sizes[at] = max(sizes.get(at, 0), compiled.metadata.shared)  # it may be launched with other strides too

    triton.runtime.jit.JITFunction.run = compile_only
    for module in [module for name, module in sys.modules.items() if name.startswith("kernels.")]:
        for name, value in (("use_triton", lambda x: True), ("shared_memory", lambda x: shared)):
            if hasattr(module, name):
                setattr(module, name, value)
    for case in product(OPERATIONS, (256,), (FP16, FP32)):
        name, width, dtype = case
        inputs, constants = OPERATIONS[name].inputs(6, width, dtype)
        run(OPERATIONS[name].function, inputs, constants)
    for case in product(("flash_attention",), (64, 128), (FP16, FP32), (None, torch.zeros(1, 256, dtype=torch.int32))):
        _, head_dim, dtype, starts = case
        run(kernels.flash_attention, [randn(1, 256, heads, head_dim, dtype=dtype) for heads in (4, 2, 2)], [starts])
    if capability >= 89:  # before Ada there is no float8
        case = "fp8_linear", 256, torch.bfloat16
        x8, scales = quantize(randn(64, 256, dtype=torch.bfloat16))
        quantize(randn(64, 64, dtype=torch.bfloat16), scales.view(-1))
        transpose(x8)
    assert sizes, "nothing was compiled"
    for (kernel, case), size in sizes.items():
        assert size <= shared, f"{kernel} of {case} takes {size} bytes of shared memory, {card} has {shared}"
    print(len(sizes), "fit")


@pytest.mark.parametrize(
    "card", [card if card == "RTX 4090" else pytest.param(card, marks=pytest.mark.slow) for card in CARDS]
)
def test_fits_the_shared_memory_of(card):
    assert " fit" in in_another_process(f"test_kernels.compile_for({card!r})", TRITON_INTERPRET="0")


@needs_gpu
@each_operation
def test_compiles_into_one_graph(name):
    compare_compiled(name, "inductor")


@pytest.mark.skipif(HAS_GPU, reason="test_compiles_into_one_graph compiles the kernels themselves")
def test_references_compile_into_one_graph():
    code = "[test_kernels.compare_compiled(name, 'aot_eager') for name in test_kernels.OPERATIONS]"
    assert in_another_process(code, TRITON_INTERPRET="0").count("compiled") == len(OPERATIONS)


def test_linear_cross_entropy_compiles_around_its_own_operator():
    """Opaque to the compiler, so that even the interpreter's version compiles."""
    compare_compiled("linear_cross_entropy", "aot_eager")
    (x, weight), (targets,) = OPERATIONS["linear_cross_entropy"].inputs(6, 20, FP32)
    for need_dx, need_dweight in ((True, True), (True, False), (False, True), (False, False)):
        arguments = (x, weight, targets, -100, 0.1, 0.0, 4, need_dx, need_dweight, True, x.new_tensor(0.5))
        torch.library.opcheck(torch.ops.nanocria.chunked_loss.default, arguments)


def compile_for_new_rows(name, sizes):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OPERATIONS[name].function, fullgraph=True, backend=counter)
    for rows in sizes:
        inputs, constants = OPERATIONS[name].inputs(rows, 32, FP32)
        leaves = [x.detach().requires_grad_() for x in inputs]
        for x in (*leaves, *constants):
            for dim, size in enumerate(x.shape):
                if size == rows:
                    torch._dynamo.mark_dynamic(x, dim)
        outputs = compiled(*leaves, *constants)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, leaves, draw_upstream(outputs))
    assert counter.frame_count == 1, f"{name} compiled {counter.frame_count} times"
    print(name, "compiled once")


@each_operation
def test_a_new_number_of_rows_does_not_recompile(name):
    if not HAS_GPU and name != "linear_cross_entropy":
        pytest.skip("needs a GPU: the interpreter cannot be traced")
    compile_for_new_rows(name, (300, 500, 257, 3000) if HAS_GPU else (12, 40, 7, 100))


@pytest.mark.skipif(HAS_GPU, reason="test_a_new_number_of_rows_does_not_recompile has the kernels themselves")
def test_references_do_not_recompile_for_new_rows():
    code = "[test_kernels.compile_for_new_rows(name, (300, 500, 257)) for name in test_kernels.OPERATIONS]"
    assert in_another_process(code, TRITON_INTERPRET="0").count("compiled once") == len(OPERATIONS)


@needs_gpu
@each_operation
def test_a_captured_cuda_graph_replays_on_new_inputs(name):
    operation = OPERATIONS[name]
    inputs, constants = operation.inputs(33, 70, FP32)
    inputs = [x.contiguous() for x in inputs]
    upstream = draw_upstream(run(operation.oracle, inputs, constants)[: -len(inputs)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(operation.function, inputs, constants, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(operation.function, inputs, constants, upstream)
    new_inputs, new_constants = operation.inputs(33, 70, FP32)
    for old, new in zip((*inputs, *constants), (*new_inputs, *new_constants), strict=True):
        old.copy_(new)
    graph.replay()
    assert_same(captured, run(operation.function, inputs, constants, upstream), f"{name} replayed:")


@needs_gpu
@each_operation
def test_forward_and_backward_never_wait_for_the_gpu(name):
    inputs, constants = OPERATIONS[name].inputs(33, 70, FP32)
    upstream = draw_upstream(run(OPERATIONS[name].function, inputs, constants)[: -len(inputs)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(OPERATIONS[name].function, inputs, constants, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------------------------------------------------
# Full size

FULL_SIZE = [
    *((name, 16384, 2048) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    *((name, 4096, 16384) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    *((name, 1000, 65536) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
    *((name, 8192, 14336) for name in ("swiglu", "geglu_tanh", "geglu_none")),
]


@full_size
@pytest.mark.parametrize("name, rows, width", FULL_SIZE)
def test_full_size_matches_float64(name, rows, width):
    assert_matches_float64(OPERATIONS[name], *OPERATIONS[name].inputs(rows, width, BF16))


@full_size
@pytest.mark.parametrize("heads, kv_heads, half", [(32, 8, 32), (32, 8, 64), (24, 8, 64)])
def test_rope_at_full_size_matches_float64(heads, kv_heads, half):
    assert_matches_float64(rope_of(heads), *rope_inputs(8192, half, BF16, heads, kv_heads))


@full_size
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [{}, loss_options], ids=["plain", "smoothed"])
def test_linear_cross_entropy_at_full_size_matches_float64(options, dtype):
    x, weight = randn(16384, 2048, dtype=dtype), randn(128256, 2048, dtype=dtype) / 45
    targets, scale = loss_targets(16384, 128256), torch.tensor(1024.0, device=DEVICE)
    functions = (partial(f, **options) for f in (linear_cross_entropy, linear_cross_entropy_oracle))
    operation = Operation(*functions)
    truth = truth_in_chunks(operation.oracle, x, weight, targets, scale)
    assert_matches_float64(operation, (x, weight), (targets,), [scale], truth)


def truth_in_chunks(oracle, x, weight, targets, scale):
    """The oracle in float64, 1,024 tokens at a time: all the logits would take 17 GB a copy."""
    weight = weight.double().requires_grad_()
    loss, dx, n_live = 0, [], (targets != -100).sum()
    for x_chunk, target_chunk in zip(x.split(1024), targets.split(1024), strict=True):
        x_chunk = x_chunk.double().requires_grad_()
        chunk = oracle(x_chunk, weight, target_chunk, reduction="sum") / n_live
        (chunk * scale).backward()
        loss += chunk.detach()
        dx.append(x_chunk.grad)
    return [loss, torch.cat(dx), weight.grad]


@full_size
@pytest.mark.parametrize("rows", [16384, 16896])  # the second is past 2³¹ logits
def test_cross_entropy_at_full_size_matches_float64(rows):
    logits, targets, upstream = 3 * randn(rows, 128256, dtype=BF16), loss_targets(rows, 128256), randn(rows)
    function, oracle = (
        partial(f, reduction="none", **loss_options) for f in (kernels.cross_entropy, cross_entropy_oracle)
    )
    ours = run(function, (logits,), (targets,), [upstream])
    for part in (slice(0, 512), slice(rows // 2, rows // 2 + 512), slice(rows - 512, rows)):
        arguments = [logits[part]], [targets[part]], [upstream[part]]
        eager, truth = run(oracle, *arguments), run(oracle, *map(widened, arguments))
        for what, out, exact, rounded in zip(("losses", "dlogits"), ours, truth, eager, strict=True):
            assert_close(what, out[part], exact, rounded)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def zeros(*shape, dtype=FP32, **options):
    return torch.zeros(shape, dtype=dtype, device=DEVICE, **options)


# fmt: off
LABELS = zeros(2, dtype=torch.int64)
TABLE, HEADS = zeros(2, 2), zeros(1, 2, 3, 4)
ERRORS = [
    ("rms_norm", (zeros(2, 4), zeros(3)), {}, r"weight has shape (3,), expected (4,) for x (2, 4)"),
    ("rms_norm", (zeros(1, 65537), zeros(65537)), {}, r"rows of 65537 elements: 1 to 65,536 are supported"),
    ("add_rms_norm", (zeros(2, 4), zeros(2, 4), zeros(5)), {}, r"weight has shape (5,), expected (4,) for x (2, 4)"),
    ("add_rms_norm", (zeros(2, 4), zeros(3, 4), zeros(4)), {},
     r"x is torch.float32 (2, 4) and residual torch.float32 (3, 4): they must agree"),
    ("add_rms_norm", (zeros(2, 4), zeros(2, 4, dtype=FP16), zeros(4)), {},
     r"x is torch.float32 (2, 4) and residual torch.float16 (2, 4): they must agree"),
    ("layer_norm", (zeros(2, 4), zeros(4), zeros(3)), {}, r"weight (4,) and bias (3,): expected both (4,)"),
    ("layer_norm", (zeros(1, 65540), zeros(65540), zeros(65540)), {}, r"rows of 65540 elements: 1 to 65,536"),
    ("swiglu", (zeros(2, 5),), {}, r"gate_up has 5 columns: gate and up side by side make an even number"),
    ("geglu", (zeros(2, 7),), {}, r"gate_up has 7 columns"),
    ("geglu", (zeros(2, 6),), {"approximate": "erf"}, r"approximate must be 'tanh' or 'none', got 'erf'"),
    ("rope", (zeros(1, 2, 3, 3), TABLE, TABLE, 1), {}, r"qkv (1, 2, 3, 3) with n_head 1: expected (B, T, H + 2K, D)"),
    ("rope", (zeros(1, 2, 4, 4), TABLE, TABLE, 1), {}, r"qkv (1, 2, 4, 4) with n_head 1: expected (B, T, H + 2K, D)"),
    ("rope", (HEADS, TABLE, TABLE, 3), {}, r"qkv (1, 2, 3, 4) with n_head 3: expected (B, T, H + 2K, D)"),
    ("rope", (HEADS, zeros(2, 3), zeros(2, 3), 1), {},
     r"cos (2, 3) and sin (2, 3): expected both (2, 2) or both (1, 2, 2)"),
    ("rope", (HEADS, TABLE, zeros(1, 2, 2), 1), {}, r"cos (2, 2) and sin (1, 2, 2): expected both"),
    ("rope", (HEADS, zeros(2, 2, requires_grad=True), TABLE, 1), {}, r"no gradient for cos and sin: detach them"),
    ("rms_norm_linear", (zeros(2, 4), zeros(2, 5), zeros(4), zeros(3, 4)), {}, r"residual torch.float32 (2, 5): they"),
    ("rms_norm_linear", (zeros(2, 4), None, zeros(4), zeros(3, 5)), {},
     r"weight torch.float32 (3, 5): expected torch.float32 (outputs, 4)"),
    ("swiglu_mlp", (zeros(2, 4), zeros(2, 4), zeros(4), zeros(6, 4, dtype=FP16), zeros(4, 3)), {},
     r"gate_up_weight torch.float16 (6, 4): expected torch.float32 (outputs, 4)"),
    ("swiglu_mlp", (zeros(2, 4), zeros(2, 4), zeros(4), zeros(6, 4), zeros(4, 6)), {},
     r"down_weight torch.float32 (4, 6): expected torch.float32 (outputs, 3)"),
    ("swiglu_mlp", (zeros(2, 4), zeros(2, 4), zeros(4), zeros(7, 4), zeros(4, 3)), {}, r"gate_up_weight has 7 rows"),
    ("swiglu_mlp", (zeros(2, 4), zeros(2, 4), zeros(4), zeros(6, 4), zeros(4, 3)), {"chunks": 2},
     r"chunks is 2: at least 1, and 1 where gate_up is kept whole"),
    ("adamw", (zeros(4, 3).T, *[zeros(3, 4)] * 4, zeros(4), 0.9, 0.95, 1e-8, 0.0), {},
     r"parameter is torch.float32 (3, 4) with strides (1, 3), expected (3, 4), contiguous"),
    ("adamw", (zeros(4), zeros(3), zeros(4), zeros(4), zeros(4), zeros(4), 0.9, 0.95, 1e-8, 0.0), {},
     r"grad is torch.float32 (3,) with strides (1,), expected (4,), contiguous"),
    ("adamw", (zeros(4), zeros(4), zeros(4, dtype=torch.int16), zeros(4), zeros(4), zeros(4), 0.9, 0.95, 1e-8, 0.0), {},
     "w is torch.int16"),
    ("adamw", (zeros(4), zeros(4), zeros(4, dtype=FP16), zeros(4), zeros(4), zeros(4), 0.9, 0.95, 1e-8, 0.0), {},
     r"w is torch.float16 (4,) with strides (1,), expected (4,), contiguous, float32"),
    ("adamw", (*[zeros(4)] * 5, zeros(8)[::2], 0.9, 0.95, 1e-8, 0.0), {},
     r"step_scalars is torch.float32 (4,) with strides (2,): expected float32 (4,), contiguous"),
    ("cross_entropy", (zeros(2, 4), LABELS), {"z_loss": float("nan")}, r"z_loss nan must not be negative"),
    ("cross_entropy", (zeros(2, 4), zeros(3)), {}, r"targets (3,) do not fit logits (2, 4)"),
    ("cross_entropy", (zeros(2, 4), zeros(2)), {}, r"targets (2,) torch.float32: expected 2 integers, one a row"),
    ("cross_entropy", (zeros(2, 4), LABELS), {"label_smoothing": 1.5}, r"label_smoothing 1.5 must lie in [0, 1]"),
    ("cross_entropy", (zeros(2, 4), LABELS), {"reduction": "max"},
     r"reduction must be one of mean, sum, none; got 'max'"),
    ("linear_cross_entropy", (zeros(2, 4), zeros(9, 4), LABELS), {"reduction": "none"},
     r"reduction must be one of mean, sum; got 'none'"),
    ("linear_cross_entropy", (zeros(2, 4), zeros(9, 4), LABELS), {"z_loss": -1.0}, r"z_loss -1.0 must not be negative"),
    ("linear_cross_entropy", (zeros(2, 4, dtype=FP16), zeros(9, 4, dtype=FP16), LABELS), {"fp32_dweight": False},
     r"fp32_dweight=False does not work in float16"),
    ("linear_cross_entropy", (zeros(2, 4), zeros(9, 4), LABELS), {"chunk_tokens": 0},
     r"chunk_tokens must be at least 1, got 0"),
    ("linear_cross_entropy", (zeros(2, 4), zeros(9, 5), LABELS), {},
     r"x torch.float32 (2, 4) and weight torch.float32 (9, 5): expected (N, C) and (V, C) of one dtype"),
    ("linear_cross_entropy", (zeros(2, 4), zeros(9, 4, dtype=FP16), LABELS), {}, r"and weight torch.float16 (9, 4)"),
    ("linear_cross_entropy", (zeros(1, 2, 4), zeros(9, 4), LABELS), {}, r"x torch.float32 (1, 2, 4) and weight"),
    ("linear_cross_entropy", (zeros(2, 4), zeros(9, 4), LABELS[None]), {}, r"targets (1, 2): expected (2,)"),
    ("linear_cross_entropy", (zeros(3, 4), zeros(9, 4), LABELS), {}, r"targets (2,) torch.int64: expected 3 integers"),
]
# fmt: on


@pytest.mark.parametrize("name", ["rms_norm_linear", "swiglu_mlp", "linear_cross_entropy"])
def test_a_matmul_under_autocast_is_refused(name):
    inputs, constants = OPERATIONS[name].inputs(3, 8, FP32)
    with torch.autocast(DEVICE, BF16), pytest.raises(ValueError, match="not run under torch.autocast: cast"):
        OPERATIONS[name].function(*inputs, *constants)


@pytest.mark.parametrize("name", ["rms_norm_linear", "swiglu_mlp", "swiglu_mlp_in_chunks"])
def test_without_a_residual_x_is_the_sum(name):
    (x, residual, *weights), _ = OPERATIONS[name].inputs(5, 8, FP64)
    truth = run(OPERATIONS[name].oracle, (x, torch.zeros_like(x), *weights))
    alone = partial(lambda x, *weights, op: op(x, None, *weights), op=OPERATIONS[name].function)
    upstream = draw_upstream(truth[:2])
    truth = run(OPERATIONS[name].oracle, (x, torch.zeros_like(x), *weights), upstream=upstream)
    del truth[3]  # the gradient of the zeros
    for found, true in zip(run(alone, (x, *weights), upstream=upstream), truth, strict=True):
        assert (found - true).abs().max() < 1e-12 * true.abs().max()


@pytest.mark.parametrize("name, arguments, options, message", ERRORS, ids=[error[-1] for error in ERRORS])
def test_a_mistake_is_a_value_error_that_says_what_was_found(name, arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        {"rms_norm_linear": rms_norm_linear, "swiglu_mlp": swiglu_mlp}.get(name, getattr(kernels, name))(
            *arguments, **options
        )
