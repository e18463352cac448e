"""AdamW's moments in eight bits (kernels/adamw8bit.py). Where bitsandbytes is installed, its map is compared."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import reference
from kernels.adamw import merge_halves, split_halves
from kernels.c_library import build, c_library
from kernels.dynamic_map import (
    BLOCK,
    bounds,
    dequantize_blocks_reference,
    dynamic_map,
    quantization_tables,
    quantize_blocks,
    quantize_blocks_reference,
)
from test_kernels import full_size
from tests.runs import ROOT

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8
adamw8bit_file = sys.modules["kernels.adamw8bit"]  # the package's attribute of that name is the function
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, on inf and NaN


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_same_bits(ours, theirs, what=""):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} {i}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        differ = (a.reshape(-1).view(UINT8) != b.reshape(-1).view(UINT8)).sum()
        assert not differ, f"{what} {i}: {differ} of {a.nbytes} bytes differ"


def bitsandbytes_functional():
    return pytest.importorskip("bitsandbytes.functional")


# ---------------------------------------------------------------------------------------------------------------------
# The dynamic map


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_has_256_values_in_seven_decades(signed):
    values = dynamic_map(signed)
    assert len(values.unique()) == 256 and (values.diff() > 0).all() and values[-1] == 1
    positive = values[values > 0][:-1].double()
    first = 1 if signed else 2  # values in the lowest decade, twice as many in each above it
    expected = [
        10.0 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / (first << i)) for i in range(7) for k in range(first << i)
    ]  # fmt: skip
    torch.testing.assert_close(positive, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    if signed:
        assert torch.equal(values[:127], -values[128:255].flip(0)) and values[127] == 0
    else:
        assert values[0] == 0


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_is_that_of_bitsandbytes(signed):
    assert torch.equal(dynamic_map(signed), bitsandbytes_functional().create_dynamic_map(signed=signed))


@triton.jit
def _codes_kernel(x_ptr, table_ptr, codes_ptr, absmax_ptr, BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * 256 + tl.arange(0, 256)[None, :]
    codes, absmax = quantize_blocks(tl.load(x_ptr + i), table_ptr)
    tl.store(codes_ptr + i, codes)
    tl.store(absmax_ptr + block, absmax)


def quantize_by_kernel(x, signed):
    x = x.view(-1, BLOCK)
    codes, absmax = torch.full(x.shape, -1, dtype=torch.int32, device=DEVICE), x.new_empty(len(x))
    table = quantization_tables(signed, x.device)[1]
    _codes_kernel[(triton.cdiv(len(x), 4),)](x, table, codes, absmax, BLOCKS=4)
    assert codes.min() >= 0 and codes.max() <= 255
    return codes.to(UINT8), absmax


@pytest.mark.parametrize("signed", [True, False])
def test_code_table_finds_what_a_search_finds_at_every_bound(signed):
    """A block whose absmax is 1 is divided by 1: what is next to a bound, and on it, stays there."""
    edges = bounds(dynamic_map(signed)).view(torch.int32)
    x = torch.cat([(edges + ulps).view(FP32) for ulps in range(-2, 3)])
    x = torch.cat([x, torch.rand(4000) ** 12, torch.tensor([0.0, -0.0, 1e-45, 1e-30])])
    x = torch.cat([x, -x]) if signed else x.abs()
    blocks = -(-len(x) // (4 * (BLOCK - 1))) * 4
    x = torch.nn.functional.pad(x, (0, blocks * (BLOCK - 1) - len(x))).view(blocks, BLOCK - 1)
    x = torch.cat([torch.ones(blocks, 1), x], dim=1).to(DEVICE)
    codes, absmax = quantize_by_kernel(x, signed)
    expected = torch.bucketize(x, bounds(dynamic_map(signed, DEVICE)), out_int32=True).to(UINT8)
    assert (absmax == 1).all() and torch.equal(codes, expected), f"{(codes != expected).sum()} codes differ"
    assert_same_bits(quantize_blocks_reference(x, signed), (expected, absmax))


@pytest.mark.parametrize("signed, error", [(True, 0.012), (False, 0.0075)])
def test_a_round_trip_through_eight_bits_costs_about_a_percent(signed, error):
    x = torch.randn(2**16) if signed else torch.randn(2**16).square()
    codes, absmax = quantize_blocks_reference(x, signed)
    back = dequantize_blocks_reference(codes, absmax, signed)
    assert (back - x).norm() / x.norm() < error
    values = dynamic_map(signed)
    gap = values.diff().max() / 2 * absmax.repeat_interleave(BLOCK) * (1 + 1e-6)
    gap = torch.where(x < 0, gap + 0.0071 * absmax.repeat_interleave(BLOCK), gap)  # no −1: −0.993 is the lowest
    assert ((back - x).abs() <= gap).all()
    assert abs((back - x).mean() / x.abs().mean()) < 1e-3, "the codes are not the nearest: a mean error"


@pytest.mark.parametrize("signed", [True, False])
def test_nan_inf_zeros_and_denormals_stay_in_their_block(signed):
    x = torch.randn(8, BLOCK, device=DEVICE).abs()
    x[0, 3], x[1, 5], x[2], x[3], x[4] = float("nan"), float("inf"), 0.0, 1e-42, 3e38
    by_kernel, by_reference = quantize_by_kernel(x, signed), quantize_blocks_reference(x, signed)
    back = [dequantize_blocks_reference(*each, signed) for each in (by_kernel, by_reference)]
    for each in back:
        assert each[0].isnan().all() and not each[1].isfinite().any()
        assert (each[2] == 0).all() and each[3].abs().max() <= 1e-42
        torch.testing.assert_close(each[4:], x[4:], rtol=0.05, atol=0.01)
    assert_same_bits([x[2:] for x in by_kernel], [x[2:] for x in by_reference])


def test_a_last_block_may_be_short():
    x = torch.randn(700)
    codes, absmax = quantize_blocks_reference(x, True)
    assert codes.shape == x.shape and absmax.shape == (3,) and absmax[2] == x[512:].abs().max()
    torch.testing.assert_close(dequantize_blocks_reference(codes, absmax, True), x, rtol=0.08, atol=0.01)


# ---------------------------------------------------------------------------------------------------------------------
# 8-bit AdamW

OPTIONS = 0.9, 0.95, 1e-8, 0.1


def step_scalars(scale, lr=0.01, t=3):
    return torch.tensor([scale, lr, 1 / (1 - 0.9**t), (1 - 0.95**t) ** -0.5], device=DEVICE)


def moments(n):
    """Codes and absmax of m and v before the first step, as torch.zeros makes them."""
    codes = [torch.zeros(n, dtype=UINT8, device=DEVICE) for _ in range(2)]
    return *codes, *(torch.zeros(-(-n // BLOCK), device=DEVICE) for _ in range(2))


def on_cpu(parameter, grad, w, *rest):
    """adamw8bit_on_cpu with the signature of adamw8bit, over the gradient's own memory where it may be."""
    *states, scalars, beta1, beta2, eps, weight_decay = rest
    tensors = [x.cpu() for x in (parameter, grad, w, *states)]
    tensors[0] = tensors[2] if parameter is w else tensors[1] if grad.dtype == parameter.dtype else tensors[0]
    adamw8bit_file.adamw8bit_on_cpu(*tensors, *scalars[:2].tolist(), 3, beta1, beta2, eps, weight_decay)
    for x, new in zip((parameter, w, *states), (tensors[0], *tensors[2:]), strict=True):
        x.copy_(new)


