"""The sweeps: what they run, when they stop, what their records contain. Without a GPU: nothing is measured."""

import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import arms, compare, record, report, runner, snapshot, sweep
from configurator import SettingError
from runtime import memory_stats
from runtime.checkpoint import load_model

LLAMA_1B = "config/llama32_1b.py"


def test_train_py_settings_fill_what_a_config_leaves_open(monkeypatch):
    Card(monkeypatch)
    baby, vocab = "--config=config/baby_llama.py", ["--", "--vocab_size=257"]
    words = [baby, "--checkpointing=full", "--batches=1", *vocab, "--cuda_graph=false", "--dataset=my text"]
    ((_, found),) = rows_of(words)
    assert found["flags"] == "--vocab_size=257 --cuda_graph=false '--dataset=my text'"
    assert snapshot.parse([baby, "--peers=none", *vocab]).flags == ["--vocab_size=257"]


class Card:
    """Stands for a card with room for so many tokens per step; records what was run, and under what limit."""

    def __init__(self, monkeypatch, tokens=5000, answer=None):
        self.tokens, self.answer, self.ran = tokens, answer, []
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(memory_stats, "cpu_available", lambda: 2**40)

    def run(self, command, ranks=1):
        limit = []
        if command[:2] == ["-m", "benchmarks.limited"]:
            limit, command = command[2:3], command[3:]
        self.ran.append((ranks, *limit, *command))
        if command[0] == "train.py":
            flags = dict(word[2:].split("=") for word in command if word.startswith("--"))
            size, folder = int(flags["batch_size"]) * int(flags["block_size"]), Path(flags["out_dir"])
        else:
            spec = json.loads(command[3])
            size, folder = spec["batch"] * spec["block"], None
        if self.answer:
            return self.answer, ""
        if size > self.tokens:
            return None, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate much."
        numbers = {"ms_per_step": 1.0, "tok_per_s": 1000.0 * size, "mfu": 0.4, "peak_gib": size / 1000}
        if folder is None:
            return numbers | {"reserved_gib": 9.0}, ""
        (folder / "summary.json").write_text(json.dumps(numbers | {"settings": {}}))
        return None, "much text"


def rows_of(words, n_gpus=1):
    return list(sweep.measured(sweep.parse(words, n_gpus)))


def places(rows):
    return [(kind, row["arm"], row["batch"], row["block"], row["oom"]) for kind, row in rows]


def test_without_settings_the_batch_grows_until_nothing_fits(monkeypatch):
    card = Card(monkeypatch, tokens=300 * 1024)
    rows = rows_of([])
    batches = [1, 4, 8, 16, 32, 64, 96, 112, 224]
    assert places(rows) == [("batch", "all", b, 1024, False) for b in batches] + [("batch", "all", 448, 1024, True)]
    ranks, script, config, *flags = card.ran[3]
    assert (ranks, script, config) == (1, "train.py", LLAMA_1B)
    assert {"--batch_size=16", "--block_size=1024", "--offload=none", "--activation_checkpointing=none"} < set(flags)
    assert "--max_iters=12" in flags


def test_an_arm_that_ran_out_of_memory_is_not_tried_with_more_and_the_others_go_on(monkeypatch):
    card = Card(monkeypatch, tokens=5000)
    answers = lambda words, *_: {"oom": True} if "--kernels=" in str(words) else {"tok_per_s": 1.0}  # noqa: E731
    monkeypatch.setattr(runner, "train", answers)
    rows = rows_of(["--arms=torch,all", "--peers=liger", "--batches=1,4,8"])
    assert places(rows) == [
        ("batch", "torch", 1, 1024, True), ("batch", "all", 1, 1024, False), ("batch", "liger", 1, 1024, False),
        ("batch", "all", 4, 1024, False), ("batch", "liger", 4, 1024, False),
        ("batch", "all", 8, 1024, False), ("batch", "liger", 8, 1024, True),
    ]  # fmt: skip
    assert [json.loads(command[-1])["arm"] for command in card.ran] == ["hf-liger-masters"] * 3
    rows = rows_of(["--arms=none", "--peers=liger,recipe", "--batches=1"])
    assert [row["arm"] for _, row in rows] == ["liger", "recipe"], "peers alone"


