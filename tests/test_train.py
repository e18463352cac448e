"""The training run: what it promises about losses, restarts, settings and files. Small models, on the CPU."""

import errno
import fcntl
import functools
import gc
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import kernels.launch
import model as model_module
from data.tokenizer import get_tokenizer
from data.tokens import Tokens, write_dataset
from model import Llama, LlamaConfig
from optimizers.driver import AdamW, sum_of_bits
from optimizers.on_cpu import OffloadedAdamW
from runtime import checkpoint, distributed, memory, run_log

ROOT = Path(__file__).parents[1]
SMALL = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64, block_size=32, batch_size=4, device="cpu")
SHORT = dict(max_iters=8, warmup_iters=2, learning_rate=3e-3, eval_interval=4, eval_iters=2, log_interval=1)


WORDS = "the of and to in a is that for it as was with be by on not he this are or his from at which"


def prose(seed: int, n_words: int) -> str:
    """Frequent words often, rare ones seldom, and the same text on every machine and in every commit."""
    words = WORDS.split()
    return " ".join(random.Random(seed).choices(words, [1 / (1 + i) for i in range(len(words))], k=n_words))


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """A hundred kilobytes of words as bytes."""
    folder = tmp_path_factory.mktemp("text")
    documents = [*(("train", prose(i, 2500)) for i in range(10)), ("val", prose(10, 5000))]
    write_dataset(folder, documents, get_tokenizer("bytes"))
    return folder


PLAIN = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def plain_pytorch_on_one_core(monkeypatch):
    """The other files run the kernels through Triton's interpreter; a training run would take it hours.

    The models are so small that on a machine of many cores the threads would only wait for each other. And Ctrl-C is
    heard, also where a shell has the tests in its background, which a run that they start would inherit.
    """
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    signal.signal(signal.SIGINT, ctrl_c)
    torch.set_num_threads(before)
    torch.set_float32_matmul_precision(precision)  # which train.py has set


