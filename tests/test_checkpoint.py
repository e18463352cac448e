"""Checkpoint folders: other programs read them, and all damage is found. With several ranks: test_distributed.py."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.multiprocessing
import transformers

from model import Llama, LlamaConfig
from optimizers.optimizer import Optimizer
from runtime import memory_advice, memory_stats, save
from runtime.checkpoint import Damaged, load_model, open_folder, read_rows, verify
from runtime.hf import Rows, hf_rows
from runtime.save import commit, write_folder
from tests.published import assert_same_model
from tests.runs import damage, losses

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

ODD = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=24, ffn_dim=19, vocab_size=13, block_size=8, tie_embeddings=True
)
TINY = LlamaConfig(n_layer=1, n_head=1, n_kv_head=1, n_embd=2, ffn_dim=3, vocab_size=3, block_size=8)
HF_FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}" * 100}


def random_bits(shape, dtype, seed):
    """Finite numbers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(dtype)


def whole_states(config):
    """{(state, our name): tensor} of a bfloat16 run: parameters, lower halves, moments, and 8-bit codes with scales."""
    with torch.device("meta"):
        model = Llama(config)
    states = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        kinds = {"": torch.bfloat16, "lower_half": torch.int16, "exp_avg": torch.float32, "codes": torch.uint8}
        states |= {(state, name): random_bits(p.shape, dtype, i) for state, dtype in kinds.items()}
        states["scales", name] = random_bits((len(p), 1), torch.float32, i)
    return states


def rows_of(config, states):
    files = {"model.safetensors": [], "optimizer.safetensors": []}
    for (state, name), x in states.items():
        files["optimizer.safetensors" if state else "model.safetensors"] += hf_rows(name, x, config, state)
    return files


def write(path, config, states):
    write_folder(path, rows_of(config, states), HF_FILES, {"step": 7, "loss": float("nan")})


def read(path, config, like):
    """The states of a folder, shaped like these."""
    folder = open_folder(path, optimizer=True)
    assert folder.run["step"] == 7 and folder.run.get("loss") is None
    verify(folder)
    states = {key: torch.zeros_like(x) for key, x in like.items()}
    for rows in rows_of(config, states).values():
        for row in rows:
            read_rows(folder, row)
    return states


# ----------------------------------------------------------------------------------------------------------------------
# The format


