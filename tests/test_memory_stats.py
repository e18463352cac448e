"""runtime/memory_stats.py: free memory, settings of PyTorch's allocator, snapshots of allocations."""

import pytest
import torch

from runtime import memory_stats

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    "line, groups, expected",
    [
        ("", {}, 4096),
        ("0::/", {"": (V2, 4000, 1000, 50)}, 3050),  # in a container
        ("0::/", {}, 4096),  # the machine itself
        ("0::/slurm/job_7/step_0", {"slurm/job_7": (V2, 900, 100, 5), "slurm/job_7/step_0": (V2, "max", 1, 1)}, 805),
        ("0::/a/b", {"a": (V2, 900, 100, 5), "a/b": (V2, 500, 100, 5)}, 405),
        ("0::/a", {"a": (V2, 9000, 100, 5)}, 4096),
        ("4:memory:/job", {"memory/job": (V1, 700, 100, 3), "memory": (V1, 2**63 - 4096, 100, 3)}, 603),
        ("4:memory:/docker/abc", {"memory": (V1, 700, 100, 3)}, 603),  # a container that sees its group as the root
        ("5:cpu,cpuacct:/job", {"cpu/job": (V1, 7, 1, 3)}, 4096),
        ("0::/..", {"": (V2, 4000, 1000, 50)}, 3050),
    ],
)
def test_cpu_available_is_the_least_of_machine_and_control_groups(tmp_path, line, groups, expected):
    proc = tmp_path / "proc"
    cgroups = tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/x\n{line}\n".strip() + "\n")
    for name, ((limit, used, cache), *numbers) in groups.items():
        (cgroups / name).mkdir(parents=True, exist_ok=True)
        (cgroups / name / limit).write_text(f"{numbers[0]}\n")
        (cgroups / name / used).write_text(f"{numbers[1]}\n")
        (cgroups / name / "memory.stat").write_text(f"anon 5\n{cache} {numbers[2]}\nslab 7\n")
    assert memory_stats.cpu_available(proc, cgroups) == expected


def test_cpu_available_is_infinite_without_proc(tmp_path):
    assert memory_stats.cpu_available(tmp_path, tmp_path) == float("inf")


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_unless_the_user_configures_the_allocator(monkeypatch, name):
    said = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:512")
    memory_stats.let_segments_grow()
    assert said == ([] if name else ["expandable_segments:True"])


def test_snapshot_holds_the_allocations_and_needs_a_gpu(tmp_path):
    memory_stats.record_history()
    if torch.cuda.is_available():
        torch.empty(3 * 2**20, device="cuda")
    memory_stats.dump(tmp_path / "snapshot.pickle")
    memory_stats.stop_history()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sizes[0] > 1000 if torch.cuda.is_available() else not sizes
