"""AdamW's kernels, their C and their references, in 32 and 8 bits; SGD with decay; the sum of the ranks' gradients."""

import sys

import pytest
import torch

import kernels
from kernels import reference
from kernels.adamw import merge_halves, split_halves
from kernels.dynamic_map import ABSMAX_BLOCK, dequantize_blocks_reference, quantize_blocks_reference
from test_kernels import BF16, DEVICE, FP16, FP32, HAS_GPU, assert_same, full_size, randn

adamw_file, adamw8bit_file = (sys.modules[f"kernels.{name}"] for name in ("adamw", "adamw8bit"))
OPTIONS = 0.9, 0.95, 1e-3, 0.1  # betas, eps, weight decay: none is the default
IN_8_BITS = kernels.adamw8bit, reference.adamw8bit
each_adamw = pytest.mark.parametrize(
    "adamw", [kernels.adamw, reference.adamw, *IN_8_BITS], ids=["kernel", "reference", "kernel8", "reference8"]
)


def step_scalars(scale, lr=0.1, t=3):
    return torch.tensor([scale, lr, 1 / (1 - 0.9**t), (1 - 0.95**t) ** -0.5], device=DEVICE)


def moments(n, adamw=kernels.adamw8bit):
    """m and v before the first step: fp32, or 8-bit codes followed by their absmax."""
    if adamw not in IN_8_BITS:
        return torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    codes = [torch.zeros(n, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    return *codes, *(torch.zeros(-(-n // ABSMAX_BLOCK), device=DEVICE) for _ in range(2))


def on_cpu(parameter, grad, w, *rest):
    """The CPU's update with the kernels' signature, writing over the gradient, as in optimizers/on_cpu.py."""
    states = rest[:-5]
    scalars = rest[-5]
    options = rest[-4:]
    tensors = [x.cpu() for x in (parameter, grad, w, *states)]
    if parameter is w:
        tensors[0] = tensors[2]
    elif grad.dtype == parameter.dtype:
        tensors[0] = tensors[1]
    update = adamw_file.adamw_on_cpu if len(states) == 2 else adamw8bit_file.adamw8bit_on_cpu
    update(*tensors, *scalars[:2].tolist(), 3, *options)
    for x, new in zip((parameter, w, *states), (tensors[0], *tensors[2:]), strict=True):
        x.copy_(new)


def assert_rounded(parameter, w, adamw):
    if parameter.dtype == BF16 and not HAS_GPU and adamw in (kernels.adamw, kernels.adamw8bit):
        torch.testing.assert_close(parameter.float(), w, rtol=2**-7, atol=0)  # the interpreter truncates
    else:
        assert torch.equal(parameter, w.to(parameter.dtype)), "the parameter is not the rounded w"


ADAMWS = {"kernel": kernels.adamw, "reference": reference.adamw, "C": on_cpu}


@pytest.mark.parametrize("dtype, of_grad", [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("adamw", ADAMWS.values(), ids=ADAMWS)
def test_adamw_matches_pytorch(adamw, dtype, of_grad):
    w = randn(3001)
    grad = randn(3001, dtype=of_grad)
    m = randn(3001)
    v = randn(3001).square()
    parameter = w if dtype == FP32 else w.to(dtype)
    theirs = torch.nn.Parameter(w.double())
    theirs.grad = 0.25 * grad.double()
    torch_adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=OPTIONS[2], weight_decay=0.1)
    torch_adamw.state[theirs] = {"step": torch.tensor(2.0), "exp_avg": m.double(), "exp_avg_sq": v.double()}
    torch_adamw.step()
    adamw(parameter, grad, w, m, v, step_scalars(0.25), *OPTIONS)
    state = torch_adamw.state[theirs]
    for ours, exact in ((w, theirs), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        torch.testing.assert_close(ours.double(), exact.detach(), rtol=2e-6, atol=1e-6)
    assert_rounded(parameter, w, adamw)


def test_adamw_on_cpu_keeps_a_nan():
    parameter = torch.ones(8, dtype=BF16)
    w = torch.ones(8)
    m = torch.zeros(8)
    m.view(torch.int32)[:4] = 0x7FFFFFFF  # CUDA's NaN, which rounding would carry into -0
    adamw_file.adamw_on_cpu(parameter, w.clone(), w, m, torch.zeros(8), 1.0, 0.1, 1, *OPTIONS)
    assert parameter.isnan().tolist() == [True] * 4 + [False] * 4


def test_adamw_on_cpu_rounds_as_pytorch_does_ties_to_even():
    w = torch.tensor(SOME_BITS[:-1], dtype=torch.int32).view(FP32)  # all but infinity
    w = torch.cat([w, -w])
    parameter = torch.empty_like(w, dtype=BF16)
    grad, m, v = torch.zeros(3, len(w))
    adamw_file.adamw_on_cpu(parameter, grad, w, m, v, 1.0, 0.0, 1, *OPTIONS)  # at a learning rate of 0
    assert torch.equal(parameter, w.to(BF16))


# ----------------------------------------------------------------------------------------------------------------------
# What both promise


SOME_BITS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3F80_8000, 0x3F81_8000, 0x7F7F_FFFF, 0x7F80_0000]


def test_halves_of_a_float32_hold_all_its_bits():
    bits = torch.tensor([*SOME_BITS, *torch.randint(2**31 - 2**23, (5000,)).tolist()], dtype=torch.int32, device=DEVICE)
    w = torch.cat([bits, bits | -(2**31)]).view(FP32)  # negative ones too
    w = w[~w.isnan()]
    parameter = torch.empty_like(w, dtype=BF16)
    low = torch.empty_like(w, dtype=torch.int16)
    split_halves(w, parameter, low)
    assert torch.equal(merge_halves(parameter, low).view(torch.int32), w.view(torch.int32))
    rounded = w.to(BF16)
    is_middle = low == -0x8000
    assert torch.equal(parameter[~is_middle], rounded[~is_middle]), "the upper half is not the nearest bfloat16"
    assert (parameter[is_middle].double().abs() >= w[is_middle].double().abs()).all()
    nan = torch.tensor([0x7FFF_FFFF, 0x7F80_0001, -1, -0x7F_FFFF], dtype=torch.int32, device=DEVICE).view(FP32)
    split_halves(nan, parameter[:4], low[:4])
    merged = merge_halves(parameter, low)[:4]
    assert nan.isnan().all() and parameter[:4].isnan().all() and merged.isnan().all()


@each_adamw
def test_adamw_on_halves_equals_adamw_on_float32(adamw):
    w = randn(3001)
    grad = randn(3001, dtype=BF16)
    w[0] = float("nan")  # a broken weight must show in the parameter
    parameter = torch.empty_like(w, dtype=BF16)
    low = torch.empty_like(w, dtype=torch.int16)
    split_halves(w, parameter, low)
    of_halves = moments(3001, adamw)
    of_whole = moments(3001, adamw)
    if adamw not in IN_8_BITS:
        of_halves[1][1] = of_whole[1][1] = float("nan")
    for scale in (0.25, float("inf"), 0.5):
        adamw(parameter, grad, low, *of_halves, step_scalars(scale), *OPTIONS)
        adamw(parameter.clone(), grad, w, *of_whole, step_scalars(scale), *OPTIONS)
    for ours, whole in zip((merge_halves(parameter, low), *of_halves), (w, *of_whole), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-7, equal_nan=True)
    broken = 1 if adamw in IN_8_BITS else 2
    assert parameter[:broken].isnan().all() and parameter[broken:].isfinite().all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf")])
@each_adamw
def test_adamw_changes_nothing_where_the_scale_is_not_finite(adamw, scale):
    w = randn(3000)
    grad = randn(3000, dtype=FP16)
    states = moments(3000, adamw)
    parameter = w.half()
    adamw(parameter, grad, w, *states, step_scalars(1.0), *OPTIONS)
    before = [x.clone() for x in (parameter, w, *states)]
    adamw(parameter, grad, w, *states, step_scalars(scale), *OPTIONS)
    assert_same((parameter, w, *states), before, f"scale {scale}")


@full_size
@pytest.mark.parametrize("adamw, master", [(kernels.adamw, FP32), (kernels.adamw8bit, torch.int16)], ids=["32", "8"])
def test_adamw_past_2_to_the_31_elements(adamw, master):
    n = 2**31 + 1000
    grad = torch.ones(n, dtype=BF16, device=DEVICE)
    states = moments(n, adamw)
    parameter = torch.ones_like(grad)
    w = torch.full((n,), master == FP32, dtype=master, device=DEVICE)
    adamw(parameter, grad, w, *states, step_scalars(1.0, t=1), *OPTIONS)
    for x in (parameter, w, *states):
        assert (x[-1000:] == x[0]).all(), "the last elements are not treated as the first"
    assert parameter[0] < 1


# ----------------------------------------------------------------------------------------------------------------------
# The moments in eight bits


def wide_grad(n, dtype=FP32):
    """Magnitudes across five decades, as in a block of a real model."""
    return (torch.randn(n) * 10 ** (-5 * torch.rand(n))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype, of_grad", [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("n", [3001, 5])
@pytest.mark.parametrize("adamw", [kernels.adamw8bit, on_cpu], ids=["kernel", "C"])
def test_adamw8bit_has_the_codes_of_the_reference(adamw, n, dtype, of_grad):
    w = randn(n)
    of_ours = moments(n)
    of_theirs = moments(n)
    parameter = w if dtype == FP32 else w.to(dtype)
    their_w = w.clone()
    grad = wide_grad(n, of_grad)
    for i in range(4):
        adamw(parameter, grad.clone(), w, *of_ours, step_scalars(0.5), *OPTIONS)
        reference.adamw8bit(their_w, grad, their_w, *of_theirs, step_scalars(0.5), *OPTIONS)
        assert_same(of_ours, of_theirs, "m, v and their absmax")
        is_zero = of_ours[1] == 0  # then the next small gradient would step 10,000 times the learning rate
        assert not (is_zero & (grad != 0)).any()
        torch.testing.assert_close(w, their_w, rtol=2e-6, atol=1e-6)
        # The second nearly cancels m: what lies beyond the end of the last block must not become its largest.
        grad = -grad if i == 0 else wide_grad(n, of_grad)
    assert_rounded(parameter, w, adamw)


def test_adamw8bit_steps_by_the_exact_moments_then_rounds_them():
    """Against float64: the step is exact, and the codes then round the moments to within half a gap."""
    n = 1024
    w = randn(n)
    (m, v, m_absmax, v_absmax) = moments(n)
    for x, absmax, signed in ((m, m_absmax, True), (v, v_absmax, False)):
        for to, new in zip((x, absmax), quantize_blocks_reference(wide_grad(n).abs(), signed), strict=True):
            to.copy_(new)
    grad = wide_grad(n)
    before = w.double()
    exact_m = dequantize_blocks_reference(m, m_absmax, True).double().lerp(grad.double(), 0.1)
    exact_v = dequantize_blocks_reference(v, v_absmax, False).double().lerp(grad.double().square(), 0.05)
    kernels.adamw8bit(w, grad, w, m, v, m_absmax, v_absmax, step_scalars(1.0), *OPTIONS)
    _, lr, m_correction, sqrt_v_correction = step_scalars(1.0).double()
    step = exact_m * m_correction / (exact_v.sqrt() * sqrt_v_correction + OPTIONS[2]) + 0.1 * before
    torch.testing.assert_close(w.double(), before - lr * step, rtol=2e-6, atol=1e-6)
    for codes, absmax, exact, signed in ((m, m_absmax, exact_m, True), (v, v_absmax, exact_v, False)):
        torch.testing.assert_close(absmax.double(), exact.view(-1, ABSMAX_BLOCK).abs().amax(1), rtol=1e-6, atol=0)
        error = (dequantize_blocks_reference(codes, absmax, signed) - exact).abs().view(-1, ABSMAX_BLOCK)
        assert (error <= 0.0072 * absmax[:, None]).all()


@pytest.mark.parametrize("adamw", [*IN_8_BITS, on_cpu], ids=["kernel", "reference", "C"])
def test_adamw8bit_keeps_a_nan_in_its_block(adamw):
    w = randn(3 * ABSMAX_BLOCK)
    states = moments(3 * ABSMAX_BLOCK)
    grad = wide_grad(3 * ABSMAX_BLOCK)
    grad[300] = float("nan")
    adamw(w, grad, w, *states, step_scalars(1.0), *OPTIONS)
    assert w.isnan().nonzero().tolist() == [[300]]
    assert states[2].isnan().tolist() == [False, True, False] == states[3].isnan().tolist()
    adamw(w, wide_grad(3 * ABSMAX_BLOCK), w, *states, step_scalars(1.0), *OPTIONS)
    assert w.view(3, -1).isnan().all(1).tolist() == [False, True, False] == w.view(3, -1).isnan().any(1).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# sgdw and add_ranks


@pytest.mark.parametrize("sgdw", [kernels.sgdw, reference.sgdw], ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_sgdw_updates_the_master_and_skips_non_finite_steps(sgdw, dtype):
    w = randn(3001)
    direction = randn(3001, dtype=BF16)
    parameter, master = (w, w) if dtype == FP32 else (w.to(dtype), w.clone())
    if dtype == BF16:
        master = torch.empty_like(w, dtype=torch.int16)
        split_halves(w, parameter, master)
    exact = w.double() - 0.1 * (0.2 * w.double() + 3 * direction.double())
    for scale, expected in ((float("nan"), w.double().clone()), (1.0, exact), (float("inf"), exact)):
        sgdw(parameter, direction, master, torch.tensor([scale, 0.1], device=DEVICE), 3.0, 0.2)
        found = merge_halves(parameter, master) if dtype == BF16 else master
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parameter.float(), found, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("n", [1, 5000])
@pytest.mark.parametrize("add_ranks", [kernels.add_ranks, reference.add_ranks], ids=["kernel", "reference"])
def test_gradients_of_the_ranks_are_added_in_float32(add_ranks, n):
    own = randn(n, dtype=BF16)
    received = randn(3, n, dtype=BF16)
    out = torch.empty_like(own)
    add_ranks(own, received, 0.25, out)
    mean = torch.cat([own[None], received]).double().mean(0)
    half_a_bit = 2**-8 if HAS_GPU or add_ranks is reference.add_ranks else 2**-7  # the interpreter truncates
    assert ((out.double() - mean).abs() <= half_a_bit * mean.abs() + 1e-6).all()
