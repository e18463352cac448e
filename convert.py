"""Convert any weights that nanocria reads to a folder with Hugging Face's config.json and .safetensors files.

    python convert.py Llama3.2-1B my-llama                             Meta's format, params.json and a .pth
    python convert.py out/llama32_1b my-llama --dtype float32          a run's newest checkpoint: its master weights
    python convert.py Llama-3.2-1B my-llama --dtype float16
    python convert.py out/lora my-llama                                adapters, merged into the published weights

Adapters on an NF4 base are merged into the dequantized weights that they were trained on. To merge them into the
published ones, use peft: a checkpoint of adapters is in its format. You do not need convert.py to use a run: a
checkpoint is such a folder. Only this file reads Meta's format; train.py and sample.py read Hugging Face's.
"""

import argparse
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import torch

from data.tokenizer import LLAMA3_VOCAB
from lora import merge_lora
from model import Llama, LlamaConfig
from runtime.checkpoint import Folder, is_meta, load_model, newest_model, open_folder, read_undamaged_json, require_file
from runtime.hf import POSITIONS, STRETCHED, Rows, hf_files, hf_rows, read_config
from runtime.save import commit, write_folder


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Write the model load_model(source) to `folder`, which appears only when it is complete.

    Raises ValueError or OSError if `source` cannot be read or `folder` cannot be written.
    """
    opened, meta_weights = open_meta_folder(source) if is_meta(source) else (open_folder(source), None)
    config, tokenizer = read_config(opened)
    unfinished = folder.with_name(folder.name + ".partial")
    unfinished.mkdir(parents=True)  # fails before the weights are read, also if it is the user's
    try:
        if meta_weights is None:
            model = load_model(source, "cpu", getattr(torch, dtype))
            merge_lora(model)
            rows = all_rows(model)
        else:
            rows = rows_of_meta(meta_weights, config, getattr(torch, dtype), source)
        dataset = (opened.run or {}).get("dataset", {})
        others = hf_files(opened, config, tokenizer, dtype, dataset)
        run = {"converted_from": str(source)} | ({"dataset": dataset} if dataset else {})
        write_folder(unfinished, {"model.safetensors": rows}, others, run)
        commit(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def all_rows(model: Llama) -> list[Rows]:
    return [rows for name, p in model.named_parameters() for rows in hf_rows(name, p, model.config)]


# ----------------------------------------------------------------------------------------------------------------------
# Meta's own files, params.json and consolidated.00.pth

META_FILE = "consolidated.00.pth"
META_NAMES = {  # Meta's name -> Hugging Face's
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
META_SETTINGS = {  # name in config.json -> name in params.json
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
# eos: the end of a document, and two ends of a turn in a dialogue.
META_SPECIAL_TOKENS = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}


def open_meta_folder(path: Path) -> tuple[Folder, dict[str, torch.Tensor]]:
    """What config.json would contain, and the weights by Hugging Face's names, memory-mapped: read only when used.

    The width of the MLP and whether the head is tied are inferred from the weights.
    """
    weights = load_pth(path)
    params = read_undamaged_json(path / "params.json")
    config = {name: params.get(theirs) for name, theirs in META_SETTINGS.items()}
    if config["vocab_size"] != LLAMA3_VOCAB:
        raise ValueError(f"{path} has vocab_size {config['vocab_size']}: Llama 3's is {LLAMA3_VOCAB}")
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if meta_to_hf(name) not in weights:
            raise ValueError(f"{path / META_FILE} has no {name}")
    head = weights.get("lm_head.weight")
    stretched = params.get("use_scaled_rope")
    tied = head is None or torch.equal(head, weights["model.embed_tokens.weight"])
    if tied:
        weights.pop("lm_head.weight", None)
    # The file does not contain the factor: 32 for 3.2's small models, which are the tied ones, 8 for the others.
    scaling = {"rope_type": "llama3", "factor": 32.0 if tied else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               STRETCHED: 8192}  # fmt: skip
    config |= META_SPECIAL_TOKENS | {
        "model_type": "llama", "tie_word_embeddings": tied,
        "intermediate_size": weights["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "rope_scaling": scaling if stretched else None, POSITIONS: 131072 if stretched else 8192,
    }  # fmt: skip
    return Folder(path, None, config, {}), weights


def rows_of_meta(weights: dict[str, torch.Tensor], config: LlamaConfig, dtype: torch.dtype, path: Path) -> list[Rows]:
    """The rows of the model of this config, with open_meta_folder()'s weights: each is read when it is written.

    ValueError if the weights are not those of this model.
    """
    with torch.device("meta"):
        rows = all_rows(Llama(config).to(dtype))
    expected = {row.name: row.whole_shape for row in rows}
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "none"
        if found != expected.get(name, "none"):
            raise ValueError(f"expected {name} of shape {expected.get(name, 'none')}: {path} has {found}")
    return [row._replace(tensor=partial(in_hf_order, weights[row.name], row, config.head_dim)) for row in rows]


def in_hf_order(weight: torch.Tensor, row: Rows, head_dim: int) -> torch.Tensor:
    """Meta's RoPE rotates rows 2i and 2i + 1 of a head of q and k; Hugging Face's and ours rotate i and i + D/2."""
    if row.name.endswith(("q_proj.weight", "k_proj.weight")):
        weight = weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)  # (H·D, C) again
    return weight.to(row.dtype)


def load_pth(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .pth by Hugging Face's names. It is a pickle, read with weights_only: no code is executed."""
    path = folder / META_FILE
    if len(list(folder.glob("consolidated.*.pth"))) > 1:
        raise ValueError(f"{folder} holds a model in several parts: only a single {META_FILE} is supported")
    require_file(path)
    try:
        weights = dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except Exception as error:  # of many kinds
        raise ValueError(f"{path} is damaged, or not a file of only tensors in torch.save's zip format") from error
    return {meta_to_hf(name): x for name, x in weights.items() if name != "rope.freqs"}


def meta_to_hf(name: str) -> str:
    """layers.3.feed_forward.w3.weight -> model.layers.3.mlp.up_proj.weight. Names that Llama 3 lacks stay Meta's."""
    layer, rest = re.match(r"(layers\.\d+\.)?(.*)", name).groups("")
    if rest not in META_NAMES:
        return f"{META_FILE}: {name}"
    return f"model.{layer}{META_NAMES[rest]}" if layer else META_NAMES[rest]


# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run (its newest checkpoint), a checkpoint or published weights")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of weights (default: bfloat16)"
    )
    args = parser.parse_args()
    if args.folder.exists():
        sys.exit(f"{args.folder} already exists: name a new folder")
    try:
        source = newest_model(args.source)
        convert(source, args.folder, args.dtype)
        print(f"{args.folder}: {source} in {args.dtype}")
    except (OSError, ValueError) as error:
        sys.exit(f"{args.folder} is not written: {error}")


if __name__ == "__main__":
    main()
