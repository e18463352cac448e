"""Recomputation, chunks of the MLP, groups of sequences, offloaded inputs: each trains like the plain model."""

import functools
import itertools

import pytest
import torch

import kernels
import kernels.attention as attention_file
import model as model_module
from kernels import recompute as recompute_file
from kernels.recompute import recomputed
from model import Block, Execution, document_starts
from tests.test_model import (
    BF16,
    DEVICE,
    FP32,
    FP64,
    HAS_GPU,
    MODES,
    PLAIN,
    SMALL,
    assert_close,
    assert_equal,
    batch,
    build,
    error,
    loss_and_gradients,
)
from tests.watch import Watch

FULL = {"checkpointing": "full"}
SELECTIVE = {"checkpointing": "selective"}
OFFLOADED = {"offload_activations": True}
SLICED = [SELECTIVE | OFFLOADED, FULL | OFFLOADED]
WAYS = [{"kernels": "blocks"}] + [{"kernels": kernels, **way} for kernels in ("all", "none") for way in (
    *({"checkpointing": mode} for mode in MODES),
    *({"mlp_chunks": 3, **way} for way in SLICED),
    {"groups": 2, **FULL, **OFFLOADED},
    {"groups": 3, **FULL},
)]  # fmt: skip


def executed(monkeypatch, groups=None, **settings):
    """A model executed in one of WAYS."""
    if groups:
        monkeypatch.setattr(Execution, "groups_of_sequences", lambda *_: groups)
    return build(**settings)


@functools.cache
def not_recomputed(kernels):
    return loss_and_gradients(build(kernels=kernels), *batch(3, 2))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_execute_a_model_trains_the_same(monkeypatch, way):
    found = loss_and_gradients(executed(monkeypatch, **way), *batch(3, 2))
    assert_close(found, not_recomputed("none"), 1e-12)
    # Recomputing changes no bit, nor does 'full', whose layers get the sum of stream and branch; only a GPU's compiler
    # may contract the one sum and not the other.
    in_parts = {"mlp_chunks", "groups"} & way.keys()
    if not in_parts and not (HAS_GPU and way.get("checkpointing") == "full"):
        assert_equal(found, not_recomputed(way["kernels"]))


def test_attention_in_triton_trains_the_same(monkeypatch):
    dtype = FP32 if HAS_GPU else FP64
    calls = []
    attention = attention_file.flash_attention
    monkeypatch.setattr(attention_file, "flash_attention", lambda *inputs: calls.append(1) or attention(*inputs))
    ours = build(attention="triton", dtype=dtype, **FULL)
    plain = build(dtype=dtype, **PLAIN)
    found, truth = (loss_and_gradients(model, *batch(1, 5)) for model in (ours, plain))
    assert_close(found, truth, 3e-6 if HAS_GPU else 1e-12)
    assert len(calls) == 2 * SMALL.n_layer, "in forward and for backward, of the one model alone"


@pytest.mark.parametrize("offload_activations", [False, True])
def test_evaluation_runs_blocks_in_groups_of_sequences_and_offloads_nothing(monkeypatch, offload_activations):
    tokens, targets = batch(n_batch=5, n_time=2)
    plain = build(n_layer=1, **PLAIN)(tokens, targets)
    sizes = []
    model = executed(monkeypatch, groups=3, n_layer=1, **FULL, offload_activations=offload_activations)
    compute = Block.compute
    watched = lambda layer, x, *rest: sizes.append(len(x)) or compute(layer, x, *rest)  # noqa: E731
    monkeypatch.setattr(Block, "compute", watched)
    with torch.no_grad():
        assert abs(model(tokens, targets) - plain) < 1e-12
    assert sum(sizes) == 5 and max(sizes) == 2, sizes
    assert not (offload_activations and model.offloaded.saved[0]), "nothing is kept for a backward"


