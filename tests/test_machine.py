"""Cores, memory and limits, read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fulgurite import machine
from fulgurite.machine import available_memory, memory_limit, nvidia_driver, shared_memory, usable_cores

MIB = 2**20
MEMINFO = "MemTotal:       16384 kB\nMemFree:         1000 kB\nMemAvailable:    8192 kB\n"  # 16 and 8 MiB


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def tree(root: Path, **groups: dict[str, str]) -> Path:
    """Write /proc (``proc``) and /sys/fs/cgroup (``cgroup``) below root."""
    folders = {"proc": root / "proc", "cgroup": root / "sys/fs/cgroup"}
    for name, files in groups.items():
        for path, text in files.items():
            file = folders[name] / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return root


def test_all_cores_without_any_limit(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == (8, "all cores of the machine")


def test_affinity_limits_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert usable_cores(tmp_path) == (3, "CPU affinity allows 3 of 8")


def test_cores_without_affinity_as_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(tmp_path).number == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path).number == 1


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("200000 100000\n", 2),
        ("290000 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", 8),
        ("1600000 100000\n", 8),
        ("0 100000", 8),
        ("200000 0", 8),
        ("?", 8),
    ],
)
def test_cgroup_v2_quota_is_rounded_down_to_at_least_one(tmp_path: Path, cpu_max: str, cores: int) -> None:
    tree(tmp_path, proc={"self/cgroup": "0::/\n"}, cgroup={"cpu.max": cpu_max})
    assert usable_cores(tmp_path).number == cores


def test_reason_names_the_quota_and_its_file(tmp_path: Path) -> None:
    tree(tmp_path, proc={"self/cgroup": "0::/job\n"}, cgroup={"job/cpu.max": "250000 100000\n"})
    assert usable_cores(tmp_path).reason == f"CPU quota 2.5 in {tmp_path / 'sys/fs/cgroup/job/cpu.max'}"


@pytest.mark.parametrize("tight", ["cpu.max", "slice/cpu.max", "slice/job/cpu.max"])
def test_smallest_of_nested_quotas_counts(tmp_path: Path, tight: str) -> None:
    files = {"cpu.max": "max 100000", "slice/cpu.max": "600000 100000", "slice/job/cpu.max": "max 100000"}
    tree(tmp_path, proc={"self/cgroup": "0::/slice/job\n"}, cgroup=files | {tight: "300000 100000"})
    assert usable_cores(tmp_path).number == 3


def test_other_cgroups_do_not_count(tmp_path: Path) -> None:
    tree(tmp_path, proc={"self/cgroup": "0::/mine\n"}, cgroup={"mine/cpu.max": "400000 100000", "other/cpu.max": "100000 100000"})
    assert usable_cores(tmp_path).number == 4


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../job", "/"])
def test_container_that_sees_a_path_from_outside_reads_its_mount(tmp_path: Path, path: str) -> None:
    tree(tmp_path, proc={"self/cgroup": f"0::{path}\n"}, cgroup={"cpu.max": "200000 100000"})
    assert usable_cores(tmp_path).number == 2


@pytest.mark.parametrize(
    ("line", "folder"),
    [("4:cpu,cpuacct:/job", "cpu,cpuacct/job"), ("4:cpuacct,cpu:/job", "cpu/job"), ("4:cpu:/job", "cpu/job"), ("4:cpu:/", "cpu")],
)
def test_cgroup_v1_quota(tmp_path: Path, line: str, folder: str) -> None:
    quota = {f"{folder}/cpu.cfs_quota_us": "300000\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    tree(tmp_path, proc={"self/cgroup": f"9:name=systemd:/\n{line}\n0::/\n"}, cgroup=quota)
    assert usable_cores(tmp_path).number == 3


def test_cgroup_v1_without_quota(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    tree(tmp_path, proc={"self/cgroup": "4:cpu:/\n"}, cgroup=files)
    assert usable_cores(tmp_path) == (8, "all cores of the machine")


def test_hybrid_mount_of_cgroup_v2(tmp_path: Path) -> None:
    tree(tmp_path, proc={"self/cgroup": "4:memory:/\n0::/job\n"}, cgroup={"unified/job/cpu.max": "200000 100000"})
    assert usable_cores(tmp_path).number == 2


def test_affinity_and_quota_the_smaller_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, proc={"self/cgroup": "0::/\n"}, cgroup={"cpu.max": "400000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert usable_cores(tmp_path) == (2, "CPU affinity allows 2 of 8")


def test_memory_without_cgroup(tmp_path: Path) -> None:
    tree(tmp_path, proc={"meminfo": MEMINFO})
    assert memory_limit(tmp_path) == 16 * MIB
    assert available_memory(tmp_path) == 8 * MIB


def test_cgroup_v2_memory_gives_back_cached_files(tmp_path: Path) -> None:
    group = {"memory.max": f"{6 * MIB}\n", "memory.current": f"{5 * MIB}\n", "memory.stat": f"anon 1\ninactive_file {3 * MIB}\n"}
    tree(tmp_path, proc={"self/cgroup": "0::/\n", "meminfo": MEMINFO}, cgroup=group)
    assert memory_limit(tmp_path) == 6 * MIB
    assert available_memory(tmp_path) == 4 * MIB


def test_cgroup_v1_memory(tmp_path: Path) -> None:
    group = {
        "memory/job/memory.limit_in_bytes": f"{6 * MIB}\n",
        "memory/job/memory.usage_in_bytes": f"{5 * MIB}\n",
        "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {1 * MIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",  # what the kernel writes for no limit
    }
    tree(tmp_path, proc={"self/cgroup": "4:memory:/job\n", "meminfo": MEMINFO}, cgroup=group)
    assert memory_limit(tmp_path) == 6 * MIB
    assert available_memory(tmp_path) == 2 * MIB


def test_nested_memory_limits_each_with_its_own_use(tmp_path: Path) -> None:
    group = {
        "slice/memory.max": f"{7 * MIB}",
        "slice/memory.current": f"{6 * MIB}",  # a neighbour uses most of it
        "slice/job/memory.max": f"{4 * MIB}",
        "slice/job/memory.current": f"{1 * MIB}",
    }
    tree(tmp_path, proc={"self/cgroup": "0::/slice/job\n", "meminfo": MEMINFO}, cgroup=group)
    assert memory_limit(tmp_path) == 4 * MIB
    assert available_memory(tmp_path) == 1 * MIB


def test_unlimited_or_overdrawn_memory(tmp_path: Path) -> None:
    tree(tmp_path, proc={"self/cgroup": "0::/\n", "meminfo": MEMINFO}, cgroup={"memory.max": "max\n", "memory.current": "1"})
    assert (memory_limit(tmp_path), available_memory(tmp_path)) == (16 * MIB, 8 * MIB)
    tree(tmp_path, cgroup={"memory.max": "10", "memory.current": "11"})
    assert available_memory(tmp_path) == 0


def test_memory_without_proc_as_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}[name], raising=False)
    assert memory_limit(tmp_path) == 40960
    assert available_memory(tmp_path) is None


def test_memory_without_sysconf_as_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert memory_limit(tmp_path) is None


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    usage = shutil.disk_usage(tmp_path)
    assert shared_memory(tmp_path) is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=64, free=60))
    assert shared_memory(tmp_path) == (64, 60)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_NOFILE: (256, resource.RLIM_INFINITY)}[which])
    assert machine.open_files_limit() == (256, None)
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.open_files_limit() is None


@pytest.mark.parametrize(
    ("first_line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.58  Release Build  (portage@localhost)", "555.58"),
    ],
)
def test_nvidia_driver_from_proc(tmp_path: Path, first_line: str, version: str) -> None:
    tree(tmp_path, proc={"driver/nvidia/version": f"{first_line}\nGCC version:  gcc version 12.2.0 (GCC)\n"})
    assert nvidia_driver(tmp_path) == version


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 580.65.06", "580.65.06"), ("echo NVML library version: 535.183; exit 18", None), ("exec sleep 30", "unknown")],
)
def test_nvidia_driver_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, version: str | None) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert nvidia_driver(tmp_path) == version


def test_no_nvidia_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_driver(tmp_path) is None


def test_import_leaves_torch_alone() -> None:
    code = "import sys, fulgurite.machine, fulgurite.verbs.doctor; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
