"""The sweeps: what they run, when they stop, what their records say; and the estimate that needs no GPU.

    pytest test_bench_sweep.py        half a minute, without a GPU

What needs a GPU, the measuring itself, is in the records that it leaves.
"""

import copy
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bench
from benchmarks import draw, estimate, limited, report, snapshot, step, sweep, swept
from benchmarks.peers import llama_config
from runtime import memory, memory_stats

LLAMA_1B = "config/llama32_1b.py"

# ----------------------------------------------------------------------------------------------------------------------
# Peers that offload

# Trains transformers' tiny Llama three times from the same weights on the CPU: plainly in float32, under FSDP2 with
# float32 weights and bf16 compute, and offloaded. Prints the losses and how far the final weights are apart.
PEERS_ON_CPU = """
import json, os, sys
sys.path.insert(0, os.getcwd())
import torch
from benchmarks import peers
from model import LlamaConfig

torch.set_num_threads(1)
c = LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=96, vocab_size=61, block_size=24,
                tie_embeddings=True)
device, result = torch.device("cpu"), {}
for arm in ("hf", "hf-masters", "hf-offload"):
    options = {"dtype": torch.float32} if arm == "hf" else {}
    model, loss_of = peers.BUILDERS[arm](c, "full", device, **options)
    torch.manual_seed(1)
    peers.fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    tokens = torch.randint(c.vocab_size, (3, c.block_size), generator=torch.Generator().manual_seed(1))
    losses = [peers.train_step(model, loss_of, optimizer, tokens, tokens) for _ in range(5)]
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    result[arm] = {"losses": losses, "dtypes": sorted({str(p.dtype) for p in full.values()}), "n": len(full),
                   "norm": sum(p.double().square().sum().item() for p in full.values()) ** 0.5}
    if peers.dist.is_initialized():
        peers.dist.destroy_process_group()
print(json.dumps(result), flush=True)
os._exit(0)  # gloo's threads now and then abort the interpreter that tidies up around them
"""


def test_the_offloaded_peer_trains_as_the_one_that_is_not(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "peers.py").write_text(PEERS_ON_CPU)
    result, printed = step.run([str(tmp_path / "peers.py")])
    assert result is not None, printed
    plain, masters, offload = (result[arm] for arm in ("hf", "hf-masters", "hf-offload"))
    assert offload == masters, "the same numbers, wherever the weights are"
    assert masters["dtypes"] == ["torch.float32"], "the weights that learn"
    assert masters["n"] == plain["n"], "the head is still the embedding"
    for (loss, norm), (other_loss, other_norm) in zip(plain["losses"], masters["losses"], strict=True):
        assert abs(other_loss / loss - 1) < 0.02 and abs(other_norm / norm - 1) < 0.05, (plain, masters)
    assert plain["losses"][-1][0] < plain["losses"][0][0] - 0.2


def test_a_program_is_held_to_its_part_of_the_card(tmp_path, monkeypatch, capsys):
    held = []
    properties = type("Properties", (), {"total_memory": 96 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *fraction: held.append(fraction))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["as it was"])
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv[1:])")
    limited.main(["24", str(tmp_path / "script.py"), "config/x.py", "--batch_size=8"])
    limited.main(["96", "-m", "this"])
    limited.main(["48"])
    assert held == [(0.25, 3), (1.0, 3), (0.5, 3)]
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit, match="memory_limit_gib=200: the card has 96.0 GiB"):
        limited.main(["200", "-m", "this"])
    assert printed.startswith("__main__ ['config/x.py', '--batch_size=8']") and "Beautiful is better" in printed


# ----------------------------------------------------------------------------------------------------------------------
# What is run


