"""What fits on a card, by arithmetic. Without a GPU."""

import os
import re
import shlex

import pytest

from benchmarks import estimate, records, settings
from runtime import memory, memory_advice
from tests.runs import finish, start

LLAMA_1B = "config/llama32_1b.py"


def estimated(words):
    """The text, and the model and RunShape whose parts it shows."""
    return estimate.estimate(estimate.parse(words.split()))


def combinations(words, gib=22.5):
    s = estimate.parse(words.split())
    return {(row["activation_checkpointing"], row["offload"]) for row in estimate.combinations(s, {}, gib)}


@pytest.fixture
def no_table(monkeypatch):
    """For tests of one batch size: the table of nine takes seconds."""
    monkeypatch.setattr(memory_advice, "largest_batch", lambda config, run, gib: 1)


CARDS_OF_THE_README = re.findall(
    r"^\| (?:(\d+) x )?(\d+) GB \| `(config/\S+) (.*?)`.* \| ([\d.]+) \| (\d+) \|$",
    (settings.ROOT / "README.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", CARDS_OF_THE_README or [None])
def test_the_readmes_settings_fit_each_card(row):
    ranks, card, config, flags, gib, of_cpu = row
    at = estimate.resolve(config, int(ranks or 1), {}, flags.split())
    assert f"{memory.peak_gib(*at):.1f}" == gib and f"{estimate.cpu_gib(*at):.0f}" == of_cpu
    cards = {"0": 0, "8": 7.6, "12": 12, "24": estimate.CARDS["4090"], "80": estimate.CARDS["h100"]}
    smaller = list(cards)[list(cards).index(card) - 1]
    assert cards[smaller] < float(gib) + estimate.outside_gib(at[1]) < cards[card]
    _, recipe = estimate.resolve(config, int(ranks or 1), {})
    tokens = [shape.batch_size * shape.micro_steps for shape in (at[1], recipe)]
    assert tokens[0] == tokens[1], "a step has as many as in the recipe"


@pytest.mark.parametrize("name", ["ladder", "finetune", "study", "sweep"])
def test_the_estimate_includes_the_allocators_reserve(name):
    found = records.load(name)
    ours = [row for kind in ("points", "batch", "seq") for row in found.get(kind, []) if row.get("estimated_gib")]
    assert any(row.get("reserved_gib") for row in ours)
    for row in (row for row in ours if row.get("reserved_gib")):
        assert row["reserved_gib"] - row["peak_gib"] < estimate.outside_gib(estimate.run_of(row)[1]), row


@pytest.mark.parametrize(
    "ranks, sharding, shared", [(4, "hybrid", 4), (16, "hybrid", 8), (12, "hybrid", 4), (16, "zero3", 16)]
)
def test_hybrid_sharding_is_within_a_host(ranks, sharding, shared):
    settings = {"sharding": sharding, "gradient_accumulation_steps": ranks}
    assert estimate.resolve("config/llama31_8b.py", ranks, settings)[1].shard_ranks == shared


def test_the_estimate_table_omits_settings_that_train_py_refuses():
    assert {offload for _, offload in combinations("-- --cuda_graph=true")} == {"none"}
    assert {how for how, _ in combinations("-- --offload_activations=true")} == {"selective", "full"}


@pytest.mark.parametrize("card, gib", [("24", 24), ("24GB", 24), ("24gib", 24), ("47.5 GiB", 47.5), ("L40S", 44.4)])
def test_a_card_is_a_name_or_gib(card, gib):
    assert estimate.card_gib(card) == gib


@pytest.mark.parametrize(
    "words",
    [
        "--card=4090 --checkpointing=full --offload=optimizer --block_size=512",
        "--card=h100 --config=config/llama31_8b.py --ranks=4 -- --kernels=blocks",
    ],
)
def test_the_estimate_is_memory_pys(words):
    text, model, shape = estimated(words)
    largest = memory_advice.largest_batch(model, shape, 22.1 if "4090" in words else 77.6)
    assert memory.table(model, shape) in text and shape.batch_size == largest
    assert f"{memory.peak_gib(model, shape):.1f} GiB, it fits" in text
    assert (shape.kernels == "all") == ("--kernels=blocks" not in words) and shape.copy_engines == ("4090" not in words)
    assert shape.offload == ("optimizer" if "4090" in words else "none")


def test_the_estimate_counts_the_sums_of_the_micro_batches_that_the_config_asks_for(no_table):
    words = "--card=h200 --checkpointing=none --offload=none --batch_size=8 --block_size=2048"
    text, *recipe = estimated(words)
    _, *single = estimated(f"{words} -- --gradient_accumulation_steps=1")
    difference = memory.peak_gib(*recipe) - memory.peak_gib(*single)
    assert difference == pytest.approx(4 * 1_235_814_400 / 2**30, abs=0.01)
    assert "32 micro-batches per step" in text and "gradient accumulators" in text


def test_the_estimate_ends_in_a_command_for_a_shell_that_train_py_takes(tmp_path, no_table):
    baby = "--config=config/baby_llama.py --card=1.6 --batch_size=8 "
    for more in ("-- --vocab_size=257", "--ranks=2 -- --vocab_size=257 --gradient_accumulation_steps=2 --cuda_graph=0"):
        (command,) = (line for line in estimated(baby + more)[0].splitlines() if "train.py" in line)
        assert command.startswith("torchrun" if "ranks=2" in more else "python train.py config/baby_llama.py"), command
        assert "--vocab_size=257" in command, command
    config = tmp_path / "my config.py"
    config.write_text((settings.ROOT / LLAMA_1B).read_text())
    text, *_ = estimate.estimate(estimate.parse([f"--config={config}", "--", "--out_dir=my runs"]))
    (command,) = (line for line in text.splitlines() if "train.py" in line)
    words = shlex.split(command.rpartition(":")[0])
    assert words[:3] == ["python", "train.py", str(config)] and "--out_dir=my runs" in words


def test_cards_that_do_not_reach_each_other_have_no_buffers_of_copy_engines(no_table):
    for more, there in [
        ("--card=h100 --ranks=8", True),
        ("--card=4090 --ranks=8", False),
        ("--card=L40S --ranks=2 -- --copy_engines=true", True),
        ("--card=h100 --ranks=16", False),
        ("--card=h100 --ranks=16 -- --sharding=hybrid", True),
    ]:
        text, *_ = estimated(f"--offload=none --batch_size=1 {more}")
        assert ("buffers of the copy engines" in text) == there and "--copy_engines=false" not in text, more


def test_the_estimate_shows_the_first_that_fits_and_settings_choose_another():
    _, _, shape = estimated("--card=a100-40")
    assert (shape.activation_checkpointing, shape.offload) == ("none", "none")
    _, _, shape = estimated("--card=12")
    assert shape.offload == "optimizer", "12 bytes per parameter alone are more"
    text, _, shape = estimated("--card=2 --checkpointing=full")
    assert "does not fit" in text and shape.batch_size == 1 and shape.activation_checkpointing == "full"


def test_a_closed_pipe_is_not_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        process = start(["estimate", "--help"], "bench.py", stdout=closed)
        assert process.communicate() == ("", "") and process.returncode == 0


def test_the_estimate_needs_no_gpu():
    done = finish(["estimate", "--card=24"], script="bench.py", CUDA_VISIBLE_DEVICES="")
    assert "24.0 GiB - 1.5 for the CUDA context" in done.stdout and "largest batch" in done.stdout