def test_the_study_is_both_sweeps_of_four_arms_and_two_peers_in_24_gib(monkeypatch):
    card = Card(monkeypatch, tokens=3 * 1024)
    s = sweep.parse(["--preset=study"], 1)
    assert (s.out, s.sweep, s.command) == (record.RECORDS / "study.json", "both", ["--preset=study"])
    rows = rows_of(["--preset=study"])
    names = ["torch", "kernels", "all", "long", "hf", "liger"]
    assert places(rows) == [
        *[("batch", arm, 1, 1024, False) for arm in names], *[("batch", arm, 4, 1024, True) for arm in names],
        *[("seq", arm, 4, 512, False) for arm in names], *[("seq", arm, 4, 1024, True) for arm in names],
    ]  # fmt: skip
    assert {command[1] for command in card.ran} == {"24"}, "ours and the peers alike"
    assert {row["offload"] for _, row in rows} == {"all"}, "ours and the peers alike"
    torch_arm, kernels = (set(card.ran[i]) for i in (0, 1))
    assert {"--kernels=none", "--offload=all"} < torch_arm
    assert "--kernels=blocks" in kernels and "--kernels=none" not in kernels
    assert "--offload_activations=true" in card.ran[3]
    peer = json.loads(card.ran[4][-1])
    assert (peer["arm"], peer["checkpointing"], peer["warmup"]) == ("hf-offload", "full", 2)
    assert sweep.parse(["--offload=none", "--preset=study"], 1).offload == ["none"], "flags override a preset"


def test_8b_runs_on_all_gpus_and_so_does_the_recipe(monkeypatch):
    card = Card(monkeypatch, tokens=600)
    rows = rows_of(["--preset=8b"], n_gpus=4)
    assert places(rows)[:2] == [("batch", "all", 1, 512, False), ("batch", "recipe", 1, 512, False)]
    assert {command[0] for command in card.ran} == {4} and card.ran[0][1:3] == ("train.py", "config/llama31_8b.py")
    assert "--gradient_accumulation_steps=4" in card.ran[0] and "peers.measure" in card.ran[1]


def test_adapters_stand_on_random_weights(monkeypatch, tmp_path):
    mine = tmp_path / "tiny.py"
    mine.write_text("n_layer, n_head, n_kv_head, n_embd, ffn_dim, vocab_size = 2, 4, 2, 64, 128, 500\n")
    base = runner.random_base(str(mine)).name
    weights = load_model(base).state_dict()
    sizes = [(w.std() if w.ndim > 1 else w.mean() / 50).item() for w in weights.values()]
    assert sizes == pytest.approx([0.02] * len(sizes), rel=0.1)
    card = Card(monkeypatch, tokens=10_000)
    rows = rows_of(["--arms=lora,qlora", "--peers=peft,peft-qlora", f"--config={mine}", "--batches=2"])
    assert [row["arm"] for _, row in rows] == ["lora", "qlora", "peft", "peft-qlora"]
    ours = [command for command in card.ran if "train.py" in command]
    assert len(ours) == 2 and all(f"--init_from={base}" in c and "--lora_rank=16" in c for c in ours)
    assert json.loads(card.ran[3][-1])["arm"] == "hf-liger-qlora"


