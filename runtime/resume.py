"""Where a run starts: from its newest checkpoint, from published weights, or from random weights (scratch).

    lock_file = claim(out_dir)                                    # one run at a time, one folder for all ranks
    start = find_start(out_dir, init_from, eval_only)             # a checkpoint, a folder of weights, or None: open
    check_start(start, config, settings, dataset)                 # before the model is built
    began_with, resume_seconds, hf_files = restore(start, model, optimizer, train_data, run_info)

Each ends the run with a sentence if it cannot go on. Every rank must call them.
"""

import os
import shlex
import time
from pathlib import Path
from typing import TextIO

from data.files import how_to_fetch
from data.loader import Blocks
from model import Llama, LlamaConfig
from runtime.checkpoint import (
    Damaged,
    Folder,
    check_sizes,
    checkpoints,
    newest_model,
    open_base,
    open_folder,
    read_base,
    read_weights,
    verify,
)
from runtime.distributed import (
    all_reduce_max,
    from_rank_0,
    on_all_ranks,
    print0,
    rank,
    require_same_on_all_ranks,
    restart_count,
    stop,
    stop_on_error,
)
from runtime.hf import OWN, adapter_files, hf_files, hf_names, read_config
from runtime.save import lock_out_dir, mark_damaged

MODEL_SETTINGS = [name for name in LlamaConfig.__dataclass_fields__ if name != "block_size"]
ADAPTER_SETTINGS = ("lora_rank", "lora_alpha", "quantize_base")
STATE_SETTINGS = ("optimizer", "optimizer_bits", "galore_rank", *ADAPTER_SETTINGS)  # a checkpoint's tensors depend on
NO_FOLDERS = ("auto", "scratch", "resume")  # as init_from
NO_CHANGE = ("init_from", "out_dir", "eval_only")  # settings that change nothing in what is resumed

# ----------------------------------------------------------------------------------------------------------------------
# out_dir


@stop_on_error()
def claim(out_dir: str) -> TextIO | None:
    """Create and lock out_dir, or end the run, also if it holds a model or is not shared.

    Returns, on rank 0, an open file that holds the lock until it is closed: two runs would delete each other's
    checkpoints.
    """
    lock_file = Path(out_dir) / ".lock"
    file = on_all_ranks(lambda: lock_out_dir(lock_file.parent) if rank == 0 else None)
    content = lock_file.read_text() if lock_file.exists() else None
    # If ranks had separate folders, each would hold only a part of every checkpoint.
    require_same_on_all_ranks({"out_dir": content}, f"{out_dir} must be one folder that all machines share")
    return file


# ----------------------------------------------------------------------------------------------------------------------
# Where to start


@stop_on_error()
def find_start(out_dir: str, init_from: str, eval_only: bool) -> Folder | None:
    """The newest undamaged checkpoint of out_dir, else the folder of weights to start with, or None for scratch.

    A damaged checkpoint is renamed, and the previous one taken. With eval_only, or without a previous one, it ends the
    run.
    """
    start_time = time.perf_counter()
    saved = from_rank_0(lambda: checkpoints(out_dir))  # a network file system may show another rank fewer
    if not saved:
        return _find_weights(out_dir, init_from)
    is_restart = all_reduce_max([restart_count])[0] > 0  # by torchrun: the same run. Machines count their own
    if init_from == "scratch" and not is_restart:  # check_start() compares a folder of weights, later
        stop(f"{saved[-1]} is left from an earlier run: --init_from=resume continues it, or name another --out_dir")
    for path in reversed(saved):
        try:
            folder = open_folder(path, optimizer=True)
            if folder.run is None:
                raise Damaged(f"{path / 'run.json'} is missing")
            verify(folder)
            return folder._replace(resume_seconds=time.perf_counter() - start_time)
        except Damaged as error:
            if eval_only:  # the folder is not locked: a run may own it, and delete a checkpoint that is being read
                stop(f"{path} is damaged, or was deleted meanwhile: {error}")
            if path == saved[0]:  # it keeps its name, so that no new run starts in its folder
                weights = f"if its weights are whole, a new run can begin with them, --init_from={path}"
                stop(f"{path} is damaged: {error}. There is no older one: move it away to start anew; {weights}")
            print0(f"{path} is damaged: {error}. Falling back to the previous one")
            from_rank_0(lambda path=path: mark_damaged(path))  # by now no rank is reading it


