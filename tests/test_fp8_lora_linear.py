"""Projections in float8 within the fused functions; adapters on a frozen weight that is held as float8 or as NF4.

Adapters against fp8_linear of the same weight, bit for bit if they are zero, and against float64.
"""

from functools import partial

import pytest
import torch

import kernels
import kernels.launch
from kernels import FP8Linear, FP8LoRALinear, FP8NF4LoRALinear, Linear, LoRALinear, fp8_linear, use_fp8
from kernels.fp8_linear import quantize
from lora import add_lora, merge_lora
from model import Llama, LlamaConfig
from test_kernels import BF16, DEVICE, HAS_GPU, Norm, assert_same, needs_gpu, randn, relative_error
from tests.test_fp8_linear import needs_fp8

ROWS = (32, 16, 16)
N_IN = 64
RANK = 3
ERROR = 0.045 if HAS_GPU else 0.11  # as in test_fp8_linear.py, and y is rounded, or truncated, twice
KINDS = {"float8": FP8LoRALinear, "nf4": FP8NF4LoRALinear}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
pytestmark = needs_fp8


def layer_of(kind, n_in=N_IN, rows=ROWS, adapters=True):
    base = Linear(n_in, *rows).to(DEVICE, BF16)
    torch.nn.init.normal_(base.weight, std=n_in**-0.5)
    layer = FP8Linear(base) if kind is FP8Linear else kind(base, RANK, 5.0)
    if adapters and kind is not FP8Linear:
        torch.nn.init.normal_(layer.lora_b, std=0.5)
    return layer, base.weight.detach().clone()


def held_weight(layer):
    """The weight that the held tensors represent, before the matmuls round it."""
    return layer.read_weight(layer.lora_a, *layer.tensors()[:-2])


def truth(layer, x):
    """The formula with the held weight, in the dtype of x."""
    w, a, b = (t.detach().to(x.dtype) for t in (held_weight(layer), layer.lora_a, layer.lora_b))
    a, b = (t.requires_grad_() for t in (a, b))
    parts = [x @ a_i.T @ b_i.T for a_i, b_i in zip(a.split(RANK), b.split(layer.rows), strict=True)]
    return x @ w.T + 5 / RANK * torch.cat(parts, dim=-1), a, b


def gradients(outputs, leaves):
    torch.manual_seed(7)
    return torch.autograd.grad(outputs, leaves, [torch.randn(y.shape, dtype=torch.float64).to(y) for y in outputs])


@pytest.mark.parametrize("n_in", [N_IN, 192])  # one block of NF4 per row, and three
@each_kind
def test_without_adapters_it_is_fp8_linear_of_the_held_weight_bit_for_bit(kind, n_in):
    layer, original = layer_of(kind, n_in, adapters=False)
    x = randn(2, 5, n_in, dtype=BF16).requires_grad_()
    weight = original if kind is FP8LoRALinear else held_weight(layer)  # rounded once or before each matmul: the same
    y = layer(x)
    expected = fp8_linear(x, weight)
    assert_same([y, *gradients([y], [x])], [expected, *gradients([expected], [x])], "float8")


@each_kind
def test_forward_and_gradients_match_float64_within_float8(kind):
    layer, _ = layer_of(kind)
    x = randn(2, 5, N_IN, dtype=BF16).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = layer(x)
    (expected, a, b) = truth(layer, wide)
    found = gradients([y], [x, layer.lora_a, layer.lora_b])
    true = gradients([expected], [wide, a, b])
    errors = [relative_error(ours, other) for ours, other in zip([y, *found], [expected, *true], strict=True)]
    assert max(errors[:2]) < ERROR and max(errors[2:]) < 0.01, errors  # the adapters' gradients are in bfloat16


@pytest.mark.parametrize("transposed", [False, True])
def test_nf4_becomes_the_float8_that_its_bfloat16_would(transposed):
    weight = randn(70, 1280, dtype=BF16)
    weight[3, 64:128] = 0.0  # a block of zeros
    weight[5] *= 1e-3
    layer, _ = layer_of(FP8NF4LoRALinear, 1280, (38, 32))
    frozen = layer.quantize(weight)
    expected, scales = quantize(layer.read_weight(layer.lora_a, *frozen))
    w8, t = layer.read_float8(layer.lora_a, *frozen, transposed=transposed)
    assert torch.equal(t, scales) and torch.equal(as_bytes(w8), as_bytes(expected.T if transposed else expected))
    weight[69] = 0.0
    w8, t = layer.read_float8(layer.lora_a, *layer.quantize(weight), transposed=transposed)
    assert not (w8.T if transposed else w8)[69].float().any() and t.isfinite().all()


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("rank", [3, 16, 80])
def test_a_product_of_low_rank_is_added_in_place_within_one_rounding(rank, dtype):
    y = randn(70, 400, dtype=dtype)
    a = randn(70, 2 * rank, dtype=dtype)
    b = randn(rank, 200, dtype=dtype)
    before = y.clone()
    expected = y[:, 100:300].double() + a[:, rank:].double() @ b.double()
    kernels.add_low_rank(y, a[:, rank:], b.T, 100)
    step = {torch.float32: 2**-20, torch.float16: 2**-11, BF16: 2**-8 if HAS_GPU else 2**-7}[dtype]
    assert ((y[:, 100:300].double() - expected).abs() <= step * expected.abs() + 1e-5).all()
    y[:, 100:300] = before[:, 100:300]
    assert torch.equal(y, before)
    kernels.add_low_rank(y[:0], a[:0, rank:], b.T)