@pytest.fixture
def train(text_data, tmp_path, monkeypatch):
    """train(**settings) runs train.py in this process and returns its globals; files go to tmp_path/out."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def run(*files, **settings):
        settings = {"dataset": text_data, "out_dir": tmp_path / "out", **({} if files else SMALL | SHORT), **settings}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        monkeypatch.setattr(sys, "argv", ["train.py", *files, *flags])
        try:
            return runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        finally:
            sys.excepthook = sys.__excepthook__  # the run's own would keep the run alive, and its lock
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


def flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def metrics(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(out_dir):
    """What the run computed, without what the clock and the machine did to it."""
    names = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [{name: line[name] for name in names if name in line} for line in metrics(out_dir)]


def numbers(out_dir, name):
    return np.array([line[name] for line in metrics(out_dir) if name in line])


def step_losses(out_dir):
    return numbers(out_dir, "loss")


def assert_close(a, b, tolerance):
    difference = np.abs(np.asarray(a) - np.asarray(b))
    assert difference.max() <= tolerance, (
        f"max {difference.max():.2e}, mean {difference.mean():.2e} over {tolerance:.0e}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The run


def test_the_loss_falls_well_below_that_of_a_guess(train, tmp_path):
    train(max_iters=100, eval_interval=100)
    first, last = step_losses(tmp_path / "out")[0], step_losses(tmp_path / "out")[-5:].mean()
    assert abs(first - math.log(257)) < 0.1, f"untrained loss {first:.3f}, a uniform guess {math.log(257):.3f}"
    assert last < first - 2, f"from {first:.3f} to {last:.3f} in 100 steps"


def test_max_iters_counts_updates_and_every_line_has_its_numbers(train, tmp_path):
    train()
    lines = metrics(tmp_path / "out")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert all(
        set(line) == {"step", "loss", "lr", "grad_norm", "ms", "tok_per_s", "mfu", "mem_gib", "data_ms"}
        for line in steps
    )
    assert [set(line) for line in lines if "loss" not in line] == [{"step", "val_loss"}] * 2


def test_the_log_line_reads_as_documented(train, capsys):
    train()
    number = r"[\d,.]+"
    expected = (
        rf"step 00008/8 \| loss {number} \| lr 4\.81e-04 \| norm {number} \| {number} ms \| {number} tok/s "
        rf"\| mfu n/a \| mem {number} GiB \| data {number} ms \| eta 0h00m00s"
    )
    out = capsys.readouterr().out
    assert re.search(expected, out), out
    assert re.search(rf"step 00008 \| val loss {number} \(8 blocks\) \| saved \S+step_000008", out), out


def test_the_learning_rate_warms_up_and_decays_to_its_minimum(train, tmp_path):
    train(max_iters=10, warmup_iters=4, lr_decay_iters=9, min_lr=1e-4, learning_rate=1e-3, eval_interval=10)
    rates = [line["lr"] for line in metrics(tmp_path / "out") if "lr" in line]
    assert_close(rates[:4], [2e-4, 4e-4, 6e-4, 8e-4], 1e-12)
    assert_close([rates[4], rates[9]], [1e-3, 1e-4], 1e-12)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_a_step_is_taken_at_the_rate_that_is_logged_and_clipped_as_asked(train, tmp_path, monkeypatch):
    rates, clips, set_step, update = [], [], AdamW.set_step, AdamW.update
    monkeypatch.setattr(AdamW, "set_step", lambda self, lr, *more: rates.append(lr) or set_step(self, lr, *more))
    monkeypatch.setattr(AdamW, "update", lambda self, clip=0.0: clips.append(clip) or update(self, clip))
    run = train(grad_clip=0.25)
    assert rates == numbers(tmp_path / "out", "lr").tolist() and clips == [0.25] * 8
    assert_close([run["learning_rate_at"](step) for step in (0, 1, 2, 8)], [1e-3, 2e-3, 3e-3, 3e-4], 1e-12)


def test_what_a_run_logs_is_computed_from_its_seconds(tmp_path, monkeypatch, capsys):
    """Two ranks, steps of a thousand tokens and 5 FLOPs each, at a peak of 1e5 a second."""
    monkeypatch.setattr(run_log, "world_size", 2)
    log = run_log.RunLog(tmp_path, "cpu", "float32", tokens_per_step=1000, flops_per_token=5)
    log.peak_flops = 1e5
    log.open(0)
    log.step_seconds += [9.0, 3.0, 1.0, 2.0]
    log.line(4, 14, 2.0, 1e-3, 1.0, 2.0, 1.0, 0.0)
    line = capsys.readouterr().out
    assert "| 2000.0 ms | 500 tok/s | mfu 1.2% |" in line and "eta 0h00m20s" in line

    class Val:
        meta = {"val_bytes": 50, "gzip_bits_per_byte": 2.0, "xz_bits_per_byte": 1.5}

        def __len__(self):
            return 100

    log.summary(1.0, math.log(2), Val())
    log.close()
    said = capsys.readouterr().out
    assert "the median step 2000.0 ms, 500 tok/s" in said and "validation: 2.000 bits per byte" in said


def test_the_log_counts_the_tokens_of_a_step(train, tmp_path):
    run = train(log_interval=4)
    assert run["tokens_per_step"] == 4 * 32 and numbers(tmp_path / "out", "loss").size == 2
    tokens = numbers(tmp_path / "out", "tok_per_s") * numbers(tmp_path / "out", "ms") / 1000
    assert tokens == pytest.approx(4 * 32, rel=0.01)


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


def test_accumulating_4_micro_batches_equals_one_of_4_times_the_size(train, tmp_path):
    train(batch_size=8, gradient_accumulation_steps=1, out_dir=tmp_path / "whole")
    train(batch_size=2, gradient_accumulation_steps=4, out_dir=tmp_path / "parts")
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):  # losses hardly tell a gradient from twice of it
        assert_close(*(numbers(tmp_path / out, name) for out in ("whole", "parts")), tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        dict(activation_checkpointing="selective"),
        dict(activation_checkpointing="full"),
        dict(fused_kernels=False),
        dict(fused_kernels=False, fused_loss=False),
        dict(fused_kernels=False, activation_checkpointing="full"),
        dict(activation_checkpointing="selective", mlp_chunks=3),
        dict(activation_checkpointing="full", mlp_chunks=3, offload_activations=True),
        dict(fused_kernels=False, activation_checkpointing="full", mlp_chunks=2, offload_activations=True),
        dict(offload="optimizer"),
        dict(offload="optimizer", batch_size=1, gradient_accumulation_steps=4),
        dict(offload="all"),
        dict(offload="all", batch_size=1, gradient_accumulation_steps=4, activation_checkpointing="full"),
        dict(offload="all", n_layer=5, tie_embeddings=False),  # more blocks than weights.py has slots
        dict(offload="all", n_layer=1, activation_checkpointing="selective"),
        dict(offload="all", n_layer=4, activation_checkpointing="full", offload_activations=True),
    ],
    ids=str,
)
def test_every_arm_and_checkpointing_mode_has_the_same_losses(train, tmp_path, settings):
    shape = {name: settings[name] for name in ("n_layer", "tie_embeddings") if name in settings}
    train(out_dir=tmp_path / "plain", **shape)
    train(out_dir=tmp_path / "other", **settings)
    assert_close(step_losses(tmp_path / "plain"), step_losses(tmp_path / "other"), 1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(offload_activations=True),
        dict(offload="optimizer", batch_size=8, gradient_accumulation_steps=2),
        dict(offload="all", n_layer=5),
        dict(dtype="bfloat16"),
    ],
    ids=str,
)
def test_in_groups_of_sequences_the_losses_stay(train, tmp_path, monkeypatch, settings):
    monkeypatch.setattr(model_module, "MLP_SLICE", 1)  # 4C tokens, 128, are the limit then
    shape = {"batch_size": 16} | {name: settings[name] for name in ("n_layer", "dtype") if name in settings}
    train(out_dir=tmp_path / "plain", **shape)
    run = train(out_dir=tmp_path / "other", **{"batch_size": 16} | settings, activation_checkpointing="full")
    assert run["config"].groups_of_sequences(run["batch_size"], 32) > 1
    tolerance = 5e-4 if "dtype" in settings else 1e-5
    assert_close(step_losses(tmp_path / "plain"), step_losses(tmp_path / "other"), tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(batch_size=2, gradient_accumulation_steps=2),
        dict(dtype="float32", batch_size=2, gradient_accumulation_steps=2),
        dict(dtype="float16"),
        dict(eval_interval=3),  # a checkpoint is written meanwhile
        dict(activation_checkpointing="full", batch_size=16),  # in groups of sequences
        dict(mask_documents=True, n_embd=64),
    ],
    ids=str,
)
def test_a_cuda_graph_has_the_losses_of_its_launches(train, tmp_path, monkeypatch, settings):
    monkeypatch.setattr(model_module, "MLP_SLICE", 1)
    for cuda_graph in (False, True):
        train(device="cuda", cuda_graph=cuda_graph, max_iters=12, out_dir=tmp_path / str(cuda_graph), **settings)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory):
    """Of one to fifteen words, so that blocks of 32 bytes hold several."""
    folder = tmp_path_factory.mktemp("short")
    lengths = np.random.default_rng(0).integers(1, 16, 700)
    documents = [("val" if i % 7 == 0 else "train", prose(i, n)) for i, n in enumerate(lengths)]
    write_dataset(folder, documents, get_tokenizer("bytes"))
    return folder


@pytest.mark.parametrize("masked", [False, True])
def test_an_evaluation_is_the_mean_over_blocks_spread_over_all(train, short_documents, masked):
    run = train(dataset=short_documents, n_embd=64, mask_documents=masked)
    n, n_all = run["n_eval_blocks"], run["n_val_blocks"]
    assert n_all > 4 * n
    blocks = run["read"](run["val_tokens"], np.arange(n) * n_all // n)
    with torch.no_grad():
        expected = run["model"](*run["to_device"](blocks)).item()
    assert run["evaluate"]() == pytest.approx(expected, rel=1e-6)


def test_the_seed_is_that_of_the_weights_and_of_the_order(train, tmp_path):
    a, b = (train(seed=seed, learning_rate=0, max_iters=1, out_dir=tmp_path / str(seed)) for seed in (1, 2))
    assert not torch.equal(a["model"].tok_embeddings.weight, b["model"].tok_embeddings.weight)
    assert not np.array_equal(a["epoch_order"](0)[0], b["epoch_order"](0)[0])


def test_documents_that_see_themselves_alone(train, short_documents, tmp_path):
    """Another first document in a block changes what the model says of itself, and of no other."""
    settings = dict(dataset=short_documents, n_embd=64, max_iters=40)
    run = train(mask_documents=True, out_dir=tmp_path / "masked", **settings)
    train(out_dir=tmp_path / "plain", **settings)
    tokens, _, starts = run["get_batch"](0, 0)
    row = int((starts[:, -1] > 8).nonzero()[0])
    tokens, starts, n = tokens[row : row + 1].clone(), starts[row : row + 1], int(starts[row, -1])
    other = tokens.clone()
    other[:, : n - 1] = (other[:, : n - 1] + 1) % 256  # not where the last document starts
    assert run["end_of_text"] == 256 == tokens[0, n]
    with torch.no_grad():
        before, after = (run["model"](x, starts=starts) for x in (tokens, other))
        assert torch.equal(before[:, n:], after[:, n:]) and not torch.equal(before[:, :n], after[:, :n])
        assert not torch.equal(run["model"](tokens)[:, n:], before[:, n:]), "without starts it sees them all"
    masked, plain = (losses(tmp_path / name) for name in ("masked", "plain"))
    assert masked[0] != plain[0] and [x for x in masked if "val_loss" in x] != [x for x in plain if "val_loss" in x]
    assert masked[-1]["val_loss"] < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_taken_in_segments_that_grow(train):
    torch.cuda.empty_cache()
    train(device="cuda")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_activations_come_back_from_the_cpu_as_they_went(train, tmp_path):
    """Bit for bit, also from step to step, where the pinned memory is used again."""
    settings = dict(device="cuda", activation_checkpointing="full", n_layer=5, max_iters=12)
    for offload_activations in (False, True):
        train(out_dir=tmp_path / str(offload_activations), offload_activations=offload_activations, **settings)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")


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


def test_a_nan_stops_before_the_update_and_names_the_step(train, tmp_path, monkeypatch, capsys):
    true_forward, seen = model_module.Llama.forward, {}

    def poisoned(self, *batch):
        loss = true_forward(self, *batch)
        seen["model"], seen["calls"] = self, seen.get("calls", 0) + 1
        if seen["calls"] == 3:
            seen["weights"] = [parameter.detach().clone() for parameter in self.parameters()]
            return loss * math.nan
        return loss

    monkeypatch.setattr(model_module.Llama, "forward", poisoned)
    with pytest.raises(SystemExit) as stopped:
        train()
    message = capsys.readouterr().err
    assert stopped.value.code == 1 and "step 3: the loss is nan" in message and "learning_rate" in message, message
    assert all(torch.equal(a, b) for a, b in zip(seen["weights"], seen["model"].parameters(), strict=True))


def test_evaluation_reads_the_same_blocks_whatever_the_batch_and_touches_no_training_randomness(train):
    run = train()
    first = run["evaluate"]()
    torch.rand(3), np.random.rand(3)
    assert run["evaluate"]() == first
    other = train(batch_size=3, eval_iters=1000, init_from="resume")
    whole = train(batch_size=4, eval_iters=1000, init_from="resume")
    assert_close(other["evaluate"](), whole["evaluate"](), 1e-5)  # 3 does not divide the blocks: none counts twice


def test_an_epoch_reads_every_block_once_and_the_next_in_another_order(train):
    run = train(block_size=64, batch_size=1)
    n_blocks = run["n_train_blocks"]
    epochs = []
    for epoch in (0, 1):
        steps = range(n_blocks * epoch, n_blocks * (epoch + 1))
        epochs.append([run["get_batch"](step, 0)[0].numpy().tobytes() for step in steps])
        shift = run["epoch_order"](epoch)[1]
        every_block = run["train_tokens"].read(np.arange(n_blocks), 64, shift)[:, :-1]
        assert sorted(epochs[epoch]) == sorted(block.tobytes() for block in every_block)
    assert epochs[0] != epochs[1] and sorted(epochs[0]) != sorted(epochs[1]), "same order, or cut at the same places"


def test_compiled_blocks_have_the_same_losses(train, tmp_path):
    train(out_dir=tmp_path / "plain", n_layer=1)
    run = train(out_dir=tmp_path / "compiled", n_layer=1, compile=True)
    assert run["model"].layers[0]._compiled_call_impl is not None
    assert_close(step_losses(tmp_path / "plain"), step_losses(tmp_path / "compiled"), 1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_repeats_the_run_bit_for_bit(train, tmp_path, dtype):
    train = functools.partial(train, dtype=dtype)
    train(max_iters=12, keep_last=5)
    whole = losses(tmp_path / "out")
    for step in (8, 12):  # as if it had been killed after step 4: its lines for steps 5 to 12 are there still
        shutil.rmtree(tmp_path / "out" / f"step_{step:06d}")
    train(max_iters=12, keep_last=5)
    assert losses(tmp_path / "out") == whole


def test_a_resumed_run_keeps_its_own_optimizer_settings(train):
    train(max_iters=4)
    run = train(max_iters=6, weight_decay=0.3, beta2=0.9)
    assert (run["optimizer"].weight_decay, run["optimizer"].betas) == (0.3, (0.9, 0.9))


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_run_goes_on(train, text_data, tmp_path):
    settings = SMALL | SHORT | dict(max_iters=400, eval_interval=400, dataset=text_data)
    train(**settings, out_dir=tmp_path / "whole")
    command = [sys.executable, "train.py", *flags(settings | {"out_dir": tmp_path / "out"})]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert any("step 00010/" in line for line in process.stdout), "it ended before its tenth step"
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "interrupted | saved" in rest and "run the same command again" in rest, rest
    assert metrics(tmp_path / "out")[-1]["step"] < 400
    train(**settings)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_ctrl_c_that_a_shell_keeps_from_its_background_does_not_end_the_run(text_data, tmp_path):
    command = [sys.executable, "train.py", *flags(LONGER | {"dataset": text_data, "out_dir": tmp_path / "out"})]
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=ignore)
    for line in run.stdout:
        if line.startswith(("runs on", "step 0000")):
            run.send_signal(signal.SIGINT)
    assert run.wait() == 0 and len(step_losses(tmp_path / "out")) == 30


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe of one page is Linux's")
def test_a_signal_in_the_middle_of_a_print_leaves_a_checkpoint_too(text_data, tmp_path):
    """Nobody reads what the run says, so it stands in a print; its handler prints as well."""
    settings = SMALL | SHORT | dict(max_iters=2000, eval_interval=2000, log_interval=1, dataset=text_data)
    command = [sys.executable, "train.py", *flags(settings | {"out_dir": tmp_path / "out"})]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    log, size = tmp_path / "out/metrics.jsonl", -1
    while size < 1 or log.stat().st_size > size:  # until it stands
        assert process.poll() is None, process.communicate()
        size = log.stat().st_size if log.exists() else 0
        time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted | saved" in said, said + errors


def test_a_half_written_checkpoint_is_not_taken_for_a_whole_one(train, tmp_path):
    train()
    whole = losses(tmp_path / "out")
    (tmp_path / "out/step_000008").rename(tmp_path / "out/step_000008.partial")  # killed while saving
    train()
    assert losses(tmp_path / "out") == whole
    assert not (tmp_path / "out/step_000008.partial").exists()


def test_the_last_checkpoints_are_kept_and_none_if_none_are_wanted(train, tmp_path):
    train(eval_interval=2, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "out").glob("step_*")) == ["step_000006", "step_000008"]
    train(keep_last=0, out_dir=tmp_path / "none")
    assert not list((tmp_path / "none").glob("step_*"))


def test_a_finished_run_says_so_and_a_longer_one_goes_on(train, tmp_path, capsys):
    train()
    train()
    assert "nothing left to do" in capsys.readouterr().out
    train(max_iters=10)
    assert metrics(tmp_path / "out")[-1]["step"] == 10


@pytest.mark.parametrize("why", ["as asked", "no memory for copies", "beside"])
def test_a_save_that_the_training_waits_for_is_the_same(train, tmp_path, capsys, monkeypatch, why):
    n = train(out_dir=tmp_path / "beside")["n_params"]
    # asked for a step, for its tokens, then for the copies of w, m and v, which take 12n
    there = iter([10**12, 10**12, 16 * n + 100])
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: next(there))
    to_come = 4 * n + (101 if why == "no memory for copies" else 100)
    monkeypatch.setattr(memory, "cpu_bytes_to_come", lambda config, plan: to_come)
    copied, copy = [], checkpoint.Saver._copy
    monkeypatch.setattr(checkpoint.Saver, "_copy", lambda self, *more: copied.append(1) or copy(self, *more))
    train(async_save=why != "as asked")
    assert bool(copied) == (why == "beside")
    assert ("saving in the background" in capsys.readouterr().err) == (why == "no memory for copies")
    assert losses(tmp_path / "out") == losses(tmp_path / "beside")
    found = (checkpoint.newest(tmp_path / out) for out in ("out", "beside"))
    models = (checkpoint.load_model(path, "cpu", torch.float32).parameters() for path in found)
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def test_a_checkpoint_says_in_plain_json_what_it_is(train, tmp_path):
    train()
    meta = json.loads((tmp_path / "out/step_000008/meta.json").read_text())
    assert meta["step"] == 8 and meta["settings"]["learning_rate"] == 3e-3 and meta["model"]["n_layer"] == 2
    assert meta["dataset"]["tokenizer"] == "bytes" and meta["versions"]["torch"] == torch.__version__
    assert meta["val_loss"] == metrics(tmp_path / "out")[-1]["val_loss"]


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks


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
    done = subprocess.run(torchrun(4, many), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert checkpoint.read_meta(tmp_path / "many/step_000005")["loss_scale"] == scale, "the step was left out"


def torchrun(ranks, settings, script="train.py", options=()):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]
    return [*command, str(script), *flags(settings)]


def wrapped(folder, before, after=""):
    """A script that runs train.py between these lines; train.py's last act does not end it."""
    script = folder / "wrapped.py"
    run = f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    script.write_text(
        f"import os, runpy, sys, torch\nsys.path.insert(0, {str(ROOT)!r})\nos._exit, code = sys.exit, 0\n"
        f"{before}\ntry: {run}\nexcept SystemExit as end: code = end.code\n{after}\nsys.exit(code)\n"
    )
    return script


