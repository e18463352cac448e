"""Hugging Face's folders in and out: the same model on both sides, whole or sharded; user errors get one line."""

import itertools
import json
import math
import re
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import convert
import model as model_module
from data.chat import prepare as chat
from data.tokenizer import tokenizer_of
from model import LlamaConfig
from runtime import hf
from runtime.checkpoint import load_model, open_folder, read_run
from runtime.hf import read_config
from tests.datasets import LFS_POINTER
from tests.published import CHATML, assert_same_model, edit_config, hf_llama, publish_chat_model
from tests.runs import FULL_DISK, SHORT, SMALL, error_of, machines_of, run, wrapped

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
TIED = {"tie_embeddings": True, "rope_scaling": SCALING, "vocab_size": 257}
UNTIED = {"tie_embeddings": False, "n_kv_head": 4, "rope_theta": 10000.0, "norm_eps": 1e-6, "vocab_size": 257}


def publish(folder, settings, **options):
    """Random weights of a model with these settings, as transformers saves them; returns its model."""
    shape = {name: value for name, value in SMALL.items() if name in LlamaConfig.__dataclass_fields__}
    torch.manual_seed(3)
    theirs = hf_llama(LlamaConfig(**shape | settings))
    theirs.save_pretrained(folder, **options)
    return theirs


@pytest.fixture
def theirs(tmp_path):
    """The folder of a published tied model."""
    publish(tmp_path / "theirs", TIED)
    return tmp_path / "theirs"


