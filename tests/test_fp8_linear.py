"""Linear layers in float8: the rounding, the matmuls, and the fused functions that are made of them.

pytest test_fp8_linear.py        on a GPU its tensor cores (Ada, Hopper or newer); without one the interpreter
"""

import functools
import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kernels
import kernels.launch
import kernels.reference
from kernels import FP8Linear, fp8_linear, use_fp8
from kernels.fp8_linear import FLOAT8, quantize, quantize_reference, transpose
from model import Llama, LlamaConfig
from runtime.recompute import recompute
from test_kernels import one_at_a_time

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
BF16 = torch.bfloat16
# The interpreter's own rounding to float8 is wrong where it carries into the exponent, and for the smallest numbers.
ERROR = 0.038 if ON_GPU else 0.1
pytestmark = pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no float8 matmuls"
)


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(found, expected):
    """‖found − expected‖ / ‖expected‖ in float64; inf where a number is none."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    relative = ((found - expected).norm() / expected.norm()).item()
    return relative if math.isfinite(relative) else math.inf


# ----------------------------------------------------------------------------------------------------------------------
# Rounding


@pytest.mark.parametrize("shape", [(1, 16), (5, 19), (33, 48), (40, 1000)])
@pytest.mark.parametrize("restride", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("with_factors", [False, True])
def test_rows_are_rounded_to_float8_beside_a_scale_each(shape, restride, with_factors):
    n_rows, n_cols = shape
    x = randn(*shape) * torch.logspace(-3, 3, n_rows, device=DEVICE)[:, None].to(BF16)
    x = {"contiguous": x, "transposed": x.T.contiguous().T, "sliced": torch.cat([x, x], 1)[:, :n_cols]}[restride]
    factors = torch.rand(n_cols, device=DEVICE) if with_factors else None
    (x8, scales), (expected8, expected_scales) = quantize(x, factors), quantize_reference(x, factors)
    assert torch.equal(scales, expected_scales)
    alike = (x8.view(torch.uint8) == expected8.view(torch.uint8)).double().mean().item()
    assert alike > 0.75 if not ON_GPU else alike == 1, f"{alike:.1%} are rounded to the nearest float8"


def test_largest_element_of_a_row_becomes_the_largest_float8_and_zeros_stay_zeros():
    x8, scales = quantize(torch.cat([randn(20, 50), torch.zeros(2, 50, device=DEVICE, dtype=BF16)]))
    assert (x8[:20].float().abs().amax(1) == 448).all() and not (x8[20:].float() * scales[20:]).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_with_nan_or_inf_becomes_nan_and_no_other(poison):
    x, weight = randn(6, 32), randn(16, 32)
    x[2, 5] = poison
    y = fp8_linear(x, weight)
    assert y[2].isnan().all() and y[[0, 1, 3, 4, 5]].isfinite().all()


def test_an_outlier_costs_its_own_row_alone():
    x, weight = randn(64, 128), randn(32, 128)
    alone = fp8_linear(x[:32], weight)
    x[40] *= 1e4
    assert torch.equal(fp8_linear(x, weight)[:32], alone)


@one_at_a_time
def test_row_offsets_pass_2_to_the_31():
    x = torch.empty(3 * 2**30 + 1024, dtype=BF16, device=DEVICE).as_strided((4, 64), (2**30, 1))
    x.copy_(randn(4, 64))
    assert torch.equal(quantize(x)[1], quantize_reference(x)[1])


@pytest.mark.parametrize("shape", [(16, 16), (48, 160), (80, 64), (1, 5)])
def test_a_weight_is_transposed(shape):
    x8 = randn(*shape).to(FLOAT8)
    assert torch.equal(transpose(x8).view(torch.uint8), x8.view(torch.uint8).T)


# ----------------------------------------------------------------------------------------------------------------------
# The layer


@pytest.mark.parametrize("shape", [(1, 1, 16, 16), (2, 17, 48, 80), (3, 50, 256, 64)])
def test_forward_and_gradients_match_float64_within_float8(shape):
    batch, time, n_in, n_out = shape
    x, weight, dy = randn(batch, time, n_in), randn(n_out, n_in) / n_in**0.5, randn(batch, time, n_out)
    x.requires_grad_(), weight.requires_grad_()
    y = fp8_linear(x, weight)
    y.backward(dy)
    wide_x, wide_weight, wide_dy = (t.detach().double() for t in (x, weight, dy))
    assert error(y, wide_x @ wide_weight.T) < ERROR * (1.5 if batch == 1 else 1)
    assert error(x.grad, wide_dy @ wide_weight) < ERROR * (1.5 if batch == 1 else 1)
    of_weight = wide_dy.flatten(0, 1).T @ wide_x.flatten(0, 1)
    assert error(weight.grad, of_weight) < 2**-8, "the weight's gradient is not in float8"
    assert y.dtype == x.grad.dtype == weight.grad.dtype == BF16


@pytest.mark.skipif(not ON_GPU, reason="the interpreter rounds to float8 wrongly")
def test_sums_are_not_truncated():
    """With products of one sign: float8's own rounding leans by 0.16% here, sums of 14 bits would by 1.7%."""
    x, weight, dy = randn(2048, 1024).abs(), randn(512, 1024).abs(), randn(2048, 512).abs()
    for found, expected in (
        (FP8Linear.project(x, weight), x.double() @ weight.double().T),
        (FP8Linear.input_gradient(dy, weight), dy.double() @ weight.double()),
    ):
        lean = ((found.double() - expected) / expected).mean().abs().item()
        assert lean < 4e-3, f"the mean relative error is {lean:.1e}"


