"""Where a run starts: its folder, its checkpoints, the weights that init_from names, and what has changed since."""

import errno
import fcntl
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import model as model_module
from model import Execution
from runtime import checkpoint
from runtime.checkpoint import digest, load_model, newest, open_folder, read_run, read_weights
from tests.published import SCALING, edit_config, publish
from tests.runs import SHORT, SMALL, damage, edit_run, error_of, losses, metrics, wrapped

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


@pytest.mark.parametrize("hidden", ["from the list", "altogether"])
def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees_or_refuse(train_on_ranks, alone, tmp_path, hidden):
    """As if a network file system showed rank 1 a new folder late: no rank may take the newest one for damaged."""
    shutil.copytree(alone, tmp_path / "out")
    script = wrapped(
        tmp_path,
        "import pathlib\nis_dir, glob = pathlib.Path.is_dir, pathlib.Path.glob\n"
        "late = lambda path: os.environ['RANK'] == '1' and path.name == 'step_000020'\n"
        "pathlib.Path.glob = lambda self, pattern: [path for path in glob(self, pattern) if not late(path)]\n"
        + "pathlib.Path.is_dir = lambda self: is_dir(self) and not late(self)\n"
        * (hidden == "altogether"),
    )
    done = train_on_ranks(2, script, code=int(hidden == "altogether"), max_iters=21, lr_decay_iters=20)
    names = {path.name for path in (tmp_path / "out").glob("step_*")}
    if hidden == "altogether":
        assert "some machines do not see" in done.stderr and names == {"step_000010", "step_000020"}, done.stderr
    else:
        assert f"resumes   {tmp_path}/out/step_000020" in done.stdout and "step_000021" in names, done.stdout


@pytest.mark.parametrize(
    "odd",
    [
        {"settings": 5}, {"versions": [1]}, {"began_with": {"init_from": 5}}, {"step": "6"}, {"step": -3},
        {"updates": 10**30}, {"sequences": "x"}, {"settings": {"base_dtype": 5}},
    ],
    ids=str,
)  # fmt: skip
def test_odd_values_in_a_run_json_with_the_right_digest_are_a_sentence(alone, tmp_path, odd):
    shutil.copytree(alone / "step_000020", tmp_path / "step_000020")
    edit_run(tmp_path / "step_000020", **odd)
    with pytest.raises(ValueError, match=r"run\.json has .*: expected"):
        read_run(tmp_path / "step_000020")


def test_a_folder_that_safetensors_could_not_read_is_refused_before_training(train, tmp_path, capsys):
    folder = os.fsdecode(os.fsencode(tmp_path / "od") + b"\xff")
    assert "rename it" in error_of(train, capsys, out_dir=folder)
    assert not os.path.exists(folder)


def test_a_run_has_its_folder_for_itself(train, tmp_path, capsys):
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text("{}")
    assert "published holds published weights, which" in error_of(train, capsys, out_dir=tmp_path / "published")
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run is writing to" in error_of(train, capsys)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_lock_that_is_a_link_is_refused_and_left_alone(train, tmp_path, capsys, dangling):
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.lock").symlink_to(victim)
    assert ".lock is a link" in error_of(train, capsys)
    assert victim.exists() != dangling
    assert dangling or victim.read_text() == "mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_out_dir_may_be_a_link_or_in_a_home_folder_and_is_no_checkpoint(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train(out_dir="~/run")
    assert newest(tmp_path / "disk").name == "step_000008" and (tmp_path / "disk/metrics.jsonl").exists()
    message = error_of(train, capsys, out_dir=tmp_path / "run/step_000008")
    assert f"step_000008 is a checkpoint: --out_dir={tmp_path}/run resumes from the newest one there" in message
    (tmp_path / "run/step_1000000").mkdir()
    (tmp_path / "run/step_2000000.partial").mkdir()
    assert newest(tmp_path / "run").name == "step_1000000", "ordered by number"