def assert_equal_weights(path, other):
    pairs = zip(load_model(path).parameters(), load_model(other).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("settings", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_run_begins_with_their_weights_in_several_files(train, tmp_path, capsys, settings):
    folder = tmp_path / "theirs"
    publish(folder, settings | {"block_size": 24}, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_same_model(folder, folder)
    train(**settings, init_from=folder, learning_rate=0, max_iters=1)
    printed = capsys.readouterr().out
    assert f"begins    with the weights of {folder}" in printed and "trained on 24 tokens at a time" in printed
    assert_same_model(tmp_path / "out/step_000001", folder)


@pytest.mark.parametrize("changes", [{"offload": "all"}, {"sharding": "hybrid"}], ids=str)
def test_every_rank_takes_its_part_of_their_weights(train_on_ranks, tmp_path, changes):
    folder = tmp_path / "theirs"
    publish(folder, UNTIED)
    script = machines_of(tmp_path, 1) if "sharding" in changes else "train.py"
    train_on_ranks(2, script, **UNTIED, **changes, init_from=folder, learning_rate=0, max_iters=1, warmup_iters=0)
    assert_same_model(tmp_path / "out/step_000001", folder)


@pytest.mark.usefixtures("published_model")
def test_a_checkpoint_becomes_a_folder_that_transformers_reads(train, tmp_path, convert_to_hf):
    train(**TIED)
    folder = convert_to_hf(tmp_path / "out", "--dtype", "float32")
    assert_same_model(tmp_path / "out/step_000008", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out/step_000008" / name).read_bytes()
    assert read_run(folder)["dataset"] == read_run(tmp_path / "out/step_000008")["dataset"]  # sample.py's bos
    train(**TIED, init_from=folder, out_dir=tmp_path / "again", learning_rate=0, max_iters=1)
    assert_equal_weights(tmp_path / "out", tmp_path / "again")
    with pytest.raises(SystemExit, match="already exists: name a new folder"):
        convert_to_hf(tmp_path / "out")


PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 257, "norm_eps": 1e-5,
          "rope_theta": 500000.0, "ffn_dim_multiplier": 1.3, "multiple_of": 32}  # fmt: skip
NAMES_IN_LAYER = {  # Hugging Face's -> Meta's
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    **{f"self_attn.{letter}_proj": f"attention.w{letter}" for letter in "qkvo"},
}  # fmt: skip


def meta_weights(theirs) -> dict:
    """The weights of transformers' model under Meta's names."""
    weights = {
        "tok_embeddings.weight": theirs.model.embed_tokens.weight,
        "norm.weight": theirs.model.norm.weight,
        "output.weight": theirs.lm_head.weight,
    }
    for i, layer in enumerate(theirs.model.layers):
        for name, meta_name in NAMES_IN_LAYER.items():
            weights[f"layers.{i}.{meta_name}.weight"] = layer.get_submodule(name).weight
    return {name: weight.detach().clone() for name, weight in weights.items()}


def rotate_pairs(q, k, cos, sin):
    """RoPE as Meta's code has it: two numbers side by side are one complex number. q, k (B, H, T, D)."""
    turns = torch.complex(cos, sin)[:, None, :, : q.shape[-1] // 2]
    return [torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2) for x in (q, k)]


@pytest.fixture
def meta_folder(tmp_path, monkeypatch):
    """meta_folder(tied, factor, zeros, **params) writes a folder as Meta publishes it: zeros has shapes of weights that
    are zeros, params is put into its json. Returns it and transformers' model of these weights, which computes what
    Meta's does if it rotates pairs.
    """
    for module in (convert, hf):
        monkeypatch.setattr(module, "LLAMA3_VOCAB", 257)

    def write(tied, factor=None, zeros=None, **params):
        scaling = factor and SCALING | {"factor": factor, "original_max_position_embeddings": 8192}
        theirs = hf_llama(LlamaConfig(
            n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=96, vocab_size=257, block_size=131072, norm_eps=1e-5,
            rope_theta=500000.0, rope_scaling=scaling, tie_embeddings=tied,
        ))  # fmt: skip
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        weights = meta_weights(theirs) | {name: torch.zeros(shape) for name, shape in (zeros or {}).items()}
        folder = tmp_path / "Llama"
        folder.mkdir()
        (folder / "params.json").write_text(json.dumps(PARAMS | params))
        torch.save(weights, folder / "consolidated.00.pth")
        return folder, theirs

    return write


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize(
    "tied, scaled, factor", [(True, True, 32.0), (False, True, 8.0), (False, False, None), (True, None, None)]
)
def test_metas_own_files_become_a_folder_with_the_same_logits(
    meta_folder, convert_to_hf, monkeypatch, tied, scaled, factor
):
    source, theirs = meta_folder(tied, factor, **({} if scaled is None else {"use_scaled_rope": scaled}))
    folder = convert_to_hf(source, "--dtype", "float32")
    config, tokenizer = read_config(open_folder(folder))
    assert tokenizer == "llama3" and config.tie_embeddings == tied and config.ffn_dim == 96
    assert (config.rope_scaling or {"factor": None})["factor"] == factor
    assert not factor or list(config.rope_scaling) == sorted(SCALING)  # a message that suggests it stays the same
    assert_same_model(folder, folder)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", rotate_pairs)
    assert_same_model(folder, theirs)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.bos_token_id == 128000 and 128009 in config.eos_token_id
    with pytest.raises(ValueError, match=f"holds Meta's own files: python convert.py {source} NEW"):
        load_model(source)


META_ERRORS = {  # message: changes of params.json, and tensors of other shapes
    "has vocab_size -1: Llama 3's is 257": (dict(vocab_size=-1), {}),
    "expected model.layers.2.input_layernorm.weight of shape (32,): ": (dict(n_layers=3), {}),
    "expected model.layers.1.input_layernorm.weight of shape none: ": (dict(n_layers=1), {}),
    "layers.1.self_attn.k_proj.weight of shape (16, 32): ": ({}, {"layers.1.attention.wk.weight": (12, 32)}),
}


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("sentence", META_ERRORS)
def test_metas_files_of_another_model_are_refused(meta_folder, convert_to_hf, tmp_path, sentence):
    params, shapes = META_ERRORS[sentence]
    source, _ = meta_folder(False, zeros=shapes, **params)
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        convert_to_hf(source)
    assert not list(tmp_path.glob("hf*"))


def test_damaged_or_sharded_meta_files_get_a_message(meta_folder, convert_to_hf):
    source, _ = meta_folder(True)
    file = source / "consolidated.00.pth"
    whole = file.read_bytes()
    for damage, sentence in (
        (lambda: file.write_bytes(whole[:-100]), "consolidated.00.pth is damaged, or not "),
        (lambda: torch.save([torch.zeros(3)], file), "consolidated.00.pth is damaged, or not "),
        (lambda: torch.save({"model": {}}, file), "consolidated.00.pth has no tok_embeddings.weight"),
        ((source / "consolidated.01.pth").touch, "holds a model in several parts"),
    ):
        damage()
        with pytest.raises(SystemExit, match=sentence):
            convert_to_hf(source)


@pytest.mark.usefixtures("published_model")
def test_convert_rounds_once_to_the_requested_dtype(alone, convert_to_hf):
    folder = convert_to_hf(alone)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ours = load_model(alone, "cpu", torch.bfloat16)
    assert theirs.dtype == torch.bfloat16 and theirs.config.eos_token_id == theirs.config.bos_token_id == 256
    assert torch.equal(theirs.model.embed_tokens.weight, ours.tok_embeddings.weight)
    shutil.move(folder, folder.with_name("theirs"))
    again = convert_to_hf(folder.with_name("theirs"), "--dtype=float16")
    assert json.loads((again / "config.json").read_text())["torch_dtype"] == "float16"
    assert torch.equal(load_model(again).norm.weight, ours.norm.weight.half().float())


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be read

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


def says(**changes):
    return lambda folder: edit_config(folder, **changes)


def holds(name, change, source=None):
    """Replace the tensor `name` by change(it), or by change(the tensor `source`)."""

    def change_tensor(folder):
        tensors = load_file(folder / "model.safetensors")
        changed = tensors | {name: change(tensors[source or name]).clone()}
        save_file(changed, folder / "model.safetensors")

    return change_tensor


def test_the_frequencies_of_rope_in_older_files_are_left_out(theirs):
    holds("model.layers.0.self_attn.rotary_emb.inv_freq", lambda q: 0 * q[0], Q)(theirs)
    assert_same_model(theirs, theirs)


def test_a_tied_head_is_read_beside_its_embedding_or_in_its_place_if_it_is_the_same(theirs):
    expected = load_model(theirs).tok_embeddings.weight
    holds(HEAD, lambda embedding: embedding, EMBEDDING)(theirs)
    assert torch.equal(load_model(theirs).tok_embeddings.weight, expected)
    tensors = load_file(theirs / WEIGHTS)
    del tensors[EMBEDDING]
    save_file(tensors, theirs / WEIGHTS)
    assert torch.equal(load_model(theirs).tok_embeddings.weight, expected)
    save_file(tensors | {EMBEDDING: tensors[HEAD] + 1}, theirs / WEIGHTS)
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        load_model(theirs)


WEIGHTS = "model.safetensors"
REFUSED = {  # message: what was done to the folder; tests/test_checkpoint.py has damaged files
    "does not have: model.layers.0.self_attn.q_proj.bias": holds(Q.replace("weight", "bias"), lambda q: q[:, 0], Q),
    f"expected {K} of shape (16, 32): ": holds(K, lambda k: k[:, :24]),
    "has an adapter_config.json beside its weights": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "has model_type qwen3: ": says(model_type="qwen3"),
    "has quantization_config": says(quantization_config={"quant_method": "fp8"}),
    "has head_dim 32": says(head_dim=32),
    "has attention_bias": says(attention_bias=True),
    "has hidden_act gelu": says(hidden_act="gelu"),
    "partial_rotary_factor": says(partial_rotary_factor=0.5),
    "has RoPE of type linear": says(rope_scaling={"type": "linear", "factor": 2.0}),
    "has RoPE of type yarn": says(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    "rope_scaling has ['factor'": says(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                                                         "original_max_position_embeddings": 16}),
    "num_attention_heads expects an int, got '4'": says(num_attention_heads="4"),
    "in F8_E4M3: expected one of BF16": holds(Q, lambda q: q.to(torch.float8_e4m3fn)),
    "model.safetensors is missing: only whole models in .safetensors are read": lambda folder: (
        folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
    "config.json is missing: copy or fetch the whole folder": lambda folder: (folder / "config.json").unlink(),
    "has rows for 200, but the data's tokenizer is bytes, 257 tokens: prepare": says(vocab_size=200),
    "was trained on gpt2 tokens": says(nanocria_tokenizer="gpt2", vocab_size=300),
    "model.safetensors is a git-lfs pointer": lambda folder: (folder / WEIGHTS).write_bytes(LFS_POINTER),
    "holds no weights: expected a run with": lambda folder: [file.unlink() for file in folder.iterdir()],
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_not_read_as_it_stands_is_refused(train, capsys, theirs, sentence):
    REFUSED[sentence](theirs)
    assert sentence in error_of(train, capsys, **TIED, init_from=theirs)


@pytest.mark.parametrize("field, value, name", [
    ("num_hidden_layers", 10**9, "model.layers.999999999.input_layernorm.weight"),
    ("intermediate_size", 10**24, "model.layers.1.mlp.gate_proj.weight"),
    ("vocab_size", 2**40, EMBEDDING),
])  # fmt: skip
def test_no_model_is_built_of_sizes_that_the_weights_do_not_have(field, value, name, theirs, train, capsys):
    edit_config(theirs, **{field: value})
    with pytest.raises(ValueError, match=f"expected {name} of shape"):
        load_model(theirs)
    ours = next(ours for ours, its in hf.SETTINGS.items() if its == field)
    assert name in error_of(train, capsys, **TIED | {ours: value}, init_from=theirs)


VALUES = [None, "x", True, -1, 10**24, math.nan, [], [None], {}, {"content": 3}]
FIELDS = {  # of each file
    "config.json": [
        *hf.SETTINGS.values(), "model_type", "hidden_act", "head_dim", "rope_theta", "rope_scaling",
        "rope_parameters", "attention_bias", "bos_token_id", "eos_token_id", "pad_token_id", "nanocria_tokenizer",
    ],
    "tokenizer_config.json": [
        "bos_token", "eos_token", "pad_token", "add_bos_token", "chat_template", "added_tokens_decoder",
        "extra_special_tokens",
    ],
    "special_tokens_map.json": ["eos_token", "bos_token", "additional_special_tokens"],
    "generation_config.json": ["eos_token_id"],
    "tokenizer.json": ["added_tokens", "model", "pre_tokenizer", "post_processor"],
    "model.safetensors.index.json": ["weight_map"],
}  # fmt: skip


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("file", FIELDS)
def test_no_value_of_a_foreign_file_ends_in_a_traceback(file, tmp_path):
    publish_chat_model(tmp_path / "hf")
    path = tmp_path / "hf" / file
    content = json.loads(path.read_text()) if path.exists() else {}
    if "index" in file:
        (tmp_path / "hf" / WEIGHTS).rename(tmp_path / "hf/model-00001-of-00001.safetensors")
    for field, value in itertools.product([None, *FIELDS[file]], VALUES):
        path.write_text(json.dumps(value if field is None else content | {field: value}))
        for read in (tokenizer_of, lambda folder: convert.convert(folder, tmp_path / "out", "float32")):
            try:
                read(tmp_path / "hf")
            except (OSError, ValueError) as error:  # which every script prints
                assert 20 < len(str(error)) < 600, error
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_a_config_without_a_model_takes_that_of_the_folder_and_resumes_it(train, tmp_path, capsys, theirs):
    """Flags are still compared with the folder, which defines the model if a checkpoint is damaged."""
    model = {name: SMALL[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim")} | TIED
    others = SMALL | SHORT | {"eval_interval": 1}
    settings = [f"{name} = {value!r}\n" for name, value in others.items() if name not in model]
    sft = tmp_path / "sft.py"
    sft.write_text("".join(settings))
    found = train(str(sft), init_from=theirs, max_iters=2)
    assert vars(found["model"].config) == {**vars(found["model"].config), **model}
    assert {name: found["settings"][name] for name in model} == model | {"vocab_size": None}
    (tmp_path / "out/step_000002/config.json").write_text("{")
    train(str(sft), init_from=theirs, max_iters=3)
    said = capsys.readouterr().out
    assert "step_000002 is damaged" in said and f"resumes   {tmp_path / 'out/step_000001'} " in said, said
    message = error_of(train, capsys, str(sft), n_head=8, init_from=theirs, out_dir=tmp_path / "other")
    assert "has n_head 4 (this run: 8): pass --n_head=4" in message
    again = train(str(sft), max_iters=4)  # without the folder
    assert vars(again["model"].config) == vars(found["model"].config)


# ----------------------------------------------------------------------------------------------------------------------
# What is read otherwise than it stands


def test_a_whole_file_is_read_instead_of_an_index_as_in_transformers(theirs):
    """Shards of other weights, and their index, lie beside a whole model: it was merged after a finetune, say."""
    tensors = {name: x + 1 for name, x in load_file(theirs / WEIGHTS).items()}
    file = "model-00001-of-00001.safetensors"
    save_file(tensors, theirs / file, {"format": "pt"})
    (theirs / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, file)})
    )
    assert_same_model(theirs, theirs)


def test_there_is_one_chat_template_and_it_is_the_trained_one(tmp_path, train, convert_to_hf):
    """Also for adapters, and if the weights that they began with have several templates."""
    vocab = pytest.importorskip("gguf").SpecialVocab
    publish_chat_model(tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").unlink()
    path = tmp_path / "hf/tokenizer_config.json"
    old = json.loads(path.read_text())
    rows = [json.dumps({"prompt": f"{i}?", "completion": f"{i}!"}) for i in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    trained = CHATML + "{# trained #}"
    (tmp_path / "trained.jinja").write_text(trained)
    for templates in (CHATML, [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ 1 }}"}]):
        path.write_text(json.dumps(old | {"chat_template": templates}))
        data = tmp_path / f"data of {type(templates)}"
        chat.prepare([tmp_path / "chats.jsonl"], data, str(tmp_path / "hf"), tmp_path / "trained.jinja")
        for rank in (0, 2):
            out = tmp_path / f"out of {type(templates)} {rank}"
            train(dataset=data, init_from=tmp_path / "hf", out_dir=out, lora_rank=rank, max_iters=1, **CHAT)
            for folder in (out / "step_000001", convert_to_hf(out, folder=f"{type(templates)} {rank}")):
                assert vocab(folder).chat_template == trained
                assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == trained
                assert tokenizer_of(folder).chat_template == trained


CHAT = dict(n_embd=64, ffn_dim=96, vocab_size=259, mask_documents=True)


# ----------------------------------------------------------------------------------------------------------------------
# A model that is no longer Llama 3


def refused_by_others(folder):
    with pytest.raises(ValueError, match="model type|model_type"):
        transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match="model type|model_type"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert not {"LlamaForCausalLM"} & set(config["architectures"])


class WithGain(model_module.Llama):
    """A model with a weight of its own, whose name does not end in .weight."""

    def __init__(self, config, how=None):
        super().__init__(config, how)
        self.gain = torch.nn.Parameter(torch.empty(1, config.n_embd))

    def forward(self, *args, **options):
        return super().forward(*args, **options) + self.gain.square().mean()


def use_gain(monkeypatch):
    monkeypatch.setattr(model_module, "Llama", WithGain)
    for module in ("checkpoint", "resume"):
        monkeypatch.setattr(f"runtime.{module}.Llama", WithGain)
    for module in ("hf", "resume"):
        monkeypatch.setattr(f"runtime.{module}.OWN", {"gain"})


def test_adapters_read_every_frozen_weight_and_peft_refuses_those_of_a_changed_model(train, tmp_path, monkeypatch):
    use_gain(monkeypatch)
    trained = train(max_iters=1)["model"].gain
    adapters = train(init_from=tmp_path / "out", lora_rank=2, max_iters=1, out_dir=tmp_path / "lora")["model"]
    assert torch.equal(adapters.gain, trained) and not adapters.gain.requires_grad
    with pytest.raises(KeyError):
        peft.PeftConfig.from_pretrained(tmp_path / "lora/step_000001")


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("change", ["activation", "computation", "weights"])
def test_others_refuse_a_changed_model_and_nanocria_reads_it(
    change, train, sample, convert_to_hf, tmp_path, monkeypatch
):
    if change == "weights":
        use_gain(monkeypatch)
    elif change == "activation":
        monkeypatch.setattr(model_module, "ACTIVATION", "gelu_tanh")
    else:
        monkeypatch.setattr(model_module, "MODEL_TYPE", "other_llama")
    train(max_iters=1)
    step = tmp_path / "out/step_000001"
    refused_by_others(step)
    refused_by_others(convert_to_hf(step))
    assert transformers.AutoTokenizer.from_pretrained(step)("é").input_ids == list("é".encode())
    text, said = sample(out_dir=tmp_path / "hf", max_new_tokens=3)
    assert text.startswith("def ") and not said
    train(max_iters=2)
    train(max_iters=1, init_from=tmp_path / "hf", out_dir=tmp_path / "again")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has model_type"):
        load_model(step)


# ----------------------------------------------------------------------------------------------------------------------


def test_a_user_error_or_full_disk_ends_convert_with_a_message_and_leaves_nothing(alone, tmp_path):
    done = run([tmp_path / "nowhere", tmp_path / "hf"], "convert.py")
    assert done.returncode == 1 and f"{tmp_path}/nowhere holds no weights: expected a run" in done.stderr, done.stderr
    done = run([alone, tmp_path / "hf"], wrapped(tmp_path, FULL_DISK, script="convert.py"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "hf is not written: File too large" in done.stderr, done.stderr
    assert not list(tmp_path.glob("hf*"))


def test_a_run_keeps_the_settings_of_the_folder_it_started_from(train, tmp_path, convert_to_hf, theirs):
    """Tokenizer files, special tokens, context: in a checkpoint, after a resume, in a run started from it."""
    edit_config(theirs, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6, max_position_embeddings=1000)
    for name in ("tokenizer.json", "generation_config.json"):
        (theirs / name).write_text(f'{{"{name}": 1}}')
    train(**TIED, init_from=theirs, max_iters=1)
    train(**TIED, max_iters=2)
    train(**TIED, learning_rate=0, max_iters=1, out_dir=tmp_path / "again", init_from=tmp_path / "out")
    for path in (tmp_path / "out/step_000002", tmp_path / "again/step_000001", convert_to_hf(tmp_path / "out")):
        config = json.loads((path / "config.json").read_text())
        assert config["bos_token_id"] == 3 and config["eos_token_id"] == [4, 5] and config["pad_token_id"] == 6
        assert config["max_position_embeddings"] == load_model(path).config.block_size == 1000
        for name in ("tokenizer.json", "generation_config.json"):
            assert (path / name).read_text() == (theirs / name).read_text()
    assert_equal_weights(tmp_path / "out", tmp_path / "again")


def test_weights_that_float16_cannot_hold_are_refused(theirs):
    holds(Q, lambda q: q.index_fill(0, torch.tensor([0]), 1e5))(theirs)
    with pytest.raises(ValueError, match=r"has numbers in layers.0.attn.qkv_proj.weight that float16 cannot hold"):
        load_model(theirs, dtype=torch.float16)
    assert load_model(theirs, dtype=torch.bfloat16).layers[0].attn.qkv_proj.weight.max() == 99840