@pytest.mark.parametrize(
    "words, message",
    [
        (["sweep=bath"], "sweep=bath: there are batch, seq, both. Did you mean batch?"),
        (["arms=al"], "arms=al: there are all, long, kernels, torch, none. Did you mean all?"),
        (["peers=ligr"], "Did you mean liger?"),
        (["preset=stdy"], "preset=stdy: there are study, 8b. Did you mean study?"),
        (["memory_limit=24"], "Did you mean memory_limit_gib=?"),
        (["memory_limit_gib=24GB"], "memory_limit_gib=24GB: a number of GiB, as in memory_limit_gib=24"),
        (["memory_limit_gib=0"], "memory_limit_gib=0: a number of GiB"),
        (["memory_limit_gib=0.0"], "memory_limit_gib=0.0: a number of GiB"),
        (["memory_limit_gib=-1"], "memory_limit_gib=-1: a number of GiB"),
        (["peers=hf", "--n_layer=4"], "--n_layer: the peers would train another model; write it in a config, or say"),
        (["config=config/baby_llama.py"], "config/baby_llama.py leaves vocab_size to its dataset: say --vocab_size="),
        (["batches=1,none"], "batches=none: a whole number, at least 1"),
        (["config=config/none.py"], "config/none.py does not exist"),
        (["ranks=64"], "ranks=64: torch sees"),
        (["at_once=64"], "at_once=64: torch sees"),
        (["peers=recipe", "offload=all"], "peers=recipe: it offloads nothing"),
        (["peers=hf", "checkpointing=selective"], "Hugging Face knows only none and full"),
        (["--offload=all"], "--offload: the sweep sets it; say offload=..."),
        (["--activation_checkpointing=full"], "the sweep sets it; say checkpointing=..."),
        (["--max_iters=4"], "--max_iters: each measured run has its own, leave it out"),
        (["--out_dir=/tmp/x"], "--out_dir: each measured run has its own"),
        (["sweep=batch,seq"], "sweep=batch,seq: one at a time, or sweep=both"),
        (["preset=study,8b"], "preset=study,8b: one at a time"),
        (["contexts=65536"], "contexts=65536: not read by sweep=batch: say sweep=seq or sweep=both"),
        (["batch_size=8"], "batch_size=8: not read by sweep=batch"),
        (["sweep=seq", "batches=1,8"], "batches=1,8: not read by sweep=seq: say sweep=batch or sweep=both"),
        (["preset=8b", "contexts=512"], "contexts=512: not read by sweep=batch"),
    ],
)
def test_a_slip_is_answered_with_a_sentence(words, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        bench.main(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [[], ["sweep=both"], ["preset=study"], ["preset=8b"]])
def test_without_a_gpu_it_says_what_to_run_instead(words):
    with pytest.raises(SystemExit, match="needs a CUDA GPU.*\n.*bench.py estimate card=4090"):
        bench.main(words)


BABY = ["config=config/baby_llama.py", "--vocab_size=257"]


def test_flags_say_what_a_config_leaves_open(monkeypatch):
    Card(monkeypatch)
    ((_, found),) = rows_of([*BABY, "checkpointing=full", "batches=1", "--cuda_graph=false", "--dataset=my text"])
    assert found["flags"] == "--vocab_size=257 --cuda_graph=false '--dataset=my text'"
    assert swept.checkpoints_kb(found) == 2 * 4 * 128 / 1000 and swept.settings(found)["dataset"] == "my text"
    assert snapshot.parse([*BABY, "peers=none"])["flags"] == ["--vocab_size=257"]
    with pytest.raises(ValueError, match="--vocab_size: the peers would train another model"):
        snapshot.parse([*BABY, "peers=hf"])


def test_a_config_of_the_users_own_folder_is_found_and_its_changes_are_seen(monkeypatch, tmp_path):
    (tmp_path / "my.py").write_text((report.ROOT / LLAMA_1B).read_text())
    monkeypatch.chdir(tmp_path)
    for options in (sweep.parse(["config=my.py"], 1)[1], snapshot.parse(["config=my.py"])):
        assert options["config"] == str(tmp_path / "my.py")
    assert estimate.config_path(LLAMA_1B) == LLAMA_1B, "the repository's"
    before = sweep.untracked(str(tmp_path / "my.py"))
    assert before == sweep.untracked(str(tmp_path / "my.py"))
    (tmp_path / "my.py").write_text("n_layer = 2")
    assert before != sweep.untracked(str(tmp_path / "my.py"))
    if (report.ROOT / ".git").exists():
        assert sweep.untracked(LLAMA_1B) == {}


class Card:
    """Points as a card of so many tokens a step would have them; notes what was run, and under what limit."""

    def __init__(self, monkeypatch, tokens=5000, answer=None):
        self.tokens, self.answer, self.ran, self.gpus = tokens, answer, [], []
        monkeypatch.setattr(step, "run", self.run)

    def run(self, command, ranks=1, timeout=None, gpu=None, gpus=1):
        limit = []
        self.gpus.append((gpu, gpus))
        if command[:2] == ["-m", "benchmarks.limited"]:
            limit, command = command[2:3], command[3:]
        self.ran.append((ranks, *limit, *command))
        if command[0] == "train.py":
            flags = dict(word[2:].split("=") for word in command if word.startswith("--"))
            size, folder = int(flags["batch_size"]) * int(flags["block_size"]), Path(flags["out_dir"])
        else:
            spec = json.loads(command[2])
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
    return list(sweep.measured(*sweep.parse(words, n_gpus)))


def places(rows):
    return [(kind, row["arm"], row["batch"], row["block"], row["oom"]) for kind, row in rows]


def test_without_words_the_batch_grows_until_nothing_fits(monkeypatch):
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
    monkeypatch.setattr(
        step, "nanocria_point", lambda *at, flag, **_: {"oom": True} if "fused" in flag else {"tok_per_s": 1.0}
    )
    rows = rows_of(["arms=torch,all", "peers=liger", "batches=1,4,8"])
    assert places(rows) == [
        ("batch", "torch", 1, 1024, True), ("batch", "all", 1, 1024, False), ("batch", "liger", 1, 1024, False),
        ("batch", "all", 4, 1024, False), ("batch", "liger", 4, 1024, False),
        ("batch", "all", 8, 1024, False), ("batch", "liger", 8, 1024, True),
    ]  # fmt: skip
    assert [json.loads(command[-1])["arm"] for command in card.ran] == ["hf-liger-masters"] * 3


def test_the_study_is_both_sweeps_of_four_arms_and_two_peers_in_24_gib(monkeypatch):
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: 2**40)
    card = Card(monkeypatch, tokens=3 * 1024)
    kinds, options = sweep.parse(["preset=study"], 1)
    assert options["out"] == report.ASSETS / "study.json" and kinds == ["batch", "seq"]
    rows = rows_of(["preset=study"])
    arms = ["torch", "kernels", "all", "long", "hf", "liger"]
    assert places(rows) == [
        *[("batch", arm, 1, 1024, False) for arm in arms], *[("batch", arm, 4, 1024, True) for arm in arms],
        *[("seq", arm, 4, 512, False) for arm in arms], *[("seq", arm, 4, 1024, True) for arm in arms],
    ]  # fmt: skip
    assert {command[1] for command in card.ran} == {"24"}, "ours and the peers alike"
    assert {row["offload"] for _, row in rows} == {"all"}, "ours and the peers alike"
    torch_arm, kernels = (set(card.ran[i]) for i in (0, 1))
    assert {"--fused_kernels=false", "--fused_loss=false", "--offload=all"} < torch_arm
    assert "--fused_loss=false" in kernels and "--fused_kernels=false" not in kernels
    assert "--offload_activations=true" in card.ran[3]
    peer = json.loads(card.ran[4][-1])
    assert (peer["arm"], peer["checkpointing"], peer["warmup"]) == ("hf-offload", "full", 2)
    assert sweep.parse(["preset=study", "offload=none", "steps=5"], 1)[1]["offload"] == ["none"], "words override"


def test_the_8b_is_on_all_gpus_beside_the_recipe(monkeypatch):
    card = Card(monkeypatch, tokens=600)
    rows = rows_of(["preset=8b"], n_gpus=4)
    assert places(rows)[:2] == [("batch", "all", 1, 512, False), ("batch", "recipe", 1, 512, False)]
    assert {command[0] for command in card.ran} == {4} and card.ran[0][1:3] == ("train.py", "config/llama31_8b.py")
    assert "--gradient_accumulation_steps=4" in card.ran[0] and card.ran[1][1:3] == ("-m", "benchmarks.peers")


