"""The model against Hugging Face's, and against itself under FSDP and torch.compile; test_recompute.py tests its modes.

    pytest tests/test_model.py  a minute; without a GPU the kernels run through Triton's interpreter

Errors are relative, ‖out − truth‖ / ‖truth‖, tensor by tensor. float64 shows mistakes that bf16 would hide as rounding.
"""

import copy
import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode

import model as model_module
from benchmarks.trainers import llama_config
from kernels.attention import activate_flash_attention_4
from model import Execution, Llama, LlamaConfig, document_starts
from plain_llama import PlainLlama
from runtime.hf import HIDDEN_ACTS, hf_names
from test_kernels import BF16, DEVICE, FP32, FP64, HAS_GPU, needs_gpu
from tests.published import hf_llama
from tests.watch import Watch

PLAIN = {"kernels": "none"}
MODES = ["none", "selective", "full"]


# With heads of 16 and theta 10,000 this keeps the first frequency, blends the second and slows down the other six.
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SMALL = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=88, vocab_size=97, block_size=64, rope_theta=10000.0,
    norm_eps=1e-3,  # not the kernels' default, so that failing to pass it on shows
)  # fmt: skip


def build(seed=0, dtype=FP64, config=SMALL, **settings):
    """A small model with weights large enough that attention is sharp, norms matter and texts do not repeat."""
    how = {name: settings.pop(name) for name in Execution.__dataclass_fields__ if name in settings}
    model = Llama(replace(config, **settings), Execution(**how))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / math.sqrt(parameter.shape[1]))
    return model.to(DEVICE, dtype)


