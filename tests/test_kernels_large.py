"""The kernels past 2³¹ elements and at full size; the losses' full sizes are in test_kernels_loss.py."""

import sys

import pytest
import torch
import triton

from kernels.fp8_linear import quantize
from test_kernels import (
    BF16,
    DEVICE,
    FP32,
    HAS_GPU,
    OPERATIONS,
    ROW_OPERATIONS,
    as_tuple,
    assert_matches_float64,
    assert_same,
    draw_upstream,
    full_size,
    one_at_a_time,
    randn,
    rope_inputs,
    rope_of,
    run,
)

scaled = torch.ops.nanocria.scaled  # of linear_cross_entropy.py
WIDTH = 65536
N_ROWS = 2**31 // WIDTH + 1300  # so that rope's queries alone, 62 of 64 heads, pass 2³¹, too


def last_programs(*bounds):
    """range, but of a grid of programs only the last."""
    return range(bounds[0] - 32, bounds[0]) if len(bounds) == 1 and bounds[0] >= N_ROWS else range(*bounds)


def at_the_end(x):
    """A tensor of N_ROWS rows, of which only the last exist: memory that is never touched takes no space."""
    if x.ndim < 2:
        return x
    rows = 1 if x.ndim == 4 else 0  # rope's tokens
    whole = torch.empty([N_ROWS if dim == rows else size for dim, size in enumerate(x.shape)], dtype=x.dtype)
    whole.narrow(rows, N_ROWS - x.shape[rows], x.shape[rows]).copy_(x)
    return whole


@pytest.mark.skipif(HAS_GPU, reason="natively no program can be left out")
@one_at_a_time
@pytest.mark.parametrize("name", [*ROW_OPERATIONS, "quantize", "scaled"])
def test_the_last_rows_past_2_to_the_31_elements_equal_the_same_rows_alone(name, monkeypatch):
    if name == "quantize":
        inputs = (randn(1, WIDTH, dtype=BF16),)
        constants = ()
        function = lambda x: quantize(x)[1]  # noqa: E731
    elif name == "scaled":
        inputs = (randn(1, WIDTH, dtype=BF16),)
        constants = ()
        scale = torch.tensor(0.5)
        function = lambda x: scaled(x, scale, FP32)[:, -1024:]  # noqa: E731  # by the last program
    elif name == "rope":
        angles = torch.rand(1, 512)
        inputs = (randn(1, 1, 64, 1024, dtype=BF16),)
        constants = (angles.cos(), angles.sin())
        function = rope_of(62)[0]
    else:
        width = WIDTH // 2 if "glu" in name else WIDTH
        function = OPERATIONS[name].function
        (inputs, constants) = OPERATIONS[name].inputs(1, width, BF16)
    leaves = [x.requires_grad_(x.ndim > 1 and name not in ("quantize", "scaled")) for x in inputs]
    outputs = as_tuple(function(*leaves, *constants))
    upstream = draw_upstream(outputs)
    needed = [x for x in leaves if x.requires_grad]
    expected = [*outputs, *(torch.autograd.grad(outputs, needed, upstream) if needed else ())]
    monkeypatch.setattr(triton.runtime.interpreter, "range", last_programs, raising=False)
    one_row = {"ROWS": 1, "BLOCK": WIDTH, "STAGES": 1, "num_warps": 1}
    one_program_a_row = lambda n_rows, *_, **__: (n_rows, one_row)  # noqa: E731
    monkeypatch.setattr(sys.modules["kernels.rms_norm"], "row_tiles", one_program_a_row)
    leaves = [at_the_end(x.detach()).requires_grad_(x.requires_grad) for x in leaves]
    outputs = as_tuple(function(*leaves, *map(at_the_end, constants)))
    needed = [x for x in leaves if x.requires_grad]
    found = [*outputs, *(torch.autograd.grad(outputs, needed, map(at_the_end, upstream)) if needed else ())]
    assert max(x.numel() for x in leaves) > 2**31
    assert_same([x[:, -1:] if x.ndim == 4 else x[-1:] for x in found], expected, name)


def test_rows_of_logits_may_lie_2_to_the_31_elements_apart():
    (logits,), constants = OPERATIONS["cross_entropy"].inputs(4, 70, BF16)
    base = torch.empty(3 * 2**30 + 1024, dtype=BF16, device=DEVICE)  # on a CPU few of its pages are touched
    function = OPERATIONS["cross_entropy"].function
    upstream = [torch.tensor(0.5, device=DEVICE)]  # not 1: then backward reads the logits, too
    far, near = (
        run(function, [base.as_strided((4, 70), (step, 1)).copy_(logits)], constants, upstream)
        for step in (2**30, 2**10)
    )
    assert_same(far, near, "cross_entropy")


NORMS = "rms_norm", "add_rms_norm"
FULL_SIZE = [(name, *size) for name in NORMS for size in ((16384, 2048), (4096, 16384), (1000, 65536))]
FULL_SIZE += [(name, 8192, 14336) for name in ("swiglu", "geglu")]


@full_size
@pytest.mark.parametrize("name, rows, width", FULL_SIZE)
def test_full_size_matches_float64(name, rows, width):
    assert_matches_float64(OPERATIONS[name], *OPERATIONS[name].inputs(rows, width, BF16))


@full_size
@pytest.mark.parametrize("heads, kv_heads, half", [(32, 8, 32), (32, 8, 64), (24, 8, 64)])
def test_rope_at_full_size_matches_float64(heads, kv_heads, half):
    assert_matches_float64(rope_of(heads), *rope_inputs(8192, half, BF16, heads, kv_heads))
