"""sample.py --evaluate against transformers on the same files, item by item, without padding."""

import json
import math
import shutil

import pytest
import torch
import transformers

import convert
from data.chat.prepare import prepare as chat_prepare
from data.tokenizer import get_tokenizer, tokenizer_of
from runtime import evaluate
from runtime.checkpoint import load_model, newest
from runtime.evaluate import evaluate_file, log_likelihoods
from runtime.generate import begin_document
from tests.published import SCALING, edit_config, publish, publish_chat_model
from tests.runs import prose
from tests.test_tokenizer_files import write_hf_folder

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
    hf = publish(tmp_path)
    tokenizer = get_tokenizer("bytes")
    items = []
    model = load_model(tmp_path)
    tokenizer.bos = 256
    right = 0
    normalised = 0
    scores = []
    rows = []
    for i in range(24):
        ctx = prose(i, 3 + i % 5)
        label = i % 4
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
    texts = []
    tokenizer = get_tokenizer("bytes")

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
    tokenizer = get_tokenizer("bytes")
    rows = []

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
    model = load_model(tmp_path)
    text = prose(1, 60) + " né 🦙"
    (tmp_path / "text.txt").write_text(text)
    ids = [256, *text.encode()]
    size = window or 129
    done = 1
    total = 0.0
    for start in range(0, len(ids), size // 2):
        end = min(start + size, len(ids))
        total += theirs(hf, ids[start:end], done - start).sum().item()
        done = end
        if end == len(ids):
            break
    found = evaluate_file(model, get_tokenizer("bytes"), tmp_path / "text.txt", window)
    n_bytes = len(text.encode())
    assert found["read"] == f"{n_bytes:,} tokens, {n_bytes:,} bytes"
    perplexity = math.exp(-total / n_bytes)
    bits = -total / math.log(2) / n_bytes
    assert abs(float(found["perplexity"].split()[0]) / perplexity - 1) < 1e-5
    assert abs(float(found["bits per byte"]) - bits) < 1e-4


def test_answers_are_scored_as_by_transformers(sample, tmp_path):
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


def test_unevaluable_files_get_a_message(sample, tmp_path):
    publish_chat_model(tmp_path / "hf")
    settings = dict(out_dir=tmp_path / "hf", evaluate=tmp_path / "x.jsonl")
    cases = {
        "": "x.jsonl is empty",
        '{"text": "a"}': "x.jsonl:1: found an object with text, expected an object with messages, or with prompt and",
        '{"ctx": "a", "endings": ["b", "c"], "label": 2}': "x.jsonl:1 has 2 as label: expected a number below 2",
        '{"prompt": "a", "completion": "' + "b" * 500 + '"}': "the model's context has 128",
    }
    for content, expected in cases.items():
        (tmp_path / "x.jsonl").write_text(content)
        out, said = sample(**settings)
        assert expected in said and not out, f"{said}, expected {expected}"
    none = tmp_path / "none.txt"
    assert sample(**settings | {"evaluate": none})[1] == f"[Errno 2] No such file or directory: '{none}'"


# ----------------------------------------------------------------------------------------------------------------------
# lm-evaluation-harness: its own class for transformers is the reference


def publish_with_tokenizer(folder, **tokenizer):
    write_hf_folder(folder, **tokenizer)
    publish(folder, None, vocab_size=304, bos_token_id=1, eos_token_id=3)


def publish_without_bos(folder):
    publish_chat_model(folder, tie_word_embeddings=False, ascii_only=True)
    path = folder / "generation_config.json"  # answers end at <|endoftext|>, too
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [258, 256]}))


PUBLISHED = {
    "without bos": publish_without_bos,
    "with bos": lambda folder: publish_with_tokenizer(folder, bos="<s>"),
    "a bos that is not added": lambda folder: publish_with_tokenizer(folder, bos_token="<s>"),
    "bos is the end of text": lambda folder: publish_with_tokenizer(folder, bos="<|endoftext|>"),
}


