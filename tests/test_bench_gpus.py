"""The benchmark of several GPUs: peers train on several ranks, hanging processes are ended, rows add up. No GPU."""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import compare, gpus, limited, record, report, runner
from tests.runs import alive, wait_until

# --- Peers on several ranks ---

# benchmarks/peers.py as it runs without GPUs: gloo, nothing compiled, the same weights for any number of ranks, and
# peaks of 2 GiB on rank 0, of 3 on rank 1.
PEER_ON_CPU = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from unittest import mock
import torch
from torch.distributed.tensor import distribute_tensor
from benchmarks import peers

torch.set_num_threads(1)
materialize = peers.PlainLlama.materialize

@torch.no_grad()
def materialize_the_same(model, device):
    materialize(model, device)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    return model

cuda = {name: mock.Mock() for name in ("set_device", "reset_peak_memory_stats")}
cuda["max_memory_allocated"] = lambda: (2 + peers.RANK) * 2**30
cuda["get_device_name"] = lambda: "NVIDIA H200"
with (
    mock.patch.multiple(torch.cuda, **cuda),
    mock.patch.object(torch, "compile", lambda function, **_: function),
    mock.patch.object(peers, "own_device", lambda: torch.device("cpu")),
    mock.patch.object(peers.PlainLlama, "materialize", materialize_the_same),
):
    result = peers.measure(**json.loads(sys.argv[1]))
if peers.RANK == 0:
    print(json.dumps(result), flush=True)
peers.dist.barrier()
os._exit(0)  # gloo's threads now and then abort the interpreter that tidies up around them
"""
TINY = {"config": "config/baby_llama.py", "n_layer": 2, "n_embd": 32, "ffn_dim": 96, "n_head": 4, "n_kv_head": 2,
        "vocab_size": 257, "block": 64, "steps": 15}  # fmt: skip


@pytest.mark.parametrize(
    "arm, checkpointing, tied, steps",
    [("recipe", "full", False, {}), ("recipe-zero2", "none", True, {"warmup": 1, "steps": 1})],  # as the largest points
)
def test_two_ranks_of_the_recipe_train_as_one_on_the_same_sequences(tmp_path, arm, checkpointing, tied, steps):
    (tmp_path / "peer.py").write_text(PEER_ON_CPU)
    spec = TINY | {"arm": arm, "checkpointing": checkpointing, "tie_embeddings": tied} | steps
    points = []

    def run(ranks):
        return runner.run([str(tmp_path / "peer.py"), json.dumps(spec | {"batch": 8 // ranks})], ranks)

    with ThreadPoolExecutor() as pool:  # side by side: most of their time they import PyTorch
        results = list(pool.map(run, (1, 2)))
    for ranks, (point, printed) in zip((1, 2), results, strict=True):
        assert point is not None and "failed" not in point, printed
        assert point["tok_per_s"] == pytest.approx(8 * 64 * 1000 / point["ms_per_step"]), "of all ranks"
        assert point["peak_gib"] == 1 + ranks, "of the rank that needs most"
        points.append(point)
    one, two = points
    assert two["mfu"] / two["tok_per_s"] == pytest.approx(one["mfu"] / one["tok_per_s"] / 2), "of one GPU"
    for loss in ("first_loss", "last_loss"):
        assert abs(one[loss] - two[loss]) < 1e-4, f"{loss} is {one[loss]} on one rank, {two[loss]} on two"


# --- Processes ---


def test_a_point_that_times_out_is_killed_with_its_ranks(tmp_path, monkeypatch):
    script, pids, processes = tmp_path / "hangs.py", [tmp_path / "0", tmp_path / "1"], []
    script.write_text(
        "import os, time\nprint('said', flush=True)\n"
        "with open(os.path.join(os.path.dirname(__file__), os.environ['RANK']), 'w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        "time.sleep(99)"
    )
    communicate = subprocess.Popen.communicate

    def late(process, timeout):
        processes.append(process)
        wait_until(lambda: all(map(pid_in, pids)))
        return communicate(process, timeout=timeout if timeout > 3 else 0)

    monkeypatch.setattr(subprocess.Popen, "communicate", late)
    monkeypatch.setattr(runner, "TIMEOUT", 3)
    result, printed = runner.run([str(script)], ranks=2)
    assert result is None and printed.startswith("said") and printed.endswith("took longer than 3 seconds")
    assert processes[0].poll() is not None, "torchrun"
    wait_until(lambda: not any(alive(pid_in(file)) for file in pids))


def pid_in(file: Path) -> int:
    """The process id in a file; 0 until it exists."""
    return int((file.exists() and file.read_text()) or 0)


def test_an_interrupted_point_ends(tmp_path):
    point = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "communicate = subprocess.Popen.communicate\n"
        "subprocess.Popen.communicate = lambda *args, **options: print('waits') or communicate(*args, **options)\n"
        f"from benchmarks import runner; runner.run(['-c', {point!r}])"
    )
    options = {"cwd": record.ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-u", "-c", script], **options)
    assert process.stdout.readline() == b"waits\n"
    wait_until(lambda: pid_in(tmp_path / "pid"))
    process.terminate()
    assert process.wait() != 0
    wait_until(lambda: not alive(pid_in(tmp_path / "pid")))


def test_memory_limit_is_enforced(tmp_path, monkeypatch, capsys):
    held = []
    properties = type("Properties", (), {"total_memory": 96 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *fraction: held.append(fraction))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["as it was"])
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv[1:])")
    limited.main(24, str(tmp_path / "script.py"), "config/x.py", "--batch_size=8")
    limited.main(96, "-m", "this")
    assert held == [(0.25, 3), (1.0, 3)]
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit, match="--memory_limit_gib=200: the card has 96.0 GiB"):
        limited.main(200, "-m", "this")
    assert printed.startswith("__main__ ['config/x.py', '--batch_size=8']") and "Beautiful is better" in printed


def test_functions_are_called_in_separate_processes(capsys):
    assert runner.call("record.load", ranks=2, name="step") == record.load("step")
    failed = runner.call("record.load", ranks=2, name="no_such")
    assert "no_such.json" in failed["failed"] and "Traceback" in capsys.readouterr().err


def test_a_ranks_error_is_found_before_torchruns_report(capsys):
    printed = """
