"""What fits on a card, by arithmetic, and what takes the memory in one step. Without a GPU."""

import json
import os
import re
import shlex

import pytest

from benchmarks import estimate, record, runner, snapshot
from benchmarks.peers import llama_config
from runtime import memory, memory_advice
from tests.runs import finish, start

LLAMA_1B = "config/llama32_1b.py"

# --- What takes the memory in one step ---


def frames(*calls):
    """Frames from 'file:function' strings, innermost first."""
    return [{"filename": f"/there/{call.split(':')[0]}", "name": call.split(":")[1], "line": 1} for call in calls]


STEP_OF = ("train.py:forward_backward", "train.py:<module>")
FORWARD = frames("model.py:forward", "torch/nn/modules/module.py:_call_impl", *STEP_OF)
LOSS = frames("kernels/linear_cross_entropy.py:forward", "model.py:forward", *STEP_OF)
KERNEL_BACKWARD = frames("kernels/rms_norm.py:backward", "torch/autograd/function.py:apply")
UPDATE = frames("optimizers/adamw.py:update", "train.py:update")
MIB = 2**20


def snapshot_of(events, before):
    """As PyTorch's. events: (name, MiB, frames) of an allocation or a name of a free; before: live ones."""
    address, trace = {name: 1000 + i for i, (name, _, _) in enumerate(before)}, []
    size = {name: mib * MIB for name, mib, _ in before}
    for event in events:
        if isinstance(event, str):
            entry = {"addr": address.pop(event), "size": size[event], "frames": []}
            trace += [{"action": "free_requested"} | entry, {"action": "free_completed"} | entry]
        else:
            name, mib, made_by = event
            address[name], size[name] = 2000 + len(trace), mib * MIB
            trace.append({"action": "alloc", "addr": address[name], "size": size[name], "frames": made_by})
    made = {name: made_by for name, _, made_by in [*before, *(e for e in events if not isinstance(e, str))]}
    live = [{"state": "active_allocated", "address": a, "size": size[n], "requested_size": size[n], "frames": made[n]}
            for n, a in address.items()]  # fmt: skip
    free = {"state": "inactive", "address": 1, "size": 9, "requested_size": 9, "frames": []}
    other = {"device": 0, "blocks": [free | {"state": "active_allocated"}]}
    return {"device_traces": [[], trace], "segments": [{"device": 1, "blocks": [*live, free]}, other]}


SNAPSHOT = snapshot_of(
    before=[
        ("weights", 20, frames("torch/nn/modules/module.py:_apply", "model.py:to_empty", "train.py:<module>")),
        ("moments", 120, frames("optimizers/on_device.py:add", "optimizers/optimizer.py:init", "train.py:<module>")),
        ("workspace", 32, FORWARD),
        ("old batch", 1, []),
    ],
    events=[
        ("kept", 50, FORWARD), ("passing", 7, FORWARD), "passing", "old batch", ("chunk", 30, LOSS), ("dW", 40, LOSS),
        "chunk", ("dx", 8, []), ("norm", 3, KERNEL_BACKWARD), "norm", ("grad", 20, []), "dx", "kept", "dW",
        ("last", 2, []), "last", ("square", 5, UPDATE), "square", "grad",
    ],
)  # fmt: skip


def test_allocations_are_classified_by_code_and_lifetime():
    totals = snapshot.timeline(SNAPSHOT)
    most = {part: max(values) / MIB for part, values in totals.items()}
    assert most == {
        "weights": 20, "optimizer": 120, "gradients": 20, "saved activations": 50, "loss head": 70,
        "temporary": 11, "other": 33,
    }  # fmt: skip
    assert {part: values[-1] / MIB for part, values in totals.items() if values[-1]} == {
        "weights": 20, "optimizer": 120, "other": 32
    }, "what the step leaves"  # fmt: skip


def test_the_peak_is_made_of_its_parts():
    found = snapshot.summarized(snapshot.timeline(SNAPSHOT))
    peak = {part: round(gib * 1024) for part, gib in found["at_peak"].items() if gib}
    assert peak == {"weights": 20, "optimizer": 120, "other": 32, "saved activations": 50, "loss head": 70}
    assert found["peak_gib"] * 1024 == pytest.approx(292)
    assert len(found["at"]) == len(found["gib"]["weights"])


