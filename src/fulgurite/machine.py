"""What the machine really offers this process: containers and batch systems often grant less than is installed.

Standard library only, so that ``fulgurite doctor`` answers before torch is imported. Where a system does not say,
the answer is None, never an exception. ``root`` stands for ``/`` in every signature; tests put a made-up tree there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Longer, and `fulgurite doctor` would not show its first lines within a second.
NVIDIA_SMI_TIMEOUT = 0.5  # seconds


class Cores(NamedTuple):
    """How many cores are usable, and what decided it."""

    number: int
    reason: str


class SharedMemory(NamedTuple):
    """Size of /dev/shm in bytes."""

    total: int
    free: int


class OpenFiles(NamedTuple):
    """How many files a process may open: now, and the most it may ask for; None is no limit."""

    soft: int | None
    hard: int | None


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return the smallest of the installed cores, the CPU affinity and the cgroup CPU quotas, with the reason."""
    installed = os.cpu_count() or 1
    cores = Cores(installed, "all cores of the machine")
    if hasattr(os, "sched_getaffinity"):  # Linux only
        allowed = len(os.sched_getaffinity(0))
        if allowed < installed:
            cores = Cores(allowed, f"CPU affinity allows {allowed} of {installed}")
    quotas = list(_cpu_quotas(root))
    if quotas:
        quota, file = min(quotas)
        # Rounded down: with one thread more than the quota all of them are halted for part of every period.
        number = max(1, int(quota))
        if number < cores.number:
            cores = Cores(number, f"CPU quota {quota:g} in {file}")
    return cores


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the most memory this process can ever have, in bytes: what is installed or a cgroup's limit."""
    limits = [limit for limit, _ in _cgroup_memory(root)]
    installed = _meminfo("MemTotal", root) or _installed_memory()
    return min(limits + ([installed] if installed is not None else []), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the memory that can be had now without swapping, in bytes."""
    left = [max(0, limit - used) for limit, used in _cgroup_memory(root)]
    available = _meminfo("MemAvailable", root)
    return min(left + ([available] if available is not None else []), default=None)


def shared_memory(root: Path = Path("/")) -> SharedMemory | None:
    """Return the size of /dev/shm, through which DataLoader workers hand over batches; None where there is none."""
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None
    return SharedMemory(usage.total, usage.free)


def open_files_limit() -> OpenFiles | None:
    """Return how many files this process may open; None on Windows, which has no such limit."""
    if sys.platform == "win32":
        return None
    import resource  # does not exist on Windows

    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return OpenFiles(soft, hard)


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Return the version of the loaded NVIDIA driver, "unknown" if it does not answer in time, None without one."""
    text = _read(root / "proc/driver/nvidia/version")
    program = shutil.which("nvidia-smi")
    if not text and program:  # Windows and WSL have no such file
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT, check=True).stdout
        except subprocess.TimeoutExpired:
            return "unknown"
        except (OSError, subprocess.CalledProcessError):
            return None
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return version.group() if version else None


def _cpu_quotas(root: Path) -> Iterator[tuple[float, Path]]:
    """Yield each CPU quota that binds this process, in cores, with the file that sets it."""
    for folder in _cgroup_folders("cpu", root):
        version2, version1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
        for file, text in (version2, _read(version2)), (version1, f"{_read(version1)} {_read(folder / 'cpu.cfs_period_us')}"):
            # Microseconds of CPU time per period, "200000 100000"; no limit is "max" in version 2 and -1 in version 1.
            numbers = re.fullmatch(r"([1-9]\d*)\s+([1-9]\d*)\s*", text)
            if numbers:
                yield int(numbers[1]) / int(numbers[2]), file


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each cgroup that limits this process's memory."""
    version2 = ("memory.max", "memory.current", "inactive_file")
    version1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder in _cgroup_folders("memory", root):
        for limit_file, usage_file, cache_key in version2, version1:
            limit = _number(r"(\d+)", _read(folder / limit_file))
            if limit is not None:
                usage = _number(r"(\d+)", _read(folder / usage_file)) or 0
                # The usage counts cached files, which the kernel drops when memory is needed. Without this a
                # data set read once would look like a full machine.
                cache = _number(rf"^{cache_key} (\d+)", _read(folder / "memory.stat")) or 0
                yield limit, max(0, usage - cache)


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield where this process's limits may be written: its own cgroup, then each parent, which limits it too."""
    mounts = root / "sys/fs/cgroup"
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE):
        if not controllers:  # version 2; beside version 1 it is mounted in unified/
            candidates = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            candidates = [mounts / controllers, mounts / controller]
        else:
            continue
        # A container may see its path as on the host ("/docker/...") while its own cgroup is what is mounted:
        # folders that do not exist read as no limit, and the mount itself comes last.
        names = path.strip("/").split("/")
        for mount in candidates:
            for depth in range(len(names), -1, -1):
                yield mount.joinpath(*names[:depth])


def _meminfo(key: str, root: Path) -> int | None:
    """Return one value of /proc/meminfo in bytes."""
    kibibytes = _number(rf"^{key}:\s+(\d+) kB", _read(root / "proc/meminfo"))
    return None if kibibytes is None else kibibytes * 1024


def _installed_memory() -> int | None:
    """Return the physical memory in bytes where there is no /proc, as on macOS."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf; a name can be missing
        return None


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text, re.MULTILINE)
    return int(match[1]) if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
