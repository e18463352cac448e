"""sample.py --evaluate against transformers on the same files, item by item, without padding; a model's context."""

import json
import math
import shutil

import pytest
import torch
import transformers

import convert
from data.chat.prepare import prepare as chat_prepare
from data.tokenizer import get_tokenizer, tokenizer_of
from runtime.checkpoint import load_model, newest
from runtime.evaluate import evaluate_file, log_likelihoods
from runtime.generate import begin_document
from tests.published import SCALING, publish, publish_chat_model
from tests.runs import prose

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


@torch.no_grad()
def theirs(hf, ids, n_context):
    """log p of the tokens after the first n_context, by transformers, in float64."""
    log_p = hf(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return log_p.gather(-1, torch.tensor(ids[1:])[:, None])[n_context - 1 :, 0]


def log_p_of_windows(hf, ids, size):
    """The sum over all tokens but the first, in windows of `size` tokens that overlap by half."""
    done = 1
    total = 0.0
    for start in range(0, len(ids), size // 2):
        end = min(start + size, len(ids))
        if end > done:
            total += theirs(hf, ids[start:end], done - start).sum().item()
            done = end
    return total


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("window", [None, 50, 2])
def test_perplexity_and_bits_are_transformers_of_a_sliding_window(tmp_path, window):
    hf = publish(tmp_path)
    model = load_model(tmp_path)
    text = prose(1, 60) + " né 🦙"
    (tmp_path / "text.txt").write_text(text)
    ids = [256, *text.encode()]
    total = log_p_of_windows(hf, ids, window or 129)
    found = evaluate_file(model, get_tokenizer("bytes"), tmp_path / "text.txt", window)
    n_bytes = len(text.encode())
    assert found["read"] == f"{n_bytes:,} tokens, {n_bytes:,} bytes"
    perplexity = math.exp(-total / n_bytes)
    bits = -total / math.log(2) / n_bytes
    assert abs(float(found["perplexity"].split()[0]) / perplexity - 1) < 1e-5
    assert abs(float(found["bits per byte"]) - bits) < 1e-4


def test_documents_that_end_of_text_lines_separate_are_scored_alone_and_the_lines_not_at_all(tmp_path):
    hf = publish(tmp_path)
    documents = [prose(1, 60) + "\n", "a\n", prose(2, 9) + "\n"]
    (tmp_path / "text.txt").write_text("<|endoftext|>\r\n".join(["", *documents, "\n"]))
    total = sum(log_p_of_windows(hf, [256, *document.encode()], 129) for document in documents)
    found = evaluate_file(load_model(tmp_path), get_tokenizer("bytes"), tmp_path / "text.txt")
    n_bytes = sum(map(len, documents))
    assert found["read"] == f"{n_bytes:,} tokens, {n_bytes:,} bytes"
    assert abs(float(found["bits per byte"]) + total / math.log(2) / n_bytes) < 1e-4


def test_answers_in_any_format_are_scored_as_by_transformers(sample, tmp_path):
    hf, fast = publish_chat_model(tmp_path / "hf")
    pairs = [(prose(i, 4), prose(50 + i, 1 + i)) for i in range(10)]
    totals = []
    for question, answer in pairs:
        messages = [{"role": "user", "content": question}]
        prompt = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        n_context = len(fast.encode(prompt))
        totals.append(theirs(hf, fast.encode(f"{prompt}{answer}<|im_end|>"), n_context))
    expected = torch.cat(totals).mean().item()
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    shared = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in pairs]
    rows = {
        "messages": [{"messages": messages} for messages in turns],
        "ShareGPT": [{"conversations": messages} for messages in shared],
        "prompt and completion": [{"prompt": q, "completion": a, "mood": 1} for q, a in pairs],
    }
    for name in rows:
        path = write_jsonl(tmp_path / "rows.jsonl", rows[name])
        out, said = sample(out_dir=tmp_path / "hf", evaluate=path, batch_size=3)
        first, second = out.splitlines()
        assert not said and abs(float(first.removeprefix("mean log-likelihood: ").split()[0]) / expected - 1) < 1e-5
        assert second.startswith("read: 10 conversations; ") and f"10 rows of {name}" in second
        assert ("'mood' of rows (10)" in second) == (name == "prompt and completion")


def test_unevaluable_files_get_a_message(sample, tmp_path):
    publish_chat_model(tmp_path / "hf")
    settings = dict(out_dir=tmp_path / "hf", evaluate=tmp_path / "x.jsonl")
    cases = {
        "": "x.jsonl is empty",
        '{"text": "a"}': "x.jsonl:1: found an object with text, expected an object with messages, or with prompt and",
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "' + "b" * 500 + '"}': (
            "tokens of conversation 2 the first to predict is 502 before the end, but the model's context has 128"
        ),
    }
    for content, expected in cases.items():
        (tmp_path / "x.jsonl").write_text(content)
        out, said = sample(**settings)
        assert expected in said and not out, f"{said}, expected {expected}"


# ----------------------------------------------------------------------------------------------------------------------
# What the model was trained on


def context_of(folder):
    return load_model(folder).config.block_size


