"""Runs of train.py and their results: shared by the tests that train."""

import contextlib
import functools
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.checkpoint import digest_of_run, read_run
from tests.fork_server import Run, start_server

ROOT = Path(__file__).parents[1]
SMALL = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64, block_size=32, batch_size=4, device="cpu")
SHORT = dict(max_iters=8, warmup_iters=2, learning_rate=3e-3, eval_interval=4, eval_iters=2, log_interval=1)
WORDS = "the of and to in a is that for it as was with be by on not he this are or his from at which"


def prose(seed: int, n_words: int) -> str:
    """A text of frequent and rare words, the same on every machine and in every commit."""
    words = WORDS.split()
    return " ".join(random.Random(seed).choices(words, [1 / (1 + i) for i in range(len(words))], k=n_words))


PLAIN = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}


def flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def write_config(path, **settings):
    """Write a config file; returns its name."""
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    return str(path)


def metrics(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(out_dir):
    """What the run computed, without what depends on the clock and the machine."""
    names = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [{name: line[name] for name in names if name in line} for line in metrics(out_dir)]


def edit_run(checkpoint, **changes):
    """Change entries of a checkpoint's run.json, as if it had been saved that way; None removes an entry."""
    run = read_run(checkpoint) | changes
    run = {name: value for name, value in run.items() if value is not None}
    (checkpoint / "run.json").write_text(json.dumps(run | {"digest": digest_of_run(run)}, indent=2))


def damage(path):
    """Flip one bit of a file, near its end."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * 0.9)] ^= 0x10
    path.write_bytes(content)


def numbers(out_dir, name):
    return np.array([line[name] for line in metrics(out_dir) if name in line])


def step_losses(out_dir):
    return numbers(out_dir, "loss")


def assert_close(a, b, tolerance):
    difference = np.abs(np.asarray(a) - np.asarray(b))
    assert difference.max() <= tolerance, (
        f"max {difference.max():.2e}, mean {difference.mean():.2e} over {tolerance:.0e}"
    )


IMPORTED = ["requests", "tiktoken", "jinja2.sandbox", "torch._dynamo", "torch.distributed.fsdp", "triton.language"]
IMPORTED += ["kernels"]  # of our own modules no others: runtime/distributed.py reads the environment when imported
server = functools.cache(lambda: start_server(os.environ | PLAIN, IMPORTED))


def start(settings, script="train.py", **options):
    """Start the script as one process, with these settings or this list of words. options: Run's."""
    environment = os.environ | PLAIN | options.pop("environment", {})
    words = settings if isinstance(settings, list) else flags(settings)
    return Run(server(), [ROOT / script, *words], environment, **options)


def run(settings, script="train.py"):
    """Run the script as one process to its end: exit code, stdout, stderr."""
    with tempfile.TemporaryFile("w+") as stdout:
        return finished([start(settings, script, stdout=stdout)])


def run_ranks(ranks, settings, script="train.py"):
    """Run the script on several ranks, as torchrun does: the first that fails ends the others."""
    common = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    environments = [common | dict(RANK=rank, LOCAL_RANK=rank) for rank in range(ranks)]
    environments = [{name: str(value) for name, value in each.items()} for each in environments]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        streams = dict(stdout=stdout, stderr=stderr)
        return finished([start(settings, script, environment=each, **streams) for each in environments])


def finish(settings, ranks=1, script="train.py"):
    """Run the script as one process or on several ranks; it must succeed. Returns stdout, stderr."""
    done = run(settings, script) if ranks == 1 else run_ranks(ranks, settings, script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def finished(runs):
    """Wait for all; one that fails ends the others."""
    end = time.monotonic() + 600
    while None in (codes := [run.poll() for run in runs]):
        if any(codes) or time.monotonic() > end:
            for run in runs:
                run.send_signal(signal.SIGTERM if time.monotonic() < end else signal.SIGKILL)
            end = min(end, time.monotonic() + 30)
        time.sleep(0.02)
    for stream in (runs[0].stdout, runs[0].stderr):
        stream.seek(0)
    failed = [code for code in codes if code]
    code = next((code for code in failed if code != -signal.SIGTERM), failed[0]) if failed else 0
    return subprocess.CompletedProcess([], code, runs[0].stdout.read(), runs[0].stderr.read())


def free_port():
    """One that a connection is not given by chance before it is used: Linux takes those from 32,768 upward."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def run_torchrun(ranks, settings, script="train.py"):
    command = torchrun(ranks, settings, script)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | PLAIN)


def torchrun(ranks, settings, script="train.py"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*command, str(script), *flags(settings)]


def wrapped(folder, before, after="", script="train.py"):
    """A script that runs train.py after the lines `before`; with lines `after`, train.py's exit does not end it."""
    before = f"import os, runpy, signal, sys, time, torch\nsys.path.insert(0, {str(ROOT)!r})\n{before}\n"
    run = f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    if after:
        before += "leave, os._exit, code = os._exit, sys.exit, 0\ntry: "
        run += (
            f"\nexcept SystemExit as end: code = end.code\n{after}\n"
            "sys.stdout.flush(), sys.stderr.flush(), leave(code if isinstance(code, int) else bool(code))\n"
        )
    (folder / "wrapped.py").write_text(before + run)
    return folder / "wrapped.py"


def at_read(number, act, ranks="0"):
    """Lines for wrapped(): these ranks run `act` before they read data for the number-th time."""
    return (
        "import data.loader\n"
        "read, reads = data.loader.Blocks.read, []\n"
        "def act_and_read(self, *args):\n"
        "    reads.append(1)\n"
        f"    if len(reads) == {number} and os.environ.get('RANK', '0') in '{ranks}': {act}\n"
        "    return read(self, *args)\n"
        "data.loader.Blocks.read = act_and_read"
    )


def alive(pid: int) -> bool:
    """False also for a zombie: a process that has ended but whose parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# A line for a script, after which no file may grow beyond these bytes.
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"


# A line for a script, after which GaLore renews its bases every three steps instead of every 200.
RENEW_OFTEN = (
    "import functools, optimizers as r\n"
    "r.GaLore, r.SoapMuon = (functools.partial(rule, interval=3) for rule in (r.GaLore, r.SoapMuon))\n"
)


def machines_of(folder, ranks):
    """A script that runs train.py as if each group of `ranks` ranks had its own machine."""
    return wrapped(folder, f"{RENEW_OFTEN}os.environ['LOCAL_WORLD_SIZE'] = '{ranks}'")


def run_alone(text_data, out_dir, max_iters=10, script="train.py", **changes):
    """A run of one process, of ten steps with a checkpoint halfway; returns its folder."""
    settings = LONGER | dict(dataset=text_data, out_dir=out_dir, max_iters=max_iters, eval_interval=max_iters // 2)
    finish(settings | changes, script=script)
    return out_dir


LONGER = SMALL | SHORT | dict(gradient_accumulation_steps=4, max_iters=20, eval_interval=10, keep_last=5)


def wait_until(true):
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end, "it waits forever"
        time.sleep(0.05)


def error_of(train, capsys, *files, **settings):
    with pytest.raises(SystemExit) as stopped:
        train(*files, **settings)
    message = capsys.readouterr().err
    assert stopped.value.code in (1, 2) and "Traceback" not in message
    del stopped
    gc.collect()  # frees the run's globals, among them the open file that locks its folder
    return message
