"""sample.py --evaluate against transformers on the same files, item by item, without padding."""

import json
import math
from unittest import mock

import pytest
import torch

from data.tokenizer import get_tokenizer, tokenizer_of
from runtime import evaluate
from runtime.checkpoint import load_model
from runtime.evaluate import evaluate_file, log_likelihoods
from tests.published import publish, publish_chat_model
from tests.runs import prose

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


@torch.no_grad()
def theirs(hf, ids, n_context):
    """log p of the tokens after the first n_context, by transformers, in float64."""
    log_p = hf(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return log_p.gather(-1, torch.tensor(ids[1:])[:, None])[n_context - 1 :, 0]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_choices_are_those_of_transformers(tmp_path):
    hf, tokenizer, items = publish(tmp_path), get_tokenizer("bytes"), []
    model, tokenizer.bos, right, normalised, scores, rows = load_model(tmp_path), 256, 0, 0, [], []
    for i in range(24):
        ctx, label = prose(i, 3 + i % 5), i % 4
        texts = [prose(100 + 4 * i + j, 1 + (i * j) % 7) for j in range(4)]
        items.append({"ctx": ctx, "endings": texts, "label": label})
        context = [256, *tokenizer.encode(ctx)]
        endings = [tokenizer.encode(f" {text}") for text in texts]
        log_p = [theirs(hf, context + ending, len(context)).sum().item() for ending in endings]
        scores += log_p
        rows += [(context + ending, [False] * len(context) + [True] * len(ending)) for ending in endings]
        by_length = [x / len(ending[1:]) for x, ending in zip(log_p, endings, strict=True)]
        right += log_p.index(max(log_p)) == label
        normalised += by_length.index(max(by_length)) == label
    ours = [log_p.sum().item() for log_p, _ in log_likelihoods(model, rows, batch_size=7)]
    assert max(abs(a - b) / abs(b) for a, b in zip(ours, scores, strict=True)) < 1e-6
    found = evaluate_file(model, tokenizer, write_jsonl(tmp_path / "val.jsonl", items))
    assert found == {
        "accuracy": f"{right / 24:.4f} ({right} of 24)",
        "accuracy, length-normalised": f"{normalised / 24:.4f} ({normalised} of 24)",
    }
    assert right != normalised


def test_rows_of_hellaswags_own_files_are_read_as_lm_evaluation_harness_reads_them(tmp_path, monkeypatch):
    """The same text, and the same lengths of the cleaned endings: here the longest wins."""
    texts, tokenizer = [], get_tokenizer("bytes")

    def score(model, rows, batch_size):
        split = [predicted.index(True) for _, predicted in rows]
        texts.extend(
            (tokenizer.decode(ids[:n]), tokenizer.decode(ids[n:])) for (ids, _), n in zip(rows, split, strict=True)
        )
        return ((torch.tensor([-8.0]), False) for _ in rows)

    monkeypatch.setattr(evaluate, "log_likelihoods", score)
    row = {"activity_label": "Roofing", "ctx_a": "[header] How to nail [title] Take one. [step] Do", "ctx": "another"}
    row |= {"ctx_b": "a MAN [step]", "endings": ["[substeps] 釘釘釘釘釘. ", "longer than that"], "label": "1"}
    found = evaluate_file(None, tokenizer, write_jsonl(tmp_path / "val.jsonl", [row]))
    ctx = "Roofing: How to nail. Take one. Do A man"
    assert texts == [(ctx, "   釘釘釘釘釘."), (ctx, "  longer than that")]
    assert found["accuracy, length-normalised"] == "1.0000 (1 of 1)"


def test_an_ending_behind_no_context_follows_a_document(monkeypatch):
    tokenizer, rows = get_tokenizer("bytes"), []

    def score(model, new_rows, batch_size):
        rows.extend(new_rows)
        return ((torch.ones(1), False) for _ in new_rows)

    monkeypatch.setattr(evaluate, "log_likelihoods", score)
    for tokenizer.bos in (None, 65):
        evaluate.evaluate_choices(None, tokenizer, [("", {"ctx": "", "endings": ["a", "b"], "label": 0})], 1)
        first = tokenizer.end_of_text if tokenizer.bos is None else 65
        assert rows[-1] == ([first, *b" b"], [False, True, True])


@pytest.mark.parametrize("window", [None, 50, 2])
def test_perplexity_and_bits_are_transformers_of_a_sliding_window(tmp_path, window):
    hf = publish(tmp_path)
    model, text = load_model(tmp_path), prose(1, 60) + " né 🦙"
    (tmp_path / "text.txt").write_text(text)
    ids, size = [256, *text.encode()], window or 129
    done, total = 1, 0.0
    for start in range(0, len(ids), size // 2):
        end = min(start + size, len(ids))
        total += theirs(hf, ids[start:end], done - start).sum().item()
        done = end
        if end == len(ids):
            break
    found = evaluate_file(model, get_tokenizer("bytes"), tmp_path / "text.txt", window)
    n_bytes = len(text.encode())
    assert found["read"] == f"{n_bytes:,} tokens, {n_bytes:,} bytes"
    perplexity, bits = math.exp(-total / n_bytes), -total / math.log(2) / n_bytes
    assert abs(float(found["perplexity"].split()[0]) / perplexity - 1) < 1e-5
    assert abs(float(found["bits per byte"]) - bits) < 1e-4


def test_a_perplexity_beyond_all_numbers_is_infinite(monkeypatch):
    monkeypatch.setattr(evaluate, "text_log_likelihood", lambda *_: (-3000.0, 3))
    assert evaluate.evaluate_text(None, None, "abc", None, 1)["perplexity"] == "inf per token"


def test_answers_are_scored_as_by_transformers(sample, tmp_path, monkeypatch):
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
    files = [
        write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages} for messages in turns]),
        write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": q, "completion": a} for q, a in pairs]),
    ]
    for path in files:
        out, said = sample(out_dir=tmp_path / "hf", evaluate=path, batch_size=3)
        first, second = out.splitlines()
        assert not said and abs(float(first.removeprefix("mean log-likelihood: ").split()[0]) / expected - 1) < 1e-5
        assert second.startswith("read: 10 conversations; ")
    monkeypatch.setattr(evaluate, "read_file", mock.Mock(side_effect=[evaluate.read_file(files[0])]))
    files[0].unlink()  # a pipe, which can be read only once
    assert sample(out_dir=tmp_path / "hf", evaluate=files[0], batch_size=3)[0].splitlines()[0] == first


