"""The optimizer: rules, places, half precision."""

import functools
import math
import shutil
import time

import pytest
import torch

from kernels.adamw import merge_halves
from model import Llama, LlamaConfig
from optimizers.adamw import AdamW
from optimizers.adamw8bit import AdamW8bit
from optimizers.galore import GaLore
from optimizers.muon import Muon
from optimizers.normuon import NorMuon
from optimizers.on_cpu import OnCPU
from optimizers.on_device import OnDevice
from optimizers.optimizer import Optimizer
from optimizers.rule import Rule
from optimizers.soapmuon import SoapMuon
from runtime.device import CUDAGraph
from runtime.memory import RunShape, state_bytes
from runtime.save import rows_to_save
from runtime.stream_weights import StreamedWeights
from tests.runs import assert_close, edit_run, error_of, losses, step_losses

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

CONFIG = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=8, ffn_dim=16, vocab_size=11, block_size=8)
CONFIG_IN_ROWS = LlamaConfig(**CONFIG.__dict__ | {"n_embd": 256, "ffn_dim": 512})  # whole blocks of 8-bit states


def llama(config=CONFIG, dtype=torch.float32):
    """The same model on every call."""
    model = Llama(config).to(dtype)
    model.init_weights(0)
    return model


def set_gradients(model, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def optimizer_of(dtype, **options):
    """AdamW over a matrix and a vector whose gradients are ones."""
    model = torch.nn.Linear(8, 4).to(dtype)
    optimizer = OnDevice(model, AdamW(weight_decay=0.0), **options)
    set_gradients(model, 1.0)
    return model, optimizer


def whole_states(optimizer):
    """A checkpoint's tensors, with each master joined from its halves."""
    found = optimizer.tensors()
    for name, state in list(found):
        if state == "lower_half":
            found[name, ""] = merge_halves(found[name, ""], found.pop((name, state)))
    return found


@pytest.mark.parametrize("place", [OnDevice, OnCPU])
def test_a_missing_gradient_and_one_that_is_not_accumulated_end_the_step(place):
    model = llama()
    optimizer = place(model, AdamW())
    set_gradients(model, 1.0)
    model.norm.weight.grad = None
    with pytest.raises(RuntimeError, match="norm.weight has no gradient"):
        optimizer.step(0.1)
    for accumulated in (True, False):
        set_gradients(model, 1.0)
        if accumulated:
            optimizer.accumulate()
    with pytest.raises(AssertionError, match="after every backward"):
        optimizer.step(0.1)


def test_the_hidden_states_wait_for_the_update_on_the_cpu_and_for_streamed_weights(monkeypatch):
    """As generate() and a custom loss call them: without model.forward."""
    update = OnCPU._update
    monkeypatch.setattr(OnCPU, "_update", lambda *args: (time.sleep(0.2), update(*args))[1])
    tokens = torch.arange(8)[None]
    for streams in (False, True):
        model = llama()
        streamed = StreamedWeights(model, "cpu") if streams else None
        optimizer = OnCPU(model, AdamW(), streamed=streamed)
        model.hidden(tokens).square().mean().backward()
        model.lm_head.weight.grad = torch.ones(11, 8)
        optimizer.step(0.1)
        with torch.no_grad():
            early = model.hidden(tokens)
            optimizer.finish()
            if streams:
                streamed.forget()  # else the second would read what the first has copied, too early perhaps
            assert torch.equal(model.hidden(tokens), early)


@pytest.mark.parametrize("place", [OnDevice, OnCPU])
def test_adamw_decays_matrices_and_not_norms(place):
    model = llama()
    torch.nn.init.constant_(model.norm.weight, 2.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = place(model, AdamW(weight_decay=0.5))
    set_gradients(model, 0.0)
    optimizer.step(lr=0.1)
    optimizer.finish()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if p.ndim == 2 else 1.0), msg=name)


@pytest.mark.parametrize("t", [1, 7, 200, 10**6])
def test_bias_corrections_are_adams_at_any_update(t):
    """They come from a table, which ends where both are 1."""
    found = [x.item() for x in AdamW(betas=(0.9, 0.99)).scalars(torch.tensor(t))]
    assert found == pytest.approx([1 / (1 - 0.9**t), (1 - 0.99**t) ** -0.5], rel=1e-6)


