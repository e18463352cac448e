"""Linear layers in float8: the rounding, the matmuls, and the fused functions that use them.

On a GPU with its tensor cores (Ada, Hopper or newer), without one in the interpreter.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import test_kernels
from kernels import FP8Linear, fp8_linear, reference, use_fp8
from kernels.fp8_linear import FLOAT8, quantize, quantize_reference, transpose
from kernels.glu import glu_backward, glu_forward
from kernels.rms_norm import rms_norm_forward
from lora import add_lora
from model import Execution, Llama, LlamaConfig
from test_kernels import BF16, DEVICE, HAS_GPU, needs_gpu, relative_error, run, widened
from tests.test_model import batch, loss_and_gradients

# The interpreter's own rounding to float8 is wrong if it carries into the exponent, and for the smallest numbers.
ERROR = 0.038 if HAS_GPU else 0.1
randn = partial(test_kernels.randn, dtype=BF16)
pytestmark = needs_fp8 = pytest.mark.skipif(
    HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no float8 matmuls"
)


# ----------------------------------------------------------------------------------------------------------------------
# Rounding


@pytest.mark.parametrize("shape", [(1, 16), (5, 19), (33, 48), (40, 1000)])
@pytest.mark.parametrize("with_factors", [False, True])
def test_rows_are_rounded_to_float8_with_a_scale_per_row(shape, with_factors):
    n_rows, n_cols = shape
    x = randn(*shape) * torch.logspace(-3, 3, n_rows, device=DEVICE)[:, None].to(BF16)
    x[1:2] = 0.0  # by a scale of 0 they would become NaN
    x = x.T.contiguous().T if with_factors else x
    factors = torch.rand(n_cols, device=DEVICE) if with_factors else None
    (x8, scales) = quantize(x, factors)
    (expected8, expected_scales) = quantize_reference(x, factors)
    assert torch.equal(scales, expected_scales)
    alike = (x8.view(torch.uint8) == expected8.view(torch.uint8)).double().mean().item()
    assert alike > 0.75 if not HAS_GPU else alike == 1, f"{alike:.1%} are rounded to the nearest float8"


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4], ids=str)
def test_a_row_with_nan_or_inf_becomes_nan_and_an_outlier_too_changes_no_other(poison):
    x = randn(6, 32)
    weight = randn(16, 32)
    clean = fp8_linear(x, weight)
    x[2, 5] = poison
    y = fp8_linear(x, weight)
    assert y[2].isnan().all() == (not math.isfinite(poison)) and torch.equal(y[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


def norm(x, float8):
    return rms_norm_forward(x, None, x[0].exp(), 1e-5, float8=float8)[0]


def norm_of_a_sum(x, float8):
    return rms_norm_forward(x, x.flip(0), x[0].exp(), 1e-5, float8=float8)[0]


def product(x, float8):
    return glu_forward(x, "silu", float8)


@pytest.mark.parametrize("function", [norm, norm_of_a_sum, product])
@pytest.mark.parametrize("width", [6, 96, 5000])
def test_norm_and_product_write_the_float8_that_quantize_makes_of_them_bit_for_bit(function, width):
    x = 3 * randn(11, width)
    x[2:5] = 0
    x[3, 1] = math.nan
    x[4, width - 1] = math.inf
    x[6, 2] = -math.inf
    x[7, 3] = 1e4
    y = function(x, False)
    (found8, found_scales) = function(x, True)
    expected8, expected_scales = quantize(y)
    assert torch.equal(found8.view(torch.uint8), expected8.view(torch.uint8))
    assert torch.equal(found_scales.view(torch.int32), expected_scales.view(torch.int32))
    assert torch.equal(found_scales[:, 0].isnan(), ~y.isfinite().all(1))


@pytest.mark.parametrize("width, overwrite", [(3, False), (64, True), (5000, True)])
@torch.no_grad()
def test_product_writes_its_gradient_as_quantize_rounds_it_bit_for_bit(width, overwrite):
    dy = randn(11, width)
    gate_up = 3 * randn(11, 2 * width)
    factors = torch.rand(2 * width, device=DEVICE)
    dy[2:5] = 0
    dy[3, 1] = math.nan
    dy[4, width - 1] = math.inf
    dy[6, 2] = 1e4
    expected, expected_y, _ = glu_backward(dy.clone(), gate_up.clone(), "silu", need_y=True)
    found, y, (found8, found_scales) = glu_backward(dy, gate_up, "silu", True, factors, overwrite)
    expected8, expected_scales = quantize(expected, factors)
    assert torch.equal(found8.view(torch.uint8), expected8.view(torch.uint8))
    torch.testing.assert_close(found_scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(y.view(torch.int16), expected_y.view(torch.int16))
    assert (found.data_ptr() == gate_up.data_ptr()) == overwrite


@pytest.mark.parametrize("shape", [(16, 16), (48, 160), (80, 64), (1, 5)])
def test_a_weight_is_transposed(shape):
    x8 = randn(*shape).to(FLOAT8)
    assert torch.equal(transpose(x8).view(torch.uint8), x8.view(torch.uint8).T)


# ----------------------------------------------------------------------------------------------------------------------
# The layer


@pytest.mark.parametrize("function, limit, of_weight", [(fp8_linear, ERROR, 2**-8), (reference.fp8_linear, 0.04, 0.04)])
@pytest.mark.parametrize("shape", [(1, 1, 16, 16), (2, 7, 48, 80), (3, 10, 256, 64)])
def test_forward_and_gradients_match_float64_within_float8(shape, function, limit, of_weight):
    """The weight's gradient is not in float8; the reference computes it from the rounded x."""
    batch, time, n_in, n_out = shape
    inputs = (randn(batch, time, n_in), randn(n_out, n_in) / n_in**0.5)
    dy = [randn(batch, time, n_out)]
    found = run(function, inputs, (), dy)
    truth = run(F.linear, widened(inputs), (), widened(dy))
    y, dx, dweight = (relative_error(x, exact) for x, exact in zip(found, truth, strict=True))
    few = 1.5 if batch == 1 else 1
    assert 0.005 < y < limit * few and 0.005 < dx < limit * few and dweight < of_weight * few, (y, dx, dweight)
    assert all(x.dtype == BF16 and x.shape == exact.shape for x, exact in zip(found, truth, strict=True))