def test_unevaluable_files_get_a_message(sample, tmp_path):
    publish_chat_model(tmp_path / "hf")
    settings = dict(out_dir=tmp_path / "hf", evaluate=tmp_path / "x.jsonl")
    cases = {
        "": "x.jsonl is empty",
        '{"text": "a"}': "x.jsonl:1: found an object with text, expected an object with messages, or with prompt and",
        '{"ctx": "a", "endings": ["b", ""], "label": 0}': "x.jsonl:1 has ['b', ''] as endings: expected texts",
        '{"ctx": "a", "endings": [], "label": 0}': "x.jsonl:1 has [] as endings: expected texts",
        '{"ctx": "a", "endings": ["b", "c"], "label": 2}': "x.jsonl:1 has 2 as label: expected a number below 2",
        '{"ctx": "a", "endings": ["b", "c"], "label": "1"}\n{"ctx": 1}': "x.jsonl:2 has 1 as ctx: expected a str",
        '{"messages": 3}': "x.jsonl:1: messages is not a list of messages",
        '{"messages": [': "x.jsonl:1 is not JSON: ",
        '{"prompt": "a", "completion": "' + "b" * 500 + '"}': "the model's context has 128",
    }
    for content, expected in cases.items():
        (tmp_path / "x.jsonl").write_text(content)
        out, said = sample(**settings)
        assert expected in said and not out, f"{said}, expected {expected}"
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    cases = {"none": "cannot be read: No such file or directory", "latin": "is not UTF-8 text", "empty": "is empty"}
    for name, expected in cases.items():
        path = tmp_path / f"{name}.txt"
        assert sample(**settings | {"evaluate": path})[1].startswith(f"{path} {expected}")


def test_a_published_folder_without_bos_starts_after_a_document(tmp_path):
    publish_chat_model(tmp_path)
    tokenizer, model = tokenizer_of(tmp_path), load_model(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    assert tokenizer.bos is None
    [(score, _)] = log_likelihoods(model, [([tokenizer.end_of_text, *tokenizer.encode("a")], [False, True])], 1)
    found = evaluate_file(model, tokenizer, tmp_path / "a.txt")["bits per byte"]
    assert found == f"{-score.item() / math.log(2):.4f}"


def test_lm_evaluation_harness_scores_and_samples_as_we_do(tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from runtime.lm_eval import Nanocria

    hf, _ = publish_chat_model(tmp_path, tie_word_embeddings=False, ascii_only=True)
    adapter, tokenizer = Nanocria(str(tmp_path), "auto", device="cpu"), tokenizer_of(tmp_path)
    ask = lambda kind, *arguments: [Instance(kind, {}, arguments, 0)]  # noqa: E731
    context, answer = tokenizer.encode("the of"), tokenizer.encode(" and")
    [(log_p, greedy)] = adapter.loglikelihood(ask("loglikelihood", "the of", " and"), disable_tqdm=True)
    assert abs(log_p / theirs(hf, context + answer, len(context)).sum().item() - 1) < 1e-5 and not greedy
    [text] = adapter.generate_until(ask("generate_until", "the of", {"max_gen_toks": 8, "until": []}))
    expected = hf.generate(torch.tensor([context]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert text == tokenizer.decode(expected[0, len(context) :].tolist()).split("<|endoftext|>")[0] and len(text) > 2
    drawn = {"do_sample": True, "temperature": 5.0, "top_k": 1, "max_new_tokens": 8, "until": text[2] + "\0"}
    assert adapter.generate_until(ask("generate_until", "the of", drawn)) == [text]  # as other tasks write theirs
    empty = {"max_gen_toks": 8, "until": ["", text[2]]}  # the harness ignores an empty separator
    assert adapter.generate_until(ask("generate_until", "the of", empty)) == [text[: text.index(text[2])]]
    [(log_p, greedy)] = adapter.loglikelihood(ask("loglikelihood", "the of", text), disable_tqdm=True)
    assert greedy and adapter.loglikelihood_rolling(ask("loglikelihood_rolling", "the of"))[0] < 0