def _find_weights(out_dir, init_from):
    if init_from == "resume":
        stop(f"{out_dir} holds no checkpoint to resume: --init_from=scratch starts a new run")
    if init_from in NO_FOLDERS:
        return None
    path = Path(init_from).expanduser()
    if not from_rank_0(path.exists):
        stop(f"init_from is auto, scratch, resume or a folder of weights: there is no {path}. {how_to_fetch(path)}")
    folder = open_folder(from_rank_0(lambda: newest_model(path)))
    verify(folder)
    return folder


def _resumes(start):
    """Whether find_start() found a checkpoint of this run, not published weights or another run's."""
    return start is not None and start.resume_seconds is not None


def resume_point(start: Folder | None, block_size: int) -> tuple[int, int]:
    """The step and the sequence of block_size tokens that a run begins with: 0 and 0, unless it resumes."""
    if not _resumes(start):
        return 0, 0
    n_tokens = start.run["sequences"] * start.run["settings"]["block_size"]  # that it has read
    return start.run["step"], n_tokens // block_size


@stop_on_error()
def model_settings(start: Folder | None, named: set[str]) -> dict:
    """The model settings of find_start()'s result, except those in `named`, which check_start() compares. So a config
    for finetuning fits any Llama, and a resume needs no init_from. vocab_size comes from the dataset.
    """
    if start is None:
        return {}
    config, _ = read_config(start)
    return {name: getattr(config, name) for name in MODEL_SETTINGS if name not in named and name != "vocab_size"}


@stop_on_error()
def check_start(start: Folder | None, config: LlamaConfig, settings: dict, dataset: dict) -> None:
    """End the run if its start, model, data or what its states depend on are not those of find_start()'s result."""
    if start is None:
        if settings["lora_rank"]:
            stop("lora_rank has no weights to adapt: name a folder of published weights, --init_from=FOLDER")
        if settings["eval_only"] and settings["init_from"] == "auto":
            weights = "name weights, --init_from=FOLDER, or take random ones, --init_from=scratch"
            stop(f"{settings['out_dir']} has no checkpoint to evaluate: {weights}")
        if "train_targets" in dataset and settings["init_from"] == "auto":  # conversations
            stop("conversations alone teach random weights little: name published ones, --init_from=FOLDER, or insist "
                 "with --init_from=scratch")  # fmt: skip
        return
    resumes = _resumes(start)
    _require_same_tokenizer(start, resumes, dataset)
    _require_same_settings(start, resumes, config, settings)
    check_sizes(_base_of(start, settings) or start, read_config(start)[0])


def _base_of(folder: Folder, settings) -> Folder | None:
    """The folder of the frozen weights, for a run that trains adapters and starts from `folder`; else None."""
    if folder.adapter:
        return open_base(folder)
    return folder if settings["lora_rank"] else None


# ----------------------------------------------------------------------------------------------------------------------
# Does it fit?


def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


def _require_same_tokenizer(folder, resumes, dataset):
    trained, tokenizer = read_config(folder)
    data = f"{dataset['tokenizer']}, {dataset['vocab_size']:,} tokens"
    advice = f"prepare the data with --tokenizer {shlex.quote(str(folder.path))}"
    if tokenizer not in (None, dataset["tokenizer"]):
        advice += f", or change {'out_dir' if resumes else 'init_from'}"
        stop(f"{folder.path} was trained on {tokenizer} tokens, but the data's tokenizer is {data}: {advice}")
    if dataset["vocab_size"] > trained.vocab_size:
        stop(f"{folder.path} has rows for {trained.vocab_size:,}, but the data's tokenizer is {data}: {advice}")
    if tokenizer is None:  # only the user can know
        print0(f"{folder.path} does not say its tokenizer, which must be the data's: {data}")


def _require_same_settings(folder, resumes, config, settings):
    trained, _ = read_config(folder)
    was = {name: getattr(trained, name) for name in MODEL_SETTINGS}
    now = {name: getattr(config, name) for name in MODEL_SETTINGS}
    more = ADAPTER_SETTINGS if folder.adapter else ()
    for name in STATE_SETTINGS if resumes else more:
        was[name] = folder.run["settings"][name]
        now[name] = settings[name]
    if resumes and settings["init_from"] not in NO_FOLDERS:  # names weights, which would not be read
        began_with = folder.run["settings"].get("init_from", "auto")
        was["init_from"] = "auto" if began_with in NO_FOLDERS else _absolute(began_with)
        now["init_from"] = _absolute(settings["init_from"])
    differing = [name for name in now if was[name] != now[name]]
    if differing:
        differences = ", ".join(f"{name} {was[name]} (this run: {now[name]})" for name in differing)
        flags = " ".join(shlex.quote(f"--{name}={was[name]}") for name in differing)
        other = "or change out_dir" if resumes else "or change init_from; without a config file it sets the shape"
        stop(f"{folder.path} has {differences}: pass {flags}, {other}")