@needs_gpu  # the interpreter rounds to float8 wrongly
def test_sums_are_not_truncated():
    """With products of one sign: float8's own rounding is biased by 0.16% here, 14-bit sums would be by 1.7%."""
    x = randn(2048, 1024).abs()
    weight = randn(512, 1024).abs()
    dy = randn(2048, 512).abs()
    for found, expected in (
        (FP8Linear.project(x, weight), x.double() @ weight.double().T),
        (FP8Linear.input_gradient(dy, weight), dy.double() @ weight.double()),
    ):
        lean = ((found.double() - expected) / expected).mean().abs().item()
        assert lean < 4e-3, f"the mean relative error is {lean:.1e}"


def test_strides_and_leading_dimensions_change_nothing():
    x = randn(8, 32)
    weight = randn(48, 32)
    expected = fp8_linear(x, weight)
    assert torch.equal(fp8_linear(x.T.contiguous().T, weight.T.contiguous().T), expected)
    assert torch.equal(fp8_linear(x.view(4, 2, 32), weight), expected.view(4, 2, 48))
    assert run(fp8_linear, (x[0], weight))[1].shape == (32,)
    y, dx, dweight = run(fp8_linear, (x[:0], weight))
    assert y.shape == (0, 48) and dx.shape == (0, 32) and not dweight.any()


@needs_gpu  # the compiler cannot trace the interpreter
def test_compiles_into_one_graph():
    function = lambda x, weight: fp8_linear(2 * x, weight) + 1  # noqa: E731
    inputs = (randn(64, 64), randn(48, 64))
    dy = [randn(64, 48)]
    compiled = torch.compile(function, fullgraph=True)
    for found, plain in zip(run(compiled, inputs, (), dy), run(function, inputs, (), dy), strict=True):
        assert relative_error(found, plain.double()) < 2**-7


# ----------------------------------------------------------------------------------------------------------------------
# The model

SMALL = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, vocab_size=64, block_size=16)


@pytest.mark.parametrize("kernels", ["all", "none"])
def test_a_model_in_float8_has_nearly_the_loss_and_gradients_of_bfloat16(kernels):
    results = []
    for fp8 in (True, False):
        model = Llama(LlamaConfig(**SMALL), Execution(kernels=kernels)).to(DEVICE, BF16)
        if fp8:
            use_fp8(model, DEVICE)
        model.init_weights(seed=1, device="cpu")
        results.append(loss_and_gradients(model, *batch(n_time=16 if HAS_GPU else 2, vocab_size=64)))
    errors = {name: relative_error(x, results[1][name].double()) for name, x in results[0].items()}
    assert 0 < errors.pop("loss") < 0.003
    assert max(errors.values()) < (0.15 if HAS_GPU else 0.3), errors


@pytest.mark.parametrize("device, changes, message", [
    ("cpu", dict(ffn_dim=24), "fp8 needs projections whose sides are multiples of 16, not 32 x 24"),
    ("cuda", {}, "fp8 needs dtype bfloat16 and a GPU of compute capability 8.9 or more"),  # float32 is refused
])  # fmt: skip
def test_use_fp8_refuses_unsupported_shapes_and_gpus(device, changes, message):
    model = Llama(LlamaConfig(**SMALL | changes))
    with pytest.raises(ValueError, match=message):
        use_fp8(model, device)
    add_lora(model, 2, 4.0)
    with pytest.raises(ValueError, match="use_fp8 found no plain projection"):
        use_fp8(model)
