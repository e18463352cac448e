"""train.py, run as a script on a small model and a CPU."""

import json
import math
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import model as model_module
from data.loader import epoch_order
from optimizers.on_device import OnDevice
from optimizers.optimizer import Optimizer
from runtime import save
from tests.runs import ROOT, SHORT, SMALL, assert_close, error_of, finish, losses, numbers, step_losses

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_the_loss_falls_well_below_that_of_a_guess_and_is_drawn(train, tmp_path):
    train(max_iters=100, eval_interval=100)
    first = step_losses(tmp_path / "out")[0]
    last = step_losses(tmp_path / "out")[-5:].mean()
    assert abs(first - math.log(257)) < 0.1, f"untrained loss {first:.3f}, a uniform guess {math.log(257):.3f}"
    assert last < first - 2, f"from {first:.3f} to {last:.3f} in 100 steps"
    assert (tmp_path / "out/loss.png").exists(), "no curve was drawn"


def test_the_learning_rate_warms_up_and_decays_and_steps_take_it_and_grad_clip(train, tmp_path, monkeypatch):
    taken = []
    update = Optimizer.update
    note = lambda self: taken.append((self.lr.item(), self.grad_clip))  # noqa: E731
    monkeypatch.setattr(Optimizer, "update", lambda self: note(self) or update(self))
    rate = dict(warmup_iters=4, lr_decay_iters=8, min_lr=1e-4, learning_rate=1e-3)
    run = train(max_iters=10, **rate, eval_interval=10, grad_clip=0.25)
    rates = numbers(tmp_path / "out", "lr")
    at_quarters = [5.5e-4 + 4.5e-4 * cosine for cosine in (1, 0.5**0.5, 0, -(0.5**0.5), -1)]
    assert_close(rates, [2e-4, 4e-4, 6e-4, 8e-4, *at_quarters, 1e-4], 1e-12)
    np.testing.assert_allclose(taken, [(rate, 0.25) for rate in rates], rtol=1e-7)
    run = train(out_dir=tmp_path / "linear", lr_schedule="linear", **rate)
    assert_close([run["learning_rate_at"](step) for step in (4, 5, 8, 9)], [1e-3, 7.75e-4, 1e-4, 1e-4], 1e-12)
    run = train(out_dir=tmp_path / "other", lr_decay_iters=2)  # it ends with the warm-up
    assert_close([run["learning_rate_at"](step) for step in (0, 1, 2, 8)], [1e-3, 2e-3, 3e-3, 3e-4], 1e-12)


def test_wsd_is_constant_then_linear_and_a_checkpoint_before_the_cooldown_may_be_cooled_or_extended(train, tmp_path):
    settings = dict(lr_schedule="wsd", learning_rate=8e-3, min_lr=0.0, warmup_iters=1, eval_interval=4, keep_last=9)
    train(**settings, cooldown_iters=3, max_iters=8)
    rates = numbers(tmp_path / "out", "lr") * 1000
    assert_close(rates, [4, 8, 8, 8, 8, 6, 4, 2], 1e-9)
    shutil.rmtree(tmp_path / "out/step_000008")  # in the middle of the run, before the cooldown
    train(**settings, cooldown_iters=3, max_iters=12)
    assert_close(numbers(tmp_path / "out", "lr")[4:] * 1000, [8] * 5 + [6, 4, 2], 1e-9)
    train(**settings, max_iters=14)  # no cooldown: constant
    assert_close(numbers(tmp_path / "out", "lr")[12:] * 1000, [8, 8], 1e-9)


def test_accumulating_4_micro_batches_equals_one_of_4_times_the_size(train, tmp_path, monkeypatch):
    sums = []
    accumulate = OnDevice.accumulate
    monkeypatch.setattr(OnDevice, "accumulate", lambda self: sums.append(self) or accumulate(self))
    train(batch_size=8, gradient_accumulation_steps=1, out_dir=tmp_path / "whole")
    train(batch_size=2, gradient_accumulation_steps=4, out_dir=tmp_path / "parts")
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):  # losses hardly distinguish a gradient from twice it
        assert_close(*(numbers(tmp_path / out, name) for out in ("whole", "parts")), tolerance)
    assert len(sums) == 4 * 8, "bfloat16 gradients would be summed in bfloat16"