def test_finetuning_runs_each_size_at_its_fastest_settings_ours_and_theirs(monkeypatch):
    monkeypatch.setattr(runner, "random_base", lambda config: SimpleNamespace(name="base"))
    card = Card(monkeypatch, tokens=40_000)
    sweeps = sweep.all_sweeps(["--preset=finetune", "--steps=3", "--out=a", "--", "--seed=2"], 1)
    rows = [row for s in sweeps for _, row in sweep.measured(s)]
    found = {(row["arm"], row["batch"], row["block"], row["checkpointing"], row["flags"]) for row in rows}
    offloaded = "--offload_activations=true --seed=2"
    assert found >= {
        ("qlora", 2, 2048, "none", "--cuda_graph=true --seed=2"), ("peft-qlora", 2, 2048, "full", ""),
        ("peft-qlora", 2, 2048, "none", ""),
        ("qlora", 1, 32768, "selective", offloaded), ("peft-qlora", 1, 32768, "full", ""),
        ("lora-fp8", 2, 2048, "none", "--cuda_graph=true --seed=2"), ("qlora-fp8", 4, 8192, "selective", offloaded),
        ("qlora", 1, 131072, "full", offloaded), ("peft", 2, 2048, "full", ""),
        ("lora", 2, 2048, "selective", "--cuda_graph=true --seed=2"),
    }  # fmt: skip
    assert not any("failed" in row for row in rows) and {row.get("steps") for row in rows} == {3}
    assert {str(s.out) for s in sweeps} == {"a"} and {command[1] for command in card.ran} == {"24"}
    assert sweep.all_sweeps(["--preset=study"], 1)[0].command == ["--preset=study"]


def test_each_offload_and_setting_is_a_separate_series(monkeypatch):
    card = Card(monkeypatch, tokens=100)
    words = ["--offload=none,optimizer,all", "--checkpointing=none,full", "--peers=hf", "--batches=1"]
    rows = rows_of([*words, "--", "--compile=true"])
    assert [(row["arm"], row["checkpointing"], row["offload"], row["flags"]) for _, row in rows] == [
        (arm, checkpointing, offload, "" if arm == "hf" else "--compile=true")
        for checkpointing in ("none", "full")
        for arm, offload in [("all", "none"), ("hf", "none"), ("all", "optimizer"), ("hf", "all"), ("all", "all")]
    ]
    assert "--compile=true" in card.ran[0] and "--compile=true" not in str(card.ran[1])
    rows = rows_of(["--offload=none,all", "--checkpointing=selective", "--peers=hf,recipe", "--batches=1"])
    assert [(row["arm"], row["offload"]) for _, row in rows] == [("all", "none"), ("recipe", "none"), ("all", "all")]


def test_recorded_points_are_not_measured_again(monkeypatch, tmp_path):
    out, words = tmp_path / "sweep.json", ["--arms=all,torch", "--sweep=both", "--batches=1,4,8", "--contexts=512,1024"]
    first = Card(monkeypatch, tokens=5000)
    empty = {"command": "", "device": "GPU", "versions": {"nanocria": "abc", "torch": "2"}, "batch": [], "seq": []}
    rows = sweep.measured(sweep.parse(words, 1))
    stopped = record.fill(copy.deepcopy(empty), itertools.islice(rows, 5), out, sweep.KEYS, lambda *_: "")

    def known_of(*more, **versions):
        new = empty | {"versions": empty["versions"] | versions}
        return sweep.known_rows(new, sweep.parse([f"--out={out}", *more], 1))

    known = known_of()
    assert {row["steps"] for row in known.values() if not row["oom"]} == {10} and known_of("--steps=10") == known
    assert [row["oom"] for row in known_of("--steps=3").values()] == [True], "of other steps, no time"
    assert known_of(nanocria="other") == {} and known_of("--keep=true", nanocria="other") == known
    for other in ("--memory_limit_gib=24", "--config=config/llama32_3b.py"):  # a plot has one title
        with pytest.raises(SettingError, match="is of config/llama32_1b.py, ranks=1, memory_limit_gib=None"):
            known_of(other)
    card = Card(monkeypatch, tokens=5000)
    again = list(sweep.measured(sweep.parse(words, 1), known))
    assert [row for _, row in again[:5]] == stopped["batch"] and stopped["batch"][4]["oom"]
    assert len(first.ran) == 5 and len(card.ran) == 3
    assert len(again) == 10 and again[5][1]["arm"] == "torch" and again[5][1]["oom"]


