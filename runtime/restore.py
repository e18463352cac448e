"""What a run starts from: its newest checkpoint, published weights, or weights drawn at random (scratch)."""

import os
import shlex
import time
from pathlib import Path

import convert
from model import LlamaConfig
from runtime import checkpoint, run_folder
from runtime.distributed import print0, restart_count, stop

MODEL_SETTINGS = [name for name in LlamaConfig.__dataclass_fields__ if name != "block_size"]
STATE_SETTINGS = {"optimizer_bits": 32}  # which say what states a checkpoint holds; and what older ones had
HARMLESS_SETTINGS = {  # which do not change what a run computes: a resume does not mention them
    "out_dir", "init_from", "eval_interval", "eval_iters", "log_interval", "keep_last", "async_save", "profile",
    "wandb_log", "wandb_project", "wandb_run_name", "device", "compile", "cuda_graph", "offload", "offload_activations",
    "activation_checkpointing", "mlp_chunks", "sharding", "sync_every_micro_batch", "copy_engines", "timeout",
}  # fmt: skip


def find_start(out_dir: str, init_from: str) -> Path | None:
    """The checkpoint to resume from, the folder of published weights to start with, or None for scratch.

    Ends the run if init_from asks for what is not there. Every rank must call it.
    """
    found, init_from = run_folder.newest_for_all_ranks(out_dir), os.path.expanduser(init_from)
    if found:
        if init_from == "scratch" and not restart_count:  # after a restart by torchrun it is the same run
            stop(f"{found} is there from an earlier run: --init_from=resume continues it, or name another --out_dir")
        return found
    if init_from == "resume":
        stop(f"{out_dir} holds no checkpoint to resume: --init_from=scratch starts a new run")
    if init_from in ("auto", "scratch"):
        return None
    if not convert.holds_weights(init_from):
        lacks = "has no config.json" if os.path.isdir(init_from) else "is no folder"
        expected = "auto, scratch, resume, or a folder with Hugging Face's or Meta's weights"
        stop(f"{init_from!r} {lacks}: init_from is {expected}")
    return Path(init_from)


def restore(
    start: Path | None, out_dir: str, optimizer, config: LlamaConfig, settings: dict, dtype: str, dataset: dict
) -> tuple[int, dict | None, list[str]]:
    """Fill the optimizer and its model's weights from find_start()'s answer.

    settings: the run's; dataset: the meta.json of its data. Returns the first step, the checkpoint's meta.json (None
    without one; "resume_seconds" added) and sentences to print. Ends the run if the checkpoint or the published weights
    are of another model, of another tokenizer, or cannot be read. Every rank must call it.
    """
    try:
        if start is None:
            return 0, None, []
        if start.parent != Path(out_dir) or not start.name.startswith("step_"):
            return 0, None, _load_published(start, optimizer, config, settings, dataset)
        return _resume(out_dir, optimizer, config, settings, dtype, dataset)
    except (OSError, ValueError) as error:
        stop(str(error))


def _load_published(folder, optimizer, config, settings, dataset) -> list[str]:
    model, tokenizer = convert.read_config(folder)
    if tokenizer is None:  # only the user can know
        tokenizer, known = dataset["tokenizer"], dataset["vocab_size"]
        sentence = f"{folder} does not say its tokenizer, which must be the data's: {tokenizer}, {known:,} tokens"
        if config.vocab_size == known != model["vocab_size"]:
            stop(f"{sentence}. If so, pass --vocab_size={model['vocab_size']}; else prepare the data with it")
        print0(sentence)
    _require_same_model(folder, model, tokenizer, config, settings, dataset, "init_from")
    convert.load(folder, optimizer)
    return [f"begins    with the weights of {folder}"]


def _resume(out_dir, optimizer, config, settings, dtype, dataset):
    began = time.perf_counter()

    def check(path, meta):
        tokenizer = meta["dataset"]["tokenizer"]
        _require_same_model(path, meta["model"], tokenizer, config, settings, dataset, "out_dir")
        now = {name: settings[name] for name in STATE_SETTINGS}
        _require_same_settings(path, STATE_SETTINGS | meta["settings"], now, "out_dir")

    path, meta, damaged = checkpoint.load_newest(out_dir, optimizer, check)
    changed = _changes(meta, settings | {"dtype": dtype}, dataset)
    sentences = [f"{sentence}. Going back to {path}" for sentence in damaged]
    sentences.append(f"resumes   {path}" + (f" with {', '.join(changed)} changed" if changed else ""))
    return meta["step"], meta | {"resume_seconds": time.perf_counter() - began}, sentences


def _require_same_model(path, model: dict, tokenizer: str, config, settings, dataset, setting: str):
    """End the run if a folder's model or tokenizer is not this run's. setting: the one that names the folder."""
    # A setting that is newer than the checkpoint had the effect of its default.
    model = {name: field.default for name, field in LlamaConfig.__dataclass_fields__.items()} | model
    _require_same_settings(path, model, {name: getattr(config, name) for name in MODEL_SETTINGS}, setting)
    if tokenizer != dataset["tokenizer"]:
        found = f"{path} was trained on {tokenizer} tokens, {settings['dataset']} holds {dataset['tokenizer']} tokens"
        stop(f"{found}: change dataset or {setting}")


def _require_same_settings(path, was: dict, now: dict, setting: str):
    differing = [name for name in now if was[name] != now[name]]
    if differing:
        differences = ", ".join(f"{name} {was[name]} (this run: {now[name]})" for name in differing)
        flags = " ".join(shlex.quote(f"--{name}={was[name]}") for name in differing)
        stop(f"{path} has {differences}: pass {flags}, or change {setting}")


def _changes(meta: dict, settings: dict, dataset: dict) -> list[str]:
    """What differs from when the checkpoint was saved, and changes what the run computes."""
    older = {"mask_documents": False} | STATE_SETTINGS  # what a checkpoint without them was trained with
    was = older | meta["settings"] | {"dtype": meta["dtype"]}
    changed = [
        f"{name} {was.get(name)} -> {value}"
        for name, value in settings.items()
        if was.get(name) != value and name not in HARMLESS_SETTINGS
    ]
    init_from = settings["init_from"]
    if init_from not in ("auto", "scratch", "resume", was["init_from"]):
        changed.append(f"init_from {was['init_from']} -> {init_from} (not read: the run has begun)")
    return changed + [
        f"the dataset's {name} {meta['dataset'].get(name)} -> {value}"
        for name, value in dataset.items()
        if meta["dataset"].get(name, value) != value and name not in ("files", "script")
    ]
