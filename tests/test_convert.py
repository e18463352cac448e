"""Hugging Face's folders in and out: the same model on both sides, whole or sharded; slips get a sentence.

pytest test_convert.py        half a minute, without a GPU
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import convert
from model import Llama, LlamaConfig
from runtime import checkpoint, checkpoint_folder, generate, hf_config, memory_stats, run_folder
from runtime.checkpoint import load_model
from runtime.checkpoint_folder import open_folder
from runtime.hf_config import read_config
from runtime.hf_names import hf_names
from tests.runs import PLAIN, ROOT, SHORT, SMALL, machines_of, run, run_ranks, slip

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "tied": {"tie_embeddings": True, "rope_scaling": SCALING},
    "untied": {"tie_embeddings": False, "n_kv_head": 4, "rope_theta": 10000.0, "norm_eps": 1e-6},
}


def hugging_face(settings) -> transformers.LlamaForCausalLM:
    c = LlamaConfig(
        **{"vocab_size": 257} | {k: v for k, v in SMALL.items() if k in LlamaConfig.__dataclass_fields__} | settings
    )
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
            hidden_size=c.n_embd, intermediate_size=c.ffn_dim, vocab_size=c.vocab_size, rms_norm_eps=c.norm_eps,
            max_position_embeddings=c.block_size, tie_word_embeddings=c.tie_embeddings, rope_theta=c.rope_theta,
            rope_scaling=c.rope_scaling and {"rope_type": "llama3", **c.rope_scaling},
        )
    )  # fmt: skip


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    """Random weights as transformers saves them, in several files; and the settings of the model."""
    theirs, folder = hugging_face(MODELS[request.param]), tmp_path / "theirs"
    theirs.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder, MODELS[request.param] | {"vocab_size": 257}


def logits(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


def assert_same_model(path, folder):
    """A checkpoint of ours and a folder of theirs, read by transformers."""
    ours = checkpoint.load_model(path, "cpu", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = logits(theirs, tokens)
    assert expected.std() > 0.01 and (logits(ours, tokens) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_a_run_begins_with_their_weights(train, tmp_path, capsys, folder):
    folder, settings = folder
    train(**settings, init_from=folder, learning_rate=0, max_iters=1)
    assert f"begins    with the weights of {folder}" in capsys.readouterr().out
    assert_same_model(tmp_path / "out/step_000001", folder)
    train(**settings, init_from=folder, max_iters=2)
    out = capsys.readouterr().out
    assert "resumes " in out and "begins " not in out, "the same line goes on with the checkpoint"
    assert "not read" not in out
    train(**settings, init_from=folder.rename(folder.with_name("others")), max_iters=3)
    assert f"init_from {folder} -> {tmp_path / 'others'} (not read: the run has begun)" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"sharding": "zero3"}, {"offload": "all"}, {"sharding": "hybrid"}], ids=str)
def test_every_rank_takes_its_part_of_their_weights(text_data, tmp_path, changes):
    folder, settings = tmp_path / "theirs", MODELS["untied"] | {"vocab_size": 257}
    hugging_face(MODELS["untied"]).save_pretrained(folder)
    settings |= SMALL | SHORT | dict(dataset=text_data, out_dir=tmp_path / "out", init_from=folder, learning_rate=0)
    settings |= MODELS["untied"] | dict(max_iters=1, warmup_iters=0, gradient_accumulation_steps=2) | changes
    script = machines_of(tmp_path, 1) if "sharding" in changes else "train.py"
    done = run_ranks(2, settings, script)
    assert done.returncode == 0, done.stderr
    assert_same_model(tmp_path / "out/step_000001", folder)


@pytest.mark.parametrize("n_files", [1, 4])
def test_a_checkpoint_becomes_a_folder_that_transformers_reads(train, tmp_path, monkeypatch, capsys, n_files):
    train(**MODELS["tied"])
    monkeypatch.setattr(checkpoint_folder, "FILE_BYTES", 5e9 if n_files == 1 else 30_000)
    words = ["convert.py", str(tmp_path / "out"), str(tmp_path / "hf"), "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", words)
    convert.main()
    assert "step_000008 in float32: transformers.AutoModelForCausalLM" in capsys.readouterr().out
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == n_files
    assert_same_model(tmp_path / "out/step_000008", tmp_path / "hf")
    train(**MODELS["tied"], init_from=tmp_path / "hf", out_dir=tmp_path / "again", learning_rate=0, max_iters=1)
    before, after = (
        checkpoint.load_model(run_folder.newest(tmp_path / out), "cpu", torch.float32) for out in ("out", "again")
    )
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)), (
        "and back, to the bit"
    )
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="is there already: name a new folder"):
        convert.main()


PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 257, "norm_eps": 1e-5,
          "rope_theta": 500000.0, "ffn_dim_multiplier": 1.3, "multiple_of": 32}  # fmt: skip


def meta_weights(tied: bool) -> dict:
    """Random, by Meta's names."""
    torch.manual_seed(5)
    dim, kv, ffn = PARAMS["dim"], 8 * PARAMS["n_kv_heads"], 96
    block = {"attention_norm": (dim,), "ffn_norm": (dim,), "attention.wq": (dim, dim), "attention.wk": (kv, dim),
             "attention.wv": (kv, dim), "attention.wo": (dim, dim), "feed_forward.w1": (ffn, dim),
             "feed_forward.w2": (dim, ffn), "feed_forward.w3": (ffn, dim)}  # fmt: skip
    shapes = {f"layers.{i}.{name}": shape for i in range(PARAMS["n_layers"]) for name, shape in block.items()}
    shapes |= {"tok_embeddings": (257, dim), "norm": (dim,), "output": (257, dim)}
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    return weights | ({"output.weight": weights["tok_embeddings.weight"].clone()} if tied else {})


