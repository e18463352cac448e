"""The optimizer: rules, places, half precision."""

import math
import shutil

import pytest
import torch

from model import Llama, LlamaConfig
from optimizers.driver import AdamW, sum_of_bits
from optimizers.on_cpu import OffloadedAdamW
from runtime import checkpoint
from tests.runs import SHORT, SMALL, assert_close, run_ranks, step_losses

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def optimizer_of(dtype, **options):
    """AdamW over a matrix and a vector whose gradients are ones."""
    model = torch.nn.Linear(8, 4).to(dtype)
    optimizer = AdamW(model, betas=(0.9, 0.95), **{"weight_decay": 0.0} | options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.set_step(lr=0.1)
    return model, optimizer


def test_weight_decay_reaches_matrices_only():
    changes = []
    for weight_decay in (0.0, 0.5):
        torch.manual_seed(0)
        _, optimizer = optimizer_of(torch.float32, weight_decay=weight_decay)
        before = {name: w.clone() for name, w in optimizer.w.items()}
        optimizer.update()
        changes.append({name: optimizer.w[name] - before[name] for name in before})
    torch.testing.assert_close(changes[1]["weight"] - changes[0]["weight"], -0.1 * 0.5 * before["weight"])
    assert torch.equal(changes[1]["bias"], changes[0]["bias"])


def test_gradients_below_the_clip_are_let_alone():
    _, optimizer = optimizer_of(torch.float32)
    optimizer.update(grad_clip=100.0)
    assert optimizer.m["weight"][0, 0].item() == pytest.approx(0.1)


def test_gradients_are_clipped_to_the_norm_and_the_loss_scale_taken_out():
    for scale in (1.0, 2.0**16):
        model, optimizer = optimizer_of(torch.float32)
        for parameter in model.parameters():
            parameter.grad *= scale
        optimizer.set_step(lr=0.1, loss_scale=scale)
        assert optimizer.update(grad_clip=1.0).item() == pytest.approx(6)  # of 36 ones
        assert optimizer.m["weight"][0, 0].item() == pytest.approx(0.1 / 6, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_gradients_add_up_and_small_steps_move_half_precision_weights(dtype):
    model, optimizer = optimizer_of(dtype)
    tensors = optimizer.tensors()
    tensors["model.weight"].fill_(1.0)
    optimizer.refresh(tensors)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate()
    for _ in range(64):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2**-12)
        optimizer.accumulate()
    assert optimizer.gradients()[0][0, 0].item() == 1 + 2**-6, "a sum in the weights' dtype would stay at 1"
    for _ in range(100):
        optimizer.set_step(lr=1e-4)
        optimizer.update()
        optimizer.updates += 1
    assert model.weight[0, 0].item() == pytest.approx(0.99, abs=2**-8), "steps of 1e-4 round to nothing at 1"


def test_of_weights_in_halves_a_checkpoint_holds_the_whole(monkeypatch):
    monkeypatch.setattr("optimizers.driver.PIECE", 5)
    (model, optimizer), (other_model, other) = (optimizer_of(torch.bfloat16) for _ in range(2))
    for _ in range(20):
        optimizer.update()
    tensors = optimizer.tensors()
    weights = [tensors[f"model.{name}"] for name in optimizer.parameters]
    assert any((w.bfloat16() != w).any() for w in weights), "nothing lies below bfloat16"
    copies = optimizer.like_tensors(torch.empty_like)
    optimizer.copy_tensors(copies)
    for name, x in tensors.items():
        assert x.dtype == torch.float32 and torch.equal(x, copies[name])
    sums = checkpoint.checksums({name: sum_of_bits(x) for name, x in copies.items()})
    assert checkpoint.checksums(optimizer.bit_sums()) == sums
    other.refresh(tensors)
    for (name, parameter), like in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert torch.equal(parameter, like) and torch.equal(optimizer.w[name], other.w[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offloaded_to_the_cpu_the_losses_stay(train, tmp_path, offload, dtype, parts):
    settings = dict(device="cuda", dtype=dtype, max_iters=12, batch_size=8 // parts, gradient_accumulation_steps=parts)
    train(out_dir=tmp_path / "gpu", **settings)
    run = train(out_dir=tmp_path / "cpu", offload=offload, **settings)
    assert not any(x.is_cuda for kind in (run["optimizer"].w, run["optimizer"].m) for x in kind.values())
    # One rounding of a bfloat16 weight that falls otherwise shows in the fifth digit.
    assert_close(step_losses(tmp_path / "gpu"), step_losses(tmp_path / "cpu"), 1e-5 if dtype == "float32" else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloaded_the_optimizer_sums_clips_and_skips_as_on_the_gpu(dtype):
    """Three updates of three micro-batches each, the second one with a NaN."""
    torch.manual_seed(0)
    config = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=8, ffn_dim=16, vocab_size=11, block_size=8)
    models = [Llama(config).to(dtype) for _ in range(2)]
    for model in models:
        model.init_weights(0)
    both = [cls(model, (0.9, 0.95), 0.1) for cls, model in zip((AdamW, OffloadedAdamW), models, strict=True)]
    for update in range(3):
        for _ in range(3):
            gradients = [torch.randn(p.shape).to(dtype) for p in models[0].parameters()]
            gradients[1].view(-1)[0] = math.nan if update == 1 else 0.0
            for optimizer, model in zip(both, models, strict=True):
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.accumulate()
        norms = []
        for optimizer in both:
            optimizer.set_step(0.01, loss_scale=4.0)
            norms.append(optimizer.update(grad_clip=1.0).item())
            optimizer.updates += math.isfinite(norms[-1])
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5, nan_ok=True) and math.isnan(norms[0]) == (update == 1)
        ours, theirs = (optimizer.tensors() for optimizer in both)
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-7)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32(train, tmp_path, dtype):
    train(max_iters=30, eval_interval=30, out_dir=tmp_path / "float32")
    run = train(max_iters=30, eval_interval=30, dtype=dtype, out_dir=tmp_path / "half")
    tensors = run["optimizer"].tensors()
    assert all(x.dtype == torch.float32 for x in tensors.values()), "the weights that learn are float32"
    assert_close(step_losses(tmp_path / "float32"), step_losses(tmp_path / "half"), 0.05)


def test_an_overflowing_float16_scale_is_halved_and_the_step_left_out(train, tmp_path, monkeypatch):
    true_norm, seen = AdamW.grad_norm, []

    def overflow_twice(self):
        seen.append(true_norm(self))
        return seen[-1] * (math.inf if len(seen) <= 2 else 1)

    monkeypatch.setattr(AdamW, "grad_norm", overflow_twice)
    run = train(dtype="float16")
    assert run["loss_scale"] == 2.0**14
    assert len(step_losses(tmp_path / "out")) == 8
    assert run["optimizer"].updates == 6, f"8 steps, 2 left out, the optimizer took {run['optimizer'].updates}"
    assert train(dtype="float16", max_iters=9)["loss_scale"] == 2.0**14, "resumed"


def test_the_float16_scale_doubles_after_2000_steps_without_an_overflow(train, tmp_path):
    train(dtype="float16", max_iters=4, lr_decay_iters=8)
    path = tmp_path / "out/step_000004"
    meta = {name: value for name, value in checkpoint.read_meta(path).items() if name != "digest"}
    checkpoint.write_json(path / "meta.json", checkpoint.signed(meta | {"loss_scale_since": 5 - 2000}))
    run = train(dtype="float16", max_iters=8, lr_decay_iters=8)
    assert (run["loss_scale"], run["loss_scale_since"]) == (2.0**17, 5)


def test_a_float16_run_that_resumes_a_float32_one_does_not_double_its_scale_at_once(train, tmp_path):
    train(max_iters=4, lr_decay_iters=8)
    run = train(max_iters=8, lr_decay_iters=8, dtype="float16")
    assert (run["loss_scale"], run["loss_scale_since"]) == (2.0**16, 4)


def test_more_ranks_do_not_overflow_float16_sooner(train, text_data, tmp_path):
    settings = dict(dtype="float16", gradient_accumulation_steps=4, lr_decay_iters=8)
    train(**settings, max_iters=4)
    path = tmp_path / "out/step_000004"
    meta = {name: value for name, value in checkpoint.read_meta(path).items() if name != "digest"}

    def at_scale(scale, out_dir):
        shutil.copytree(path, out_dir / path.name)
        signed = checkpoint.signed(meta | {"loss_scale": scale, "loss_scale_since": 4})
        checkpoint.write_json(out_dir / path.name / "meta.json", signed)
        return settings | dict(max_iters=5, out_dir=out_dir)

    scale = 2.0**16  # to become the largest at which one process takes its fifth step
    while train(**at_scale(2 * scale, tmp_path / f"{2 * scale:.0f}"))["loss_scale"] == 2 * scale:
        scale *= 2
    many = SMALL | SHORT | dict(dataset=text_data) | at_scale(scale, tmp_path / "many")
    done = run_ranks(4, many)
    assert done.returncode == 0, done.stderr
    assert checkpoint.read_meta(tmp_path / "many/step_000005")["loss_scale"] == scale, "the step was left out"
