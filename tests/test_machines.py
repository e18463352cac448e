"""Several machines, as torchrun agents on this host; and as network namespaces whose link is cut."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime import checkpoint
from tests.runs import (
    LONGER,
    PLAIN,
    ROOT,
    alive,
    assert_close,
    at_read,
    flags,
    free_port,
    run,
    step_losses,
    wait_until,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("plain_pytorch_on_one_core")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
COMMANDS = {  # what SLURM has, for two nodes that are this one
    "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$FOLDER/requeued"',
    "srun": """shift
        for node in 0 1; do SLURM_NODEID=$node "$@" > "$FOLDER/node$node" 2>&1 & agents="$agents $!"; done
        trap 'kill -USR1 $agents' USR1
        for agent in $agents; do while kill -0 $agent 2> /dev/null; do wait $agent; done; done""",
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


class Machines:
    """Two agents, with two ranks each unless `ranks` says otherwise, of a run like that of the fixture alone."""

    def __init__(
        self,
        folder,
        text_data,
        options=(),
        script=ROOT / "train.py",
        prefixes=((), ()),
        addresses=("127.0.0.1",) * 2,
        ranks=2,
        **settings,
    ):
        self.out_dir = folder / "out"
        settings = LONGER | dict(dataset=text_data, out_dir=self.out_dir, eval_interval=5) | settings
        command = [*TORCHRUN, "--nnodes=2", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d", "--rdzv_id=a", *options]
        if not any("endpoint" in option for option in options):
            command.append(f"--rdzv_endpoint=127.0.0.1:{free_port()}")
        self.agents = []
        self.logs = []
        for i, prefix in enumerate(prefixes):
            self.logs.append(folder / f"agent{i}")
            with open(self.logs[i], "w") as log:
                own = [f"--rdzv_conf=is_host={1 - i}", f"--local-addr={addresses[i]}"]
                words = [*prefix, *command, *own, str(script), *flags(settings)]
                self.agents.append(subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=os.environ | PLAIN))

    def ranks(self, i):
        children = Path(f"/proc/{self.agents[i].pid}/task/{self.agents[i].pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def wait_for_step(self, step):
        def reached():
            assert self.agents[0].poll() is None, self.text()
            return f"step {step:05d}/" in self.text()

        wait_until(reached)

    def text(self):
        return "".join(log.read_text() for log in self.logs)

    def codes(self):
        return [agent.wait(120) for agent in self.agents]


@pytest.fixture
def machines(tmp_path, text_data):
    started = []

    def start(*args, **settings):
        started.append(Machines(tmp_path, text_data, *args, **settings))
        return started[-1]

    yield start
    for each in started:
        for i, agent in enumerate(each.agents):
            if agent.poll() is None:
                for pid in each.ranks(i):
                    os.kill(pid, signal.SIGKILL)
                agent.kill()
                agent.wait()


@pytest.mark.parametrize("agent, rank", [(0, 0), (1, 1)])
def test_a_rank_killed_on_one_machine_is_restarted_on_all_and_the_run_resumes(machines, alone, agent, rank):
    both = machines(["--max-restarts=2"], init_from="scratch")
    wait_until((both.out_dir / "step_000005").exists)
    os.kill(both.ranks(agent)[rank], signal.SIGKILL)
    assert both.codes() == [0, 0], both.text()
    assert "resumes   " in both.text(), both.text()
    assert_close(step_losses(alone), step_losses(both.out_dir), 1e-5)


def test_a_signal_to_one_machine_ends_all_with_a_checkpoint(machines):
    both = machines(["--max-restarts=2"], ranks=1, max_iters=10**5, eval_interval=10**5)
    both.wait_for_step(3)
    ranks = [*both.ranks(0), *both.ranks(1)]
    both.agents[1].send_signal(signal.SIGTERM)
    codes = both.codes()
    assert all(codes) and not any(map(alive, ranks)), both.text()
    assert both.text().count("SIGTERM: stopping after this step") == 1, both.text()
    assert checkpoint.newest(both.out_dir) is not None, both.text()


def test_the_slurm_script_saves_before_its_time_is_over_and_resumes(tmp_path, text_data, alone):
    """With stand-ins for srun and scontrol."""
    for name, line in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | PLAIN | dict(
        PATH=f"{tmp_path}:{os.environ['PATH']}", FOLDER=str(tmp_path), SLURM_JOB_NODELIST="here",
        SLURM_JOB_ID=str(free_port() - 20000), SLURM_NNODES="2", SLURM_GPUS_ON_NODE="1",
    )  # fmt: skip
    settings = LONGER | dict(dataset=text_data, out_dir=tmp_path / "out", eval_interval=10)
    command = ["bash", "config/slurm.sh", *flags(settings)]
    job = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    wait_until(lambda: "step 00003/" in "".join(path.read_text() for path in tmp_path.glob("node*")))
    job.send_signal(signal.SIGUSR1)
    job.wait(60)
    said = "".join(path.read_text() for path in tmp_path.glob("node*"))
    assert "SIGUSR1: stopping after this step" in said and "interrupted | saved" in said, said
    assert (tmp_path / "requeued").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=120).returncode == 0, said
    assert_close(step_losses(alone), step_losses(tmp_path / "out"), 1e-5)


def test_srun_without_torchrun_is_told_to_use_it(tmp_path):
    environment = os.environ | PLAIN | dict(SLURM_STEP_NUM_TASKS="8")
    done = subprocess.run([sys.executable, "train.py"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "torchrun" in done.stderr and "Traceback" not in done.stderr, done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Two network namespaces, and a third that routes between them until it no longer does


def in_namespace(name, *words):
    return ["ip", "netns", "exec", name, *words]


@pytest.fixture
def network(tmp_path):
    """The names of two namespaces, 10.77.1.2 and 10.77.2.2, and a function that cuts the link between them."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("needs root and the command ip, to make network namespaces")
    names = [f"cria{os.getpid()}{letter}" for letter in "abr"]
    router = names[2]
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")

    def forward(on):
        subprocess.run(in_namespace(router, "sh", "-c", f"echo {on} > {forwarding}"), check=True)

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        for i, name in enumerate(names[:2], start=1):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{i}", "netns", router)
            ip("-n", name, "addr", "add", f"10.77.{i}.2/24", "dev", "eth0")
            ip("-n", router, "addr", "add", f"10.77.{i}.1/24", "dev", f"to{i}")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", router, "link", "set", f"to{i}", "up")
            ip("-n", name, "route", "add", "default", "via", f"10.77.{i}.1")
        forward(1)
        yield names[:2], lambda: forward(0)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


