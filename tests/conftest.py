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
    """Run from the root, where configs are named from, wherever pytest was started. Seed the generators."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # a test that ran train.py in this process set TF32
    torch.set_num_threads(1)  # train.py may have raised it; on small models several threads only wait for each other


@pytest.fixture
def published_model():
    """Skips the test, with a sentence, if model.py computes something else than the published Llama 3."""
    from tests.published import require_published_model  # here: it imports transformers

    require_published_model()


@pytest.fixture(autouse=True)
def signal_handlers():
    """Restore the signal handlers after each test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def free_gpu_memory():
    """The workers share one GPU, so none keeps much of its memory between tests."""
    yield
    if torch.cuda.memory_reserved() > 2**30:  # 0 before CUDA is initialized
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
    """Plain PyTorch on one core: in Triton's interpreter, which other files use, a training run would take hours.

    Ctrl-C also works if a shell runs the tests in the background: runs would inherit that it is ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(kernels.launch, "INTERPRETED", False)
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def train(text_data, tmp_path, monkeypatch):
    """train(**settings) runs train.py in this process and returns its globals; files go to tmp_path/out."""
    monkeypatch.setattr(RunLog, "draw", lambda log: (log.out_dir / "loss.png").touch())  # drawing outlasts training

    def run(*files, **settings):
        settings = {"dataset": text_data, "out_dir": tmp_path / "out", **({} if files else SMALL | SHORT), **settings}
        monkeypatch.setattr(sys, "argv", ["train.py", *files, *flags(settings)])
        try:
            end = runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            if end["lock_file"]:
                end["lock_file"].close()  # the end of a process would
            return end
        finally:
            sys.excepthook = sys.__excepthook__  # the run's own would keep the run alive, and its lock
            if dist.is_initialized():
                dist.destroy_process_group()

    return run


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory):
    """Documents of one to fifteen words, so that a block of 32 bytes holds several."""
    folder = tmp_path_factory.mktemp("short")
    texts = [prose(i, n) for i, n in enumerate(np.random.default_rng(0).integers(1, 16, 700))]
    toy_dataset(folder, [text for i, text in enumerate(texts) if i % 7], texts[::7])
    return folder


@pytest.fixture(scope="session")
def alone(text_data, tmp_path_factory):
    return run_alone(text_data, tmp_path_factory.mktemp("alone"), max_iters=20)


@pytest.fixture
def sample(tmp_path, monkeypatch, capsys):
    """sample(**settings) runs sample.py in this process: returns the text, and its stderr or exit message."""

    def run(stdin="", **settings):
        settings = {"out_dir": tmp_path / "out", "device": "cpu"} | settings
        if "evaluate" not in settings:
            settings = {"max_new_tokens": 12} | settings
        if not settings.keys() & {"chat", "evaluate"}:
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
    """convert_to_hf(source, *options) runs convert.py and returns the folder that it writes: tmp_path/hf."""

    def convert_to_hf(source, *options, folder="hf"):
        monkeypatch.setattr(sys, "argv", ["convert.py", str(source), str(tmp_path / folder), *options])
        convert.main()
        return tmp_path / folder

    return convert_to_hf


@pytest.fixture
def train_on_ranks(text_data, tmp_path):
    """train_on_ranks(ranks, script, code, **settings) runs train.py, expects this exit code, returns the output."""

    def run(ranks, script="train.py", code=0, launch=run_ranks, **settings):
        done = launch(ranks, LONGER | dict(dataset=text_data, out_dir=tmp_path / "out") | settings, script)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def pytest_collection_finish():
    """Keep the garbage collector from what has been imported: a full collection takes 0.5 s with it."""
    gc.freeze()
