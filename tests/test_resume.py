"""Where a run starts: its folder, its checkpoints, the weights that init_from names, and what has changed since."""

import errno
import fcntl
import json
import re
import shutil
from hashlib import sha256
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import model as model_module
from model import Execution
from runtime import checkpoint
from runtime.checkpoint import Damaged, newest, open_folder, read_run, verify
from runtime.hf import OWN
from tests.published import SCALING, edit_config, publish
from tests.runs import damage, edit_run, error_of, losses, metrics, wrapped

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

# ----------------------------------------------------------------------------------------------------------------------
# out_dir


def test_machines_that_do_not_share_out_dir_are_refused_before_training(train_on_ranks, tmp_path):
    """Each would keep only its part of a checkpoint, and report it as saved."""
    for rank in range(2):
        (tmp_path / f"machine{rank}").mkdir()
    place = f"os.chdir({str(tmp_path)!r} + '/machine' + os.environ['RANK'])"
    script = wrapped(tmp_path, f"os.environ['LOCAL_WORLD_SIZE'] = '1'\n{place}")
    said = train_on_ranks(2, script, code=1, out_dir="out").stderr
    assert "out must be one folder that all machines share" in said, said
    assert not list(tmp_path.glob("machine*/out/step_*"))


def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees(train_on_ranks, alone, tmp_path):
    """As if a network file system showed rank 1 a new folder late: no rank may take the newest one for damaged."""
    shutil.copytree(alone, tmp_path / "out")
    before = (
        "import pathlib\nglob = pathlib.Path.glob\n"
        "late = lambda path: os.environ['RANK'] == '1' and 'step_000020' in str(path)\n"
        "pathlib.Path.glob = lambda self, pattern: [path for path in glob(self, pattern) if not late(path)]\n"
    )
    done = train_on_ranks(2, wrapped(tmp_path, before), max_iters=21, lr_decay_iters=20)
    assert f"resumes   {tmp_path}/out/step_000020" in done.stdout, done.stdout
    assert (tmp_path / "out/step_000021").exists(), done.stdout