def run_alone(text_data, out_dir, **changes):
    """A run of 30 steps by one process, with a checkpoint every ten; returns its folder."""
    command = [sys.executable, "train.py", *flags(LONGER | changes | {"dataset": text_data, "out_dir": out_dir})]
    plain = os.environ | PLAIN  # the fixtures below are older than plain_pytorch_on_one_core's changes
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    return out_dir


@pytest.fixture(scope="session")
def alone(text_data, tmp_path_factory):
    return run_alone(text_data, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def alone_untied(text_data, tmp_path_factory):
    return run_alone(text_data, tmp_path_factory.mktemp("alone_untied"), tie_embeddings=False)


LONGER = SMALL | SHORT | dict(gradient_accumulation_steps=4, max_iters=30, eval_interval=10, keep_last=5)


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, {}),
        (4, {}),
        (2, dict(sharding="zero2", activation_checkpointing="full")),
        (2, dict(sync_every_micro_batch=False)),
        (4, dict(sharding="hybrid", shard_ranks=2)),
        (2, dict(sharding="hybrid")),  # one machine: no copies beyond
        (2, dict(offload="all", activation_checkpointing="full", offload_activations=True, mlp_chunks=2)),
        (4, dict(offload="optimizer", sharding="hybrid", shard_ranks=2)),
    ],
    ids=str,
)
def test_any_number_of_ranks_is_the_same_run(text_data, alone, tmp_path, ranks, settings):
    check_ranks(text_data, alone, tmp_path, ranks, settings)


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, {}),
        (4, dict(sharding="zero2", activation_checkpointing="full")),
        (2, dict(sync_every_micro_batch=False)),
        (4, dict(sharding="hybrid", shard_ranks=2, sync_every_micro_batch=False)),
        (2, dict(offload="all", activation_checkpointing="full", offload_activations=True, mlp_chunks=2)),
    ],
    ids=str,
)
def test_so_it_is_where_the_head_is_not_the_embedding(text_data, alone_untied, tmp_path, ranks, settings):
    """Then FSDP has other groups of parameters: collectives.py."""
    check_ranks(text_data, alone_untied, tmp_path, ranks, dict(tie_embeddings=False) | settings)


def test_so_it_is_where_weights_are_in_halves(text_data, tmp_path):
    """Each sum of bfloat16 gradients is rounded: a few digits less."""
    alone = run_alone(text_data, tmp_path / "alone", dtype="bfloat16")
    check_ranks(text_data, alone, tmp_path, 2, dict(dtype="bfloat16"), 5e-4)


def test_so_it_is_where_documents_see_themselves_alone(short_documents, tmp_path):
    settings = dict(mask_documents=True, n_embd=64)
    alone = run_alone(short_documents, tmp_path / "alone", **settings)
    check_ranks(short_documents, alone, tmp_path, 2, settings | dict(activation_checkpointing="full"))


@pytest.mark.parametrize("settings", [{}, dict(sharding="zero2"), dict(offload="all")], ids=str)
def test_so_it_is_where_groups_of_sequences_pass_through_a_block(text_data, alone, tmp_path, settings):
    before = "import model\nmodel.MLP_SLICE, seen, count = 1, set(), model.LlamaConfig.groups_of_sequences\n"
    before += "model.LlamaConfig.groups_of_sequences = lambda *shape: seen.add(count(*shape)) or count(*shape)"
    script = wrapped(tmp_path, before, "assert 2 in seen, seen")
    settings |= dict(batch_size=8, gradient_accumulation_steps=2, activation_checkpointing="full")
    check_ranks(text_data, alone, tmp_path, 2, settings, script=script)


