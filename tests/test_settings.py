"""Settings that cannot be: each gets a sentence."""

import os
import subprocess
import sys

import pytest
import torch

from runtime.device import require_compiler
from tests.runs import ROOT, slip

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(batch_szie=3), "Unknown setting batch_szie. Did you mean batch_size?"),
        (dict(batch_size="abc"), "--batch_size expects an int, got 'abc'"),
        (dict(dtype="bf16"), "--dtype expects 'auto', 'float32', 'bfloat16' or 'float16', got 'bf16'"),
        (dict(batch_size=0), "batch_size is 0: it must be at least 1"),
        (dict(n_head=3), "n_embd 32 must be n_head 3 times an even head size"),
        (dict(n_kv_head=3), "n_head 4 must be a multiple of n_kv_head 3"),
        (dict(vocab_size=100), "was prepared with 257: set it to that"),
        (dict(offload="all", n_layer=2, n_embd=2**19, n_head=2**12), "GiB of CPU memory, and"),
        (dict(offload_activations=True, activation_checkpointing="full", compile=True), "does not work with compile"),
        (dict(mask_documents=True), "mask_documents works with heads of 16, 32, 64 and 128, not of 8"),
        (dict(mask_documents=True, attention="sdpa"), "mask_documents works with attention auto or triton"),
        (dict(block_size=10**6), "that block_size 1,000,000 needs here"),
        (dict(dataset="nowhere"), "does not exist"),
        (dict(init_from="resume"), "holds no checkpoint to resume"),
        (dict(rope_scaling="{'factor': 8}"), "rope_scaling has ['factor'], expected"),
        (dict(warmup_iters=-1), "warmup_iters is -1: it must be at least 0"),
        (dict(lr_decay_iters=2, warmup_iters=3), "lr_decay_iters is 2, within the warm-up of 3 steps"),
        (dict(seed=2**63), "seed is 9223372036854775808: it must be below 2**63"),
        (dict(n_layer=2, n_embd=2**19, n_head=2**12), "a step needs"),
        (dict(learning_rate="inf"), "learning_rate is inf: it must be at least 0, and finite"),
        (dict(beta1=1.5), "beta1 is 1.5 and beta2 0.95: both must be at least 0 and below 1"),
        (dict(norm_eps=-1), "norm_eps -1.0 and rope_theta 500000.0 must be above 0"),
        (dict(rope_theta="inf"), "norm_eps 1e-05 and rope_theta inf must be above 0, and finite"),
        (dict(max_iters="1" * 400), "--max_iters expects an int, got "),
        (dict(out_dir="README.md"), "out_dir is README.md, a file: name a folder"),
        (dict(optimizer_bits=16), "--optimizer_bits expects 32 or 8, got"),
        (dict(optimizer_bits=8), "n_embd and ffn_dim must be multiples of it"),
        (dict(gradient_accumulation_steps=10**29), " GiB are available: lower gradient_accumulation_steps"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_slip_gets_a_sentence(train, capsys, settings, expected):
    assert expected in slip(train, capsys, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_asking_for_a_gpu_that_is_not_there_says_what_to_do(train, capsys):
    assert "--device=cpu" in slip(train, capsys, device="cuda")


@pytest.mark.parametrize("config", ["llama32_1b", "llama32_3b", "llama31_8b"])
def test_a_config_without_its_dataset_names_the_command_that_makes_it(train, capsys, config):
    if (ROOT / "data/fineweb_edu/meta.json").exists():
        pytest.skip("the dataset is here")
    message = slip(train, capsys, str(ROOT / f"config/{config}.py"), dataset="fineweb_edu", device="cpu")
    assert "python data/fineweb_edu/prepare.py" in message


def test_a_warm_up_that_never_ends_is_mentioned(train, capsys):
    train(warmup_iters=8)
    assert (
        "warm-up   of 8 steps, as long as the run: the learning rate never reaches its peak" in capsys.readouterr().out
    )


def test_a_config_for_a_cuda_graph_trains_on_a_cpu_with_anything(train):
    train(cuda_graph=True, offload="optimizer", max_iters=1)  # config/baby_llama.py sets it


def test_compile_without_a_compiler_gets_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    require_compiler("cuda:0")
    with pytest.raises(SystemExit):
        require_compiler("cpu")
    said = "--compile=true needs a C++ compiler on a CPU, and there is no no-such-compiler: install one, or set CXX\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("CXX", sys.executable)
    require_compiler("cpu")


@pytest.mark.parametrize("script", ["train.py", "sample.py", "convert.py", "bench.py"])
def test_python_in_isolated_mode_finds_our_modules(script, tmp_path):
    command = [sys.executable, "-I", ROOT / script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout, done.stderr
