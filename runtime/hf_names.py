"""Hugging Face's names and matrices for our parameters, and this rank's rows of them.

Our model packs q, k, v in one parameter and gate, up in another (LlamaConfig.packed_rows); Hugging Face publishes each
by itself. FSDP gives a rank some rows of a parameter, so some rows of some of the matrices. Optimizer states with as
many rows as their parameter are split alike, and named exp_avg.model.layers.0.self_attn.q_proj.weight. Adapters have
peft's names.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from model import LlamaConfig

NAMES = {  # our name, without the layer -> Hugging Face's names of the matrices packed in it
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
PUBLISHED = {name for names in NAMES.values() for name in names}
PUBLISHED |= {name.replace("weight", "bias") for name in PUBLISHED if "_proj" in name}
ADAPTERS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # our name -> peft's
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # torch.compile's, DDP's, ...


class Rows(NamedTuple):
    """This rank's share of one tensor in a file: the rows from `first` on, or none."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
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
    if rest in OWN & PUBLISHED - NAMES.keys():
        raise ValueError(f"{name} would be another parameter in Hugging Face's Llama: rename it in model.py and in OWN")
    if rest not in NAMES.keys() | OWN:
        raise ValueError(f"{name} has no name in Hugging Face's Llama: add it to OWN in runtime/hf_names.py")
    return [f"model.layers.{i}.{hf_name}" if i else hf_name for hf_name in NAMES.get(rest, [rest])]


def unwrapped_names(names: Iterable[str], path: Path) -> dict[str, str]:
    """{the name in the model: the name in the file} for parameters of which some modules, or all, were wrapped.

    Raises ValueError if two names become one. path: of the file or folder.
    """
    found = {}
    for name in names:
        inner = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if inner in found:
            raise ValueError(f"{path} has both {found[inner]!r:.200} and {name!r:.200}: keep one of them")
        found[inner] = name
    return found


def rows_of(x: torch.Tensor) -> tuple[int, torch.Tensor, bool]:
    """This rank's part of x, as (first row, rows, True if this rank is the one to write them).

    FSDP splits the first dimension as torch.chunk does: into parts of n / ranks rows, rounded up; the last are shorter
    or empty. Hybrid sharding has a replica of all rows on each machine: the first machine writes.
    """
    if not isinstance(x, DTensor):
        return 0, x.detach(), not dist.is_initialized() or dist.get_rank() == 0
    if set(x.placements) - {Shard(0), Replicate()} or x.placements.count(Shard(0)) > 1:
        raise ValueError(f"a tensor is placed as {x.placements}: expected rows split over one mesh dimension")
    first = 0
    writes = True
    mesh = x.device_mesh
    for placement, size, coordinate in zip(x.placements, mesh.shape, mesh.get_coordinate(), strict=True):
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
    found = []
    start = 0  # of each matrix in x
    for hf_name, size in zip(names, sizes, strict=True):
        first = max(begin, start)
        last = min(end, start + size)
        full_name = f"{state}.{hf_name}" if state else hf_name
        part = Rows(full_name, x.dtype, (size, *x.shape[1:]), 0, rows[:0], writes)
        if first < last:
            part = part._replace(first=first - start, tensor=rows[first - begin : last - begin])
        found.append(part)
        start += size
    return found