def test_a_run_has_its_folder_for_itself(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text("{}")
    assert "published holds weights: name a folder" in error_of(train, capsys, out_dir="~/published")
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is writing to" in error_of(train, capsys)


# ----------------------------------------------------------------------------------------------------------------------
# From a checkpoint


def test_a_finished_run_writes_plain_json_and_resumes_with_more_iterations(train, tmp_path, capsys):
    train()
    meta = json.loads((tmp_path / "out/step_000008/run.json").read_text())
    assert meta["step"] == 8 and meta["settings"]["learning_rate"] == 3e-3
    assert meta["dataset"]["tokenizer"] == "bytes" and meta["versions"]["torch"] == torch.__version__
    assert meta["val_loss"] == metrics(tmp_path / "out")[-1]["val_loss"]
    train()
    assert "nothing left to train" in capsys.readouterr().out
    train(max_iters=10)
    assert metrics(tmp_path / "out")[-1]["step"] == 10
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["save_seconds"] > 0 and summary["resume_seconds"] > 0
    for step in (1_000_000, 999_999):
        (tmp_path / f"out/step_{step}").mkdir()
    assert newest(tmp_path / "out").name == "step_1000000", "ordered by number"


@pytest.mark.parametrize("file", ["model.safetensors", "run.json", "tokenizer.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(train, tmp_path, capsys, file):
    """Damage found by a resume; tests/test_checkpoint.py damages every file in every way."""
    train()
    whole = losses(tmp_path / "out")
    for _ in range(2):  # the second time a damaged one is already set aside
        path = tmp_path / "out/step_000008" / file
        path.unlink() if file == "run.json" else damage(path)
        capsys.readouterr()
        train()
        out = capsys.readouterr().out
        expected = "is missing" if file == "run.json" else "not what was saved"
        assert "step_000008 is damaged" in out and expected in out and "step_000004" in out, out
        assert "loss.png is not drawn" not in out
        assert losses(tmp_path / "out") == whole
        assert (tmp_path / "out/step_000008.damaged").exists() and (tmp_path / "out/step_000008").exists()


def test_evaluating_a_folder_that_a_run_may_own_renames_nothing(train, tmp_path, capsys):
    train()
    damage(tmp_path / "out/step_000008/model.safetensors")
    message = error_of(train, capsys, eval_only=True)
    assert "step_000008 is damaged, or was deleted meanwhile" in message and (tmp_path / "out/step_000008").exists()


def test_without_a_whole_one_damaged_checkpoints_stop_the_run(train, tmp_path, capsys):
    train()
    damage(tmp_path / "out/step_000008/optimizer.safetensors")
    (tmp_path / "out/step_000004/run.json").unlink()
    message = error_of(train, capsys)
    assert (tmp_path / "out/step_000008.damaged").exists()
    assert "step_000004 is damaged" in message and "run.json is missing" in message, message
    assert (tmp_path / "out/step_000004").exists(), "a new run would begin in its place"


def test_a_checkpoint_that_lost_its_optimizer_is_whole_as_the_start_of_a_new_run(train, tmp_path, capsys):
    train(max_iters=4)
    (tmp_path / "out/step_000004/optimizer.safetensors").unlink()
    message = error_of(train, capsys)
    assert "optimizer.safetensors is missing. There is no older one" in message, message
    start = tmp_path / "out/step_000004"
    assert f"a new run can begin with them, --init_from={start}" in message, message
    train(init_from=start, lora_rank=1, max_iters=1, out_dir=tmp_path / "new")
    assert "which the adapters will need" in capsys.readouterr().out
    train(init_from=tmp_path / "new", lora_rank=1, max_iters=1, out_dir=tmp_path / "again")
    assert "which the adapters will need" not in capsys.readouterr().out, "they need the first run's"


def test_an_io_error_does_not_count_as_damage(train, tmp_path, capsys, monkeypatch):
    train()
    failure = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(checkpoint, "read_rows", mock.Mock(side_effect=failure))
    assert "Input/output error" in error_of(train, capsys)
    assert (tmp_path / "out/step_000008").exists()


def test_what_has_changed_since_the_checkpoint_is_named_at_resume(train, tmp_path, text_data, capsys):
    """Settings, code, libraries and data; not what follows from them."""
    shutil.copytree(text_data, tmp_path / "data")
    before = train(dataset=tmp_path / "data")
    versions = before["run_info"]["versions"]
    edit_run(tmp_path / "out/step_000008", versions=versions | {"torch": "2.0.0", "triton": "3.0.0"})  # saved on a GPU
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"train_sha256": "1234", "train_bytes": 1}))
    changes = {"max_iters": 9, "grad_clip": 0.5, "seed": 5, "weight_decay": 0.2}
    train(dataset=tmp_path / "data", **changes)
    named = re.search("resumes .* with (.*) changed", capsys.readouterr().out)[1].split(", ")
    expected = [f"{name} {before[name]} -> {value}" for name, value in changes.items()]
    expected.append(f"torch 2.0.0 -> {versions['torch']}")
    expected.append(f"the dataset's train_sha256 {meta['train_sha256'][:12]} -> 1234")
    assert sorted(named) == sorted(expected)


