"""The model against Hugging Face's, against one written out in thirty lines, and against itself in its other modes.

    pytest test_model.py        a minute; without a GPU the kernels run through Triton's interpreter

Errors are relative, ‖out − truth‖ / ‖truth‖, tensor by tensor. float64 shows mistakes that bf16 would hide as rounding.
"""

import copy
import functools
import gc
import importlib
import itertools
import math
import re
import runpy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kernels
import model as model_module
from model import KVCache, Llama, LlamaConfig, document_starts, sample
from runtime.hf_names import hf_names
from runtime.recompute import chunks_of_mlp, groups_of_sequences, loss_options, recompute, recomputed

recompute_file = sys.modules["runtime.recompute"]
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the interpreter's, of log(0)
PLAIN = {"fused_kernels": False, "fused_loss": False}
MODES = ["none", "selective", "full"]
OPERATIONS = {"fused_kernels", "fused_loss", "attention"}  # Llama.set_operations
RECOMPUTE = {"activation_checkpointing": "none", "mlp_chunks": None, "offload_activations": False}  # recompute


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The matrices are so small that a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# At 16 dimensions a head and theta 10,000 this keeps the first frequency, mixes the second and slows the other six.
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SMALL = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=88, vocab_size=97, block_size=64, rope_theta=10000.0,
    norm_eps=1e-3,  # not the kernels' default: one that is not handed on would show
)  # fmt: skip


def build(seed=0, dtype=FP64, config=SMALL, **settings):
    """A small model with weights large enough that attention is sharp, norms matter and texts do not repeat."""
    operations = {name: settings.pop(name) for name in OPERATIONS & settings.keys()}
    recomputes = [settings.pop(name, default) for name, default in RECOMPUTE.items()]
    model = Llama(replace(config, **settings))
    model.set_operations(**operations)
    recompute(model, *recomputes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / math.sqrt(parameter.shape[1]))
    return model.to(DEVICE, dtype)


