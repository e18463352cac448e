"""sample.py: prompts, sampling, conversations, and its messages for user errors."""

import shutil

import pytest
import torch

from data.chat import template
from runtime import generate
from tests.published import edit_config, publish, publish_chat_model, smollm2
from tests.runs import run
from tests.test_tokenizer_files import write_hf_folder

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
LINE = "\n" + "-" * 80 + "\n"


@pytest.fixture
def draw(sample, alone):
    """draw(**settings) calls sample() on a run of twenty steps."""
    return lambda stdin="", **settings: sample(stdin, **{"out_dir": alone} | settings)


def test_sample_continues_a_prompt_and_repeats_itself_for_a_seed(draw, alone):
    first = draw(seed=1, max_new_tokens=40)
    assert first[0].startswith("def ") and len(first[0]) > 60
    assert first == draw(seed=1, max_new_tokens=40) != draw(seed=2, max_new_tokens=40)
    done = run({"out_dir": alone, "prompt": "def ", "max_new_tokens": 40, "device": "cpu", "seed": 1}, "sample.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, first[0], "")


def test_what_sample_cannot_read_gets_a_sentence(draw, tmp_path):
    assert "exclude each other" in draw(evaluate="a.txt", chat=True)[1]
    assert "must be in (0, 1]" in draw(top_p=1.1)[1]
    # Of fewer than one sequence at a time nothing would be scored, and the perplexity be 1.
    for name, least in dict(batch_size=1, window=2, num_samples=1, max_new_tokens=0, top_k=1).items():
        assert draw(**{name: least - 1}) == ("", f"{name} is {least - 1}: it must be at least {least}")
    assert draw(evaluate="none.txt") == ("", "[Errno 2] No such file or directory: 'none.txt'")
    assert "holds no weights: expected a run with a checkpoint, or" in draw(out_dir=tmp_path / "nowhere")[1]


def test_a_copied_folder_samples_the_same_text_as_its_checkpoint(draw, alone, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(alone / "step_000020", folder)
    text, said = draw()
    assert text.startswith("def ") and not said and text == draw(out_dir=folder)[0]
    (folder / "run.json").unlink()  # as others publish it
    assert text == draw(out_dir=folder)[0]
    edit_config(folder, nanocria_tokenizer=None)
    assert draw(out_dir=folder)[0].startswith("def ")  # by its tokenizer.json
    edit_config(folder, nanocria_doc_start="a")
    for tokenizer in ("bytes", None):
        assert "expected a token's id" in draw(out_dir=folder, tokenizer=tokenizer)[1]
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json or tokenizer.model in" in draw(out_dir=folder)[1]


def test_sampling_follows_its_settings(draw, monkeypatch):
    asked = []

    def generate_ids(model, prompts, n, temperature, top_k, top_p, min_p, eos, generator):
        asked.append((prompts, n, temperature, top_k, top_p, min_p, list(eos)))
        yield from ([token] * len(prompts) for token in (*"né 🦙".encode(), None, None))
        yield [None, 0xC3]  # cut off in the middle of a character

    monkeypatch.setattr(generate, "generate", generate_ids)
    settings = dict(num_samples=2, top_k=3, top_p=0.5, min_p=0.1, temperature=0.7)
    expected = f"a<|endoftext|>né 🦙{LINE}a<|endoftext|>né 🦙\ufffd{LINE}"
    assert draw(prompt="a<|endoftext|>", **settings)[0] == expected
    assert asked == [([[256, 97, 256]] * 2, 12, 0.7, 3, 0.5, 0.1, [256])]  # special tokens in a prompt become tokens


def test_a_prompt_that_begins_with_its_bos_gets_no_second_one(sample, tmp_path):
    theirs = write_hf_folder(tmp_path / "hf", bos="<s>")
    theirs.no_padding()
    hf = publish(tmp_path / "hf", None, vocab_size=304, bos_token_id=1, eos_token_id=3)
    settings = dict(out_dir=tmp_path / "hf", temperature=0, max_new_tokens=8)
    ids = theirs.encode("the of").ids
    assert ids[0] == 1 not in ids[1:]
    expected = hf.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    text = theirs.decode(expected, skip_special_tokens=True)
    plain, said = sample(prompt="the of", **settings)
    assert plain == text + LINE and not said
    assert sample(prompt="<s>the of", **settings, num_samples=2) == (2 * f"<s>{plain}", "")
    assert sample(prompt="<s>", **settings) == ("<s>" + sample(prompt="", **settings)[0], "")


def test_a_prompt_that_begins_with_the_end_of_a_document_gets_no_second_one(draw):
    plain, _ = draw(temperature=0)
    assert draw(prompt="<|endoftext|>def ", temperature=0) == (f"<|endoftext|>{plain}", "")


def test_another_tokenizer_may_be_named_and_conversations_need_a_template(draw, tmp_path):
    publish_chat_model(tmp_path / "hf")
    assert "but the model has 257 tokens" in draw(prompt="<|im_end|>", tokenizer=tmp_path / "hf")[1]
    assert draw(tokenizer="bytes") == draw(), "its prompts follow a document, too"
    assert "none of Llama 3's tokens: put a chat_template.jinja" in draw("hello\n", chat=True)[1]


def test_temperature_0_is_greedy_and_a_cut_prompt_is_reported(draw):
    assert draw(temperature=1e-6) == draw(temperature=0) != draw(temperature=1)
    said = "the prompt is 81 tokens long: the model sees the last 32 of them\n"
    assert draw(prompt="def " * 20)[1] == said and not draw(prompt="d" * 31)[1]


def test_a_prompt_comes_from_a_pipe(draw):
    assert draw(prompt="-", stdin="the of\n") == draw(prompt="the of")


def test_a_conversation_drops_its_oldest_turns(sample, tmp_path, monkeypatch):
    publish_chat_model(tmp_path / "hf", max_position_embeddings=96, tie_word_embeddings=False, ascii_only=True)
    questions = [f"question {i}" for i in range(6)]
    settings = dict(stdin="\n".join(questions) + "\n", out_dir=tmp_path / "hf", chat=True, temperature=0, system="Hi")
    encode = template.encode_prompt
    asked = []
    monkeypatch.setattr(template, "encode_prompt", lambda *inputs: asked.append(inputs[1]) or encode(*inputs))
    out, said = sample(**settings, max_new_tokens=20)
    assert out.count("> ") >= 7 and out.endswith("> \n") and "the model sees" not in said
    seen = [message["content"] for message in asked[-1] if message["role"] == "user"]
    assert seen == questions[-len(seen) :] and 0 < len(seen) < 6
    assert [message["role"] for message in asked[-1]] == ["system"] + ["user", "assistant"] * len(seen)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(sample, tmp_path, monkeypatch):
    _, fast = publish_chat_model(tmp_path / "hf")

    def generate_ids(*_, **__):
        yield from ([token] for token in fast.encode("hi"))
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", generate_ids)
    assert sample("hello\nagain\n", out_dir=tmp_path / "hf", chat=True)[0] == "> hi\n> hi\n> \n"


def test_a_conversation_is_the_one_that_transformers_has(sample, tmp_path):
    hf, fast = publish_chat_model(tmp_path / "hf", tie_word_embeddings=False, ascii_only=True)
    settings = dict(out_dir=tmp_path / "hf", chat=True, system="Be kind.", temperature=0, max_new_tokens=20)
    out, said = sample("hello\n\nAnd <|im_end|>?\n/exit\nmore\n", **settings)

    def answer(ids):
        asked = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        return fast.decode(hf.generate(ids, **asked)[0, ids.shape[1] :], skip_special_tokens=True)

    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    options = dict(return_dict=True, return_tensors="pt", add_generation_prompt=True)
    first = answer(fast.apply_chat_template(messages, **options)["input_ids"])
    assert len(first) > 5 and said == "/exit or Ctrl-D ends the conversation\n"
    # A special token that the user types stays text; transformers would turn it into the token.
    begin = fast.encode("<|im_start|>")[0]
    end = fast.encode("<|im_end|>")[0]
    text = lambda words: fast.encode(words, add_special_tokens=False, split_special_tokens=True)  # noqa: E731
    turns = [("system", "Be kind."), ("user", "hello"), ("assistant", first), ("user", "And <|im_end|>?")]
    ids = [token for role, words in turns for token in [begin, *text(f"{role}\n{words}"), end, *text("\n")]]
    second = answer(torch.tensor([[*ids, begin, *text("assistant\n")]]))
    assert out == f"> {first}\n> > {second}\n> "


@pytest.mark.real
def test_smollm2_answers_and_is_judged_as_by_transformers(sample, tmp_path):
    fast, hf = smollm2(tmp_path / "hf", weights=True)
    messages = []
    settings = dict(out_dir=tmp_path / "hf", dtype="float32")
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        inputs = fast.apply_chat_template(messages, return_dict=True, return_tensors="pt", add_generation_prompt=True)
        ids = hf.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": fast.decode(ids, skip_special_tokens=True)})
    questions, answers = ([each["content"] for each in messages[i::2]] for i in (0, 1))
    out, _ = sample("\n".join(questions) + "\n", chat=True, temperature=0, max_new_tokens=12, **settings)
    assert out == "".join(f"> {answer}\n" for answer in answers) + "> \n" and "Paris" in out
    text = " ".join(questions + answers) * 5
    (tmp_path / "text.txt").write_text(text)
    ids = torch.tensor([fast(f"<|endoftext|>{text}", add_special_tokens=False).input_ids])
    with torch.no_grad():
        perplexity = hf(ids, labels=ids).loss.exp().item()
    found, _ = sample(evaluate=tmp_path / "text.txt", **settings)
    assert float(found.split()[1]) == pytest.approx(perplexity, rel=1e-4)
