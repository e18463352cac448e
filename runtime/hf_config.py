"""Read and write config.json: Hugging Face's names for the settings of a model."""

import os
from pathlib import Path
from typing import Any

import model
from configurator import SettingError, check
from data.tokenizer import DOC_START, LLAMA3_VOCAB, doc_start_of
from model import ROPE_SCALING_KEYS, LlamaConfig
from runtime import hf_names

ADAPTED = "base_config.json"  # in a folder of adapters, in place of config.json
CONTEXT = "nanocria_context"  # in config.json: the longest sequence that the weights were trained on
NAMES = {  # our name -> Hugging Face's
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "block_size": "max_position_embeddings",
}
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # our name -> Hugging Face's
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# transformers' defaults for what a config.json omits.
DEFAULTS = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 11008,
    "vocab_size": 32000, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 10000.0,
}  # fmt: skip


def kind(name: str) -> type:
    return LlamaConfig.__dataclass_fields__[name].type


def setting(path: Path, theirs: dict, name: str, *options) -> Any:
    """One setting of a file, checked to be of one of these types. If None is among them, it may be missing."""
    if name not in theirs and None not in options:
        raise ValueError(f"{path} does not say {name!r}")
    try:
        return check(f"{path}: {name}", list(options), theirs.get(name))
    except SettingError as error:
        raise ValueError(f"{error!s:.300}") from error


def model_type() -> str:
    """What config.json calls the model. Other software goes by it, so it is Llama's only if the model computes that."""
    changed = hf_names.OWN or model.ACTIVATION != "silu"
    return "nanocria" if changed and model.MODEL_TYPE == "llama" else model.MODEL_TYPE


def read_config(folder) -> tuple[dict, str | None]:
    """The settings of the model in an open folder, by train.py's names, and its tokenizer's name, or None if unknown.

    block_size is the model's context: as long as it was trained. Raises ValueError for a model that model.py does not
    support.
    """
    path = folder.path / (ADAPTED if folder.adapter else "config.json")
    theirs = folder.config
    if theirs.get("model_type") not in ("llama", model_type()):
        raise ValueError(f"{path} describes a {theirs.get('model_type')!s:.60} model, not a Llama")
    if theirs.get("quantization_config"):
        raise ValueError(f"{path} describes quantized weights: use them in bfloat16, float16 or float32")
    if theirs.get("transformers_weights") is not None:
        raise ValueError(f"{path} names transformers_weights, which are not read: only model.safetensors and its index")
    theirs = DEFAULTS | theirs
    if theirs.get("num_key_value_heads") is None:
        theirs["num_key_value_heads"] = theirs["num_attention_heads"]
    settings = {ours: setting(path, theirs, name, kind(ours)) for ours, name in NAMES.items()}
    settings["block_size"] = setting(path, theirs, CONTEXT, int, None) or settings["block_size"]
    if settings["block_size"] < 1:
        raise ValueError(f"{path} says a context of {settings['block_size']} tokens: expected at least 1")
    settings |= _read_rope(path, theirs)
    n_embd = settings["n_embd"]
    n_head = settings["n_head"]
    head_dim = setting(path, theirs, "head_dim", int, None)
    if n_head and head_dim not in (None, n_embd / n_head):
        raise ValueError(
            f"{path} has head_dim {head_dim}, {n_head} heads and hidden_size {n_embd}: only heads whose sizes add up "
            "to hidden_size are supported, as in Llama 3"
        )
    for name, where in (("attention_bias", "q, k, v and o"), ("mlp_bias", "gate, up and down")):
        if theirs.get(name):
            raise ValueError(f"{path} has {name}, biases of {where}: they are not supported, Llama 3 has none")
    if theirs["hidden_act"] != ACTIVATIONS[model.ACTIVATION]:
        raise ValueError(f"{path} has the activation {theirs['hidden_act']!s:.60}: model.py has {model.ACTIVATION}")
    for name in SPECIAL_TOKENS:
        ids = setting(path, theirs, name, int, list, None)
        if isinstance(ids, list) and not all(type(token) is int for token in ids):
            raise ValueError(f"{path}: {name} expects token ids, got {ids!r:.60}")
    try:
        LlamaConfig(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tokenizer = "llama3" if settings["vocab_size"] == LLAMA3_VOCAB else None
    return settings, setting(path, theirs, "nanocria_tokenizer", str, None) or tokenizer


def add_missing(config: dict, run: dict) -> None:
    """Add our own entries to a config.json of an older version. run: its run.json, or {}."""

    def part(content, name):
        return content[name] if isinstance(content.get(name), dict) else {}

    doc_start_of(config)  # ValueError for one that is no token
    # Weights from scratch claimed the length that their RoPE is scaled from. No published weights claim just that:
    # their scaling stretches it.
    stretched = part(config, "rope_scaling").get("original_max_position_embeddings")
    block_size = part(run, "settings").get("block_size")
    if block_size and stretched == config.get("max_position_embeddings"):
        config.setdefault(CONTEXT, block_size)


def _read_rope(path: Path, theirs: dict) -> dict:
    """Our two settings for RoPE. Newer files have rope_parameters, older ones rope_scaling, which wins if both have
    something; there the type may be called "type", and theta stands outside.
    """
    new, old = (setting(path, theirs, place, dict, None) for place in ("rope_parameters", "rope_scaling"))
    rope = old or new or {}
    theta = setting(path, theirs | rope, "rope_theta", float)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"{path} has RoPE of type {rope_type!s:.60}: default and llama3 are supported")
    if (theirs | rope).get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"{path} has a partial_rotary_factor: Llama 3 rotates whole heads")
    if rope_type == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {key: setting(path, rope, key, float) for key in ROPE_SCALING_KEYS & rope.keys()}
    original = "original_max_position_embeddings"
    if original in scaling and scaling[original].is_integer():
        scaling[original] = int(scaling[original])  # transformers expects an int
    if original in theirs or ROPE_SCALING_KEYS - scaling.keys() == {original}:
        scaling[original] = setting(path, theirs, original if original in theirs else "max_position_embeddings", int)
    return {"rope_theta": theta, "rope_scaling": dict(sorted(scaling.items()))}


