"""AdamW's kernel, its C and its references against PyTorch's, and the sum of the ranks' gradients."""

import platform
import shutil
import sys

import pytest
import torch

import kernels
from kernels import reference
from kernels.c_library import build, c_library
from test_kernels import BF16, DEVICE, FP16, FP32, HAS_GPU, assert_same, full_size, randn

adamw_file = sys.modules["kernels.adamw"]  # the package's attribute of that name is the function


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
        patch.setattr(adamw_file, "c_library", lambda name: None)  # no C compiler
        patch.setattr(adamw_file, "CPU_PIECE", 700)
        cpu_adamw(*arguments)


def test_adamw_on_cpu_keeps_a_nan():
    parameter, w, m = torch.ones(8, dtype=BF16), torch.ones(8), torch.zeros(8)
    m.view(torch.int32)[:4] = 0x7FFFFFFF  # CUDA's NaN, which rounding would carry over into -0
    adamw_file.adamw_on_cpu(parameter, w.clone(), w, m, torch.zeros(8), 1.0, 0.1, 1, 0.9, 0.95, 1e-8, 0.1)
    assert parameter.isnan().tolist() == [True] * 4 + [False] * 4


ADAMWS = {"kernel": kernels.adamw, "reference": reference.adamw, "C": cpu_adamw, "pieces": cpu_adamw_in_pieces}


@pytest.mark.parametrize("dtype, of_grad", [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("adamw", ADAMWS.values(), ids=ADAMWS)
def test_adamw_matches_pytorch(adamw, dtype, of_grad):
    if adamw is cpu_adamw and c_library("adamw.c") is None:
        pytest.skip("no C compiler with OpenMP here")
    parameter, grad, w, m, v = adamw_arguments(3001, dtype)
    grad = grad.to(of_grad)
    theirs = torch.nn.Parameter(w.double())
    theirs.grad = 0.25 * grad.double()
    torch_adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    torch_adamw.state[theirs] = {"step": torch.tensor(2.0), "exp_avg": m.double(), "exp_avg_sq": v.double()}
    torch_adamw.step()
    adamw(parameter, grad, w, m, v, step_scalars(0.25), 0.9, 0.95, 1e-8, 0.1)
    state = torch_adamw.state[theirs]
    for ours, exact in ((w, theirs), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        torch.testing.assert_close(ours.double(), exact.detach(), rtol=2e-6, atol=1e-6)
    if dtype == BF16 and not HAS_GPU and adamw is kernels.adamw:  # the interpreter truncates
        torch.testing.assert_close(parameter.float(), w, rtol=2**-7, atol=0)
    else:
        assert torch.equal(parameter, w.to(dtype)), "the parameter is not the rounded w"


SOME_BITS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3F80_8000, 0x3F81_8000, 0x7F7F_FFFF, 0x7F80_0000]


def test_halves_of_a_float32_hold_all_its_bits():
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
def test_adamw_on_halves_equals_adamw_on_float32(adamw, of_grad):
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


@pytest.mark.parametrize("compiler, builds", [("false", False), ("no_such_compiler", False), ("{} -m64", True)])
def test_adamw_in_c_is_built_by_the_compiler_named(compiler, builds, monkeypatch, capsys):
    found = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if builds and (found is None or platform.machine() != "x86_64"):
        pytest.skip("no C compiler that knows -m64 here")
    monkeypatch.setenv("CC", compiler.format(found))
    assert (build.__wrapped__("adamw.c") is not None) == builds
    assert ("kernels/adamw.c was not built" in capsys.readouterr().err) != builds


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
@pytest.mark.parametrize("adamw", [kernels.adamw, reference.adamw], ids=["kernel", "reference"])
def test_adamw_changes_nothing_where_the_scale_is_not_finite(adamw, scale):
    tensors = adamw_arguments(3000, FP16)
    before = [x.clone() for x in tensors]
    adamw(*tensors, step_scalars(scale), 0.9, 0.95, 1e-8, 0.1)
    assert_same(tensors, before, f"scale {scale}")


@pytest.mark.parametrize("sgdw", [kernels.sgdw, reference.sgdw], ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_sgdw_moves_the_master_and_skips_what_is_not_finite(sgdw, dtype):
    w, direction = randn(3001), randn(3001, dtype=BF16)
    parameter, master = (w, w) if dtype == torch.float32 else (w.to(dtype), w.clone())
    if dtype == BF16:
        master = torch.empty_like(w, dtype=torch.int16)
        adamw_file.split_halves(w, parameter, master)
    exact = w.double() - 0.1 * (0.2 * w.double() + 3 * direction.double())
    for scale, expected in ((float("nan"), w.double().clone()), (1.0, exact), (float("inf"), exact)):
        sgdw(parameter, direction, master, torch.tensor([scale, 0.1], device=DEVICE), 3.0, 0.2)
        found = adamw_file.merge_halves(parameter, master) if dtype == BF16 else master
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parameter.float(), found, rtol=2**-7, atol=1e-6)


def test_sgdw_says_what_does_not_fit():
    w, scalars = torch.zeros(4, 4), torch.ones(2)
    for arguments, expected in (
        ((w, w[:2], w, scalars), "direction is"),
        ((w, w.T[:, :], w, scalars), "contiguous"),
        ((w.half(), w, w.half(), scalars), "w is torch.float16"),
        ((w, w, w, scalars[:1]), "step_scalars"),
    ):
        with pytest.raises(ValueError, match=expected):
            kernels.sgdw(*arguments, 1.0, 0.0)


@full_size
def test_adamw_past_2_to_the_31_elements():
    n = 2**31 + 1000
    grad, w = torch.ones(n, dtype=BF16, device=DEVICE), torch.ones(n, device=DEVICE)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    parameter = w.bfloat16()
    kernels.adamw(parameter, grad, w, m, v, step_scalars(1.0), 0.9, 0.95, 1e-8, 0.1)
    for x in (parameter, w, m, v):
        assert x[0] == x[-1] and (x[0] != 1), "the last element is not treated as the first"


@pytest.mark.parametrize("n", [1, 2048, 5000])
@pytest.mark.parametrize("add_ranks", [kernels.add_ranks, reference.add_ranks], ids=["kernel", "reference"])
def test_gradients_of_the_ranks_are_added_in_float32(add_ranks, n):
    own, received = randn(n, dtype=BF16), randn(3, n, dtype=BF16)
    out = torch.empty_like(own)
    add_ranks(own, received, 0.25, out)
    mean = torch.cat([own[None], received]).double().mean(0)
    half_a_bit = 2**-8 if HAS_GPU or add_ranks is reference.add_ranks else 2**-7  # the interpreter truncates
    assert ((out.double() - mean).abs() <= half_a_bit * mean.abs() + 1e-6).all()
