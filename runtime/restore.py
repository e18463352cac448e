"""Where a run starts: from its newest checkpoint, published weights, or random weights (scratch)."""

import contextlib
import json
import os
import shlex
import time
from pathlib import Path

import numpy as np

from data.loader import dataset_folder
from data.tokenizer import dataset_files, files_for_others, parse, published_templates, replace_files, tokenizer_of
from model import Llama, LlamaConfig
from runtime import run_folder
from runtime.checkpoint import open_base, read_base, read_weights
from runtime.checkpoint_folder import KEPT, Folder, check_sizes, fingerprint, open_folder, other_weights, read_document
from runtime.distributed import from_rank_0, print0, restart_count, stop
from runtime.hf_config import ADAPTED, read_config, write_adapter_config, write_config
from runtime.hf_names import OWN, hf_names
from runtime.safetensors_file import Damaged

REQUIRED = {"step", "updates", "sequences", "dtype", "loss_scale", "dataset", "settings"}  # in run.json
MODEL_SETTINGS = [name for name in LlamaConfig.__dataclass_fields__ if name != "block_size"]
STATE_SETTINGS = {  # a checkpoint's tensors depend on them; the defaults are for checkpoints that lack them
    "optimizer": "adamw", "optimizer_bits": 32, "galore_rank": 128, "lora_rank": 0, "lora_alpha": 32.0,
    "quantize_base": "none",
}  # fmt: skip
FORMER_SETTINGS = {"beta1": 0.9, "beta2": 0.95}  # of older versions, now constants
FORMER_GALORE_SETTINGS = {"galore_interval": 200, "galore_scale": 1.0}
NO_FOLDERS = ("auto", "scratch", "resume")  # as init_from
FOLLOWING = ("files", "script", "_documents", "_bytes", "_per_byte")  # of meta.json: the digests show changes
HARMLESS_SETTINGS = {  # these do not change what a run computes: a resume does not report them
    "out_dir", "init_from", "eval_interval", "eval_first", "eval_only", "eval_iters", "log_interval", "keep_last",
    "async_save", "profile", "wandb_log", "device", "compile", "cuda_graph",
    "offload", "offload_dir", "offload_activations", "activation_checkpointing", "mlp_chunks", "sharding",
    "sync_every_micro_batch", "copy_engines", "timeout",
}  # fmt: skip


def find_start(out_dir: str, init_from: str) -> Path | None:
    """The checkpoint to resume from, the folder of weights to start with, or None for scratch.

    Ends the run if what init_from asks for does not exist. Every rank must call it.
    """
    found = run_folder.newest_for_all_ranks(out_dir)
    if found:  # check_start() compares what init_from names with what that run began with
        if init_from == "scratch" and not restart_count:  # after torchrun's restart it is the same run
            stop(f"{found} is left from an earlier run: --init_from=resume continues it, or name another --out_dir")
        return found
    if init_from == "resume":
        stop(f"{out_dir} holds no checkpoint to resume: --init_from=scratch starts a new run")
    if init_from in NO_FOLDERS:
        return None
    if weights := _weights_in(init_from):
        return weights
    init_from = os.path.expanduser(init_from)
    lacks = "is not a folder"
    if os.path.isdir(init_from):
        if others := other_weights(Path(init_from)):
            stop(f"{init_from} holds {others}")
        lacks = "has no config.json"
    expected = "auto, scratch, resume, or a folder with Hugging Face's or Meta's weights"
    stop(f"{init_from!r} {lacks}: init_from is {expected}. To fetch one: hf download NAME --local-dir FOLDER")


def _weights_in(init_from: str) -> Path | None:
    """The weights that a folder holds: published ones, a checkpoint, or the newest checkpoint of a run; None if it has
    none. Every rank must call it.
    """
    path = Path(os.path.expanduser(init_from))
    if run_folder.is_model(path):
        return path
    return run_folder.newest_for_all_ranks(path) if os.path.isdir(path) else None


def model_settings(start: Path | None, init_from: str, named: set[str]) -> dict:
    """The model settings of find_start()'s result, except those in `named`, which check_start() compares. So a config
    for finetuning fits any Llama, and a resume needs no init_from. vocab_size comes from the dataset.

    Every rank must call it.
    """
    folder = init_from if init_from not in NO_FOLDERS else None
    for path in filter(None, (start, folder)):  # the folder serves if the checkpoint is damaged
        with contextlib.suppress(OSError, ValueError):  # check_start() or restore() will report what is wrong
            model, _ = read_config(open_folder(Path(path).expanduser()))
            return {name: model[name] for name in MODEL_SETTINGS if name in model.keys() - named - {"vocab_size"}}
    return {}


