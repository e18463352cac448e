"""Hugging Face's format: its names for our parameters, the matrices packed in them, config.json and tokenizer files.

Our model packs q, k, v in one parameter and gate, up in another (LlamaConfig.packed_rows); Hugging Face publishes each
by itself. FSDP gives a rank some rows of a parameter, so some rows of some of the matrices. Optimizer states with as
many rows as their parameter are split alike, and named exp_avg.model.layers.0.self_attn.q_proj.weight. Adapters have
peft's names.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import model
from configurator import check
from data.tokenizer import BASE_CONFIG, DOC_START, LLAMA3_VOCAB, files_to_save, optional_json, to_json
from model import ROPE_SCALING_KEYS, LlamaConfig
from runtime.distributed import from_rank_0, group_rank

WEIGHTS = {  # our name, without the layer -> Hugging Face's names of the matrices packed in it
    "tok_embeddings.weight": ["model.embed_tokens.weight"],
    "attn_norm.weight": ["input_layernorm.weight"],
    "attn.qkv_proj.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attn.o_proj.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down_proj.weight": ["mlp.down_proj.weight"],
    "norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
# Names of parameters that you add, such as "mlp.gain.weight": checkpoints have them, the weights that a run begins with
# may lack them. With any, config.json has another model_type, so that other software refuses the checkpoint.
OWN = set()
ADAPTERS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # our name -> peft's

CONTEXT = "nanocria_context"  # in config.json: the longest sequence that the weights were trained on
POSITIONS = "max_position_embeddings"
STRETCHED = "original_max_position_embeddings"
SETTINGS = {  # our name -> Hugging Face's
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "block_size": POSITIONS,
}
HIDDEN_ACTS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # our name -> Hugging Face's
# transformers' defaults for what a config.json may omit.
DEFAULTS = {
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", POSITIONS: 2048, "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = {  # the values, in config.json, of what model.py computes in only one way
    "attention_bias": [None, False], "mlp_bias": [None, False], "quantization_config": [None],
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# Names and rows


class Rows(NamedTuple):
    """This rank's share of one tensor in a file: the rows from `first` on, or none."""

    name: str
    dtype: torch.dtype
    whole_shape: tuple[int, ...]  # of the tensor
    first: int
    tensor: torch.Tensor | Callable[[], torch.Tensor]  # to write: may be a function that computes the rows
    writes: bool = True  # False: another rank has the same rows and writes them


def hf_names(name: str) -> list[str]:
    """Hugging Face's names for one of ours: three for layers.3.attn.qkv_proj.weight, or peft's for its lora_a."""
    part, adapter = name.rpartition(".")[::2]
    if adapter in ADAPTERS:
        weights = hf_names(f"{part}.weight")
        return [f"base_model.model.{weight.removesuffix('weight')}{ADAPTERS[adapter]}" for weight in weights]
    _, i, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
    if rest not in WEIGHTS.keys() | OWN:
        raise ValueError(f"{name} has no name in Hugging Face's Llama: add '{rest}' to OWN in runtime/hf.py")
    return [f"model.layers.{i}.{hf_name}" if i else hf_name for hf_name in WEIGHTS.get(rest, [rest])]