def batch(n_batch=2, n_time=16, seed=0, vocab_size=SMALL.vocab_size):
    """Tokens and targets (B, T); every seventh target does not count."""
    tokens = torch.randint(vocab_size, (n_batch, n_time + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    targets = tokens[:, 1:].clone()
    targets.view(-1)[::7] = -100
    return tokens[:, :-1], targets


def loss_and_gradients(model, tokens, targets, doc_starts=None):
    model.zero_grad()
    loss = model(tokens, targets, doc_starts)
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def error(out, truth):
    return ((out.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_close(out, truth, tolerance):
    assert out.keys() == truth.keys()
    errors = {name: error(out[name], truth[name]) for name in truth}
    bad = {name: f"{e:.1e}" for name, e in errors.items() if not e <= tolerance}  # NaN is bad too
    assert not bad, f"relative errors above {tolerance:.1e}: {bad}"


def assert_equal(out, truth):
    assert out.keys() == truth.keys()
    bad = {name: f"{error(out[name], truth[name]):.1e}" for name in truth if not torch.equal(out[name], truth[name])}
    assert not bad, f"not the same bits, relative errors {bad}"


# ---------------------------------------------------------------------------------------------------------------------
# The same function as others compute


def written_out(w, tokens, c):
    """Llama 3 from its papers' formulas, sequence by sequence and head by head, with weights w by name: logits."""
    frequencies = []
    for i in range(c.head_dim // 2):
        f, s = c.rope_theta ** (-2 * i / c.head_dim), c.rope_scaling
        if s is not None:
            wavelength, context = 2 * math.pi / f, s["original_max_position_embeddings"]
            smooth = (context / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            if wavelength > context / s["low_freq_factor"]:
                f = f / s["factor"]
            elif wavelength >= context / s["high_freq_factor"]:
                f = (1 - smooth) * f / s["factor"] + smooth * f
        frequencies.append(f)
    T, D = tokens.shape[1], c.head_dim
    angles = torch.arange(T, dtype=FP64)[:, None] * torch.tensor(frequencies, dtype=FP64)  # (T, D/2)
    turn = torch.exp(1j * angles).to(tokens.device)
    future = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
    norm = lambda x, name: x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[name]  # noqa: E731

    def head(x):  # (T, D), the pair (i, i + D/2) one complex number
        z = torch.complex(x[:, : D // 2], x[:, D // 2 :]) * turn
        return torch.cat([z.real, z.imag], dim=1)

    def attention(x, name):
        q, k, v = (x @ w[name + "qkv_proj.weight"].T).split([c.n_head * D, c.n_kv_head * D, c.n_kv_head * D], dim=1)
        ys = []
        for h in range(c.n_head):
            kv = h // (c.n_head // c.n_kv_head)  # the key/value head that query head h reads
            qh, kh, vh = q[:, h * D : h * D + D], k[:, kv * D : kv * D + D], v[:, kv * D : kv * D + D]
            scores = (head(qh) @ head(kh).T / math.sqrt(D)).masked_fill(future, -math.inf).exp()
            ys.append(scores / scores.sum(1, keepdim=True) @ vh)
        return torch.cat(ys, dim=1) @ w[name + "o_proj.weight"].T

    def mlp(x, name):
        gate, up = (x @ w[name + "gate_up_proj.weight"].T).split(c.ffn_dim, dim=1)
        return gate / (1 + (-gate).exp()) * up @ w[name + "down_proj.weight"].T

    logits = []
    for sequence in tokens:
        x = w["tok_embeddings.weight"][sequence]
        for i in range(c.n_layer):
            x = x + attention(norm(x, f"layers.{i}.attn_norm.weight"), f"layers.{i}.attn.")
            x = x + mlp(norm(x, f"layers.{i}.mlp_norm.weight"), f"layers.{i}.mlp.")
        logits.append(norm(x, "norm.weight") @ w["lm_head.weight"].T)
    return torch.stack(logits)


def written_out_loss(logits, targets):
    counted = [(row, t) for row, t in zip(logits.flatten(0, 1), targets.flatten().tolist(), strict=True) if t != -100]
    return sum(row.exp().sum().log() - row[t] for row, t in counted) / len(counted)


@pytest.mark.parametrize("arm, n_time", [({}, 40 if HAS_GPU else 5), (PLAIN, 40)], ids=["kernels", "plain"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n_kv_head, factor", [(4, None), (2, 8.0), (1, 32.0)])
def test_model_is_the_llama_of_the_papers(n_kv_head, factor, tied, arm, n_time):
    scaling = factor and {"factor": factor, **SCALING}
    model = build(n_kv_head=n_kv_head, rope_scaling=scaling, tie_embeddings=tied, **arm)
    tokens, targets = batch(n_time=n_time)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with_head = weights | ({"lm_head.weight": weights["tok_embeddings.weight"]} if tied else {})
    logits = written_out(with_head, tokens, model.config)
    loss = written_out_loss(logits, targets)
    truth = dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True))
    assert error(model(tokens), logits) < 1e-12
    assert_close(loss_and_gradients(model, tokens, targets), {"loss": loss} | truth, 1e-12)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_model_is_hugging_faces_llama(factor, tied, n_kv_head):
    transformers = pytest.importorskip("transformers")
    scaling = factor and {"factor": factor, **SCALING}
    model = build(n_kv_head=n_kv_head, rope_scaling=scaling, tie_embeddings=tied, **PLAIN)
    c = model.config
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
            hidden_size=c.n_embd, intermediate_size=c.ffn_dim, vocab_size=c.vocab_size, rms_norm_eps=c.norm_eps,
            max_position_embeddings=c.block_size, tie_word_embeddings=tied, rope_theta=c.rope_theta,
            rope_scaling=scaling and {"rope_type": "llama3", **scaling}, attn_implementation="sdpa",
        )
    ).to(DEVICE, FP64)  # fmt: skip
    theirs = dict(hf.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [theirs.pop(hf_name) for hf_name in hf_names(name)]
            for part, value in zip(parts, parameter.split([len(part) for part in parts]), strict=True):
                part.copy_(value)
    assert not theirs, f"no weight of ours went into {list(theirs)}"
    tokens, targets = batch(n_time=c.block_size)
    out = hf(tokens)
    # their loss would shift the targets once more
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in hf.named_parameters()}
    truth = {name: torch.cat([theirs[n] for n in hf_names(name)]) for name, _ in model.named_parameters()}
    assert error(model(tokens), out.logits) < 3e-6
    assert_close(loss_and_gradients(model, tokens, targets), {"loss": loss.detach()} | truth, 3e-6)
    if factor:
        unscaled = build(n_kv_head=n_kv_head, tie_embeddings=tied, **PLAIN)
        assert error(unscaled(tokens), out.logits) > 1e-3, "the scaling made no difference: the test would miss it"


@functools.cache
def arm_result(fused_kernels, fused_loss):
    return loss_and_gradients(build(fused_kernels=fused_kernels, fused_loss=fused_loss), *batch(n_time=5))


@pytest.mark.parametrize("fused_loss", [True, False])
@pytest.mark.parametrize("fused_kernels", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_arm_and_checkpointing_mode_trains_the_same(mode, fused_kernels, fused_loss):
    settings = {"fused_kernels": fused_kernels, "fused_loss": fused_loss, "activation_checkpointing": mode}
    out = arm_result(fused_kernels, fused_loss)
    assert_close(out, arm_result(False, False), 1e-12)
    # Recomputing changes no bit, nor does 'full', whose layers are handed the sum of stream and branch; only the
    # compiler of a GPU may contract the one sum and not the other.
    again = loss_and_gradients(build(**settings), *batch(n_time=5))
    if HAS_GPU and mode == "full":
        assert_close(again, out, 1e-12)
    else:
        assert_equal(again, out)


@pytest.mark.parametrize("fused_kernels", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "offload_activations": True},
    ],
    ids=["selective", "full", "full, inputs kept elsewhere"],
)
def test_in_slices_the_mlp_trains_the_same(settings, fused_kernels):
    sliced = build(mlp_chunks=3, fused_kernels=fused_kernels, **settings)
    assert_close(loss_and_gradients(sliced, *batch(n_time=5)), arm_result(False, False), 1e-12)


@pytest.mark.parametrize("fused_kernels", [True, False])
@pytest.mark.parametrize("offload_activations", [True, False], ids=["inputs kept elsewhere", "kept"])
@pytest.mark.parametrize("groups", [2, 3])
def test_in_groups_of_sequences_a_block_trains_the_same(monkeypatch, groups, offload_activations, fused_kernels):
    tokens, targets = (torch.cat([x, x.flip(0), x[:1]]) for x in batch(n_time=3))
    plain = loss_and_gradients(build(fused_kernels=fused_kernels), tokens, targets)
    monkeypatch.setattr(recompute_file, "groups_of_sequences", lambda *_: groups)
    full = dict(activation_checkpointing="full", offload_activations=offload_activations)
    model = build(fused_kernels=fused_kernels, **full)
    assert_close(loss_and_gradients(model, tokens, targets), plain, 1e-12)


@pytest.mark.parametrize("offload_activations", [False, True])
def test_without_gradients_too_sequences_pass_through_a_block_in_groups(monkeypatch, offload_activations):
    tokens, targets = batch(n_batch=5, n_time=4)
    plain = build()(tokens, targets)
    monkeypatch.setattr(recompute_file, "groups_of_sequences", lambda *_: 3)
    model, sizes = build(activation_checkpointing="full", offload_activations=offload_activations), []
    compute = recompute_file.compute
    monkeypatch.setattr(
        recompute_file, "compute", lambda layer, x, *rest: sizes.append(len(x)) or compute(layer, x, *rest)
    )
    with torch.no_grad():
        assert abs(model(tokens, targets) - plain) < 1e-12
    assert sum(sizes) == 5 * len(model.layers) and max(sizes) == 2, sizes
    assert not (offload_activations and model.layers[0].forward.args[-1].stack), "nothing is kept for a backward"


@pytest.mark.parametrize("fp32_dweight", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_overwritten_is_not_read_again(monkeypatch, mode, fp32_dweight):
    """The same bits as where every gradient takes memory of its own."""
    loss_file = importlib.import_module("kernels.linear_cross_entropy")
    fill_chunks, over_x = loss_file._fill_chunks, []
    monkeypatch.setattr(
        loss_file,
        "_fill_chunks",
        lambda x, *rest: over_x.append(x.data_ptr() == rest[-2].data_ptr()) or fill_chunks(x, *rest),
    )
    options = {"chunk_tokens": 3, "fp32_dweight": fp32_dweight}
    monkeypatch.setattr(recompute_file, "loss_options", lambda *_, **__: dict(options))
    monkeypatch.setattr(recompute_file, "groups_of_sequences", lambda *_: 2)
    data, settings = batch(n_batch=4, n_time=2), dict(dtype=BF16, activation_checkpointing=mode)
    overwriting = loss_and_gradients(build(**settings), *data)
    assert over_x == [True]
    backward = recompute_file._Recomputed.backward
    monkeypatch.setattr(recompute_file._Recomputed, "backward", staticmethod(lambda ctx, dy: backward(ctx, dy.clone())))
    loss, norm = kernels.linear_cross_entropy, kernels.add_rms_norm
    monkeypatch.setattr(
        kernels, "linear_cross_entropy", lambda *inputs, **more: loss(*inputs, **more | {"overwrite_x": False})
    )
    monkeypatch.setattr(kernels, "add_rms_norm", lambda *inputs: norm(*inputs[:-1], overwrite_dy=False))
    monkeypatch.setattr(
        kernels, "rms_norm", lambda *inputs, alone=kernels.rms_norm: alone(*inputs[:-1], overwrite_dy=False)
    )
    assert_equal(loss_and_gradients(build(**settings), *data), overwriting)
    assert over_x == [True, False]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [True, False], ids=["read before the loss", "read after it"])
def test_a_second_head_may_read_what_the_head_reads(monkeypatch, mode, before):
    """With several chunks of logits and several groups of sequences, where memory is reused most."""
    monkeypatch.setattr(recompute_file, "loss_options", lambda *_, **__: {"chunk_tokens": 3})
    monkeypatch.setattr(recompute_file, "groups_of_sequences", lambda *_: 2)
    tokens, targets = batch(n_batch=4, n_time=2)

    def two_heads(model):
        x = model.hidden(tokens)
        value = x.new_ones(SMALL.n_embd, requires_grad=True)
        first = (x @ value).square().mean() if before else 0.0
        loss = model.lm_head(x, targets)
        loss = loss + (first if before else (x @ value).square().mean())
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return {"loss": loss.detach(), "value": value.grad} | gradients

    truth = two_heads(build(**PLAIN))
    assert_close(two_heads(build(activation_checkpointing=mode)), truth, 1e-12)


def test_a_norm_may_stand_anywhere():
    """Here after the block, where the sum hands its gradient to both of its terms."""

    def gradients(model):
        post, x = model_module.RMSNorm(SMALL).to(DEVICE, FP64), model.tok_embeddings(batch()[0])
        post.fused_kernels = model.fused_kernels
        cos, sin = model_module.rope_tables(SMALL, 0, x.shape[1], DEVICE, FP64)
        for layer in model.layers:
            x = x + post(sum(layer(x, None, cos, sin)))
        x.square().mean().backward()
        return {"post": post.weight.grad} | {name: p.grad for name, p in model.named_parameters() if "layers" in name}

    assert_close(gradients(build()), gradients(build(**PLAIN)), 1e-12)


@pytest.mark.parametrize("groups", [2, 3])
def test_weights_gradients_of_groups_are_added_exactly_and_rounded_once(groups):
    block = build(dtype=BF16, activation_checkpointing="full").layers[0]
    x, dy = (torch.randn(groups, 5, SMALL.n_embd, device=DEVICE, dtype=BF16) for _ in range(2))
    cos, sin = model_module.rope_tables(SMALL, 0, 5, DEVICE)
    weights = recompute_file.trainable_parameters(block)
    rows = (slice(i, i + 1) for i in range(groups))
    parts = [recompute_file._gradients(block, x[one], cos, sin, None, weights, dy[one])[1:] for one in rows]
    leaf = x.clone().requires_grad_()
    found = torch.autograd.grad(recomputed(block, groups, leaf, cos, sin), weights, dy.clone())
    for gradient, *of_groups in zip(found, *parts, strict=True):
        assert torch.equal(gradient, sum(part.float() for part in of_groups).to(BF16))


def test_a_block_s_residual_stream_is_freed_before_the_backward_of_its_attention(monkeypatch):
    model, streams, live = build(activation_checkpointing="full"), [], []

    def watched(*inputs, compute=recompute_file.compute):
        outputs = compute(*inputs)
        streams.append(StorageWeakRef(outputs[0].untyped_storage()))
        return outputs

    def look(_):
        gc.collect()  # the interpreter's launches are cycles that hold their arguments
        live.append(not streams[-1].expired())

    monkeypatch.setattr(recompute_file, "compute", watched)
    for layer in model.layers:
        layer.attn.o_proj.weight.register_hook(look)
    model(*batch(n_time=5)).backward()
    assert live and not any(live)


def test_a_frozen_weight_of_a_block_gets_no_gradient_and_changes_none():
    expected = loss_and_gradients(build(), *batch(n_time=5))
    model = build(activation_checkpointing="full")
    frozen = ["layers.0.mlp_norm.weight", "layers.1.attn.qkv_proj.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model(*batch(n_time=5)).backward()
    assert all(model.get_parameter(name).grad is None for name in frozen)
    for name, parameter in model.named_parameters():
        assert name in frozen or error(parameter.grad, expected[name]) < 1e-12, name


def test_full_checkpointing_takes_smaller_pieces():
    for n_tokens, chunk_tokens, fp32_dweight in ((2048, 2048, False), (3000, 768, False), (8192, 2048, False),
                                                 (8193, 2048, True)):  # fmt: skip
        expected = {"chunk_tokens": chunk_tokens, "fp32_dweight": fp32_dweight}
        assert loss_options(n_tokens, BF16, 128256, "full") == expected
        assert loss_options(n_tokens, torch.float16, 128256, "full")["fp32_dweight"], "float16 cannot hold the sums"
        assert loss_options(n_tokens, BF16, 128256, "none") == {"chunk_tokens": 4096, "fp32_dweight": True}
    assert [chunks_of_mlp(100_000, 8, *at) for at in (("none", None), ("full", None), ("full", 3))] == [1, 12, 3]
    assert [chunks_of_mlp(n, 8, "full", None) for n in (1, 16_383, 16_384)] == [1, 1, 2]
    # 4,096 wide: sums of the weights' gradients as large as what 4,096 tokens take
    assert [chunks_of_mlp(n, 4096, "full", None) for n in (32_767, 32_768)] == [1, 2]
    assert chunks_of_mlp(100_000, 8, "full", None, fused_kernels=False) == 1, "plain PyTorch would pay for it"
    assert chunks_of_mlp(12, 8, "full", 10**6) == 12, "of a token there are no slices"
    for shape, groups in {(16, 1024): 2, (112, 1024): 14, (4, 131_072): 4, (1, 131_072): 1, (15, 1024): 1}.items():
        assert groups_of_sequences(*shape, 8, None) == groups
    assert groups_of_sequences(16, 1024, 8, 3) == 1, "as it is told"


def test_inputs_kept_elsewhere_are_for_one_backward():
    """Of a forward before the last they would be the wrong ones."""
    model = build(activation_checkpointing="full", offload_activations=True, **PLAIN)
    first, second = (model(*batch(n_time=5)) for _ in range(2))
    with pytest.raises(RuntimeError, match="one backward"):
        first.backward()
    second = model(*batch(n_time=5))
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        second.backward()


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_doubles_the_gradients(mode):
    model, (tokens, targets) = build(activation_checkpointing=mode, **PLAIN), batch(n_time=5)
    loss = model(tokens, targets)
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.backward()
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()},
                 {name: 2 * grad for name, grad in once.items()}, 1e-12)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_attention_in_triton_trains_the_same(mode):
    dtype = FP32 if HAS_GPU else FP64
    ours = build(attention="triton", activation_checkpointing=mode, dtype=dtype)
    assert_close(
        loss_and_gradients(ours, *batch(n_time=5)),
        loss_and_gradients(build(dtype=dtype, **PLAIN), *batch(n_time=5)),
        3e-6 if HAS_GPU else 1e-12,
    )


def rows_of_documents():
    """Tokens, targets and doc_starts of two rows of 8 tokens, three documents in one and four in the other."""
    end = SMALL.vocab_size - 1
    tokens, targets = batch(n_time=8, vocab_size=end)
    tokens = tokens.clone()
    tokens[0, [3, 5]] = tokens[1, [0, 3, 4, 7]] = end
    return tokens, targets, document_starts(tokens, end)


def test_a_document_starts_where_the_one_before_ends():
    assert rows_of_documents()[2].tolist() == [[0, 0, 0, 3, 3, 5, 5, 5], [0, 0, 0, 3, 4, 4, 4, 7]]


@functools.cache
def documents_alone():
    """Each document a sequence of its own, for plain PyTorch."""
    model, (tokens, targets, _) = build(**PLAIN), rows_of_documents()
    for row, *ends in ((0, 0, 3, 5, 8), (1, 0, 3, 4, 7, 8)):
        for a, b in itertools.pairwise(ends):
            alone = slice(row, row + 1), slice(a, b)
            (model(tokens[alone], targets[alone]) * (targets[alone] != -100).sum() / (targets != -100).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [
    {}, PLAIN, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "mlp_chunks": 3, "offload_activations": True},
    {"activation_checkpointing": "full", "fused_kernels": False},
], ids=str)  # fmt: skip
def test_a_row_of_documents_trains_as_the_documents_alone(settings):
    model, (tokens, targets, doc_starts) = build(**settings), rows_of_documents()
    found = loss_and_gradients(model, tokens, targets, doc_starts)
    assert error(model(tokens, targets), found.pop("loss")) > 1e-3, "the documents made no difference"
    assert_close(found, documents_alone(), 1e-12)


def test_in_groups_each_sequence_has_its_own_documents(monkeypatch):
    monkeypatch.setattr(recompute_file, "groups_of_sequences", lambda *_: 2)
    found = loss_and_gradients(build(activation_checkpointing="full"), *rows_of_documents())
    del found["loss"]
    assert_close(found, documents_alone(), 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


class Watch(TorchDispatchMode):
    """Counts the operations that run, and holds a weak reference to every storage that they return."""

    def __init__(self, model):
        super().__init__()
        self.ops, self.storages = Counter(), {}
        self.weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.weights:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self):
        gc.collect()  # Triton's interpreter leaves cycles
        return sum(n_bytes for reference, n_bytes in self.storages.values() if not reference.expired())

    def calls(self, part):
        return sum(n for name, n in self.ops.items() if part in name and "backward" not in name)


def cost_of_a_layer(mode):
    """Elements a token that its forward leaves for backward, and its calls of matmuls and attention in a step."""
    n_time, costs = 256 if HAS_GPU else 4, []
    for n_layer in (1, 2):
        dtype = BF16 if HAS_GPU else FP64
        model = build(n_layer=n_layer, block_size=n_time, dtype=dtype, activation_checkpointing=mode)
        tokens, targets = batch(n_batch=1, n_time=n_time)
        with Watch(model) as seen:
            loss = model(tokens, targets)
            elements = seen.live_bytes() / (n_time * model.norm.weight.element_size())
            loss.backward()
        costs.append((elements, seen.calls("mm"), seen.calls("attention")))
    return [two - one for one, two in zip(*costs, strict=True)]


def test_checkpointing_keeps_and_repeats_what_it_says():
    C, KD, F, H = SMALL.n_embd, SMALL.n_kv_head * SMALL.head_dim, SMALL.ffn_dim, SMALL.n_head
    elements, matmuls, attentions = zip(*(cost_of_a_layer(mode) for mode in MODES), strict=True)
    attention = C + 1 + C + 2 * KD + C + H  # its norm's input and rstd; q, k, v; what it returned and its log-sum-exp
    mlp = C + 1  # its norm's input and rstd
    expected = [attention + mlp + 2 * F, attention + mlp, C]  # and gate_up; that not; the block's input alone
    # On a GPU statistics are fp32 beside bf16, and each attention pads its own.
    assert list(elements) == pytest.approx(expected, rel=0.05 if HAS_GPU else 0), f"{elements}, expected {expected}"
    assert matmuls == (12, 13, 15), "4 forward, 8 backward; repeated: gate_up_proj; all but down_proj"
    assert attentions == (1, 1, 2)


def attention_flops(q_shape, k_shape, *_, **__):
    n_batch, n_head, n_time, head_dim = q_shape
    return 4 * n_batch * n_head * n_time * k_shape[2] * head_dim


def test_flops_per_token_are_those_that_run():
    model, (tokens, targets) = build(**PLAIN), batch(n_time=64)
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # PyTorch's counter does not know it
    counter = functools.partial(FlopCounterMode, display=False, custom_mapping={cpu_attention: attention_flops})
    with counter() as forward:
        loss = model(tokens, targets)
    with counter() as backward:
        loss.backward()
    mm = torch.ops.aten.mm
    matmuls = (forward.get_flop_counts()["Global"][mm] + backward.get_flop_counts()["Global"][mm]) / tokens.numel()
    attention = sum(n for op, n in forward.get_flop_counts()["Global"].items() if op != mm) / tokens.numel()
    # Backward's attention is twice forward's, without what it recomputes; half of all of it is masked.
    assert model.flops_per_token(64) == matmuls + 3 * attention / 2
    assert model.flops_per_token(0) == matmuls


PUBLISHED = {  # parameters; n_layer, n_head, n_kv_head, n_embd, ffn_dim, tied; RoPE's factor. From Meta's model cards.
    "llama32_1b": (1_235_814_400, (16, 32, 8, 2048, 8192, True), 32.0),
    "llama32_3b": (3_212_749_824, (28, 24, 8, 3072, 8192, True), 32.0),
    "llama31_8b": (8_030_261_248, (32, 32, 8, 4096, 14336, False), 8.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_build_the_published_models(name):
    settings = runpy.run_path(str(Path(__file__).parents[1] / "config" / f"{name}.py"))
    with torch.device("meta"):
        model = Llama(LlamaConfig(**{key: settings[key] for key in settings.keys() & vars(SMALL).keys()}))
    n_params, sizes, factor = PUBLISHED[name]
    config = model.config
    assert model.n_params() == n_params
    assert sizes == (
        config.n_layer, config.n_head, config.n_kv_head, config.n_embd, config.ffn_dim, config.tie_embeddings
    )  # fmt: skip
    assert (config.vocab_size, config.rope_theta, config.norm_eps) == (128256, 500000.0, 1e-5)
    assert config.rope_scaling == {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Precision


def test_bf16_weights_keep_fp32_angles():
    settings = {"block_size": 512, "n_layer": 1, **({} if HAS_GPU else PLAIN)}
    model, truth = build(dtype=BF16, **settings), build(dtype=BF16, **settings).double()
    tables = []
    for m in (model, truth):
        m.layers[0].register_forward_pre_hook(lambda _, args: tables.extend(args[2:4]))
    tokens, _ = batch(n_time=320)
    # bf16 counts to 256 and no further: positions in it would be off by one and more here.
    assert error(model(tokens)[:, 256:], truth(tokens)[:, 256:]) < 0.02
    for table, exact in zip(tables[:2], tables[2:], strict=True):
        assert table.dtype == FP32 and torch.equal(table, exact.float())


@pytest.mark.parametrize("arm", [{}, PLAIN], ids=["kernels", "plain"])
def test_the_loss_of_bf16_weights_is_fp32(arm):
    model, (tokens, targets) = build(dtype=BF16, n_layer=1, **arm), batch(n_time=3)
    assert model(tokens, targets).dtype == FP32 and model(tokens).dtype == BF16


def test_targets_that_do_not_count_change_nothing():
    model, (tokens, targets) = build(n_layer=1), batch(n_time=4)
    out = loss_and_gradients(model, tokens, torch.full_like(targets, -100))
    assert all((value == 0).all() for value in out.values())


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_init_weights():
    config = replace(SMALL, n_embd=128, ffn_dim=256, vocab_size=500, n_layer=3)
    models = [Llama(config).to(DEVICE, dtype) for dtype in (FP32, FP32, FP32, BF16)]
    for model, seed in zip(models, (1, 1, 2, 1), strict=True):
        torch.rand(1)  # the global generator plays no part
        model.init_weights(seed)
    one, same, other, rounded = (dict(model.named_parameters()) for model in models)
    drawn = set()
    for name, weight in one.items():
        assert torch.equal(weight, same[name]) and torch.equal(weight.bfloat16(), rounded[name]), name
        if weight.ndim == 1:
            assert (weight == 1).all(), name
            continue
        assert not torch.equal(weight, other[name]), name
        std = 0.02 / math.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert weight.mean().abs() < 0.03 * std, f"{name}: mean {weight.mean():.1e}"
        drawn.add(weight.flatten()[0].item() / std)
    assert len(drawn) == 2 + 4 * 3, "two matrices were given the same draws"


def test_weights_that_nobody_knows_how_to_begin_are_refused():
    model = build()
    model.value = torch.nn.Linear(4, 1)
    with pytest.raises(NotImplementedError, match="init_weights of model.py does not know how value.bias begins"):
        model.init_weights(1)
    model.value.register_buffer("mean", torch.zeros(1))
    with pytest.raises(NotImplementedError, match="does not know how the buffer value.mean begins"):
        model.init_weights(1)


def test_a_tied_head_stays_the_embedding():
    model = build(tie_embeddings=True)
    with torch.device("meta"):
        empty = Llama(model.config)
    other = build(seed=1, tie_embeddings=True)
    other.load_state_dict(model.state_dict())
    for m in (model, copy.deepcopy(model), copy.deepcopy(model).to(FP32), empty.to_empty(device=DEVICE), other):
        assert m.lm_head.weight is m.tok_embeddings.weight
        assert sum(name.endswith(("lm_head.weight", "embeddings.weight")) for name, _ in m.named_parameters()) == 1
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert build().lm_head.weight is not build().tok_embeddings.weight


@pytest.mark.parametrize("arm", [{}, PLAIN], ids=["kernels", "plain"])
def test_a_few_steps_learn_a_batch(arm):
    model, (tokens, targets) = build(dtype=FP32, n_layer=1, tie_embeddings=True, **arm), batch(n_time=3)
    model.init_weights(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 4 and losses[-1] < 1, losses  # log 97 is 4.6


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"n_embd": 60}, "n_embd 60 must be n_head 4 times an even head size"),
        ({"n_embd": 66}, "n_embd 66 must be n_head 4 times an even head size"),
        ({"n_kv_head": 3}, "n_head 4 must be a multiple of n_kv_head 3"),
        ({"mlp_chunks": 0, "activation_checkpointing": "full"}, "mlp_chunks 0: at least 1"),
        ({"mlp_chunks": 2}, "mlp_chunks 2: at least 1, and 1 without activation_checkpointing"),
        ({"offload_activations": True}, "offload_activations needs activation_checkpointing 'full'"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing 'some': none, selective or full"),
        ({"attention": "flash"}, "attention 'flash': auto, sdpa or triton"),
        ({"attention": "triton", "n_head": 8}, "attention 'triton' knows heads of 16, 32, 64 and 128, not of 8"),
        ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling has \['factor'\], expected \['factor', 'high_freq_factor'"),
        ({"rope_scaling": {"factor": 8.0, "rope_type": "llama3", **SCALING}}, "rope_scaling has .*'rope_type'"),
    ],
)
def test_settings_that_cannot_be_say_so(settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)


@pytest.mark.parametrize("change, message", [
    ({"factor": 0}, "its values must be numbers above 0"),
    ({"factor": "8"}, "its values must be numbers above 0"),
    ({"low_freq_factor": 4.0}, "low_freq_factor must be below high_freq_factor"),
    ({1: 2.0}, "rope_scaling has ['1', 'factor', "),
])  # fmt: skip
def test_scalings_that_cannot_be_say_so(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SMALL, rope_scaling=SCALING | {"factor": 8.0} | change)


def test_too_long_a_sequence_says_so():
    with pytest.raises(ValueError, match="65 positions, but block_size is 64"):
        build(**PLAIN)(batch(n_time=65)[0])


def test_documents_where_text_is_written_say_so():
    model, tokens = build(**PLAIN), batch()[0]
    caches = [KVCache(SMALL, len(tokens), DEVICE, FP64) for _ in model.layers]
    with pytest.raises(ValueError, match="doc_starts with caches"):
        model(tokens, doc_starts=document_starts(tokens, 0), caches=caches)


# ---------------------------------------------------------------------------------------------------------------------
# Generation


def texts(model, prompt, n=12, seed=0, **settings):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.stack(list(model.generate(prompt, n, generator=generator, **settings)), dim=1)  # (B, n)


def greedy_without_cache(model, prompt, n):
    """Reads the whole context again for each token. Past block_size: without the older half of it."""
    block_size = model.config.block_size
    context, out = prompt[:, -block_size:], []
    for _ in range(n):
        if context.shape[1] > block_size:  # block_size tokens and the newest: drop half of the former
            context = context[:, block_size - block_size // 2 :]
        out.append(model(context)[:, -1].argmax(-1, keepdim=True))
        context = torch.cat([context, out[-1]], dim=1)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("n_prompt", [1, 5, 8, 20])  # a token, some, block_size, more than that
@pytest.mark.parametrize("block_size", [8, 7, 1])
def test_generation_with_the_cache_equals_generation_without(block_size, n_prompt):
    model, prompt = build(block_size=block_size, **PLAIN), batch(n_batch=3, n_time=n_prompt)[0]
    text, expected = texts(model, prompt, n=30, temperature=0), greedy_without_cache(model, prompt, 30)
    assert torch.equal(text, expected), f"{text.tolist()}\nexpected\n{expected.tolist()}"
    assert len(text.unique()) > 5, "a text that repeats itself shows nothing"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "full", **PLAIN}]
)
def test_the_cache_changes_no_logits(settings, gradients):
    model, tokens = build(block_size=12, **settings), batch(n_time=9)[0]
    caches = [KVCache(model.config, 2, DEVICE, FP64) for _ in model.layers]
    with torch.set_grad_enabled(gradients):
        parts = [model(part, caches=caches) for part in tokens.split([5, 1, 1, 1, 1], dim=1)]
        assert error(torch.cat(parts, dim=1), model(tokens)[:, 4:]) < 1e-12  # the last position of each part
    with pytest.raises(ValueError, match="13 positions, but block_size is 12"):
        for _ in range(4):
            model(tokens[:, :1], caches=caches)
    with pytest.raises(ValueError, match="4 tokens after 12 in the caches: only one at a time"):
        model(tokens[:, :4], caches=caches)


def test_sampling_settings_that_leave_one_token_are_greedy():
    model, prompt = build(**PLAIN), batch(n_batch=3)[0]
    greedy = texts(model, prompt, temperature=0)
    for settings in (
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_p": 1e-320},
        {"temperature": 1e-4},
        {"top_k": 1, "top_p": 1.0},
    ):
        assert torch.equal(texts(model, prompt, **settings), greedy), settings
    assert not torch.equal(texts(model, prompt), greedy)


def test_the_same_seed_writes_the_same_text():
    model, prompt = build(**PLAIN), batch(n_batch=3)[0]
    assert torch.equal(texts(model, prompt, seed=1), texts(model, prompt, seed=1))
    assert not torch.equal(texts(model, prompt, seed=1), texts(model, prompt, seed=2))
    assert torch.equal(texts(model, prompt, top_k=10**6, top_p=1.0), texts(model, prompt))


def test_tokens_are_drawn_from_their_probabilities():
    logits = torch.tensor([1.0, 3.0, -2.0, 2.0, 0.0], device=DEVICE)
    cases = [  # temperature, top_k, top_p, who remains; their probabilities are 0.64, 0.24, 0.09, 0.03, 0.00
        ((1.0, None, None), [0, 1, 2, 3, 4]),
        ((2.0, 2, None), [1, 3]),
        ((1.0, None, 0.7), [1, 3]),  # the second carries the sum past 0.7
        ((1.0, 4, 0.95), [0, 1, 3]),
    ]
    for (temperature, top_k, top_p), kept in cases:
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = sample(logits.expand(20000, -1), temperature, top_k, top_p, generator)
        shares = torch.bincount(drawn, minlength=5) / 20000
        only = torch.full_like(logits, -math.inf)
        only[kept] = logits[kept] / temperature
        worst = (shares - only.softmax(0)).abs().max().item()
        assert worst < 0.015 and (shares[only.isinf()] == 0).all(), f"{temperature, top_k, top_p}: {shares.tolist()}"


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}])
def test_sampling_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=r"must be at least 0, top_k .* in \(0, 1\]"):
        next(build(n_layer=1, **PLAIN).generate(batch()[0], 2, **settings))