# ----------------------------------------------------------------------------------------------------------------------
# Start


@stop_on_error()
def restore(
    start: Folder | None, model: Llama, optimizer, train_data: Blocks, run_info: dict
) -> tuple[str, float | None, dict[str, bytes]]:
    """Fill the optimizer and its model's weights from find_start()'s result, and print what that is.

    run_info: what this run's run.json will contain: settings, dtype, versions and dataset (its meta.json). Returns what
    the run began with, as init_from; the seconds that a resume took, or None; and the other files of a checkpoint,
    config.json and tokenizer files, by name. Ends the run if the weights cannot be read.
    """
    start_time = time.perf_counter()
    settings = run_info["settings"]
    dataset = train_data.meta
    data = train_data.tokens.folder  # the first dataset of a mix: all have its tokenizer
    files = hf_files(start, model.config, dataset["tokenizer"], run_info["dtype"], dataset, data)
    base = start and _base_of(start, settings)
    if base:
        read_base(base, model, cpu_weights=optimizer.cpu_weights)
        files = adapter_files(files, base.path, settings["lora_rank"], settings["lora_alpha"])
    if _resumes(start):
        _resume(start, model, optimizer, run_info)
        seconds = start.resume_seconds + time.perf_counter() - start_time
        return start.run["settings"].get("init_from", "auto"), seconds, files
    _begin(start, base, model, optimizer, run_info)
    began_with = _absolute(settings["init_from"]) if start else settings["init_from"]
    return began_with, None, files


def _begin(folder, base, model, optimizer, run_info):
    """Take the weights of a folder or, if it is None, random ones. base: _base_of(folder), which is read already."""
    settings = run_info["settings"]
    if folder and folder is not base:  # new adapters have nothing to read
        parameters = dict(optimizer.parameters)
        for name in optimizer.parameters:
            if name.endswith(tuple(OWN)) and hf_names(name)[0] not in folder.tensors:
                print0(f"begins    with random {name}: {folder.path} has none")
                del parameters[name]
        read_weights(folder, parameters, model.config, optimizer.set_weight)
    if folder:
        print0(f"begins    with the weights of {folder.path}")
        if folder is base and "step" in (folder.run or {}):  # not a folder of convert.py's
            print0("          which the adapters will need. Training that run further may delete them: keep a copy")
        context = read_config(folder)[0].block_size
        if model.config.block_size > context:
            print0(f"          which were trained on {context:,} tokens at a time; block_size is more")
    for name in optimizer.parameters if settings["keep_last"] else ():
        hf_names(name)  # ValueError for a new parameter without a name: now, not at the first checkpoint


def _resume(folder, model, optimizer, run_info):
    """Continue from a checkpoint of this run."""
    settings = run_info["settings"]
    run = folder.run
    length = "--epochs" if settings["epochs"] else "--max_iters"
    if run["step"] > settings["max_iters"] and not settings["eval_only"]:
        stop(f"{folder.path} is beyond max_iters, {settings['max_iters']}: raise {length}, or name another --out_dir")
    read_weights(folder, optimizer.parameters, model.config, optimizer.set_weight, optimizer.tensors())
    optimizer.load_counters(run)
    changed = _changes(run, run_info)
    print0(f"resumes   {folder.path}" + (f" with {', '.join(changed)} changed" if changed else ""))
    if run["step"] == settings["max_iters"] and run.get("val_loss") is not None and not settings["eval_only"]:
        print0(f"nothing left to train: raise {length}, or name another --out_dir for a new run")


def _changes(run: dict, run_info: dict) -> list[str]:
    """What has changed since the checkpoint was saved."""
    was, now = (each["settings"] | {"dtype": each["dtype"]} | each.get("versions", {}) for each in (run, run_info))
    changed = [
        f"{name} {was[name]} -> {value}"
        for name, value in now.items()
        if was.get(name, value) != value and name not in NO_CHANGE  # absent in checkpoints older than it
    ]
    return changed + [
        f"the dataset's {name} {run['dataset'][name]:.12} -> {value:.12}"  # the beginning of a digest
        for name, value in run_info["dataset"].items()
        if name.endswith("_sha256") and run["dataset"].get(name, value) != value
    ]