def test_several_offloads_and_settings_of_ours_are_series_of_their_own(monkeypatch):
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: 2**40)
    card = Card(monkeypatch, tokens=100)
    rows = rows_of(["offload=none,optimizer,all", "checkpointing=none,full", "peers=hf", "--compile=true", "batches=1"])
    assert [(row["arm"], row["checkpointing"], row["offload"], row["flags"]) for _, row in rows] == [
        (arm, checkpointing, offload, "" if arm == "hf" else "--compile=true")
        for checkpointing in ("none", "full")
        for arm, offload in [("all", "none"), ("hf", "none"), ("all", "optimizer"), ("hf", "all"), ("all", "all")]
    ]
    assert "--compile=true" in card.ran[0] and "--compile=true" not in str(card.ran[1])


def test_what_a_record_has_is_not_measured_again(monkeypatch, tmp_path):
    out, words = tmp_path / "sweep.json", ["arms=all,torch", "sweep=both", "batches=1,4,8", "contexts=512,1024"]
    words += ["batch_size=2"]
    first = Card(monkeypatch, tokens=5000)
    record = RECORD | {"batch": [], "seq": []}
    rows = sweep.measured(*sweep.parse(words, 1))
    stopped, _ = step.fill(copy.deepcopy(record), itertools.islice(rows, 5), out, swept.ROWS, lambda *_: "")
    assert sweep.known_rows(record, tmp_path / "none.json", None) == {}
    known = sweep.known_rows(record, out, None)
    usual = {row["steps"] for row in known.values() if not row["oom"]}
    assert usual == {10} and sweep.known_rows(record, out, 10) == known
    assert [row["oom"] for row in sweep.known_rows(record, out, 3).values()] == [True], "of other steps, no time"
    card = Card(monkeypatch, tokens=5000)
    again = list(sweep.measured(*sweep.parse(words, 1), known))
    assert [row for _, row in again[:5]] == stopped["batch"] and stopped["batch"][4]["oom"]
    assert len(first.ran) == 5 and len(card.ran) == 5
    assert len(again) == 10 and again[5][1]["arm"] == "torch" and again[5][1]["oom"]
    for versions in ({"nanocria": "abc-dirty"}, {"nanocria": "other"}):
        changed = record | {"versions": record["versions"] | versions}
        assert sweep.known_rows(changed, out, None) == {}

    def keep(commit, device="1 x GPU", out=out):
        new = record | {"device": device, "versions": record["versions"] | {"nanocria": "new"}}
        step.keep([commit], new, out)
        return new["versions"]["nanocria"]

    assert keep("abc") == "abc, new"
    with pytest.raises(SystemExit, match=f"keep=other: {out} does not go on with that, say keep=abc"):
        keep("other")
    with pytest.raises(SystemExit, match="there is no .*none.json to go on with"):
        keep("abc", out=tmp_path / "none.json")
    with pytest.raises(SystemExit, match="keep=abc: .* it is of another device or other packages"):
        keep("abc", device="2 x GPU")


def test_the_contexts_know_what_the_batches_have_measured(monkeypatch):
    card = Card(monkeypatch, tokens=5000)
    rows = rows_of(["sweep=both", "batches=1,4,8", "contexts=512,1024,2048"])
    assert places(rows)[3:] == [
        ("seq", "all", 4, 512, False), ("seq", "all", 4, 1024, False), ("seq", "all", 4, 2048, True)
    ]  # fmt: skip
    assert len(card.ran) == 5 and rows[1][1] == rows[4][1]


def test_points_at_once_have_a_gpu_each_and_stand_in_the_order_of_one_at_a_time(monkeypatch):
    words = ["arms=all,torch,kernels", "peers=hf", "batches=1,4,8"]
    Card(monkeypatch, tokens=5000)
    alone = rows_of(words, n_gpus=4)
    card = Card(monkeypatch, tokens=5000)
    beside = rows_of([*words, "at_once=2"], n_gpus=4)
    assert [(kind, {key: row[key] for key in row if key != "at_once"}) for kind, row in beside] == alone
    assert {row["at_once"] for _, row in beside} == {2} and not any("at_once" in row for _, row in alone)
    assert set(card.gpus) == {(0, 2), (1, 2)}
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: 30 * 2**30)
    ((_, row),) = rows_of(["offload=optimizer", "batches=1", "at_once=2"], n_gpus=2)
    assert row["failed"] == (
        "offload=optimizer needs 16.1 GiB of CPU memory, this machine has 15.0 for each of 2 points at once"
    )
    with pytest.raises(ValueError, match="at_once=2: each point has 2 GPUs by ranks="):
        sweep.parse(["ranks=2", "at_once=2"], 4)