def without_compiler(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw8bit_file, "c_library", lambda *name: None)
        patch.setattr(adamw8bit_file, "CPU_CHUNK", 4 * BLOCK)
        on_cpu(*arguments)


ADAMWS = {"kernel": kernels.adamw8bit, "C": on_cpu, "pieces": without_compiler}
each_adamw = pytest.mark.parametrize("adamw", ADAMWS.values(), ids=ADAMWS)


def wide_grad(n, dtype=FP32):
    """Magnitudes over five decades, as within a block of a real model."""
    return (torch.randn(n) * 10 ** (-5 * torch.rand(n))).to(DEVICE, dtype)


@each_adamw
@pytest.mark.parametrize("dtype, of_grad", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("n", [3001, 256, 5])
def test_adamw8bit_has_the_codes_of_the_reference(adamw, dtype, of_grad, n):
    if adamw is on_cpu and c_library("adamw8bit.c") is None:
        pytest.skip("no C compiler with OpenMP here")
    w = torch.randn(n, device=DEVICE)
    ours = [w if dtype == FP32 else w.to(dtype), w, *moments(n)]
    theirs = [w.clone().to(dtype), w.clone(), *moments(n)]
    theirs[0] = theirs[1] if dtype == FP32 else theirs[0]
    for step in range(4):
        grad = wide_grad(n, of_grad)
        adamw(ours[0], grad.clone(), *ours[1:], step_scalars(0.5), *OPTIONS)
        reference.adamw8bit(theirs[0], grad, *theirs[1:], step_scalars(0.5), *OPTIONS)
        assert_same_bits(ours[2:], theirs[2:], f"step {step}, m, v, and their absmax:")
        torch.testing.assert_close(ours[1], theirs[1], rtol=2e-6, atol=1e-6)
    if dtype == BF16 and not HAS_GPU and adamw is kernels.adamw8bit:  # the interpreter cuts off
        torch.testing.assert_close(ours[0].float(), ours[1], rtol=2**-7, atol=0)
    else:
        assert torch.equal(ours[0], ours[1].to(dtype)), "the parameter is not the rounded w"


@pytest.mark.parametrize("adamw", [kernels.adamw8bit, reference.adamw8bit], ids=["kernel", "reference"])
def test_adamw8bit_in_halves_is_adamw8bit(adamw):
    n = 700
    w = torch.randn(n, device=DEVICE)
    parameter, low = torch.empty_like(w, dtype=BF16), torch.empty_like(w, dtype=torch.int16)
    split_halves(w, parameter, low)
    halves, whole = moments(n), moments(n)
    for t in range(1, 4):
        grad = wide_grad(n, BF16)
        adamw(parameter, grad, low, *halves, step_scalars(0.5, t=t), *OPTIONS)
        adamw(w, grad, w, *whole, step_scalars(0.5, t=t), *OPTIONS)
    assert_same_bits([merge_halves(parameter, low), *halves], [w, *whole])


def test_adamw8bit_steps_by_the_exact_moments_then_rounds_them():
    """Against float64: the step itself loses nothing to the codes, which round the moments to half a gap."""
    n = 1024
    w, (m, v, m_absmax, v_absmax) = torch.randn(n, device=DEVICE), moments(n)
    for x, absmax, signed in ((m, m_absmax, True), (v, v_absmax, False)):
        for to, new in zip((x, absmax), quantize_blocks_reference(wide_grad(n).abs(), signed), strict=True):
            to.copy_(new)
    grad, before = wide_grad(n), w.double()
    exact_m = dequantize_blocks_reference(m, m_absmax, True).double().lerp(grad.double(), 0.1)
    exact_v = dequantize_blocks_reference(v, v_absmax, False).double().lerp(grad.double().square(), 0.05)
    kernels.adamw8bit(w, grad, w, m, v, m_absmax, v_absmax, step_scalars(1.0), *OPTIONS)
    _, _, m_correction, sqrt_v_correction = step_scalars(1.0).double()
    step = exact_m * m_correction / (exact_v.sqrt() * sqrt_v_correction + 1e-8) + 0.1 * before
    torch.testing.assert_close(w.double(), before - 0.01 * step, rtol=2e-6, atol=1e-6)
    for codes, absmax, exact, signed in ((m, m_absmax, exact_m, True), (v, v_absmax, exact_v, False)):
        torch.testing.assert_close(absmax.double(), exact.view(-1, BLOCK).abs().amax(1), rtol=1e-6, atol=0)
        error = (dequantize_blocks_reference(codes, absmax, signed) - exact).abs().view(-1, BLOCK)
        assert (error <= 0.0072 * absmax[:, None]).all()


def quadratic(update, steps, decades=2, kept=1.0, n=1024, lr=0.01):
    """Minimises Σ h (w − target)² / 2 with noise, curvatures h of some decades in a block.

    update(w, grad, scalars). Returns the mean of h (w − target)² over that of h, and the longest step / lr.
    """
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(n, generator=generator)  # noqa: E731
    w, target, longest = draw().to(DEVICE), draw().to(DEVICE), 0.0
    h = (10 ** (-decades * torch.rand(n, generator=generator))).to(DEVICE)
    for t in range(1, steps + 1):
        keep = torch.rand(n, generator=generator) < kept
        grad = h * (w - target + draw().to(DEVICE)) * keep.to(DEVICE)
        before, rate = w.clone(), lr * (1.1 - t / steps)
        update(w, grad, step_scalars(1.0, rate, t))
        longest = max(longest, ((w - before).abs().max() / rate).item())
    return (h * (w - target).square()).mean().item() / h.mean().item(), longest


def in_32_bits(n=1024):
    m, v = torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    return lambda w, grad, scalars: reference.adamw(w, grad, w, m, v, scalars, 0.9, 0.95, 1e-8, 0.0)


def in_8_bits(adamw=reference.adamw8bit, n=1024):
    states = moments(n)
    return lambda w, grad, scalars: adamw(w, grad, w, *states, scalars, 0.9, 0.95, 1e-8, 0.0)


@pytest.mark.parametrize("adamw", [kernels.adamw8bit, reference.adamw8bit], ids=["kernel", "reference"])
def test_adamw8bit_follows_float32_adamw_for_200_steps(adamw):
    (exact, _), (ours, _) = quadratic(in_32_bits(), 200, lr=0.03), quadratic(in_8_bits(adamw), 200, lr=0.03)
    start, _ = quadratic(lambda *_: None, 1)
    assert exact < 0.1 * start, "the problem is not solved"
    assert abs(ours / exact - 1) < 0.1, f"{ours:.5f} in 8 bits, {exact:.5f} in float32, {start:.5f} at the start"


@pytest.mark.parametrize("decades, kept", [(4, 1.0), (3, 0.1)], ids=["wide", "sparse"])
def test_adamw8bit_never_divides_by_a_v_rounded_to_zero(decades, kept):
    """With codes to the nearest, v of small gradients becomes 0 and w jumps by 10,000 lr."""
    exact, _ = quadratic(in_32_bits(), 400, decades, kept)
    ours, longest = quadratic(in_8_bits(), 400, decades, kept)
    assert longest < 5, f"a step of {longest:.0f} lr"
    assert ours < 1.15 * exact, f"{ours:.4f} in 8 bits, {exact:.4f} in float32"


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("adamw", [kernels.adamw8bit, reference.adamw8bit], ids=["kernel", "reference"])
def test_adamw8bit_changes_nothing_where_the_scale_is_not_finite(adamw, scale):
    n = 700
    w, states = torch.randn(n, device=DEVICE), moments(n)
    adamw(w, wide_grad(n), w, *states, step_scalars(1.0), *OPTIONS)
    before = [x.clone() for x in (w, *states)]
    adamw(w, wide_grad(n), w, *states, step_scalars(scale), *OPTIONS)
    assert_same_bits((w, *states), before)


@pytest.mark.parametrize("adamw", [*ADAMWS.values(), reference.adamw8bit], ids=[*ADAMWS, "reference"])
def test_adamw8bit_keeps_a_nan_in_its_block(adamw):
    n = 3 * BLOCK
    w, states, grad = torch.randn(n, device=DEVICE), moments(n), wide_grad(n)
    grad[300] = float("nan")
    adamw(w, grad, w, *states, step_scalars(1.0), *OPTIONS)
    assert w.isnan().nonzero().tolist() == [[300]]
    assert states[2].isnan().tolist() == [False, True, False] == states[3].isnan().tolist()
    adamw(w, wide_grad(n), w, *states, step_scalars(1.0), *OPTIONS)
    assert w.view(3, -1).isnan().all(1).tolist() == [False, True, False] == w.view(3, -1).isnan().any(1).tolist()


def test_adamw8bit_refuses_what_does_not_fit():
    n = 700
    w, (m, v, m_absmax, v_absmax), scalars = torch.ones(n, device=DEVICE), moments(n), step_scalars(1.0)
    bf16, half = w.to(BF16), torch.zeros(n, dtype=torch.int16, device=DEVICE)
    for tensors, message in (
        ((w, w, w, m[:4], v, m_absmax, v_absmax), r"m is torch.uint8 \(4,\) .* expected torch.uint8 \(700,\)"),
        ((w, w, w, m, v.float(), m_absmax, v_absmax), r"v is torch.float32"),
        ((w, w, w, m, v, m_absmax[:2], v_absmax), r"m_absmax is torch.float32 \(2,\) .* expected torch.float32 \(3,\)"),
        ((w, w, half, m, v, m_absmax, v_absmax), r"w is torch.int16 .* expected torch.float32"),
        ((bf16, w.view(7, 100), half, m, v, m_absmax, v_absmax), r"grad is torch.float32 \(7, 100\)"),
        ((w, w, w, m.repeat(2)[::2], v, m_absmax, v_absmax), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.adamw8bit(*tensors, scalars, *OPTIONS)
    with pytest.raises(ValueError, match="step_scalars"):
        kernels.adamw8bit(w, w, w, m, v, m_absmax, v_absmax, scalars[:3], *OPTIONS)
    cpu = [x.cpu() for x in (bf16, w, half, m, v, m_absmax, v_absmax)]
    with pytest.raises(ValueError, match="w is torch.int16"):
        adamw8bit_file.adamw8bit_on_cpu(*cpu, 1.0, 0.1, 1, *OPTIONS)


def test_adamw8bit_says_that_its_c_file_was_not_built(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.__wrapped__("adamw8bit.c") is None
    assert "kernels/adamw8bit.c was not built" in capsys.readouterr().err


@full_size
def test_adamw8bit_past_2_to_the_31_elements():
    n = 2**31 + 1000
    grad = torch.ones(n, dtype=BF16, device=DEVICE)
    parameter, low = torch.ones_like(grad), torch.zeros(n, dtype=torch.int16, device=DEVICE)
    states = moments(n)
    kernels.adamw8bit(parameter, grad, low, *states, step_scalars(1.0, t=1), *OPTIONS)
    for x in (parameter, low, states[0], states[1]):
        assert (x[-1000:] == x[0]).all()
    assert parameter[0] < 1 and (states[2] == states[2][0]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Compiled for a GPU

COMPILE = """
import sys
from types import SimpleNamespace
import torch, triton
import kernels
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0,
                                                 get_current_target=lambda: target))
launch = triton.runtime.jit.JITFunction.run

def compile_only(kernel, *arguments, warmup, **options):
    compiled = launch(kernel, *arguments, warmup=True, **options)
    print(kernel.__name__, "fused" if "fma.rn.f32" in compiled.asm["ptx"] else "twice", compiled.metadata.shared)

triton.runtime.jit.JITFunction.run = compile_only
sys.modules["kernels.adamw8bit"].use_triton = lambda x: True
bf16, half = torch.ones(700, dtype=torch.bfloat16), torch.ones(700, dtype=torch.int16)
codes, absmax = torch.ones(700, dtype=torch.uint8), torch.ones(3)
kernels.adamw8bit(bf16, bf16, half, codes, codes, absmax, absmax, torch.ones(4), 0.9, 0.95, 1e-8, 0.1)
"""


def test_adamw8bit_for_a_gpu_rounds_a_product_before_it_adds_to_it():
    """Triton compiles for a GPU that is not here; the interpreter, which never fuses, could not tell."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("_adamw8bit_kernel twice"), done.stdout
