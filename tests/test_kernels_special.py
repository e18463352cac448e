"""What single operations promise beyond what test_kernels.py tests for all."""

import sys
from functools import partial

import pytest
import torch

import kernels
from kernels.launch import sum_rows
from test_kernels import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    OPERATIONS,
    add_norm_mlp,
    arguments_of,
    assert_matches_float64,
    assert_same,
    randn,
    rope_inputs,
    rope_of,
    run,
)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_overwrite_dy_gives_the_gradient_of_x_the_memory_of_that_of_y(name):
    _, inputs, _, upstream = arguments_of(name, dtype=BF16)
    expected = run(OPERATIONS[name].function, inputs, upstream=[x.clone() for x in upstream])
    overwriting = partial(OPERATIONS[name].function, overwrite_dy=True)
    assert_same(run(overwriting, inputs, upstream=upstream), expected, name)
    assert torch.equal(upstream[0], expected[-len(inputs)]), "it took memory of its own"
    strided = [x.T.contiguous().T for x in upstream[:1]] + upstream[1:]
    before = strided[0].clone()
    run(overwriting, inputs, upstream=strided)
    assert torch.equal(strided[0], before), "what is not contiguous stays"


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_norms_of_rows_above_8192_columns_match_float64(name):
    """Their backward reads the weight again for every row."""
    assert_matches_float64(OPERATIONS[name], *OPERATIONS[name].inputs(6, 8200, FP32))


def test_the_norm_is_of_the_sum_as_it_is_stored():
    x = randn(5, 300, dtype=FP16)
    residual = randn(5, 300, dtype=FP16)
    weight = randn(300, dtype=FP16)
    y, total = kernels.add_rms_norm(x, residual, weight)
    assert torch.equal(y, kernels.rms_norm(total, weight))


@pytest.mark.parametrize("ops", [kernels, kernels.reference], ids=["kernels", "reference"])
@pytest.mark.parametrize("name", ["add_norm_linear", "add_norm_mlp", "add_norm_mlp_in_chunks"])
def test_without_a_residual_x_is_the_sum_whatever_its_strides(name, ops):
    function, (x, _, *weights), _, upstream = arguments_of(name, 5, 8, FP64)
    x = x.T.contiguous().T
    truth = run(OPERATIONS[name].oracle, (x, torch.zeros_like(x), *weights), upstream=upstream)
    del truth[3]  # the gradient of the zeros
    found = run(lambda x, *weights: function(x, None, *weights, ops=ops), (x, *weights), upstream=upstream)
    for ours, true in zip(found, truth, strict=True):
        assert (ours - true).abs().max() < 1e-12 * true.abs().max()
    torch.testing.assert_close(function(x[0], None, *weights, ops=ops)[0], found[0][0])


def test_rows_are_summed_past_the_first_128():
    """A GPU with that many multiprocessors leaves so many rows; the interpreter's four programs never do."""
    x = randn(300, 70, dtype=FP64)
    torch.testing.assert_close(sum_rows(x, FP64), x.sum(0))


def test_rope_takes_positions_of_each_batch_and_any_number_of_heads():
    inputs, (cos, sin) = rope_inputs(3, 5, FP32)
    angles = torch.rand(2, 3, 5, device=DEVICE) * 100
    strided = [torch.rand(5, 3, 2, device=DEVICE).permute(2, 1, 0) for _ in range(2)]
    columns = [x[:, :1].expand(3, 5) for x in (cos, sin)]
    for positions in ((angles.cos(), angles.sin()), strided, columns, (cos, sin.T.contiguous().T)):
        assert_matches_float64(OPERATIONS["rope"], inputs, positions)
    for heads, kv_heads in ((1, 1), (3, 3), (5, 1)):
        assert_matches_float64(rope_of(heads), *rope_inputs(3, 3, FP32, heads, kv_heads))


@pytest.mark.parametrize("name, size, dtype", [
    ("swiglu", 100, FP32), ("geglu", 100, FP32), ("rms_norm", 3000, FP16),  # the squares overflow fp16
])  # fmt: skip
def test_large_values_do_not_overflow(name, size, dtype):
    (x, *weights), _ = OPERATIONS[name].inputs(4, 70, dtype)
    assert_matches_float64(OPERATIONS[name], (size * x, *weights), ())


@pytest.mark.parametrize("save_gate_up", [True, False])
@pytest.mark.parametrize("keep_graph", [True, False])
def test_the_gradient_of_gate_and_up_takes_their_place_if_nobody_needs_them_again(
    save_gate_up, keep_graph, monkeypatch
):
    module = sys.modules["kernels.add_norm_mlp"]
    overwritten = []
    glu_backward = module.glu_backward

    def spy(dy, gate_up, *args, **options):
        found = glu_backward(dy, gate_up, *args, **options)
        overwritten.append(found[0].data_ptr() == gate_up.data_ptr())
        return found

    monkeypatch.setattr(module, "glu_backward", spy)
    inputs = [x.requires_grad_() for x in OPERATIONS["add_norm_mlp"].inputs(33, 16, FP32)[0]]
    y, _ = add_norm_mlp(*inputs, save_gate_up=save_gate_up)
    y.sum().backward(retain_graph=keep_graph)
    assert overwritten == [not (save_gate_up and keep_graph)]
