"""Packed conversations: none is lost, and packing, micro-batches and ranks change neither loss nor gradients."""

import numpy as np
import pytest
import torch

from benchmarks import finetune
from data.loader import Packed, open_dataset, pack
from data.tokenizer import get_tokenizer
from data.tokens import IS_DOC_START, IS_TARGET, Tokens
from data.write import write_dataset
from model import Llama, LlamaConfig, document_starts
from tests.published import publish
from tests.runs import SHORT, SMALL, assert_close, error_of, finish, losses, numbers, run, step_losses

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
CHAT = SMALL | SHORT | dict(n_head=2, n_kv_head=1, mask_documents=True, block_size=48)


def encode(text, tokenizer):
    """Encode a text a>b, of which b is learned."""
    prompt, answer = text.split(">")
    ids = [*f"{prompt}>".encode(), *answer.encode(), tokenizer.end_of_text]
    mask = [IS_TARGET if i > len(prompt) else 0 for i in range(len(ids))]
    return ids, [IS_DOC_START, *mask[1:]], len(ids) - 1


def write(folder, lengths, seed=0):
    rng = np.random.default_rng(seed)

    def conversations():
        for i, n in enumerate(lengths):
            text = bytes(rng.integers(97, 123, n, dtype=np.uint8)).decode()
            at = rng.integers(1, n)
            yield "val" if i % 8 == 7 else "train", f"{text[:at]}>{text[at:]}"

    write_dataset(folder, conversations(), get_tokenizer("bytes"), encode=encode)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """300 conversations of 4 to 34 tokens."""
    return write(tmp_path_factory.mktemp("chats"), np.random.default_rng(0).integers(2, 33, 300))


def conversations(ids, mask):
    """The tokens and the mask of each conversation, as tuples."""
    cuts = np.flatnonzero(mask & IS_DOC_START)[1:]
    pairs = zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
    return [(tuple(map(int, part)), tuple(map(int, bits))) for part, bits in pairs]


def conversations_of(folder, split):
    tokens = Tokens(folder, split)
    return sorted(conversations(tokens.shards[0][:], tokens.masks[0][:]))


def found_in(blocks):
    """The conversations in packed blocks, sorted, without the padding."""
    found = sum((conversations(row & 0xFFFFFFFF, row >> 32) for row in blocks.numpy()), [])
    return sorted((ids, mask) for ids, mask in found if any(bits & IS_TARGET for bits in mask))


# ---------------------------------------------------------------------------------------------------------------------
# Packing


@pytest.mark.parametrize("room", [10, 100, 1000])
def test_pack_places_each_length_once_in_a_block_that_has_room(room):
    lengths = -np.sort(-np.random.default_rng(room).integers(1, room + 1, 2000))
    blocks = pack(lengths.tolist(), room)
    assert sorted(sum(blocks, [])) == list(range(2000))
    sums = [lengths[block].sum() for block in blocks]
    assert max(sums) <= room
    assert lengths.sum() / room <= len(blocks) <= 11 / 9 * lengths.sum() / room + 300, f"{len(blocks)} blocks"
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]  # 4 to the fuller one, which it fills


def test_an_epoch_holds_every_conversation_whole_and_once(chats):
    train, val = open_dataset(chats, 48, seed=3, mask_documents=True)
    for epoch in range(2):
        assert found_in(train.sequences(epoch * train.n_blocks, train.n_blocks)) == conversations_of(chats, "train")
    assert found_in(val.read(range(val.n_blocks))) == conversations_of(chats, "val")
    other, _ = open_dataset(chats, 48, seed=4, mask_documents=True)
    assert (train.starts != other.starts).any(), "of equal lengths the seed chooses which share a block"
    full = sum(len(ids) for ids, _ in conversations_of(chats, "train")) / (49 * train.n_blocks)
    masks = [bits & IS_TARGET for _, mask in conversations_of(chats, "train") for bits in mask]
    assert train.packing.startswith(f"263 conversations, {np.mean(masks):.1%} of their tokens targets")
    assert full > 0.95 and f"blocks {full:.1%} full" in train.packing


def test_conversations_longer_than_a_block_are_cut_at_their_end_and_counted(tmp_path):
    write(tmp_path, [10] * 16 + [60] * 8 + [29], seed=1)  # the last one fills a block
    train, _ = open_dataset(tmp_path, 30, seed=0, mask_documents=True)
    whole = conversations_of(tmp_path, "train")
    cut = [(ids[:31], mask[:31]) for ids, mask in whole]
    assert found_in(train.sequences(0, train.n_blocks)) == sorted(c for c in cut if IS_TARGET in c[1])
    n_out = sum(IS_TARGET not in mask for _, mask in cut)
    n_cut = sum(len(ids) > 31 for ids, _ in whole)
    assert (n_cut, n_out) == (7, 6)
    assert f"; {n_cut} longer than block_size are cut, {n_out} of them left out" in train.packing
    with pytest.raises(ValueError, match="no train conversation reaches an answer within block_size 0"):
        Packed(Tokens(tmp_path, "train"), 0, None, 0)


# ---------------------------------------------------------------------------------------------------------------------
# The loss


@pytest.fixture
def model():
    config = LlamaConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, vocab_size=257, block_size=48)
    model = Llama(config).double()
    model.init_weights(seed=0)
    return model