def test_generate_leaves_the_callers_gradients_on():
    stream = build(n_layer=1, **PLAIN).generate(batch()[0], 2)
    assert not next(stream).requires_grad and torch.is_grad_enabled()


# ---------------------------------------------------------------------------------------------------------------------
# FSDP2 and torch.compile


@pytest.fixture
def mesh():
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def sharded(mesh, config, mode="none", fused=True, **policy):
    """As train.py builds it: on no device, sharded, then given memory and weights."""
    with torch.device("meta"):
        model = Llama(config)
    model.set_operations(fused, fused)
    recompute(model, mode)
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy, cast_forward_inputs=False))
    for layer in model.layers:
        fully_shard(layer, **options)
    if not config.tie_embeddings:
        fully_shard(model.tok_embeddings, **options)
        model.tok_embeddings.set_unshard_in_backward(False)
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    model.to_empty(device=DEVICE).init_weights(1)
    return model


def whole(tensors):
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


@pytest.mark.parametrize("tied, mode", [(True, "none"), (False, "full"), (True, "selective")])
def test_fsdp_trains_as_the_plain_model(mesh, tied, mode):
    config = replace(SMALL, tie_embeddings=tied)
    models = [sharded(mesh, config, mode), Llama(config).to(DEVICE)]
    models[1].init_weights(1)
    for step in range(2):  # the second step shows what the update did to a tied weight
        out, truth = (whole(loss_and_gradients(model, *batch(n_time=3, seed=step))) for model in models)
        assert_close(out, truth, 1e-6)
        for model in models:
            torch.optim.SGD(model.parameters(), lr=1.0).step()
    out, truth = (whole(model.state_dict()) for model in models)
    assert_close(out, truth, 1e-6)
    assert not tied or models[0].lm_head.weight is models[0].tok_embeddings.weight