def rows_of(x: torch.Tensor) -> tuple[int, torch.Tensor, bool]:
    """This rank's part of x, as (first row, rows, True if this rank is the one to write them).

    FSDP splits the first dimension as torch.chunk does: into parts of n / ranks rows, rounded up; the last are shorter
    or empty. Hybrid sharding has a replica of all rows on each machine: the first machine writes.
    """
    if not isinstance(x, DTensor):
        return 0, x.detach(), group_rank() == 0
    first = 0
    writes = True
    mesh = x.device_mesh
    for placement, size, coordinate in zip(x.placements, mesh.shape, mesh.get_coordinate(), strict=True):
        assert placement in (Shard(0), Replicate()), placement
        if placement == Shard(0):
            first = min(-(-len(x) // size) * coordinate, len(x))
        else:
            writes = writes and coordinate == 0
    return first, x.to_local().detach(), writes


def hf_rows(name: str, x: torch.Tensor, config: LlamaConfig, state: str = "") -> list[Rows]:
    """This rank's rows of each published matrix in x: the parameter `name`, or its optimizer state `state`.

    The rows' tensors are views of x: write them to a file, or read a file into them.
    """
    names = hf_names(name)
    sizes = [len(x)]
    if len(names) > 1:
        sizes = config.packed_rows[name.split(".")[-2]]
    if name.endswith("lora_a"):  # the same number of rows for each matrix
        sizes = [len(x) // len(names)] * len(names)
    if sum(sizes) != len(x):  # a state whose rows differ from its parameter's stays whole, under our name
        names = [name]
        sizes = [len(x)]
    begin, rows, writes = rows_of(x)
    end = begin + len(rows)
    parts = []
    start = 0  # of each matrix in x
    for hf_name, size in zip(names, sizes, strict=True):
        first = max(begin, start)
        last = max(first, min(end, start + size))
        full_name = f"{state}.{hf_name}" if state else hf_name
        tensor = rows[first - begin : last - begin]
        parts.append(Rows(full_name, x.dtype, (size, *x.shape[1:]), first - start, tensor, writes))
        start += size
    return parts


# ----------------------------------------------------------------------------------------------------------------------
# config.json


def setting(path: Path, theirs: dict, name: str, *options) -> Any:
    """One setting of a file, checked to be of one of these types. If None is among them, it may be missing."""
    return check(f"{path}: {name}", list(options), theirs.get(name))


def model_type() -> str:
    """What config.json calls the model. Other software goes by it, so it is Llama's only if the model computes that."""
    changed = OWN or model.ACTIVATION != "silu"
    return "nanocria" if changed and model.MODEL_TYPE == "llama" else model.MODEL_TYPE


def read_config(folder) -> tuple[LlamaConfig, str | None]:
    """The model in an open folder, and its tokenizer's name, or None if unknown.

    block_size is the model's context: as long as it was trained. Raises ValueError for a model that model.py does not
    support.
    """
    path = folder.path / (BASE_CONFIG if folder.adapter else "config.json")
    theirs = DEFAULTS | folder.config
    if theirs.get("num_key_value_heads") is None:
        theirs["num_key_value_heads"] = theirs.get("num_attention_heads")
    types = LlamaConfig.__annotations__
    settings = {ours: setting(path, theirs, name, types[ours]) for ours, name in SETTINGS.items()}
    settings["block_size"] = setting(path, theirs, CONTEXT, int, None) or settings["block_size"]
    settings |= _read_rope(path, theirs)
    supported = LLAMA | {
        "model_type": ["llama", model_type()], "hidden_act": [HIDDEN_ACTS[model.ACTIVATION]],
        "head_dim": [None, settings["n_embd"] / max(settings["n_head"], 1)],
    }  # fmt: skip
    for name, values in supported.items():
        if theirs.get(name) not in values:
            raise ValueError(f"{path} has {name} {theirs.get(name)!s:.60}: only {values[-1]} is supported")
    try:
        config = LlamaConfig(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tokenizer = "llama3" if config.vocab_size == LLAMA3_VOCAB else None
    return config, setting(path, theirs, "nanocria_tokenizer", str, None) or tokenizer


def _read_rope(path: Path, theirs: dict) -> dict:
    """Our two settings for RoPE. Newer files have rope_parameters, older ones rope_scaling, which wins if both have
    something; there the type may be called "type", and theta stands outside.
    """
    new = setting(path, theirs, "rope_parameters", dict, None)
    old = setting(path, theirs, "rope_scaling", dict, None)
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
    # transformers prefers the one outside, and expects an int.
    scaling[STRETCHED] = setting(path, rope | theirs, STRETCHED, int)
    return {"rope_theta": theta, "rope_scaling": dict(sorted(scaling.items()))}


def write_config(config: LlamaConfig, tokenizer: str, dtype: str, source: dict, dataset: dict) -> dict:
    """The content of config.json for a model. transformers ignores what begins with nanocria_.

    source: config.json of the weights that training began with, or {}: its special tokens and context are kept.
    dataset: meta.json of the training data, or {}.
    """
    # In data without bos, the end of a document precedes the next one. Write None too: else transformers takes 1 and 2.
    bos = source.get("bos_token_id", dataset.get("end_of_text"))
    eos = source.get("eos_token_id", dataset.get("end_of_text"))
    # Other software needs max_position_embeddings to be at least the length that the scaling stretches. But only
    # published weights were trained on that many positions: our own commands read the context.
    published = source.get(POSITIONS, DEFAULTS[POSITIONS]) if source else 0
    stretched = (config.rope_scaling or {}).get(STRETCHED, 0)
    context = max(config.block_size, source.get(CONTEXT) or published)
    content = {
        "architectures": ["LlamaForCausalLM" if model_type() == "llama" else "NanocriaForCausalLM"],
        "model_type": model_type(), "hidden_act": HIDDEN_ACTS[model.ACTIVATION],
        **{theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()},
        POSITIONS: int(max(context, published, stretched)), CONTEXT: int(context), "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and {"rope_type": "llama3", **config.rope_scaling},
        "attention_bias": False, "mlp_bias": False, "torch_dtype": dtype, "nanocria_tokenizer": tokenizer,
        DOC_START: source.get(DOC_START) if source else dataset.get("end_of_text"),
        "bos_token_id": dataset.get("bos", bos), "eos_token_id": dataset.get("eos", eos),
    }  # fmt: skip
    if source.get("pad_token_id") is not None:
        content["pad_token_id"] = source["pad_token_id"]
    return content


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint's files without tensors


def hf_files(
    folder, config: LlamaConfig, tokenizer: str, dtype: str, dataset: dict, data: Path | None = None
) -> dict[str, bytes]:
    """config.json, generation_config.json and the tokenizer's files, by name. Every rank must call it.

    folder: the open folder that the weights are from, or None; dataset: meta.json of the data they were or are trained
    on, or {}; data: the folder of that.
    """
    config_json = write_config(config, tokenizer, dtype, folder.config if folder else {}, dataset)
    files = from_rank_0(lambda: files_to_save(folder and folder.path, data, dataset, tokenizer))
    if "generation_config.json" in files and dataset.get("eos"):  # transformers prefers its eos
        generation = optional_json(files, "generation_config.json")
        generation["eos_token_id"] = config_json["eos_token_id"]
        files["generation_config.json"] = to_json(generation)
    return files | {"config.json": to_json(config_json)}


def adapter_files(files: dict[str, bytes], base: Path, rank: int, alpha: float) -> dict[str, bytes]:
    """hf_files() for a checkpoint of adapters on all projections of the model in the folder base: with peft's
    adapter_config.json, and without config.json, beside which transformers would expect a whole model.
    """
    adapter_config = {
        "peft_type": "LORA" if model_type() == "llama" else model_type(),  # which peft refuses
        "task_type": "CAUSAL_LM", "base_model_name_or_path": os.path.abspath(base),
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    others = {name: content for name, content in files.items() if name != "config.json"}
    return others | {BASE_CONFIG: files["config.json"], "adapter_config.json": to_json(adapter_config)}
