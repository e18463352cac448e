"""The benchmark of generation: what it counts, runs and reports. Without a GPU: nothing is timed."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import generate, runner, settings
from test_kernels import HAS_GPU

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
TINY = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "ffn_dim": 96, "vocab_size": 257}
AT = {"config": "config/baby_llama.py", "batch": 3, "prompt": 8, "tokens": 6}


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_must_read_the_weights_and_what_the_caches_hold(tied):
    found = generate.measure("nanocria", **AT, **TINY, tie_embeddings=tied)
    block = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 96 + 2 * 32
    weights = 2 * block + 32 + 257 * 32  # of an untied embedding a step reads one row per text
    held = 3 * (8 + 4.5)  # 8 of the prompt, 3 of the warm-up, half of the 3 timed ones
    assert found["step_bytes"] == (2 if HAS_GPU else 4) * (weights + 2 * 2 * 2 * 8 * held)
    assert found["tok_per_s"] == pytest.approx(3 * 1000 / found["ms_per_token"]) and found["step_ms"] > 0


@pytest.mark.parametrize("trainer, cache", [("hf", "DynamicCache"), ("hf-static", "StaticCache")])
def test_transformers_generates_as_many_tokens_with_the_its_cache(trainer, cache, monkeypatch):
    used, forward = set(), LlamaForCausalLM.forward

    def noting(self, *args, **kwargs):
        used.update(name for value in kwargs.values() if (name := type(value).__name__).endswith("Cache"))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noting)
    found = generate.measure(trainer, **AT, **TINY)
    assert used == {cache}
    assert found["tok_per_s"] == pytest.approx(3 * 1000 / found["ms_per_token"]) and "step_ms" not in found


def test_generate_has_a_record_on_a_gpu_and_another_on_a_cpu(monkeypatch):
    for on_gpu, out in ((True, settings.RECORDS / "generate.json"), (False, settings.ROOT / "out/generate.json")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        assert generate.parse([]).out == out


@pytest.mark.skipif(HAS_GPU, reason="measures the GPU where there is one")
def test_generate_benchmark_runs_on_a_cpu(monkeypatch, tmp_path):
    really, specs = runner.run, []

    def run(command, *more):
        if "timing.card" in command:
            return really(command, *more)
        specs.append(json.loads(command[-1]))
        return {"tok_per_s": 20.0, "step_ms": 40.0, "of_copy": 0.5}, ""

    monkeypatch.setattr(runner, "run", run)
    generate.main(["--batches=1", f"--out={tmp_path / 'cpu.json'}"])
    saved = json.loads((tmp_path / "cpu.json").read_text())
    assert saved["device"].startswith("CPU, ") and 0.001 < saved["copy_tb_s"] < 2
    assert [spec["trainer"] for spec in specs] == [row["trainer"] for row in saved["points"]] == [
        "nanocria", "hf", "hf-static"
    ]  # fmt: skip
    assert {spec["copy_tb_s"] for spec in specs} == {saved["copy_tb_s"]}