@pytest.mark.parametrize("mode, before", [("none", False), ("full", True), ("full", False)])
def test_second_head_may_read_the_input_of_the_first(monkeypatch, mode, before):
    """With several chunks of logits and several groups of sequences, which reuse the most memory."""
    monkeypatch.setattr(Execution, "loss_options", lambda *_: {"chunk_tokens": 3})
    tokens, targets = batch(n_batch=2, n_time=2)

    def two_heads(model):
        x = model.hidden(tokens)
        value = x.new_ones(SMALL.n_embd, requires_grad=True)
        first = (x @ value).square().mean() if before else 0.0
        loss = model.lm_head(x, targets)
        loss = loss + (first if before else (x @ value).square().mean())
        read = {"x": x, "value": value} | dict(model.named_parameters())  # x's gradient: no norm may write over it
        return {"loss": loss.detach()} | dict(zip(read, torch.autograd.grad(loss, read.values()), strict=True))

    truth = two_heads(build(**PLAIN))
    assert_close(two_heads(executed(monkeypatch, groups=2, checkpointing=mode)), truth, 1e-12)


def test_full_checkpointing_chooses_chunks_by_the_number_of_tokens():
    full = Execution(checkpointing="full")
    assert [full.chunks_of_mlp(2**16, n_embd) for n_embd in (2048, 8192)] == [4, 2], "of 16,384 or 4C tokens at least"
    assert full.groups_of_sequences(3, 2**15, 2048) == 3, "six chunks, but three sequences"
    assert Execution(**FULL, mlp_chunks=3).groups_of_sequences(8, 2**13, 64) == 1
    assert Execution().chunks_of_mlp(2**16, 2048) == 1
    for n_tokens, dtype, chunk_tokens, fp32_dweight in (
        (2048, BF16, 2048, False), (3000, BF16, 768, False), (8192, BF16, 2048, False), (8193, BF16, 2048, True),
        (8192, torch.float16, 2048, True),  # cannot hold the sums
        (8192, FP32, 1024, True),
    ):  # fmt: skip
        options = full.loss_options(n_tokens, 128_256, dtype)
        assert options == {"chunk_tokens": chunk_tokens, "fp32_dweight": fp32_dweight}
    assert Execution().loss_options(8192, 128_256, BF16) == {"chunk_tokens": 4096, "fp32_dweight": True}


def test_weight_gradients_of_groups_are_summed_in_float32_and_rounded_once():
    groups = 3
    block = build(dtype=BF16, checkpointing="full").layers[0]
    x, dy = (torch.randn(groups, 2, SMALL.n_embd, device=DEVICE, dtype=BF16) for _ in range(2))
    cos, sin = model_module.rope_tables(SMALL, 0, 2, DEVICE)
    weights = recompute_file.trainable_parameters(block)
    rows = (slice(i, i + 1) for i in range(groups))
    compute = lambda x, rows, again: block.compute(x, None, cos, sin, for_backward=again)  # noqa: E731
    parts = [recompute_file._gradients(compute, x[one], None, weights, dy[one])[1:] for one in rows]
    leaf = x.clone().requires_grad_()
    found = torch.autograd.grad(recomputed(block, compute, leaf, None, groups), weights, dy.clone())
    for gradient, *of_groups in zip(found, *parts, strict=True):
        assert torch.equal(gradient, sum(part.float() for part in of_groups).to(BF16))


def test_weight_gradients_of_slices_are_summed_in_float32_and_rounded_once():
    mlp = build(dtype=BF16).layers[0].mlp
    found = []
    x, dy = (torch.randn(12, SMALL.n_embd, device=DEVICE, dtype=BF16) for _ in range(2))
    for chunks in (1, 3):
        norm = build(dtype=BF16).layers[0].mlp_norm
        y, _ = kernels.add_norm_mlp(x, None, norm, mlp.gate_up_proj, mlp.down_proj, save_gate_up=False, chunks=chunks)
        found.append(torch.autograd.grad(y, [mlp.gate_up_proj.weight, mlp.down_proj.weight], dy))
    for whole, sliced in zip(*found, strict=True):
        assert (whole != sliced).float().mean() < 0.05, "summed in bfloat16 a third of them would differ"


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_offloaded_activations_serve_one_backward(mode):
    """After a later forward they would be the wrong ones."""
    model = build(checkpointing=mode, offload_activations=True, **PLAIN)
    first, second = (model(*batch(n_time=5)) for _ in range(2))
    with pytest.raises(RuntimeError, match="one backward"):
        first.backward()
    second = model(*batch(n_time=5))
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        second.backward()