def test_fsdp_computes_in_bf16_and_keeps_fp32(mesh):
    model, truth = sharded(mesh, SMALL, fused=False, param_dtype=BF16, reduce_dtype=FP32), build(**PLAIN)
    truth.init_weights(1)
    out = whole(loss_and_gradients(model, *batch()))
    assert all(value.dtype == FP32 for value in out.values())
    assert_close(out, loss_and_gradients(truth, *batch()), 0.03)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unit", ["whole model", "each block"])
def test_it_compiles_without_graph_breaks(unit, mode):
    # Without a GPU only the capture is tested: the interpreter cannot be captured, and inductor needs a compiler.
    arm, backend, dtype = ({}, "inductor", BF16) if HAS_GPU else (PLAIN, "aot_eager", FP32)
    torch.compiler.reset()
    model = build(dtype=dtype, n_layer=1, activation_checkpointing=mode, **arm)
    truth = loss_and_gradients(model, *batch())
    for module in [model] if unit == "whole model" else model.layers:
        module.compile(fullgraph=True, backend=backend)
    assert_close(loss_and_gradients(model, *batch()), truth, 0.03 if HAS_GPU else 1e-5)
    if HAS_GPU:  # attention that knows documents is a kernel in every arm
        doc_starts = document_starts(batch()[0], 7)
        truth = loss_and_gradients(build(dtype=dtype, n_layer=1, **arm), *batch(), doc_starts)
        assert_close(loss_and_gradients(model, *batch(), doc_starts), truth, 0.03)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU

