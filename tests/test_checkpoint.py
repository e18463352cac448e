"""Checkpoints: saved, damaged, resumed."""

import errno
import json
import os
import pickle
import re
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file

import model as model_module
from model import Execution
from optimizers.on_cpu import OnCPU
from optimizers.optimizer import Optimizer
from runtime import checkpoint, checkpoint_folder, memory_advice, memory_stats, run_folder, safetensors_file
from runtime.checkpoint_folder import read_run
from tests.published import SCALING, assert_same_model, publish
from tests.published import edit_config as edit_published
from tests.runs import FULL_DISK, SHORT, SMALL, damage, edit_run, error_of, losses, metrics, run, wrapped

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_a_half_written_checkpoint_is_not_loaded(train, tmp_path):
    train()
    whole = losses(tmp_path / "out")
    (tmp_path / "out/step_000008").rename(tmp_path / "out/step_000008.partial")  # killed while saving
    (tmp_path / "out/step_000002.1.old.partial").mkdir()  # and while deleting
    train()
    assert losses(tmp_path / "out") == whole
    assert not list((tmp_path / "out").glob("*.partial"))


def test_keep_last_checkpoints_are_kept_and_0_writes_none(train, tmp_path, capsys, monkeypatch):
    write = checkpoint.write_folder
    monkeypatch.setattr(checkpoint, "write_folder", lambda *args: time.sleep(0.3) or write(*args))
    assert train(eval_interval=2, keep_last=2)["saver"].seconds > 0.6
    assert capsys.readouterr().out.count("saved /") == 4, "one began before the last one had left its copies"
    assert sorted(path.name for path in (tmp_path / "out").glob("step_*")) == ["step_000006", "step_000008"]
    train(keep_last=0, out_dir=tmp_path / "none")
    assert not list((tmp_path / "none").glob("step_*"))


def test_a_finished_run_writes_plain_json_and_resumes_with_more_iterations(train, tmp_path, capsys):
    train()
    meta = json.loads((tmp_path / "out/step_000008/run.json").read_text())
    assert meta["step"] == 8 and meta["settings"]["learning_rate"] == 3e-3
    assert json.loads((tmp_path / "out/step_000008/config.json").read_text())["num_hidden_layers"] == 2
    assert meta["dataset"]["tokenizer"] == "bytes" and meta["versions"]["torch"] == torch.__version__
    assert meta["val_loss"] == metrics(tmp_path / "out")[-1]["val_loss"]
    train()
    assert "nothing left to train" in capsys.readouterr().out
    train(max_iters=10)
    assert metrics(tmp_path / "out")[-1]["step"] == 10
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["save_seconds"] > 0 and summary["resume_seconds"] > 0


@pytest.mark.parametrize("why", ["as asked", "no memory for copies", "beside"])
def test_a_synchronous_save_writes_the_same_checkpoint(train, tmp_path, capsys, monkeypatch, why):
    n = train(out_dir=tmp_path / "beside")["model"].n_params()
    capsys.readouterr()  # this run may have saved by step 5, too
    # asked for a step, then for the copies of w, m and v, which take 12n
    there = iter([10**12, 2 * (16 * n + 100)])
    monkeypatch.setattr(checkpoint, "local_world_size", 2)  # as if another rank on this machine allocated as much
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: next(there))
    to_come = 4 * n + (101 if why == "no memory for copies" else 100)
    monkeypatch.setattr(memory_advice, "cpu_bytes_to_come", lambda config, run_shape: to_come)
    copied, copy = [], checkpoint.Saver._copy
    monkeypatch.setattr(checkpoint.Saver, "_copy", lambda self, *more: copied.append(1) or copy(self, *more))
    report = checkpoint.Saver.report  # as on a disk that is faster than a step
    wait = lambda self: self.future and self.future.result()  # noqa: E731
    monkeypatch.setattr(checkpoint.Saver, "report", lambda self, step: (wait(self), report(self, step)))
    calls, update, wait_for_copy = [], Optimizer.update, checkpoint.Saver.wait_for_copy
    monkeypatch.setattr(Optimizer, "update", lambda self: calls.append("update") or update(self))
    monkeypatch.setattr(checkpoint.Saver, "wait_for_copy", lambda self: calls.append("wait") or wait_for_copy(self))
    train(async_save=why != "as asked")
    assert calls.count("update") == 8 and ("update", "update") not in pairwise(calls), "a copy of changing weights"
    assert bool(copied) == (why == "beside")
    said = capsys.readouterr()
    assert ("saving in the background" in said.err) == (why == "no memory for copies")
    assert ("step 00005 | saved " in said.out) == (why == "beside")
    assert losses(tmp_path / "out") == losses(tmp_path / "beside")
    found = [(tmp_path / out / "step_000008/model.safetensors").read_bytes() for out in ("out", "beside")]
    assert found[0] == found[1]