def meta_logits(weights: dict, tokens: torch.Tensor, factor: float | None) -> torch.Tensor:
    """The model as Meta's paper and code define it, with neighbours turned as complex numbers. tokens (B, T)."""

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]

    frequencies = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    if factor:  # wave lengths above 8,192 are stretched, below 2,048 they are not, and between it is a mixture
        smooth = ((8192 * frequencies / (2 * math.pi) - 1) / 3).clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / factor + smooth * frequencies
    time = tokens.shape[1]
    turns = torch.polar(torch.ones(time, 4), torch.outer(torch.arange(time), frequencies))

    def heads(x, name):
        return torch.nn.functional.linear(x, weights[f"{name}.weight"]).unflatten(-1, (-1, 8))

    def turned(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turns[:, None]).flatten(-2)

    x = weights["tok_embeddings.weight"][tokens]
    for i in range(PARAMS["n_layers"]):
        normed, at = norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention.w"
        q, k, v = turned(heads(normed, at + "q")), turned(heads(normed, at + "k")), heads(normed, at + "v")
        k, v = (y.repeat_interleave(2, dim=2) for y in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("bhts,bshd->bthd", scores, v).flatten(2) @ weights[at + "o.weight"].T
        normed, at = norm(x, f"layers.{i}.ffn_norm"), f"layers.{i}.feed_forward.w"
        gate, up = (normed @ weights[f"{at}{j}.weight"].T for j in (1, 3))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{at}2.weight"].T
    return norm(x, "norm") @ weights["output.weight"].T


@pytest.fixture
def meta_folder(tmp_path, monkeypatch):
    """meta_folder(weights, **params) writes what Meta publishes, and returns the folder."""
    monkeypatch.setattr(hf_config, "LLAMA3_VOCAB", 257)

    def write(weights, **params):
        (tmp_path / "Llama").mkdir()
        (tmp_path / "Llama/params.json").write_text(json.dumps(PARAMS | params))
        torch.save(weights, tmp_path / "Llama/consolidated.00.pth")
        return tmp_path / "Llama"

    return write


@pytest.mark.parametrize(
    "tied, scaled, factor", [(True, True, 32.0), (False, True, 8.0), (False, False, None), (True, None, None)]
)
def test_metas_own_files_become_a_folder_with_the_same_logits(meta_folder, tmp_path, monkeypatch, tied, scaled, factor):
    weights = meta_weights(tied)
    source = meta_folder(weights, **({} if scaled is None else {"use_scaled_rope": scaled}))
    words = ["convert.py", str(source), str(tmp_path / "hf"), "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", words)
    convert.main()
    settings, tokenizer = read_config(open_folder(tmp_path / "hf"))
    assert tokenizer == "llama3" and settings["tie_embeddings"] == tied and settings["ffn_dim"] == 96
    assert (settings["rope_scaling"] or {"factor": None})["factor"] == factor
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = meta_logits(weights, tokens, factor)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = load_model(tmp_path / "hf", block_size=24)
    for model in (theirs, ours):
        assert (logits(model, tokens) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert theirs.config.bos_token_id == 128000 and 128009 in theirs.config.eos_token_id


def test_a_run_begins_with_metas_own_weights(train, meta_folder, text_data, tmp_path, capsys):
    source, data = meta_folder(meta_weights(True)), tmp_path / "data"
    shutil.copytree(text_data, data)
    edit(data / "meta.json", tokenizer="llama3")
    settings = dict(dataset=data, vocab_size=257, ffn_dim=96, tie_embeddings=True, init_from=source)
    train(**settings, learning_rate=0, max_iters=1)
    assert f"begins    with the weights of {source}" in capsys.readouterr().out
    ours = checkpoint.load_model(tmp_path / "out/step_000001", "cpu", torch.float32)
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = meta_logits(meta_weights(True), tokens, None)
    assert (logits(ours, tokens) - expected).abs().max() < 2e-5 * expected.abs().max()


META_SLIPS = {
    "another vocabulary": (dict(vocab_size=-1), {}, "params.json says vocab_size -1: Llama 3's is 257"),
    "no RoPE": (dict(rope_theta=None), {}, "params.json: rope_theta expects a float, got None"),
    "no heads": (dict(n_heads=0), {}, "params.json: n_layer, n_head"),
    "more layers": (dict(n_layers=3), {}, "consolidated.00.pth lacks layers.2.attention_norm.weight"),
    "fewer layers": (dict(n_layers=1), {}, "has 9 weights that Llama 3 has not: layers.1.attention.wk.weight, ..."),
    "other heads": (dict(n_heads=2), {}, "self_attn.k_proj.weight of shape (32, 32): "),
    "odd rows": (
        {},
        {"layers.1.attention.wk.weight": (12, 32)},
        "model.layers.1.self_attn.k_proj.weight of shape (16, 32): ",
    ),
    "a vision model": ({}, {"vision_model.x": (1,)}, "1 weights that Llama 3 has not: vision_model.x, ..."),
}


@pytest.mark.parametrize("kind", META_SLIPS)
def test_what_of_metas_cannot_be_read_gets_a_sentence(meta_folder, tmp_path, monkeypatch, kind):
    params, shapes, expected = META_SLIPS[kind]
    source = meta_folder(meta_weights(False) | {name: torch.zeros(shape) for name, shape in shapes.items()}, **params)
    monkeypatch.setattr(sys, "argv", ["convert.py", str(source), str(tmp_path / "hf")])
    with pytest.raises(SystemExit, match=re.escape(expected)):
        convert.main()
    assert not list(tmp_path.glob("hf*"))


def test_damaged_or_divided_files_of_metas_get_a_sentence(meta_folder, tmp_path, monkeypatch):
    source = meta_folder(meta_weights(True))
    monkeypatch.setattr(sys, "argv", ["convert.py", str(source), str(tmp_path / "hf")])
    file = source / "consolidated.00.pth"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SystemExit, match="consolidated.00.pth cannot be read: "):
        convert.main()
    file.write_bytes(b"")
    with pytest.raises(SystemExit, match="cannot be read: no file of torch.save's zip format, or a damaged one"):
        convert.main()
    torch.save([torch.zeros(2)], file)
    with pytest.raises(SystemExit, match="consolidated.00.pth does not hold tensors by name"):
        convert.main()
    (source / "consolidated.01.pth").touch()
    with pytest.raises(SystemExit, match="holds a model in 2 parts"):
        convert.main()
    for path in source.glob("*.pth"):
        path.unlink()
    with pytest.raises(SystemExit, match="consolidated.00.pth"):
        convert.main()


def test_text_is_drawn_from_a_folder_as_from_the_checkpoint_that_it_was(train, sample, tmp_path):
    train(**MODELS["untied"])
    shutil.copytree(tmp_path / "out/step_000008", tmp_path / "hf")
    text, said = sample(out_dir=tmp_path / "hf")
    assert text.startswith("def ") and not said and text == sample()[0]
    (tmp_path / "hf/run.json").unlink()  # as others publish it
    assert text == sample(out_dir=tmp_path / "hf")[0]
    edit(tmp_path / "hf/config.json", nanocria_tokenizer=None)
    assert sample(out_dir=tmp_path / "hf")[0].startswith("def ")  # by its tokenizer.json
    (tmp_path / "hf/tokenizer.json").unlink()
    assert "does not say its tokenizer" in sample(out_dir=tmp_path / "hf")[1]


def test_text_ends_with_its_document_and_is_drawn_as_asked(train, sample, monkeypatch):
    train()
    asked = []

    def generate_ids(model, prompts, n, temperature, top_k, top_p, min_p, eos, generator):
        asked.append((len(prompts), n, temperature, top_k, top_p, min_p, list(eos)))
        yield from ([token] * len(prompts) for token in (*b"hi", None))

    monkeypatch.setattr(generate, "generate", generate_ids)
    asked_for = dict(num_samples=2, top_k=3, top_p=0.5, min_p=0.1, temperature=0.7)
    assert sample(**asked_for)[0] == 2 * ("def hi\n" + "-" * 80 + "\n")
    assert asked == [(2, 12, 0.7, 3, 0.5, 0.1, [256])]


def test_the_lowest_temperatures_take_the_likeliest_and_what_is_cut_or_wrong_is_said(train, sample, tmp_path):
    train()
    assert sample(temperature=1e-45) == sample(temperature=0) != sample(temperature=1)
    said = "the prompt is 81 tokens long: the model sees the last 32 of them\n"
    assert sample(prompt="def " * 20)[1] == said and not sample(prompt="d" * 31)[1]
    assert sample(seed=-(10**20)) == ("", f"seed is {-(10**20)}: it must be at least 0 and below 2**63")
    assert "holds no checkpoint: train one first" in sample(out_dir=tmp_path / "nowhere")[1]


@pytest.mark.parametrize("supported, expected", [(True, "cuda:0 torch.bfloat16"), (False, "cuda:0 torch.float16")])
def test_bfloat16_is_for_gpus_that_compute_it(train, sample, monkeypatch, supported, expected):
    def load_model(path, device, dtype):
        raise ValueError(f"{device} {dtype}")

    train()
    monkeypatch.setattr(checkpoint, "load_model", load_model)
    monkeypatch.setattr(memory_stats, "let_segments_grow", lambda: None)
    for name, answer in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported or including_emulation
    )
    assert sample(device="auto")[1] == expected


