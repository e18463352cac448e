"""The benchmark of generation: what it counts, runs and reports. Without a GPU: nothing is timed."""

import json

import pytest
from transformers import LlamaForCausalLM

from benchmarks import generate, runner
from benchmarks.records import Record
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
    used = set()
    forward = LlamaForCausalLM.forward

    def noting(self, *args, **kwargs):
        used.update(name for value in kwargs.values() if (name := type(value).__name__).endswith("Cache"))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noting)
    found = generate.measure(trainer, **AT, **TINY)
    assert used == {cache}
    assert found["tok_per_s"] == pytest.approx(3 * 1000 / found["ms_per_token"]) and "step_ms" not in found


def test_generate_is_measured_on_a_cpu(monkeypatch, tmp_path):
    head = {"command": "python bench.py generate", "device": "CPU", "copy_tb_s": 0.03, "versions": {"nanocria": "abc"}}
    monkeypatch.setattr(runner, "start", lambda name, s, on_cpu: Record(s.out, head))
    monkeypatch.setattr(runner, "call", lambda function, **options: generate.measure(**options, **TINY))
    words = "--config=config/baby_llama.py --batches=1,2 --prompt=8 --tokens=6 --trainers=nanocria,hf"
    generate.main([*words.split(), f"--out={tmp_path / 'cpu.json'}"])
    rows = json.loads((tmp_path / "cpu.json").read_text())["points"]
    assert [(row["batch"], row["trainer"]) for row in rows] == [(n, who) for n in (1, 2) for who in ("nanocria", "hf")]
    assert rows[0]["of_copy"] == pytest.approx(rows[0]["step_bytes"] / rows[0]["step_ms"] / 1e9 / 0.03)
