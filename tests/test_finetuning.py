"""What finetuners set: epochs, the best checkpoint, a sample after each evaluation."""

import json
import math
import re
import shlex
import shutil
import sys

import pytest
import torch

from data.chat import prepare as chat
from runtime.checkpoint import best_of, newest, read_run
from runtime.save import Saver
from tests.datasets import toy_dataset
from tests.published import publish_chat_model
from tests.runs import ROOT, SHORT, SMALL, damage, edit_run, error_of, losses, prose, write_config

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A kilobyte of text: 26 blocks of 32 tokens."""
    folder = tmp_path_factory.mktemp("few")
    toy_dataset(folder, [prose(0, 250)], [prose(1, 250)])
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """200 conversations of about ten thousand tokens, and the weights to begin with."""
    folder = tmp_path_factory.mktemp("chats")
    publish_chat_model(folder / "hf", rope_scaling=None)
    rows = [[prose(i, 3), prose(i + 200, 5)] for i in range(200)]
    lines = [json.dumps({"prompt": question, "completion": answer}) for question, answer in rows]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    chat.prepare([folder / "chats.jsonl"], folder / "data", str(folder / "hf"))
    return {"dataset": folder / "data", "init_from": folder / "hf", "device": "cpu"}


def test_the_next_command_of_chat_prepare_can_be_pasted_into_a_shell(chats, tmp_path, monkeypatch, capsys):
    folder = chats["init_from"].parent
    options = ["--input", folder / "chats.jsonl", "--tokenizer", folder / "hf", "--out", tmp_path / "my chats"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--workers", "1", *map(str, options)])
    chat.main()
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[-1] == f"--dataset={tmp_path / 'my chats'}"


@pytest.fixture
def config(tmp_path):
    """config(**settings) writes a config file of a small model, by default of eight steps."""
    return lambda **settings: write_config(tmp_path / "small.py", **SMALL | SHORT | settings)


# ----------------------------------------------------------------------------------------------------------------------
# Epochs


def test_epochs_give_the_number_of_steps_and_a_resumed_run_makes_the_same(train, config, few, tmp_path):
    settings = dict(dataset=few, batch_size=2, gradient_accumulation_steps=3, keep_last=9)
    run = train(config(eval_interval=1000), epochs=3, **settings)
    n_blocks = run["train_data"].n_blocks
    assert run["max_iters"] == run["step"] == math.ceil(3 * n_blocks / 6) and n_blocks % 6, "the last step begins anew"
    whole = losses(tmp_path / "out")
    evaluated = [line["step"] for line in whole if "val_loss" in line]
    assert evaluated == [*range(math.ceil(n_blocks / 6), run["max_iters"], math.ceil(n_blocks / 6)), run["max_iters"]]
    shutil.rmtree(newest(tmp_path / "out"))
    train(config(eval_interval=1000), epochs=3, **settings)
    assert losses(tmp_path / "out") == whole
    every = dict(max_iters=run["max_iters"], eval_interval=run["eval_interval"], out_dir=tmp_path / "other")
    train(config(), **settings, **every)
    assert losses(tmp_path / "other") == whole, "learning rates, too"


def test_epochs_end_after_as_many_sequences_if_a_resumed_run_has_another_batch(train, config, few):
    train(config(), dataset=few, batch_size=4, max_iters=4)
    run = train(config(), dataset=few, batch_size=8, epochs=2)
    assert run["max_iters"] == run["step"] == 4 + math.ceil((2 * run["train_data"].n_blocks - 4 * 4) / 8)


def test_a_schedule_that_does_not_fit_into_the_epochs_gets_a_sentence(train, config, few, capsys):
    wsd = dict(lr_schedule="wsd", cooldown_iters=20, epochs=1, dataset=few)
    assert re.search(r"must be at most max_iters \(\d\)", error_of(train, capsys, config(), **wsd))
    wsd["epochs"] = 5
    assert train(config(), **wsd)["max_iters"] > 22, "the config's max_iters of 8 does not count"


def test_epochs_that_are_mostly_warm_up_get_a_sentence(train, config, few, capsys):
    for warmup_iters, warned in ((1, False), (2, True)):
        epoch = dict(batch_size=8, epochs=1, warmup_iters=warmup_iters)  # 4 steps
        train(config(), dataset=few, init_from="scratch", eval_only=True, **epoch)
        assert ("only 4 steps, 2 of them warm-up" in capsys.readouterr().out) == warned


def test_a_run_of_epochs_that_has_no_step_left_says_to_raise_them(train, config, few, capsys):
    common = dict(dataset=few, batch_size=8)
    train(config(), epochs=2, **common)
    train(config(), epochs=2, **common)
    assert "raise --epochs" in capsys.readouterr().out
    assert "raise --epochs" in error_of(train, capsys, config(), epochs=1, **common)


def test_sft_reads_200_conversations_three_times_and_evaluates_after_each(train, chats, tmp_path, capsys):
    run = train(str(ROOT / "config/sft.py"), **chats, block_size=256)
    assert run["max_iters"] == 3 * run["train_data"].n_blocks > 20
    assert "read them 3.00 times" in capsys.readouterr().out
    n_blocks = run["train_data"].n_blocks
    assert [line["step"] for line in losses(tmp_path / "out") if "val_loss" in line] == [n_blocks * i for i in range(4)]


def test_conversations_without_weights_to_begin_with_are_refused(train, chats, capsys):
    message = error_of(train, capsys, dataset=chats["dataset"], mask_documents=True, n_embd=64)
    assert "conversations alone teach random weights little" in message


def test_the_header_warns_of_more_than_ten_epochs(train, few, capsys):
    for max_iters, warned in ((10, False), (11, True)):
        all_blocks = dict(dataset=few, batch_size=26)  # are one step's
        train(max_iters=max_iters, init_from="scratch", eval_only=True, **all_blocks)
        assert ("--epochs" in capsys.readouterr().out) == warned


# ----------------------------------------------------------------------------------------------------------------------
# The best checkpoint


def kept(out_dir):
    return sorted(int(path.name[5:]) for path in out_dir.glob("step_*"))


@pytest.mark.parametrize("async_save", [True, False])
def test_the_best_checkpoint_is_kept_beside_the_newest_also_by_a_resumed_run(
    train, tmp_path, capsys, monkeypatch, async_save
):
    val_losses = {2: 3.0, 4: 1.0, 6: 1.5, 8: 2.0, 10: 2.5, 12: 0.5}  # by step, as checkpoints record them
    save = Saver.save
    monkeypatch.setattr(
        Saver, "save", lambda self, step, run, wait: save(self, step, run | {"val_loss": val_losses[step]}, wait)
    )
    settings = dict(eval_interval=2, keep_last=1, keep_best=True, async_save=async_save)
    train(**settings)
    out = capsys.readouterr().out
    assert kept(tmp_path / "out") == [4, 8]
    assert out.count("best so far") == 2 and "step_000004, the best so far" in out, out
    assert f"next: python sample.py --out_dir={tmp_path}/out/step_000004\n" in out.replace(f"{ROOT}/", "")
    newest = tmp_path / "out/step_000008"
    train(**settings, max_iters=10)
    assert f"resumes   {newest}" in capsys.readouterr().out
    assert kept(tmp_path / "out") == [4, 10]
    train(**settings, max_iters=12)
    assert kept(tmp_path / "out") == [12], "a better one takes its place"


def test_a_checkpoint_without_a_loss_or_with_a_damaged_one_is_not_the_best(train, tmp_path):
    train(eval_interval=2, keep_last=9, max_iters=8)
    paths = [tmp_path / f"out/step_00000{step}" for step in (2, 4, 6, 8)]
    for path, val_loss in zip(paths, (0.1, None, 0.3, 0.4), strict=True):
        edit_run(path, val_loss=val_loss)
    assert best_of(paths) == paths[0]
    damage(paths[0] / "run.json")
    assert best_of(paths) == paths[2] and best_of(paths[:2]) is None
    edit_run(paths[3], dataset=read_run(paths[3])["dataset"] | {"val_sha256": "0" * 64})
    assert best_of(paths) == paths[3], "losses on other data say nothing"


def test_losses_of_other_shares_of_a_mix_or_of_other_blocks_do_not_make_the_best(train, tmp_path, text_data, few):
    """The loss of an easy mix would stay the lowest for ever, and its checkpoint the best."""
    train(eval_interval=2, keep_last=9)
    paths = [tmp_path / f"out/step_00000{step}" for step in (2, 4, 6, 8)]
    mixes = [f"{text_data}:{weight},{few}:1" for weight in (9, 1)]
    changes = ({"dataset": mixes[0]}, {"dataset": mixes[1], "block_size": 16}, {"dataset": mixes[1]})
    settings = read_run(paths[3])["settings"]
    for path, val_loss, changed in zip(paths, (0.1, 0.2, 0.4, 0.5), (*changes, changes[2]), strict=True):
        edit_run(path, val_loss=val_loss, settings=settings | changed)
    assert best_of(paths) == paths[2] and best_of(paths[:2]) == paths[1] and best_of(paths[:1]) == paths[0]


# ----------------------------------------------------------------------------------------------------------------------
# A sample after each evaluation


@pytest.mark.parametrize("settings", [
    {},
    dict(activation_checkpointing="full", mlp_chunks=3),
    dict(activation_checkpointing="selective", offload_activations=True),
    dict(offload="all", n_layer=5, activation_checkpointing="full"),
    dict(mask_documents=True, n_embd=64, optimizer="muon"),
], ids=str)  # fmt: skip
def test_a_sample_changes_no_loss_and_no_random_state(train, tmp_path, capsys, settings):
    random_state = torch.get_rng_state()
    train(**settings, out_dir=tmp_path / "without")
    assert "sample    " not in capsys.readouterr().out
    expected = torch.get_rng_state()
    torch.set_rng_state(random_state)
    train(**settings, out_dir=tmp_path / "with", sample_prompt="the")
    assert capsys.readouterr().out.count("sample    the") == 2
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert torch.equal(torch.get_rng_state(), expected)


def last_sample(out):
    text = out.rpartition("sample    ")[2].partition(" steps in ")[0]
    return text.rpartition("\n")[0].replace("\n" + " " * 10, "\n")


def test_the_sample_is_the_text_of_sample_py(train, sample, capsys):
    train(sample_prompt="the of", max_iters=40, eval_interval=40)
    text = last_sample(capsys.readouterr().out)
    assert len(text) > 60 and sample(prompt="the of", max_new_tokens=64)[0] == text + "\n" + "-" * 80 + "\n"


@pytest.mark.parametrize("settings", [{}, dict(lora_rank=4, quantize_base="nf4")], ids=str)
def test_a_model_of_chats_answers_as_in_sample_py(train, sample, chats, capsys, settings):
    sft = str(ROOT / "config/sft.py")
    train(sft, **chats, **settings, block_size=128, max_iters=20, learning_rate=1e-2, sample_prompt="of a?")
    text = last_sample(capsys.readouterr().out)
    assert sample("of a?\n", chat=True, max_new_tokens=64)[0] == f"> {text.removeprefix('of a?')[1:]}\n> \n"


def test_a_sample_without_the_datas_tokenizer_ends_the_run_with_a_sentence(train, text_data, tmp_path, capsys):
    shutil.copytree(text_data, tmp_path / "data")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"tokenizer": "mine"}))
    assert "tokenizer" in error_of(train, capsys, dataset=tmp_path / "data", sample_prompt="the")
    assert not (tmp_path / "out/metrics.jsonl").exists()