def test_a_checkpoint_that_the_run_deletes_meanwhile_gives_way_to_the_newest(
    train, sample, tmp_path, monkeypatch, capsys
):
    train()
    true_load_model = checkpoint._load_model

    def load_model(path, *args):
        if steps:  # the run has saved another, and deleted this one
            path.rename(path.with_name(f"step_{steps.pop(0):06d}"))
        return true_load_model(path, *args)

    monkeypatch.setattr(checkpoint, "_load_model", load_model)
    steps = [12]
    text, said = sample()
    assert text.startswith("def ") and not said
    steps = [16]
    monkeypatch.setattr(sys, "argv", ["convert.py", str(tmp_path / "out"), str(tmp_path / "hf")])
    convert.main()
    assert f"{tmp_path}/out/step_000016 in bfloat16" in capsys.readouterr().out
    steps = list(range(20, 100))
    assert "deletes its checkpoints before they can be read" in sample()[1]


def test_a_folder_read_for_sampling_has_their_logits(folder):
    folder, _ = folder
    model = load_model(folder, block_size=24)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = logits(theirs, tokens)
    assert (logits(model, tokens) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert not any(p.is_meta for p in model.parameters()) and model.config.block_size == 24
    longest = load_model(folder, block_size=10**11)
    assert longest.config.block_size == SMALL["block_size"], "no keys and values beyond the context of theirs"


def test_what_is_written_is_rounded_once_to_the_dtype_asked_for(train, tmp_path):
    train()
    convert.convert(tmp_path / "out/step_000008", tmp_path / "hf", "bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    ours = checkpoint.load_model(tmp_path / "out/step_000008", "cpu", torch.bfloat16)
    assert theirs.dtype == torch.bfloat16 and theirs.config.eos_token_id == theirs.config.bos_token_id == 256
    assert torch.equal(theirs.model.embed_tokens.weight, ours.tok_embeddings.weight)


def edit(path, **changes):
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_weights(folder, name, change, source=None):
    """Another tensor under a name: what change makes of the tensor there, or of that of another name."""
    tensors = safetensors.load_file(folder / "model.safetensors")
    changed = tensors | {name: change(tensors[source or name]).clone()}
    safetensors.save_file(changed, folder / "model.safetensors")


EMBEDDING, Q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
SLIPS = {
    "quantized": (
        lambda folder: edit(folder / "config.json", quantization_config={"quant_method": "fp8"}),
        "config.json describes quantized weights",
    ),
    "quantized, and not said": (
        lambda folder: change_weights(folder, Q, lambda q: q.to(torch.float8_e4m3fn)),
        "q_proj.weight in torch.float8_e4m3fn: expected bfloat16",
    ),
    "not a number": (
        lambda folder: change_weights(folder, Q, lambda q: q / (q != q[0, 0])),
        "has numbers in model.layers.0.self_attn.q_proj.weight that are not finite",
    ),
    "a bias that the config does not say": (
        lambda folder: change_weights(folder, "model.layers.0.self_attn.q_proj.bias", lambda q: q[:, 0], Q),
        "has 1 tensors that the model has no place for: model.layers.0.self_attn.q_proj.bias",
    ),
    "a head of its own": (
        lambda folder: change_weights(folder, "lm_head.weight", lambda embedding: 2 * embedding, EMBEDDING),
        "has an lm_head.weight of its own, but config.json says tie_word_embeddings",
    ),
    "another size": (
        lambda folder: edit(folder / "config.json", num_hidden_layers=3),
        "has n_layer 3 (this run: 2): pass --n_layer=3, or change init_from",
    ),
    "another model": (lambda folder: edit(folder / "config.json", model_type="qwen3"), "a qwen3 model, not a Llama"),
    "biases": (
        lambda folder: edit(folder / "config.json", attention_bias=True),
        "has attention_bias, so biases",
    ),
    "another RoPE": (
        lambda folder: edit(folder / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "RoPE of the type yarn",
    ),
    "another RoPE, as old files say it": (
        lambda folder: edit(
            folder / "config.json", rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}
        ),
        "RoPE of the type linear",
    ),
    "half a RoPE": (
        lambda folder: edit(
            folder / "config.json", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
        ),
        "config.json: rope_scaling has ['factor'], expected",
    ),
    "RoPE as a word": (
        lambda folder: edit(folder / "config.json", rope_parameters="llama3"),
        "config.json: rope_parameters expects a dict or none, got 'llama3'",
    ),
    "another activation": (lambda folder: edit(folder / "config.json", hidden_act="gelu"), "has the activation gelu"),
    "a number in quotes": (
        lambda folder: edit(folder / "config.json", num_attention_heads="4"),
        "config.json: num_attention_heads expects an int, got '4'",
    ),
    "a word": (
        lambda folder: edit(folder / "config.json", num_hidden_layers="x"),
        "config.json: num_hidden_layers expects an int, got 'x'",
    ),
    "no heads": (lambda folder: edit(folder / "config.json", num_attention_heads=0), "config.json: n_layer, n_head, "),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds JSON of type list"),
    "another tokenizer": (
        lambda folder: edit(folder / "config.json", nanocria_tokenizer="gpt2"),
        "was trained on gpt2 tokens",
    ),
    "no weights": (lambda folder: os.remove(folder / "model.safetensors"), "model.safetensors is missing"),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "holds pickled weights, which are not read: save them with transformers as .safetensors",
    ),
    "GGUF": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        "holds GGUF files, which are not read",
    ),
    "an adapter": (
        lambda folder: (folder / "model.safetensors").rename(folder / "adapter_model.safetensors"),
        "holds an adapter alone: merge it",
    ),
    "a git-lfs pointer": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        "is a git-lfs pointer, not the file: fetch it with git lfs pull",
    ),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000]),
        "model.safetensors has 5000 bytes, and its header describes ",
    ),
    "a narrow weight": (
        lambda folder: change_weights(folder, "model.layers.0.self_attn.k_proj.weight", lambda k: k[:, :24]),
        "expected model.layers.0.self_attn.k_proj.weight of shape (16, 32): ",
    ),
    "an index of nothing": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json has no weight_map",
    ),
    "an index cut short": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {'),
        "model.safetensors.index.json is not JSON",
    ),
    "no folder": (
        lambda folder: os.remove(folder / "config.json"),
        "has no config.json: init_from is auto, scratch, resume, or a folder",
    ),
}