def test_a_checkpoint_of_another_version_in_several_files_is_resumed_with_the_same_losses(train, tmp_path):
    train()
    whole = losses(tmp_path / "out")
    shutil.rmtree(tmp_path / "out/step_000008")
    path = tmp_path / "out/step_000004"
    edit_config(path, nanocria_context=None, nanocria_doc_start=None, a_later_field=3)
    run = read_run(path)
    settings = run["settings"] | {"beta1": 0.9, "fused_loss": True, "a_later_setting": 3}
    for stem in ("model", "optimizer"):  # in several files, as above 5 GB
        tensors = load_file(path / f"{stem}.safetensors")
        file_of = {name: f"{stem}-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
        for file in set(file_of.values()):
            save_file({name: tensors[name] for name in tensors if file_of[name] == file}, path / file)
        (path / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
        (path / f"{stem}.safetensors").unlink()
    digests = {}
    for file in path.glob("*[!n].*"):  # all but run.json
        content = file.read_bytes()
        ends = [*range(1000, len(content), 1000), len(content)]  # there: pieces of 4 MiB
        digests[file.name] = [f"{end} {sha256(content[(end - 1) // 1000 * 1000 : end]).hexdigest()}" for end in ends]
    edit_run(path, settings=settings, digests=digests, a_later_entry=[])
    train()
    assert losses(tmp_path / "out") == whole and len(digests["model-00001-of-00002.safetensors"]) > 9
    damage(path / "optimizer-00002-of-00002.safetensors")
    with pytest.raises(Damaged, match="optimizer-00002-of-00002.safetensors is not what was saved"):
        verify(open_folder(path, optimizer=True))


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


def test_with_another_block_size_a_resumed_run_counts_the_tokens_that_were_read(train):
    train(max_iters=4)
    assert train(max_iters=6, block_size=16)["sequences_read"] == 32, "4 steps of 4 sequences x 32 tokens"


def test_another_run_or_version_in_the_same_folder_is_refused_with_a_sentence(train, tmp_path, capsys):
    train()
    assert "step_000008 is beyond max_iters, 7: raise --max_iters" in error_of(train, capsys, max_iters=7)
    assert "rope_scaling None (this run: " in error_of(train, capsys, rope_scaling=SCALING)
    assert "pass --n_layer=2 --n_embd=32, or change out_dir" in error_of(train, capsys, n_layer=3, n_embd=64)
    assert "--init_from=resume continues it" in error_of(train, capsys, init_from="scratch")


def test_a_parameter_without_a_published_name_ends_a_run_before_it_trains(train, tmp_path, capsys, monkeypatch):
    train()
    init = model_module.MLP.__init__

    def with_gain(self, config):
        init(self, config)
        self.gain_norm = model_module.RMSNorm(config, Execution())

    monkeypatch.setattr(model_module.MLP, "__init__", with_gain)
    said = "layers.0.mlp.gain_norm.weight has no name in Hugging Face's Llama: add 'mlp.gain_norm.weight' to OWN"
    assert said in error_of(train, capsys)
    assert (tmp_path / "out/step_000008").exists(), "it is not damaged"
    assert said in error_of(train, capsys, out_dir=tmp_path / "new")
    assert not (tmp_path / "new/metrics.jsonl").exists()


def test_a_changed_model_without_the_published_mlp_is_resumed(train, tmp_path, monkeypatch):
    class WithExpert(model_module.Block):
        mlp = property(lambda self: self.expert)

        def __init__(self, config, how):
            super().__init__(config, how)
            self.expert = self._modules.pop("mlp")

    monkeypatch.setattr(model_module, "Block", WithExpert)
    for module in ("hf", "resume"):
        monkeypatch.setattr(f"runtime.{module}.OWN", {"expert.gate_up_proj.weight", "expert.down_proj.weight"})
    saves = {"keep_last": 9, "eval_interval": 4}
    whole = train(**saves) and losses(tmp_path / "out")
    shutil.rmtree(tmp_path / "out/step_000008")
    train(**saves)
    assert losses(tmp_path / "out") == whole


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
    for module in ("hf", "resume"):
        monkeypatch.setattr(f"runtime.{module}.OWN", OWN | {"second_head.weight"})
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


# ----------------------------------------------------------------------------------------------------------------------
# What a run began with: init_from at a resume


def test_weights_that_a_run_did_not_begin_with_are_refused_and_never_recorded(train, tmp_path, capsys, monkeypatch):
    model = dict(vocab_size=257, tie_embeddings=True, rope_theta=10000.0, norm_eps=1e-6, n_embd=64, ffn_dim=96)
    model |= dict(rope_scaling=SCALING)
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        publish(tmp_path / name)

    def recorded():
        run = read_run(newest(tmp_path / "out"))
        return run["settings"]["init_from"], run["step"]

    a = str(tmp_path / "a")
    for step, init_from in enumerate(("a", "./b/../a", "auto", "resume"), start=1):
        train(**model, init_from=init_from, max_iters=step)
        assert recorded() == (a, step)
    damage(tmp_path / "out/step_000004/config.json")
    message = error_of(train, capsys, **model, init_from=tmp_path / "b", max_iters=5)
    assert f"init_from {a} (this run: {tmp_path}/b): pass --init_from={a}, or change out_dir" in message
    train(**model, init_from="scratch", max_iters=1, out_dir=tmp_path / "random")
    message = error_of(train, capsys, **model, init_from="a", max_iters=2, out_dir=tmp_path / "random")
    assert f"init_from auto (this run: {a})" in message