def test_the_context_sweep_reuses_points_of_the_batch_sweep(monkeypatch):
    card = Card(monkeypatch, tokens=5000)
    rows = rows_of(["--sweep=both", "--batches=1,4,8", "--contexts=512,1024,2048"])
    assert len(rows) == 6 and len(card.ran) == 5 and rows[1][1] == rows[4][1]


def test_an_unmeasurable_point_is_a_row_with_its_reason(monkeypatch):
    card = Card(monkeypatch)
    ((_, row),) = rows_of(["--arms=long", "--checkpointing=full", "--batches=1,4", "--", "--compile=true"])
    assert row["failed"].startswith("offload_activations does not work")
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: 4 * 2**30)
    rows = rows_of(["--offload=optimizer", "--peers=hf", "--batches=1,4"])
    assert [row["failed"] for _, row in rows] == [
        "offload=optimizer needs 16.1 GiB of CPU memory, this machine has 4.0",
        "offload=all needs 18.4 GiB of CPU memory, this machine has 4.0",
    ]
    assert not card.ran and not any("failed" in row for _, row in rows_of(["--batches=1"]))
    Card(monkeypatch, answer={"missing": "No module named 'liger_kernel'"})
    rows = rows_of(["--sweep=both", "--arms=all", "--peers=liger", "--batches=1", "--contexts=512"])
    liger = next(row for _, row in rows if row["arm"] == "liger")
    said = runner.line(arms.SWEEP, liger)
    assert said.endswith("No module named 'liger_kernel': pip install 'transformers>=5.17,<6' liger_kernel==0.8.5")


# --- Lines and tables ---


def row(arm, batch, block=1024, offload="optimizer"):
    place = (LLAMA_1B, arm, 1, batch, block, "full", offload, 24.0, "")
    numbers = {"oom": False, "tok_per_s": 20_000.0, "ms_per_step": 1.0, "mfu": 0.4, "peak_gib": 10.0}
    return dict(zip(compare.SWEEP_PLACE, place, strict=True)) | numbers


def out_of_memory(row):
    return {key: row[key] for key in compare.SWEEP_PLACE} | {"oom": True}


def test_a_line_names_the_trainer_the_place_and_the_numbers():
    found = row("all", 112)
    said = " ".join(runner.line(arms.SWEEP, found).split())
    assert said.startswith(
        "nanocria 1 GPU batch 112 1,024 tokens full offload optimizer 1.00 ms 20,000 tok/s mfu 40.0%"
    ), said
    out = runner.line(arms.SWEEP, out_of_memory(row("long", 112)))
    assert out.startswith("nanocria, activations on the CPU ") and out.endswith("  out of memory")
    assert "mfu" not in runner.line(arms.SWEEP, found | {"mfu": None})


def test_a_series_of_which_one_size_or_none_fits_is_tabled():
    rows = [out_of_memory(row("torch", 16)), row("hf", 8, offload="all")]
    text = report.fits_table({"batch": rows}, "batch")
    at = "`config/llama32_1b.py` held to 24 GiB, sequences of 1,024 tokens"
    assert text.startswith(f"{at}, activation checkpointing full, offload optimizer or all:")
    assert "| nanocria, plain PyTorch | none | 16 | - | - | - |" in text
    assert "| Hugging Face | 8 | - | 20,000 | 10.0 | - |" in text


def test_series_of_two_lengths_are_not_one():
    text = report.fits_table({"batch": [row("all", 8), row("all", 4, 2048), row("all", 16)]}, "batch")
    assert "sequences of 1,024 or 2,048 tokens" in text
    assert "| nanocria, block 1,024 | 16 |" in text and "| nanocria, block 2,048 | 4 |" in text