def test_without_locks_a_run_gets_a_warning_and_trains(train, tmp_path, capsys, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    train(max_iters=1)
    assert metrics(tmp_path / "out")[-1]["step"] == 1
    assert ".lock cannot be locked (Function not implemented)" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# From a checkpoint


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
        assert losses(tmp_path / "out") == whole
        assert (tmp_path / "out/step_000008.damaged").exists() and (tmp_path / "out/step_000008").exists()


def test_without_a_whole_one_damaged_checkpoints_stop_the_run(train, tmp_path, capsys):
    train()
    damage(tmp_path / "out/step_000008/optimizer.safetensors")
    (tmp_path / "out/step_000004/run.json").unlink()
    message = error_of(train, capsys)
    assert (tmp_path / "out/step_000008.damaged").exists()
    assert "step_000004 is damaged" in message and "run.json is missing" in message, message
    assert (tmp_path / "out/step_000004").exists(), "a new run would begin in its place"


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")], ids=str)
def test_an_io_error_does_not_count_as_damage(train, tmp_path, capsys, monkeypatch, error):
    def fail(*_):
        raise error

    train()
    monkeypatch.setattr(checkpoint, "read_rows", fail)
    assert ("MemoryError" if isinstance(error, MemoryError) else "Input/output error") in error_of(train, capsys)
    assert (tmp_path / "out/step_000008").exists()


def test_lower_halves_of_some_weights_only_and_tensors_of_another_model_are_refused(train, tmp_path, capsys):
    run = train(dtype="bfloat16", max_iters=4)
    parameters = run["optimizer"].parameters
    folder = open_folder(tmp_path / "out/step_000004", ("model", "optimizer"))
    lower = folder.tensors.pop("lower_half.model.layers.1.self_attn.q_proj.weight")  # the first of a stack
    with pytest.raises(ValueError, match="expected lower_half.model.layers.1.self_attn.q_proj.weight of shape"):
        read_weights(folder, parameters, run["config"], lambda name, whole: None)
    folder.tensors["exp_avg.lm_head.weight"] = lower
    with pytest.raises(ValueError, match="has 1 tensors that the model does not have: exp_avg.lm_head.weight, ..."):
        read_weights(folder, parameters, run["config"], lambda name, whole: None, run["optimizer"].tensors())


@pytest.mark.parametrize("changes", [
    {"grad_clip": 0.5, "galore_rank": 5, "seed": 5},
    {"batch_size": 2, "mask_documents": True, "learning_rate": 1e-3, "weight_decay": 0.2},
], ids=str)  # fmt: skip
def test_every_setting_that_alters_the_run_is_named_at_resume(train, capsys, changes):
    before = train(n_embd=64)
    train(n_embd=64, optimizer="adamw", max_iters=9, **changes)
    named = re.search(" with (.*) changed", capsys.readouterr().out)[1].split(", ")
    expected = [f"{name} {before[name]} -> {value}" for name, value in changes.items()]
    assert sorted(named) == sorted(["max_iters 8 -> 9", *expected])


def test_other_code_another_torch_and_new_data_are_named_at_resume(train, tmp_path, text_data, capsys):
    shutil.copytree(text_data, tmp_path / "data")
    versions = train(dataset=tmp_path / "data")["run_info"]["versions"]
    saved = {"nanocria": "0123456", "torch": "2.0.0", "triton": "3.0.0"}  # on a GPU, which has triton
    edit_run(tmp_path / "out/step_000008", versions=versions | saved)
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"train_sha256": "1234", "train_bytes": 1}))
    train(dataset=tmp_path / "data")
    assert [
        f"resumes   {tmp_path}/out/step_000008 with nanocria 0123456 -> {versions['nanocria']}, "
        f"torch 2.0.0 -> {versions['torch']}, the dataset's train_sha256 {meta['train_sha256'][:12]} -> 1234 changed"
    ] == re.findall("resumes .*", capsys.readouterr().out), "what says it, and not what follows from it"


def test_checkpoints_of_other_versions_with_more_or_fewer_fields_are_read(train, tmp_path, capsys):
    train()
    path = tmp_path / "out/step_000008"
    settings = {name: value for name, value in read_run(path)["settings"].items() if name != "optimizer_bits"}
    edit_config(path, a_later_field=3)
    digests = read_run(path)["digests"] | {"config.json": [digest(path / "config.json")]}
    edit_run(path, settings=settings | {"a_later_setting": 3}, a_later_entry=[], versions=None, digests=digests)
    train(max_iters=9)
    assert "with max_iters 8 -> 9 changed" in capsys.readouterr().out
    assert metrics(tmp_path / "out")[-1]["step"] == 9 and load_model(tmp_path / "out")


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
    assert "rope_scaling None (this run: " in error_of(train, capsys, rope_scaling=SCALING)
    assert "pass --n_layer=2 --n_embd=32, or change out_dir" in error_of(train, capsys, n_layer=3, n_embd=64)
    assert "--init_from=resume continues it" in error_of(train, capsys, init_from="scratch")
    edit_run(tmp_path / "out/step_000008", updates=None)  # a folder from convert.py lacks it, too
    message = error_of(train, capsys, max_iters=9)
    assert "is not a checkpoint of this version: its run.json lacks updates" in message
    assert (tmp_path / "out/step_000008").exists(), "it is not damaged"


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
    for module in ("hf_names", "resume"):
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
    edit_config(tmp_path / "b", nanocria_tokenizer="bytes")
    return tmp_path / "a", tmp_path / "b"


def begun_with(out_dir):
    """The init_from that the newest checkpoint names, and its step."""
    run = read_run(newest(out_dir))
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
    for step, init_from in enumerate(("a", "./b/../a", "link", "auto", "resume"), start=2):
        train(**common, init_from=init_from, max_iters=step)
        assert begun_with(tmp_path / "out") == (str(a), step)
    a.rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    for step, init_from in enumerate(("a", "moved"), start=7):
        train(**common, init_from=init_from, max_iters=step)
        assert begun_with(tmp_path / "out") == (str(a), step)
    (tmp_path / "elsewhere").mkdir()
    b.rename(tmp_path / "elsewhere/a")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_refused(train, capsys, tmp_path, **common, init_from="a", max_iters=9)  # the same word, other weights


def test_a_run_begun_at_random_takes_no_weights_afterwards(train, tmp_path, capsys, weights):
    out = tmp_path / "out"
    for step, init_from in enumerate(("scratch", "auto", "resume"), start=1):
        train(**MODEL, init_from=init_from, max_iters=step)
        assert begun_with(out) == ("scratch", step)
    message = error_of(train, capsys, **MODEL, init_from=weights[0], max_iters=4)
    assert "random weights" in message and begun_with(out) == ("scratch", 3)


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
