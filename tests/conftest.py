"""Fixtures that several test files use."""

import gc
import io
import runpy
import signal
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import convert
import kernels.launch
from runtime.run_log import RunLog
from tests.datasets import toy_dataset
from tests.runs import LONGER, PLAIN, ROOT, SHORT, SMALL, flags, prose, run_alone, run_ranks


@pytest.fixture(autouse=True)
def root_and_seed(monkeypatch):
    """Configs are named from the root, wherever pytest was called."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # train.py, run in this process by the test before, set TF32
    torch.set_num_threads(1)  # which it may have raised; small models: several would only wait for each other


@pytest.fixture(autouse=True)
def signal_handlers():
    """Those that a test leaves do not outlive it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def free_gpu_memory():
    """The workers share one GPU: none keeps much of its memory from one test to the next."""
    yield
    if torch.cuda.memory_reserved() > 2**30:  # 0 where CUDA has not begun
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def text_data(tmp_path_factory):
    """A hundred kilobytes of words as bytes."""
    folder = tmp_path_factory.mktemp("text")
    toy_dataset(folder, [prose(i, 2500) for i in range(10)], [prose(10, 5000)])
    return folder


@pytest.fixture
def plain_pytorch_on_one_core(monkeypatch):
    """The other files run the kernels through Triton's interpreter; a training run would take it hours.

    And Ctrl-C is heard, also where a shell has the tests in its background, which a run that they start would inherit.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def train(text_data, tmp_path, monkeypatch):
    """train(**settings) runs train.py in this process and returns its globals; files go to tmp_path/out."""
    monkeypatch.setattr(RunLog, "draw", lambda log: (log.out_dir / "loss.png").touch())  # longer than the training

    def run(*files, **settings):
        settings = {"dataset": text_data, "out_dir": tmp_path / "out", **({} if files else SMALL | SHORT), **settings}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        monkeypatch.setattr(sys, "argv", ["train.py", *files, *flags])
        try:
            return runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        finally:
            sys.excepthook = sys.__excepthook__  # the run's own would keep the run alive, and its lock
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory):
    """Of one to fifteen words, so that blocks of 32 bytes hold several."""
    folder = tmp_path_factory.mktemp("short")
    texts = [prose(i, n) for i, n in enumerate(np.random.default_rng(0).integers(1, 16, 700))]
    toy_dataset(folder, [text for i, text in enumerate(texts) if i % 7], texts[::7])
    return folder


@pytest.fixture(scope="session")
def alone(text_data, tmp_path_factory):
    return run_alone(text_data, tmp_path_factory.mktemp("alone"), max_iters=20)


@pytest.fixture
def sample(tmp_path, monkeypatch, capsys):
    """sample(**settings) runs sample.py in this process: the text, and what it said on stderr or stopped with."""

    def run(stdin="", **settings):
        settings = {"out_dir": tmp_path / "out", "device": "cpu"} | settings
        if "evaluate" not in settings:
            settings = {"max_new_tokens": 12} | settings
        if not settings.keys() & {"chat", "evaluate", "prompt_file"}:
            settings = {"prompt": "def "} | settings
        monkeypatch.setattr(sys, "argv", ["sample.py", *flags(settings)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        stopped = ""
        try:
            runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
        except SystemExit as error:
            stopped = str(error)
        out, err = capsys.readouterr()
        return out, err + stopped

    return run


@pytest.fixture
def convert_to_hf(tmp_path, monkeypatch):
    """convert_to_hf(source, *options) runs convert.py, and returns the folder that it writes: tmp_path/hf."""

    def convert_to_hf(source, *options, folder="hf"):
        monkeypatch.setattr(sys, "argv", ["convert.py", str(source), str(tmp_path / folder), *options])
        convert.main()
        return tmp_path / folder

    return convert_to_hf


@pytest.fixture
def train_on_ranks(text_data, tmp_path):
    """train_on_ranks(ranks, script, code, **settings) runs train.py, which ends with this code: what it printed."""

    def run(ranks, script="train.py", code=0, launch=run_ranks, **settings):
        done = launch(ranks, LONGER | dict(dataset=text_data, out_dir=tmp_path / "out") | settings, script)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