@pytest.mark.parametrize("n_in, n_out", [(16, 48), (128, 64)])
def test_reference_matches_float64_within_float8(n_in, n_out):
    x, weight = randn(40, n_in).requires_grad_(), randn(n_out, n_in).requires_grad_()
    y = kernels.reference.fp8_linear(x, weight)
    dy = randn(*y.shape)
    y.backward(dy)
    wide_x, wide_weight, wide_dy = (t.detach().double() for t in (x, weight, dy))
    assert 0.01 < error(y, wide_x @ wide_weight.T) < 0.04
    assert 0.005 < error(x.grad, wide_dy @ wide_weight) < 0.04, "at the rounded weight"
    assert error(weight.grad, wide_dy.T @ wide_x) < 0.04


def test_the_weight_of_backward_is_that_of_forward():
    """Its scales go into dy: with dy and x of one element a row nothing else is rounded but W, and alike."""
    weight, eye = randn(32, 64), torch.eye(64, device=DEVICE, dtype=BF16)
    forward = FP8Linear.project(eye, weight).T  # (O, C): the rounded W
    backward = FP8Linear.input_gradient(torch.eye(32, device=DEVICE, dtype=BF16), weight)
    assert error(backward, forward) < 2**-8


def test_strides_change_nothing():
    x, weight = randn(40, 32), randn(48, 32)
    expected = fp8_linear(x, weight)
    for other in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :32]):
        assert torch.equal(fp8_linear(other, weight), expected)
    assert torch.equal(fp8_linear(x, weight.T.contiguous().T), expected)
    assert torch.equal(fp8_linear(x.view(4, 10, 32), weight), expected.view(4, 10, 48))


def test_no_rows_give_no_rows_and_zero_gradients():
    x, weight = randn(0, 32).requires_grad_(), randn(48, 32).requires_grad_()
    y = fp8_linear(x, weight)
    y.sum().backward()
    assert y.shape == (0, 48) and x.grad.shape == (0, 32) and not weight.grad.any()


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_a_frozen_input_gets_no_gradient(needed):
    x, weight = randn(20, 32).requires_grad_(needed[0]), randn(48, 32).requires_grad_(needed[1])
    fp8_linear(x, weight).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needed


def test_autocast_and_a_second_derivative_are_refused():
    x, weight = randn(4, 32).requires_grad_(), randn(16, 32)
    with torch.autocast(DEVICE, dtype=BF16), pytest.raises(ValueError, match="do not run under torch.autocast"):
        fp8_linear(x, weight)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(fp8_linear(x, weight).sum(), x, create_graph=True)


# ----------------------------------------------------------------------------------------------------------------------
# The fused functions


def projection(n_in, n_out):
    layer = FP8Linear(n_in, n_out).to(DEVICE, BF16)
    torch.nn.init.normal_(layer.weight, std=n_in**-0.5)
    return layer


def gradients(function, inputs, projections):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    torch.manual_seed(7)
    leaves = [*inputs, *(layer.weight for layer in projections)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, [randn(*y.shape) for y in outputs])]


def test_rms_norm_linear_is_a_norm_and_a_linear_layer():
    inputs, layer = (randn(2, 20, 64), randn(2, 20, 64), randn(64)), projection(64, 48)

    def apart(x, residual, norm_weight):
        normed, total = kernels.add_rms_norm(x, residual, norm_weight)
        return layer(normed), total

    found = gradients(lambda *x: kernels.rms_norm_linear(*x, 1e-5, layer), inputs, [layer])
    for x, expected in zip(found, gradients(apart, inputs, [layer]), strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("options", [{}, {"keep_gate_up": False}, {"keep_gate_up": False, "chunks": 3}])
def test_swiglu_mlp_is_a_norm_two_linear_layers_and_a_product(options):
    inputs, layers = (randn(40, 64), randn(40, 64), randn(64)), (projection(64, 96), projection(48, 32))

    def apart(x, residual, norm_weight):
        normed, total = kernels.add_rms_norm(x, residual, norm_weight)
        return layers[1](kernels.swiglu(layers[0](normed))), total

    found = gradients(lambda *x: kernels.swiglu_mlp(*x, 1e-5, *layers, **options), inputs, layers)
    for i, (x, other) in enumerate(zip(found, gradients(apart, inputs, layers), strict=True)):
        if "chunks" in options and i >= 5:  # the weights' gradients, summed in float32 over the slices
            assert error(x, other) < 2**-7
        else:
            assert torch.equal(x, other), f"tensor {i}"


def test_without_triton_the_references_run(monkeypatch):
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    x, weight = torch.randn(6, 24), torch.randn(10, 24)  # any dtype, any width
    assert torch.equal(fp8_linear(x, weight), kernels.reference.fp8_linear(x, weight))
    assert 0.01 < error(fp8_linear(x, weight), x @ weight.T) < 0.05


def test_checkpointing_repeats_it_bit_for_bit():
    x, weight, dy = randn(30, 64).requires_grad_(), randn(48, 64).requires_grad_(), randn(30, 48)
    found = []
    for run in (fp8_linear, fp8_linear, partial(checkpoint, fp8_linear, use_reentrant=False)):
        x.grad = weight.grad = None
        run(x, weight).backward(dy)
        found.append((x.grad, weight.grad))
    for pair in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(pair, found[0], strict=True))