def gradients(model, batches, weights):
    """Loss and gradients as train.py's step computes them: the mean over micro-batches of weight times mean loss."""
    model.zero_grad()
    total = 0.0
    for batch, weight in zip(batches, weights, strict=True):
        loss = model(*batch) * weight / len(batches)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_same_step(found, expected):
    (loss, gradient) = found
    (expected_loss, expected_gradient) = expected
    assert abs(loss - expected_loss) < 1e-13, f"loss {loss!r}, expected {expected_loss!r}"
    error = ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()
    assert error < 1e-13, f"gradients differ by {error:.1e} of their norm"


def batch_of(blocks):
    tokens, targets, opens = Packed.unpack(None, blocks)
    return tokens, targets, document_starts(opens, IS_DOC_START)


def test_packed_and_padded_batches_give_the_same_loss_and_gradients(model, chats):
    """So attention stays within a conversation, and positions need not restart."""
    train, _ = open_dataset(chats, 48, seed=0, mask_documents=True)
    blocks = train.sequences(0, train.n_blocks)
    padded, targets = (torch.full((len(train.starts), 48), fill) for fill in (0, -100))
    for row, row_targets, (ids, mask) in zip(padded, targets, conversations_of(chats, "train"), strict=True):
        row[: len(ids) - 1] = torch.tensor(ids[:-1])
        row_targets[: len(ids) - 1] = torch.tensor(ids[1:]).where(torch.tensor(mask[1:]) == IS_TARGET, -100)
    expected = gradients(model, [(padded, targets)], [1.0])
    assert_same_step(gradients(model, [batch_of(blocks)], [1.0]), expected)
    assert 2 * len(blocks) < len(padded), f"{len(blocks)} packed blocks, {len(padded)} padded ones"


def test_any_split_of_a_step_gives_the_same_loss_and_gradients(model, chats):
    train, _ = open_dataset(chats, 48, seed=0, mask_documents=True)
    first = train.n_blocks - 5  # within two epochs
    whole = gradients(model, [batch_of(train.sequences(first, 12))], [1.0])
    for n_micro in (1, 2, 3, 12):
        size = 12 // n_micro
        batches = [batch_of(train.sequences(first + i * size, size)) for i in range(n_micro)]
        n_targets = torch.tensor([(targets != -100).sum() for _, targets, _ in batches], dtype=torch.float64)
        weights = n_targets / n_targets.mean()
        assert train.loss_weights(first, n_micro, size).equal(weights.float()) and (n_micro == 1 or weights.std() > 0)
        assert_same_step(gradients(model, batches, weights), whole)


def test_ranks_micro_batches_and_resuming_do_not_change_the_run(train_on_ranks, chats, tmp_path):
    common = CHAT | dict(dataset=chats, eval_iters=5, init_from="scratch")
    one = dict(batch_size=8, gradient_accumulation_steps=1, out_dir=tmp_path / "one")
    refused = run(common | one | dict(init_from="auto"))
    assert refused.returncode == 1 and "--init_from=FOLDER" in refused.stderr
    done = finish(common | one)
    assert "of their tokens targets; blocks 9" in done.stdout
    two = common | dict(batch_size=2, gradient_accumulation_steps=4, out_dir=tmp_path / "two", eval_iters=20)
    train_on_ranks(2, **two)
    assert_close(step_losses(tmp_path / "one"), step_losses(tmp_path / "two"), 2e-6)
    assert_close(*(numbers(tmp_path / name, "val_loss") for name in ("one", "two")), 2e-6)
    stopped = common | one | dict(out_dir=tmp_path / "resumed")
    finish(stopped | dict(max_iters=4, lr_decay_iters=8))
    finish(stopped | dict(max_iters=8, lr_decay_iters=8, init_from="auto"))
    assert losses(tmp_path / "resumed")[-5:] == losses(tmp_path / "one")[-5:]


def test_conversations_without_mask_documents_are_refused(train, chats, capsys):
    message = error_of(train, capsys, **CHAT | dict(dataset=chats, mask_documents=False))
    assert "holds conversations, several in a block: add --mask_documents=true" in message


@pytest.mark.parametrize("arm, peer, more", [
    ("nanocria-float32", "hf-float32", []), ("nanocria-lora", "hf-lora-float32", ["--dtype=float32"]),
])  # fmt: skip
def test_a_finetune_is_transformers_on_the_same_conversations_unpacked(arm, peer, more, chats, tmp_path, monkeypatch):
    """Step for step: the losses of packed blocks, and of all validation conversations; with adapters peft's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # with one, TF32 would differ by more
    publish(tmp_path / "hf")
    at = dict(folder=str(tmp_path / "hf"), dataset=str(chats), batch=4, block=48, steps=8, rate=1e-3)
    ours = finetune.train_finetune(arm, **at, flags=["--device=cpu", *more])
    theirs = finetune.peer_finetune(peer, **at)
    assert len(ours["losses"]) == 8 and [step for step, _ in ours["val"]] == [0, 2, 4, 6, 8], ours
    assert_close(ours["losses"], theirs["losses"], 1e-5)
    assert_close(*([loss for _, loss in found["val"]] for found in (ours, theirs)), 1e-5)
    assert ours["val"][-1][1] < ours["val"][0][1] - 1e-3


def test_padded_batches_hold_every_conversation_and_no_more_tokens_than_asked(chats):
    train, _ = open_dataset(chats, 48, seed=3, mask_documents=True)
    found = finetune.conversations(train, train.read(range(train.n_blocks)))
    batches = [finetune.padded(part, "cpu") for part in finetune.full_batches(found, 1024)]
    assert {tokens.shape[1] for tokens, _ in batches} == {64} and max(len(tokens) for tokens, _ in batches) == 16
    assert sum(int((targets >= 0).sum()) for _, targets in batches) == train.n_targets.sum()