@pytest.mark.parametrize("grad_clip, scales, factor", [(100.0, False, 1), (1.0, False, 1 / 6), (1.0, True, 1 / 6)])
def test_gradients_are_clipped_to_the_norm_and_the_loss_scale_taken_out(grad_clip, scales, factor):
    model, optimizer = optimizer_of(torch.float32, grad_clip=grad_clip, scales_loss=scales)
    set_gradients(model, 2.0**16 if scales else 1.0)
    if scales:
        optimizer.loss_scale.good_steps.fill_(1999)  # this step doubles the scale, but takes out the old one
    assert optimizer.step(lr=0.1).item() == pytest.approx(6)  # the norm of 36 ones
    assert optimizer.tensors()["weight", "exp_avg"][0, 0].item() == pytest.approx(0.1 * factor, rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not scales or optimizer.loss_scale.scale == 2.0**17


def test_a_checkpoint_holds_whole_weights_even_if_masters_are_in_halves(monkeypatch):
    monkeypatch.setattr("optimizers.optimizer.SPLIT_AT_ONCE", 5)
    (model, optimizer), (other_model, other) = (optimizer_of(torch.bfloat16) for _ in range(2))
    for _ in range(20):
        set_gradients(model, 1.0)
        optimizer.step(lr=0.1)
    masters = whole_states(optimizer)
    assert any((masters[name, ""].bfloat16() != masters[name, ""]).any() for name in optimizer.parameters)
    for (name, parameter), like in zip(model.named_parameters(), other_model.parameters(), strict=True):
        other.set_weight(name, masters[name, ""])
        assert torch.equal(parameter, like) and torch.equal(optimizer.masters[name], other.masters[name])


@pytest.mark.parametrize("place, dtype, rule, expected", [
    (OnDevice, torch.float32, AdamW(), 8), (OnDevice, torch.bfloat16, AdamW(), 10),
    (OnDevice, torch.float16, AdamW(), 12),
    (OnCPU, torch.float32, AdamW(), 8), (OnCPU, torch.bfloat16, AdamW(), 12), (OnCPU, torch.float16, AdamW(), 12),
    (OnCPU, torch.bfloat16, AdamW8bit(), None),
    *((OnDevice, torch.bfloat16, rule, None) for rule in (AdamW8bit(), Muon(), GaLore(rank=4))),
], ids=lambda x: getattr(x, "__name__", type(x).__name__ if isinstance(x, Rule) else str(x)))  # fmt: skip
def test_state_per_parameter_is_what_the_memory_estimate_counts(place, dtype, rule, expected):
    model = Llama(CONFIG_IN_ROWS).to(dtype)
    run = RunShape(1, dtype=str(dtype)[6:], offload="none" if place is OnDevice else "all", rule=rule)
    optimizer = place(model, rule)
    total = 0
    for name, parameter in model.named_parameters():
        n_bytes = sum(x.nbytes for x in optimizer.states[name].values())
        if optimizer.masters[name].data_ptr() != parameter.data_ptr():
            n_bytes += optimizer.masters[name].nbytes
        assert n_bytes == state_bytes(name, parameter, optimizer.rows[name], run), name
        total += n_bytes
    assert expected is None or total == expected * model.n_params()


# ----------------------------------------------------------------------------------------------------------------------
# Every rule. test_kernels_adamw.py tests the kernels; test_muon.py and test_galore.py the formulas

IN_ROWS = dict(n_embd=256, ffn_dim=256)  # rows of whole groups
IN_8_BITS = IN_ROWS | dict(optimizer_bits=8)
MUON = dict(optimizer="muon")
GALORE = dict(optimizer="galore", galore_rank=4)

RULES = [AdamW(), AdamW8bit(), Muon(), NorMuon(), SoapMuon(interval=1), GaLore(rank=4, interval=1)]


@pytest.mark.parametrize("rule", RULES, ids=type)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_whose_norm_is_not_finite_changes_nothing(rule, dtype):
    model = llama(CONFIG_IN_ROWS, dtype)
    optimizer = OnDevice(model, rule)

    def step(first):
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(dtype)
        model.layers[1].attn.o_proj.weight.grad[0, 0] = first
        return optimizer.step(0.01).isfinite(), {key: x.clone() for key, x in optimizer.tensors().items()}

    _, before = step(1.0)
    finite, after = step(math.inf)
    assert not finite and optimizer.updates == 1
    assert all(torch.equal(x, before[key]) for key, x in after.items())
    _, after = step(1.0)
    changed = {name for (name, state), x in after.items() if not torch.equal(x, before[name, state])}
    assert changed == set(optimizer.parameters) and all(x.isfinite().all() for x in model.parameters())


@pytest.mark.parametrize("settings, n_states, other", [
    (IN_8_BITS, (4, 4), {"optimizer_bits": 32}),
    (IN_8_BITS | dict(offload="optimizer", dtype="bfloat16"), (4, 4), {"optimizer_bits": 32}),
    (MUON, (2, 1), {"optimizer": "adamw"}),
    (MUON | IN_8_BITS | dict(dtype="bfloat16"), (4, 1), {"optimizer": "adamw"}),
    (dict(optimizer="normuon"), (2, 2), MUON),
    (dict(optimizer="soapmuon"), (2, 5), dict(optimizer="normuon")),
    (GALORE, (2, 3), {"galore_rank": 2}),
    (GALORE | IN_8_BITS | dict(galore_rank=256, n_embd=512, dtype="bfloat16"), (4, 5), {"galore_rank": 2}),
    *((settings, (2, 2), {"n_layer": 3}) for settings in (
        dict(dtype="float16", offload="all"), dict(tie_embeddings=False, n_embd=24, ffn_dim=19, dtype="bfloat16"),
    )),
], ids=str)  # fmt: skip
def test_every_rule_learns_and_resumes_bit_for_bit_but_not_as_another(
    train, tmp_path, monkeypatch, capsys, settings, n_states, other
):
    monkeypatch.setattr("optimizers.GaLore", functools.partial(GaLore, interval=3))
    monkeypatch.setattr("optimizers.SoapMuon", functools.partial(SoapMuon, interval=3))
    states = train(**settings, keep_last=5)["optimizer"].states
    assert n_states == tuple(len(states[name]) for name in ("tok_embeddings.weight", "layers.0.mlp.down_proj.weight"))
    whole = losses(tmp_path / "out")
    assert step_losses(tmp_path / "out")[-1] < step_losses(tmp_path / "out")[0]
    shutil.rmtree(tmp_path / "out/step_000008")
    assert f"has {next(iter(other))} " in error_of(train, capsys, **settings | other)
    train(**settings, keep_last=5)
    assert losses(tmp_path / "out") == whole


def test_8_bit_states_follow_float32_ones_on_both_places(train, tmp_path):
    train(**IN_ROWS, out_dir=tmp_path / "32")
    train(**IN_8_BITS, out_dir=tmp_path / "8")
    train(**IN_8_BITS, offload="optimizer", out_dir=tmp_path / "cpu")
    exact, ours, on_cpu = (step_losses(tmp_path / name) for name in ("32", "8", "cpu"))
    assert exact[-1] < exact[0] - 0.5, "nothing is learned"
    assert_close(exact, ours, 0.005)
    assert_close(ours, on_cpu, 2e-4)  # a rounding may change a code, by a percent of a moment


# ----------------------------------------------------------------------------------------------------------------------
# Places


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_does_not_change_the_losses(train, tmp_path, offload, dtype, parts):
    settings = dict(device="cuda", dtype=dtype, max_iters=12, batch_size=8 // parts, gradient_accumulation_steps=parts)
    train(out_dir=tmp_path / "gpu", **settings)
    run = train(out_dir=tmp_path / "cpu", offload=offload, **settings)
    assert not any(x.is_cuda for x in run["optimizer"].tensors().values())
    # A single bfloat16 weight that rounds otherwise shows in the fifth digit.
    assert_close(step_losses(tmp_path / "gpu"), step_losses(tmp_path / "cpu"), 1e-5 if dtype == "float32" else 2e-3)


def test_streamed_weights_hold_the_root_from_the_beginning_of_forward_until_backward_reaches_the_blocks():
    config = LlamaConfig(**CONFIG.__dict__ | {"n_layer": 5})  # two of them are held at a time
    models = [llama(config), llama(config)]
    streamed = StreamedWeights(models[0], "cpu")
    root = streamed.root.untyped_storage()
    assert not any(p.storage_offset() * p.itemsize % 256 for p in models[0].parameters()), "kernels load vectors"
    tokens = torch.randint(CONFIG.vocab_size, (2, CONFIG.block_size))
    for evaluates in (True, False):
        held = [root.nbytes()]
        if evaluates:  # after it the first blocks are gone
            with torch.no_grad():
                models[0](tokens)
        loss, expected = (model(tokens, tokens) for model in models)
        held.append(root.nbytes())
        (loss.backward(), expected.backward())
        assert loss == expected and [*held, root.nbytes()] == [0, held[1], 0] and held[1] > 0
        for name, theirs in models[1].named_parameters():
            assert torch.equal(models[0].get_parameter(name).grad, theirs.grad)
            streamed.cpu_weights[name].add_(0.01)
            theirs.data.add_(0.01)
        streamed.forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_offloaded_the_optimizer_sums_clips_and_skips_as_on_the_gpu(dtype, monkeypatch):
    """Three updates of three micro-batches each, the second one with a NaN. Gradients have many pieces on the CPU."""
    monkeypatch.setattr("optimizers.on_cpu.CHUNK", 7)
    models = [llama(dtype=dtype), llama(dtype=dtype)]
    places = zip(models, (OnDevice, OnCPU), strict=True)
    both = [place(model, AdamW(), grad_clip=1.0, scales_loss=True) for model, place in places]
    for update in range(3):
        for _ in range(3):
            gradients = [2**10 * torch.randn(p.shape).to(dtype) for p in models[0].parameters()]
            gradients[1].view(-1)[0] = math.nan if update == 1 else 0.0
            for optimizer, model in zip(both, models, strict=True):
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.accumulate()
        norms = [optimizer.step(0.01).item() for optimizer in both]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5, nan_ok=True) and math.isnan(norms[0]) == (update == 1)
        ours, theirs = (whole_states(optimizer) for optimizer in both)
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-7)
    assert [(optimizer.updates, optimizer.loss_scale.scale.item()) for optimizer in both] == [(2, 2.0**15)] * 2
    files = [rows_to_save(optimizer.tensors(), optimizer.parameters, CONFIG) for optimizer in both]
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = ({row.name: (row.dtype, row.whole_shape) for row in of[file]} for of in files)
        assert ours == theirs, "what one place has saved, the other resumes"
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-7)
    with pytest.raises(AssertionError, match="after every backward"):
        both[1].step(0.01)  # not the sums of the step before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", [AdamW(), AdamW8bit(), Muon(), NorMuon()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_cuda_graph_replays_the_step_and_nothing_waits_for_the_gpu(dtype, rule):
    """Updates, clipping, an overflow and the loss scale: bit for bit as without a graph."""
    models = [Llama(CONFIG_IN_ROWS).to("cuda", dtype) for _ in range(2)]
    models[0].init_weights(0)
    models[1].load_state_dict(models[0].state_dict())
    plain, replayed = (OnDevice(model, rule, 1.0, scales_loss=True) for model in models)
    gradients = [2**10 * torch.randn(6, *p.shape, device="cuda") for p in models[0].parameters()]
    gradients[0][3] = math.inf
    static = [torch.empty_like(p) for p in models[0].parameters()]
    graph = CUDAGraph(replayed.update)
    for step in range(6):
        for parameter, buffer, new in zip(models[1].parameters(), static, gradients, strict=True):
            buffer.copy_(new[step])
            parameter.grad = buffer
        for parameter, new in zip(models[0].parameters(), gradients, strict=True):
            parameter.grad = new[step].to(dtype)
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first copies tables to the GPU
        norm = plain.step(0.01 * (step + 1))
        torch.cuda.set_sync_debug_mode("default")
        replayed.lr.fill_(0.01 * (step + 1))
        found = graph()
        assert norm.item() == found.item() or step == 3
    assert plain.updates == replayed.updates == 5 and plain.loss_scale.scale.item() == 2.0**15
    for name, x in plain.tensors().items():
        assert torch.equal(x, replayed.tensors()[name]), name