AT_ONCE = """
import os, sys
from benchmarks import step
def work(item, gpu):
    command = ["-c", f"import os, sys, time; open('{sys.argv[1]}/' + str(os.getpid()), 'w').write("
               "os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + str(sorted(os.sched_getaffinity(0)))); time.sleep(600)"]
    return step.run(command, gpu=gpu, gpus=2)
list(step.spread(work, range(5), 2))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_points_at_once_end(tmp_path, number):
    # default_int_handler: where the tests run in the background, a shell has SIGINT ignored, and what they start too
    script = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + AT_ONCE
    )
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=report.ROOT, stderr=subprocess.DEVNULL, env=environment)
    until = time.monotonic() + 60
    while len(files := list(tmp_path.iterdir())) < 2 or not all(file.read_text() for file in files):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    seen = sorted(file.read_text().split(maxsplit=1) for file in files)
    assert [gpu for gpu, _ in seen] == ["0", "1"]
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(json.loads(seen[0][1])) & set(json.loads(seen[1][1])), "each has its own cores"
    process.send_signal(number)
    assert process.wait(20) != 0
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name), 0)
    assert len(list(tmp_path.iterdir())) == 2, "and no other begins"


def test_what_is_not_installed_is_asked_for_once(monkeypatch):
    Card(monkeypatch, answer={"missing": "No module named 'liger_kernel'"})
    rows = rows_of(["sweep=both", "arms=all", "peers=liger", "batches=1", "contexts=512"])
    liger = [row for _, row in rows if row["arm"] == "liger"]
    assert len(liger) == 1
    assert swept.line(liger[0]).endswith(f"-  No module named 'liger_kernel': pip install {step.PIP['liger']}")


def test_too_little_cpu_memory_is_said_before_the_run_with_the_bytes(monkeypatch):
    card = Card(monkeypatch)
    monkeypatch.setattr(memory_stats, "cpu_available", lambda: 4 * 2**30)
    rows = rows_of(["offload=optimizer", "peers=hf", "batches=1,4"])
    ours, peer = (row["failed"] for _, row in rows)
    assert ours == "offload=optimizer needs 16.1 GiB of CPU memory, this machine has 4.0"
    assert peer == "offload=all needs 18.4 GiB of CPU memory, this machine has 4.0"
    assert not card.ran and not any("failed" in row for _, row in rows_of(["batches=1"]))


def test_what_train_py_would_refuse_is_a_row_that_says_why(monkeypatch):
    card = Card(monkeypatch)
    ((_, row),) = rows_of(["arms=long", "checkpointing=full", "batches=1,4", "--compile=true"])
    assert row["failed"].startswith("offload_activations does not work") and not card.ran


def test_peers_can_be_measured_alone(monkeypatch):
    Card(monkeypatch)
    assert [row["arm"] for _, row in rows_of(["arms=none", "peers=liger,recipe", "batches=1"])] == ["liger", "recipe"]


def test_long_steps_are_fewer():
    assert [sweep.n_steps(batch * block) for batch, block in [(1, 512), (112, 1024), (4, 65536), (4, 131072)]] == [
        (2, 10), (2, 4), (1, 2), (1, 1)
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Records, tables, plots


def row(arm, batch, block=1024, tok_per_s=20_000.0, peak_gib=10.0, offload="optimizer", limit_gib=24.0, **more):
    where = (LLAMA_1B, arm, 1, batch, block, "full", offload, limit_gib, "")
    place = dict(zip(swept.PLACE, where, strict=True))
    numbers = {"oom": False, "tok_per_s": tok_per_s, "ms_per_step": 1.0, "mfu": 0.4, "peak_gib": peak_gib}
    return place | numbers | {"reserved_gib": peak_gib + 1} | more


def out_of_memory(row):
    return {key: row[key] for key in swept.PLACE} | {"oom": True}


def exact(row):
    """With a peak as estimated."""
    gib = swept.estimated_gib(row)
    return row | {"peak_gib": gib, "estimated_gib": gib}


RECORD = {
    "command": "python bench.py preset=study", "device": "1 x GPU",
    "versions": {"nanocria": "abc", "torch": "2.11.0+cu130", "transformers": "5.17.0", "torchtitan": "0.2.0"},
    "copy_tb_s": 4.2, "matmul_tflops": 700.0,
    "batch": [exact(row("all", 64, tok_per_s=40_000.0)), exact(row("all", 112, tok_per_s=50_000.0)),
              row("hf", 8, offload="all"), out_of_memory(row("hf", 16, offload="all")),
              row("liger", 64, tok_per_s=32_000.0, peak_gib=10.8, offload="all"),
              row("liger", 112, tok_per_s=40_000.0, peak_gib=18.0, offload="all")],
    "seq": [out_of_memory(row("torch", 4, 2048)), exact(row("all", 4, 8192))],
}  # fmt: skip


def test_a_line_stands_under_its_header():
    found = RECORD["batch"][1]
    printed = swept.line(found)
    assert len(printed) == len(swept.HEADER)
    longest = swept.line(found | {"arm": "long"})
    assert len(longest) == len(printed) and f"{swept.TITLES['long']} " in longest
    for title, cell in [("trainer", "nanocria"), ("batch", "112"), ("tok/s", "50,000"), ("MFU", "40.0%")]:
        if title == "trainer":
            assert printed.startswith(cell)
        else:
            assert printed[: swept.HEADER.index(title) + len(title)].endswith(f" {cell}"), printed
    assert swept.line(out_of_memory(found)).endswith("out of memory")
    assert "24.0%" not in swept.line(found | {"mfu": None, "reserved_gib": None})


def test_ratios_are_ours_over_each_peer_at_the_same_size():
    found = swept.ratios(RECORD["batch"])
    assert [(r["batch"], r["peer"], r["tok_per_s"]) for r in found] == [(64, "liger", 1.25), (112, "liger", 1.25)]
    assert found[1]["peak_gib"] == pytest.approx(RECORD["batch"][1]["peak_gib"] / 18.0)
    alone = [RECORD["batch"][0] | {"offload": "none"}, RECORD["batch"][4]]
    assert swept.ratios(alone) == [], "one offloads, the other does not"
    long = [row | {"arm": "long"} if row["arm"] == "all" else row for row in RECORD["batch"]]
    assert [r | {"arm": "all"} for r in swept.ratios(long)] == found and {r["arm"] for r in swept.ratios(long)} == {
        "long"
    }


def test_the_slope_is_between_the_two_largest_sizes():
    liger = [r for r in RECORD["batch"] if r["arm"] == "liger"]
    assert swept.slope_kb(liger) == pytest.approx(7.2 * 2**30 / (48 * 1024) / 1000)
    assert swept.slope_kb(RECORD["batch"][2:4]) is None, "one size alone"
    assert swept.checkpoints_kb(liger[0]) == pytest.approx(65.536), "16 layers of 2,048 numbers of 2 bytes"


def test_the_tables_show_what_fits_what_does_not_and_every_point(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "ASSETS", tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(RECORD))
    pages = {"README.md": ("fits_headline", "fits"), "benchmarks/README.md": ("study",)}
    shown = {page: "".join(f"<!-- {part} --><!-- /{part} -->" for part in parts) for page, parts in pages.items()}
    text = "".join(report.render(text, page) for page, text in shown.items())
    for part in (
        "`config/llama32_1b.py` held to 24 GiB, sequences of 1,024 tokens, activation checkpointing full, "
        "offload optimizer (the others all):",
        "| trainer | largest batch | out of memory at | its tok/s | its peak GiB | KB per extra token |",
        "Full checkpointing keeps 66 KB per token",
        "| Hugging Face | 8 | 16 | 20,000 | 10.0 | - |",
        "| Hugging Face + Liger | 112 | - | 40,000 | 18.0 | 157 |",
        "| nanocria, plain PyTorch | none | 2,048 | - | - | - |",
        "| batch | nanocria | Hugging Face | Hugging Face + Liger |",
        "| 16 | - | out of memory | - |",
        "32,000 · 10.8 |",
        "Measured on one GPU with PyTorch 2.11.0, transformers 5.17.0; copies 4.20 TB/s, matmuls 700 TFLOP/s. Command: "
        "`python bench.py preset=study`; commit: [benchmarks/records/study.json](records/study.json). Full checkpointing",
        "- With the optimizer in CPU memory, Llama 3.2 1B trains within 24 GiB of GPU memory (one GPU limited to that) "
        "at batches of 112 x 1,024 tokens or contexts of 8,192 at batch 4; Hugging Face ends at batch 8. At batch 112 "
        "nanocria is 1.25 times as fast as Hugging Face + Liger, in ",
        "| trainer | largest batch of 1,024 tokens | tok/s · GiB | largest context at batch 4 | tok/s · GiB |",
        r"| Hugging Face + Liger | 112\* | 40,000 · 18.0 | - | - |",
        "| Hugging Face | 8 | 20,000 · 10.0 | - | - |",
        "Tried: batches of 8, 16, 64, 112; contexts of 2,048, 8,192. The next size was out of memory, except at",
        "estimate is within 0.0% of each of nanocria's 3 peaks",
    ):
        assert part in text, f"{part}\nis not in\n{text}"


def test_the_headline_is_of_the_sweeps_that_were_measured():
    half = RECORD | {"batch": []}
    assert swept.headline(half) == (
        "With the optimizer in CPU memory, Llama 3.2 1B trains within 24 GiB of GPU memory (one GPU limited to that) "
        "at contexts of 8,192 at batch 4."
    )
    whole = swept.headline(RECORD | {"seq": []})
    assert "contexts" not in whole and "; Hugging Face ends at batch 8. At batch 112 nanocria is 1.25 times" in whole
    assert "Liger ends" not in whole, "it has met no batch yet that does not fit"


def test_the_headline_compares_like_with_like_and_then_moves_the_activations_too():
    batch = [*RECORD["batch"], row("long", 224, tok_per_s=90_000.0), out_of_memory(row("liger", 224, offload="all"))]
    text = swept.headline(RECORD | {"batch": batch, "seq": [*RECORD["seq"], row("long", 4, 16384)]})
    assert "; Hugging Face + Liger ends at batch 112, Hugging Face at batch 8. At batch 112 nanocria is 1.25 " in text
    assert "at batches of 112 x 1,024 tokens or contexts of 8,192 at batch 4;" in text, "of ours without those"
    assert text.endswith(" With activations on the CPU too: batch 224 or context 16,384.")
    assert r"| nanocria, activations on the CPU | 224\* |" in swept.fits_of_both(RECORD | {"batch": batch})


def test_series_are_named_by_what_differs():
    rows = [
        row("all", 1),
        row("all", 1, offload="all"),
        row("all", 1, offload="all", flags="--mlp_chunks=8"),
        row("hf", 1),
    ]
    assert list(swept.labels(rows).values()) == [
        "nanocria, offload optimizer", "nanocria, offload all", "nanocria, offload all, --mlp_chunks=8", "Hugging Face"
    ]  # fmt: skip


def test_a_record_goes_on_where_it_stopped(tmp_path, capsys):
    out = tmp_path / "study.json"
    out.write_text(json.dumps(RECORD))
    new = RECORD | {"command": "python bench.py batches=16", "batch": [], "seq": []}
    rows = [("batch", row("hf", 16, offload="all", tok_per_s=9.0)), ("seq", row("all", 4, 8192, tok_per_s=7.0))]
    record, failed = step.fill(copy.deepcopy(new), rows, out, swept.ROWS, lambda row, _: swept.line(row))
    assert failed == [] and json.loads(out.read_text()) == record
    assert [r.get("tok_per_s") for r in record["batch"][2:4]] == [20_000.0, 9.0], "no longer out of memory"
    assert len(record["batch"]) == 6 and record["seq"][1]["tok_per_s"] == 7.0
    summary = swept.summary(record, out, failed)
    assert max(found.get("largest_batch", 0) for found in summary["largest"]) == 112
    json.dumps(summary)


def test_the_plot_is_drawn_from_a_record(tmp_path):
    draw.draw_sweep(RECORD, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 20_000
    draw.draw_fits(RECORD, tmp_path / "fits.png")
    assert (tmp_path / "fits.png").stat().st_size > 20_000
    whole_card = [r | {"limit_gib": None} for r in RECORD["batch"]]
    sweep.draw(RECORD | {"batch": whole_card, "seq": []}, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").stat().st_size > 10_000
    sweep.draw(RECORD | {"batch": RECORD["batch"][3:4], "seq": []}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists(), "nothing fits, nothing to draw"


# ----------------------------------------------------------------------------------------------------------------------
# What holds the memory in one step


def frames(*calls):
    """Of 'file:function' each, the innermost first."""
    return [{"filename": f"/there/{call.split(':')[0]}", "name": call.split(":")[1], "line": 1} for call in calls]


STEP_OF = ("train.py:forward_backward", "train.py:<module>")
FORWARD = frames("model.py:forward", "torch/nn/modules/module.py:_call_impl", *STEP_OF)
LOSS = frames("kernels/linear_cross_entropy.py:forward", "model.py:forward", *STEP_OF)
KERNEL_BACKWARD = frames("kernels/rms_norm.py:backward", "torch/autograd/function.py:apply")
UPDATE = frames("driver.py:update", "train.py:update")
MIB = 2**20


def snapshot_of(events, before):
    """PyTorch's: events are (name, MiB, frames) of an allocation or a name of a free; before, what was there."""
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
        ("moments", 120, frames("driver.py:_w_of", "driver.py:__init__", "train.py:<module>")),
        ("workspace", 32, FORWARD),
        ("old batch", 1, []),
    ],
    events=[
        ("kept", 50, FORWARD), ("passing", 7, FORWARD), "passing", "old batch", ("chunk", 30, LOSS), ("dW", 40, LOSS),
        "chunk", ("dx", 8, []), ("norm", 3, KERNEL_BACKWARD), "norm", ("grad", 20, []), "dx", "kept", "dW",
        ("last", 2, []), "last", ("square", 5, UPDATE), "square", "grad",
    ],
)  # fmt: skip


