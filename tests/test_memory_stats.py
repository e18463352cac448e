"""runtime/memory_stats.py: free memory, settings of PyTorch's allocator."""

import pytest

from runtime import memory_stats


@pytest.mark.parametrize("line, groups, expected", [
    ("", {}, 4096),
    ("0::/", {"": (4000, 1000, 50)}, 3050),  # in a container
    ("0::/", {}, 4096),  # the machine itself
    ("0::/slurm/job_7/step_0", {"slurm/job_7": (900, 100, 5), "slurm/job_7/step_0": ("max", 1, 1)}, 805),
    ("0::/a/b", {"a": (900, 100, 5), "a/b": (500, 100, 5)}, 405),
    ("0::/a", {"a": (9000, 100, 5)}, 4096),
    ("0::/..", {"": (4000, 1000, 50)}, 3050),
])  # fmt: skip
def test_cpu_available_is_the_least_of_machine_and_control_groups(tmp_path, line, groups, expected):
    proc = tmp_path / "proc"
    cgroups = tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/x\n{line}\n".strip() + "\n")
    for name, (limit, used, cache) in groups.items():
        (cgroups / name).mkdir(parents=True, exist_ok=True)
        (cgroups / name / "memory.max").write_text(f"{limit}\n")
        (cgroups / name / "memory.current").write_text(f"{used}\n")
        (cgroups / name / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nslab 7\n")
    assert memory_stats.cpu_available(proc, cgroups) == expected
    assert memory_stats.cpu_available(tmp_path / "none", tmp_path / "none") == float("inf")  # not Linux