@pytest.mark.parametrize("name, value", [
    ("grad_clip", 0.5), ("batch_size", 2), ("mask_documents", True), ("seed", 5), ("galore_rank", 5),
    ("learning_rate", 1e-3), ("weight_decay", 0.2),
])  # fmt: skip
def test_every_setting_that_alters_the_run_is_named_at_resume(train, capsys, name, value):
    common = dict(n_embd=64, optimizer="adamw")
    before = train(**common)[name]
    train(**common, max_iters=9, **{name: value})
    changes = re.search(" with (.*) changed", capsys.readouterr().out)[1].split(", ")
    assert sorted(changes) == sorted(["max_iters 8 -> 9", f"{name} {before} -> {value}"])


def test_a_resume_by_other_code_or_another_torch_is_reported(train, tmp_path, capsys):
    versions = train()["run_info"]["versions"]
    saved = {"nanocria": "0123456", "torch": "2.0.0", "triton": "3.0.0"}  # on a GPU, which has triton
    edit_run(tmp_path / "out/step_000008", versions=versions | saved)
    train()
    assert [
        f"resumes   {tmp_path}/out/step_000008 with nanocria 0123456 -> {versions['nanocria']}, "
        f"torch 2.0.0 -> {versions['torch']} changed"
    ] == re.findall("resumes .*", capsys.readouterr().out)
    edit_run(tmp_path / "out/step_000008", versions=None)
    train()
    assert "changed" not in capsys.readouterr().out


def test_only_the_training_thread_waits_for_offloaded_updates(train, monkeypatch):
    """If another thread took an update from the queue, forward could begin before its weights are ready."""
    finish, threads = OnCPU.finish, set()
    monkeypatch.setattr(OnCPU, "finish", lambda self: (threads.add(threading.current_thread()), finish(self)))
    train(offload="optimizer", eval_interval=2)
    assert threads == {threading.main_thread()}, threads


def test_data_that_was_prepared_anew_is_named_at_resume_even_where_the_counts_agree(train, tmp_path, text_data, capsys):
    shutil.copytree(text_data, tmp_path / "data")
    train(dataset=tmp_path / "data")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"train_sha256": "1234", "train_bytes": 1}))
    train(dataset=tmp_path / "data", max_iters=9)
    said = f"with max_iters 8 -> 9, the dataset's train_sha256 {meta['train_sha256'][:12]} -> 1234 changed\n"
    assert said in capsys.readouterr().out, "what says it, and not what follows from it"
    before = {name: value for name, value in meta.items() if name not in ("train_sha256", "val_sha256")}
    (tmp_path / "data/meta.json").write_text(json.dumps(before))
    train(dataset=tmp_path / "data", max_iters=10)
    assert "sha256" not in capsys.readouterr().out, "prepared by an older version, which says none"