def batch(n_batch=2, n_time=16, seed=0, vocab_size=SMALL.vocab_size):
    """Tokens and targets (B, T); every seventh target is ignored."""
    tokens = torch.randint(vocab_size, (n_batch, n_time + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    targets = tokens[:, 1:].clone()
    targets.view(-1)[::7] = -100
    return tokens[:, :-1], targets


def loss_and_gradients(model, tokens, targets, *doc_starts):
    model.zero_grad()
    loss = model(tokens, targets, *doc_starts)
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
# The same function as other implementations


# Key/value heads, RoPE's factor, whether the embedding is the head, activation.
VARIANTS = [
    (2, 8.0, False, "silu"), (1, 32.0, True, "gelu_tanh"), (4, None, True, "silu"), (2, None, False, "gelu_tanh"),
]  # fmt: skip
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def plain_names(name):
    """The names in plain_llama.py for one of ours."""
    module = name.split(".")[-2]
    return [name.replace(module, part) for part in PACKED.get(module, (module,))]


def apart(config, tensors, names_of):
    """Tensors by the names of another implementation, which has every matrix by itself."""
    found = {}
    for name, x in tensors.items():
        rows = config.packed_rows.get(name.split(".")[-2], (len(x),))
        found |= zip(names_of(name), x.split(rows), strict=True)
    return found


def of_variant(n_kv_head, factor, tied, **arm):
    scaling = factor and {"factor": factor, **SCALING}
    return build(n_kv_head=n_kv_head, rope_scaling=scaling, tie_embeddings=tied, **arm)


@pytest.mark.parametrize("n_kv_head, factor, tied, activation, arm, n_time", [
    *((*variant, PLAIN, SMALL.block_size) for variant in VARIANTS),
    *((*variant, {}, 40 if HAS_GPU else 5) for variant in VARIANTS[: 4 if HAS_GPU else 2]),
])  # fmt: skip
def test_model_is_plain_llama(n_kv_head, factor, tied, activation, arm, n_time, monkeypatch):
    monkeypatch.setattr(model_module, "ACTIVATION", activation)
    model = of_variant(n_kv_head, factor, tied, **arm)
    tokens, targets = batch(n_time=n_time)
    plain = PlainLlama(model.config).to(DEVICE, FP64)
    plain.load_state_dict(apart(model.config, dict(model.named_parameters()), plain_names), strict=not tied)
    assert error(model(tokens), plain(tokens)) < 1e-12
    found = loss_and_gradients(model, tokens, targets)
    truth = loss_and_gradients(plain, tokens, targets)
    assert error(found.pop("loss"), truth.pop("loss")) < 1e-12
    assert_close(apart(model.config, found, plain_names), truth, 1e-12)


@pytest.mark.parametrize("n_kv_head, factor, tied, activation", VARIANTS)
def test_model_is_hugging_faces(n_kv_head, factor, tied, activation, monkeypatch):
    monkeypatch.setattr(model_module, "ACTIVATION", activation)
    model = of_variant(n_kv_head, factor, tied, **PLAIN)
    hf = hf_llama(model.config, HIDDEN_ACTS[activation]).to(DEVICE, FP64)
    hf.load_state_dict(apart(model.config, dict(model.named_parameters()), hf_names), strict=not tied)
    tokens, targets = batch(n_time=SMALL.block_size)
    logits = model(tokens)
    found = loss_and_gradients(model, tokens, targets)
    their_logits = hf(tokens).logits
    # their loss would shift the targets again
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    assert error(logits, their_logits) < 3e-6
    assert error(found.pop("loss"), their_loss) < 3e-6
    truth = {name: parameter.grad for name, parameter in hf.named_parameters()}
    assert_close(apart(model.config, found, hf_names), truth, 3e-6)
    if factor:
        unscaled = of_variant(n_kv_head, None, tied, **PLAIN)
        assert error(unscaled(tokens), their_logits) > 1e-3, "the scaling made no difference: the test would miss it"


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


def attention_flops(q_shape, k_shape, *_, **__):
    n_batch, n_head, n_time, head_dim = q_shape
    return 4 * n_batch * n_head * n_time * k_shape[2] * head_dim


def test_flops_per_token_are_those_that_run():
    model = build(**PLAIN)
    tokens, targets = batch(n_time=64)
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


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_build_the_published_models(name):
    with torch.device("meta"):
        model = Llama(llama_config(f"config/{name}.py"))
    n_params, sizes, factor = PUBLISHED[name]
    config = model.config
    assert model.n_params() == n_params
    assert sizes == (
        config.n_layer, config.n_head, config.n_kv_head, config.n_embd, config.ffn_dim, config.tie_embeddings
    )  # fmt: skip
    assert (config.vocab_size, config.rope_theta, config.norm_eps) == (128256, 500000.0, 1e-5)
    assert config.rope_scaling == SCALING | {"factor": factor, "original_max_position_embeddings": 8192}


# ---------------------------------------------------------------------------------------------------------------------
# Precision


def test_bf16_weights_keep_fp32_angles_and_give_an_fp32_loss():
    settings = {"block_size": 512, "n_layer": 1, **({} if HAS_GPU else PLAIN)}
    model = build(dtype=BF16, **settings)
    truth = build(dtype=BF16, **settings).double()
    tables = []
    for m in (model, truth):
        m.layers[0].register_forward_pre_hook(lambda _, args: tables.extend(args[2:4]))
    tokens, targets = batch(n_time=320)
    # bf16 counts only to 256: positions in it would be off by one or more here.
    assert error(model(tokens)[:, 256:], truth(tokens)[:, 256:]) < 0.02
    for table, exact in zip(tables[:2], tables[2:], strict=True):
        assert table.dtype == FP32 and torch.equal(table, exact.float())
    angles = torch.outer(torch.arange(320.0, dtype=FP64), 10000.0 ** -(torch.arange(0, 16, 2, dtype=FP64) / 16))
    assert error(tables[2].cpu(), angles.cos()) < 1e-12
    assert model(tokens, targets).dtype == FP32 and model(tokens).dtype == BF16


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_init_weights_draws_the_same_normal_numbers_for_every_dtype():
    config = replace(SMALL, n_embd=128, ffn_dim=256, vocab_size=500, n_layer=3)
    models = [Llama(config).to(DEVICE, dtype) for dtype in (FP32, FP32, FP32, BF16)]
    for model, seed in zip(models, (1, 1, 2, 1), strict=True):
        torch.rand(1)  # the global generator must not matter
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
    assert len(drawn) == sum(weight.ndim > 1 for weight in one.values()), "two matrices were given the same draws"


def test_init_weights_refuses_parameters_it_does_not_know():
    model = build()
    model.value = torch.nn.Linear(4, 1)
    with pytest.raises(NotImplementedError, match="does not know how to initialize value.bias"):
        model.init_weights(1)
    model.value.register_buffer("mean", torch.zeros(1))
    with pytest.raises(NotImplementedError, match="does not know how to initialize the buffer value.mean"):
        model.init_weights(1)


def test_tied_head_stays_the_embedding():
    model = build(tie_embeddings=True)
    with torch.device("meta"):
        empty = Llama(model.config)
    other = build(seed=1, tie_embeddings=True)
    other.load_state_dict(model.state_dict())
    for m in (model, copy.deepcopy(model), copy.deepcopy(model).to(FP32), empty.to_empty(device=DEVICE), other):
        assert m.lm_head.weight is m.tok_embeddings.weight
        assert sum(name.endswith(("lm_head.weight", "tok_embeddings.weight")) for name, _ in m.named_parameters()) == 1
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert build().lm_head.weight is not build().tok_embeddings.weight


LLAMA3 = {"factor": 8.0, **SCALING}
INVALID = [  # most may stand in a config.json
    {"n_layer": 0}, {"n_embd": 60}, {"n_embd": 66}, {"n_kv_head": 3}, {"norm_eps": -1.0}, {"rope_theta": math.inf},
    {"rope_scaling": {"factor": 8.0}}, {"rope_scaling": LLAMA3 | {1: 2.0}}, {"rope_scaling": LLAMA3 | {"factor": 0}},
    {"rope_scaling": LLAMA3 | {"factor": "8"}}, {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
    {"mlp_chunks": 0, "checkpointing": "full"}, {"mlp_chunks": 2}, {"kernels": "some"}, {"offload_activations": True},
    {"checkpointing": "some"}, {"attention": "flash"}, {"attention": "triton", "n_head": 8},
]  # fmt: skip


@pytest.mark.parametrize("settings", INVALID, ids=str)
def test_invalid_settings_are_refused_by_name(settings):
    name = next(iter(settings))
    with pytest.raises(ValueError, match=name):
        build(**settings)


def test_a_sequence_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="65 positions, but block_size is 64"):
        build(**PLAIN)(*batch(n_time=65))


# ---------------------------------------------------------------------------------------------------------------------
# FSDP2 and torch.compile


@pytest.fixture
def mesh():
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def sharded(mesh, config, mode):
    """As train.py builds it: on the meta device, sharded, then given memory and weights."""
    with torch.device("meta"):
        model = Llama(config, Execution(checkpointing=mode))
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
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


@pytest.mark.parametrize("tied, mode", [(True, "none"), (False, "full")])
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


@pytest.mark.parametrize("unit, mode", [("whole model", "none"), *(("each block", mode) for mode in MODES)])
def test_model_compiles_without_graph_breaks(unit, mode):
    # Without a GPU only the capture is tested: the interpreter cannot be captured, and inductor needs a compiler.
    arm, backend, dtype = ({}, "inductor", BF16) if HAS_GPU else (PLAIN, "aot_eager", FP32)
    torch.compiler.reset()
    model = build(dtype=dtype, n_layer=1, checkpointing=mode, **arm)
    truth = loss_and_gradients(model, *batch())
    for module in [model] if unit == "whole model" else model.layers:
        module.compile(fullgraph=True, backend=backend)
    assert_close(loss_and_gradients(model, *batch()), truth, 0.03 if HAS_GPU else 1e-5)
    if HAS_GPU:  # attention with documents is a kernel in every arm
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
        for arm in ({}, {"checkpointing": mode}, PLAIN)
    ]
    truth = loss_and_gradients(build(dtype=BF16, config=LARGE, **PLAIN).double(), tokens, targets)
    assert torch.equal(results[0]["loss"], results[1]["loss"])  # only the order of sums in backward may differ
    for name, exact in truth.items():
        ours = error(results[1][name], exact)
        plain = error(results[2][name], exact)
        assert ours <= 1.2 * plain + 2**-8, f"{name}: relative error {ours:.1e}, plain PyTorch has {plain:.1e}"


@needs_gpu
@pytest.mark.parametrize("attention, operator", [
    ("sdpa", "_scaled_dot_product_cudnn_attention"), ("triton", "flash_attention"), ("auto", "flash_attention"),
])  # fmt: skip
def test_hopper_runs_the_attention_asked_for(attention, operator):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("before Hopper flash attention comes first")
    model = build(dtype=BF16, config=LARGE, attention=attention)
    tokens, targets = batch(n_time=512)
    if attention != "triton" and activate_flash_attention_4():
        operator = "_scaled_dot_product_flash_attention"
    with Watch() as seen:
        model(tokens, targets).backward()
    assert seen.calls("attention") == seen.ops[operator] == LARGE.n_layer, seen.ops