def test_what_an_allocation_is_for_is_told_by_its_code_and_its_life():
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
    assert len(found["at"]) == len(found["gib"]["weights"]) and found["at"][-1] <= found["n_entries"]


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


SNAPSHOT_RECORD = {
    "command": "python bench.py snapshot", "device": "GPU", "versions": {"nanocria": "abc"}, "copy_tb_s": 4.2,
    "matmul_tflops": 700.0,
    "arms": [{"arm": arm, "batch": 8, "block": 2048, "checkpointing": "none", "offload": "none", "flags": ""}
             | snapshot.summarized(snapshot.timeline(SNAPSHOT)) for arm in ("all", "hf")],
}  # fmt: skip


def test_a_snapshot_is_drawn_and_tabled(monkeypatch, tmp_path):
    draw.draw_snapshot(SNAPSHOT_RECORD, tmp_path / "snapshot.png")
    assert (tmp_path / "snapshot.png").stat().st_size > 10_000
    monkeypatch.setattr(report, "ASSETS", tmp_path)
    (tmp_path / "snapshot.json").write_text(json.dumps(SNAPSHOT_RECORD))
    text = report.render("<!-- snapshot --><!-- /snapshot -->", "benchmarks/README.md")
    assert "| GiB at the peak | nanocria | Hugging Face |" in text and "| optimizer | 0.12 | 0.12 |" in text
    assert "0.29 GiB: weights 0.02, optimizer 0.12" in snapshot.line(SNAPSHOT_RECORD["arms"][0])
    assert snapshot.line(SNAPSHOT_RECORD["arms"][0] | {"peak_gib": 1.0}).startswith("nanocria")


