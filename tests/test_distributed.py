"""Several ranks compute the same run as one."""

import functools
import shutil

import pytest
import torch

from runtime.checkpoint import open_folder, verify
from tests.runs import (
    RENEW_OFTEN,
    ROOT,
    SMALL,
    assert_close,
    damage,
    free_port,
    losses,
    machines_of,
    metrics,
    numbers,
    run_alone,
    run_ranks,
    run_torchrun,
    start,
    step_losses,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")


HYBRID = dict(sharding="hybrid")
FULL = dict(activation_checkpointing="full")
UNTIED = dict(tie_embeddings=False)
ONE_SYNC = dict(sync_every_micro_batch=False)  # FSDP then has other groups
ALL_OFFLOADED = dict(offload="all", offload_activations=True, mlp_chunks=2) | FULL
MUON = dict(optimizer="muon", n_layer=3, n_embd=24, n_head=4, n_kv_head=1, ffn_dim=40)
GALORE = dict(optimizer="galore", galore_rank=4)


@pytest.fixture
def train(train_on_ranks):
    return train_on_ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(data, **settings): the folder of a run of one process, shared by all tests that ask for the same."""

    def run(data, **settings):
        script = wrapped(tmp_path_factory.mktemp("script"), RENEW_OFTEN)
        return run_alone(data, tmp_path_factory.mktemp("alone"), script=script, **settings)

    return functools.cache(run)


@pytest.mark.parametrize("ranks, settings, changes, tolerance", [
    (2, {}, {}, 1e-5),
    (2, {}, ONE_SYNC, 1e-5),
    (2, {}, ALL_OFFLOADED, 1e-5),
    (4, {}, dict(offload="optimizer") | HYBRID, 1e-5),
    (4, UNTIED, dict(sharding="zero2") | FULL, 1e-5),
    (4, UNTIED, HYBRID | ONE_SYNC, 1e-5),
    (2, UNTIED, ALL_OFFLOADED, 1e-5),
    (2, dict(mask_documents=True, n_embd=64), FULL, 1e-5),
    (2, dict(dtype="bfloat16"), {}, 5e-4),  # each sum of bfloat16 gradients is rounded
    (2, dict(dtype="float16"), {}, 5e-4),
    # 129 and 128 of the embedding's rows. Rounding may change an 8-bit code, by a percent of a moment.
    (2, dict(optimizer_bits=8, n_embd=256, ffn_dim=256, n_layer=1), {}, 1e-4),
    # Of 3 layers one of two ranks owns two; 4 ranks cut through k and v; of a matrix of 6 rows the last rank has none.
    *((ranks, MUON, more, 2e-5) for ranks, more in ((2, {}), (4, {}), (4, HYBRID))),
    *((ranks, MUON | dict(optimizer="soapmuon"), more, 1e-4) for ranks, more in ((2, {}), (4, HYBRID))),
    *((ranks, GALORE, more, 1e-5) for ranks, more in ((2, {}), (4, HYBRID))),
], ids=str)  # fmt: skip
def test_ranks_have_the_losses_of_one_process(train, alone, request, tmp_path, ranks, settings, changes, tolerance):
    data = request.getfixturevalue("short_documents" if "mask_documents" in settings else "text_data")
    check_ranks(train, alone(data, **settings), tmp_path, ranks, settings | changes | dict(dataset=data), tolerance)


@pytest.mark.parametrize("settings", [dict(sharding="zero2"), dict(offload="all")], ids=str)
def test_groups_of_sequences_have_the_same_losses_on_two_ranks(train, alone, text_data, tmp_path, settings):
    before = "import kernels.execution as e\ne.MLP_CHUNK, seen, count = 1, set(), e.Execution.groups_of_sequences\n"
    before += "e.Execution.groups_of_sequences = lambda *shape: seen.add(count(*shape)) or count(*shape)"
    script = wrapped(tmp_path, before, "assert 2 in seen, seen")
    settings |= dict(batch_size=8, gradient_accumulation_steps=2) | FULL
    check_ranks(train, alone(text_data), tmp_path, 2, settings, script=script)


def test_all_process_groups_have_the_timeout(tmp_path):
    script = tmp_path / "mesh.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom runtime import distributed\n"
        "distributed.init_distributed('cpu', 3600.0)\nmesh = distributed.device_mesh('cpu', True, 3600.0)\n"
        "import torch.distributed as dist\n"
        "group = mesh['replicate'].get_group(), mesh['shard'].get_group(), dist.group.WORLD\n"
        "cpu = __import__('torch').device('cpu')\n"
        "distributed.print0('timeouts', *{g._get_backend(cpu).options._timeout for g in group})\n"
        "distributed.end_together(0)"
    )
    done = run_ranks(2, {}, script)
    assert "timeouts 1:00:00\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("ranks, sharding, shape, reshard", [(2, "zero2", (2,), False), (4, "hybrid", (2, 2), True)])
def test_sharding_setting_decides_how_parameters_are_sharded(train, tmp_path, ranks, sharding, shape, reshard):
    before = (
        "os.environ['LOCAL_WORLD_SIZE'] = '2'  # as on two machines\n"
        "import torch.distributed.fsdp as fsdp\nshard, seen = fsdp.fully_shard, []\n"
        "def shard_and_note(modules, **options):\n"
        "    seen.append((tuple(options['mesh'].shape), options['reshard_after_forward']))\n"
        "    policy = options['mp_policy']  # bfloat16 sums and a rounded RoPE would hardly show in a loss\n"
        "    assert policy.reduce_dtype == torch.float32 and not policy.cast_forward_inputs, policy\n"
        "    return shard(modules, **options)\n"
        "fsdp.fully_shard = shard_and_note"
    )
    blocks = f"[({shape}, {reshard})] * {SMALL['n_layer']}"
    script = wrapped(tmp_path, before, f"assert seen[:{SMALL['n_layer']}] == {blocks}, seen")
    train(ranks, script, sharding=sharding, max_iters=1)


OTHER_NORM = (
    "from optimizers import OnDevice as D; norm = D.local_norm; D.local_norm = lambda self: norm(self) * (1 + 2**-20)"
)


def test_replicas_stay_equal_if_machines_round_differently(train, tmp_path):
    script = wrapped(
        tmp_path,
        f"{RENEW_OFTEN}os.environ['LOCAL_WORLD_SIZE'] = '2'\nif os.environ['RANK'] in '23': {OTHER_NORM}",
    )
    done = train(4, script, max_iters=4, **HYBRID)
    assert "saved" in done.stdout and "WARNING" not in done.stdout, done.stdout


@pytest.mark.parametrize("ranks, settings", [
    (3, UNTIED | dict(gradient_accumulation_steps=6, n_embd=24, ffn_dim=19)),  # rows that 3 does not divide
    (4, dict(n_head=1, n_kv_head=1, n_embd=6)),  # of a matrix of 6 rows the last rank has none
    (4, HYBRID),
    (2, dict(optimizer="normuon")),  # and so muon
    (2, dict(optimizer="soapmuon")),
    (2, dict(optimizer="galore", galore_rank=8)),
    (2, dict(optimizer_bits=8, n_embd=256, ffn_dim=256, n_layer=1)),
    (2, dict(offload="all", offload_dir="drive")),
], ids=str)  # fmt: skip
def test_a_run_resumes_on_more_and_on_fewer_ranks_with_every_optimizer(train, tmp_path, ranks, settings):
    settings = dict(max_iters=6, eval_interval=2) | settings
    if "offload_dir" in settings:
        settings["offload_dir"] = tmp_path
    one, many, fewer, again = (tmp_path / name for name in ("one", "many", "fewer", "again"))
    for out_dir, n, start_from in ((one, 1, None), (many, ranks, one), (fewer, 1, many), (again, ranks, many)):
        if start_from:
            step = "step_000002" if start_from == one else "step_000004"
            shutil.copytree(start_from / step, out_dir / step)
        script = machines_of(tmp_path, 2) if n == 4 else wrapped(tmp_path, RENEW_OFTEN)
        assert "WARNING" not in train(n, script, out_dir=out_dir, **settings).stdout, "the copies of the model differ"
    tolerance = 1e-4 if "optimizer_bits" in settings else 2e-5
    assert_close(step_losses(many), step_losses(one)[2:], tolerance)
    assert_close(step_losses(fewer), step_losses(one)[4:], tolerance)
    assert losses(again) == [line for line in losses(many) if line["step"] > 4]


def test_a_write_that_fails_on_one_rank_fails_on_all_and_damage_is_found_by_all(train, tmp_path):
    script = wrapped(
        tmp_path,
        "import runtime.checkpoint, runtime.save as m\n"
        "runtime.checkpoint.PIECE_BYTES = 1000  # of a file both ranks compute digests\n"
        "write_rows = m._write_rows\n"
        "def write_some(path, *more):\n"
        "    if os.environ['RANK'] == '1' and 'step_000002' in str(path): raise OSError('no such luck')\n"
        "    write_rows(path, *more)\n"
        "m._write_rows = write_some",
    )
    done = train(2, script, max_iters=4, eval_interval=2)
    assert "NOT SAVED: rank 1: no such luck. The newest checkpoint: none" in done.stdout, done.stdout
    (path,) = (tmp_path / "out").glob("step_*")
    verify(open_folder(path, optimizer=True))
    damage(path / "model.safetensors")
    assert f"{path}/model.safetensors is not what was saved" in train(2, code=1, max_iters=4).stderr


def test_the_validation_loss_does_not_depend_on_the_number_of_ranks_to_rounding(train, tmp_path):
    """All read the same batches, and sum the losses in float64."""
    settings = dict(gradient_accumulation_steps=6, learning_rate=0, max_iters=1, eval_iters=30)
    for ranks in (1, 2, 3):
        train(ranks, out_dir=tmp_path / str(ranks), **settings)
    (one,), (two,), (three,) = (numbers(tmp_path / str(ranks), "val_loss") for ranks in (1, 2, 3))
    assert two == pytest.approx(one, rel=1e-13) and three == pytest.approx(one, rel=1e-13)


def check_ranks(train, alone, tmp_path, ranks, settings, tolerance=1e-5, script=None):
    if settings.get("sharding") == "hybrid":
        script = machines_of(tmp_path, 2)
    script = script or wrapped(tmp_path, RENEW_OFTEN)
    done = train(ranks, script, max_iters=10, eval_interval=5, **settings)
    assert done.stdout.count("step 00010/10") == 1, "more than one rank printed"
    for name, of_loss in (("loss", 1), ("val_loss", 1), ("grad_norm", 10)):
        if name == "val_loss" and "batch_size" in settings:
            continue  # eval_iters counts batches: of other blocks
        assert_close(numbers(alone, name), numbers(tmp_path / "out", name), of_loss * tolerance)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("changes", [
    *(dict(sharding=sharding) for sharding in ("zero3", "zero2", "hybrid")),
    *(dict(tie_embeddings=False, sharding=sharding) for sharding in ("zero3", "zero2", "hybrid")),
    dict(tie_embeddings=False, n_layer=1),
    dict(tie_embeddings=False, sharding="zero2", n_layer=1) | ONE_SYNC,
], ids=str)  # fmt: skip
def test_copy_engines_give_the_same_losses_as_nccl(train, tmp_path, changes):
    settings = dict(device="cuda", keep_last=0, dtype="bfloat16", launch=run_torchrun) | changes
    for copy_engines in (False, True):
        train(2, copy_engines=copy_engines, out_dir=tmp_path / str(copy_engines), **settings)
    assert_close(step_losses(tmp_path / "False"), step_losses(tmp_path / "True"), 1e-4)


def test_sync_every_micro_batch_false_reduces_gradients_once_a_step(train, tmp_path):
    """Counts the reduce-scatters of 2 blocks and the root, for 2 micro-batches per rank in 3 steps."""
    script = wrapped(
        tmp_path,
        "profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])\nprofile.start()",
        "profile.stop()\ncalls = {event.key: event.count for event in profile.key_averages()}\n"
        "if os.environ['RANK'] == '0': print('reduce-scatters', calls.get('c10d::_reduce_scatter_base_', calls))",
    )
    for sync_every_micro_batch, expected in ((True, 18), (False, 9)):
        done = train(2, script, sync_every_micro_batch=sync_every_micro_batch, max_iters=3, keep_last=0)
        assert f"reduce-scatters {expected}\n" in done.stdout, done.stdout + done.stderr


def test_ranks_with_different_settings_data_or_code_stop_before_training(train, tmp_path):
    other_data = (
        "import data.tokens as m; read = m.read_meta; m.read_meta = lambda folder: read(folder) | {'val_bytes': 1}"
    )
    other_flags = "sys.argv += ['--seed=2', '--dataset=pystdlib']"
    other_code = (
        "import hashlib as m; sha256 = m.sha256\n"
        "    m.sha256 = lambda content=b'': sha256(content + b'# edited' * (b'def epoch_order' in content))"
    )
    differing = {other_flags: "dataset, seed", other_data: "the dataset's val_bytes", other_code: "data/loader.py"}
    for there, expected in differing.items():
        script = wrapped(tmp_path, f"if os.environ['RANK'] == '1':\n    {there}")
        done = train(2, script, code=1)
        assert f"the ranks differ in {expected}: " in done.stderr, done.stderr
        assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.mark.parametrize("place, phase", [
    ("import data.loader as m; m.Tokens.__init__", None),
    ("from optimizers.optimizer import Optimizer; Optimizer._master", "building the model"),
    ("import runtime.checkpoint as m; m.read_rows", None),
], ids=["data", "optimizer", "checkpoint"])  # fmt: skip
def test_a_rank_that_fails_or_hangs_before_the_first_step_ends_all(train, tmp_path, place, phase):
    """phase: in which it hangs; None: it fails."""
    before = "def fail(*_): time.sleep(1000)\n"
    if phase is None:  # rank 1 fails while rank 0, which reports it, is slow
        before = "import builtins; say = print\n"
        before += "builtins.print = lambda *args, **to: 'file' in to and time.sleep(2) or say(*args, **to)\n"
        before += "def fail(*_): raise OSError('no such luck')\n"
    before += f"if os.environ['RANK'] == '1': {place} = fail"
    if "m.read_rows" in place:  # of a checkpoint
        train(1, max_iters=2)
    said = train(2, wrapped(tmp_path, before), code=1, max_iters=3, timeout=3 if phase else 1000).stderr
    if phase is None:
        assert said == "rank 1: no such luck\n"
    else:
        assert f"rank 0, step 0, {phase}, lost another rank or its connection" in said, said


@pytest.mark.parametrize("place, how", [
    ("runtime.distributed.store_of_attempt", "SIGKILL"), ("torch.distributed.new_group", "SIGSTOP"),
])  # fmt: skip
def test_a_rank_says_that_it_cannot_connect_if_the_first_one_is_killed_or_frozen(text_data, tmp_path, place, how):
    """No launcher ends it, as if it were on another machine. The first rank has the store."""
    module, _, name = place.rpartition(".")
    before = f"import {module} as m\nconnect = m.{name}\ndef vanish(*args, **options):\n"
    before += f"    if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.{how})\n"
    script = wrapped(tmp_path, f"{before}    return connect(*args, **options)\nm.{name} = vanish")
    settings = SMALL | dict(dataset=text_data, out_dir=tmp_path / "out", gradient_accumulation_steps=2, timeout=3)
    both = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    first, second = (start(settings, script, environment=both | dict(RANK=rank, LOCAL_RANK="0")) for rank in "01")
    said = second.communicate(timeout=3 + 30)[1]
    first.kill()
    assert "rank 1 cannot connect to the others" in said and "Traceback" not in said, said
    assert second.returncode == 1


def test_nan_on_one_rank_stops_all_ranks_before_the_update(train, tmp_path):
    script = wrapped(
        tmp_path,
        "from optimizers.on_device import OnDevice\n"
        "true, calls = OnDevice.gradients, []\n"
        "def gradients(self):\n"
        "    found = true(self)\n"
        "    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) == 9:  # two a step\n"
        "        found['norm.weight'][0] = float('nan')\n"
        "    return found\n"
        "OnDevice.gradients = gradients",
    )
    said = train(2, script, code=1, eval_interval=2).stderr
    assert "step 5: the mean loss" in said and f"from {tmp_path}/out/step_000004 with --init_from=resume" in said, said
    assert [line["step"] for line in metrics(tmp_path / "out") if "loss" in line] == [1, 2, 3, 4, 5]
