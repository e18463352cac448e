"""The kernels against float64, and under conditions that break kernels.

    pytest test_kernels.py tests/test_kernels_*.py                          no GPU: in Triton's interpreter, minutes
    pytest test_kernels.py tests/test_kernels_*.py -n 4 --dist loadgroup    on a GPU: natively, and again at full size

Each test here runs for every operation in one table; tests/test_kernels_*.py test what only some of them promise. A
result must pass two checks. Its relative error ‖out − truth‖ / ‖truth‖, against PyTorch's own operators in float64 on
the same rounded inputs, is at most 1.2 times that of the same operators in fp32 rounded once, plus one unit of
rounding. Its mean signed error is near zero: truncation passes the first check and fails this one.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # before anything imports Triton

from torch.utils.checkpoint import checkpoint

import kernels
from kernels import linear_cross_entropy, reference
from kernels.launch import INTERPRETED, use_triton

HAS_GPU = torch.cuda.is_available()
cross_entropy_file = sys.modules["kernels.cross_entropy"]  # the package's attribute of that name is the function
if INTERPRETED:
    cross_entropy_file.LOSS_WARPS = cross_entropy_file.GRADIENT_WARPS = 4  # the interpreter is slow on long rows
BLOCK = 512 * cross_entropy_file.GRADIENT_WARPS  # logits that a program of the loss handles at once
DEVICE = "cuda" if HAS_GPU else "cpu"
EPS = 3e-2  # not the default, so that one that is not passed on shows
WIDE = 2 * BLOCK + 4  # a row for which any loop over blocks takes at least three steps
FP16 = torch.float16
BF16 = torch.bfloat16
FP32 = torch.float32
FP64 = torch.float64
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
one_at_a_time = pytest.mark.xdist_group("full size")  # tests that take many GB: the workers share one GPU


def full_size(test):
    """For inputs as long as real ones: PyTorch's own functions take tens of GB for them."""
    return needs_gpu(one_at_a_time(test))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on small tensors several threads only wait for each other


# ---------------------------------------------------------------------------------------------------------------------
# What is tested: each function, the same in PyTorch's own operators, and its inputs


def randn(*shape, dtype=FP32):
    return torch.randn(shape, dtype=FP64 if dtype == FP64 else FP32, device=DEVICE).to(dtype)


def wide(x):
    return x if x.dtype == FP64 else x.float()


def rms_norm_oracle(x, weight):
    return F.rms_norm(wide(x), weight.shape, weight.to(wide(x).dtype), EPS).to(x.dtype)


def add_rms_norm_oracle(x, residual, weight):
    return rms_norm_oracle(x + residual, weight), x + residual


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


def cross_entropy_oracle(logits, targets):
    return F.cross_entropy(wide(logits), targets, reduction="sum") / (targets != -100).sum().clamp(min=1)


class Given:
    """A projection whose weight need not be a parameter. Unlike a module, it can be created in compiled code."""

    def __init__(self, weight):
        self.weight = weight

    float8_input = False
    check = kernels.Linear.check
    reference = kernels.Linear.reference
    tensors = kernels.Linear.tensors
    project = staticmethod(kernels.Linear.project)
    share = staticmethod(kernels.Linear.share)
    input_gradient = staticmethod(kernels.Linear.input_gradient)
    round_weight = staticmethod(kernels.Linear.round_weight)
    weight_gradients = staticmethod(kernels.Linear.weight_gradients)


class Norm(NamedTuple):
    """What the fused functions read of a norm."""

    weight: torch.Tensor
    eps: float = EPS


def add_norm_linear(x, delta, norm_weight, weight, eps=EPS, ops=kernels):
    return ops.add_norm_linear(x, delta, Norm(norm_weight, eps), Given(weight))


def add_norm_mlp(x, delta, norm_weight, gate_up_weight, down_weight, eps=EPS, ops=kernels, **options):
    return ops.add_norm_mlp(x, delta, Norm(norm_weight, eps), Given(gate_up_weight), Given(down_weight), **options)


def add_norm_linear_oracle(x, residual, norm_weight, weight):
    return rms_norm_oracle(x + residual, norm_weight) @ weight.T, x + residual


