"""A run's folder, out_dir: locked by one run at a time, shared by all ranks, with checkpoints step_000250 in it.

A checkpoint is written as step_000250.partial and renamed when complete, so the name alone shows that it is complete.
A checkpoint that turns out to be damaged is renamed to step_000250.damaged.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from data.files import lock, open_to_write
from runtime.checkpoint_folder import other_weights
from runtime.distributed import (
    all_reduce_max,
    from_rank_0,
    on_all_ranks,
    print0,
    rank,
    require_same_on_all_ranks,
    stop,
    stop_on_error,
)
from runtime.safetensors_file import Damaged


def claim(out_dir: str) -> TextIO:
    """Create and lock out_dir, or end the run, also if it holds a model or is not shared. Every rank must call it.

    Returns an open file: rank 0's holds the lock until it is closed. Two runs would delete each other's checkpoints.
    """
    mark = None
    with stop_on_error():
        file = on_all_ranks(lambda: _claim(out_dir) if rank == 0 else None)
    with contextlib.suppress(OSError):
        file = file or open(Path(out_dir) / ".lock")  # noqa: SIM115
        file.seek(0)
        mark = file.read()
    # If ranks had separate folders, each would hold only a part of every checkpoint.
    require_same_on_all_ranks({"out_dir": mark}, f"{out_dir} must be one folder that all machines share")
    return file


def _claim(out_dir: str) -> TextIO:
    if is_model(out_dir):
        if Path(out_dir).name.startswith("step_"):
            run = Path(out_dir).parent
            raise ValueError(f"{out_dir} is a checkpoint: --out_dir={run} resumes from the newest one there")
        raise ValueError(
            f"{out_dir} holds published weights, which sample.py would read: name a folder for this run alone"
        )
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        file = open_to_write(Path(out_dir) / ".lock", "a+")
        lock(file)
        file.truncate(0)
        file.write(f"{time.time_ns()}\n")  # the other ranks compare this
        file.flush()
        os.fsync(file.fileno())
        return file
    except BlockingIOError as error:
        raise OSError(f"another run is writing to {out_dir}: wait for it, or change out_dir") from error
    except OSError as error:
        raise OSError(f"cannot write to out_dir {out_dir}: {error.strerror}") from error


def is_model(folder: str | Path) -> bool:
    """True if a folder is a checkpoint or holds published weights."""
    # os.path: pathlib raises for a name that is too long
    names = "config.json", "params.json", "base_config.json"
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def checkpoints(out_dir: str | Path) -> list[Path]:
    """The complete checkpoints of out_dir, oldest first."""
    found = [path for path in Path(out_dir).glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest(out_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step in out_dir, as this rank sees it."""
    return next(reversed(checkpoints(out_dir)), None)


def newest_for_all_ranks(out_dir: str | Path) -> Path | None:
    """The newest checkpoint that rank 0 sees; ends the run if another rank cannot see it. Every rank must call it.

    A network file system may list a new folder late on some machines: a rank's own newest() could be an older one.
    """
    path = from_rank_0(lambda: newest(out_dir))
    if all_reduce_max([path is not None and not path.is_dir()])[0]:
        stop(f"some machines do not see {path}: out_dir must be one folder that all machines share, or wait a minute")
    return path


def read_newest(run: Path, read: Callable[[Path], Any]) -> Any:
    """Return read(path) for the newest checkpoint of a run, or for `run` itself if it is a checkpoint or published.

    Raises ValueError if there is none, and what read raises. Tries again if a run in progress deletes the checkpoint
    during the read.
    """
    for _ in range(5):
        path = run if is_model(run) else newest(run)
        if path is None:
            if not run.is_dir():
                raise ValueError(f"{run} is not a folder: train a model first, or name another")
            such = next((f", such as {path}" for path in sorted(run.glob("*")) if newest(path)), "")
            others = other_weights(run) or f"no checkpoint: train one first, or name another folder{such}"
            raise ValueError(f"{run} holds {others}")
        try:
            return read(path)
        except (OSError, ValueError) as error:
            if not path.exists():
                continue
            if isinstance(error, Damaged) and path != run and (older := checkpoints(run)[:-1]):
                raise Damaged(f"{error}. The checkpoint before it: {older[-1]}") from error
            raise
    raise ValueError(f"{run} deletes its checkpoints before they can be read: raise its --keep_last")


def commit(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its final name, safe against a power failure."""
    for folder in (*filter(Path.is_dir, partial.iterdir()), partial):
        _sync(folder)
    if final.is_symlink() or final.exists():  # the run resumed from an earlier step and got here again
        remove(final, ignore_errors=True)  # losing its name is enough
    partial.rename(final)
    _sync(final.parent)


def _sync(folder: Path):
    """Flush a folder: only then is a rename in it on disk."""
    file = os.open(folder, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Delete a checkpoint. Rename it first: a half-deleted one must not look complete or block the next save."""
    if path.is_symlink():  # the user moved its files elsewhere: keep them
        return path.unlink()
    shutil.rmtree(path.rename(path.with_name(f"{path.name}.{time.time_ns()}.old.partial")), ignore_errors)


def remove_partial(out_dir: Path) -> None:
    """Delete what a run left that was killed while it saved or deleted a checkpoint; of a link, not what it names."""
    for path in out_dir.glob("step_*.partial"):
        with contextlib.suppress(OSError):  # a leftover that cannot be deleted does no harm
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def remove_all_but(out_dir: Path, keep_last: int) -> None:
    for old in checkpoints(out_dir)[:-keep_last]:
        try:
            remove(old)
        except OSError as error:  # the new checkpoint is complete anyway
            print0(f"cannot delete {old}: {error.strerror}", file=sys.stderr)


def mark_damaged(path: Path) -> None:
    damaged = path.with_name(path.name + ".damaged")
    if damaged.is_symlink() or damaged.exists():  # the same step was damaged before
        remove(damaged)
    path.rename(damaged)