# train.py and a peer in processes of their own, as the snapshot runs them, on the CPU, where nothing is recorded.
NOTED_ON_CPU = """
import json, os, sys
sys.path.insert(0, os.getcwd())
import torch
from benchmarks import peers, snapshot

said = []
torch.cuda.memory._record_memory_history = lambda **options: said.append(options.get("clear_history", "on"))
torch.cuda.memory._dump_snapshot = lambda path: said.append(path)
snapshot.keep_frames()
if sys.argv[2] == "train.py":
    snapshot.note_train(sys.argv[1], sys.argv[2:])
else:
    def measure(warmup, steps, **spec):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight])
        model = torch.nn.ParameterList([weight])
        losses = [peers.train_step(model, lambda x, y: (weight * x).sum(), optimizer, torch.ones(3), None)[0]
                  for _ in range(warmup + steps)]
        return {"first_loss": losses[0], "last_loss": losses[-1], "n": len(losses)}
    peers.measure = measure
    snapshot.note_peer(sys.argv[1], json.loads(sys.argv[2]))
print(json.dumps({"said": said}))
"""
TRAIN = ["train.py", "config/baby_llama.py", "--device=cpu", "--n_layer=1", "--n_embd=32", "--n_head=2",
         "--n_kv_head=1", "--ffn_dim=32", "--block_size=16", "--batch_size=2", "--keep_last=0",
         "--eval_iters=1"]  # fmt: skip


def test_one_step_is_noted_of_ours_and_of_a_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # or the interpreter would run the whole step
    (tmp_path / "noted.py").write_text(NOTED_ON_CPU)
    ours = [*TRAIN, f"--out_dir={tmp_path}", f"--max_iters={snapshot.STEP + 1}"]
    for words in (ours, ["{}"]):
        result, printed = step.run([str(tmp_path / "noted.py"), "there.pickle", *words])
        assert result == {"said": ["on", True, "there.pickle"]}, printed


def test_a_snapshot_that_was_not_left_is_said(monkeypatch):
    monkeypatch.setattr(step, "run", lambda command, ranks=1: (None, "CUDA out of memory"))
    rows = [row for _, row in snapshot.measured(snapshot.parse(["peers=hf,liger", "offload=optimizer"]))]
    assert [(row["arm"], row["offload"], row["oom"]) for row in rows] == [
        ("all", "optimizer", True), ("hf", "all", True), ("liger", "all", True)
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="--offload: the record names it; say offload=..."):
        bench.main(["snapshot", "--offload=all"])
    with pytest.raises(SystemExit, match="--out_dir: each measured run has its own"):
        bench.main(["snapshot", "--out_dir=x"])
    with pytest.raises(SystemExit, match="peers=recip: there are hf, liger, none"):
        bench.main(["snapshot", "peers=recip"])


# ----------------------------------------------------------------------------------------------------------------------
# The estimate