def add_norm_mlp_oracle(x, residual, norm_weight, gate_up_weight, down_weight, activation=F.silu):
    gate_up = rms_norm_oracle(x + residual, norm_weight) @ gate_up_weight.T
    return glu_oracle(gate_up, activation) @ down_weight.T, x + residual


def linear_cross_entropy_oracle(x, weight, targets):
    return cross_entropy_oracle(x @ weight.T, targets)


def rope_inputs(rows, width, dtype, heads=6, kv_heads=2):
    """Two sequences of rows tokens, q, k and v in one packed projection, cos and sin fp32."""
    half = min(width, 64)
    qkv = randn(2, rows, heads + 2 * kv_heads, 2 * half, dtype=dtype)
    angles = torch.rand(rows, half, dtype=FP64 if dtype == FP64 else FP32, device=DEVICE) * 100
    return (qkv,), (angles.cos(), angles.sin())


def rope_of(n_head):
    return Operation(partial(kernels.rope, n_head=n_head), partial(rope_oracle, n_head=n_head), rope_inputs)


def half_block_inputs(n, c, dtype, *shapes):
    """x, residual and norm weight for n rows of c, and matrices that preserve the size of what they multiply."""
    matrices = [randn(*shape, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]
    return (randn(n, c, dtype=dtype), randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype), *matrices), ()


def loss_targets(rows, n_vocab):
    targets = torch.randint(n_vocab, (rows,), device=DEVICE)
    targets[:1] = n_vocab - 1
    targets[1::3] = -100
    return targets


class Operation(NamedTuple):
    function: partial  # even without options: tests read its keywords and its func, to find the reference of that name
    oracle: Callable
    inputs: Callable | None = None  # (rows, width, dtype) -> differentiable tensors, constants
    # The chunked loss rounds dlogits, their product with the head, and that times the scale; dW only once. Rounding few
    # mantissas times one factor does not average out: then it is 1.
    bias_of_dx: float = 0.25


def documents(*rows, n_time):
    """starts (B, T) of rows of documents, each given by its documents' first positions (0 is implied)."""
    time = torch.arange(n_time, device=DEVICE)
    firsts = [torch.tensor([0, *row], device=DEVICE) for row in rows]
    return torch.stack([first[torch.searchsorted(first, time, right=True) - 1] for first in firsts])


def attention_oracle(q, k, v, starts=None):
    group = q.shape[2] // k.shape[2]
    time = torch.arange(q.shape[1], device=q.device)
    k, v = (wide(x).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", wide(q), k) / q.shape[3] ** 0.5
    hidden = time > time[:, None]
    if starts is not None:
        hidden = hidden | (time < starts[:, None, :, None])
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, v).to(q.dtype)