def test_the_safetensors_package_reads_what_we_write(tmp_path):
    states = whole_states(ODD)
    path = tmp_path / "x"
    write(path, ODD, states)
    for file, rows in rows_of(ODD, states).items():
        found = safetensors.torch.load_file(path / file)
        expected = {row.name: row.tensor for row in rows}
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        with safetensors.safe_open(path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    model = safetensors.torch.load_file(path / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(model, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in model.values())
    assert all(torch.equal(x, states[key]) for key, x in read(path, ODD, states).items())


def test_any_rows_of_a_published_folder_are_read_and_rounded_once(tmp_path):
    x = random_bits((9, 5), torch.float32, 0)
    safetensors.torch.save_file({"x": x}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    folder = open_folder(tmp_path)
    assert folder.run is None and folder.config["hidden_size"] == 5
    for first, last in ((0, 9), (3, 3), (2, 7), (8, 9)):
        out = torch.zeros(last - first, 5, dtype=torch.bfloat16)
        read_rows(folder, Rows("x", out.dtype, x.shape, first, out))
        assert torch.equal(out, x[first:last].bfloat16())
    integers = torch.zeros(9, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="has x in torch.float32: expected torch.int32"):
        read_rows(folder, Rows("x", integers.dtype, x.shape, 0, integers))


def most_resident_mib():
    """The most memory that this process has had since the last write to clear_refs."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


def test_reading_a_rank_s_rows_takes_no_memory_for_the_file(tmp_path):
    x = torch.ones(2**14, 2**13, dtype=torch.bfloat16)  # 256 MiB
    write_folder(tmp_path / "x", {"model.safetensors": [Rows("x", x.dtype, x.shape, 0, x)]}, HF_FILES, {})
    shape = x.shape
    del x
    folder = open_folder(tmp_path / "x")
    out = torch.zeros(2**10, 2**13)
    Path("/proc/self/clear_refs").write_text("5")
    before = most_resident_mib()
    verify(folder)
    read_rows(folder, Rows("x", out.dtype, shape, 5000, out))
    assert out.min() == out.max() == 1
    assert most_resident_mib() - before < 100


# ----------------------------------------------------------------------------------------------------------------------
# Damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x"
    states = whole_states(TINY)
    write(path, TINY, states)
    return path, states


@pytest.mark.parametrize("file", ["config.json", "run.json", "model.safetensors"])
def test_every_damage_is_found_and_named(saved, tmp_path, file):
    path = shutil.copytree(saved[0], tmp_path / "x")
    states = saved[1]
    whole = (path / file).read_bytes()
    flipped = [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in range(0, len(whole), 9)]
    others = [b"", whole[:-2], bytes(len(whole)), whole[:-16] + whole[-8:] + whole[-16:-8]]
    others += [whole + b" "] * (file != "run.json")  # its digest is of what it says
    for content in [*others, *flipped]:
        (path / file).write_bytes(content)
        with pytest.raises(Damaged, match=re.escape(f"{path}/{file}")):
            read(path, TINY, states)
    (path / file).unlink()
    with pytest.raises((Damaged, TypeError), match="NoneType" if file == "run.json" else f"{file} is missing"):
        read(path, TINY, states)


@pytest.mark.parametrize("index, message", [
    ({"weight_map": {"x": ["model-1.safetensors"]}}, "has no weight_map"),
    ({"weight_map": {"x": "../model-1.safetensors"}}, "has no weight_map"),
    ({"weight_map": {"x": "model-1.safetensors", "y": "model-1.safetensors"}}, "says that 'y' is in model-1"),
    ({"weight_map": {"x": "other.safetensors"}}, "other.safetensors is missing"),
    ({"weight_map": {"x": "half.safetensors"}}, "half.safetensors is damaged, or not a safetensors file"),
], ids=str)  # fmt: skip
def test_an_index_names_only_files_in_its_folder_that_hold_what_it_says(tmp_path, index, message):
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "half.safetensors").write_bytes((tmp_path / "model-1.safetensors").read_bytes()[:-1])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    assert open_folder(tmp_path).tensors.keys() == {"x"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match=message):
        open_folder(tmp_path)


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_then_its_name_is(tmp_path, monkeypatch):
    fsync = os.fsync
    rename = Path.rename
    synced = []
    before_rename = []
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    note = lambda *paths: (before_rename.extend(synced), synced.clear(), rename(*paths))  # noqa: E731
    monkeypatch.setattr(Path, "rename", note)
    partial = tmp_path / "step_000007.partial"
    write(partial, TINY, whole_states(TINY))
    files = {str(path) for path in partial.iterdir()}
    commit(partial, tmp_path / "step_000007")
    assert before_rename[-1] == str(partial) and files < set(before_rename)
    for file in partial.with_suffix("").glob("*.safetensors"):  # the header, and then the rows
        assert before_rename.count(str(partial / file.name)) == 2
    assert synced == [str(tmp_path)]


# ----------------------------------------------------------------------------------------------------------------------
# Saved by a run


def test_a_half_written_checkpoint_is_not_loaded(train, tmp_path):
    train()
    whole = losses(tmp_path / "out")
    (tmp_path / "out/step_000008").rename(tmp_path / "out/step_000008.partial")  # killed while saving
    (tmp_path / "out/step_000002.1.old.partial").mkdir()  # and while deleting
    train()
    assert losses(tmp_path / "out") == whole
    (tmp_path / "out/step_000002.1.old.partial").mkdir()  # killed after the last save
    train()
    assert {path.name for path in (tmp_path / "out").glob("step_*")} == {"step_000004", "step_000008"}


def test_keep_last_checkpoints_are_kept_and_0_writes_none(train, tmp_path, capsys):
    train(eval_interval=2, keep_last=2)
    assert capsys.readouterr().out.count("saved /") == 4, "one began before the last one had left its copies"
    assert sorted(path.name for path in (tmp_path / "out").glob("step_*")) == ["step_000006", "step_000008"]
    train(keep_last=0, out_dir=tmp_path / "none")
    assert not list((tmp_path / "none").glob("step_*"))


@pytest.mark.parametrize("why", ["as asked", "no memory for copies"])
def test_a_synchronous_save_writes_the_same_checkpoint(train, tmp_path, capsys, monkeypatch, why):
    n = train(out_dir=tmp_path / "beside")["model"].n_params()
    # asked for a step, then for the copies of w, m and v, which take 12n
    free = iter([10**12, 2 * (16 * n + 100)])
    monkeypatch.setattr(memory_stats, "local_world_size", 2)  # as if another rank on this machine allocated as much
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: next(free))
    monkeypatch.setattr(memory_advice, "cpu_bytes_to_come", lambda config, run_shape: 4 * n + 101)
    monkeypatch.setattr(save.Saver, "_copy", lambda self, *more: pytest.fail("a copy"))
    train(async_save=why != "as asked")
    assert ("saving in the background" in capsys.readouterr().err) == (why == "no memory for copies")
    assert losses(tmp_path / "out") == losses(tmp_path / "beside")
    found = [(tmp_path / out / "step_000008/model.safetensors").read_bytes() for out in ("out", "beside")]
    assert found[0] == found[1]


def test_a_trained_model_is_read_in_one_line_without_its_optimizer_file_too_but_not_damaged(train, tmp_path):
    train(dtype="bfloat16")
    path = tmp_path / "out/step_000008"
    tokens = torch.randint(257, (1, 8))
    one = load_model(tmp_path / "out")
    other = load_model(str(path))
    assert torch.equal(one(tokens), other(tokens)) and one(tokens).shape == (1, 8, 257)
    for file in path.glob("optimizer*"):
        file.unlink()
    whole, rounded = (load_model(path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rounded.parameters(), strict=True))
    assert not torch.equal(whole(tokens), one(tokens)), "the masters are in the optimizer's file"
    damage(path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is not what was saved"):
        load_model(tmp_path / "out")


@pytest.mark.usefixtures("published_model")
def test_transformers_reads_a_checkpoint_unchanged(train, tmp_path):
    for dtype in ("float32", "bfloat16"):
        train(dtype=dtype, out_dir=tmp_path / dtype, max_iters=4)
        path = tmp_path / dtype / "step_000004"
        from_masters = load_model(path, dtype=getattr(torch, dtype))
        (path / "optimizer.safetensors").unlink()  # with the masters, which transformers does not read
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        assert str(theirs.dtype) == f"torch.{dtype}" and theirs.config.eos_token_id == theirs.config.bos_token_id == 256
        assert torch.equal(theirs.model.embed_tokens.weight, from_masters.tok_embeddings.weight)
        assert_same_model(path, theirs.float())


def test_a_failed_save_is_reported_training_continues_and_the_next_run_resumes(train, tmp_path, capsys, monkeypatch):
    """The disk is full for the first checkpoint of each run and, at the end of the first run, for the last."""
    train(out_dir=tmp_path / "whole")
    write_rows = save._write_rows
    full_for = ["step_000002", "step_000006", "step_000008"]

    def write_some(path, tensors, begins):
        if any(path.parent.name.startswith(name) for name in full_for):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_rows(path, tensors, begins)

    monkeypatch.setattr(save, "_write_rows", write_some)
    with pytest.raises(SystemExit) as stopped:
        train(eval_interval=2)
    out = capsys.readouterr().out
    assert stopped.value.code == 1
    assert "NOT SAVED: No space left on device. The newest checkpoint: none" in out
    assert f"NOT SAVED: No space left on device. The newest checkpoint: {tmp_path}/out/step_000004" in out
    assert [path.name for path in (tmp_path / "out").glob("step_*")] == ["step_000004"]
    full_for.clear()
    shutil.copytree(tmp_path / "out/step_000004", tmp_path / "again/step_000004")
    train(out_dir=tmp_path / "again")
    assert losses(tmp_path / "again")[-1] == losses(tmp_path / "whole")[-1]


def test_no_weight_changes_between_the_start_of_a_copy_and_its_end(train, monkeypatch):
    calls = []
    update = Optimizer.update
    wait_for_copy = save.Saver.wait_for_copy
    monkeypatch.setattr(Optimizer, "update", lambda self: calls.append("update") or update(self))
    monkeypatch.setattr(save.Saver, "wait_for_copy", lambda self: calls.append("wait") or wait_for_copy(self))
    train(max_iters=4)
    assert calls == ["wait", "update"] * 4
