"""The benchmark of generation: what it counts, runs and reports. Without a GPU: nothing is timed."""

import pytest
from transformers import LlamaForCausalLM

from benchmarks import generate
from test_kernels import HAS_GPU
from tests.runs import write_config

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=96, vocab_size=257)


@pytest.fixture
def point(tmp_path):
    """What is measured: a tiny model's config, three texts, the rate of a copy."""
    config = write_config(tmp_path / "tiny.py", **TINY)
    return {"config": config, "batch": 3, "prompt": 8, "tokens": 6, "copy_tb_s": 1.0}


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_must_read_the_weights_and_what_the_caches_hold(tied, point, tmp_path):
    write_config(tmp_path / "tiny.py", **TINY, tie_embeddings=tied)
    row = generate.measure("nanocria", **point)
    block = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 96 + 2 * 32
    weights = 2 * block + 32 + 257 * 32  # of an untied embedding a step reads one row per text
    cached = 3 * (8 + 4.5)  # 8 of the prompt, 3 of the warm-up, half of the 3 timed ones
    assert row["step_bytes"] == (2 if HAS_GPU else 4) * (weights + 2 * 2 * 2 * 8 * cached)
    assert row["tok_per_s"] > 0 and row["of_copy"] == pytest.approx(row["step_bytes"] / row["step_ms"] / 1e9)


@pytest.mark.parametrize("trainer, cache", [("hf", "DynamicCache"), ("hf-static", "StaticCache")])
def test_transformers_generates_as_many_tokens_with_its_cache(trainer, cache, point, monkeypatch):
    used = set()
    forward = LlamaForCausalLM.forward

    def noting(self, *args, **kwargs):
        used.update(name for value in kwargs.values() if (name := type(value).__name__).endswith("Cache"))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noting)
    monkeypatch.setattr(generate.timing, "wall_seconds", lambda call, device: 2.0)
    assert generate.measure(trainer, **point) == {"tok_per_s": 3 * 6 / 2}
    assert used == {cache}