def attention_inputs(rows, width, dtype, starts=False):
    """q, k and v of two sequences, as views of one packed projection; documents begin in the middle of the second."""
    head_dim = next(size for size in (16, 32, 64, 128) if size >= min(width, 128))
    qkv = randn(2, rows, 4, head_dim, dtype=dtype).split([2, 1, 1], dim=2)
    return qkv, (documents((), (rows // 2, rows // 2 + 1), n_time=rows),) if starts else ()


def gate_up_inputs(rows, width, dtype):
    return (2 * randn(rows, 2 * width, dtype=dtype),), ()


# fmt: off
OPERATIONS = {
    "rms_norm": Operation(
        partial(kernels.rms_norm, eps=EPS), rms_norm_oracle,
        lambda n, c, dtype: ((randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype)), ())),
    "add_rms_norm": Operation(
        partial(kernels.add_rms_norm, eps=EPS), add_rms_norm_oracle,
        lambda n, c, dtype: ((randn(n, c, dtype=dtype), randn(n, c, dtype=dtype), 1 + randn(c, dtype=dtype)), ())),
    "rope": rope_of(n_head=6),
    "add_norm_linear": Operation(
        partial(add_norm_linear, eps=EPS), add_norm_linear_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (24, c))),
    "add_norm_mlp": Operation(
        partial(add_norm_mlp, eps=EPS), add_norm_mlp_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (48, c), (20, 24))),
    "add_norm_mlp_recomputed": Operation(
        partial(add_norm_mlp, eps=EPS, save_gate_up=False), add_norm_mlp_oracle,
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (48, c), (20, 24))),
    "add_norm_mlp_in_chunks": Operation(
        partial(add_norm_mlp, eps=EPS, save_gate_up=False, chunks=3, activation="gelu_tanh"),
        partial(add_norm_mlp_oracle, activation=partial(F.gelu, approximate="tanh")),
        lambda n, c, dtype: half_block_inputs(n, c, dtype, (48, c), (20, 24))),
    "swiglu": Operation(partial(kernels.glu), partial(glu_oracle, activation=F.silu), gate_up_inputs),
    "geglu": Operation(
        partial(kernels.glu, activation="gelu_tanh"),
        partial(glu_oracle, activation=partial(F.gelu, approximate="tanh")), gate_up_inputs),
    "cross_entropy": Operation(
        partial(kernels.cross_entropy), cross_entropy_oracle,
        lambda n, v, dtype: ((3 * randn(n, v, dtype=dtype),), (loss_targets(n, v),))),
    "linear_cross_entropy": Operation(
        partial(linear_cross_entropy, chunk_tokens=5), linear_cross_entropy_oracle,
        lambda n, v, dtype: ((randn(n, 24, dtype=dtype), randn(v, 24, dtype=dtype)), (loss_targets(n, v),)),
        bias_of_dx=1),
    "flash_attention": Operation(partial(kernels.flash_attention), attention_oracle, attention_inputs),
    "flash_attention_of_documents": Operation(
        partial(kernels.flash_attention), attention_oracle, partial(attention_inputs, starts=True)),
}
# fmt: on
MATMULS = tuple(name for name in OPERATIONS if name.startswith(("add_norm_", "linear_cross")))
ROW_OPERATIONS = [name for name in OPERATIONS if name not in ("cross_entropy", *MATMULS) and "attention" not in name]
each_operation = pytest.mark.parametrize("name", OPERATIONS)


# ---------------------------------------------------------------------------------------------------------------------
# How it is compared


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def run(function, inputs, constants=(), upstream=None):
    """The outputs, then the gradients of the inputs, for random gradients of the outputs (drawn first if not given)."""
    leaves = [x.detach().requires_grad_() for x in inputs]  # detach keeps the strides
    outputs = as_tuple(function(*leaves, *constants))
    if upstream is None:
        upstream = draw_upstream(outputs)
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def draw_upstream(outputs):
    return [randn(*y.shape, dtype=y.dtype) for y in outputs]


def arguments_of(name, rows=6, width=20, dtype=FP32):
    """The arguments of run: an operation's function, its inputs, constants, and gradients of its outputs."""
    function, oracle, make, _ = OPERATIONS[name]
    inputs, constants = make(rows, width, dtype)
    return function, inputs, constants, draw_upstream(as_tuple(oracle(*inputs, *constants)))


def widened(tensors):
    return [x.double() if x.is_floating_point() else x for x in tensors]


def relative_error(out, truth):
    return ((out.double() - truth).norm() / truth.norm().clamp(min=1e-300)).item()


def rounding(dtype):
    """One unit of rounding. fp32 and fp64 are summed in their own precision, where a few units depend on the order.

    The interpreter truncates bf16 where the hardware rounds.
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
    if truth.abs().max() < 1e-200:  # 1 / sqrt(EPS) amplifies rounding
        assert difference.abs().max() <= unit / EPS**0.5, f"{numbers}, expected zeros"
        return
    error = relative_error(out, truth)
    limit = 1.2 * relative_error(eager, truth) + unit
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
        assert_close(which, out, exact, rounded, operation.bias_of_dx if i == len(upstream) else 0.25)
    return ours


def assert_same(ours, expected, what):
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if not torch.equal(a, b):
            difference = (a.double() - b.double()).abs()
            numbers = f"max difference {difference.max():.3e}, mean difference {difference.mean():.3e}"
            raise AssertionError(f"{what}: result {i} of (outputs, gradients) differs: {numbers}")


# ---------------------------------------------------------------------------------------------------------------------
# Right numbers


def test_these_tests_run_the_triton_kernels_and_not_the_references():
    assert use_triton(torch.empty(1, device=DEVICE)), "kernels were imported before TRITON_INTERPRET was set"
    assert not use_triton(torch.empty(1, device="meta"))


def test_without_triton_the_references_train_with_every_way_to_checkpoint():
    """As on macOS, where there is no Triton."""
    code = """
