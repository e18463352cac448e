"""What the benchmarks run and record: processes, records, sweeps, the ladder, several GPUs. Nothing is timed."""

import json
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from benchmarks import gpus, ladder, runner, settings, snapshot
from benchmarks.records import Record
from runtime.checkpoint import load_model
from tests.runs import step_losses, wait_until, write_config

HEAD = {"command": "python bench.py step", "device": "GPU", "versions": {"nanocria": "abc", "torch": "2"}}
SIZES = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, vocab_size=2048)


# --- Processes ---


def test_functions_are_called_in_separate_processes():
    assert runner.call("settings.load_record", ranks=2, name="step") == settings.load_record("step")


def test_a_process_without_a_result_says_why():
    torchrun = "\nW1121 13:03:42.252000 4728 torch/distributed/elastic/multiprocessing/api.py:1028] Sending\nError\n==="
    assert runner.failure("ValueError: this is it" + torchrun) == {"failed": "ValueError: this is it"}
    assert runner.failure("[rank1]: torch.OutOfMemoryError: CUDA out of memory." + torchrun) == {"oom": True}


def test_a_point_that_hangs_is_ended_with_its_ranks(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(
        f"import os, time\nopen({str(tmp_path)!r} + '/pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    pids = [tmp_path / "pid0", tmp_path / "pid1"]

    def time_out(process, timeout):
        wait_until(lambda: all(path.exists() and path.read_text() for path in pids))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", time_out)
    status, printed = runner.run([str(hangs)], ranks=2)
    assert status == 1 and "took longer" in printed
    wait_until(lambda: not any(Path("/proc", path.read_text()).exists() for path in pids))


# --- Records ---


def fill(path, rows, **head):
    record = Record(path, HEAD | head)
    for trainer, row in rows.items():
        record.measure("points", {"trainer": trainer}, lambda row=row: row)
    return json.loads(path.read_text())


def test_a_record_is_continued_on_the_same_card_and_known_rows_of_this_commit_are_skipped(tmp_path):
    def speeds(data):
        return {row["trainer"]: (row["tok_per_s"], row["commit"]) for row in data["points"]}

    path = tmp_path / "new" / "record.json"
    fill(path, {"hf": {"tok_per_s": 1}, "recipe": {"tok_per_s": 2}, "torchtitan": {"failed": "Bang"}})
    elsewhere = Record(path, HEAD | {"command": "python bench.py step --trainers=hf,mine"})
    again = fill(path, {"hf": {"tok_per_s": 9}, "mine": {"tok_per_s": 3}})
    assert speeds(again) == {"hf": (1, "abc"), "recipe": (2, "abc"), "mine": (3, "abc")}, "hf is not repeated"
    elsewhere.measure("points", {"trainer": "late"}, lambda: {"tok_per_s": 4})
    newer = fill(path, {"hf": {"tok_per_s": 9}}, versions={"nanocria": "def-dirty", "torch": "2"})
    assert newer["command"] == "python bench.py step && python bench.py step --trainers=hf,mine"
    expected = {"hf": (9, "def-dirty"), "recipe": (2, "abc"), "mine": (3, "abc"), "late": (4, "abc")}
    assert speeds(newer) == expected, "two processes fill one record"
    dirty = fill(path, {"hf": {"tok_per_s": 6}}, versions={"nanocria": "def-dirty", "torch": "2"})
    assert speeds(dirty)["hf"] == (6, "def-dirty"), "the code may differ"
    for change in ({"device": "other"}, {"versions": {"nanocria": "def", "torch": "3"}}):
        with pytest.raises(SystemExit, match="another device or with another PyTorch"):
            fill(path, {"hf": {"tok_per_s": 5}}, **change)
    assert json.loads(path.read_text()) == dirty


# --- The commands ---


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(runner, "start", lambda name, s, *_, **options: Record(Path(s.out), HEAD | {"command": name}))


def test_the_step_is_measured_on_a_cpu(tmp_path, monkeypatch, plain_pytorch_on_one_core, start, capsys):
    on_cpu = dict(device="cpu", dtype="float32", kernels="none", attention="sdpa")
    monkeypatch.setattr(runner, "CONFIG", write_config(tmp_path / "tiny.py", **SIZES, ffn_dim=64, **on_cpu))
    out = tmp_path / "step.json"
    trainers = "--trainers=nanocria,nanocria-lora"
    bench.main(f"step {trainers} --shapes=2x16 --checkpointing=full --steps=3 --out={out}".split())
    rows = json.loads(out.read_text())["points"]
    assert len(rows) == 2
    for row in rows:
        assert row["tok_per_s"] == pytest.approx(32_000 / row["ms_per_step"]) and row["peak_gib"] > 0
    assert "| 2 | 16 | full |" in capsys.readouterr().out


@pytest.fixture
def card(monkeypatch, start, tmp_path):
    """Stands for a card with room for card.tokens per step. card(words) runs a command on it and returns its record;
    card.ran are the command lines, as (ranks, limit in GiB, words)."""

    def run(words, ranks=1):
        _, _, limit, *command = words  # -m benchmarks.child
        measure.ran.append((ranks, float(limit), command))
        if command[0] == "train.py":
            flags = dict(word[2:].split("=") for word in command if word.startswith("--"))
            size = int(flags["batch_size"]) * int(flags["block_size"])
        else:
            spec = json.loads(command[-1])
            size = spec["batch"] * spec["block"]
        if size > measure.tokens:
            return 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate much."
        numbers = json.dumps({"ms_per_step": 1.0, "tok_per_s": 1000.0 * size, "mfu": 0.4, "peak_gib": size / 1000})
        if command[0] == "train.py":
            Path(flags["out_dir"], "summary.json").write_text(numbers)
        return 0, f"much text\n{numbers}"

    def measure(words):
        out = tmp_path / "record.json"
        bench.main([*words.split(), f"--out={out}"])
        return json.loads(out.read_text())

    measure.ran = []
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return measure


def test_the_batch_grows_until_nothing_fits(card, tmp_path, capsys):
    card.tokens = 300 * 1024
    rows = card("--memory_limit_gib=90")["batch"]
    sizes = [(row["batch"], row["block"], "oom" in row) for row in rows]
    assert sizes == [(b, 1024, False) for b in (1, 4, 8, 16, 32, 64, 96, 112, 224)] + [(448, 1024, True)]
    assert [row["steps"] for row in rows] == [10] * 5 + [8, 5, 4, 2, 1]
    ranks, limit, (script, config, *flags) = card.ran[3]
    assert (ranks, limit, script, config) == (1, 90, "train.py", "config/llama32_1b.py")
    assert {"--batch_size=16", "--block_size=1024", "--activation_checkpointing=none", "--max_iters=12"} < set(flags)
    printed = capsys.readouterr().out
    assert "| 224 | 1,024 | 229,376,000 · 229.4 |" in printed and "| 448 | 1,024 | out of memory |" in printed
    assert (tmp_path / "record.png").stat().st_size > 10_000


def test_a_sweep_that_only_fails_says_why_and_draws_nothing(start, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "run", lambda words, ranks=1: (1, "ValueError: this is it"))
    bench.main([f"--out={tmp_path / 'record.json'}"])
    assert "failed ValueError: this is it" in capsys.readouterr().out and not [*tmp_path.iterdir()]


def test_a_sweep_of_a_config_that_is_not_there_says_so_before_it_measures_the_card(monkeypatch):
    monkeypatch.setattr(runner, "start", None)
    with pytest.raises(SystemExit, match="no_such.py"):
        bench.main(["--config=config/no_such.py"])


def test_the_study_is_both_sweeps_of_all_trainers_in_24_gib(card):
    card.tokens = 3 * 1024
    record = card("--preset=study")
    assert [row["batch"] for row in record["batch"]] == [1] * 6 + [4] * 6, "each until it does not fit"
    assert [row["block"] for row in record["seq"]] == [512] * 6 + [1024] * 6
    assert {limit for _, limit, _ in card.ran} == {24}
    plain, unfused, ours, long, hf, _ = (words for _, _, words in card.ran[:6])
    assert {"--kernels=none", "--offload=all"} < set(plain)
    assert "--kernels=blocks" in unfused and "--offload_activations=true" in long and "--offload=all" in ours
    assert json.loads(hf[-1]) | {"trainer": "hf-offload", "checkpointing": "full", "warmup": 2} == json.loads(hf[-1])


def test_adapters_stand_on_random_weights(card, tmp_path):
    mine = write_config(tmp_path / "tiny.py", **SIZES | dict(n_embd=64, ffn_dim=128, vocab_size=500))
    base = runner.random_base(mine).name
    weights = load_model(base).state_dict()
    sizes = [(w.std() if w.ndim > 1 else w.mean() / 50).item() for w in weights.values()]
    assert sizes == pytest.approx([0.02] * len(sizes), rel=0.1)
    card.tokens = 10_000
    card(f"--trainers=nanocria-lora,hf-liger-qlora --config={mine} --batches=2")
    (_, _, ours), (_, _, theirs) = card.ran
    assert f"--init_from={base}" in ours and "--lora_rank=16" in ours and "hf-liger-qlora" in theirs[-1]


def test_the_finetune_measures_some_of_its_trainers_at_their_sizes(card):
    card.tokens = 20_000
    rows = card("--preset=finetune --trainers=hf-liger-qlora,unsloth-qlora")["batch"]
    theirs = {(row["batch"], row["block"], row["checkpointing"]) for row in rows if row["trainer"] == "unsloth-qlora"}
    assert theirs == {(2, 2048, "none"), *((*size, "full") for size in [(2, 2048), (1, 8192), (4, 8192), (1, 32768)])}
    assert {row["trainer"] for row in rows} == {"hf-liger-qlora", "unsloth-qlora"} and {card.ran[0][1]} == {24}


def test_the_step_is_measured_of_each_trainer_at_each_shape(card):
    card.tokens = 20_000
    trainers = "--trainers=nanocria,hf,hf-graphs"
    rows = card(f"step {trainers} --shapes=8x2048,2x8192 --checkpointing=none,selective")["points"]
    assert [(row["trainer"], row["batch"], row["checkpointing"]) for row in rows] == [
        ("nanocria", 8, "none"), ("hf", 8, "none"), ("nanocria", 8, "selective"),
        ("nanocria", 2, "none"), ("hf", 2, "none"), ("nanocria", 2, "selective"),
    ]  # fmt: skip
    rows = card("step --measure=baby --trainers=nanocria,hf-graphs")["baby"]
    assert [row["trainer"] for row in rows][-2:] == ["nanocria --cuda_graph=true", "hf-graphs"]
    assert "--compile=true" in card.ran[-3][2]


def test_a_timeline_adds_up_allocations_and_frees():
    trace = [("alloc", 10), ("free_requested", 5), ("free_completed", 5), ("alloc", 20), ("free_requested", 10)]
    trace = [{"action": action, "size": size} for action, size in trace]
    blocks = [{"state": "active_allocated", "requested_size": 115}, {"state": "inactive", "requested_size": 9}]
    taken = {"device_traces": [[], trace], "segments": [{"blocks": blocks}]}
    assert snapshot.timeline(taken) == [110, 105, 125, 115]


@pytest.mark.parametrize(
    "name, largest", [*(("checkpointing", n) for n in (1, 40, 10_000)), ("plain", 2), ("hf_lora", 3)]
)
def test_each_technique_ends_at_the_largest_batch_that_fits(card, name, largest):
    card.tokens = largest * ladder.BLOCK_SIZE
    rows = card(f"ladder --models=1b --measure=fits --techniques={name}")["points"]
    batches = [row["batch"] for row in rows if "tok_per_s" in row]
    assert batches[0] == 1 and max(batches) == max(b for b in [1, *ladder.BATCHES_TO_TRY] if b <= largest)
    assert len(rows) <= 3 or largest != 40, "the search begins at the estimate"
    assert largest == 10_000 or any(row.get("oom") for row in rows), "the next size was tried"


@pytest.mark.parametrize("name", ["nvme", "qlora_fp8"])  # each builds on others
def test_a_technique_trains_on_a_cpu(name, train, tmp_path, plain_pytorch_on_one_core):
    sizes = dict(n_embd=256, ffn_dim=256, n_kv_head=4, max_iters=2, eval_interval=2)
    train(**sizes, out_dir=tmp_path / "base")  # the adapters' base
    flags = ladder.settings_of(name, SimpleNamespace(offload_dir=tmp_path)) | {"init_from": tmp_path / "base"}
    train(**sizes | flags)
    first, second = step_losses(tmp_path / "out")
    assert second < first


def test_each_point_is_a_run_on_so_many_ranks_and_8b_takes_all(card):
    card.tokens = 2**20
    record = card("gpus --measure=scaling,8b")
    assert [(row["ranks"], row["trainer"]) for row in record["scaling"]] == [
        *((n, name) for n in (4, 2) for name in gpus.POINTS["scaling"][-1]),
        (1, "nanocria"), (1, "recipe"), (1, "torchtitan"),
    ]  # fmt: skip
    ranks, _, zero2 = card.ran[1]
    assert ranks == 4 and {"--gradient_accumulation_steps=4", "--batch_size=16", "--sharding=zero2"} < set(zero2)
    rows = record["8b"]
    assert len(rows) == 12 and {row["ranks"] for row in rows} == {4}


def test_a_checkpoint_costs_the_difference_between_two_runs(monkeypatch, tmp_path):
    ran = []

    def train(argv, out_dir, ranks):
        ran.append(argv[-1])
        saves = "--keep_last=1" in argv
        lines = [{"step": 100, "loss": 1.0, "time": 9.0}, {"step": 200, "loss": 1.0, "time": 75.0 if saves else 53.0}]
        if len(ran) < 3:  # the third one resumes, and is not timed
            Path(out_dir, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if saves:
            folder = Path(out_dir) / "step_000200"
            folder.mkdir()
            (folder / "run.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(bytes(998))
        return {"steps": 10 if len(ran) == 3 else 200, "save_seconds": 3.0, "resume_seconds": 2.0}

    monkeypatch.setattr(runner, "train", train)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as $TMPDIR
    row = gpus.measure_checkpoint("saves", 4)
    assert ran == ["--max_iters=200", "--keep_last=1", "--max_iters=210"]
    assert row["checkpoint_bytes"] == 1000 and row["resume_seconds"] == 2.0 and row["cost"] == 0.5