def check_start(start: Path | None, out_dir: str, config: LlamaConfig, settings: dict, dataset: dict) -> None:
    """End the run if its model or data do not match find_start()'s result. Every rank must call it.

    Call it before building the model. A damaged checkpoint of out_dir passes: restore() falls back to the previous one.
    """
    if start is None:
        if settings["lora_rank"]:
            stop("lora_rank has no weights to adapt: name a folder of published weights, --init_from=FOLDER")
        return
    resumes = _is_checkpoint_of(start, out_dir)
    try:
        folder = _open_checkpoint(start) if resumes else open_folder(start)
        _require_same_model(folder, resumes, config, settings, dataset)
        check_sizes(_base_of(folder, settings) or folder, read_config(folder)[0])
        if resumes:
            _require_same_start(folder, settings["init_from"])
    except (OSError, ValueError) as error:
        if not (isinstance(error, Damaged) and resumes):
            stop(str(error))


def _is_checkpoint_of(start, out_dir):
    return start.parent == Path(out_dir) and start.name.startswith("step_")


def _base_of(folder: Folder, settings) -> Folder | None:
    """The folder of the frozen weights, for a run that trains adapters and starts from `folder`; else None."""
    if not folder.adapter:
        return folder if settings["lora_rank"] else None
    named = None if settings["init_from"] in NO_FOLDERS else _weights_in(settings["init_from"])
    is_base = named is not None and not (named / "adapter_config.json").exists()
    return open_base(folder, named if is_base else None)


def _began_with(run: dict) -> dict:
    """What a run began with: init_from, a folder as an absolute path, and the fingerprint of its weights, None for
    random ones. A run.json of an older version has no fingerprint, and the init_from of the last command.
    """
    began_with = run.get("began_with")
    if isinstance(began_with, dict) and isinstance(began_with.get("init_from"), str):
        return began_with
    return {"init_from": str(run["settings"].get("init_from", "auto"))}


def _require_same_start(folder: Folder, init_from: str) -> None:
    """End the run if init_from names other weights than a checkpoint's run began with: they would not be read.

    The same are: the same path, whatever is there now; the same weights in another place; the base of its adapters.
    """
    if init_from in NO_FOLDERS:
        return
    began_with = _began_with(folder.run)
    source = began_with["init_from"]
    if source in ("auto", "resume") and "fingerprint" not in began_with:  # an older version does not say
        return
    if source not in NO_FOLDERS and _absolute(init_from) == _absolute(source):
        return
    known = {began_with.get("fingerprint"), folder.config.get("nanocria_base")} - {None}
    if _fingerprint_in(init_from) in known:
        return
    source = "random weights" if source in NO_FOLDERS else source
    ways = "--init_from=resume continues it, another --out_dir starts a new run"
    stop(f"{folder.path} is of a run that began with {source}, so {init_from} would not be read: {ways}")


def _fingerprint_in(init_from: str) -> str | None:
    """The fingerprint of the weights in a folder; None if there are none, or they cannot be read."""
    weights = _weights_in(init_from)
    with contextlib.suppress(OSError, ValueError):
        return fingerprint(open_folder(weights)) if weights else None
    return None


def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


def restore(start: Path | None, out_dir: str, model: Llama, optimizer, facts: dict) -> tuple[dict, dict[str, bytes]]:
    """Fill the optimizer and its model's weights from find_start()'s result, and print what that is.

    facts: what this run's run.json will contain: settings, dtype, versions and dataset (its meta.json). Returns the
    checkpoint's run.json, with "resume_seconds", or its equivalent for step 0, and the other files of a checkpoint:
    config.json and tokenizer files by name. Ends the run if the checkpoint or the weights belong to another model or
    tokenizer, or cannot be read. Every rank must call it.
    """
    try:
        if start is not None and _is_checkpoint_of(start, out_dir):
            return _resume(out_dir, model, optimizer, facts)
        folder = start and open_folder(start)
        base = folder and _base_of(folder, facts["settings"])
        if base:
            read_base(base, model, cpu_weights=optimizer.place.cpu_weights)
        if folder and folder is not base:
            own = tuple(f".{name}" for name in OWN)
            new = [name for name in optimizer.parameters if f".{name}".endswith(own)]
            new = [name for name in new if hf_names(name)[0] not in folder.tensors]
            if new:
                print0(f"begins    with random {', '.join(new)}: {folder.path} has none")
            held = {name: p for name, p in optimizer.parameters.items() if name not in new}
            read_weights(folder, held, model.config, optimizer.set_weight)
        if folder:
            print0(f"begins    with the weights of {start}")
        if base and base.run and run_folder.newest(base.path.parent):
            print0(f"          keep {base.path}, which its run may delete: the adapters are useless without it")
        if not folder and "train_targets" in facts["dataset"]:  # conversations
            print0("begins    with random weights: --init_from=FOLDER takes published ones")
        for name in optimizer.parameters if facts["settings"]["keep_last"] else ():
            hf_names(name)  # ValueError for a new parameter without a name: now, not at the first checkpoint
        init_from = facts["settings"]["init_from"]
        began_with = {"init_from": _absolute(init_from) if folder else init_from}
        began_with["fingerprint"] = folder and fingerprint(folder)
        begun = {"step": 0, "sequences": 0, "resume_seconds": None, "began_with": began_with}
        return begun, _documents_of(folder, base, model.config, facts)
    except (OSError, ValueError) as error:
        stop(str(error))