# ----------------------------------------------------------------------------------------------------------------------
# float16


def test_half_precision_follows_float32(train, tmp_path):
    settings = dict(max_iters=30, eval_interval=30)
    train(**settings, out_dir=tmp_path / "float32")
    for dtype in ("bfloat16", "float16"):
        run = train(**settings, dtype=dtype, out_dir=tmp_path / dtype)
        assert all(x.dtype == torch.float32 for x in whole_states(run["optimizer"]).values()), "the weights that learn"
        assert_close(step_losses(tmp_path / "float32"), step_losses(tmp_path / dtype), 0.05)
    for last, dtype in ((31, "bfloat16"), (32, "float16")):  # one step in each, from the previous checkpoint
        train(max_iters=last, dtype=dtype, out_dir=tmp_path / "float32")
        assert step_losses(tmp_path / "float32")[-1] < 3.3, f"begins anew in {dtype}"


def test_the_float16_scale_halves_when_it_overflows_and_doubles_after_2000_good_steps_across_a_resume(
    train, tmp_path, monkeypatch
):
    true_norm = Optimizer.grad_norm
    seen = []

    def overflow_twice(self):
        seen.append(true_norm(self))
        return seen[-1] * (math.inf if len(seen) in (1, 3) else 1)

    monkeypatch.setattr(Optimizer, "grad_norm", overflow_twice)
    run = train(dtype="float16")
    assert run["optimizer"].loss_scale.state(8) == {"loss_scale": 2.0**14, "loss_scale_since": 3}
    assert len(step_losses(tmp_path / "out")) == 8
    assert run["optimizer"].updates == 6, f"8 steps, 2 left out, the optimizer took {run['optimizer'].updates}"
    edit_run(tmp_path / "out/step_000008", loss_scale_since=9 - 2000)
    run = train(dtype="float16", max_iters=9)  # the 2000th good step
    assert run["optimizer"].loss_scale.state(9) == {"loss_scale": 2.0**15, "loss_scale_since": 9}
