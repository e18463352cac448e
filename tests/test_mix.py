"""--dataset=a:0.7,b:0.3: which sequences a run reads, and what its log says of the parts."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from data.loader import dataset_parts, open_dataset, turns
from tests.datasets import toy_dataset
from tests.runs import assert_close, error_of, metrics, numbers, prose, step_losses
from tests.test_packing import write

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Two datasets, of capitals and of small letters, so that a token tells its part."""
    folder = tmp_path_factory.mktemp("parts")
    toy_dataset(folder / "small", [prose(i, 500) for i in range(4)], [prose(4, 500)])
    toy_dataset(folder / "capital", [prose(i, 900).upper() for i in range(5)], [prose(5, 700).upper()])
    return folder


def mix_of(parts, **weights):
    return ",".join(f"{parts / name}:{weight}" for name, weight in weights.items())


@pytest.mark.parametrize("shares", [[1], [7, 3], [1, 1, 1], [5, 1, 3, 1], [1, 999_999]])
def test_each_part_has_its_share_of_every_beginning_of_the_run_and_reads_on_where_it_was(shares):
    n = 2000
    takers, order = turns(np.arange(n), shares)
    for part, share in enumerate(shares):
        assert order[takers == part].tolist() == list(range((takers == part).sum())), "each number once, in order"
        expected = np.arange(1, n + 1) * share / sum(shares)
        assert abs(np.cumsum(takers == part) - expected).max() <= len(shares)
    far = 10**12
    for first in (0, 17, far):  # at once or one by one, from any place
        takers, order = turns(np.arange(first, first + 50), shares)
        alone = [turns(np.arange(i, i + 1), shares) for i in range(first, first + 50)]
        assert [(a.item(), b.item()) for a, b in alone] == list(zip(takers.tolist(), order.tolist(), strict=True))


def test_a_mix_reads_the_sequences_of_its_parts_in_the_order_that_each_has_alone(parts):
    mix, _ = open_dataset(mix_of(parts, small=6, capital=2), 32, seed=3)  # weights, normalized
    assert list(mix.shares.values()) == [0.75, 0.25]
    sequences = mix.sequences(0, 2000)
    is_small = (sequences >= ord("a")).sum(1) > (sequences < ord("a")).sum(1)
    assert is_small.sum() == 1500
    for name, chosen in (("small", is_small), ("capital", ~is_small)):
        alone, _ = open_dataset(str(parts / name), 32, seed=3)
        assert torch.equal(sequences[chosen], alone.sequences(0, int(chosen.sum())))
    assert torch.equal(mix.sequences(777, 100), sequences[777:877])
    assert mix.loss_weights(0, 5, 4).tolist() == [1.0] * 5
    rare, _ = open_dataset(mix_of(parts, small=9_999_999, capital=1), 32, seed=3)
    assert rare.millionths == [1_000_000, 1], "a part would never be read"


def test_answers_of_a_mix_of_conversations_count_the_same(tmp_path):
    for name, lengths in (("short", [10] * 40), ("long", [45] * 30)):
        write(tmp_path / name, lengths)
    mix, val = open_dataset(mix_of(tmp_path, short=0.5, long=0.5), 48, seed=0, mask_documents=True)
    _, targets, _ = mix.unpack(mix.sequences(5, 12))
    n_targets = (targets != -100).view(3, -1).sum(1)
    assert len(set(n_targets.tolist())) > 1
    assert mix.meta["train_targets"] == sum(part.meta["train_targets"] for part in mix.parts), "it is known as chats"
    assert torch.allclose(mix.loss_weights(5, 3, 4), (n_targets / n_targets.double().mean()).float())
    assert [part.n_blocks for part in val.parts] == [len(part.n_targets) for part in val.parts]


def test_a_mix_is_the_same_on_two_ranks_and_when_resumed_there(parts, train_on_ranks, train, tmp_path):
    settings = dict(dataset=mix_of(parts, small=0.7, capital=0.3), max_iters=6, eval_interval=2)
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    out = train_on_ranks(1, out_dir=one, **settings).stdout
    train_on_ranks(2, out_dir=two, **settings)
    shutil.copytree(one / "step_000002", resumed / "step_000002")
    train_on_ranks(2, out_dir=resumed, **settings)
    assert_close(step_losses(two), step_losses(one), 1e-5)
    assert_close(step_losses(resumed), step_losses(one)[2:], 2e-5)
    assert_close(numbers(two, "val_loss"), numbers(one, "val_loss"), 1e-5)
    *_, last = (line for line in metrics(one) if "val_loss" in line)
    for name, share in (("small", "70.0%"), ("capital", "30.0%")):
        folder = parts / name
        assert re.search(rf"{folder}: [\d,]+ tokens; {share} of the sequences; 6 steps read them \d", out)
        loss = last["val_losses"][str(folder)]
        assert f"{folder} {loss:.4f}" in out
        run = train(dataset=folder, init_from=one / "step_000006", eval_only=True, out_dir=tmp_path / name)
        assert run["evaluate"]() == pytest.approx([loss], rel=1e-6)
    assert last["val_loss"] == pytest.approx(np.dot([0.7, 0.3], list(last["val_losses"].values())))
    config = json.loads((one / "step_000006/config.json").read_text())
    assert config["vocab_size"] == 257 and (one / "step_000006/tokenizer.json").exists()


def test_a_name_with_colons_or_commas_is_a_folder_or_a_mix_or_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a:0.5", "b,c:1"):
        (tmp_path / folder).mkdir()
    for plain in ("a:0.5", "b,c:1", "nowhere"):
        assert dataset_parts(plain) == {plain: 1.0}
    assert dataset_parts("x/a:1:2,~/b:.5") == {"x/a:1": 2.0, "~/b": 0.5}
    for wrong in ("a:1,b", "x,y", "x:y", "a:70%,b:30%", "a:1,a:2", "a:1,b:0", "a:1,b:-1", "a:1,b:nan"):
        with pytest.raises(ValueError, match="is no folder, and a mix is a:0.7,b:0.3"):
            dataset_parts(wrong)


def test_parts_that_do_not_fit_together_are_refused_by_name(parts, tmp_path, train, capsys):
    write(tmp_path / "chat", [10] * 16)
    toy_dataset(tmp_path / "bos", ["a" * 100], ["a" * 100], extra={"bos": ord("a")})
    for other, said in (("chat", "one holds conversations"), ("bos", "differ in bos"), ("none", "not a finished")):
        dataset = f"{parts / 'small'}:1,{tmp_path / other}:1"
        message = error_of(train, capsys, dataset=dataset, mask_documents=True, n_embd=64)
        assert said in message and str(tmp_path / other) in message


def test_another_part_or_share_at_a_resume_is_named(parts, train, tmp_path, capsys):
    train(dataset=mix_of(parts, small=1, capital=1), max_iters=2, eval_interval=2)
    other = tmp_path / "capital"
    toy_dataset(other, [prose(9, 900).upper()], [prose(5, 700).upper()])
    train(dataset=f"{parts / 'small'}:2,{other}:1", max_iters=3)
    (resumed,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("resumes"))
    assert "capital:1 -> " in resumed and "the dataset's train_sha256" in resumed