PHASES = {  # where the second rank waits a second, while the link is cut
    "starting": ("runtime.resume", "find_start"),
    "training": ("data.loader", "Blocks.sequences"),
    "evaluating": ("data.loader", "Blocks.read"),
    "saving": ("runtime.save", "_write_rows"),
    "ending": ("runtime.distributed", "end_together"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase, how", [
    ("starting", "cut"), ("training", "cut"), ("evaluating", "frozen"), ("saving", "cut"), ("saving", "frozen"),
    ("ending", "frozen"),
])  # fmt: skip
def test_ranks_that_lose_the_others_say_where_and_end(machines, network, tmp_path, monkeypatch, phase, how):
    (first, second), cut = network
    module, name = PHASES[phase]
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, runpy, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport {module} as module\n"
        f"owner = eval('module.{name}'.rpartition('.')[0])\nold = module.{name}\ncalls = []\n"
        "def wait_first(*args, **options):\n    calls.append(1)\n"
        f"    if os.environ['RANK'] == '1' and len(calls) == {3 if phase in ('training', 'saving') else 1}:\n"
        f"        open({str(tmp_path / 'reached')!r}, 'w').close()\n        time.sleep(2)\n"
        f"    return old(*args, **options)\nsetattr(owner, {name.rpartition('.')[2]!r}, wait_first)\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    places = dict(prefixes=[in_namespace(first), in_namespace(second)], addresses=["10.77.1.2", "10.77.2.2"])
    both = machines(["--rdzv_endpoint=10.77.1.2:29511"], script=script, **places, ranks=1, timeout=10, eval_interval=4)
    wait_until(lambda: (tmp_path / "reached").exists() or any(agent.poll() for agent in both.agents))
    assert (tmp_path / "reached").exists(), both.text()
    left = both.ranks(0)
    if how == "cut":
        cut()
        left += both.ranks(1)
    else:
        for pid in both.ranks(1):
            os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    wait_until(lambda: not any(map(alive, left)))
    assert time.monotonic() - begin < 10 + 30, both.text()
    sentences = re.findall(r"rank \d, step \d+, .*, lost another rank or its connection", both.text())
    assert len(sentences) == len(left), both.text()


@pytest.mark.parametrize("taken", [False, True])
def test_an_out_dir_deleted_under_a_run_is_made_again_unless_another_run_has_begun_there(text_data, tmp_path, taken):
    out = tmp_path / "out"
    delete = f"shutil.rmtree({str(out)!r})" + f", others.append(lock_out_dir(Path({str(out)!r})))" * taken
    before = "import shutil\nfrom pathlib import Path\nfrom runtime.save import lock_out_dir\nothers = []\n"
    script = wrapped(tmp_path, before + at_read(12, delete))
    done = run(LONGER | dict(dataset=text_data, out_dir=out), script)
    if taken:
        assert f"NOT SAVED: another run is writing to {out}" in done.stdout and done.returncode == 1, done.stdout
    assert (checkpoint.newest(out) is None) == taken, done.stdout + done.stderr