import sys; sys.modules["triton"] = None
import torch, model
from runtime.generate import generate
from optimizers import adamw, on_device
for mode in ("none", "selective", "full"):
    sys.modules["kernels.linear_cross_entropy"].PLAIN_LOGITS = 100 if mode == "full" else 1000  # in chunks; at once
    how = model.Execution(attention="triton", checkpointing=mode)
    llama = model.Llama(model.LlamaConfig(1, 4, 2, 64, 48, 50, 8), how); llama.init_weights(0)
    driver = on_device.OnDevice(llama, adamw.AdamW(), grad_clip=1.0)
    tokens = torch.arange(8)[None]
    before = llama(tokens, tokens)
    before.backward(); driver.step(0.01)
    assert llama(tokens, tokens) < before
list(generate(llama, [[0, 1]], 3))
print("trained")"""
    assert in_another_process(code) == "trained\n"


def in_another_process(code, **environment):
    """Its stdout; fails if it crashes."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode} after {done.stdout[-300:]!r}\n{done.stderr[-3000:]}"
    return done.stdout


# One row and one column; a multiple of every tile; remainders; several tiles of rows, and of columns, a program.
SHAPES = [(5, 1, FP32), (1, 64, FP16), (6, 70, FP32), (6, 128, FP64), (33, 257, FP16), (5, WIDE, BF16)]


@each_operation
@pytest.mark.parametrize("rows, width, dtype", SHAPES, ids=lambda v: str(v).removeprefix("torch."))
def test_forward_and_every_gradient_match_float64(name, rows, width, dtype):
    assert_matches_float64(OPERATIONS[name], *OPERATIONS[name].inputs(rows, width, dtype))


@each_operation
def test_references_match_float64_too(name):
    ours = OPERATIONS[name].function
    options = {key: value for key, value in ours.keywords.items() if key != "chunk_tokens"}
    fallback = partial(getattr(reference, ours.func.__name__), **options)
    if ours.func in (add_norm_linear, add_norm_mlp):
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