def rows_of_documents():
    """Tokens, targets and doc_starts of two rows of 5 tokens, three documents in one and four in the other."""
    end = SMALL.vocab_size - 1
    tokens, targets = batch(n_time=5, vocab_size=end)
    tokens = tokens.clone()
    tokens[0, [1, 3]] = tokens[1, [0, 2, 3, 4]] = end
    return tokens, targets, document_starts(tokens, end)


@functools.cache
def documents_alone():
    """Each document as its own sequence, for plain PyTorch."""
    model = build(**PLAIN)
    tokens, targets, _ = rows_of_documents()
    for row, *ends in ((0, 0, 1, 3, 5), (1, 0, 2, 3, 4, 5)):
        for a, b in itertools.pairwise(ends):
            alone = slice(row, row + 1), slice(a, b)
            (model(tokens[alone], targets[alone]) * (targets[alone] != -100).sum() / (targets != -100).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [
    {}, PLAIN, FULL | OFFLOADED | {"mlp_chunks": 3}, FULL | {"groups": 2},
], ids=str)  # fmt: skip
def test_rows_of_documents_train_as_each_document_alone(monkeypatch, settings):
    model = executed(monkeypatch, **settings)
    tokens, targets, doc_starts = rows_of_documents()
    found = loss_and_gradients(model, tokens, targets, doc_starts)
    with torch.no_grad():
        assert error(model(tokens, targets, doc_starts), found["loss"]) < 1e-12, "evaluation has the same documents"
    assert error(model(tokens, targets), found.pop("loss")) > 1e-3, "the documents made no difference"
    assert_close(found, documents_alone(), 1e-12)


def cost_of_a_layer(mode):
    """Elements per token that forward keeps for backward, and calls of matmuls and attention in a step."""
    n_time = 256 if HAS_GPU else 2
    costs = []
    for n_layer in (1, 2):
        dtype = BF16 if HAS_GPU else FP64
        model = build(n_layer=n_layer, block_size=n_time, dtype=dtype, checkpointing=mode)
        tokens, targets = batch(n_batch=1, n_time=n_time)
        with Watch() as seen:
            loss = model(tokens, targets)
            elements = seen.left_beside(model) / (n_time * model.norm.weight.element_size())
            loss.backward()
        costs.append((elements, seen.calls("mm"), seen.calls("attention")))
    return [two - one for one, two in zip(*costs, strict=True)]


def test_each_checkpointing_mode_saves_and_recomputes_what_it_should():
    C = SMALL.n_embd
    KD = SMALL.n_kv_head * SMALL.head_dim
    F = SMALL.ffn_dim
    H = SMALL.n_head
    elements, matmuls, attentions = zip(*(cost_of_a_layer(mode) for mode in MODES), strict=True)
    attention = C + 1 + C + 2 * KD + C + H  # its norm's input and rstd; q, k, v; what it returned and its log-sum-exp
    mlp = C + 1  # its norm's input and rstd
    expected = [attention + mlp + 2 * F, attention + mlp, C]  # with gate_up; without it; only the block's input
    # On a GPU statistics are fp32 beside bf16 tensors, and each attention pads its own.
    assert list(elements) == pytest.approx(expected, rel=0.05 if HAS_GPU else 0), f"{elements}, expected {expected}"
    assert matmuls == (12, 13, 15), "4 forward, 8 backward; repeated: gate_up_proj; all but down_proj"
    assert attentions == (1, 1, 2)