@pytest.mark.parametrize(
    "file, said",
    [("adapter_model.safetensors", "an adapter alone: "), ("a.gguf", "GGUF files, "), ("pytorch_model.bin", "pickled")],
)
def test_a_folder_of_other_weights_without_config_json_gets_a_sentence(train, tmp_path, capsys, file, said):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / file).write_bytes(b"")
    assert f"theirs holds {said}" in slip(train, capsys, init_from=tmp_path / "theirs")
    with pytest.raises(ValueError, match=f"theirs holds {said}"):
        load_model(tmp_path / "theirs")


def test_a_missing_shard_of_published_weights_is_named(tmp_path):
    hugging_face(MODELS["tied"]).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    shard = min((tmp_path / "theirs").glob("model-*-of-*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=f"^{shard} is missing$"):
        load_model(tmp_path / "theirs")


@pytest.mark.parametrize("kind", SLIPS)
def test_what_cannot_be_read_gets_a_sentence(train, tmp_path, capsys, kind):
    hugging_face(MODELS["tied"]).save_pretrained(tmp_path / "theirs")
    change, expected = SLIPS[kind]
    change(tmp_path / "theirs")
    assert expected in slip(train, capsys, **MODELS["tied"], vocab_size=257, init_from=tmp_path / "theirs")


def test_a_head_that_is_the_embedding_and_what_old_versions_wrote_are_passed_over(tmp_path):
    theirs = hugging_face(MODELS["tied"])
    theirs.save_pretrained(tmp_path / "theirs")
    change_weights(tmp_path / "theirs", "lm_head.weight", lambda embedding: embedding, EMBEDDING)
    change_weights(tmp_path / "theirs", "model.layers.0.self_attn.rotary_emb.inv_freq", lambda q: q[0], Q)
    read = load_model(tmp_path / "theirs", block_size=8)
    assert torch.equal(read.tok_embeddings.weight, theirs.model.embed_tokens.weight)


def test_a_folder_that_does_not_say_its_tokenizer_is_said(train, tmp_path, capsys):
    hugging_face(MODELS["tied"]).save_pretrained(tmp_path / "theirs")
    said = "does not say its tokenizer, which must be the data's: bytes, 257 tokens"
    train(**MODELS["tied"], init_from=tmp_path / "theirs", vocab_size=257)
    assert f"{said}\n" in capsys.readouterr().out
    edit(tmp_path / "theirs/config.json", vocab_size=300)
    message = slip(train, capsys, **MODELS["tied"], init_from=tmp_path / "theirs", out_dir=tmp_path / "other")
    assert f"{said}. If so, pass --vocab_size=300; else prepare" in message


def test_a_model_that_hugging_face_does_not_know_is_said():
    with pytest.raises(ValueError, match="layers.0.attn.q_norm.weight has no name in Hugging Face's Llama: add it"):
        hf_names("layers.0.attn.q_norm.weight")


def test_another_shape_than_the_config_says_is_refused(train, tmp_path, capsys):
    hugging_face(MODELS["tied"]).save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs/config.json", intermediate_size=96)
    message = slip(train, capsys, **MODELS["tied"], vocab_size=257, ffn_dim=96, init_from=tmp_path / "theirs")
    assert "gate_proj.weight of shape (96, 32): " in message and "in shape (64, 32)" in message, message


def test_published_configs_are_read(tmp_path):
    """As meta-llama/Llama-3.2-1B and an old transformers write them."""
    rope = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    sizes = {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048}
    sizes |= {"intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "head_dim": 64, **sizes, **rope}))
    config = json.loads((tmp_path / "config.json").read_text())
    settings, tokenizer = read_config(SimpleNamespace(path=tmp_path, config=config))
    assert tokenizer == "llama3" and settings["rope_scaling"] == SCALING and settings["rope_theta"] == 500000.0
    assert list(settings["rope_scaling"]) == sorted(SCALING)  # a sentence that suggests it is always the same
    assert LlamaConfig(**settings, block_size=8).head_dim == 64


def test_every_weight_of_ours_has_its_names():
    with torch.device("meta"):
        model = Llama(LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64, vocab_size=9, block_size=8))
    names = [name for ours in dict(model.named_parameters()) for name in hf_names(ours)]
    assert len(set(names)) == len(names) == 3 + 2 * 9


def test_the_command_line(train, tmp_path):
    train()
    done = run([tmp_path / "out", tmp_path / "hf"], "convert.py")
    assert done.returncode == 0 and (tmp_path / "hf/config.json").exists(), done.stderr
    done = run([tmp_path / "nowhere", tmp_path / "another"], "convert.py")
    assert done.returncode == 1 and done.stderr.startswith(f"{tmp_path}/nowhere holds no checkpoint"), done.stderr
    done = run([tmp_path / "hf", tmp_path / "another", "--dtype=float16"], "convert.py")
    assert done.returncode == 0, done.stderr
    ours, theirs = load_model(tmp_path / "out"), load_model(tmp_path / "another")
    assert torch.equal(theirs.norm.weight, ours.norm.weight.bfloat16().half().float())


def test_a_full_disk_gets_a_sentence_and_leaves_nothing(train, tmp_path):
    train()
    script = (
        "import resource, runpy, sys; sys.argv[0] = 'convert.py'; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); runpy.run_path('convert.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out"), str(tmp_path / "hf")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | PLAIN)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "hf is not written: File too large: " in done.stderr and "model.safetensors" in done.stderr, done.stderr
    assert not list(tmp_path.glob("hf*"))


def test_a_folder_that_cannot_be_written_is_found_before_the_weights_are_read(train, tmp_path, monkeypatch):
    train()
    monkeypatch.setattr(convert, "load_model", lambda *_: pytest.fail("the weights were read"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["convert.py", str(tmp_path / "out"), str(tmp_path / "file/hf")])
    with pytest.raises(SystemExit, match=f"{tmp_path}/file/hf is not written: Not a directory"):
        convert.main()


def test_a_run_keeps_what_the_folder_that_it_began_with_says(train, tmp_path, capsys):
    """Tokenizer files, special tokens, context: in a checkpoint, after a resume, in a run that begins with that."""
    folder = tmp_path / "theirs"
    hugging_face(MODELS["tied"]).save_pretrained(folder)
    edit(folder / "config.json", bos_token_id=3, eos_token_id=[4, 5], max_position_embeddings=1000)
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text(f'{{"{name}": 1}}')
    train(**MODELS["tied"], init_from=folder, max_iters=1)
    train(**MODELS["tied"], max_iters=2)
    before = load_model(tmp_path / "out")
    settings = MODELS["tied"] | dict(learning_rate=0, max_iters=1, out_dir=tmp_path / "again")
    train(**settings, init_from=tmp_path / "out")
    assert f"begins    with the weights of {tmp_path}/out/step_000002" in capsys.readouterr().out
    for path in (tmp_path / "out/step_000002", tmp_path / "again/step_000001"):
        config = json.loads((path / "config.json").read_text())
        assert config["bos_token_id"] == 3 and config["eos_token_id"] == [4, 5]
        assert config["max_position_embeddings"] == 1000
        for name in ("tokenizer.json", "generation_config.json"):
            assert (path / name).read_text() == (folder / name).read_text()
    after = load_model(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_the_context_is_never_below_that_which_rope_is_scaled_from(train, tmp_path):
    train(rope_scaling=SCALING | {"original_max_position_embeddings": 64}, max_iters=1)
    config = json.loads((tmp_path / "out/step_000001/config.json").read_text())
    assert config["max_position_embeddings"] == 64 > SMALL["block_size"]


def test_weights_of_another_shape_are_refused_before_the_model_is_built(train, tmp_path, capsys, monkeypatch):
    hugging_face(MODELS["tied"]).save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(Llama, "__init__", lambda *_: pytest.fail("the model was built"))
    message = slip(train, capsys, **MODELS["tied"] | {"n_layer": 3}, vocab_size=257, init_from=tmp_path / "theirs")
    assert "has n_layer 2 (this run: 3): pass --n_layer=2, or change init_from" in message