def test_a_trained_model_is_read_in_one_line_without_its_optimizer_file_too_but_not_damaged(train, tmp_path):
    train(dtype="bfloat16")
    path, tokens = tmp_path / "out/step_000008", torch.randint(257, (1, 8))
    one, other = checkpoint.load_model(tmp_path / "out"), checkpoint.load_model(str(path))
    assert torch.equal(one(tokens), other(tokens)) and one(tokens).shape == (1, 8, 257)
    (path / "optimizer.safetensors").unlink()
    whole, rounded = (checkpoint.load_model(path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rounded.parameters(), strict=True))
    assert not torch.equal(whole(tokens), one(tokens)), "the masters are in the optimizer's file"
    damage(path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        checkpoint.load_model(path)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoint.load_model(str(tmp_path))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.json", "run.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(train, tmp_path, capsys, file):
    """Damage found by a resume; tests/test_safetensors_file.py damages every file in every way."""
    train()
    whole = losses(tmp_path / "out")
    for _ in range(1 + (file == "run.json")):  # the second time a damaged one is already set aside
        path = tmp_path / "out/step_000008" / file
        path.unlink() if file == "run.json" else damage(path)
        capsys.readouterr()
        train()
        out = capsys.readouterr().out
        expected = "is missing" if file == "run.json" else "not what was saved"
        assert "step_000008 is damaged" in out and expected in out and "step_000004" in out, out
        assert losses(tmp_path / "out") == whole
        assert (tmp_path / "out/step_000008.damaged").exists() and (tmp_path / "out/step_000008").exists()


def test_a_checkpoint_whose_optimizer_was_deleted_says_which_file_is_missing(train, tmp_path, capsys):
    train()
    for file in (tmp_path / "out/step_000008").glob("optimizer*"):
        file.unlink()
    train()
    said = "optimizer.safetensors.index.json is missing: copy or fetch the whole folder. Falling back to"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("error, said", [
    (MemoryError(), "MemoryError"),
    (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "[enforce fail"),
    (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
])  # fmt: skip
def test_an_io_error_does_not_count_as_damage(train, tmp_path, capsys, monkeypatch, error, said):
    train()
    monkeypatch.setattr(checkpoint_folder, "read_rows", mock.Mock(side_effect=error))
    assert said in error_of(train, capsys)
    assert (tmp_path / "out/step_000008").exists()


def test_a_parameter_without_a_published_name_ends_a_run_before_it_trains(train, tmp_path, capsys, monkeypatch):
    train()
    init = model_module.MLP.__init__

    def with_gain(self, config):
        init(self, config)
        self.gain_norm = model_module.RMSNorm(config, Execution())

    monkeypatch.setattr(model_module.MLP, "__init__", with_gain)
    said = "layers.0.mlp.gain_norm.weight has no name in Hugging Face's Llama: add it to OWN in runtime/hf_names.py"
    assert said in error_of(train, capsys)
    assert (tmp_path / "out/step_000008").exists(), "it is not damaged"
    assert said in error_of(train, capsys, out_dir=tmp_path / "new")
    assert not (tmp_path / "new/metrics.jsonl").exists()


def test_a_second_head_begins_beside_weights_without_one_and_is_resumed(train, tmp_path, monkeypatch, capsys):
    class TwoHeads(model_module.Llama):
        def __init__(self, config, how=None):
            super().__init__(config, how)
            self.second_head = torch.nn.Linear(config.n_embd, 3, bias=False)

        def forward(self, tokens, targets=None, doc_starts=None):
            x = self.hidden(tokens, doc_starts)
            return self.lm_head(x, targets) + (self.second_head(x).float() - 1).square().mean()

    one_head = train()["model"]
    monkeypatch.setattr(model_module, "Llama", TwoHeads)
    for module in ("hf_names", "restore"):
        monkeypatch.setattr(f"runtime.{module}.OWN", {"second_head.weight"})
    more = {"init_from": tmp_path / "out", "keep_last": 9, "eval_interval": 4}
    begun = train(out_dir=tmp_path / "none", eval_only=True, **more)["model"]
    for name, weight in one_head.named_parameters():
        torch.testing.assert_close(begun.get_parameter(name), weight, rtol=0, atol=0, msg=name)
    assert begun.second_head.weight.std() > 0.01
    said = f"begins    with random second_head.weight: {tmp_path}/out/step_000008 has none\n"
    assert capsys.readouterr().out.count(said) == 1
    whole = train(out_dir=tmp_path / "two", **more) and losses(tmp_path / "two")
    shutil.rmtree(tmp_path / "two/step_000008")
    train(out_dir=tmp_path / "two", **more)
    assert losses(tmp_path / "two") == whole
    assert "second_head.weight" in load_file(tmp_path / "two/step_000008/model.safetensors")


def test_extra_tensors_of_a_checkpoint_are_refused(train, tmp_path, capsys):
    train(tie_embeddings=False)
    path = tmp_path / "out/step_000008"
    edit_config(path, tie_word_embeddings=True)
    message = error_of(train, capsys, tie_embeddings=True)
    assert "has 2 tensors that the model does not have: exp_avg.lm_head.weight, ..." in message, message


def edit_config(path, **changes):
    """Change entries of a checkpoint's config.json, as if it had been saved that way."""
    content = json.dumps(json.loads((path / "config.json").read_text()) | changes).encode()
    (path / "config.json").write_bytes(content)
    pieces = safetensors_file.digest_pieces(content)
    digests = {"config.json": [f"{piece.end} {piece.sha256}" for piece in pieces]}
    edit_run(path, digests=read_run(path)["digests"] | digests)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_no_file_of_a_checkpoint_is_executed(train, tmp_path, capsys, monkeypatch):
    train()
    path = tmp_path / "out/step_000008"
    names = [file.name for file in path.iterdir()]
    shutil.copytree(path, tmp_path / "whole")
    for name in [*names, "tokenizer.json", "generation_config.json", "meta.json"]:
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "whole", path)
        (path / name).write_bytes(pickle.dumps(Hostile()))
        if name in names:
            error_of(train, capsys)
            with pytest.raises(ValueError):
                checkpoint.load_model(path)
        else:
            train(max_iters=9)
        assert not Path("executed").exists() and not (tmp_path / "executed").exists(), name


def test_without_a_whole_one_damaged_checkpoints_stop_the_run(train, tmp_path, capsys):
    train()
    damage(tmp_path / "out/step_000008/optimizer.safetensors")
    (tmp_path / "out/step_000004/run.json").unlink()
    message = error_of(train, capsys)
    assert (tmp_path / "out/step_000008.damaged").exists()
    assert "step_000004 is damaged" in message and "run.json is missing" in message, message
    assert "There is no older one: move it away" in message, message
    assert (tmp_path / "out/step_000004").exists(), "a new run would begin in its place"
    before = (tmp_path / "out/metrics.jsonl").read_bytes()
    assert "step_000004 is damaged" in error_of(train, capsys)
    assert (tmp_path / "out/metrics.jsonl").read_bytes() == before


def test_a_failed_save_is_reported_and_training_continues(train, tmp_path, capsys, monkeypatch):
    """The disk is full for the first checkpoint and has room for the second."""
    first_fails = [OSError(errno.ENOSPC, "No space left on device"), mock.DEFAULT]
    create = mock.Mock(wraps=checkpoint_folder._create, side_effect=first_fails)
    monkeypatch.setattr(checkpoint_folder, "_create", create)
    train()
    out = capsys.readouterr().out
    assert "step 00004 | val loss" in out and "NOT SAVED: No space left on device. The newest checkpoint: none" in out
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000008"]


def test_an_undeletable_leftover_does_not_stop_a_save(train, tmp_path, capsys, monkeypatch):
    true_rmtree = shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if "step_000002" not in str(path):
            true_rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    train(eval_interval=2)
    said = capsys.readouterr()
    assert "NOT SAVED" not in said.out and "cannot delete " in said.err and "Operation not permitted" in said.err
    assert [path.name for path in run_folder.checkpoints(tmp_path / "out")] == ["step_000006", "step_000008"]


def test_a_full_disk_ends_the_run_with_a_message_and_keeps_earlier_checkpoints(train, text_data, tmp_path):
    settings = SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out")
    train(**settings | {"max_iters": 4, "lr_decay_iters": 8})
    done = run(settings | {"lr_decay_iters": 8}, wrapped(tmp_path, FULL_DISK))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "NOT SAVED: " in done.stdout and f"The newest checkpoint: {tmp_path}/out/step_000004" in done.stdout
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000004"]
    train(**settings | {"lr_decay_iters": 8})
    train(**settings | {"lr_decay_iters": 8, "out_dir": tmp_path / "whole"})
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_checkpoints_of_other_versions_with_more_or_fewer_fields_are_read(train, tmp_path, capsys):
    train()
    path = tmp_path / "out/step_000008"
    settings = {name: value for name, value in read_run(path)["settings"].items() if name != "optimizer_bits"}
    edit_config(path, a_later_field=3)
    edit_run(path, settings=settings | {"a_later_setting": 3}, a_later_entry=[])
    train(max_iters=9)
    assert "with max_iters 8 -> 9 changed" in capsys.readouterr().out
    assert metrics(tmp_path / "out")[-1]["step"] == 9 and checkpoint.load_model(tmp_path / "out")


def test_with_another_batch_a_resumed_run_reads_on_where_it_ended(train, tmp_path):
    """16 + 24 + 8 sequences; each step reads the next ones."""
    read = {}
    for batch_size, steps, max_iters in ((4, 2, 4), (2, 3, 8), (8, 1, 9)):
        run = train(batch_size=batch_size, gradient_accumulation_steps=steps, max_iters=max_iters, eval_interval=100)
        path = tmp_path / f"out/step_{max_iters:06d}"
        for step in range(run["first_step"], max_iters):
            read[step] = torch.cat([blocks[:, :-1] for _, blocks in run["read_step"](step)])
        assert read_run(path)["sequences"] == {4: 32, 8: 56, 9: 64}[max_iters]
    expected = run["train_data"].sequences(0, 64)[:, :-1]
    assert torch.equal(torch.cat(list(read.values())), expected)


def test_another_run_or_version_in_the_same_folder_is_refused_with_a_sentence(train, tmp_path, capsys):
    train()
    assert "step_000008 is beyond max_iters, 7: raise that" in error_of(train, capsys, max_iters=7)
    message = error_of(train, capsys, rope_theta=100)
    assert "rope_theta 500000.0 (this run: 100.0): pass --rope_theta=500000.0," in message
    assert "norm_eps 1e-05 (this run: 0.001)" in error_of(train, capsys, norm_eps=1e-3)
    assert "rope_scaling None (this run: " in error_of(train, capsys, rope_scaling=SCALING)
    assert "pass --n_layer=2 --n_embd=32, or change out_dir" in error_of(train, capsys, n_layer=3, n_embd=64)
    assert "--init_from=resume continues it" in error_of(train, capsys, init_from="scratch")
    (tmp_path / "out/step_000008").rename(tmp_path / "out/step_000900")
    assert "step_000900 holds step 8: name it step_000008 again" in error_of(train, capsys, max_iters=900)
    for lacks in ("updates", "settings"):  # a folder from convert.py lacks them, too
        edit_run(tmp_path / "out/step_000900", **{lacks: None})
        message = error_of(train, capsys, max_iters=900)
        assert f"is not a checkpoint of this version: its run.json lacks {lacks}" in message
    assert (tmp_path / "out/step_000900").exists(), "it is not damaged"


# ----------------------------------------------------------------------------------------------------------------------
# What a run began with: init_from at a resume

MODEL = dict(vocab_size=257, tie_embeddings=True, rope_theta=10000.0, norm_eps=1e-6, n_embd=64, ffn_dim=96)
MODEL |= dict(rope_scaling=SCALING)


@pytest.fixture
def weights(tmp_path):
    """The folders of two models of one shape."""
    publish(tmp_path / "a")
    other = publish(tmp_path / "b")
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(0.5)
    other.save_pretrained(tmp_path / "b")
    edit_published(tmp_path / "b", nanocria_tokenizer="bytes")
    return tmp_path / "a", tmp_path / "b"


def begun_with(out_dir):
    """The init_from that the newest checkpoint names, its step, and the names of all files in the folder."""
    newest = run_folder.newest(out_dir)
    run = read_run(newest)
    assert run["settings"]["init_from"] == run["began_with"]["init_from"]
    return run["settings"]["init_from"], run["step"]


def assert_refused(train, capsys, tmp_path, **settings):
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != ".lock"}
    message = error_of(train, capsys, **settings)
    assert "--init_from=resume" in message and "--out_dir" in message and "would not be read" in message, message
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != ".lock"}
    return message