@pytest.mark.parametrize("settings", [
    dict(kernels="blocks", activation_checkpointing="selective", mlp_chunks=3),
    dict(kernels="none", activation_checkpointing="full", mlp_chunks=2, offload_activations=True),
    dict(activation_checkpointing="full", mlp_chunks=3, offload_activations=True),
    dict(offload="optimizer", batch_size=1, gradient_accumulation_steps=4),
    dict(offload="all", batch_size=1, gradient_accumulation_steps=4, activation_checkpointing="full"),
    dict(offload="all", n_layer=5, tie_embeddings=False),  # more blocks than stream_weights.py has slots
    dict(offload="all", n_layer=5, n_embd=16, activation_checkpointing="full"),  # in groups of sequences
    dict(offload="all", n_layer=1, activation_checkpointing="selective"),
], ids=str)  # fmt: skip
def test_kernels_checkpointing_and_offload_do_not_change_the_losses(train, tmp_path, monkeypatch, settings):
    monkeypatch.setattr("kernels.execution.MLP_CHUNK", 1)  # a group of sequences then has 4C tokens
    train(**settings)
    shape = {name: settings[name] for name in ("n_layer", "n_embd", "tie_embeddings") if name in settings}
    train(**shape, out_dir=tmp_path / "plain")
    assert_close(step_losses(tmp_path / "plain"), step_losses(tmp_path / "out"), 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name, settings", [
    ("cuda_graph", {}),
    ("cuda_graph", dict(batch_size=2, gradient_accumulation_steps=2)),
    ("cuda_graph", dict(dtype="float32", batch_size=2, gradient_accumulation_steps=2)),
    ("cuda_graph", dict(dtype="float16")),
    ("cuda_graph", dict(eval_interval=3)),  # a checkpoint is written meanwhile
    ("cuda_graph", dict(activation_checkpointing="full", batch_size=16)),  # in groups of sequences
    ("cuda_graph", dict(mask_documents=True, n_embd=64)),
    ("cuda_graph", dict(optimizer="normuon")),  # as config/baby_llama.py has it
    # Several steps use the same pinned memory.
    ("offload_activations", dict(activation_checkpointing="full", n_layer=5)),
], ids=str)  # fmt: skip
def test_a_cuda_graph_and_activations_on_the_cpu_change_no_loss(train, tmp_path, monkeypatch, name, settings):
    monkeypatch.setattr("kernels.execution.MLP_CHUNK", 1)
    for value in (False, True):
        train(device="cuda", max_iters=12, out_dir=tmp_path / str(value), **settings, **{name: value})
    assert losses(tmp_path / "True") == losses(tmp_path / "False")