CARDS_OF_THE_README = re.findall(
    r"^\| (?:(\d+) x )?(\d+) GB \| `(config/\S+) (.*?)`.* \| ([\d.]+) \| (\d+) \|$",
    (report.ROOT / "README.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", CARDS_OF_THE_README or [None])
def test_what_the_readme_gives_each_card_fits_it(row):
    ranks, card, config, flags, gib, of_cpu = row
    settings = dict(flag.removeprefix("--").split("=") for flag in flags.split())
    at = estimate.situation(config, int(ranks or 1), settings)
    assert f"{memory.peak_gib(*at):.1f}" == gib and f"{estimate.cpu_gib(*at):.0f}" == of_cpu
    cards = {"0": 0, "8": 7.6, "12": 12, "24": estimate.CARDS["4090"], "80": estimate.CARDS["h100"]}
    smaller = list(cards)[list(cards).index(card) - 1]
    assert cards[smaller] < float(gib) + estimate.OUTSIDE_GIB < cards[card]
    _, recipe = estimate.situation(config, int(ranks or 1), {})
    tokens = [plan.batch_size * plan.micro_steps for plan in (at[1], recipe)]
    assert tokens[0] == tokens[1], "a step has as many as in the recipe"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["card=4080"],
            "card=4080: there are 3090, 4090, 5090, a10g, l4, l40s, a100-40, a100-80, h100, h200, b200, or a number of "
            "GiB, as in",
        ),
        (["card=h10"], "Did you mean h100?"),
        (["card=A100"], "Did you mean a100-40 or a100-80?"),
        (["card=0"], "card=0: there are"),
        (["card=0GB"], "card=0GB: there are"),
        (["card=24MB"], "card=24MB: there are"),
        (["block=2048"], "Did you mean block_size=?"),
        (["offload=half"], "offload=half: there are none, optimizer, all"),
        (["batch_size=0"], "batch_size=0: a whole number, at least 1"),
        (["config=llama32_1"], "llama32_1 does not exist. Did you mean"),
        (["config=config/baby_llama.py"], "config/baby_llama.py leaves vocab_size to its dataset: say --vocab_size="),
        (["--fusedloss=false"], "Unknown setting fusedloss. Did you mean fused_loss?"),
        (["--mlp_chunks=x"], "--mlp_chunks expects an int or none, got 'x'"),
        (["--batch_size=32"], "--batch_size: the table has several of them; to see one's parts say batch_size=..."),
        (["--activation_checkpointing=full"], "--activation_checkpointing: the table has several of them"),
        (["--world_size=8"], "Unknown setting world_size"),
        (["checkpointing=none", "--mlp_chunks=4"], "mlp_chunks"),
        (["--mlp_chunks", "x"], "--mlp_chunks expects an int or none, got 'x'"),
        (["card=h100", "24"], "Unknown word 24"),
        (
            ["config=config/llama31_8b.py", "card=h100", "ranks=7"],
            "gradient_accumulation_steps is 64: make it a multiple of the 7 ranks, "
            "as in --gradient_accumulation_steps=63",
        ),
        (["ranks=4", "--gradient_accumulation_steps=2"], "as in --gradient_accumulation_steps=4"),
        (["--gradient_accumulation_steps=0"], "gradient_accumulation_steps is 0: it must be at least 1"),
        (["--cuda_graph=true", "offload=all"], "cuda_graph needs one GPU and offload=none: add --cuda_graph=false"),
    ],
)
def test_a_slip_in_an_estimate_is_answered_with_a_sentence(words, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        bench.main(["estimate", *words])


HYBRID = {"sharding": "hybrid", "gradient_accumulation_steps": 8}


@pytest.mark.parametrize(
    "ranks, settings, message",
    [
        (1, {"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        (1, {"block_size": -1}, "block_size is -1: it must be at least 1"),
        (2, {"gradient_accumulation_steps": -2}, "gradient_accumulation_steps is -2: it must be at least 1"),
        (3, {"gradient_accumulation_steps": 8}, "make it a multiple of the 3 ranks, as in --gradient_accumulation_ste"),
        (8, HYBRID | {"shard_ranks": 3}, "shard_ranks is 3: it must divide the 8 ranks"),
        (8, HYBRID | {"shard_ranks": 0}, "shard_ranks is 0: it must divide the 8 ranks"),
        (8, {"shard_ranks": 2}, "shard_ranks is 2, which only hybrid sharding reads: add --sharding=hybrid, or leave"),
        (1, {"offload_activations": True, "compile": True}, "offload_activations does not work with compile"),
        (1, {"offload_activations": True, "cuda_graph": True}, "offload_activations does not work with compile"),
        (2, {"cuda_graph": True}, "cuda_graph needs one GPU and offload=none"),
        (1, {"cuda_graph": True, "offload": "optimizer"}, "cuda_graph needs one GPU and offload=none"),
        (2, {"copy_engines": True, "offload": "all"}, "copy_engines needs a model's GPUs on one host, and no offload="),
    ],
)
def test_what_train_py_would_refuse_is_not_estimated(ranks, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate.situation(LLAMA_1B, ranks, {"activation_checkpointing": "full"} | settings)


def test_what_train_py_takes_is_estimated():
    _, plan = estimate.situation(LLAMA_1B, 8, HYBRID | {"shard_ranks": 2, "copy_engines": True})
    assert (plan.world_size, plan.shard_ranks, plan.micro_steps) == (8, 2, 1)
    estimate.situation(LLAMA_1B, 1, {"cuda_graph": True, "copy_engines": True, "offload": "none"})


@pytest.mark.parametrize(
    "ranks, sharding, shared", [(4, "hybrid", 4), (16, "hybrid", 8), (12, "hybrid", 4), (16, "zero3", 16)]
)
def test_hybrid_sharding_is_within_a_host(ranks, sharding, shared):
    settings = {"sharding": sharding, "gradient_accumulation_steps": ranks}
    assert estimate.situation("config/llama31_8b.py", ranks, settings)[1].shard_ranks == shared


def test_the_table_leaves_out_what_train_py_would_refuse():
    text, found = estimate.estimate(estimate.parse(["card=2", "--cuda_graph=true"]))
    assert list(found["largest_batch"]) == ["none none", "selective none", "full none"]
    assert found["offload"] == "none" and not found["fits"], "offload=all would fit"
    _, found = estimate.estimate(estimate.parse(["card=h100", "--offload_activations=true"]))
    assert {at.split()[0] for at in found["largest_batch"]} == {"full"}


@pytest.mark.parametrize("card, gib", [("24", 24), ("24GB", 24), ("24gib", 24), ("47.5 GiB", 47.5), ("L40S", 44.4)])
def test_a_card_is_a_name_or_gib(card, gib):
    assert estimate.card_gib(card) == gib


def test_a_setting_may_stand_beside_its_value_as_for_train_py():
    words = ["--gradient_accumulation_steps", "1", "--compile", "card=24", "--rope_theta", "1e4", "--dtype=float16"]
    flags = estimate.parse(words)["flags"]
    assert flags == {"gradient_accumulation_steps": 1, "compile": True, "rope_theta": 1e4, "dtype": "float16"}


def test_the_estimate_needs_no_gpu_and_ends_with_a_line_of_json():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "bench.py", "estimate", "card=24"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=report.ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["usable_gib"] == 22.5
    assert "24.0 GiB - 1.5 for the CUDA context and the allocator's reserve = 22.5 GiB" in done.stdout


@pytest.mark.parametrize("words", [["card=4090"], ["card=a100-40", "checkpointing=full", "offload=optimizer"],
                                   ["card=h100", "config=config/llama31_8b.py", "ranks=4", "--fused_loss=false"],
                                   ["card=24", "block_size=512", "batch_size=64"]])  # fmt: skip
def test_the_estimate_is_memory_pys(words):
    text, result = estimate.estimate(estimate.parse(words))
    config = llama_config(result["config"], block_size=result["block_size"])
    fused_loss, checkpointing = "--fused_loss=false" not in words, result["activation_checkpointing"]
    ranks = {"world_size": result["ranks"], "shard_ranks": result["ranks"], "copy_engines": True}
    micro_steps = 32 // result["ranks"]  # 1B's config has 32, 8B's 64: the peak is that of any number above 1
    ranks |= {"fused_loss": fused_loss, "activation_checkpointing": checkpointing}
    plan = memory.Plan(result["batch_size"], micro_steps, offload=result["offload"], **ranks)
    assert result["peak_gib"] == memory.peak_gib(config, plan) and memory.table(config, plan) in text
    assert result["fits"] == (result["peak_gib"] <= result["usable_gib"])
    largest = result["largest_batch"][f"{result['activation_checkpointing']} {result['offload']}"]
    assert largest == memory.largest_batch(config, plan, result["usable_gib"])
    assert result["cpu_gib"] == pytest.approx(
        result["ranks"] * sum(part.bytes for part in memory.cpu_parts(config, plan)) / 2**30
    )


def test_the_estimate_counts_the_sums_of_the_micro_batches_that_the_config_asks_for():
    words = ["card=h200", "checkpointing=none", "offload=none", "batch_size=8", "block_size=2048"]
    text, recipe = estimate.estimate(estimate.parse(words))
    _, single = estimate.estimate(estimate.parse([*words, "--gradient_accumulation_steps=1"]))
    assert recipe["peak_gib"] - single["peak_gib"] == pytest.approx(4 * 1_235_814_400 / 2**30, abs=0.01)
    assert "32 micro-batches a step" in text and "gradient accumulators" in text
    _, hybrid = estimate.estimate(estimate.parse(["ranks=8", "--sharding=hybrid", "--shard_ranks=2"]))
    _, without = estimate.estimate(estimate.parse([*words, "ranks=8", "--copy_engines=false"]))
    assert (
        hybrid["ranks"] == 8
        and without["peak_gib"] < estimate.estimate(estimate.parse([*words, "ranks=8"]))[1]["peak_gib"]
    )


def test_the_estimate_ends_in_a_command_that_train_py_takes():
    words = ["config=config/baby_llama.py", "card=24", "batch_size=8", "--vocab_size=257"]
    for more, says in [([], False), (["offload=all"], True), (["ranks=2", "--gradient_accumulation_steps=2"], True)]:
        text, _ = estimate.estimate(estimate.parse([*words, *more]))
        (command,) = (line for line in text.splitlines() if "train.py" in line)
        assert ("--cuda_graph=false" in command) == says and "--vocab_size=257" in command, command
        assert command.startswith("torchrun" if "ranks=2" in more else "python train.py config/baby_llama.py"), command


def test_the_command_of_the_estimate_is_one_for_a_shell(monkeypatch, tmp_path):
    config = tmp_path / "my config.py"
    config.write_text((report.ROOT / LLAMA_1B).read_text())
    text, _ = estimate.estimate(estimate.parse([f"config={config}", "--out_dir=my runs"]))
    (command,) = (line for line in text.splitlines() if "train.py" in line)
    words = shlex.split(command.rpartition(":")[0])
    assert words[:3] == ["python", "train.py", str(config)] and "--out_dir=my runs" in words


def test_cards_that_do_not_reach_each_other_have_no_buffers_of_copy_engines():
    words = ["offload=none", "batch_size=1"]
    for more, there in [
        (["card=h100", "ranks=8"], True),
        (["card=4090", "ranks=8"], False),
        (["card=L40S", "ranks=2", "--copy_engines=true"], True),
        (["card=h100", "ranks=16"], False),
        (["card=h100", "ranks=16", "--sharding=hybrid", "--shard_ranks=8"], True),
    ]:
        text, _ = estimate.estimate(estimate.parse([*words, *more]))
        assert ("buffers of the copy engines" in text) == there and "--copy_engines=false" not in text, more


def test_the_estimate_shows_the_first_that_fits_and_words_choose_another():
    _, found = estimate.estimate(estimate.parse(["card=a100-40"]))
    assert (found["activation_checkpointing"], found["offload"]) == ("none", "none")
    _, found = estimate.estimate(estimate.parse(["card=12"]))
    assert found["offload"] == "optimizer", "12 bytes a parameter alone are more"
    text, found = estimate.estimate(estimate.parse(["card=2", "checkpointing=full"]))
    assert not found["fits"] and "it does not fit" in text and found["batch_size"] == 1


def test_check_compares_the_measured_peaks_with_the_estimates(tmp_path, capsys):
    path = tmp_path / "study.json"
    path.write_text(json.dumps(RECORD))
    with pytest.raises(SystemExit) as stop:
        bench.main(["estimate", "check", str(path)])
    assert stop.value.code == 0 and '"points": 3' in capsys.readouterr().out
    off = copy.deepcopy(RECORD)
    off["seq"][1]["peak_gib"] *= 1.2
    path.write_text(json.dumps(off))
    with pytest.raises(SystemExit) as stop:
        bench.main(["estimate", "check", str(path)])
    assert stop.value.code == 1 and "-16.7%" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="none.json does not exist"):
        bench.main(["estimate", "check", str(tmp_path / "none.json")])
    path.write_text(json.dumps(RECORD | {"batch": [], "seq": []}))
    with pytest.raises(SystemExit, match="nothing to check: there is no point of nanocria in study.json"):
        bench.main(["estimate", "check", str(path)])
    for path in (report.ASSETS / "kernels.json", report.ROOT / "README.md", tmp_path):
        with pytest.raises(SystemExit, match=f"{path} is no record of a sweep"):
            bench.main(["estimate", "check", str(path)])


@pytest.mark.parametrize("words", [["--help"], ["estimate"], ["estimate", "check", "study.json"]])
def test_a_reader_that_has_read_enough_is_no_error(words, tmp_path):
    (tmp_path / "study.json").write_text(json.dumps(RECORD))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(report.ROOT / "bench.py"), *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


SWEPT = [report.ASSETS / f"{name}.json" for name in ("sweep", "study", "study_8b")]


@pytest.mark.parametrize("path", [path for path in SWEPT if path.exists()], ids=lambda path: path.stem)
def test_the_estimate_is_within_5_percent_of_every_peak_that_was_measured(path):
    for point, deviation in swept.deviations(json.loads(path.read_text())):
        assert abs(deviation) <= 0.05, f"{deviation:+.1%} at {[point[key] for key in swept.PLACE]}"