def test_the_head_of_transformers_and_the_gradients_of_its_logits_are_the_loss_head():
    linear, llama = "torch/nn/modules/linear.py:forward", "transformers/modeling_llama.py:forward"
    loss = frames("torch/nn/functional.py:cross_entropy", "transformers/loss/loss_utils.py:ForCausalLMLoss", llama)
    optimizer = frames("torch/optim/adamw.py:_init_group", "torch/optim/optimizer.py:wrapper")
    shard = frames(
        "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:_init_sharded_param", "peers.py:build_hf_masters"
    )
    reduced = frames("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce")
    totals = snapshot.timeline(snapshot_of(
        before=[("moments", 80, optimizer), ("shard", 40, shard)],
        events=[
            ("mlp", 10, frames(linear, llama, llama, llama)), ("logits", 100, frames(linear, llama)),
            ("float", 200, loss), ("dfloat", 200, []), ("dlogits", 100, []), "dfloat", "float", "logits", "dlogits",
            ("dx", 10, []), ("reduced", 40, reduced), "dx", "mlp", ("norm", 1, optimizer), "norm", "reduced",
        ],
    ))  # fmt: skip
    assert {part: max(values) / MIB for part, values in totals.items() if any(values)} == {
        "weights": 40, "optimizer": 80, "gradients": 40, "saved activations": 10, "loss head": 600, "temporary": 10
    }  # fmt: skip


# train.py and a peer in separate processes, as the snapshot runs them, on the CPU, where nothing is recorded.
NOTED_ON_CPU = """
import json, sys
import torch
from benchmarks import peers, snapshot

said = []
torch.cuda.memory._record_memory_history = lambda **options: said.append(options.get("clear_history", "first"))
torch.cuda.memory._dump_snapshot = lambda path: said.append(path)
if sys.argv[2] != "train.py":
    def measure(warmup, steps, **spec):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight])
        model = torch.nn.ParameterList([weight])
        losses = [peers.train_step(model, lambda x, y: (weight * x).sum(), optimizer, torch.ones(3), None)()[0]
                  for _ in range(warmup + steps)]
        return {"first_loss": losses[0], "last_loss": losses[-1], "n": len(losses)}
    peers.measure = measure
snapshot.note(*sys.argv[1:])
print(json.dumps({"said": said}))
"""
TRAIN = ["train.py", "config/baby_llama.py", "--device=cpu", "--n_layer=1", "--n_embd=32", "--n_head=2",
         "--n_kv_head=1", "--ffn_dim=32", "--block_size=16", "--batch_size=2", "--keep_last=0",
         "--eval_iters=1"]  # fmt: skip


def test_one_step_is_noted_of_ours_and_of_a_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # else the interpreter would run the whole step
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # with a GPU train.py itself records allocations
    ours = [*TRAIN, f"--out_dir={tmp_path}", f"--max_iters={snapshot.STEP + 1}"]
    for words in (ours, ["-m", "benchmarks.call", "peers.measure", '{"warmup": 4, "steps": 2}']):
        result, printed = runner.run(["-c", NOTED_ON_CPU, "there.pickle", *words])
        assert result == {"said": ["first", True, "there.pickle"]}, printed


def test_a_missing_snapshot_is_reported(monkeypatch):
    monkeypatch.setattr(runner, "run", lambda command, ranks=1: (None, "CUDA out of memory"))
    rows = [row for _, row in snapshot.measured(snapshot.parse(["--peers=hf,liger", "--offload=optimizer"]))]
    assert [(row["arm"], row["offload"], row["oom"]) for row in rows] == [
        ("all", "optimizer", True), ("hf", "all", True), ("liger", "all", True)
    ]  # fmt: skip


# --- The estimate ---


def estimated(words):
    return estimate.estimate(estimate.parse(words.split()))


@pytest.fixture
def no_table(monkeypatch):
    """For tests of one batch size: the table of nine takes seconds."""
    monkeypatch.setattr(memory_advice, "largest_batch", lambda config, run, gib: 1)