@pytest.mark.usefixtures("published_model")
def test_an_evaluation_stays_within_the_length_that_the_model_was_trained_at(train, sample, tmp_path):
    """With rope_scaling, config.json claims more for other software: the length that the scaling stretches."""
    scaling = SCALING | {"original_max_position_embeddings": 96}
    train(rope_scaling=scaling, max_iters=4)
    (tmp_path / "text.txt").write_text(prose(1, 60))
    checkpoint = newest(tmp_path / "out")
    hf = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert hf.config.max_position_embeddings == 96 and context_of(checkpoint) == 32
    ids = [256, *prose(1, 60).encode()]
    total = log_p_of_windows(hf, ids, 33)
    settings = dict(out_dir=tmp_path / "out", evaluate=tmp_path / "text.txt")
    found = sample(**settings)[0]
    assert float(found.split()[1]) == pytest.approx(math.exp(-total / (len(ids) - 1)), rel=1e-4)
    assert found == sample(**settings, window=33)[0] != sample(**settings, window=20)[0]
    said = sample(out_dir=tmp_path / "out", prompt="d" * 40)[1]
    assert "the model sees the last 32" in said


@pytest.mark.usefixtures("published_model")
def test_the_context_is_the_longest_that_the_weights_were_trained_at(train, tmp_path):
    scaling = SCALING | {"original_max_position_embeddings": 96}
    scaled = dict(rope_scaling=scaling, max_iters=1, warmup_iters=0)
    out = tmp_path / "out"
    train(**scaled)
    base = tmp_path / "converted"
    convert.convert(newest(out), base, "float32")
    shutil.copytree(base, tmp_path / "bare")
    (tmp_path / "bare/run.json").unlink()  # as others publish it
    assert context_of(out) == context_of(base) == context_of(tmp_path / "bare") == 32
    for source, block_size, context in ((out, 48, 48), (tmp_path / "bare", 16, 32)):
        train(**scaled, init_from=source, block_size=block_size, out_dir=tmp_path / str(block_size))
        assert context_of(tmp_path / str(block_size)) == context
    adapters = tmp_path / "adapters"
    train(**scaled, init_from=base, block_size=16, lora_rank=2, out_dir=adapters)
    convert.convert(newest(adapters), tmp_path / "merged", "float32")
    assert context_of(adapters) == context_of(tmp_path / "merged") == 32
    train(**scaled | {"max_iters": 2}, block_size=16)
    assert newest(out).name == "step_000002" and context_of(out) == 32, "a resume at a shorter length"
    assert json.loads((newest(out) / "config.json").read_text())["max_position_embeddings"] == 96


def chats(folder, base):
    """A dataset of conversations for the weights in a folder, and the settings that train on it without learning."""
    turns = [{"prompt": prose(i, 4), "completion": prose(50 + i, 3)} for i in range(60)]
    chat_prepare([write_jsonl(folder.parent / "chats.jsonl", turns)], folder, str(base), val_fraction=0.3)
    settings = dict(dataset=folder, init_from=base, mask_documents=True, block_size=64)
    return settings | dict(learning_rate=0, max_iters=1, warmup_iters=0)


def test_a_finetune_on_conversations_leaves_the_prompts_of_its_base_as_they_were(train, sample, tmp_path):
    base = tmp_path / "base"
    hf, fast = publish_chat_model(base)
    model = dict(n_embd=64, ffn_dim=96, vocab_size=259, rope_theta=10000.0, rope_scaling=SCALING, norm_eps=1e-6)
    settings = chats(tmp_path / "data", base) | model
    train(**settings)
    convert.convert(newest(tmp_path / "out"), tmp_path / "converted", "float32")
    shutil.copytree(tmp_path / "converted", tmp_path / "bare")
    (tmp_path / "bare/run.json").unlink()  # as others publish it
    train(**settings, lora_rank=2, out_dir=tmp_path / "adapters")
    context, whole = (fast.encode(text) for text in ("the of", "the of and"))
    expected = theirs(hf, whole, len(context)).sum().item()
    (tmp_path / "text.txt").write_text(prose(1, 30))
    file = tmp_path / "text.txt"
    results = set()
    for folder in (base, *(tmp_path / name for name in ("out", "converted", "bare", "adapters"))):
        tokenizer = tokenizer_of(newest(folder) or folder)
        ids = [begin_document(tokenizer, text) for text in ("the of", "the of and")]
        assert ids == [context, whole], folder.name
        row = (whole, [i >= len(context) for i in range(len(whole))])
        [log_p] = log_likelihoods(load_model(folder), [row], 1)
        assert log_p.sum().item() == pytest.approx(expected, abs=1e-4)
        perplexity = sample(out_dir=folder, dtype="float32", evaluate=file)[0]
        results.add((perplexity, sample(out_dir=folder, dtype="float32", prompt="the of", temperature=0)[0]))
    assert len(results) == 1, results


def test_a_finetune_of_a_model_from_scratch_goes_on_after_the_end_of_a_document(train, sample, tmp_path, alone):
    settings = dict(init_from=alone, learning_rate=0, max_iters=1, warmup_iters=0)
    train(**settings)
    first = tokenizer_of(newest(alone)).bos
    assert first == tokenizer_of(newest(tmp_path / "out")).bos == 256
    answers = [sample(out_dir=folder, dtype="float32", temperature=0)[0] for folder in (alone, tmp_path / "out")]
    assert answers[0] == answers[1]