@pytest.mark.parametrize("settings", [
    {}, dict(mask_documents=True), dict(eval_iters=1000, batch_size=3),  # all, and 3 does not divide their number
], ids=str)  # fmt: skip
def test_an_evaluation_is_the_mean_over_blocks_spread_over_all(train, short_documents, settings):
    run = train(dataset=short_documents, n_embd=64, **settings)
    (n,) = run["n_eval_sequences"]
    n_all = run["val_data"].n_blocks
    assert n_all % 3 and (n == n_all or n < n_all / 4)
    blocks = run["val_data"].read(np.arange(n) * n_all // n)
    with torch.no_grad():
        expected = run["model"](*run["make_batch"](blocks)).item()
    assert run["evaluate"]() == run["evaluate"]() == pytest.approx([expected], rel=1e-6)


def test_given_weights_are_evaluated_before_the_first_step_and_eval_only_changes_no_file(text_data, tmp_path):
    common = SMALL | SHORT | dict(dataset=text_data, lr_decay_iters=8)
    finish(common | dict(out_dir=tmp_path / "base", max_iters=4))
    out = tmp_path / "out"
    common |= dict(out_dir=out)
    for more in (dict(max_iters=4, init_from=tmp_path / "base"), {}):  # resumed: the checkpoint's loss is known
        finish(common | more)
    assert [line["step"] for line in losses(out) if "val_loss" in line] == [0, 4, 8]
    found = {line["step"]: line["val_loss"] for line in losses(out) if "val_loss" in line}
    assert found[0] == pytest.approx(losses(tmp_path / "base")[-1]["val_loss"], rel=1e-6)
    saved = sorted(path.name for path in out.iterdir())
    log = (out / "metrics.jsonl").read_text()
    only = dict(eval_only=True, gradient_accumulation_steps=2, batch_size=2, eval_iters=4, max_iters=7)  # beyond it
    done = finish(common | only, ranks=2)
    assert not done.stderr, done.stderr
    assert "resumes " in done.stdout, done.stdout
    (last,) = (text for text in done.stdout.splitlines() if text.startswith("step 0"))
    assert last == f"step 00008 | val loss {found[8]:.4f} (8 sequences)", last
    assert sorted(path.name for path in out.iterdir()) == saved
    assert (out / "metrics.jsonl").read_text() == log
    assert json.loads((out / "summary.json").read_text())["val_loss"] == found[8]


def test_training_and_evaluation_mask_documents_which_begin_with_the_end_of_another_without_a_bos(
    train, short_documents, tmp_path
):
    settings = dict(dataset=short_documents, n_embd=64, max_iters=40)
    run = train(mask_documents=True, out_dir=tmp_path / "masked", **settings)
    train(out_dir=tmp_path / "plain", **settings)
    tokens, _, starts = run["make_batch"](run["read_step"](0)[0][1])
    row = int((starts[:, -1] > 8).nonzero()[0])
    assert run["train_data"].doc_start == 256 == tokens[row, int(starts[row, -1])]
    masked, plain = (losses(tmp_path / name) for name in ("masked", "plain"))
    assert masked[0] != plain[0] and [x for x in masked if "val_loss" in x] != [x for x in plain if "val_loss" in x]
    assert masked[-1]["val_loss"] < 5


def test_float16_that_overflows_at_every_loss_scale_stops(train, monkeypatch, capsys):
    forward = model_module.Llama.forward
    monkeypatch.setattr(model_module.Llama, "forward", lambda self, *batch: forward(self, *batch) * 1e30)
    message = error_of(train, capsys, dtype="float16", max_iters=20, eval_interval=20)
    assert "step 17: the mean loss" in message, "2^16 is halved 16 times"


def test_an_epoch_reads_every_block_once_and_the_next_in_another_order(train, tmp_path):
    run = train(block_size=64, batch_size=1)
    other = train(block_size=64, batch_size=1, seed=2, max_iters=1, out_dir=tmp_path / "2")
    assert not torch.equal(run["read_step"](0)[0][1], other["read_step"](0)[0][1])
    n_blocks = run["train_data"].n_blocks
    epochs = []
    for epoch in (0, 1):
        steps = range(n_blocks * epoch, n_blocks * (epoch + 1))
        epochs.append([run["read_step"](step)[0][1][:, :-1].numpy().tobytes() for step in steps])
        _, shift = epoch_order(run["seed"], epoch, n_blocks, 64)
        every_block = run["train_data"].read(np.arange(n_blocks), shift)[:, :-1]
        assert sorted(epochs[epoch]) == sorted(block.numpy().tobytes() for block in every_block)
    assert epochs[0] != epochs[1] and sorted(epochs[0]) != sorted(epochs[1]), "same order, or cut at the same places"


def test_compiled_blocks_have_the_same_losses(train, tmp_path):
    run = train(n_layer=1, compile=True)
    assert run["model"].layers[0]._compiled_call_impl is not None
    train(n_layer=1, out_dir=tmp_path / "plain")
    assert_close(step_losses(tmp_path / "plain"), step_losses(tmp_path / "out"), 1e-4)


def test_the_first_command_of_the_readme_needs_no_data(tmp_path):
    """In a copy of the tree without prepared data, train.py makes pystdlib itself, even if two runs start at once.

    The README's command on a smaller model: it still evaluates all of the validation bytes.
    """
    without_data = shutil.ignore_patterns("__pycache__", "*.bin", "meta.json", ".*")
    for name in ("config", "data", "kernels", "optimizers", "runtime"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=without_data)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    command = [sys.executable, "train.py", "config/baby_llama.py", "--dataset=data/pystdlib/"]
    command += ["--max_iters=3", "--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=8", "--ffn_dim=8"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    other = subprocess.Popen([*command, "--eval_iters=1", "--out_dir=other"], **options)
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout
    assert "bits per byte; xz -9 needs" in done.stdout, done.stdout
    said, _ = other.communicate()
    assert other.returncode == 0, said


def test_a_nan_while_a_checkpoint_is_written_waits_for_that_and_names_it(train, tmp_path, monkeypatch, capsys):
    forward = model_module.Llama.forward
    calls = []
    write = save.write_folder
    factor = lambda: math.nan if calls.append(1) or len(calls) == 7 else 1  # noqa: E731  four steps, two of evaluation
    monkeypatch.setattr(model_module.Llama, "forward", lambda self, *batch: forward(self, *batch) * factor())
    monkeypatch.setattr(save, "write_folder", lambda *args: time.sleep(1) or write(*args))
    message = error_of(train, capsys)
    assert "step 5: the mean loss" in message and f"from {tmp_path}/out/step_000004 with" in message, message
