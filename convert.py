"""Weights in Hugging Face's format, config.json beside .safetensors files, or Meta's, params.json and a .pth.

    python train.py config/llama32_1b.py --init_from=Llama-3.2-1B     a run that begins with published weights
    python sample.py --out_dir=Llama-3.2-1B                           text from those weights
    python convert.py out/llama32_1b my-llama                         a run's newest checkpoint, for transformers
    python convert.py out/llama32_1b/step_001000 my-llama --dtype float32
    python convert.py Llama3.2-1B my-llama                            Meta's format to Hugging Face's

Hugging Face's need `pip install safetensors`. These are the weights alone: a tokenizer's files are not among them. Ours
and Hugging Face's have RoPE in the same layout; ours stacks q, k, v, and gate, up, into one matrix each. Meta's files
order the rows of q and k otherwise: see de_interleaved.
"""

import argparse
import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from configurator import SettingError, check
from data.tokenizer import end_of_text, get_tokenizer
from model import ROPE_SCALING_KEYS, Llama, LlamaConfig, fill
from runtime import checkpoint, run_folder

NAMES = {  # our name -> Hugging Face's names of what is stacked in it
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
CONFIG = {  # our name -> Hugging Face's
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
META = {  # Hugging Face's name -> Meta's
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
META_CONFIG = {  # name in config.json -> name in Meta's params.json
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
LLAMA3_VOCAB = 128256
# The end of a document, and two ends of a turn in a dialogue.
LLAMA3_TOKENS = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
FILE_BYTES = 5e9  # of one .safetensors


def hf_names(name: str) -> list[str]:
    """Hugging Face's names for one of ours: three for layers.3.attn.qkv_proj.weight."""
    _, i, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
    if rest not in NAMES:
        raise ValueError(f"{name} has no name in Hugging Face's Llama: add it to NAMES in convert.py")
    return [f"model.layers.{i}.{hf_name}" if i else hf_name for hf_name in NAMES[rest]]


def _safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("Hugging Face's files need safetensors: pip install safetensors") from None
    return safetensors


# ----------------------------------------------------------------------------------------------------------------------
# In


def holds_weights(folder: Path) -> bool:
    return any(os.path.exists(Path(folder) / name) for name in ("config.json", "params.json"))


def read_config(folder: Path) -> tuple[dict, str | None]:
    """The settings of the model in a folder, by train.py's names, and its tokenizer's name, or None if unknown.

    Raises ValueError for a model that model.py cannot be, OSError if it cannot be read.
    """
    path, theirs = _config(folder)
    if theirs.get("model_type") != "llama":
        raise ValueError(f"{path} describes a {theirs.get('model_type')} model, not a Llama")
    if theirs.get("quantization_config"):
        raise ValueError(f"{path} describes quantized weights: take them in bfloat16, float16 or float32")
    fields = LlamaConfig.__dataclass_fields__
    settings = {ours: _setting(path, theirs, name, fields[ours].type) for ours, name in CONFIG.items()}
    settings |= _read_rope(path, theirs)
    try:
        config = LlamaConfig(**settings, block_size=1)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    head_dim = _setting(path, theirs, "head_dim", int, None) or config.head_dim
    if theirs.get("attention_bias") or theirs.get("mlp_bias") or head_dim != config.head_dim:
        raise ValueError(f"{path} has biases, or a head_dim other than hidden_size / num_attention_heads: not Llama 3")
    if theirs.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path} has the activation {theirs['hidden_act']}: Llama 3's is silu")
    tokenizer = "llama3" if settings["vocab_size"] == LLAMA3_VOCAB else None
    return settings, _setting(path, theirs, "nanocria_tokenizer", str, None) or tokenizer


def _config(folder: Path) -> tuple[Path, dict]:
    """The file's path and the content of config.json; if there is Meta's params.json instead, what it would contain."""
    if _is_meta(folder):
        return Path(folder) / "params.json", _meta_config(folder)
    path = Path(folder) / "config.json"
    return path, _read_json(path)


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds JSON of type {type(content).__name__}, expected an object")
    return content


def _setting(path: Path, theirs: dict, name: str, *options):
    """One of a file's settings, checked to be of one of these types. With None among them it may be missing."""
    if name not in theirs and None not in options:
        raise ValueError(f"{path} does not say {name!r}")
    try:
        return check(f"{path}: {name}", list(options), theirs.get(name))
    except SettingError as error:
        raise ValueError(str(error)) from error


def _read_rope(path: Path, theirs: dict) -> dict:
    """Our two settings for RoPE. Old files have them in other places, and the kind under "type"."""
    old = theirs | (_setting(path, theirs, "rope_scaling", dict, None) or {})
    rope = _setting(path, theirs, "rope_parameters", dict, None) or old
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"{path} has RoPE of the type {kind}: default and llama3 are known")
    scaling = {key: rope[key] for key in ROPE_SCALING_KEYS & rope.keys()} if kind == "llama3" else None
    return {"rope_theta": _setting(path, rope, "rope_theta", float), "rope_scaling": scaling}


def read_special_tokens(folder: Path, end: int) -> tuple[int, set[int]]:
    """The token that begins a document, and those that end it or a turn of a dialogue; by default both are `end`."""
    path, theirs = _config(folder)
    begin = _setting(path, theirs, "bos_token_id", int, None)
    ends = _setting(path, theirs, "eos_token_id", int, list, None)
    return end if begin is None else begin, {
        end,
        *(ends if isinstance(ends, list) else [end if ends is None else ends]),
    }


def load(folder: Path, optimizer) -> None:
    """Fills an optimizer and the weights of its model, sharded in any way: no rank holds more than one whole.

    Raises ValueError if a weight is missing, is not finite or has another shape or dtype, or if there are more than the
    model has; OSError if a file cannot be read.
    """
    tensors = optimizer.tensors()
    weights = {name.removeprefix("model."): w for name, w in tensors.items() if name.startswith("model.")}
    _read_into(weights, folder)
    optimizer.refresh(tensors)


def load_model(folder: Path, block_size: int, device: str, dtype: torch.dtype) -> Llama:
    """The model of a folder, whole, on one device and in one dtype: for sampling. Raises as read_config and load do.

    block_size: how much is wanted of the context that the folder says.
    """
    settings, _ = read_config(folder)
    path, theirs = _config(folder)
    context = _setting(path, theirs, "max_position_embeddings", int, None) or 2048  # transformers' default
    if context < 1:
        raise ValueError(f"{path} says max_position_embeddings {context}")
    with torch.device("meta"):
        model = Llama(LlamaConfig(**settings, block_size=min(block_size, context))).to(dtype)
    model.to_empty(device=device)
    _read_into(dict(model.named_parameters()), folder)
    return model


@torch.no_grad()
def _read_into(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fills tensors, which have our names, from the weights in a folder. Rounds at most once."""
    read = _meta_reader(Path(folder)) if _is_meta(folder) else _reader(Path(folder), tensors)
    for name, tensor in tensors.items():
        parts = {hf_name: read(hf_name) for hf_name in hf_names(name)}
        alike = all(part.ndim == tensor.ndim and part.shape[1:] == tensor.shape[1:] for part in parts.values())
        if not alike or sum(map(len, parts.values())) != len(tensor):
            found = ", ".join(f"{hf_name} {tuple(part.shape)}" for hf_name, part in parts.items())
            raise ValueError(f"{folder} has {found}, the model {name} {tuple(tensor.shape)}")
        for hf_name, part in parts.items():
            if part.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise ValueError(f"{folder} has {hf_name} in {part.dtype}: expected bfloat16, float16 or float32")
            if not torch.stack(part.aminmax()).isfinite().all():  # either is NaN where one element is
                raise ValueError(f"{folder} has numbers in {hf_name} that are not finite")
        fill(tensor, torch.cat(list(parts.values())).to(tensor.dtype))


def _reader(folder: Path, tensors: dict[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """A function from Hugging Face's name of a tensor to the tensor, on the CPU. ValueError if the files hold a weight
    that has no place in tensors, which have our names.
    """
    safetensors, index, single = _safetensors(), folder / "model.safetensors.index.json", folder / "model.safetensors"

    def look(path, name, what):
        if not path.exists():
            raise ValueError(f"{path} is not there: it should hold {name}")
        try:
            with safetensors.safe_open(path, "pt") as file:
                return what(file)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: {name}: {error}") from error

    def read(name):
        return look(folder / str(files.get(name, single.name)), name, lambda file: file.get_tensor(name))

    wanted = [hf_name for name in tensors for hf_name in hf_names(name)]
    if index.exists():
        files = _setting(index, _read_json(index), "weight_map", dict)
    else:
        files = dict.fromkeys(look(single, wanted[0], lambda file: list(file.keys())), single.name)
    more = {name for name in files.keys() - wanted if not name.endswith("rotary_emb.inv_freq")}  # of old versions
    embedding, head = hf_names("tok_embeddings.weight")[0], hf_names("lm_head.weight")[0]
    if head in more and embedding in wanted and torch.equal(read(head), read(embedding)):  # tied, and written twice
        more.remove(head)
    if head in more:
        raise ValueError(
            f"{folder} has an {head} of its own, but config.json says tie_word_embeddings: say false there"
        )
    if more:
        raise ValueError(f"{folder} has {len(more)} weights that the model has no place for: {min(more)}, ...")
    return read


# ----------------------------------------------------------------------------------------------------------------------
# Meta's own files


def _is_meta(folder: Path) -> bool:
    return os.path.exists(Path(folder) / "params.json") and not os.path.exists(Path(folder) / "config.json")


def _meta_config(folder: Path) -> dict:
    """What config.json would contain. The weights tell how wide the MLP is and whether the head is tied."""
    path, weights = Path(folder) / "params.json", _meta_weights(folder)
    theirs = _read_json(path)
    kinds = {name: LlamaConfig.__dataclass_fields__[ours].type for ours, name in CONFIG.items()} | {"rope_theta": float}
    config = {name: _setting(path, theirs, meta_name, kinds[name]) for name, meta_name in META_CONFIG.items()}
    if config["vocab_size"] != LLAMA3_VOCAB:
        raise ValueError(f"{path} says vocab_size {config['vocab_size']}: Llama 3's is {LLAMA3_VOCAB}")
    known = {f"layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in META.values()}
    more = weights.keys() - known - set(META.values()) - {"rope.freqs"}
    if more:
        raise ValueError(f"{folder} has {len(more)} weights that Llama 3 has not: {min(more)}, ...")
    embedding, gate = (_meta_weight(folder, weights, f"model.{name}.weight")
                       for name in ("embed_tokens", "layers.0.mlp.gate_proj"))  # fmt: skip
    tied = torch.equal(weights.get("output.weight", embedding), embedding)
    stretched = _setting(path, theirs, "use_scaled_rope", bool, None)
    # The file does not say the factor: 32 for 3.2's small models, which are the tied ones, 8 for the others.
    scaling = {"rope_type": "llama3", "factor": 32.0 if tied else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    return config | LLAMA3_TOKENS | {
        "model_type": "llama", "intermediate_size": len(gate), "tie_word_embeddings": tied,
        "rope_scaling": scaling if stretched else None, "max_position_embeddings": 131072 if stretched else 8192,
    }  # fmt: skip


def _meta_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights by Meta's names, mapped from the file: read only when they are used."""
    path, n_files = Path(folder) / "consolidated.00.pth", len(list(Path(folder).glob("consolidated.*.pth")))
    if n_files > 1:
        raise ValueError(f"{folder} holds a model in {n_files} parts: only one consolidated.00.pth can be read")
    try:
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        said = "no file of torch.save's zip format, or a damaged one"
        said = said if "mmap" in str(error) or not str(error) else str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read: {said}") from error
    if not (isinstance(weights, dict) and all(isinstance(x, torch.Tensor) for x in weights.values())):
        raise ValueError(f"{path} does not hold tensors by name")
    return weights


def _meta_weight(folder: Path, weights: dict[str, torch.Tensor], hf_name: str) -> torch.Tensor:
    """The weight by Hugging Face's name: model.layers.3.mlp.up_proj.weight is layers.3.feed_forward.w3.weight."""
    if hf_name.startswith("model.layers."):
        _, layers, i, rest = hf_name.split(".", 3)
        name = f"{layers}.{i}.{META[rest]}"
    else:
        name = META[hf_name]
    if name not in weights:
        raise ValueError(f"{folder}/consolidated.00.pth lacks {name}")
    return weights[name]


def _meta_reader(folder: Path) -> Callable[[str], torch.Tensor]:
    """A function from Hugging Face's name of a tensor to the tensor in their layout. Call read_config first."""
    weights, params = _meta_weights(folder), _read_json(folder / "params.json")
    head_dim = params["dim"] // params["n_heads"]

    def read(hf_name):
        weight = _meta_weight(folder, weights, hf_name)
        if not hf_name.endswith(("q_proj.weight", "k_proj.weight")):
            return weight
        if len(weight) % head_dim:
            raise ValueError(f"{folder}: the {len(weight)} rows of {hf_name} are no heads of {head_dim}")
        return de_interleaved(weight, head_dim)

    return read


def de_interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders the rows (H·D, C) of q or k: Meta's RoPE rotates rows 2i and 2i + 1 of a head, ours i and i + D/2."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


# ----------------------------------------------------------------------------------------------------------------------
# Out


def write_config(config: LlamaConfig, tokenizer: str, dtype: str) -> dict:
    """The content of config.json for a model; transformers ignores the name of the tokenizer."""
    rope_scaling = config.rope_scaling and {"rope_type": "llama3", **config.rope_scaling}
    # In our data a document begins behind the end of another. None: else transformers would take 1 and 2.
    end = 128001 if tokenizer == "llama3" else None
    with contextlib.suppress(OSError, ValueError):  # the tokenizer is not on this machine
        end = end_of_text(get_tokenizer(tokenizer))
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG.items()},
        "max_position_embeddings": config.block_size, "rope_theta": config.rope_theta, "rope_scaling": rope_scaling,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": dtype, "nanocria_tokenizer": tokenizer,
        "bos_token_id": end, "eos_token_id": end,
    }  # fmt: skip


def save(path: Path, folder: Path, dtype: str) -> None:
    """Writes a checkpoint, or a model in Meta's format, as a folder for transformers, which is complete or not there.

    Raises what the two load_model raise, and OSError if the folder cannot be written.
    """
    _safetensors()  # fails before the weights are read, as does a folder that cannot be written
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        if _is_meta(path):
            model = load_model(path, sys.maxsize, "cpu", getattr(torch, dtype))
            tokenizer, tokens = "llama3", LLAMA3_TOKENS
        else:
            model, tokens = checkpoint.load_model(path, "cpu", getattr(torch, dtype)), {}
            tokenizer = checkpoint.read_meta(path)["dataset"]["tokenizer"]
        _write(model, write_config(model.config, tokenizer, dtype) | tokens, partial)
        partial.rename(folder)
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(model: Llama, config_json: dict, folder: Path) -> None:
    """Writes a model into a folder for transformers, in files of at most FILE_BYTES."""
    safetensors, config = _safetensors(), model.config
    files, n_bytes = [{}], 0
    for name, parameter in model.named_parameters():
        names = hf_names(name)
        kv = config.n_kv_head * config.head_dim
        sizes = {1: len(parameter), 2: config.ffn_dim, 3: [config.n_embd, kv, kv]}[len(names)]
        for hf_name, part in zip(names, parameter.detach().split(sizes), strict=True):
            if n_bytes and n_bytes + part.nbytes > FILE_BYTES:
                files, n_bytes = [*files, {}], 0
            files[-1][hf_name], n_bytes = part, n_bytes + part.nbytes
    (folder / "config.json").write_text(json.dumps(config_json, indent=2))
    paths = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        paths = ["model.safetensors"]
    else:
        total = sum(part.nbytes for tensors in files for part in tensors.values())
        where = {name: file for file, tensors in zip(paths, files, strict=True) for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for file, tensors in zip(paths, files, strict=True):
        alone = {name: part.clone() for name, part in tensors.items()}  # safetensors takes no views of one tensor
        try:
            safetensors.torch.save_file(alone, folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # a full disk, for example
            raise OSError(f"{folder / file} cannot be written: {error}") from error
        del alone  # before the next file's are made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run (its newest checkpoint), a checkpoint or a folder from Meta")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the weights"
    )
    args = parser.parse_args()
    if os.path.lexists(args.folder):
        sys.exit(f"{args.folder} is there already: name a new folder")

    def write(path):
        save(path, args.folder, args.dtype)
        print(f'{path} in {args.dtype}: transformers.AutoModelForCausalLM.from_pretrained("{args.folder}")')

    if os.path.exists(args.run / "config.json"):
        sys.exit(f"{args.run} is in Hugging Face's format already: --init_from and sample.py read it as it is")
    try:
        write(args.run) if _is_meta(args.run) else run_folder.read_newest(args.run, write)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
