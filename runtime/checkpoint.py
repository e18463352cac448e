"""A checkpoint is a Hugging Face folder; here checkpoints, and folders that others published, are read.

    model = load_model("out/mine")                   # the whole model on one device: for sample.py, for a notebook
    folder = open_folder(path)                       # what a folder holds, the same on all ranks; reads nothing large
    verify(folder)                                   # that it is what was saved
    read_weights(folder, parameters, config, put)    # this rank's rows of each weight, and of the optimizer's states

    config.json, tokenizer files                 in Hugging Face's format
    model.safetensors, and its index             the weights in the compute dtype, under Hugging Face's names
    optimizer.safetensors                        masters' lower halves, moments, whatever the update rule defines
    run.json                                     step, settings, ...; a SHA-256 of each GiB of a file, and of itself

A run that trains adapters writes peft's adapter_model.safetensors and adapter_config.json instead of model.safetensors,
and base_config.json instead of config.json. The base weights stay where they are: adapter_config.json has their path.
Others publish weights in several files, which the index names.

The safetensors package maps a file into memory and hands out the rows that are asked for, so no rank ever holds a whole
file. Nothing is unpickled: reading a folder executes no code from it. save.py writes checkpoints.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from data.files import how_to_fetch, read_json, refuse_lfs_pointer
from data.loader import dataset_parts
from data.meta import check_meta
from data.tokenizer import published_name
from kernels import LoRALinear
from kernels.adamw import merge_halves
from lora import add_lora
from model import Llama, LlamaConfig, fill
from runtime.distributed import (
    from_all_ranks,
    from_rank_0,
    group_rank,
    group_size,
    local,
    local_world_size,
    on_all_ranks,
    progress,
)
from runtime.hf import BASE_CONFIG, Rows, hf_names, hf_rows, model_type, read_config

WEIGHT_DTYPES = ("BF16", "F16", "F32")  # of published weights
PIECE_BYTES = 2**30  # of a file, with a digest of its own: ranks and threads share the work, 0.6 s a GB
CHUNK_BYTES = 2**22  # read and hashed at a time
HASH_THREADS = max(1, min(4, (os.cpu_count() or 1) // local_world_size))
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Damaged(ValueError):
    """A file is not what was saved, or violates its format."""


class TensorInfo(NamedTuple):
    file: str
    name: str  # in the file
    dtype: str  # in the format's words
    shape: tuple[int, ...]


class Folder(NamedTuple):
    """What a folder holds, the same on all ranks."""

    path: Path
    run: dict | None  # run.json; None in a published folder
    config: dict  # config.json, or for adapters base_config.json
    tensors: dict[str, TensorInfo]  # by name
    adapter: dict | None = None  # adapter_config.json, if the tensors of "model" are adapters
    resume_seconds: float | None = None  # to find it and compare its digests, for a resume


# ----------------------------------------------------------------------------------------------------------------------
# Which folder


def is_model(folder: Path) -> bool:
    """True if a folder is a checkpoint or holds published weights, even if a file is missing."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    return any((folder / name).exists() for name in ("config.json", "params.json", "run.json", BASE_CONFIG, *weights))


def is_meta(folder: Path) -> bool:
    """True if a folder holds weights in Meta's own format, which only convert.py reads."""
    return (folder / "params.json").exists() and not (folder / "config.json").exists()