def test_a_resume_from_other_weights_is_refused_with_two_ways_out(train, tmp_path, capsys, weights):
    a, b = weights
    train(**MODEL, init_from=a, max_iters=1)
    message = assert_refused(train, capsys, tmp_path, **MODEL, init_from=b, max_iters=2)
    assert str(a) in message and str(b) in message
    assert_refused(train, capsys, tmp_path, **MODEL, init_from=b, max_iters=2, eval_only=True)
    assert_refused(train, capsys, tmp_path, **MODEL, init_from=tmp_path / "none", max_iters=2)
    config = tmp_path / "mine.py"
    lines = {**SMALL, **SHORT, **MODEL, "init_from": str(b), "max_iters": 2}
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in lines.items()))
    assert "would not be read" in error_of(train, capsys, str(config))
    train(**MODEL, init_from="resume", max_iters=2)
    assert begun_with(tmp_path / "out") == (str(a), 2)
    train(**MODEL, init_from=b, max_iters=1, out_dir=tmp_path / "other")
    assert begun_with(tmp_path / "other") == (str(b), 1)


def test_the_states_of_apollo_are_not_resumed_but_its_weights_are(train, tmp_path, capsys):
    train(max_iters=1)
    checkpoint = tmp_path / "out/step_000001"
    settings = read_run(checkpoint)["settings"]
    edit_run(checkpoint, settings=settings | {"optimizer": "apollo"})  # as older versions wrote it
    message = error_of(train, capsys, max_iters=2)
    assert f"pass --init_from={checkpoint} and another out_dir" in message, message
    train(init_from=checkpoint, out_dir=tmp_path / "other", max_iters=1)
    assert begun_with(tmp_path / "other") == (str(checkpoint), 1)