ValueError: this is it
W1121 13:03:42.252000 4728 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 4744 closing signal
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
==="""
    assert runner.failure(printed) == {"failed": "ValueError: this is it"}
    assert runner.failure("[rank1]: torch.OutOfMemoryError: CUDA out of memory." + printed) == {"oom": True}


# --- What is run ---


def test_ranks_without_gpus_are_left_out():
    assert gpus.parse(["--ranks=4,1,2"], n_gpus=2).ranks == [1, 2]
    s = gpus.parse([], n_gpus=4)
    assert (s.ranks, s.kinds) == ([1, 2, 4], ["scaling", "8b", "saves"])
    assert list(gpus.measured(gpus.parse(["--measure=8b", "--ranks=4"], n_gpus=2))) == []


def commands(monkeypatch, *words, n_gpus=4):
    """What would be run: (ranks, command)."""
    ran = []
    monkeypatch.setattr(runner, "run", lambda command, ranks=1: ran.append((ranks, command)) or (None, "out of memory"))
    rows = list(gpus.measured(gpus.parse(list(words), n_gpus)))
    return ran, rows


def test_each_point_is_a_run_on_so_many_ranks(monkeypatch):
    ran, rows = commands(monkeypatch, "--measure=scaling")
    assert [(row["ranks"], row["arm"]) for _, row in rows] == [
        *((n, arm) for n in (4, 2) for arm in ("nanocria", "nanocria-zero2", "nanocria-nccl", "recipe", "torchtitan")),
        (1, "nanocria"), (1, "recipe"), (1, "torchtitan"),
    ]  # fmt: skip
    assert all(kind == "scaling" and row["oom"] for kind, row in rows)
    assert [ranks for ranks, _ in ran] == [row["ranks"] for _, row in rows]
    _, zero2 = ran[1]
    flags = ["--gradient_accumulation_steps=4", "--batch_size=16", "--sharding=zero2"]
    assert zero2[:2] == ["train.py", "config/llama32_1b.py"] and set(flags) < set(zero2)
    assert "--copy_engines=false" in ran[2][1]
    _, recipe = ran[3]
    assert recipe[:3] == ["-m", "benchmarks.call", "peers.measure"] and json.loads(recipe[3])["arm"] == "recipe"


def test_8b_is_measured_on_all_gpus_and_selective_is_ours_alone(monkeypatch):
    ran, rows = commands(monkeypatch, "--measure=8b")
    assert {ranks for ranks, *_ in ran} == {4} and "config/llama31_8b.py" in ran[0][1]
    places = [(row["arm"], row["batch"], row["block"], row["checkpointing"]) for _, row in rows]
    at = [(2, 4096, "none"), (1, 8192, "none"), (4, 4096, "full"), (2, 8192, "full")]
    selective = [("nanocria", 4, 4096, "selective"), ("nanocria", 2, 8192, "selective")]
    assert places == [(arm, *where) for where in at for arm in ("nanocria", "recipe")] + selective
    _, rows = commands(monkeypatch, "--measure=8b", "--arms=recipe", "--shapes=4x4096", "--checkpointing=selective")
    assert [row["arm"] for _, row in rows] == ["recipe"]
    words = ["--measure=8b", "--arms=recipe", "--shapes=2x4096,4x4096", "--checkpointing=none,full"]
    _, rows = commands(monkeypatch, *words)
    found = [(row["batch"], row["block"], row["checkpointing"]) for _, row in rows]
    assert found == [(2, 4096, "none"), (4, 4096, "none"), (2, 4096, "full"), (4, 4096, "full")], "all asked for"


def test_an_optimizer_s_step_is_measured_on_one_gpu_too_with_the_same_tokens(monkeypatch):
    ran, rows = commands(monkeypatch, "--measure=optimizers", n_gpus=2)
    assert [(row["ranks"], row["arm"]) for _, row in rows] == [
        (n, f"nanocria-{name}") for n in (2, 1) for name in ("adamw", "muon", "normuon")
    ]
    flags = {"--optimizer=muon", "--gradient_accumulation_steps=8", "--batch_size=64", "--block_size=1024"}
    assert ran[1][0] == 2 and flags < set(ran[1][1]) and ran[1][1][1] == "config/linux_114m.py"


# --- Checkpoints ---


def around_a_checkpoint(monkeypatch, tmp_path, kind, steps, run):
    """The row of --measure=kind. Its second run leaves a checkpoint of 1,000 bytes, which the third resumes; run(words,
    out_dir) does the rest."""
    ran = []

    def train(words, out_dir, ranks):
        ran.append([words[-2:], ranks])
        found = run(words, Path(out_dir))
        if "--keep_last=1" in words:
            folder = Path(out_dir) / "step_000200"
            folder.mkdir(parents=True)
            (folder / "run.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(bytes(998))
        return {"steps": 10 if len(ran) == 3 else steps, "save_seconds": 3.0, "resume_seconds": 2.0} | found

    monkeypatch.setattr(runner, "train", train)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as $TMPDIR
    ((found, row),) = gpus.measured(gpus.parse([f"--measure={kind}"], 4))
    assert found == kind and row["ranks"] == 4 and row["checkpoint_bytes"] == 1000 and row["resume_seconds"] == 2.0
    runs = ((steps, 0), (steps, 1), (steps + 10, 0))
    assert ran == [[[f"--max_iters={n}", f"--keep_last={last}"], 4] for n, last in runs]
    assert not list(tmp_path.iterdir()), "nothing is left"
    return row


def test_saves_are_timed_between_the_log_lines_of_steps_100_and_200(monkeypatch, tmp_path):
    def run(words, out_dir):
        """Logs as train.py does."""
        out_dir.mkdir(exist_ok=True)
        seconds = 66.0 if "--keep_last=1" in words else 44.0
        lines = [{"step": 100, "loss": 1.0, "time": 9.0}, {"step": 200, "loss": 1.0, "time": 9.0 + seconds}]
        (out_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {}

    row = around_a_checkpoint(monkeypatch, tmp_path, "saves", 200, run)
    assert row["intervals"] == 1 and "every 100 steps" in report.saves_sentences({"saves": [row]})
    assert row["cost"] == 0.5, f"{row['seconds_without']} s without, {row['seconds_with']} s with"


def test_the_cpu_memory_of_a_save_is_that_of_a_run_which_waits_for_it(monkeypatch, tmp_path):
    used = iter([100.0, 105.0, 99.0])

    def run(words, out_dir):
        assert {"--offload=all", "--async_save=false"} < set(words)
        return {"cpu_gib": next(used)}

    row = around_a_checkpoint(monkeypatch, tmp_path, "memory", 3, run)
    assert "100.0 GiB of CPU memory, 105.0 while" in (text := report.save_memory_sentences({"memory": [row]}))
    assert "is written and 99.0 after a resume. Writing takes 3 s, reading 2 s." in text


@pytest.mark.parametrize("kind", ["saves", "memory"])
def test_a_run_that_fails_ends_the_saves_with_its_reason(monkeypatch, kind):
    ran = []
    monkeypatch.setattr(runner, "train", lambda words, *_: ran.append(words) or {"oom": True})
    ((_, row),) = gpus.measured(gpus.parse([f"--measure={kind}"], 4))
    assert len(ran) == 1 and row["oom"]
    assert runner.line({}, row).split()[:2] == ["4", "GPU"] and runner.line({}, row).endswith("out of memory")


# --- Tables ---


def test_tables_show_out_of_memory_unknown_values_and_estimate_accuracy():
    one, two = (dict(zip(compare.GPUS_PLACE, ("recipe", n, 1, 8192, "none"), strict=True)) for n in (1, 2))
    one |= {"tok_per_s": 7e4, "peak_gib": 40.0, "estimated_gib": 42.0, "mfu": None}
    two |= {"oom": True}
    text = report.tables({"command": "python bench.py gpus", "scaling": [one], "8b": [one, two], "saves": []})
    assert "| torchtitan's recipe | 1 | 70,000 | 70,000 | 1.000 | n/a | 40.0 | 1.05 |" in text
    assert "| 1 x 8,192 | none | torchtitan's recipe, ZeRO-3 | out of memory | - | - | - | - | - |" in text


def test_tables_omit_what_their_record_lacks():
    at = dict(zip(compare.GPUS_PLACE, ("nanocria-muon", 2, 64, 1024, "none"), strict=True))
    muon = at | {"ms_per_step": 900.0, "tok_per_s": 7e4, "peak_gib": 20.0}
    assert "| nanocria, Muon | 2 | 900 | - | 20.0 |" in report.optimizers_table({"optimizers": [muon]})
    saved = {"cpu_gib": 1.0, "saved_cpu_gib": 2.0, "resumed_cpu_gib": 3.0, "checkpoint_bytes": 4e9, "save_seconds": 5.0}
    resumed, failed = saved | {"resume_seconds": 6.0}, saved | {"saved_cpu_gib": 7.0, "resume_seconds": None}
    text = report.save_memory_sentences({"memory": [resumed, failed]})
    assert "2.0 while a checkpoint of 4 GB is written and 3.0 after" in text and "7.0" not in text
    speed, oom = {"arm": "nanocria", "targets_per_s": 3e4}, {"oom": True}
    record = {"command": "python bench.py finetune", "runs": [{"arm": "hf", **oom}], "packing": [speed, oom]}
    assert report.tables(record) == ""
    assert runner.line({}, speed).endswith("30,000 targets/s")
    losses = [{"arm": "float32", "losses": [1.0, 2.0]}, {"arm": "nanocria", "losses": [1.5]}]
    assert compare.differences(losses[1], losses) is None
    fits = {"model": "1b", "rung": "plain", "batch": 1, "tok_per_s": 1e3, "peak_gib": 9.0, "cpu_gib": 0.0}
    table = report.ladder_table({"points": [fits], "losses": [{"model": "1b", "rung": "plain", "oom": True}]})
    assert "| 1b | plain PyTorch, float32 | 9.0 | 1 | 1,000 · 9.0 | 0 | - |" in table