LARGE = replace(SMALL, n_head=8, n_embd=512, ffn_dim=1024, vocab_size=1000, block_size=512)


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
def test_bf16_on_a_gpu_is_as_close_to_float64_as_plain_pytorch(mode):
    tokens, targets = batch(n_batch=4, n_time=512, vocab_size=LARGE.vocab_size)
    results = [
        loss_and_gradients(build(dtype=BF16, config=LARGE, **arm), tokens, targets)
        for arm in ({}, {"activation_checkpointing": mode}, PLAIN)
    ]
    truth = loss_and_gradients(build(dtype=BF16, config=LARGE, **PLAIN).double(), tokens, targets)
    assert torch.equal(results[0]["loss"], results[1]["loss"])  # only backward's order of sums may differ
    for name, exact in truth.items():
        ours, plain = error(results[1][name], exact), error(results[2][name], exact)
        assert ours <= 1.2 * plain + 2**-8, f"{name}: relative error {ours:.1e}, plain PyTorch has {plain:.1e}"


@needs_gpu
@pytest.mark.parametrize("attention, operator", [
    ("sdpa", "_scaled_dot_product_cudnn_attention"), ("triton", "flash_attention"), ("auto", "flash_attention"),
])  # fmt: skip
def test_hopper_runs_the_attention_that_it_is_asked_for(attention, operator):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("before Hopper flash attention comes first")
    model, (tokens, targets) = build(dtype=BF16, config=LARGE, attention=attention), batch(n_time=512)
    with Watch(model) as seen:
        model(tokens, targets).backward()
    assert seen.calls("attention") == seen.ops[operator] == LARGE.n_layer, seen.ops
