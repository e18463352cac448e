"""What fits on a card, by arithmetic. Without a GPU."""

import os
import re
import shlex

import pytest

from benchmarks import estimate, settings
from runtime import memory, memory_advice
from tests.runs import finish, start


def estimated(words):
    """The text, and the model and RunShape whose parts it shows."""
    return estimate.estimate(estimate.parse(words.split()))


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
def test_hybrid_sharding_is_within_a_host(ranks, sharding, shared):
    settings = {"sharding": sharding, "gradient_accumulation_steps": ranks}
    assert estimate.resolve("config/llama31_8b.py", ranks, settings)[1].shard_ranks == shared


def test_the_table_omits_settings_that_train_py_refuses(no_table):
    def combinations(words):
        rows = estimate.combinations(estimate.parse(words.split()), {}, 22.5)
        return {(row["activation_checkpointing"], row["offload"]) for row in rows}

    assert {offload for _, offload in combinations("-- --cuda_graph=true")} == {"none"}
    assert {how for how, _ in combinations("-- --offload_activations=true")} == {"selective", "full"}


@pytest.mark.parametrize(
    "words, card",
    [
        ("--card=4090 --checkpointing=full --offload=optimizer --block_size=512", 22.1),
        ("--card=H100 --config=config/llama31_8b.py --ranks=4 -- --kernels=blocks", 77.6),
        ("--card=2.5 --checkpointing=full --offload=all -- --gradient_accumulation_steps=1", 1.0),
    ],
)
def test_the_estimate_is_memory_pys_at_the_largest_batch(words, card):
    text, model, shape = estimated(words)
    largest = memory_advice.largest_batch(model, shape, card)
    assert memory.table(model, shape) in text and shape.batch_size == max(largest, 1)
    fits = "it fits" if largest else "it does not fit"
    assert f"{memory.peak_gib(model, shape):.1f} GiB, {fits}" in text
    assert shape.copy_engines == ("4090" not in words)
    assert (shape.kernels == "blocks") == ("--kernels=blocks" in words)
    assert f"--offload={shape.offload}" in words or shape.offload == "none"


def test_the_estimate_ends_in_a_command_for_a_shell_that_train_py_takes(tmp_path, no_table):
    flags = "--vocab_size=257 --gradient_accumulation_steps=2 --cuda_graph=false"
    text, *_ = estimated(f"--config=config/baby_llama.py --card=2 --ranks=2 -- {flags}")
    (command,) = (line for line in text.splitlines() if "train.py" in line)
    assert command.startswith("torchrun --standalone --nproc_per_node=2 train.py config/baby_llama.py")
    config = tmp_path / "my config.py"
    config.write_text((settings.ROOT / "config/llama32_1b.py").read_text())
    text, *_ = estimate.estimate(estimate.parse([f"--config={config}", "--", "--dataset=my data"]))
    (command,) = (line for line in text.splitlines() if "train.py" in line)
    words = shlex.split(command.rpartition(":")[0])
    assert words[:3] == ["python", "train.py", str(config)] and "--dataset=my data" in words


@pytest.mark.parametrize(
    "words, has_buffers",
    [
        ("--card=h100 --ranks=8", True),
        ("--card=4090 --ranks=8", False),
        ("--card=L40S --ranks=2 -- --copy_engines=true", True),
        ("--card=h100 --ranks=16", False),
        ("--card=h100 --ranks=16 -- --sharding=hybrid", True),
    ],
)
def test_cards_that_do_not_reach_each_other_have_no_buffers_of_copy_engines(no_table, words, has_buffers):
    text, *_ = estimated(f"--offload=none --batch_size=1 {words}")
    assert ("buffers of the copy engines" in text) == has_buffers


def test_the_estimate_shows_the_first_that_fits():
    _, _, shape = estimated("--card=a100-40")
    assert (shape.activation_checkpointing, shape.offload) == ("none", "none")
    _, _, shape = estimated("--card=12")
    assert shape.offload == "optimizer", "12 bytes per parameter alone are more"


def test_a_closed_pipe_is_not_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        process = start(["estimate", "--help"], "bench.py", stdout=closed)
        assert process.communicate() == ("", "") and process.returncode == 0


def test_the_estimate_needs_no_gpu():
    done = finish(["estimate", "--card=24"], script="bench.py", CUDA_VISIBLE_DEVICES="")
    assert "24.0 GiB - 1.5 for the CUDA context" in done.stdout and "largest batch" in done.stdout
