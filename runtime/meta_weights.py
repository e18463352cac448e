"""Read Meta's own files, params.json and consolidated.00.pth, as if they were Hugging Face's.

Meta's RoPE rotates rows 2i and 2i + 1 of a head; Hugging Face's and ours rotate rows i and i + D/2. So the rows of q
and k are reordered. The .pth is read with weights_only: no code in it is executed.
"""

import os
import re
from pathlib import Path

import torch

from data.files import refuse_lfs_pointer
from runtime import hf_config
from runtime.hf_names import unwrapped_names
from runtime.safetensors_file import TensorInfo, open_to_read, parse_json

FILE = "consolidated.00.pth"
NAMES = {  # Meta's name -> Hugging Face's
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONFIG = {  # name in config.json -> name in params.json
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
# eos: the end of a document, and two ends of a turn in a dialogue.
SPECIAL_TOKENS = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}


def is_meta(folder: Path) -> bool:
    return os.path.exists(folder / "params.json") and not os.path.exists(folder / "config.json")


def describe(folder: Path) -> tuple[dict, dict[str, tuple[str, TensorInfo]]]:
    """What config.json would contain, and the file, dtype and shape of each tensor, by Hugging Face's name.

    The width of the MLP and whether the head is tied are inferred from the weights.
    """
    path, weights = folder / "params.json", _load(folder)
    theirs = parse_json(path.read_bytes(), path)
    kinds = {name: hf_config.kind(ours) for ours, name in hf_config.NAMES.items()} | {"rope_theta": float}
    config = {name: hf_config.setting(path, theirs, ours, kinds[name]) for name, ours in CONFIG.items()}
    if config["vocab_size"] != hf_config.LLAMA3_VOCAB:
        raise ValueError(f"{path} says vocab_size {config['vocab_size']}: Llama 3's is {hf_config.LLAMA3_VOCAB}")
    head, embedding = (weights.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    gate = weights.get("model.layers.0.mlp.gate_proj.weight")
    tied = head is None or (embedding is not None and torch.equal(head, embedding))
    if tied:
        weights.pop("lm_head.weight", None)
    stretched = hf_config.setting(path, theirs, "use_scaled_rope", bool, None)
    # The file does not contain the factor: 32 for 3.2's small models, which are the tied ones, 8 for the others.
    scaling = {"rope_type": "llama3", "factor": 32.0 if tied else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config |= SPECIAL_TOKENS | {
        "model_type": "llama", "tie_word_embeddings": tied,
        "intermediate_size": gate.shape[0] if gate is not None and gate.ndim else 0,
        "rope_scaling": scaling if stretched else None, "max_position_embeddings": 131072 if stretched else 8192,
    }  # fmt: skip
    return config, {name: (FILE, TensorInfo(name, x.dtype, tuple(x.shape), 0)) for name, x in weights.items()}


def read_rows(folder: Path, config: dict, hf_name: str, first: int, n: int) -> torch.Tensor:
    """n rows of a tensor from `first` on, in Hugging Face's order. config: describe()'s."""
    weight = _load(folder)[hf_name]
    if hf_name.endswith(("q_proj.weight", "k_proj.weight")):
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        weight = weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)  # (H·D, C) again
    return weight[first : first + n]


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face's names, memory-mapped: read only when used."""
    path, n_files = folder / FILE, len(list(folder.glob("consolidated.*.pth")))
    if n_files > 1:
        raise ValueError(f"{folder} holds a model in {n_files} parts: only a single {FILE} is supported")
    with open_to_read(path) as file:
        refuse_lfs_pointer(file.read(100), path)
    try:
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a hostile file may raise anything
        raise ValueError(f"{path} is damaged, or not a file of only tensors in torch.save's zip format") from error
    if not (isinstance(weights, dict) and all(map(_is_named_tensor, weights.items()))):
        raise ValueError(f"{path} does not hold tensors by name")
    names = unwrapped_names(weights, path)
    return {_hf_name(inner): weights[name] for inner, name in names.items() if inner != "rope.freqs"}


def _is_named_tensor(item: tuple) -> bool:
    name, x = item
    return isinstance(name, str) and isinstance(x, torch.Tensor)


def _hf_name(name: str) -> str:
    """layers.3.feed_forward.w3.weight -> model.layers.3.mlp.up_proj.weight. Names that Llama 3 lacks stay Meta's."""
    block, rest = re.match(r"(layers\.\d+\.)?(.*)", name).groups("")
    return f"{'model.' if block else ''}{block}{NAMES[rest]}" if rest in NAMES else f"{FILE}: {name}"