def write_config(config: LlamaConfig, tokenizer: str, dtype: str, source: dict, dataset: dict) -> dict:
    """The content of config.json for a model. transformers ignores what begins with nanocria_.

    source: config.json of the weights that training began with, or {}: its special tokens and context are kept.
    dataset: meta.json of the training data, or {}.
    """
    # In data without bos, the end of a document precedes the next one. Write None too: else transformers takes 1 and 2.
    bos, eos = (source.get(name, dataset.get("end_of_text")) for name in ("bos_token_id", "eos_token_id"))
    doc_start = source.get(DOC_START) if source else dataset.get("end_of_text")
    # Other software needs max_position_embeddings to be at least the length that the scaling stretches. But only
    # published weights were trained on that many positions: our own commands read the context.
    positions = "max_position_embeddings"
    published = source.get(positions, DEFAULTS[positions]) if source else 0
    stretched = (config.rope_scaling or {}).get("original_max_position_embeddings", 0)
    context = max(config.block_size, source.get(CONTEXT) or published)
    architecture = "LlamaForCausalLM" if model_type() == "llama" else "NanocriaForCausalLM"
    described = {
        "architectures": [architecture], "model_type": model_type(), "hidden_act": ACTIVATIONS[model.ACTIVATION],
    }  # fmt: skip
    if source.get("pad_token_id") is not None:
        described["pad_token_id"] = source["pad_token_id"]
    return {
        **described,
        **{theirs: getattr(config, ours) for ours, theirs in NAMES.items()},
        positions: int(max(context, published, stretched)), CONTEXT: int(context), "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and {"rope_type": "llama3", **config.rope_scaling},
        "attention_bias": False, "mlp_bias": False, "torch_dtype": dtype, "nanocria_tokenizer": tokenizer,
        DOC_START: doc_start,
        "bos_token_id": dataset.get("bos", bos), "eos_token_id": dataset.get("eos", eos),
    }  # fmt: skip


def write_adapter_config(base: Path, rank: int, alpha: float) -> dict:
    """The content of peft's adapter_config.json for adapters on all projections of the model in the folder base."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": os.path.abspath(base),
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
