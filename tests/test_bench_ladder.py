"""The ladder of memory techniques: what its rungs run, where their search ends, what its table shows. No GPU."""

from types import SimpleNamespace

import pytest

from benchmarks import arms, ladder, losses, record, report, runner
from runtime import memory_stats
from tests.runs import step_losses


class Card:
    """A card with room for `largest` sequences of any rung; records the flags of each run."""

    def __init__(self, monkeypatch, largest):
        self.largest, self.ran = largest, []
        monkeypatch.setattr(runner, "arm_point", self.arm_point)
        monkeypatch.setattr(memory_stats, "cpu_available", lambda: 2**40)
        monkeypatch.setattr(record, "kept_rows", lambda *_: {})

    def arm_point(self, arm, flags, config, batch, checkpointing, **_):
        self.ran.append((config, batch, [f"--activation_checkpointing={checkpointing}", *flags]))
        if batch > self.largest:
            return {"oom": True}
        return {"tok_per_s": 100.0 * batch, "peak_gib": 1.0 + batch / 8, "mfu": 0.4}


def climb(words):
    s = ladder.parse(words)
    s.new = {}
    return [row for _, row in ladder.measured(s)]


@pytest.mark.parametrize("rung, largest", [*(("checkpointing", n) for n in (1, 40, 10_000)), ("plain", 2)])
def test_each_rung_ends_at_the_largest_batch_that_fits(monkeypatch, rung, largest):
    Card(monkeypatch, largest)
    rows = climb(["--models=1b", f"--rungs={rung}", "--measure=fits"])
    batches = [row["batch"] for row in rows if "tok_per_s" in row]
    assert batches[0] == 1 and max(batches) == max(b for b in [1, *ladder.BATCHES] if b <= largest)
    assert len(rows) <= 3 or largest != 40, "the search begins at the estimate"
    assert largest == 10_000 or any(row.get("oom") for row in rows), "the next size was tried"


def test_a_rung_includes_the_settings_of_those_below(monkeypatch):
    card = Card(monkeypatch, 0)
    climb(["--models=8b", "--rungs=offload_all", "--measure=fits"])
    ((config, batch, flags),) = card.ran  # not even one sequence: no other is tried
    assert (config, batch) == ("config/llama31_8b.py", 1)
    assert {"--offload=all", "--optimizer_bits=8", "--dtype=bfloat16", "--activation_checkpointing=full"} < set(flags)
    assert "--kernels=all" in flags and "--kernels=none" not in flags, "the upper rung's, once"


def test_each_rung_needs_less_memory_than_its_base_or_fits_a_larger_batch():
    s = ladder.parse([])
    found = {rung: ladder.estimated("1b", rung, s) for rung in s.rungs}
    for rung, row in found.items():
        if (below := found.get(arms.RUNGS[rung].on)) and not arms.RUNGS[rung].peer:
            assert row["estimated_gib"] <= below["estimated_gib"] + 0.01, rung
            assert row["largest"] >= below["largest"], rung
    assert found["offload_all"]["cpu_gib"] > 0 == found["bf16"]["cpu_gib"]


def test_the_ladder_table_shows_what_a_rung_changes(monkeypatch):
    Card(monkeypatch, 48)
    monkeypatch.setattr(losses, "train_losses", lambda *at: {"losses": [3.0, 2.0, 2.5 if "--optimizer_bits=8" in at[-1]
                                                                        else 2.25]})  # fmt: skip
    rows = climb(["--models=1b", "--rungs=bf16,adamw8bit"])
    found = {"points": [row for row in rows if "batch" in row], "losses": [row for row in rows if "losses" in row]}
    *_, first, second = report.ladder_table(found).splitlines()
    assert first.startswith("| 1b | bfloat16 compute | 1.1 | 48 | 4,800 · 7.0 | 0 | 2.2500 |"), first
    assert second.endswith("| 2.5000 (+0.2500) |"), second


@pytest.mark.parametrize(
    "row",
    [
        ("losses", {"model": "1b", "rung": "bf16", "losses": [3.0, 2.0]}),
        ("points", {"model": "8b", "rung": "qlora", "batch": 1, "peak_gib": 6.5, "tok_per_s": 9.0, "cpu_gib": 0.0}),
    ],
)
def test_losses_or_one_rung_alone_have_no_plot(row, tmp_path, monkeypatch):
    head = {"command": "python bench.py ladder", "device": "GPU", "versions": {"nanocria": "abc"}}
    monkeypatch.setattr(runner, "begin", lambda *_, **options: head | {kind: [] for kind in ladder.KEYS})
    s = SimpleNamespace(out=tmp_path / "ladder.json", command=[])
    runner.measure("ladder", s, ladder.KEYS, lambda s: [row], plot="draw_ladder")
    assert [path.name for path in tmp_path.iterdir()] == ["ladder.json"]


@pytest.mark.parametrize("rung", [rung for rung in arms.RUNGS if not arms.RUNGS[rung].peer])
def test_every_rung_trains_on_a_cpu(rung, train, tmp_path, plain_pytorch_on_one_core):
    sizes = dict(n_embd=256, ffn_dim=256, n_kv_head=4, max_iters=2, eval_interval=2)
    train(**sizes, out_dir=tmp_path / "base")  # the adapters' base
    flags = ladder.flags_of(rung, SimpleNamespace(offload_dir=tmp_path)) | {"init_from": tmp_path / "base"}
    train(**sizes | flags)
    first, second = step_losses(tmp_path / "out")
    assert second < first