def documents(
    folder: Folder | None, config: LlamaConfig, tokenizer: str, dtype: str, dataset: dict, data: Path | None = None
) -> dict[str, bytes]:
    """config.json, generation_config.json and the tokenizer's files, by name. Every rank must call it.

    folder: the weights' source; dataset: meta.json of the data they were or are trained on, or {}; data: its folder.
    """

    def read():
        found = [name for name in KEPT if folder and (folder.path / name).exists()]
        pieces = (folder and folder.pieces) or {}
        found = {name: read_document(folder.path, name, pieces if name in pieces else None) for name in found}
        found = published_templates(folder.path, found) if folder else found
        found = replace_files(found, dataset_files(data, dataset)) if data else found
        if "tokenizer.json" not in found:
            with contextlib.suppress(OSError, ValueError, ImportError):  # the tokenizer is not on this machine
                found = tokenizer_of(data or folder.path).hf_files() | found
        if tokenizer == "llama3" and "tokenizer.json" in found:
            found.pop("tokenizer.model", None)  # llama.cpp's converter would take Meta's for a SentencePiece model
        return files_for_others(found, dataset, config_json["bos_token_id"])

    config_json = write_config(config, tokenizer, dtype, folder.config if folder else {}, dataset)
    found = from_rank_0(read)
    if "generation_config.json" in found and dataset.get("eos"):  # transformers prefers its eos
        generation = parse(found["generation_config.json"], Path("generation_config.json"))
        generation["eos_token_id"] = config_json["eos_token_id"]
        found["generation_config.json"] = json.dumps(generation, indent=2).encode()
    return found | {"config.json": json.dumps(config_json, indent=2).encode()}


def _documents_of(folder, base, config, facts):
    """documents(), and for a run that trains adapters the files that describe the adapters and their base."""
    settings, dataset = facts["settings"], facts["dataset"]
    data = dataset_folder(settings["dataset"])
    found = documents(folder, config, dataset["tokenizer"], facts["dtype"], dataset, data)
    if base:
        adapter = write_adapter_config(base.path, settings["lora_rank"], settings["lora_alpha"])
        found["adapter_config.json"] = json.dumps(adapter, indent=2).encode()
        # Not config.json: next to it transformers would expect a whole model.
        config_json = json.loads(found.pop("config.json")) | {"nanocria_base": fingerprint(base)}
        found[ADAPTED] = json.dumps(config_json, indent=2).encode()
    return found


def _resume(out_dir, model, optimizer, facts):
    """restore() from the newest undamaged checkpoint. Damaged ones are renamed."""
    began, settings = time.perf_counter(), facts["settings"]
    while True:
        path = run_folder.newest_for_all_ranks(out_dir)
        try:
            folder = _open_checkpoint(path)
            _require_same_model(folder, True, model.config, settings, facts["dataset"])
            if folder.run["step"] > settings["max_iters"] and not settings["eval_only"]:
                stop(f"{path} is beyond max_iters, {settings['max_iters']}: raise that, or name another --out_dir")
            base, tensors = _base_of(folder, settings), optimizer.tensors()
            _require_same_start(folder, settings["init_from"])
            others = _documents_of(folder, base, model.config, facts)
            read_weights(folder, optimizer.parameters, model.config, optimizer.set_weight, tensors)
            if base:
                read_base(base, model, cpu_weights=optimizer.place.cpu_weights)
            break
        except Damaged as error:
            if len(from_rank_0(lambda: run_folder.checkpoints(out_dir))) == 1:
                # It keeps its name, so that no new run starts in its folder.
                stop(f"{path} is damaged: {error}. There is no older one: move it away to start anew")
            print0(f"{path} is damaged: {error}. Falling back to the previous one")
            from_rank_0(lambda path=path: run_folder.mark_damaged(path))  # by now no rank is reading it
    optimizer.load_counters(folder.run)
    changed = _changes(folder.run, facts)
    print0(f"resumes   {path}" + (f" with {', '.join(changed)} changed" if changed else ""))
    if folder.run["step"] == settings["max_iters"] and not settings["eval_only"]:
        print0(
            "nothing left to train: a larger --max_iters trains on, another --out_dir starts a new run, "
            "--eval_only=true evaluates this one"
        )
    seconds = time.perf_counter() - began
    return folder.run | {"resume_seconds": seconds, "began_with": _began_with(folder.run)}, others