@pytest.mark.skipif(not ON_GPU, reason="the compiler does not know the interpreter")
def test_compiles_into_one_graph():
    x, weight, dy = randn(64, 64).requires_grad_(), randn(48, 64).requires_grad_(), randn(64, 48)
    compiled = torch.compile(lambda x, weight: fp8_linear(2 * x, weight) + 1, fullgraph=True)
    y = compiled(x, weight)
    y.backward(dy)
    of_x, of_weight = x.grad, weight.grad
    x.grad = weight.grad = None
    plain = fp8_linear(2 * x, weight) + 1
    plain.backward(dy)
    assert error(y, plain) < 2**-7 and error(of_x, x.grad) < 2**-7 and error(of_weight, weight.grad) < 2**-7


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_is_captured_in_a_cuda_graph():
    x, weight = randn(64, 64), randn(48, 64)
    fp8_linear(x, weight)  # compiles
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fp8_linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8_linear(x, weight)
    x.copy_(randn(64, 64))
    graph.replay()
    assert torch.equal(y, fp8_linear(x, weight))


# ----------------------------------------------------------------------------------------------------------------------
# The model

SMALL = dict(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, vocab_size=64, block_size=16)


@functools.cache
def loss_and_gradients(dtype=BF16, fp8=True, fused_kernels=True, mode="none", **options):
    model = Llama(LlamaConfig(**SMALL)).to(DEVICE, dtype)
    model.set_operations(fused_kernels)
    if fp8:
        use_fp8(model, DEVICE if fused_kernels else "cpu")  # the references take any dtype
    recompute(model, mode, **options)
    model.init_weights(seed=1, device="cpu")
    torch.manual_seed(1)
    tokens, targets = torch.randint(64, (2, 2, 16 if ON_GPU else 4), device=DEVICE)
    loss = model(tokens, targets)
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_model_in_float8_has_nearly_the_loss_and_gradients_of_bfloat16():
    (loss, gradients), (expected, of_bf16) = loss_and_gradients(), loss_and_gradients(fp8=False)
    assert abs(loss - expected) < 0.01 and loss != expected
    errors = {name: error(gradient, of_bf16[name]) for name, gradient in gradients.items()}
    assert max(errors.values()) < (0.15 if ON_GPU else 0.3), errors


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        (dict(mode="selective"), {}),
        (dict(mode="full", offload_activations=True), dict(mode="full")),
        (dict(mode="full", mlp_chunks=2), dict(mode="full")),
    ],
)
def test_recomputed_in_float8_a_model_has_the_same_gradients(settings, others):
    (loss, gradients), (expected, plain) = loss_and_gradients(**settings), loss_and_gradients(**others)
    assert loss == expected
    for name, gradient in gradients.items():
        assert error(gradient, plain[name]) < 2**-6, name


def test_model_without_fused_kernels_rounds_to_float8_too():
    (loss, _), (in_float32, _) = (
        loss_and_gradients(torch.float32, fused_kernels=False, fp8=fp8) for fp8 in (True, False)
    )
    assert 0 < abs(loss - in_float32) < 0.01


@pytest.mark.parametrize("device, changes, message", [
    ("cpu", dict(ffn_dim=100), "fp8 needs projections whose sides are multiples of 16, not 200 x 32"),
    ("cuda", {}, "fp8 needs dtype bfloat16 and a GPU of compute capability 8.9 or more"),  # float32 is refused
])  # fmt: skip
def test_use_fp8_refuses_what_float8_cannot_multiply(device, changes, message):
    with torch.device("meta"):
        model = Llama(LlamaConfig(**SMALL | changes))
    with pytest.raises(ValueError, match=message):
        use_fp8(model, device)


def test_use_fp8_swaps_every_projection_of_the_layers_on_meta_and_leaves_the_names():
    with torch.device("meta"):
        model = Llama(LlamaConfig(**SMALL)).to(BF16)
    names = list(model.state_dict())
    use_fp8(model)
    assert sum(isinstance(module, FP8Linear) for module in model.modules()) == 4 * len(model.layers)
    assert list(model.state_dict()) == names
