"""What fits on a card, by arithmetic. Without a GPU."""

import json
import re

import pytest

from benchmarks import estimate, settings
from runtime import memory, memory_advice

CARDS_OF_THE_README = re.findall(
    r"^\| (?:(\d+) x )?(\d+) GB \| `(config/\S+) (.*?)`.* \| ([\d.]+) \| (\d+) \|$",
    (settings.ROOT / "README.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.usefixtures("published_model")
@pytest.mark.parametrize("row", CARDS_OF_THE_README or [None])
def test_the_readmes_settings_fit_each_card(row):
    ranks, card, config, flags, gib, of_cpu = row
    model, shape = estimate.resolve(config, int(ranks or 1), {}, flags.split())
    assert f"{memory.peak_gib(model, shape):.1f}" == gib and f"{estimate.cpu_gib(model, shape):.0f}" == of_cpu
    cards = {"0": 0, "8": 7.6, "12": 12, "24": estimate.CARDS["4090"], "80": estimate.CARDS["h100"]}
    smaller = list(cards)[list(cards).index(card) - 1]
    assert cards[smaller] < float(gib) + estimate.outside_gib(shape) < cards[card]
    _, recipe = estimate.resolve(config, int(ranks or 1), {})
    sequences = [run.batch_size * run.micro_steps for run in (shape, recipe)]
    assert sequences[0] == sequences[1], "a step has as many as in the recipe"


@pytest.mark.parametrize(
    "ranks, sharding, shared", [(4, "hybrid", 4), (16, "hybrid", 8), (12, "hybrid", 4), (16, "zero3", 16)]
)
def test_hybrid_sharding_and_copy_engines_are_within_a_host(ranks, sharding, shared):
    settings = {"sharding": sharding, "gradient_accumulation_steps": ranks}
    _, shape = estimate.resolve("config/llama31_8b.py", ranks, settings)
    assert (shape.shard_ranks, shape.copy_engines) == (shared, shared <= 8)


OF_A_DRIVE = "--card=2.5 --checkpointing=full --offload=all -- --gradient_accumulation_steps=1 --offload_dir=/nvme"


@pytest.mark.parametrize("words, gib, offload", [
    ("--card=4090 --checkpointing=full --offload=optimizer --block_size=512", 22.1, "optimizer"),
    (OF_A_DRIVE, 1.0, "all"),
    ("--card=8 --offload=none", 6.5, "none"),
    ("--card=12", 10.5, "optimizer"),  # 12 bytes per parameter alone are more
])  # fmt: skip
def test_the_estimate_is_memory_pys_and_its_command_fits_with_the_configs_sequences(words, gib, offload):
    text, model, shape = estimate.estimate(words.split())
    largest = memory_advice.largest_batch(model, shape, gib)
    batch = max(largest, 1)
    if words != OF_A_DRIVE:
        batch = max(n for n in range(1, batch + 1) if 256 % n == 0)
        assert shape.batch_size * shape.micro_steps == 256, "the sequences of a step of the config"
    assert (shape.batch_size, shape.offload) == (batch, offload)
    assert memory.parts_table(model, shape) in text
    assert ("in offload_dir, of each rank:" in text) == bool(shape.offload_dir)
    verdict, command = text.splitlines()[-2:]
    assert verdict.startswith("recommended" if largest else "does not fit")
    assert ("--optimizer_bits=8, " in verdict) == (not largest and offload == "none"), "else no moments are on the GPU"
    assert f"{memory.peak_gib(model, shape):.1f} GiB" in verdict and f" --batch_size={batch}" in command


def test_the_estimate_omits_what_train_py_refuses_and_names_its_command(monkeypatch):
    monkeypatch.setattr(memory_advice, "largest_batch", lambda config, run, gib: 1)  # the table takes seconds
    text, *_ = estimate.estimate(["--", "--cuda_graph=true"])
    assert "| none | none |" in text and "| none | all |" not in text and "| full | optimizer |" not in text
    flags = "--vocab_size=257 --gradient_accumulation_steps=2 --cuda_graph=false"
    text, *_ = estimate.estimate(f"--config=config/baby_llama.py --card=2 --ranks=2 -- {flags}".split())
    assert "\ntorchrun --standalone --nproc_per_node=2 train.py config/baby_llama.py --act" in text and flags in text


def test_the_command_starts_one_process_per_gpu_of_each_host():
    assert estimate.launcher(1) == "python"
    assert estimate.launcher(8) == "torchrun --standalone --nproc_per_node=8"
    assert "--nnodes=2 --nproc_per_node=8" in estimate.launcher(16)
    assert "--nnodes=3 --nproc_per_node=4" in estimate.launcher(12)


FITTING = [("none", "none", 0), ("selective", "none", 1), ("full", "none", 8), ("none", "optimizer", 9),
           ("full", "all", 60)]  # fmt: skip


@pytest.mark.parametrize("block_size, chosen", [(4096, 1), (1024, 2), (400, 4), (100, 4), (5000, 1)])
def test_the_recommended_command_is_the_cheapest_that_keeps_the_gpu_busy(block_size, chosen):
    rows = [dict(zip(("activation_checkpointing", "offload", "largest_batch"), row, strict=True)) for row in FITTING]
    assert rows.index(estimate.recommended(rows, block_size)) == chosen
    nothing_fits = [row | {"largest_batch": 0} for row in rows]
    assert estimate.recommended(nothing_fits, block_size) == nothing_fits[-1], "the leanest"


def test_a_card_has_a_name_and_the_estimate_is_json_only_if_asked(monkeypatch):
    monkeypatch.setattr(memory_advice, "largest_batch", lambda config, run, gib: 1)
    small = ["--config=config/baby_llama.py", "--block_size=256", "--json=true"]
    text, *_ = estimate.estimate([*small, "--card=RTX 4060Ti", "--", "--vocab_size=257"])
    result = json.loads(text)
    assert result["card_gib"] == estimate.CARDS["4060ti"] and result["command"].startswith("python train.py config/")
    assert result["fits"] and {row["largest_batch"] for row in result["rows"]} == {1}