def test_the_same_command_resumes_wherever_its_weights_are_now(train, tmp_path, capsys, weights, monkeypatch):
    a, b = weights
    monkeypatch.chdir(tmp_path)
    common = dict(MODEL, out_dir=tmp_path / "out")
    train(**common, init_from="a", max_iters=1)
    (tmp_path / "link").symlink_to(a)
    for step, init_from in enumerate(("a", a, "./b/../a", "link", "auto", "resume"), start=2):
        train(**common, init_from=init_from, max_iters=step)
        assert begun_with(tmp_path / "out") == (str(a), step)
    a.rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    for step, init_from in enumerate(("a", a, "moved", tmp_path / "moved"), start=8):
        train(**common, init_from=init_from, max_iters=step)
        assert begun_with(tmp_path / "out") == (str(a), step)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["settings"]["init_from"] == str(a)
    (tmp_path / "elsewhere").mkdir()
    b.rename(tmp_path / "elsewhere/a")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_refused(train, capsys, tmp_path, **common, init_from="a", max_iters=12)  # the same word, other weights


def test_a_run_begun_at_random_resumes_and_takes_no_weights_afterwards(train, tmp_path, capsys, weights):
    for init_from in ("auto", "scratch"):
        out = tmp_path / init_from
        train(**MODEL, init_from=init_from, max_iters=1, out_dir=out)
        train(**MODEL, init_from="auto", max_iters=2, out_dir=out)
        train(**MODEL, init_from="resume", max_iters=3, out_dir=out)
        assert begun_with(out) == (init_from, 3)
        message = error_of(train, capsys, **MODEL, init_from=weights[0], max_iters=4, out_dir=out)
        assert "random weights" in message and begun_with(out) == (init_from, 3)


