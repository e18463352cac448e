"""Impossible settings: each gets a one-line error."""

import sys

import pytest
import torch

from configurator import preview
from runtime.check_settings import find_problem
from tests.runs import ROOT, SMALL, error_of, flags, run

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

PROBLEMS = {  # the start of the message: the flags
    **{f"{name} is {least - 1}: it must be at least {least}": f"--{name}={least - 1}" for least, names in (
        (1, "batch_size vocab_size n_layer eval_interval log_interval gradient_accumulation_steps galore_interval"),
        (0, "warmup_iters cooldown_iters lora_rank"),
    ) for name in names.split()},
    "dataset is empty: name a folder under data/": "--dataset=",
    "seed is 9223372036854775808: it must be below 2**63": f"--seed={2**63}",
    "lr_decay_iters is 2, within the warm-up of 3 steps": "--lr_decay_iters=2 --warmup_iters=3",
    "min_lr is 0.01, above learning_rate, 0.001": "--min_lr=1e-2 --learning_rate=1e-3",
    "warmup_iters 4 and cooldown_iters 5 are more steps than max_iters, 8":
        "--lr_schedule=wsd --warmup_iters=4 --cooldown_iters=5 --max_iters=8",
    "min_lr is 1.0, above learning_rate, 0.003: the decay is from": "--lr_schedule=wsd --min_lr=1 --learning_rate=3e-3",
    "cooldown_iters is 5, which only lr_schedule wsd uses": "--cooldown_iters=5",
    "optimizer=muon works with offload=none": "--optimizer=muon --offload=optimizer",
    "optimizer=galore works with offload=none": "--optimizer=galore --offload=optimizer",
    "galore_rank is 128, but the smallest matrix has a side of 16": "--optimizer=galore",
    "optimizer=galore needs the CPU": "--optimizer=galore --galore_rank=4 --cuda_graph",
    "optimizer=galore works with dtype bfloat16 or float32": "--optimizer=galore --galore_rank=4 --dtype=float16",
    "beta1 is 1.5 and beta2 0.95: both must be at least 0 and below 1": "--beta1=1.5",
    "beta1 is -0.1 and beta2 0.95: both": "--beta1=-0.1",
    "beta1 is 0.9 and beta2 1.0: both": "--beta2=1",
    "grad_clip is -1.0: it must be at least 0": "--grad_clip=-1",
    "out_dir is empty": "--out_dir=",
    "gradient_accumulation_steps is 4: make it a multiple of the 3 ranks, as in --gradient_accumulation_steps=3":
        "3 ranks: --gradient_accumulation_steps=4",
    "offload_activations does not work with compile": "--offload_activations --compile",
    "offload_activations does not work with compile or cuda_graph": "--offload_activations --cuda_graph",
    "offload_dir is '/x', but nothing is offloaded": "--offload_dir=/x",
    "mask_documents works with attention auto or triton": "--mask_documents --attention=sdpa",
    "mask_documents works with heads of size 16, 32, 64 or 128, not 8": "--mask_documents",
    "optimizer_bits=8 cuts the weights' rows": "--optimizer_bits=8 --n_embd=256",
    "optimizer_bits=8 cuts the weights' rows into blocks of 256": "--optimizer_bits=8 --ffn_dim=256",
    "lora_alpha is 0.0: it must be above 0": "--lora_alpha=0",
    "lora_rank is 33, above n_embd or ffn_dim": "--lora_rank=33",
    "base_dtype=nf4 is for the frozen weights under adapters": "--base_dtype=nf4",
    "lora_rank works with optimizer=adamw": "--lora_rank=4 --optimizer=muon",
    "lora_rank works with optimizer=adamw and optimizer_bits=32":
        "--lora_rank=4 --optimizer_bits=8 --n_embd=256 --ffn_dim=256",
    "base_dtype=nf4 stays on the GPU": "--lora_rank=4 --base_dtype=nf4 --offload=all",
    "base_dtype=nf4 must be gathered by NCCL": "--lora_rank=4 --base_dtype=nf4 --copy_engines=true",
    "a frozen base in float8 (fp8) stays on the GPU": "--lora_rank=4 --fp8 --offload=all",
    "a frozen base in float8 (fp8) must be gathered by NCCL": "--lora_rank=4 --fp8 --copy_engines=true",
    "cuda_graph needs one GPU and offload=none": "--cuda_graph --offload=all",
    "cuda_graph needs one GPU and offload=none: add --cuda_graph=false":
        "3 ranks: --cuda_graph --gradient_accumulation_steps=3",
    "--lora_alpha has no effect without --lora_rank=16: add that": "--lora_alpha=16",
    "--galore_interval has no effect without --optimizer=galore": "--galore_interval 9",
    "--galore_rank has no effect without --optimizer=galore": "--galore_rank=9",
    "--galore_scale has no effect without --optimizer=galore": "--galore_scale=1",
    "--lr_decay_iters has no effect without --lr_schedule=cosine": "config/linux_114m.py --lr_decay_iters=500",
    "--wandb_project has no effect without --wandb_log=true": "--wandb_project=runs",
    "--wandb_run_name has no effect without --wandb_log=true": "--wandb_run_name=first",
}  # fmt: skip