def _open_checkpoint(path: Path) -> Folder:
    folder = open_folder(path, ("model", "optimizer"))
    if folder.run is None:
        raise Damaged(f"{path / 'run.json'} is missing")
    missing = REQUIRED - folder.run.keys()
    if missing:
        raise ValueError(f"{path} is not a checkpoint of this version: its run.json lacks {', '.join(sorted(missing))}")
    if folder.run["step"] != int(path.name[5:]):
        raise ValueError(f"{path} holds step {folder.run['step']}: name it step_{folder.run['step']:06d} again")
    return folder


def _require_same_model(folder: Folder, resumes: bool, config, settings, dataset):
    model, tokenizer = read_config(folder)
    setting, known, rows = "out_dir" if resumes else "init_from", dataset["vocab_size"], model["vocab_size"]
    if tokenizer in (None, dataset["tokenizer"]) and known > rows:
        tokens = f"the data's tokenizer has {known:,} tokens, but {folder.path} has rows for {rows:,}"
        stop(f"{tokens}: prepare the data with the weights' own tokenizer, or give the weights more rows")
    if tokenizer is None:  # only the user can know
        tokenizer = dataset["tokenizer"]
        sentence = f"{folder.path} does not say its tokenizer, which must be the data's: {tokenizer}, {known:,} tokens"
        if config.vocab_size == known != rows:
            stop(f"{sentence}. If so, pass --vocab_size={rows}; else prepare the data with it")
        print0(sentence)
    if tokenizer != dataset["tokenizer"]:  # before vocab_size, which is the dataset's
        found = f"{settings['dataset']} holds {dataset['tokenizer']} tokens"
        prepare = f"prepare the data with --tokenizer {shlex.quote(str(folder.path))}, or change {setting}"
        stop(f"{folder.path} was trained on {tokenizer} tokens, {found}: {prepare}")
    was, now = model, {name: getattr(config, name) for name in MODEL_SETTINGS}
    if resumes and folder.run["settings"].get("optimizer") == "apollo":
        way = f"to go on with its weights and new states, pass --init_from={shlex.quote(str(folder.path))}"
        stop(f"{folder.path} has the states of APOLLO, which is no longer here: {way} and another out_dir")
    if resumes or folder.adapter:
        was |= _state_settings(folder.run["settings"])
        now |= {name: settings[name] for name in was if name in STATE_SETTINGS}

    def in_float32(value):  # a GGUF file holds 1e-5 as 9.9999997e-06
        return float(np.float32(value)) if isinstance(value, float) else value

    if not resumes and config.block_size > model["block_size"]:
        print0(
            f"block_size {config.block_size:,} exceeds the {model['block_size']:,} tokens of {folder.path}'s context"
        )
    differing = [name for name in was if name in now and in_float32(was[name]) != in_float32(now[name])]
    if differing:
        differences = ", ".join(f"{name} {was[name]} (this run: {now[name]})" for name in differing)
        flags = " ".join(shlex.quote(f"--{name}={was[name]}") for name in differing)
        command = f"python convert.py {shlex.quote(str(folder.path))} FOLDER, --init_from=FOLDER"
        merge = f". To begin with adapters and base merged: {command}"
        merge = merge if folder.adapter and "lora_rank" in differing else ""
        stop(f"{folder.path} has {differences}: pass {flags}, or change {setting}{merge}")


def _state_settings(settings: dict) -> dict:
    found = {name: settings.get(name, before) for name, before in STATE_SETTINGS.items()}
    unused = {"galore_rank"} if found["optimizer"] != "galore" else set()
    unused |= {"lora_alpha", "quantize_base"} if not found["lora_rank"] else set()
    return {name: value for name, value in found.items() if name not in unused}


def _changes(run: dict, facts: dict) -> list[str]:
    """What has changed since the checkpoint was saved and affects what the run computes."""
    was, settings = (STATE_SETTINGS | x["settings"] | {"dtype": x["dtype"]} for x in (run, facts))
    settings |= FORMER_SETTINGS
    if settings["optimizer"] == "galore":
        settings |= FORMER_GALORE_SETTINGS
    changed = [
        f"{name} {was.get(name)} -> {value}"
        for name, value in settings.items()
        if was.get(name, value) != value and name not in HARMLESS_SETTINGS  # absent in checkpoints older than it
    ]
    versions = run.get("versions") or {}
    changed += [
        f"{name} {versions[name]} -> {value}"
        for name, value in facts["versions"].items()
        if versions.get(name, value) != value
    ]
    return changed + [
        f"the dataset's {name} {run['dataset'].get(name)!s:.12} -> {value!s:.12}"  # the beginning of a digest
        for name, value in facts["dataset"].items()
        if run["dataset"].get(name, value) != value and not name.endswith(FOLLOWING)
    ]
