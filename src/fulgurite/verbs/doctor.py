"""Describe the machine and what is installed on it, and warn about what will get in the way of training."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from fulgurite import machine

GIB = 2**30
MIN_SHARED_MEMORY = 1 * GIB
MIN_OPEN_FILES = 1024
GOOD_OPEN_FILES = 65536

# The oldest driver that runs each CUDA major version; from
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
INSTALL_PAGE = "https://pytorch.org/get-started/locally"


@dataclass
class Report:
    """Hold the (label, value) rows that are so, and the warnings, each with what to do next."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def doctor() -> int:
    """Print what is known about the machine, then, since it takes seconds, what torch knows.

    Returns:
        the exit status: 1 if torch is missing or cannot be imported, else 0
    """
    driver = machine.nvidia_driver()
    _print(system_report(driver))
    # An import of torch can take long or end the process; what is known must be out by then.
    sys.stdout.flush()
    try:
        import_module("torch")
    except Exception as error:  # a broken installation raises ImportError, OSError, RuntimeError or worse
        print(f"error: {_import_failure(error)}")
        return 1
    _print(torch_report(driver))
    return 0


def system_report(driver: str | None) -> Report:
    """Describe the machine and the installed packages without importing any of them.

    Args:
        driver: version of the NVIDIA driver, None if there is none
    """
    cores = machine.usable_cores()
    report = Report()
    report.rows += [
        ("fulgurite", _installed("fulgurite")),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("usable cores", f"{cores.number} ({cores.reason})"),
        ("memory", f"{_size(machine.available_memory())} available of {_size(machine.memory_limit())}"),
    ]
    _add_shared_memory(report)
    _add_open_files(report)
    report.rows += [("NVIDIA driver", driver or "none")]
    report.rows += [(name, _installed(name)) for name in ("torch", "lightning", "torchvision", "torchmetrics")]
    return report


def torch_report(driver: str | None) -> Report:
    """Describe what torch can use here, and pass on what it warns about.

    Args:
        driver: version of the NVIDIA driver, None if there is none
    """
    report = Report()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _add_cuda(report, driver)
        _add_cpu(report)
    report.warnings += [f"torch says: {_one_line(warning.message)}" for warning in caught]
    return report


def _add_shared_memory(report: Report) -> None:
    memory = machine.shared_memory()
    if memory is None:
        report.rows.append(("shared memory", "no /dev/shm"))
        return
    report.rows.append(("shared memory", f"{_size(memory.free)} free of {_size(memory.total)}"))
    if memory.total < MIN_SHARED_MEMORY:
        report.warnings.append(
            f"/dev/shm holds only {_size(memory.total)}, and DataLoader workers hand over batches through it: "
            "start the container with --shm-size=8g (or --ipc=host), or train with num_workers 0"
        )
    elif memory.free < MIN_SHARED_MEMORY:
        report.warnings.append(
            f"only {_size(memory.free)} of /dev/shm is free, and DataLoader workers hand over batches through it: "
            "remove what killed runs left there (ls -l /dev/shm), or train with num_workers 0"
        )


def _add_open_files(report: Report) -> None:
    limit = machine.open_files_limit()
    if limit is None:
        return
    soft, hard = ("unlimited" if value is None else str(value) for value in limit)
    report.rows.append(("open files", f"{soft} (may be raised to {hard})" if soft != hard else soft))
    if limit.soft is not None and limit.soft < MIN_OPEN_FILES:
        reachable = GOOD_OPEN_FILES if limit.hard is None else min(limit.hard, GOOD_OPEN_FILES)
        remedy = f"run 'ulimit -n {reachable}' first"
        if reachable < MIN_OPEN_FILES:
            remedy = f"start the container with --ulimit nofile={GOOD_OPEN_FILES}, or raise nofile in /etc/security/limits.conf"
        report.warnings.append(
            f"only {soft} open files are allowed, and DataLoader workers use one for each tensor they hand over: {remedy}"
        )


def _add_cuda(report: Report, driver: str | None) -> None:
    import torch

    available = torch.cuda.is_available()
    report.rows += [
        ("torch imported", str(torch.__version__)),
        ("torch build", _build()),
        ("CUDA available", "yes" if available else "no"),
    ]
    if available:
        for index in range(torch.cuda.device_count()):
            _add_gpu(report, index)
    elif driver:
        report.warnings.append(_why_no_cuda(driver))
    try:
        report.rows.append(("cuDNN", _cudnn_version(torch.backends.cudnn.version())))
    except RuntimeError as error:  # built for newer GPUs, or another cuDNN is found first
        report.rows.append(("cuDNN", "not usable"))
        report.warnings.append(f"cuDNN cannot be used ({_one_line(error)}): install a torch for this GPU from {INSTALL_PAGE}")


def _add_gpu(report: Report, index: int) -> None:
    import torch

    try:
        gpu = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            bf16 = "native bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no native bf16"
    except RuntimeError as error:  # taken by another process, out of memory, fallen off the bus
        report.rows.append((f"GPU {index}", "not usable"))
        report.warnings.append(f"GPU {index} cannot be used ({_one_line(error)}): see with 'nvidia-smi' what occupies it")
        return
    facts = (gpu.name, _size(gpu.total_memory), f"compute capability {gpu.major}.{gpu.minor}", bf16)
    report.rows.append((f"GPU {index}", ", ".join(facts)))


def _add_cpu(report: Report) -> None:
    import torch

    threads, cores = torch.get_num_threads(), machine.usable_cores()
    report.rows += [
        ("MPS available", "yes" if torch.backends.mps.is_available() else "no"),
        ("CPU capability", torch.backends.cpu.get_cpu_capability()),
        ("torch threads", str(threads)),
    ]
    if threads > cores.number:
        report.warnings.append(
            f"torch would run {threads} threads where {cores.number} can run ({cores.reason}), which slows all of them: "
            f"export OMP_NUM_THREADS={cores.number}"
        )


def _why_no_cuda(driver: str) -> str:
    """Word the most likely reason why torch sees no GPU although there is an NVIDIA driver."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        return f"NVIDIA driver {driver} is there, but this torch is a {_build()}: install a CUDA build from {INSTALL_PAGE}"
    needed = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    major = driver.split(".")[0]
    if major.isdigit() and int(major) < needed:
        return (
            f"NVIDIA driver {driver} is too old for CUDA {cuda}, which needs {needed} or newer: "
            f"update the driver, or install a torch built for an older CUDA from {INSTALL_PAGE}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"torch sees no GPU while CUDA_VISIBLE_DEVICES is '{visible}': unset it and run this again"
    return (
        f"NVIDIA driver {driver} is there, but torch sees no GPU: see whether 'nvidia-smi' lists one, "
        "and start containers with --gpus all"
    )


def _build() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda} build"
    return f"ROCm {torch.version.hip} build" if torch.version.hip else "CPU build"


def _cudnn_version(number: int | None) -> str:
    """Write cuDNN's number as a version: 92400 is 9.24.0, and 8907, in the older scheme, 8.9.7."""
    if number is None:
        return "none"
    major_digit = 10_000 if number >= 90_000 else 1_000
    return f"{number // major_digit}.{number % major_digit // 100}.{number % 100}"


def _import_failure(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "torch is not installed: run 'make setup', or 'pip install torch'"
    cause = f"{type(error).__name__}: {_one_line(error)}"
    return f"torch is installed but cannot be imported ({cause}): run 'pip install --force-reinstall torch'"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _print(report: Report) -> None:
    for label, value in report.rows:
        print(f"{label:<16}{value}")
    for warning in report.warnings:
        print(f"warning: {warning}")