def assert_equals_the_harness(folder):
    """All three kinds of requests, on texts below and beyond the context, and texts that begin with special tokens."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from runtime.lm_eval import Nanocria

    reference = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    ours = Nanocria(str(folder), batch_size=3, device="cpu", dtype="float32")
    assert (ours.prefix_token_id, ours.eot_token_id) == (reference.prefix_token_id, reference.eot_token_id)

    def both(kind, *arguments):
        requests = [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]
        return (getattr(lm, kind)(requests, disable_tqdm=True) for lm in (ours, reference))

    long = prose(3, 150)
    with_bos = reference.tokenizer.decode(reference.prefix_token_id) + "the <|im_end|> of"
    pairs = [("the of", " and"), ("the of ", "and it"), ("", " and of"), (long, " and"), (with_bos, " of")]
    found, expected = both("loglikelihood", *pairs)
    assert [log_p for log_p, _ in found] == pytest.approx([log_p for log_p, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    found, expected = both("loglikelihood_rolling", (long,), ("the",), ("",), (with_bos,))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-4)
    settings = [{"max_gen_toks": 12, "until": ["e", "\n\n"]}, {"max_new_tokens": 9, "do_sample": False}]
    asked = [(text, each) for text in ("the of", with_bos, long) for each in settings]
    found, expected = both("generate_until", *asked)
    assert found == expected and len(set(found)) > 2


@pytest.mark.parametrize("kind", PUBLISHED)
def test_lm_eval_gives_the_numbers_and_answers_of_the_harness_for_published_weights(tmp_path, kind):
    PUBLISHED[kind](tmp_path / "hf")
    assert_equals_the_harness(tmp_path / "hf")


def test_lm_eval_gives_the_numbers_and_answers_of_the_harness_for_a_run(alone, tmp_path):
    assert_equals_the_harness(alone / "step_000020")
    convert.convert(alone / "step_000020", tmp_path / "hf", "float32")
    assert_equals_the_harness(tmp_path / "hf")


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
    done = 1
    total = 0.0
    for start in range(0, len(ids), 16):
        part = ids[start : start + 33]
        total += theirs(hf, part, done - start).sum().item() if start + len(part) > done else 0.0
        done = max(done, start + len(part))
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


@pytest.mark.parametrize("block_size, context", [(32, 128), (160, 160)])
def test_published_weights_keep_their_context_in_a_finetune(train, tmp_path, block_size, context):
    publish(tmp_path / "hf")
    assert context_of(tmp_path / "hf") == 128
    model = {"vocab_size": 257, "rope_theta": 10000.0, "norm_eps": 1e-6, "n_embd": 64, "ffn_dim": 96}
    train(**model, rope_scaling=SCALING, init_from=tmp_path / "hf", block_size=block_size, max_iters=1)
    assert context_of(tmp_path / "out") == context


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
    rows = [{"ctx": prose(i, 4), "endings": [prose(i + j, 3) for j in range(4)], "label": 1} for i in range(20)]
    files = [tmp_path / "text.txt", write_jsonl(tmp_path / "endings.jsonl", rows)]
    results = set()
    for folder in (base, *(tmp_path / name for name in ("out", "converted", "bare", "adapters"))):
        tokenizer = tokenizer_of(newest(folder) or folder)
        ids = [begin_document(tokenizer, text) for text in ("the of", "the of and")]
        assert ids == [context, whole], folder.name
        row = (whole, [i >= len(context) for i in range(len(whole))])
        [(log_p, _)] = log_likelihoods(load_model(folder), [row], 1)
        assert log_p.sum().item() == pytest.approx(expected, abs=1e-4)
        numbers = [sample(out_dir=folder, dtype="float32", evaluate=file)[0] for file in files]
        results.add((*numbers, sample(out_dir=folder, dtype="float32", prompt="the of", temperature=0)[0]))
    assert len(results) == 1, results
    assert_equals_the_harness(tmp_path / "bare")


def test_a_finetune_of_a_model_from_scratch_goes_on_after_the_end_of_a_document(train, sample, tmp_path, alone):
    settings = dict(init_from=alone, learning_rate=0, max_iters=1, warmup_iters=0)
    train(**settings)
    first = tokenizer_of(newest(alone)).bos
    assert first == tokenizer_of(newest(tmp_path / "out")).bos == 256
    answers = [sample(out_dir=folder, dtype="float32", temperature=0)[0] for folder in (alone, tmp_path / "out")]
    assert answers[0] == answers[1]


def test_a_start_of_prompts_that_is_no_token_is_refused(tmp_path):
    publish_chat_model(tmp_path)
    for wrong in ("256", -1, [256], True):
        edit_config(tmp_path, nanocria_doc_start=wrong)
        with pytest.raises(ValueError, match="nanocria_doc_start"):
            tokenizer_of(tmp_path)
    edit_config(tmp_path, nanocria_doc_start=None, nanocria_context=-3)
    with pytest.raises(ValueError, match="context of -3"):
        load_model(tmp_path)