def test_machines_that_do_not_share_out_dir_are_refused_before_training(text_data, tmp_path):
    """Each would keep its own part of a checkpoint, and say that it is saved."""
    settings = SMALL | SHORT | dict(dataset=text_data, gradient_accumulation_steps=2, out_dir="out")
    port, processes = free_port(), []
    for rank in range(2):  # as torchrun would start them on two machines, here in two folders
        (tmp_path / f"machine{rank}").mkdir()
        env = dict(RANK=rank, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1, GROUP_WORLD_SIZE=2)
        env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        processes.append(
            subprocess.Popen(
                [sys.executable, ROOT / "train.py", *flags(settings)], cwd=tmp_path / f"machine{rank}", text=True,
                env=os.environ | {name: str(value) for name, value in env.items()}, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    for process in processes:
        errors = process.communicate(timeout=100)[1]
        assert process.returncode == 1 and "out must be one folder that all machines share" in errors, errors
    assert not list(tmp_path.glob("machine*/out/step_*"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("late", [True, False])
def test_ranks_that_see_another_newest_checkpoint_wait_and_then_refuse(text_data, alone, tmp_path, late):
    """As where a network file system lists a new folder late: nobody may take the newest one for damaged."""
    shutil.copytree(alone, tmp_path / "out")
    seconds = 3 if late else 1000
    script = wrapped(
        tmp_path,
        "import time, checkpoint\nbegan, newest = time.monotonic(), checkpoint.newest\ncheckpoint.LISTED_WITHIN = 8\n"
        "old = lambda out_dir: checkpoint._steps(out_dir)[-2]\n"
        f"hides = lambda: os.environ['RANK'] == '1' and time.monotonic() - began < {seconds}\n"
        "checkpoint.newest = lambda out_dir: old(out_dir) if hides() else newest(out_dir)",
    )
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", max_iters=31, lr_decay_iters=30)
    done = subprocess.run(torchrun(2, settings, script), cwd=ROOT, capture_output=True, text=True)
    names = {path.name for path in (tmp_path / "out").glob("step_*")}
    if late:
        assert done.returncode == 0 and "resumes   " in done.stdout and "step_000030" in done.stdout, done.stderr
        assert "step_000031" in names
    else:
        found = "the ranks differ in the newest checkpoint in out_dir: the machines see different files in it"
        assert done.returncode == 1 and found in done.stderr, done.stderr
        assert names == {"step_000010", "step_000020", "step_000030"}


def test_the_groups_of_hybrid_sharding_wait_longer_than_the_watch(tmp_path):
    script = tmp_path / "mesh.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport collectives, ranks\n"
        "watch = distributed.meet('cpu', 3600.0)\nmesh = copy_engines.mesh('cpu', 1, 3600.0)\n"
        "group = mesh['replicate'].get_group(), mesh['shard'].get_group()\n"
        "print('timeouts', *{g._get_backend(__import__('torch').device('cpu')).options._timeout for g in group})\n"
        "watch.stop(); distributed.part(0)"
    )
    done = subprocess.run(torchrun(2, {}, script), cwd=ROOT, capture_output=True, text=True)
    assert "timeouts 2:01:00\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "ranks, settings, shape, kept",
    [
        (2, dict(sharding="zero3"), (2,), False),
        (2, dict(sharding="zero2"), (2,), True),
        (4, dict(sharding="hybrid", shard_ranks=2), (2, 2), False),
    ],
    ids=str,
)
def test_parameters_are_sharded_as_asked(text_data, tmp_path, ranks, settings, shape, kept):
    before = (
        "import collectives\nshard, seen = copy_engines.shard, []\ndef shard_and_note(model, **options):\n"
        "    seen.append((tuple(options['mesh'].shape), options['keep_blocks']))\n    shard(model, **options)\n"
        "collectives.shard = shard_and_note"
    )
    script = wrapped(tmp_path, before, f"assert seen == [({shape}, {kept})], seen")
    settings = SMALL | SHORT | settings | dict(gradient_accumulation_steps=4, max_iters=1, dataset=text_data)
    command = torchrun(ranks, settings | {"out_dir": tmp_path / "out"}, script)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_ranks(text_data, alone, tmp_path, ranks, settings, tolerance=1e-5, script="train.py"):
    changed = LONGER | dict(dataset=text_data) | settings
    shutil.copytree(alone / "step_000010", tmp_path / "out/step_000010")  # begun by one, ended by several
    shutil.copy(alone / "metrics.jsonl", tmp_path / "out/metrics.jsonl")
    for out_dir in ("many", "out"):
        command = torchrun(ranks, changed | {"out_dir": tmp_path / out_dir}, script)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("step 00030/30") == 1, "only rank 0 speaks"
        for name, of_loss in (("loss", 1), ("val_loss", 1), ("grad_norm", 10)):
            if name == "val_loss" and "batch_size" in settings:
                continue  # eval_iters counts batches: of other blocks
            assert_close(*(numbers(out, name) for out in (alone, tmp_path / out_dir)), of_loss * tolerance)


@pytest.fixture
def eager_train(tmp_path, monkeypatch):
    """train.py as it is on a GPU: a step's forward and backward are queued before the step before is known."""
    source = (ROOT / "train.py").read_text()
    on_cpu = 'device == "cpu"\n        or offload != "none"  # the CPU has waited for the GPU already'
    taken = "    loss_on_device = ahead if"
    assert source.count(on_cpu) == source.count(taken) == 1
    source = source.replace(taken, f"    print0('queued' * (ahead is not None))\n{taken}")
    script = tmp_path / "train.py"
    script.write_text(source.replace(on_cpu, "False"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return script


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_queued_ahead_of_its_numbers_a_run_is_the_same(train, eager_train, text_data, tmp_path, n_ranks):
    settings = LONGER | dict(dataset=text_data, max_iters=12, eval_interval=5, keep_last=2)
    for script, out_dir in ((ROOT / "train.py", "plain"), (eager_train, "eager")):
        for max_iters in (8, 12):  # and resumed
            changes = dict(out_dir=tmp_path / out_dir, max_iters=max_iters, lr_decay_iters=12)
            command = torchrun(n_ranks, settings | changes, script)
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert ("queued\n" in done.stdout) == (script == eager_train)
    assert losses(tmp_path / "plain") == losses(tmp_path / "eager")


def test_queued_ahead_a_run_ends_where_its_numbers_say(eager_train, text_data, tmp_path):
    """After a signal with a checkpoint from which it goes on alike, and where the loss is NaN before the update."""
    settings = LONGER | dict(dataset=text_data, max_iters=300, eval_interval=300, lr_decay_iters=300)
    whole, cut = (settings | {"out_dir": tmp_path / name} for name in ("whole", "cut"))
    command = [sys.executable, str(eager_train)]
    subprocess.run([*command, *flags(whole)], cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen([*command, *flags(cut)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert any("step 00010/" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM and "interrupted | saved" in rest, rest
    subprocess.run([*command, *flags(cut)], cwd=ROOT, check=True, capture_output=True)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    diverging = settings | dict(learning_rate=1e30, warmup_iters=0, out_dir=tmp_path / "nan")
    done = subprocess.run([*command, *flags(diverging)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "so the weights were not updated" in done.stderr, done.stderr
    assert not list((tmp_path / "nan").glob("step_*"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "changes",
    [
        dict(sharding="zero3"),
        dict(sharding="zero2"),
        dict(sharding="hybrid"),
        dict(tie_embeddings=False),
        dict(tie_embeddings=False, n_layer=1),
        dict(tie_embeddings=False, sharding="zero2"),
        dict(tie_embeddings=False, sharding="zero2", n_layer=1, sync_every_micro_batch=False),
        dict(tie_embeddings=False, sharding="hybrid"),
    ],
    ids=str,
)
def test_copy_engines_are_the_same_run(text_data, tmp_path, changes):
    settings = LONGER | dict(dataset=text_data, device="cuda", keep_last=0, dtype="bfloat16") | changes
    for copy_engines in (False, True):
        settings |= dict(copy_engines=copy_engines, out_dir=tmp_path / str(copy_engines))
        done = subprocess.run(torchrun(2, settings), cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert_close(step_losses(tmp_path / "False"), step_losses(tmp_path / "True"), 1e-4)


def test_gradients_cross_the_network_once_a_step_if_asked(text_data, tmp_path):
    """Counted: reduce-scatters of 2 blocks and the root, for 2 micro-batches of each rank in 3 steps."""
    script = wrapped(
        tmp_path,
        "profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])\nprofile.start()",
        "profile.stop()\ncalls = {event.key: event.count for event in profile.key_averages()}\n"
        "if os.environ['RANK'] == '0': print('reduce-scatters', calls.get('c10d::_reduce_scatter_base_', calls))",
    )
    settings = LONGER | dict(dataset=text_data, max_iters=3, keep_last=0)
    for sync_every_micro_batch, expected in ((True, 18), (False, 9)):
        changes = dict(out_dir=tmp_path / str(expected), sync_every_micro_batch=sync_every_micro_batch)
        command = torchrun(2, settings | changes, script)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert f"reduce-scatters {expected}\n" in done.stdout, done.stdout + done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# What one can see


def test_a_profile_shows_three_steps(train, tmp_path, capsys):
    train(max_iters=12, profile=True)
    (trace,) = (tmp_path / "out/profile").glob("rank0.*.pt.trace.json")
    steps = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if "ProfilerStep" in e.get("name", "")]
    assert {"ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"} == set(steps)
    assert "step 00010 | three steps traced to" in capsys.readouterr().out
    train(profile=True, out_dir=tmp_path / "short")
    assert "the profile is incomplete" in capsys.readouterr().out


@pytest.mark.parametrize(
    "where", ["model.Llama.forward", "model.Llama.init_weights", "optimizers.driver.AdamW.__init__"]
)
def test_out_of_memory_names_the_three_settings_that_would_help_most(text_data, tmp_path, where):
    script = wrapped(
        tmp_path,
        "import model, optimizer\n"
        "def full(*args, **options): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        f"{where} = full",
    )
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", activation_checkpointing="selective")
    done = subprocess.run([sys.executable, script, *flags(settings)], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    doing = "step 1: .*" if where == "model.Llama.forward" else "starting"
    assert re.search(rf"rank 0, {doing}: out of memory", done.stderr), done.stderr
    helpful = re.findall(r"^  --(\w+)=\S+.*about [\d.]+ GiB instead of [\d.]+", done.stderr, re.MULTILINE)
    assert len(helpful) == 3 and "offload" in helpful, done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def test_a_slow_answer_of_the_store_does_not_end_the_watch_and_its_end_does(monkeypatch):
    monkeypatch.setattr(distributed, "BEAT", 0.001)
    for outcomes, looks in (("slow ok slow slow ok over", 6), ("ok slow slow slow ok", 4)):
        watch, looked, rest = distributed.Watch(timeout=10), [], iter(outcomes.split())
        watch.store = mock.Mock(**{"get.return_value": b"machine 1"})

        def look(processes, watch=watch, looked=looked, rest=rest):
            looked.append(next(rest))
            if looked[-1] == "slow":
                raise dist.DistStoreError("it took too long")
            if looked[-1] == "over":
                watch.stop()

        monkeypatch.setattr(watch, "_look", look)
        watch._watch()
        assert len(looked) == looks, f"{outcomes}: {looked}"


def test_killed_twenty_times_the_run_is_the_same_bit_for_bit(train, text_data, tmp_path):
    """kill -9 at random moments, of which many lie in the writing of a checkpoint: there is one after every step."""
    settings = SMALL | SHORT | dict(dataset=text_data, max_iters=200, eval_interval=1, eval_iters=1)
    train(**settings, out_dir=tmp_path / "whole")
    rng, kills, partial = random.Random(0), 0, 0
    while kills < 20:
        command = [sys.executable, "train.py", *flags(settings | {"out_dir": tmp_path / "out"})]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(rng.randrange(6)):
            while "| loss" not in (line := process.stdout.readline()) and line:
                pass
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        _, errors = process.communicate()
        assert "Traceback" not in errors and process.returncode == -signal.SIGKILL, errors
        kills += 1
        partial += bool(list((tmp_path / "out").glob("step_*.partial")))
    assert partial, "no kill met a checkpoint that was being written: the test tests nothing"
    train(**settings)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def workers_of(process):
    """The processes that torchrun started, by rank."""
    found = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if rank := re.search(r"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_text()):
            found[int(rank[1])] = int(pid)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("restarts", [0, 1])
def test_one_of_two_ranks_killed(text_data, alone, tmp_path, restarts):
    """Without restarts all ends, nobody is left, and one rank goes on; with a restart torchrun goes on by itself."""
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out")
    process = subprocess.Popen(
        torchrun(2, settings, options=[f"--max-restarts={restarts}"]),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "step 00015/" not in (line := process.stdout.readline()):
        assert line, process.communicate()[1]
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values()), "a rank was left behind"
    assert process.returncode == (0 if restarts else 1), errors
    assert re.search(r"rank 0, step \d+: .*, lost another rank", errors) and 'train.py", line' not in errors, errors
    if not restarts:
        command = [sys.executable, "train.py", *flags(settings)]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert_close(step_losses(alone), step_losses(tmp_path / "out"), 1e-5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])  # by default torchrun dies of that one too
def test_without_torchrun_the_ranks_save_and_end(text_data, tmp_path, number):
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", max_iters=10**6, eval_interval=10**5)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(torchrun(2, settings), cwd=ROOT, stdout=log, stderr=log)
    wait_until(lambda: "step 00015/" in (tmp_path / "log").read_text(), "it does not begin")
    workers = workers_of(process)
    process.send_signal(number)
    process.wait(timeout=30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers.values()), "a rank was left behind")
    said = (tmp_path / "log").read_text()
    assert "torchrun has gone" in said and "SIGTERM: stopping after this step" in said, said
    assert checkpoint.newest(tmp_path / "out") is not None, said


def wait_until(true, otherwise, seconds=90):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_rank_that_hangs_is_named_and_the_run_ends(text_data, tmp_path, how):
    """Stopped as a whole, or asleep in its data while its watch is awake."""
    script = wrapped(
        tmp_path,
        "import posix, time, data.tokens\n"
        "os._exit = posix._exit\n"  # the watch ends its rank from a thread
        "true, reads = data.tokens.Tokens.read, 0\n"
        "def read(self, *args):\n"
        "    global reads\n"
        "    reads += 1\n"
        "    if os.environ['RANK'] == '1' and reads == 500 and os.environ['HOW'] == 'asleep': time.sleep(1000)\n"
        "    return true(self, *args)\n"
        "data.tokens.Tokens.read = read",
    )
    settings = LONGER | dict(
        dataset=text_data, out_dir=tmp_path / "out", max_iters=10000, eval_interval=10000, timeout=6
    )
    process = subprocess.Popen(
        torchrun(2, settings, script), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"HOW": how},
    )  # fmt: skip
    while "step 00200/" not in (line := process.stdout.readline()):  # some seconds: more than a beat
        assert line, process.communicate()[1]
    workers = workers_of(process)
    if how == "stopped":
        os.kill(workers[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    if how == "stopped":
        told = r"rank 0, step \d+: [a-z ]+, has waited for 6 seconds: rank 1 no longer answers; it was at step \d+: "
    else:  # it knows itself, and may be the first to say so
        told = r"rank 1 hangs at step \d+: reading data"
    assert re.search(told, errors), errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values()), "a rank was left behind"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_token_that_is_none_ends_the_run_before_it_is_learned_with_a_checkpoint(text_data, tmp_path, parts):
    """On one of two ranks, in step 5; the data mended, the run is the one that never met it."""
    bad = wrapped(
        tmp_path,
        "import data.tokens\n"
        "true, reads = data.tokens.Tokens.read, 0\n"
        "def read(self, *args):\n"
        "    global reads\n"
        "    reads += 1\n"
        f"    if os.environ['RANK'] == '1' and reads == {5 * parts}: raise ValueError('train.bin holds token 999')\n"
        "    return true(self, *args)\n"
        "data.tokens.Tokens.read = read",
    )
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", max_iters=8, eval_interval=100)
    settings |= dict(gradient_accumulation_steps=2 * parts)
    done = subprocess.run(torchrun(2, settings, bad), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("rank 1: train.bin holds token 999") == 1, done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.stderr, done.stderr
    assert "saved" in done.stdout and "step_000004" in done.stdout, done.stdout
    for out_dir in (tmp_path / "out", tmp_path / "whole"):
        command = torchrun(2, settings | {"out_dir": out_dir})
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert_close(step_losses(tmp_path / "out"), step_losses(tmp_path / "whole"), 1e-6)


@pytest.mark.parametrize(
    "there, expected",
    [
        ("sys.argv += ['--seed=2', '--dataset=pystdlib']", "dataset, seed"),
        (
            "import data.tokens; read = data.tokens.read_meta; "
            "data.tokens.read_meta = lambda folder: read(folder) | {'val_bytes': 1}",
            "the dataset's val_bytes",
        ),
    ],
)
def test_ranks_that_differ_stop_before_they_train(text_data, tmp_path, there, expected):
    script = wrapped(
        tmp_path,
        f"if os.environ['RANK'] == '1': {there}",
    )
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out")
    done = subprocess.run(torchrun(2, settings, script), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"the ranks differ in {expected}: " in done.stderr, done.stderr
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_what_all_ranks_suffer_is_said_by_each(text_data, tmp_path):
    """NCCL's errors look alike, whether another rank has gone or this machine lacks something."""
    fails = "raise torch.distributed.DistBackendError('NCCL error\\nNo space left on device (shm)')"
    script = wrapped(tmp_path, f"import model\ndef fail(*_): {fails}\nmodel.Llama.forward = fail")
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out")
    done = subprocess.run(torchrun(2, settings, script), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "lost another rank" in done.stderr, done.stderr
    assert "No space left on device (shm)" in done.stderr, done.stderr


def test_a_nan_on_one_rank_stops_all_before_the_update_at_the_same_step(text_data, tmp_path):
    script = wrapped(
        tmp_path,
        "import optimizer\n"
        "true = optimizer.AdamW.gradients\n"
        "def gradients(self):\n"
        "    found = true(self)\n"
        "    if os.environ['RANK'] == '1' and self.updates == 4:\n"
        "        found[0].view(-1)[0] = float('nan')\n"
        "    return found\n"
        "optimizers.driver.AdamW.gradients = gradients",
    )
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", eval_interval=2)
    done = subprocess.run(torchrun(2, settings, script), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "step 5: the loss is" in done.stderr, done.stderr
    assert f"from {tmp_path}/out/step_000004 with --init_from=resume" in done.stderr, done.stderr
    assert [line["step"] for line in metrics(tmp_path / "out") if "loss" in line] == [1, 2, 3, 4]


# ----------------------------------------------------------------------------------------------------------------------
# Slips of the user


def slip(train, capsys, *files, **settings):
    with pytest.raises(SystemExit) as stopped:
        train(*files, **settings)
    message = capsys.readouterr().err
    assert stopped.value.code in (1, 2) and "Traceback" not in message
    del stopped
    gc.collect()  # with the run's globals goes its open file, and with that the lock on its folder
    return message


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(batch_szie=3), "Unknown setting batch_szie. Did you mean batch_size?"),
        (dict(batch_size="abc"), "--batch_size expects an int, got 'abc'"),
        (dict(dtype="bf16"), "--dtype expects 'auto', 'float32', 'bfloat16' or 'float16', got 'bf16'"),
        (dict(batch_size=0), "batch_size is 0: it must be at least 1"),
        (dict(n_head=3), "n_embd 32 must be n_head 3 times an even head size"),
        (dict(n_kv_head=3), "n_head 4 must be a multiple of n_kv_head 3"),
        (dict(vocab_size=100), "was prepared with 257: set it to that"),
        (dict(offload="all", n_layer=2, n_embd=2**19, n_head=2**12), "GiB of CPU memory, and"),
        (dict(offload_activations=True, activation_checkpointing="full", compile=True), "does not work with compile"),
        (dict(mask_documents=True), "mask_documents works with heads of 16, 32, 64 and 128, not of 8"),
        (dict(mask_documents=True, attention="sdpa"), "mask_documents works with attention auto or triton"),
        (dict(block_size=10**6), "that block_size 1,000,000 needs here"),
        (dict(dataset="nowhere"), "does not exist"),
        (dict(init_from="resume"), "holds no checkpoint to resume"),
        (dict(rope_scaling="{'factor': 8}"), "rope_scaling has ['factor'], expected"),
        (dict(warmup_iters=-1), "warmup_iters is -1: it must be at least 0"),
        (dict(lr_decay_iters=2, warmup_iters=3), "lr_decay_iters is 2, within the warm-up of 3 steps"),
        (dict(seed=2**63), "seed is 9223372036854775808: it must be below 2**63"),
        (dict(n_layer=2, n_embd=2**19, n_head=2**12), "a step needs"),
        (dict(learning_rate="inf"), "learning_rate is inf: it must be at least 0, and finite"),
        (dict(beta1=1.5), "beta1 is 1.5 and beta2 0.95: both must be at least 0 and below 1"),
        (dict(norm_eps=-1), "norm_eps -1.0 and rope_theta 500000.0 must be above 0"),
        (dict(rope_theta="inf"), "norm_eps 1e-05 and rope_theta inf must be above 0, and finite"),
        (dict(max_iters="1" * 400), "--max_iters expects an int, got "),
        (dict(out_dir="README.md"), "out_dir is README.md, a file: name a folder"),
        (dict(gradient_accumulation_steps=10**29), " GiB are available: lower gradient_accumulation_steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_slip_gets_a_sentence(train, capsys, settings, expected):
    assert expected in slip(train, capsys, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_asking_for_a_gpu_that_is_not_there_says_what_to_do(train, capsys):
    assert "--device=cpu" in slip(train, capsys, device="cuda")


@pytest.mark.parametrize("config", ["llama32_1b", "llama32_3b", "llama31_8b"])
def test_a_config_without_its_dataset_names_the_command_that_makes_it(train, capsys, config):
    if (ROOT / "data/fineweb_edu/meta.json").exists():
        pytest.skip("the dataset is here")
    message = slip(train, capsys, str(ROOT / f"config/{config}.py"), dataset="fineweb_edu", device="cpu")
    assert "python data/fineweb_edu/prepare.py" in message


@pytest.mark.parametrize(
    "name, value",
    [("weight_decay", 0.3), ("grad_clip", 0.5), ("beta2", 0.9), ("batch_size", 2), ("mask_documents", True)],
)
def test_every_setting_that_alters_the_run_is_named_at_resume(train, capsys, name, value):
    train(n_embd=64)
    train(n_embd=64, max_iters=9, **{name: value})
    resumes = next(line for line in capsys.readouterr().out.splitlines() if "max_iters 8 -> 9" in line)
    assert re.search(rf" with (.*, )?{name} \S+ -> {value}[, ]", resumes), resumes


def test_a_changed_setting_is_named_at_resume(train, capsys):
    train()
    train(max_iters=9, seed=5)
    assert "with max_iters 8 -> 9, seed 1337 -> 5 changed" in capsys.readouterr().out


def test_data_that_was_prepared_anew_is_named_at_resume_even_where_the_counts_agree(train, tmp_path, text_data, capsys):
    shutil.copytree(text_data, tmp_path / "data")
    train(dataset=tmp_path / "data")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"train_sha256": "1234"}))
    train(dataset=tmp_path / "data", max_iters=9)
    assert f"the dataset's train_sha256 {meta['train_sha256']} -> 1234 changed" in capsys.readouterr().out
    before = {name: value for name, value in meta.items() if name not in ("train_sha256", "val_sha256")}
    (tmp_path / "data/meta.json").write_text(json.dumps(before))
    train(dataset=tmp_path / "data", max_iters=10)
    assert "sha256" not in capsys.readouterr().out, "prepared by an older version, which says none"


def test_a_setting_that_a_checkpoint_does_not_know_had_its_default(train, tmp_path, capsys):
    train(rope_theta=500000.0)
    path = tmp_path / "out/step_000008/meta.json"
    meta = json.loads(path.read_text())
    del meta["model"]["rope_theta"], meta["digest"]
    path.write_text(json.dumps(meta))
    assert "has rope_theta 500000.0 (this run: 2.0): pass --rope_theta=500000.0" in slip(train, capsys, rope_theta=2.0)
    train(rope_theta=500000.0, max_iters=9)
    assert "step 00009/9" in capsys.readouterr().out


def test_a_checkpoint_under_another_step_s_name_is_not_resumed(train, tmp_path, capsys):
    train()
    (tmp_path / "out/step_000008").rename(tmp_path / "out/step_000900")
    assert "step_000900 holds step 8: name it step_000008 again" in slip(train, capsys, max_iters=9)


def test_a_trained_model_is_read_in_one_line(train, tmp_path):
    train()
    one, other = (checkpoint.load_model(path) for path in (tmp_path / "out", str(tmp_path / "out/step_000008")))
    tokens = torch.randint(257, (1, 8))
    assert torch.equal(one(tokens), other(tokens)) and one(tokens).shape == (1, 8, 257)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoint.load_model(str(tmp_path))


def test_a_warm_up_that_never_ends_is_mentioned(train, capsys):
    train(warmup_iters=8)
    assert (
        "warm-up   of 8 steps, as long as the run: the learning rate never reaches its peak" in capsys.readouterr().out
    )


def test_a_home_folder_is_found_and_a_checkpoint_is_no_folder_for_a_run(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train(out_dir="~/run")
    assert f"next: python sample.py --out_dir={tmp_path}/run" in capsys.readouterr().out
    message = slip(train, capsys, out_dir=tmp_path / "run/step_000008")
    assert f"step_000008 is a checkpoint: --out_dir={tmp_path}/run goes on with the newest one there" in message


def test_a_run_has_its_folder_for_itself(train, tmp_path, capsys, text_data):
    shutil.copytree(text_data, tmp_path / "data")
    assert "data is a dataset or a checkpoint: name a folder for" in slip(train, capsys, out_dir=tmp_path / "data")
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text("{}")
    assert "published holds published weights, which" in slip(train, capsys, out_dir=tmp_path / "published")


def test_a_second_run_in_the_same_folder_is_refused(train, tmp_path, capsys):
    train()
    with open(tmp_path / "out/.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is writing to" in slip(train, capsys)


def damage(path, where=(0.1, 0.3, 0.5, 0.7, 0.9)):
    """One bit of a file at each of these places between its start, 0, and its end, 1: some of them hold a tensor."""
    content = bytearray(path.read_bytes())
    for place in where:
        content[int(len(content) * place)] ^= 0x10
    path.write_bytes(content)


DAMAGE = {
    "a bit in a shard": (lambda path: damage(path / "__0_0.distcp"), "is not what was saved"),
    "a shard cut short": (lambda path: (path / "__0_0.distcp").write_bytes(b"x"), "is damaged: "),
    "no shard": (lambda path: (path / "__0_0.distcp").unlink(), "No such file or directory"),
    "no .metadata": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "meta.json cut short": (lambda path: (path / "meta.json").write_text("{"), "is damaged: meta.json"),
    "a digit of meta.json": (
        lambda path: (path / "meta.json").write_text((path / "meta.json").read_text().replace(": 8,", ": 9,", 1)),
        "is damaged: meta.json is not what was saved",
    ),
    "no meta.json": (lambda path: (path / "meta.json").unlink(), "is damaged: meta.json: No such file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(train, tmp_path, capsys, kind):
    train()
    whole = losses(tmp_path / "out")
    change, expected = DAMAGE[kind]
    for _ in range(2):  # the second time the one set aside is in the way
        change(tmp_path / "out/step_000008")
        capsys.readouterr()
        train()
        out = capsys.readouterr().out
        assert "step_000008 is damaged" in out and expected in out and "step_000004" in out, out
        assert losses(tmp_path / "out") == whole
        assert (tmp_path / "out/step_000008.damaged").exists() and (tmp_path / "out/step_000008").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        PermissionError(errno.EACCES, "Permission denied"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_what_says_nothing_of_its_content_does_not_count_as_damage(train, tmp_path, capsys, monkeypatch, error):
    train()

    def load(*args, **options):
        raise CheckpointException("reading", {0: (error, None)})

    monkeypatch.setattr(torch.distributed.checkpoint, "load", load)
    assert "step_000008 cannot be read: " in slip(train, capsys)
    assert (tmp_path / "out/step_000008").exists()


def with_gain(init):
    def changed(self, config):
        init(self, config)
        self.gain_norm = model_module.RMSNorm(3, config)

    return changed


def with_more_columns(init):
    return lambda self, width, config: init(self, width + 1, config)


@pytest.mark.parametrize(
    "module, change, expected",
    [
        ("MLP", with_gain, "it lacks model.layers.0.mlp.gain_norm"),
        ("RMSNorm", with_more_columns, "attn_norm.weight of (32,), not (33,)"),
    ],
)
def test_a_checkpoint_of_another_model_py_is_refused_and_keeps_its_name(
    train, tmp_path, capsys, monkeypatch, module, change, expected
):
    train()
    init = getattr(model_module, module).__init__
    monkeypatch.setattr(getattr(model_module, module), "__init__", change(init))
    message = slip(train, capsys)
    assert "step_000008 was saved by another model.py" in message and expected in message, message
    assert (tmp_path / "out/step_000008").exists()


def test_what_a_checkpoint_holds_beside_the_model_is_not_left_out(train, tmp_path, capsys):
    train()
    path = tmp_path / "out/step_000008/meta.json"
    meta = json.loads(path.read_text())
    meta["checksums"] |= {"model.layers.0.mlp.gain": 1, "optimizer.exp_avg.layers.0.mlp.gain": 1}
    path.write_text(json.dumps(checkpoint.signed(meta)))
    assert "was saved by another model.py: it has model.layers.0.mlp.gain, optimizer." in slip(train, capsys)
    with pytest.raises(ValueError, match="it has model.layers.0.mlp.gain$"):
        checkpoint.load_model(path.parent, "cpu", torch.float32)


def test_a_checkpoint_of_another_version_is_refused_and_keeps_its_name(train, tmp_path, capsys):
    train()
    path = tmp_path / "out/step_000008/meta.json"
    meta = json.loads(path.read_text())
    del meta["checksums"]
    path.write_text(json.dumps(checkpoint.signed(meta)))
    assert "is no checkpoint of this version: its meta.json lacks checksums" in slip(train, capsys)
    assert path.exists()


def test_a_checkpoint_of_a_newer_pytorch_is_not_taken_for_damaged(train, tmp_path, capsys):
    train()
    path = tmp_path / "out/step_000008"
    (path / ".metadata").write_bytes(b"what this PyTorch cannot read")
    meta = checkpoint.read_meta(path)
    checkpoint.write_json(path / "meta.json", checkpoint.signed(meta | {"versions": {"torch": "99.1.0+cu999"}}))
    message = slip(train, capsys, max_iters=9)
    assert f"was saved by torch 99.1.0, and torch {torch.__version__} cannot read it" in message, message
    assert "resume with torch 99.1.0 or newer" in message
    assert path.exists() and not path.with_name("step_000008.damaged").exists()


def test_without_a_whole_one_damaged_checkpoints_stop_the_run(train, tmp_path, capsys):
    train()
    damage(tmp_path / "out/step_000008/__0_0.distcp")
    (tmp_path / "out/step_000004/meta.json").unlink()
    message = slip(train, capsys)
    assert "step_000008 is damaged" in message and "is not what was saved" in message, message
    assert "step_000004 is damaged" in message and "There is no older one: move it away" in message, message
    assert (tmp_path / "out/step_000004").exists(), "a new run would begin in its place"
    before = (tmp_path / "out/metrics.jsonl").read_bytes()
    assert "step_000004 is damaged" in slip(train, capsys)
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_not_sampled_from(train, tmp_path):
    train()
    newest = checkpoint.newest(tmp_path / "out")
    checkpoint.load_model(newest, "cpu", torch.float32)
    damage(newest / "__0_0.distcp", [i / 20 for i in range(1, 20)])  # weights among them, and not moments alone
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load_model(newest, "cpu", torch.float32)


def test_checksums_add_up_over_shards_and_see_one_bit():
    x = torch.randn(7, 5)
    before = checkpoint.checksums({"a": sum_of_bits(x), "b": sum_of_bits(torch.zeros(0, 5))})
    assert set(before) == {"a", "b"} and before["b"] == 0
    assert before["a"] == sum(checkpoint.checksums({"part": sum_of_bits(part)})["part"] for part in x.split(2))
    x.view(torch.int32)[3, 3] ^= 1
    assert checkpoint.checksums({"a": sum_of_bits(x)})["a"] != before["a"]


def test_a_save_that_fails_is_said_and_the_training_goes_on(train, tmp_path, capsys, monkeypatch):
    """A disk that is full for the first checkpoint and has room for the second."""
    true_save, calls = checkpoint.dcp.save, []

    def full_at_first(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return true_save(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", full_at_first)
    train()
    out = capsys.readouterr().out
    assert "step 00004 | val loss" in out and "NOT SAVED: No space left on device. The newest checkpoint is None" in out
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000008"]


def test_what_cannot_be_deleted_stops_no_save(train, tmp_path, capsys, monkeypatch):
    true_rmtree = shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if "step_000002" not in str(path):
            true_rmtree(path)
        elif not ignore_errors:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    train(eval_interval=2)
    said = capsys.readouterr()
    assert "NOT SAVED" not in said.out and "cannot delete " in said.err and "Operation not permitted" in said.err
    assert [path.name for path in checkpoint._steps(tmp_path / "out")] == ["step_000006", "step_000008"]


def test_a_checkpoint_that_was_put_elsewhere_is_let_alone(train, tmp_path, capsys):
    train()
    (tmp_path / "out/step_000004").rename(tmp_path / "kept")
    (tmp_path / "out/step_000004").symlink_to(tmp_path / "kept")
    train(max_iters=16, lr_decay_iters=8)
    said = capsys.readouterr()
    assert "NOT SAVED" not in said.out and not said.err, said
    assert {path.name for path in (tmp_path / "out").glob("step_*")} == {"step_000012", "step_000016"}
    assert checkpoint.load_model(tmp_path / "kept", "cpu", torch.float32)


@pytest.mark.parametrize("file", ["out_dir", "dataset"])
def test_where_the_file_system_knows_no_locks_it_says_so_and_goes_on(train, tmp_path, capsys, monkeypatch, file):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    if file == "out_dir":
        train()
        assert len(step_losses(tmp_path / "out")) == 8
    else:
        write_dataset(tmp_path / "data", [("train", "abc"), ("val", "abc")], get_tokenizer("bytes"))
    assert ".lock cannot be locked there (Function not implemented)" in capsys.readouterr().err


def limited(settings, max_bytes):
    """train.py where no file may grow beyond max_bytes, as on a full disk."""
    script = (
        f"import resource, runpy, sys; sys.argv[0] = 'train.py'; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes})); "
        f"runpy.run_path('train.py', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", script, *flags(settings)], cwd=ROOT, capture_output=True, text=True)


def test_a_disk_that_stays_full_ends_the_run_with_a_sentence_and_leaves_what_was_there(train, text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out")
    train(**settings | {"max_iters": 4, "lr_decay_iters": 8})
    done = limited(settings | {"lr_decay_iters": 8}, max_bytes=50_000)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "NOT SAVED: " in done.stdout and f"The newest checkpoint is {tmp_path}/out/step_000004" in done.stdout
    assert "the last checkpoint was not written (" in done.stdout, done.stdout
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000004"]
    train(**settings | {"lr_decay_iters": 8})
    train(**settings | {"lr_decay_iters": 8, "out_dir": tmp_path / "whole"})
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_whose_words_nobody_takes_trains_on_and_saves(text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "train.py", *flags(settings)]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert checkpoint.newest(tmp_path / "out").name == "step_000008"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_during_evaluation_ends_it_and_saves(text_data, tmp_path, number):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", max_iters=4000, eval_interval=20)
    settings |= dict(eval_iters=10**6, batch_size=1, block_size=8)  # seconds of evaluation
    process = subprocess.Popen(
        [sys.executable, "train.py", *flags(settings)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # or under nohup it would be ignored, as it should
    )  # fmt: skip
    assert any("step 00020/" in line for line in process.stdout), "it ended before its first evaluation"
    time.sleep(0.5)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # a scheduler's second one, while the checkpoint is written
    rest = process.communicate(timeout=60)[0]
    assert process.returncode in (128 + number, 128 + signal.SIGTERM), rest
    assert "step 00020 | interrupted | saved" in rest, rest
    settings |= dict(max_iters=20, eval_iters=2)
    for first in (True, False):
        done = subprocess.run([sys.executable, "train.py", *flags(settings)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "nothing left to do" in done.stdout, done.stdout + done.stderr
        evaluated = [line["step"] for line in metrics(tmp_path / "out") if "val_loss" in line]
        assert evaluated == [20], "it is made up for, once"
        assert ("next: python sample.py" in done.stdout) == first, done.stdout
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["steps"] == 0 and summary["val_loss"] > 0 and "ms_per_step" not in summary


def test_bad_validation_data_ends_every_run_at_the_same_step_until_it_is_mended(train, text_data, tmp_path, capsys):
    shutil.copytree(text_data, tmp_path / "data")
    good = np.fromfile(tmp_path / "data/val.bin", dtype="<u2")
    bad = good.copy()
    bad[:] = 60000  # wherever evaluation reads
    for _ in range(2):
        bad.tofile(tmp_path / "data/val.bin")
        with pytest.raises(SystemExit) as stopped:
            train(dataset=tmp_path / "data", eval_interval=4)
        assert stopped.value.code == 1 and "val.bin holds token 60000" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000004"]
    good.tofile(tmp_path / "data/val.bin")
    train(dataset=tmp_path / "data", eval_interval=4)
    assert [line["step"] for line in metrics(tmp_path / "out") if "val_loss" in line] == [4, 8]


def test_after_a_bad_token_the_first_ctrl_c_does_not_end_the_run_at_once(train, monkeypatch, capsys):
    true_start, handlers = checkpoint.Saver.start, []

    def start(self, *args):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)  # while the checkpoint is being written
        handlers.append(1)
        true_start(self, *args)

    true_read, reads = Tokens.read, []

    def read(self, *args):
        reads.append(1)
        if len(reads) == 4:
            raise ValueError("train.bin holds token 999")
        return true_read(self, *args)

    monkeypatch.setattr(Tokens, "read", read)
    monkeypatch.setattr(checkpoint.Saver, "start", start)
    with pytest.raises(SystemExit) as stopped:
        train()
    said = capsys.readouterr()
    assert stopped.value.code == 1 and handlers == [1] and "step_000003" in said.out, said.out


def test_after_a_signal_only_ctrl_c_ends_the_run_at_once(monkeypatch):
    interruption, ended = distributed.Interruption(), []
    monkeypatch.setattr(os, "_exit", ended.append)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    try:
        interruption.listen()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert not ended and interruption.here and interruption.agreed("cpu") == signal.SIGUSR1
        signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == [130]


@pytest.mark.parametrize("line", [b'{"step": 9, "lo', b'\0\0\0"ms": 3}\n', b"7\n", b"\xff}\n"])
def test_a_damaged_line_of_the_metrics_does_not_stop_a_resume(train, tmp_path, line):
    """Cut off by a kill, or what the machine left of it when it went down."""
    train()
    with open(tmp_path / "out/metrics.jsonl", "ab") as file:
        file.write(line)
    train(max_iters=10)
    assert [line["step"] for line in metrics(tmp_path / "out") if "loss" in line] == list(range(1, 11))


def test_checkpoints_are_ordered_by_number(tmp_path):
    for step in ("step_999999", "step_1000000", "step_2000000.partial"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "meta.json").touch()
    assert checkpoint.newest(tmp_path).name == "step_1000000"


def test_another_model_in_the_same_folder_is_refused_by_name(train, tmp_path, capsys):
    train()
    assert "rope_theta 500000.0 (this run: 100.0): pass --rope_theta=500000.0," in slip(train, capsys, rope_theta=100)
    assert "norm_eps 1e-05 (this run: 0.001)" in slip(train, capsys, norm_eps=1e-3)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    assert "rope_scaling None (this run: " in slip(train, capsys, rope_scaling=scaling)
    assert "pass --n_layer=2 --n_embd=32, or change out_dir" in slip(train, capsys, n_layer=3, n_embd=64)
    assert "--init_from=resume goes on with it" in slip(train, capsys, init_from="scratch")


def test_torchrun_restarts_a_run_that_began_from_scratch(train, tmp_path, capsys, monkeypatch):
    train(init_from="scratch", max_iters=4, lr_decay_iters=8)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    train(init_from="scratch", lr_decay_iters=8)
    assert "step_000004" in capsys.readouterr().out.split("resumes")[1]


def test_a_run_goes_on_without_the_weights_that_it_began_with(train, tmp_path, capsys):
    train()
    train(init_from=tmp_path / "gone", max_iters=10)
    assert "gone (not read: the run has begun)" in capsys.readouterr().out


def test_a_name_that_no_file_can_have_is_told(train, text_data, tmp_path, capsys, monkeypatch):
    assert "File name too long" in slip(train, capsys, out_dir="o" * 300)
    assert "is no folder: init_from is auto, " in slip(train, capsys, init_from="i" * 300)
    config = tmp_path / "surrogate.py"
    config.write_text("out_dir = '\\ud800'")
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["train.py", str(config), f"--dataset={text_data}", "--device=cpu"])
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert "out_dir is '\\ud800': " in (message := capsys.readouterr().err) and "surrogates not allowed" in message


# ----------------------------------------------------------------------------------------------------------------------
# What stands around it


def test_wandb_gets_every_number_offline(text_data, tmp_path):
    pytest.importorskip("wandb")
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", wandb_log=True)
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "train.py", *flags(settings)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = written.read_bytes()
    assert all(name in content for name in (b"grad_norm", b"tok_per_s", b"val_loss", b"learning_rate"))


def test_the_training_outlives_wandb_and_a_resumed_run_goes_on_in_its_run(tmp_path, monkeypatch, capsys):
    class Error(Exception):
        pass

    told, began = [], []

    def tell(*arguments, **options):
        told.append(arguments)
        if len(told) == 2:
            raise ConnectionResetError("Connection lost")

    def init(**options):
        began.append(options)
        return SimpleNamespace(id="a1b2")

    errors = SimpleNamespace(Error=Error)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, log=tell, finish=tell, errors=errors))
    log = run_log.RunLog(tmp_path, "cpu", "float32", tokens_per_step=1, flops_per_token=1)
    log.open(0, project="p")
    for step in (1, 2, 3):
        log.record({"step": step})
    log.close()
    assert len(told) == 2 and "wandb has ended (Connection lost)" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    log.open(3, project="p")
    log.close()
    log.open(0, project="p")
    log.close()
    assert began == [{"project": "p"}, {"project": "p", "id": "a1b2", "resume": "allow"}, {"project": "p"}]


def test_sample_continues_a_prompt_and_repeats_itself_for_a_seed(train, tmp_path):
    train()

    def sample(**settings):
        settings = {"out_dir": tmp_path / "out", "prompt": "def ", "max_new_tokens": 40, "device": "cpu", **settings}
        done = subprocess.run([sys.executable, "sample.py", *flags(settings)], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    first = sample(seed=1)
    assert first.startswith("def ") and len(first) > 60 and first == sample(seed=1) != sample(seed=2)
    command = [sys.executable, "sample.py", f"--out_dir={tmp_path}/out", "--device=cpu"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "the text could not be written: No space left on device\n")
    in_ascii = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--prompt=né"], cwd=ROOT, env=in_ascii, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"n?"), done.stderr


@pytest.mark.parametrize(
    "setting, sentence",
    [
        ("--temperature=-1", "temperature is -1.0: it must be at least 0"),
        ("--top_k=0", "top_k is 0: it must be at least 1, or none"),
        ("--top_p=0", "top_p is 0.0: it must be above 0 and at most 1, or none"),
        ("--top_p=1.1", "top_p is 1.1: it must be above 0 and at most 1, or none"),
        ("--max_new_tokens=0", "max_new_tokens is 0: it must be at least 1"),
    ],
)
def test_sample_refuses_settings_before_it_reads_a_model(tmp_path, monkeypatch, setting, sentence):
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path}/none", setting])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    assert stopped.value.code == sentence


def test_sample_names_a_tokenizer_path_that_nothing_reads(train, tmp_path, monkeypatch):
    train(max_iters=1)
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path}/out", "--tokenizer_path=~/tokenizer.model"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    path = os.path.expanduser("~/tokenizer.model")
    sentence = f"tokenizer_path is {path}, but only the tokenizer llama3 is read from a file, not bytes"
    assert stopped.value.code == sentence


def test_a_link_to_nowhere_is_no_out_dir(train, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "runs")
    with pytest.raises(SystemExit):
        train(out_dir=tmp_path / "link")
    sentence = f"out_dir is {tmp_path}/link, a link to a place that does not exist: name a folder\n"
    assert capsys.readouterr().err == sentence


def test_a_log_in_ascii_spells_what_it_can():
    code = "import ranks; distributed.print0('saved out/ünï', 3, end='.')"
    in_ascii = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=in_ascii, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("saved out/\\xfcn\\xef 3.", 0), done.stderr


def test_sample_passes_over_tokens_that_mean_nothing(train, tmp_path):
    train(vocab_size=1000, max_iters=1)  # the tokenizer has 257 of them
    settings = {"out_dir": tmp_path / "out", "max_new_tokens": 20, "device": "cpu", "seed": 1}
    done = subprocess.run([sys.executable, "sample.py", *flags(settings)], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and len(done.stdout) < 20 + 80 + 10, done.stderr.decode()


def test_the_first_command_of_the_readme_needs_no_data(tmp_path):
    """A copy of the tree without prepared data: train.py makes pystdlib itself, also where two runs begin at once."""
    for pattern in ("*.py", "kernels/*.py", "config/*.py", "data/*.py", "data/pystdlib/*.py"):
        for path in ROOT.glob(pattern):
            (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / path.relative_to(ROOT))
    command = [sys.executable, "train.py", "config/baby_llama.py", "--dataset=data/pystdlib/"]
    command += ["--max_iters=3", "--device=cpu"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = time.time()
    other = subprocess.Popen([*command, "--eval_iters=1", "--out_dir=other"], **options)
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout
    assert "bits per byte; gzip -9 needs" in done.stdout, f"{done.stdout} after {time.time() - started:.0f} s"
    said, _ = other.communicate(timeout=60)
    assert other.returncode == 0, said