CARDS_OF_THE_README = re.findall(
    r"^\| (?:(\d+) x )?(\d+) GB \| `(config/\S+) (.*?)`.* \| ([\d.]+) \| (\d+) \|$",
    (record.ROOT / "README.md").read_text(),
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
    found = record.load(name)
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
    _, found = estimated("--card=2 -- --cuda_graph=true")
    assert list(found["largest_batch"]) == ["none none", "selective none", "full none"]
    assert found["offload"] == "none" and not found["fits"], "offload=all would fit"
    _, found = estimated("--card=h100 -- --offload_activations=true")
    assert {at.split()[0] for at in found["largest_batch"]} == {"selective", "full"}


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
    text, result = estimated(words)
    config = llama_config(result["config"], block_size=result["block_size"])
    settings = {key: result[key] for key in ("activation_checkpointing", "offload")}
    settings |= {"kernels": "blocks" if "--kernels=blocks" in words else "all", "copy_engines": "4090" not in words}
    ranks = {"world_size": result["ranks"], "shard_ranks": result["ranks"]}
    micro_steps = 32 // result["ranks"]  # 1B's config has 32, 8B's 64: the peak is that of any number above 1
    shape = memory.RunShape(result["batch_size"], micro_steps, **settings, **ranks)
    assert result["peak_gib"] == memory.peak_gib(config, shape) and memory.table(config, shape) in text
    assert result["fits"] == (result["peak_gib"] <= result["usable_gib"])
    largest = result["largest_batch"][f"{result['activation_checkpointing']} {result['offload']}"]
    assert largest == memory_advice.largest_batch(config, shape, result["usable_gib"])
    parts = memory_advice.cpu_parts(config, shape)
    assert result["cpu_gib"] == pytest.approx(result["ranks"] * sum(part.bytes for part in parts) / 2**30)


def test_the_estimate_counts_the_sums_of_the_micro_batches_that_the_config_asks_for(no_table):
    words = "--card=h200 --checkpointing=none --offload=none --batch_size=8 --block_size=2048"
    text, recipe = estimated(words)
    _, single = estimated(f"{words} -- --gradient_accumulation_steps=1")
    assert recipe["peak_gib"] - single["peak_gib"] == pytest.approx(4 * 1_235_814_400 / 2**30, abs=0.01)
    assert "32 micro-batches per step" in text and "gradient accumulators" in text
    peaks = [estimated(f"{words} --ranks=8 -- --copy_engines={value}")[1]["peak_gib"] for value in ("false", "true")]
    assert peaks[0] < peaks[1]


def test_the_estimate_ends_in_a_command_for_a_shell_that_train_py_takes(tmp_path, no_table):
    baby = "--config=config/baby_llama.py --card=1.6 --batch_size=8 "
    for more in ("-- --vocab_size=257", "--ranks=2 -- --vocab_size=257 --gradient_accumulation_steps=2 --cuda_graph=0"):
        (command,) = (line for line in estimated(baby + more)[0].splitlines() if "train.py" in line)
        assert command.startswith("torchrun" if "ranks=2" in more else "python train.py config/baby_llama.py"), command
        assert "--vocab_size=257" in command, command
    config = tmp_path / "my config.py"
    config.write_text((record.ROOT / LLAMA_1B).read_text())
    text, _ = estimate.estimate(estimate.parse([f"--config={config}", "--", "--wandb_run_name=my runs"]))
    (command,) = (line for line in text.splitlines() if "train.py" in line)
    words = shlex.split(command.rpartition(":")[0])
    assert words[:3] == ["python", "train.py", str(config)] and "--wandb_run_name=my runs" in words


def test_cards_that_do_not_reach_each_other_have_no_buffers_of_copy_engines(no_table):
    for more, there in [
        ("--card=h100 --ranks=8", True),
        ("--card=4090 --ranks=8", False),
        ("--card=L40S --ranks=2 -- --copy_engines=true", True),
        ("--card=h100 --ranks=16", False),
        ("--card=h100 --ranks=16 -- --sharding=hybrid", True),
    ]:
        text, _ = estimated(f"--offload=none --batch_size=1 {more}")
        assert ("buffers of the copy engines" in text) == there and "--copy_engines=false" not in text, more


def test_the_estimate_shows_the_first_that_fits_and_settings_choose_another():
    _, found = estimated("--card=a100-40")
    assert (found["activation_checkpointing"], found["offload"]) == ("none", "none")
    _, found = estimated("--card=12")
    assert found["offload"] == "optimizer", "12 bytes per parameter alone are more"
    text, found = estimated("--card=2 --checkpointing=full")
    assert not found["fits"] and "it does not fit" in text and found["batch_size"] == 1


def test_a_closed_pipe_is_not_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        process = start(["estimate", "--help"], "bench.py", stdout=closed)
        assert process.communicate() == ("", "") and process.returncode == 0


def test_the_estimate_needs_no_gpu_and_ends_with_a_line_of_json():
    done = finish(["estimate", "--card=24"], script="bench.py", CUDA_VISIBLE_DEVICES="")
    assert json.loads(done.stdout.splitlines()[-1])["usable_gib"] == 22.5
    assert "24.0 GiB - 1.5 for the CUDA context and the allocator's reserve = 22.5 GiB" in done.stdout