@pytest.mark.parametrize("kind", [LoRALinear, *KINDS.values()])
def test_merged_is_rounded_once_and_leaves_the_layer_as_it_is(kind):
    layer, _ = layer_of(kind)
    parts = zip(layer.lora_b.float().split(ROWS), layer.lora_a.float().split(RANK), strict=True)
    expected = (held_weight(layer).float() + torch.cat([layer.scale * b @ a for b, a in parts])).to(BF16)
    assert_same([layer.merged(), layer.merged()], [expected, expected], "merged twice")


def norm_and_linear(x, delta, norm, layer):
    normed, total = kernels.add_rms_norm(x, delta, norm.weight, norm.eps)
    return layer(normed), total


def norm_two_linears_and_a_product(x, delta, norm, gate_up, down):
    gate_up, total = norm_and_linear(x, delta, norm, gate_up)
    return down(kernels.glu(gate_up)), total


@pytest.mark.parametrize("kind", [FP8Linear, *KINDS.values()])
@pytest.mark.parametrize("function, apart, options", [
    (kernels.add_norm_linear, norm_and_linear, {}),
    *((kernels.add_norm_mlp, norm_two_linears_and_a_product, options)
      for options in ({}, {"save_gate_up": False}, {"save_gate_up": False, "chunks": 2})),
], ids=["add_norm_linear", "add_norm_mlp", "recomputed", "in chunks"])  # fmt: skip
def test_fused_functions_are_their_parts_bit_for_bit(kind, function, apart, options):
    shapes = [(64, (16,))] if apart is norm_and_linear else [(64, (64, 64)), (64, (16,))]
    layers = [layer_of(kind, *shape)[0] for shape in shapes]
    x, delta, norm_weight = (randn(*shape, dtype=BF16).requires_grad_() for shape in ((2, 6, 64), (2, 6, 64), (64,)))
    leaves = [x, delta, norm_weight, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]

    def results(f):
        y, total = f(x, delta, Norm(norm_weight), *layers)
        return [y, total, *gradients((y, total), leaves)]

    found = results(partial(function, **options))
    expected = results(apart)
    n_same = len(found)
    if "chunks" in options:  # weight gradients are summed over them; matmuls of a chunk may sum in another order
        n_same = 5 if kind is FP8Linear else 0
    assert_same(found[:n_same], expected[:n_same], "fused")
    for ours, other in zip(found, expected, strict=True):
        assert relative_error(ours, other.double()) < (2**-7 if kind is FP8Linear else 2**-6)


@each_kind
def test_without_triton_the_reference_runs(kind, monkeypatch):
    layer, bare = (layer_of(kind, adapters=adapters)[0].to("cpu") for adapters in (True, False))
    x = randn(2, 5, N_IN, dtype=BF16).cpu().requires_grad_()
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    leaves = [x, layer.lora_a, layer.lora_b]
    y = layer(x)
    (expected, a, b) = truth(layer, x.detach().double())
    assert 0.01 < relative_error(y, expected) < 0.045  # rounded to float8 as well
    found = gradients([y], leaves)[1:]
    true = gradients([expected], [a, b])
    errors = [relative_error(ours, other) for ours, other in zip(found, true, strict=True)]
    assert max(errors) < 0.01, errors
    assert torch.equal(bare(x), kernels.reference.fp8_linear(x, held_weight(bare)))


@pytest.mark.parametrize("quantize_base, kind", [("none", FP8LoRALinear), ("nf4", FP8NF4LoRALinear)])
def test_adapters_on_a_model_in_float8_are_of_its_kind_and_merge_into_plain_weights(quantize_base, kind):
    config = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=64, ffn_dim=128, vocab_size=64, block_size=16)
    model = Llama(config)
    model.init_weights(1)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    use_fp8(model)
    add_lora(model, RANK, 5.0, quantize_base)
    assert {type(child) for child in model.layers.modules() if isinstance(child, Linear)} == {kind}
    assert model.n_params() == sum(p.numel() for p in plain.values()) + sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    merge_lora(model)
    for name, p in model.named_parameters():
        assert type(p) is torch.nn.Parameter and relative_error(p, plain[name].double()) < 0.15, name
    assert not any(isinstance(m, (FP8Linear, kernels.LoRALinear)) for m in model.modules())


@needs_gpu  # for torch.compile of kernels, and CUDA graphs
@each_kind
def test_it_compiles_into_one_graph_and_is_captured_in_a_cuda_graph(kind):
    layer, _ = layer_of(kind)
    x = randn(64, N_IN, dtype=BF16)
    expected = layer(x)
    torch.compiler.reset()
    assert relative_error(torch.compile(layer, fullgraph=True)(x), expected.double()) < 0.01
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(randn(64, N_IN, dtype=BF16))
    graph.replay()
    assert torch.equal(y, layer(x))
