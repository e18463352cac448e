"""What train.py would do with its settings, without running it: the model, and the shape of a run on one rank."""

import functools
import math
import os
import shlex
from dataclasses import replace
from types import SimpleNamespace

import torch

from benchmarks.arms import SWEEP_FLAGS
from benchmarks.cli import TRAIN
from benchmarks.record import ROOT
from configurator import SettingError, preview
from kernels.fp8_linear import use_fp8
from model import Llama, LlamaConfig
from runtime import memory, memory_advice
from runtime.check_settings import find_problem
from runtime.memory import GIB, RunShape
from runtime.recompute import recompute

MODEL = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim", "vocab_size", "tie_embeddings")


def resolve(path: str, world_size: int, named: dict, flags=()) -> tuple[LlamaConfig, RunShape]:
    """The model of a config file and what a rank of one host does with it, under settings of train.py.

    named: by name; flags: as on a command line, which win. SettingError if train.py would not take them.
    """
    there = ROOT / path if (ROOT / path).is_file() else path
    words = str(there), *(f"--{name}={value}" for name, value in named.items()), *flags
    said = dict(_preview(words, os.path.getmtime(there) if os.path.exists(there) else 0))
    if said["vocab_size"] is None:
        raise SettingError(f"{path} leaves vocab_size to its dataset: say -- --vocab_size=...")
    problem = find_problem(said, world_size)
    if problem:
        raise SettingError(problem)
    one_host = world_size if world_size <= 8 else math.gcd(world_size, 8)  # of 8 GPUs
    shard_ranks = one_host if said["sharding"] == "hybrid" else world_size
    if said["copy_engines"] and world_size > 1 and (shard_ranks == 1 or said["offload"] == "all"):
        raise SettingError("copy_engines needs a model's GPUs on one host, and no offload=all")
    said |= {
        "dtype": "bfloat16" if said["dtype"] == "auto" else said["dtype"],
        "copy_engines": said["copy_engines"] is not False,
        "world_size": world_size,
        "shard_ranks": shard_ranks,
        "micro_steps": said["gradient_accumulation_steps"] // world_size,
    }
    config, shape = ({name: said[name] for name in kind.__dataclass_fields__} for kind in (LlamaConfig, RunShape))
    try:
        config, shape = LlamaConfig(**config), RunShape(**shape)
        with torch.device("meta"):
            model = Llama(replace(config, n_layer=1))
        model.set_operations(shape.fused_kernels, shape.fused_loss, shape.attention)
        if shape.fp8:
            use_fp8(model)
        recompute(model, shape.activation_checkpointing, shape.mlp_chunks, shape.offload_activations)
    except ValueError as error:
        raise SettingError(str(error)) from None
    return config, shape


def cpu_gib(config: LlamaConfig, shape: RunShape) -> float:
    """Pinned CPU memory of all ranks."""
    return shape.world_size * sum(part.bytes for part in memory_advice.cpu_parts(config, shape)) / GIB


@functools.cache
def _preview(words: tuple[str, ...], changed: float) -> dict:
    """train.py's settings; read once, for a table asks for the same ones again and again."""
    return preview(TRAIN, list(words))


def run_of(row: dict) -> tuple[LlamaConfig, RunShape]:
    """Of a row of a sweep. Of a peer only the model is right."""
    if row["arm"] not in SWEEP_FLAGS:
        return resolve(row["config"], 1, {"sharding": "zero3"})
    named = {"block_size": row["block"], "batch_size": row["batch"], "offload": row["offload"]}
    named |= {"gradient_accumulation_steps": row["ranks"], "activation_checkpointing": row["checkpointing"]}
    return resolve(row["config"], row["ranks"], named, [*SWEEP_FLAGS[row["arm"]], *shlex.split(row["flags"])])


def cpu_gib_of(row: dict) -> float:
    """What all ranks of a row hold in the CPU's memory: a peer's FSDP2 float32 weights, gradients and two moments."""
    config, shape = run_of(row)
    if row["arm"] in SWEEP_FLAGS:
        return cpu_gib(config, shape)
    block, root = memory.n_params(config)
    return 16 * (root + config.n_layer * block) / GIB if row["offload"] == "all" else 0.0


def refuse_model(s: SimpleNamespace) -> None:
    """SettingError for another model: what stands behind -- is for ours alone, and a peer's model is the config's."""
    found = [flag for flag in s.flags if flag.removeprefix("--").partition("=")[0] in MODEL]
    if found and s.peers != ["none"]:
        raise SettingError(
            f"{found[0]}: the peers would train another model; write it in a config, or say --peers=none"
        )