@pytest.mark.parametrize("sentence", PROBLEMS)
def test_incompatible_settings_get_a_message(sentence):
    ranks, _, words = PROBLEMS[sentence].rpartition(" ranks: ")
    argv = [*flags(SMALL), *words.split()]
    assert find_problem(preview(ROOT / "train.py", argv), int(ranks or 1), argv).startswith(sentence)


def test_unused_settings_are_allowed_in_config_files_and_next_to_their_switch(tmp_path):
    (tmp_path / "later.py").write_text("lora_alpha, galore_rank, lr_decay_iters, wandb_project = 16, 4, 500, 'runs'")
    for words in (
        "--lr_schedule=wsd --warmup_iters=4 --cooldown_iters=4 --max_iters=8", "--lora_rank=0 --lora_alpha=16",
        "--optimizer=muon --galore_rank=4", "--fp8 --offload=all",
    ):  # fmt: skip
        argv = [str(tmp_path / "later.py"), *words.split()]
        assert find_problem(preview(ROOT / "train.py", argv), 1, argv) is None


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(batch_szie=3), "Unknown setting batch_szie. Did you mean batch_size?"),
        (dict(batch_size=0), "batch_size is 0: it must be at least 1"),
        (dict(n_head=3), "n_embd 32 must be n_head 3 times an even head size"),
        (dict(vocab_size=100), "was prepared with 257: set it to that"),
        (dict(offload="all", n_layer=2, n_embd=2**19, n_head=2**12), "GiB of CPU memory, but"),
        (dict(block_size=10**6), "that block_size 1,000,000 needs here"),
        (dict(dataset="nowhere"), "does not exist"),
        (dict(init_from="resume"), "holds no checkpoint to resume"),
        (dict(n_layer=2, n_embd=2**19, n_head=2**12), "a step needs"),
        (dict(out_dir="README.md"), "cannot write to out_dir README.md: File exists"),
        pytest.param(dict(device="cuda"), "--device=cpu", marks=pytest.mark.skipif(HAS_GPU, reason="a GPU is here")),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_user_errors_get_a_message(train, capsys, settings, expected):
    assert expected in error_of(train, capsys, **settings)


def test_a_config_without_its_dataset_names_the_command_that_makes_it(train, capsys):
    if (ROOT / "data/fineweb_edu/meta.json").exists():
        pytest.skip("the dataset is here")
    message = error_of(train, capsys, str(ROOT / "config/llama32_1b.py"), dataset="fineweb_edu", device="cpu")
    assert "python data/fineweb_edu/prepare.py" in message


def test_a_warm_up_that_never_ends_is_mentioned_and_a_config_for_a_cuda_graph_trains_on_a_cpu(train, capsys):
    train(warmup_iters=3, max_iters=2, lr_decay_iters=2, cuda_graph=True, offload="optimizer")
    said = "warm-up   of 3 steps, in a run of 2: the learning rate never peaks"
    assert said in capsys.readouterr().out


def test_compile_without_a_compiler_gets_a_message(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    settings = preview(ROOT / "train.py", ["--compile"])
    assert find_problem(settings | {"device": "cuda:0"}, 1) is None
    said = "--compile=true needs a C++ compiler on a CPU, but there is no no-such-compiler: install one, or set CXX"
    assert find_problem(settings | {"device": "cpu"}, 1) == said
    monkeypatch.setenv("CXX", sys.executable)
    assert find_problem(settings | {"device": "cpu"}, 1) is None


@pytest.mark.parametrize("script", ["train.py", "sample.py", "convert.py", "bench.py"])
def test_python_in_isolated_mode_finds_our_modules(script):
    done = run(["--help"], script, PYTHONSAFEPATH="1")
    assert done.returncode == 0 and done.stdout, done.stderr