def checkpoints(out_dir: str | Path) -> list[Path]:
    """The complete checkpoints of out_dir, oldest first."""
    paths = [path for path in Path(out_dir).glob("step_*") if path.name[5:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def newest(out_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step in out_dir, as this rank sees it."""
    return next(reversed(checkpoints(out_dir)), None)


def best_of(paths: list[Path]) -> Path | None:
    """The checkpoint of the lowest loss on the newest one's validation data, by run.json. None if there is no loss.

    Other data, shares of a mix or blocks have another loss with the same weights.
    """
    losses = {}
    data = None
    for path in reversed(paths):
        with contextlib.suppress(OSError, ValueError):  # damaged
            run = read_run(path) or {}
            if run.get("val_loss") is None:  # a signal interrupted the evaluation
                continue
            shares = list(dataset_parts(run["settings"]["dataset"]).values())
            evaluated = run["dataset"].get("val_sha256"), shares, run["settings"]["block_size"]
            data = data or evaluated
            if evaluated == data:
                losses[path] = run["val_loss"]
    return min(losses, key=losses.get, default=None)


def newest_model(run: Path) -> Path:
    """The newest checkpoint of a run, or `run` itself if it is a checkpoint or published. ValueError without one."""
    if is_model(run):
        return run
    path = newest(run)
    if path is None:
        expected = "a run with a checkpoint, or Hugging Face's config.json and .safetensors"
        raise ValueError(f"{run} holds no weights: expected {expected}. {how_to_fetch(run)}")
    return path


# ----------------------------------------------------------------------------------------------------------------------
# Files and digests


def read_undamaged_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a small file, on this rank. Damaged if it is missing, huge or anything else."""
    require_file(path)
    try:
        return read_json(path)
    except ValueError as error:
        raise Damaged(str(error)) from error


def piece_ends(path: Path) -> list[int]:
    """At which byte each piece of a file ends."""
    n_bytes = path.stat().st_size
    return [*range(PIECE_BYTES, n_bytes, PIECE_BYTES), n_bytes]


def digests_of(
    folder: Path, ends: dict[str, list[int]], group: dist.ProcessGroup | None = None
) -> dict[str, list[str]]:
    """The SHA-256 of each piece of these files of a folder, as "1073741824 9f86d0...": where it ends, and the digest.
    Every rank must call it: they share the work. Raises OSError, on all ranks, if one cannot read. ends: by file.
    """
    pieces = [(file, begin, end) for file, of_file in ends.items() for begin, end in pairwise([0, *of_file])]
    mine = pieces[group_rank(group) :: group_size(group)]

    def digest(piece):
        name, begin, end = piece
        sha256 = hashlib.sha256()
        with open(folder / name, "rb", buffering=0) as file:
            file.seek(begin)
            while chunk := file.read(min(CHUNK_BYTES, end - file.tell())):
                sha256.update(chunk)
            if end == ends[name][-1]:
                sha256.update(file.read(1))  # there is none, unless the file has grown
        return f"{end} {sha256.hexdigest()}"

    def digest_mine():
        with ThreadPoolExecutor(HASH_THREADS) as threads:  # hashing releases the GIL
            return list(zip(mine, threads.map(digest, mine), strict=True))

    digests = dict(chain(*from_all_ranks(on_all_ranks(digest_mine, group), group)))  # by piece
    return {file: [digests[piece] for piece in pieces if piece[0] == file] for file in ends}


def digest_of_run(run: dict) -> str:
    """The SHA-256 of run.json before its last entry, which is this."""
    before_the_brace = json.dumps(run, indent=2).removesuffix("\n}")  # the digest is added there
    return hashlib.sha256(before_the_brace.encode()).hexdigest()


def read_run(path: Path) -> dict | None:
    """Read a folder's run.json, on this rank; None if there is none. Damaged if it is not what was saved."""
    if not (path / "run.json").exists():
        return None
    run = read_undamaged_json(path / "run.json")
    if run.pop("digest", None) != digest_of_run(run):
        raise Damaged(f"{path / 'run.json'} is not what was saved")
    if run.get("dataset"):
        run["dataset"] = check_meta(run["dataset"], path / "run.json")
    return run


def verify(folder: Folder) -> None:
    """Compare the files of a checkpoint with run.json's digests. Every rank must call it: they share the work.

    Raises Damaged, on all ranks, if one differs, or is missing on rank 0; OSError if a rank cannot read one: a network
    file system may show it a new folder late. A published folder has no digests.
    """
    if folder.run is None:
        return
    saved = folder.run["digests"]
    # Tensors that were not asked for may be gone, and the user may edit the path of the base.
    others = {file for file in saved if not file.startswith("optimizer") and not file.endswith(".safetensors")}
    files = {info.file for info in folder.tensors.values()} | others - {"adapter_config.json"}
    from_rank_0(lambda: [require_file(folder.path / file) for file in sorted(files)])
    ends = {file: [int(entry.split()[0]) for entry in saved.get(file, [])] for file in sorted(files)}
    for file, digests in digests_of(folder.path, ends).items():
        if digests != saved.get(file):
            raise Damaged(f"{folder.path / file} is not what was saved")


def require_file(path: Path) -> None:
    if not path.is_file():
        raise Damaged(f"{path} is missing: copy or fetch the whole folder")


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def open_folder(path: Path, optimizer: bool = False) -> Folder:
    """Read and check all but the tensors, on rank 0. Every rank must call it. optimizer: find its tensors, too.

    Raises, on all ranks, Damaged if a file is missing, truncated, not what was saved or malformed; OSError if one
    cannot be read.
    """
    return from_rank_0(lambda: _open_folder(Path(path), optimizer))


def _open_folder(path, optimizer):
    if is_meta(path):
        raise ValueError(f"{path} holds Meta's own files: python convert.py {path} NEW makes a folder that is read")
    run = read_run(path)
    adapted = run is not None and BASE_CONFIG in run["digests"]
    config = read_undamaged_json(path / (BASE_CONFIG if adapted else "config.json"))
    if not adapted and (path / "adapter_config.json").exists():  # transformers would add them to the weights
        raise ValueError(f"{path} has an adapter_config.json beside its weights. {how_to_fetch(path)}, or move it away")
    adapter = read_undamaged_json(path / "adapter_config.json") if adapted else None  # the base's path may be edited
    if run is None or "nanocria_tokenizer" not in config:  # others may have changed what nanocria wrote
        config["nanocria_tokenizer"] = published_name(path, config.get("nanocria_tokenizer"))
    tensors = _tensors_of(path, "adapter_model" if adapted else "model")
    if optimizer:
        tensors |= _tensors_of(path, "optimizer")
    for name, info in tensors.items():
        if run is None and info.dtype not in WEIGHT_DTYPES and not info.file.startswith("optimizer"):
            raise ValueError(f"{path} has {name} in {info.dtype}: expected one of {', '.join(WEIGHT_DTYPES)}")
    if config.get("tie_word_embeddings") and HEAD in tensors:
        if EMBEDDING not in tensors:  # some keep that name
            tensors[EMBEDDING] = tensors[HEAD]
        elif not _hold_the_same(path, tensors[HEAD], tensors[EMBEDDING]):  # its own, trained after all
            has = f"an {HEAD} that is not its {EMBEDDING}, but config.json ties them"
            raise ValueError(f"{path} has {has}: set tie_word_embeddings to false there")
        del tensors[HEAD]
    return Folder(path, run, config, tensors, adapter)


def _tensors_of(path, stem):
    """The tensors of one file or, without it, of all files that the index names. As in transformers, an index beside a
    whole file does not count.
    """
    whole = f"{stem}.safetensors"
    index = path / f"{whole}.index.json"
    if (path / whole).exists():
        return _tensors_in(path, whole)
    if not index.exists():
        advice = f": only whole models in .safetensors are read. {how_to_fetch(path)}" if stem == "model" else ""
        raise Damaged(f"{path / whole} is missing{advice}")
    file_of = read_undamaged_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(map(_is_file_name, file_of.values())):
        raise Damaged(f"{index} has no weight_map from tensor names to file names")
    in_file = {file: _tensors_in(path, file) for file in sorted(set(file_of.values()))}
    lost = [name for name, file in file_of.items() if name not in in_file[file]]
    if lost:
        raise Damaged(f"{index} says that {min(lost)!r:.200} is in {file_of[min(lost)]}, but it is not")
    return {name: in_file[file][name] for name, file in file_of.items()}


def _is_file_name(name):
    return isinstance(name, str) and name == os.path.basename(name)  # no file of another folder


def _open_tensors(path):
    require_file(path)
    with open(path, "rb") as file:  # an OSError says why it cannot be opened, the package's does not
        refuse_lfs_pointer(file.read(100), path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise Damaged(f"{path} is damaged, or not a safetensors file: {error!s:.200}") from error


def _tensors_in(path, file):
    opened = _open_tensors(path / file)
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    return {name: TensorInfo(file, name, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}


def _hold_the_same(path, *infos):
    one, other = (_open_tensors(path / info.file).get_slice(info.name)[:] for info in infos)
    return torch.equal(one, other.to(one.dtype))


def find_tensor(folder: Folder, name: str, shape: tuple[int, ...]) -> TensorInfo:
    """Where a tensor is. ValueError if the folder has none of this shape."""
    info = folder.tensors.get(name)
    if info is None or info.shape != tuple(shape):
        found = f"shape {info.shape}" if info else "none"
        raise ValueError(f"expected {name} of shape {tuple(shape)}: {folder.path} has {found}")
    return info


def check_sizes(folder: Folder, config: LlamaConfig) -> None:
    """Raise ValueError if the weights of a folder are not of the sizes in its config.json. A model of these sizes could
    take any amount of memory: call it before building one. config: read_config's.
    """
    last_layer = f"model.layers.{config.n_layer - 1}"
    find_tensor(folder, EMBEDDING, (config.vocab_size, config.n_embd))
    gate = (config.ffn_dim, config.n_embd)
    in_last_layer = {"input_layernorm.weight": (config.n_embd,), "mlp.gate_proj.weight": gate}
    for name, shape in in_last_layer.items():
        if model_type() == "llama" or f"{last_layer}.{name}" in folder.tensors:  # a changed model may have others
            find_tensor(folder, f"{last_layer}.{name}", shape)


@torch.no_grad()
def read_rows(folder: Folder, rows: Rows) -> None:
    """Fill these rows, on any device and on this rank, from a folder, rounding at most once.

    The file is mapped for this tensor alone: pages that were read count as the process's memory until it is unmapped.
    Raises ValueError if the folder lacks the tensor, or has it in another shape or kind of numbers.
    """
    info = find_tensor(folder, rows.name, rows.whole_shape)
    x = rows.tensor
    if len(x) == 0:
        return
    saved = _open_tensors(folder.path / info.file).get_slice(info.name)[rows.first : rows.first + len(x)]
    if x.dtype != saved.dtype and not (x.is_floating_point() and saved.is_floating_point()):
        raise ValueError(f"{folder.path} has {rows.name} in {saved.dtype}: expected {x.dtype}")
    x.copy_(saved)


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def read_weights(
    folder: Folder, parameters: dict[str, nn.Parameter], config: LlamaConfig, put: Callable,
    tensors: dict | None = None,
) -> None:  # fmt: skip
    """Call put(name, rows) with this rank's float32 rows, on the CPU, of each parameter; fill the states too.

    tensors: Optimizer.tensors(). Every rank must call it. It needs memory for the rank's rows of one parameter at a
    time. Raises, on all ranks, Damaged, OSError, or ValueError if the folder lacks tensors or has more of them.
    """
    states = [
        rows
        for (name, state), x in (tensors or {}).items()
        if state not in ("", "lower_half")
        for rows in hf_rows(name, x, config, state)
    ]
    names = {hf_name for name in parameters for hf_name in hf_names(name)}
    _refuse_unknown(folder, names | {rows.name for rows in states}, reads_states=tensors is not None)
    # How the folder keeps the float32 masters: the lower halves of bfloat16 weights' ("lower_half"), whole beside
    # float16 weights ("master"), or as the weights themselves (""). Every weight must have it.
    prefixes = {name.partition(".")[0] for name in folder.tensors}
    master = next((prefix for prefix in ("lower_half", "master") if prefix in prefixes), "")

    def read_as(dtype, name, state=""):
        x = torch.empty_like(parameters[name], dtype=dtype, device="cpu").detach()
        for rows in hf_rows(name, x, config, state):
            read_rows(folder, rows)
        return local(x)

    def fill_all():
        for name in progress(list(parameters), f"reading {folder.path}"):
            if master == "lower_half":
                weight = merge_halves(read_as(torch.bfloat16, name), read_as(torch.int16, name, master))
            else:
                weight = read_as(torch.float32, name, master)
            put(name, weight)
        for rows in states:
            read_rows(folder, rows)

    on_all_ranks(fill_all)


def _refuse_unknown(folder, known: set[str], reads_states: bool) -> None:
    """ValueError if the folder has tensors that would not be read: the model computes something else."""
    unknown = [
        name
        for name, info in folder.tensors.items()
        if name not in known and not name.startswith(("lower_half.", "master."))
        if not name.endswith("rotary_emb.inv_freq")  # older files have what config.json says, too
        if reads_states or not info.file.startswith("optimizer")
    ]
    if unknown:
        raise ValueError(f"{folder.path} has {len(unknown)} tensors that the model does not have: {min(unknown)}, ...")


def open_base(folder: Folder) -> Folder:
    """The folder of the base weights of a checkpoint of adapters. Every rank must call it.

    It is where adapter_config.json says. ValueError if it is gone.
    """
    path = Path(folder.adapter["base_model_name_or_path"]).expanduser()
    advice = f"set base_model_name_or_path in {folder.path / 'adapter_config.json'} to the folder of their base"
    if not is_model(path):
        raise ValueError(f"{folder.path} has adapters of the weights in {path}, which are not there: {advice}")
    base = open_folder(path)
    verify(base)
    return base


def read_base(
    folder: Folder, model: Llama, dtype: torch.dtype | None = None, cpu_weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Fill the frozen weights of a model with adapters from a folder. Every rank must call it. Raises ValueError,
    OSError. dtype: the dtype to quantize from, in which the adapters were trained; None: the model's.
    cpu_weights: where streamed weights are kept.

    For NF4 and float8 each rank quantizes the whole projections one at a time and keeps its rows: so the bits are those
    of a single rank, and no device ever holds more than one whole projection of the base.
    """
    adapted = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    packed = {name: m for name, m in adapted.items() if len(m.frozen) > 1}
    parts = {f"{name.removesuffix('weight')}{part}" for name, m in packed.items() for part in m.frozen}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and name not in parts}

    def put(name, weight):
        if name not in packed:
            local((cpu_weights or frozen)[name].detach()).copy_(weight)
            return
        projection = packed[name]
        parts = projection.quantize(weight.to(local(projection.weight).device, dtype or projection.lora_a.dtype))
        for parameter, part in zip(projection.tensors()[:-2], parts, strict=True):
            fill(parameter, part.view(parameter.shape))

    whole = {name: torch.empty(m.out_features, m.in_features, device="meta") for name, m in packed.items()}
    read_weights(folder, frozen | whole, model.config, put)


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """Load the model of a run's newest checkpoint, of one checkpoint or of published weights, whole, on one device.

    In float32 the weights are the master weights, unless the checkpoint's optimizer files were deleted. A checkpoint of
    adapters gives the model with its adapters (to merge them: lora.merge_lora) on the frozen weights in NF4, if the run
    had them so, else in dtype, even after training with fp8.
    Raises ValueError if there is no model, or if it is damaged, of another architecture or beyond float16's range;
    OSError if it cannot be read now.
    """
    path = newest_model(Path(path))
    masters = dtype == torch.float32 and any(path.glob("optimizer*.safetensors"))  # which may be deleted to save room
    folder = open_folder(path, optimizer=masters)
    verify(folder)
    config, _ = read_config(folder)
    base = open_base(folder) if folder.adapter else None
    check_sizes(base or folder, config)
    with torch.device("meta"):
        model = Llama(config).to(dtype)
        if folder.adapter:
            run = folder.run["settings"]
            add_lora(model, run["lora_rank"], run["lora_alpha"], run["quantize_base"])
    model.to_empty(device=device)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if base:
        read_base(base, model, dtype=getattr(torch, folder.run["dtype"]))
    read_weights(folder, parameters, model.config, lambda name, weight: parameters[name].detach().copy_(weight))
    for name, p in model.named_parameters():
        if p.dtype == torch.float16 and not torch.stack(p.aminmax()).isfinite().all():
            raise ValueError(f"{path} has numbers in {name} that float16 cannot hold: use bfloat16 or float32")
    return model