def test_a_run_that_began_with_another_run_resumes_while_that_trains_on(train, tmp_path, weights):
    base = dict(MODEL, out_dir=tmp_path / "base", keep_last=1)
    train(**base, max_iters=1)
    for steps in (1, 2):
        train(**MODEL, init_from=tmp_path / "base", max_iters=steps)
        assert begun_with(tmp_path / "out") == (str(tmp_path / "base"), steps)
        train(**base, max_iters=steps + 1)  # its newest checkpoint is another, the old one is gone


def test_adapters_resume_from_their_base_wherever_it_is_and_from_no_other_weights(train, tmp_path, capsys, weights):
    a, b = weights
    common = dict(MODEL, lora_rank=2)
    train(**common, init_from=a, max_iters=1)
    assert "is not the base" in error_of(train, capsys, **common, init_from=b, max_iters=2)
    train(**common, init_from=b, max_iters=1, out_dir=tmp_path / "others")
    assert_refused(train, capsys, tmp_path, **common, init_from=tmp_path / "others", max_iters=2)
    a.rename(tmp_path / "moved")
    train(**common, init_from=tmp_path / "moved", max_iters=2)
    for step, init_from in enumerate(("auto", a), start=3):  # its adapter_config.json names the new place
        train(**common, init_from=init_from, max_iters=step)
    assert begun_with(tmp_path / "out") == (str(a), 4)
    adapter = json.loads((tmp_path / "out/step_000004/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "moved")


def test_a_checkpoint_of_an_older_version_refuses_other_weights_only_if_it_names_its_own(
    train, tmp_path, capsys, weights
):
    a, b = weights
    train(**MODEL, init_from=a, max_iters=1)
    edit_run(tmp_path / "out/step_000001", began_with=None)
    assert_refused(train, capsys, tmp_path, **MODEL, init_from=b, max_iters=2)
    train(**MODEL, init_from=a, max_iters=2)
    settings = read_run(tmp_path / "out/step_000002")["settings"] | {"init_from": "auto"}  # of a later command
    edit_run(tmp_path / "out/step_000002", began_with=None, settings=settings)
    train(**MODEL, init_from=a, max_iters=3)
    assert begun_with(tmp_path / "out") == ("auto", 3)


def test_ranks_refuse_other_weights_and_find_moved_ones_together(train_on_ranks, tmp_path, weights):
    a, b = weights
    common = dict(MODEL, eval_interval=1)
    train_on_ranks(2, **common, init_from=a, max_iters=1)
    assert "would not be read" in train_on_ranks(2, code=1, **common, init_from=b, max_iters=2).stderr
    a.rename(tmp_path / "moved")
    train_on_ranks(2, **common, init_from=tmp_path / "moved", max_iters=2)
    assert begun_with(tmp_path / "out") == (str(a), 2)


def test_a_damaged_checkpoint_does_not_let_other_weights_in(train, tmp_path, capsys, weights):
    a, b = weights
    train(**MODEL, init_from=a, max_iters=2, eval_interval=1)
    damage(tmp_path / "out/step_000002/config.json")
    assert "would not be read" in error_of(train, capsys, **MODEL, init_from=b, max_iters=3)
    damage(b / "model.safetensors")
    (b / "config.json").write_text("{")
    assert "would not be read" in error_of(train, capsys, **MODEL, init_from=b, max_iters=3)
    assert (tmp_path / "out/step_000001").exists(), "the damage is not its own"


# ----------------------------------------------------------------------------------------------------------------------


def test_transformers_reads_a_checkpoint_unchanged(train, tmp_path):
    for dtype in ("float32", "bfloat16"):
        train(dtype=dtype, out_dir=tmp_path / dtype, max_iters=4)
        path = tmp_path / dtype / "step_000004"
        from_masters = checkpoint.load_model(path, dtype=getattr(torch, dtype))
        (path / "optimizer.safetensors").unlink()  # with the masters, which transformers does not read
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        assert str(theirs.dtype) == f"torch.{dtype}" and theirs.config.eos_token_id == theirs.config.bos_token_id == 256
        assert torch.equal(theirs.model.embed_tokens.weight, from_masters.tok_embeddings.weight)
        assert_same_model(path, theirs.float())


def test_differing_replicas_are_reported_and_the_checkpoint_is_complete(train, tmp_path, capsys, monkeypatch):
    write = checkpoint.write_folder
    monkeypatch.setattr(checkpoint, "write_folder", lambda *args: write(*args) or ["exp_avg.model.norm.weight"])
    train()
    said = "step_000008. WARNING: the copies of the model differ in 1 tensors, exp_avg.model.norm.weight among them"
    assert said in capsys.readouterr().out
    assert checkpoint.load_model(tmp_path / "out")


@pytest.mark.parametrize("file", ["tokenizer.json", "original/tokenizer.model"])
def test_a_damaged_tokenizer_file_is_found_and_sends_the_run_back(train, tmp_path, capsys, file):
    train(max_iters=1)
    published = tmp_path / "out/step_000001"
    (published / "original").mkdir()
    (published / file).write_text('{"model": 1}')
    (published / "run.json").unlink()  # as others publish it
    train(init_from=published, out_dir=tmp_path / "run")
    damage(tmp_path / "run/step_000008" / file)
    said = f"{file} is damaged.* The checkpoint before it: .*/run/step_000004$"
    with pytest.raises(ValueError, match=said):  # in sample.py too
        checkpoint.load_model(tmp_path / "run")
    train(out_dir=tmp_path / "run", max_iters=9)
    out = capsys.readouterr().out
    assert "step_000008 is damaged: " in out and f"{file} is damaged" in out
    assert (tmp_path / "run/step_000009" / file).read_text() == '{"model": 1}'


def test_lower_halves_of_some_weights_only_are_refused(train, tmp_path):
    run = train(dtype="bfloat16")
    folder = checkpoint_folder.open_folder(tmp_path / "out/step_000008", ("model", "optimizer"))
    del folder.tensors["lower_half.model.layers.1.self_attn.q_proj.weight"]  # the first of a stack
    with pytest.raises(ValueError, match="expected lower_half.model.layers.1.self_attn.q_proj.weight of shape"):
        checkpoint.read_weights(folder, run["optimizer"].parameters, run["config"], lambda name, whole: None)