def reversed_dimensions(x):
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def shifted(x):
    """Off the 16-byte boundaries that the copy engine needs."""
    return poisoned(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@each_operation
def test_strides_of_inputs_and_gradients_change_nothing(name):
    function, inputs, constants, upstream = arguments_of(name)
    if name == "linear_cross_entropy":  # small integers, so that no order of a matmul's sum rounds
        inputs = [x.round() for x in inputs]
    packed = run(function, [x.contiguous() for x in inputs], constants, upstream)
    for restride in (spread_rows, reversed_dimensions, shifted):
        ours = run(
            function,
            [restride(x) for x in inputs],
            [restride(t) if t.is_floating_point() else restride(t.double()).to(t.dtype) for t in constants],
            [restride(g) if g.ndim else g for g in upstream],
        )
        # Natively, a strided row lies differently in registers: its sum has another order. Attention packs its inputs.
        if name in MATMULS or (HAS_GPU and "attention" not in name):
            for a, b in zip(ours, packed, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert_same(ours, packed, restride.__name__)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@each_operation
def test_zero_rows_give_empty_results_and_zero_weight_gradients(name, dtype, monkeypatch):
    empty = torch.empty
    inputs, constants = OPERATIONS[name].inputs(4, 20, dtype)
    n_weights = {"linear_cross_entropy": 1, "add_norm_linear": 2}.get(name, 3 if name in MATMULS else 0)
    inputs = [x[:0] if x.ndim > 1 and i < len(inputs) - n_weights else x for i, x in enumerate(inputs)]
    constants = [t if name == "rope" else t[:0] for t in constants]
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(77))  # never by luck 0
    results = run(OPERATIONS[name].function, inputs, constants)
    expected = OPERATIONS[name].oracle(*inputs, *constants)
    for result, like in zip(results, as_tuple(expected), strict=False):
        assert result.shape == like.shape
    for result in results:
        assert (result == 0).all(), f"{name} of no rows holds {result.abs().max()}"


@pytest.mark.parametrize("name", ROW_OPERATIONS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_a_row_with_nan_or_inf_changes_no_other_row(name, poison):
    function, inputs, constants, upstream = arguments_of(name)
    clean = run(function, inputs, constants, upstream)
    rows = 1 if name == "rope" else 0
    dirty_inputs = [x.clone() for x in inputs]
    dirty_inputs[0].select(rows, 2)[..., 3] = poison
    dirty = run(function, dirty_inputs, constants, upstream)
    kept = torch.tensor([i for i in range(6) if i != 2], device=DEVICE)
    for i, (a, b) in enumerate(zip(dirty, clean, strict=True)):
        if a.ndim > 1:
            assert torch.equal(a.index_select(rows, kept), b.index_select(rows, kept)), f"{name}: result {i} spread"
    assert not dirty[0].select(rows, 2).isfinite().all(), f"{name} hid a {poison}"


# ---------------------------------------------------------------------------------------------------------------------
# What autograd and the machine may require


@each_operation
def test_nothing_is_written_outside_the_results(name, monkeypatch):
    """Places a guard behind every allocated buffer."""
    empty = torch.empty
    guards = []
    arguments = arguments_of(name, 37 if "attention" in name else 5, 70)

    def guarded_empty(*shape, dtype=FP32, device=None):
        shape = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        memory = empty(shape.numel() + 8192, dtype=dtype, device=device).fill_(77)
        guards.append(memory[shape.numel() :])
        return memory[: shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded_empty(x.shape, dtype=x.dtype, device=x.device))
    run(*arguments)
    monkeypatch.undo()
    assert len(guards) >= (6 if "attention" in name else 1), "the kernels allocate in another way now: guard that"
    written = [bool((guard != 77).any()) for guard in guards]
    assert not any(written), f"{name} wrote past the end of a buffer: {written}"


@each_operation
def test_runs_repeat_bit_for_bit_and_so_does_activation_checkpointing(name):
    function, *arguments = arguments_of(name, *((3000, 1000) if HAS_GPU else ()))
    first = run(function, *arguments)
    for _ in range(4 if HAS_GPU else 1):
        assert_same(run(function, *arguments), first, name)
    assert_same(run(partial(checkpoint, function, use_reentrant=False), *arguments), first, f"{name} checkpointed:")


@each_operation
def test_a_second_derivative_is_refused(name):
    inputs, constants = OPERATIONS[name].inputs(4, 6, FP32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    total = sum(y.sum() for y in as_tuple(OPERATIONS[name].function(*leaves, *constants)))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, leaves, create_graph=True)


@each_operation
def test_backward_twice_gives_the_same_gradients_and_overwrites_nothing(name):
    function, inputs, constants, upstream = arguments_of(name)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = as_tuple(function(*leaves, *constants))
    kept = [x.detach().clone() for x in (*outputs, *upstream)]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    first_kept = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert_same(second, first_kept, "the second backward:")
    assert_same([*first, *leaves, *outputs, *upstream], [*first_kept, *inputs, *kept], "something was overwritten:")


@each_operation
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(name):
    function, inputs, constants, upstream = arguments_of(name)
    full = run(function, inputs, constants, upstream)[len(upstream) :]
    each = range(len(inputs))
    all_but_one = {tuple(i for i in each if i != other) for other in each}
    for needed in (all_but_one | {(0,)}) - {()}:
        leaves = [x.detach().clone().requires_grad_(i in needed) for i, x in enumerate(inputs)]
        outputs = as_tuple(function(*leaves, *constants))
        live = [(y, g) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
        torch.autograd.backward(*zip(*live, strict=True))
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:
                assert_same([leaf.grad], [full[i]], f"gradient of input {i}, needed {needed}:")
            else:
                assert leaf.grad is None


@needs_gpu
@each_operation
def test_a_captured_cuda_graph_replays_on_new_inputs(name):
    function, inputs, constants, upstream = arguments_of(name, 33, 70)
    inputs = [x.contiguous() for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(function, inputs, constants, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(function, inputs, constants, upstream)
    new_inputs, new_constants = OPERATIONS[name].inputs(33, 70, FP32)
    for old, new in zip((*inputs, *constants), (*new_inputs, *new_constants), strict=True):
        old.copy_(new)
    graph.replay()
    assert_same(captured, run(function, inputs, constants, upstream), f"{name} replayed:")


@needs_gpu
@each_operation
def test_forward_and_backward_never_wait_for_the_gpu(name):
    arguments = arguments_of(name, 33, 70)
    run(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
