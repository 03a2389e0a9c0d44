"""What ``fulgurite doctor`` prints, before torch and after it, and what it warns about."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fulgurite import machine
from fulgurite.machine import Cores, OpenFiles, SharedMemory
from fulgurite.verbs import doctor as doctor_module
from fulgurite.verbs.doctor import doctor, system_report, torch_report

GIB, MIB = 2**30, 2**20
SEES_NONE = "is there, but torch sees no GPU: see whether 'nvidia-smi' lists one, and start containers with --gpus all"
INSTALL = "from https://pytorch.org/get-started/locally"
TOO_OLD = "is too old for CUDA 13.0, which needs 580 or newer: update the driver, or install a torch built for an older CUDA"
RAISE_LIMIT = "start the container with --ulimit nofile=65536, or raise nofile in /etc/security/limits.conf"
WORKERS = ", and DataLoader workers hand over batches through it: "
SMALL_SHM = f"{WORKERS}start the container with --shm-size=8g (or --ipc=host), or train with num_workers 0"
FULL_SHM = f"{WORKERS}remove what killed runs left there (ls -l /dev/shm), or train with num_workers 0"
FIRST_LABELS = ["fulgurite", "python", "platform", "usable cores", "memory", "shared memory", "open files", "NVIDIA driver"]
FIRST_LABELS += ["torch", "lightning", "torchvision", "torchmetrics"]


@pytest.fixture(autouse=True)
def healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: Cores(4, "CPU quota 4.5 in /sys/fs/cgroup/cpu.max"))
    monkeypatch.setattr(machine, "memory_limit", lambda: 16 * GIB)
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GIB // 2)
    monkeypatch.setattr(machine, "shared_memory", lambda: SharedMemory(8 * GIB, 8 * GIB))
    monkeypatch.setattr(machine, "open_files_limit", lambda: OpenFiles(65536, 65536))
    monkeypatch.setattr(machine, "nvidia_driver", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class StandIn(ModuleType):
    """Answer what doctor asks torch, on a machine as given."""

    def __init__(self, gpus: int = 0, cuda: str | None = None, hip: str | None = None, threads: int = 4) -> None:
        super().__init__("torch")
        self.__version__ = "9.8.7"
        self.version = SimpleNamespace(cuda=cuda, hip=hip)
        self.cuda = SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            device=lambda index: nullcontext(),
            get_device_properties=lambda i: SimpleNamespace(name=f"Card {i}", total_memory=80 * GIB, major=9, minor=i),
            is_bf16_supported=lambda including_emulation: not including_emulation,
        )
        self.backends = SimpleNamespace(
            cudnn=SimpleNamespace(version=lambda: 92400 if cuda else None),
            mps=SimpleNamespace(is_available=lambda: False),
            cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2"),
        )
        self.get_num_threads = lambda: threads


def use(monkeypatch: pytest.MonkeyPatch, torch: StandIn) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)


def run_doctor(folder: Path, torch_source: str | None) -> subprocess.CompletedProcess[str]:
    """Run doctor in a process where ``import torch`` runs the given source; None makes torch a missing package."""
    code = "import sys; from fulgurite.verbs.doctor import doctor; sys.exit(doctor())"
    if torch_source is None:
        code = f"import sys; sys.modules['torch'] = None; {code}"
    else:
        (folder / "torch.py").write_text(torch_source)
    # PYTHONUNBUFFERED off: with it, a flush that was forgotten would not show.
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def labels(lines: list[str]) -> list[str]:
    return [line[:16].strip() for line in lines if not line.startswith("warning: ")]


def test_everything_known_is_out_before_torch_is_imported(tmp_path: Path) -> None:
    # The end of the process stands for an import that crashes; what was not flushed would be lost with it.
    start = time.monotonic()
    result = run_doctor(tmp_path, "import os\nos._exit(7)")
    assert time.monotonic() - start < 1
    assert (result.returncode, labels(result.stdout.splitlines())) == (7, FIRST_LABELS)


def test_broken_torch_is_one_sentence_and_status_1(tmp_path: Path) -> None:
    result = run_doctor(tmp_path, "raise OSError('libcudart.so.13: cannot open\\nshared object file')")
    assert (result.returncode, result.stderr) == (1, "")
    *first_part, error = result.stdout.splitlines()
    assert labels(first_part) == FIRST_LABELS
    assert error == (
        "error: torch is installed but cannot be imported (OSError: libcudart.so.13: cannot open shared object file): "
        "run 'pip install --force-reinstall torch'"
    )


def test_missing_torch_names_the_command(tmp_path: Path) -> None:
    result = run_doctor(tmp_path, None)
    error = "error: torch is not installed: run 'make setup', or 'pip install torch'"
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, error)


def test_installed_torch_has_all_that_doctor_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    printed = labels(capsys.readouterr().out.splitlines())
    assert printed[: len(FIRST_LABELS)] == FIRST_LABELS
    assert printed[-4:] == ["cuDNN", "MPS available", "CPU capability", "torch threads"]


def test_print_aligns_the_columns_and_marks_warnings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, StandIn(gpus=1, cuda="13.0", threads=16))
    assert doctor() == 0
    *rows, warning = capsys.readouterr().out.splitlines()
    assert all(row[15] == " " and row[16] != " " for row in rows)
    assert warning == (
        "warning: torch would run 16 threads where 4 can run (CPU quota 4.5 in /sys/fs/cgroup/cpu.max), "
        "which slows all of them: export OMP_NUM_THREADS=4"
    )


def test_healthy_machine_has_no_warnings() -> None:
    report = system_report(driver="580.65.06")
    assert report.rows[3:8] == [
        ("usable cores", "4 (CPU quota 4.5 in /sys/fs/cgroup/cpu.max)"),
        ("memory", "1.5 GiB available of 16.0 GiB"),
        ("shared memory", "8.0 GiB free of 8.0 GiB"),
        ("open files", "65536"),
        ("NVIDIA driver", "580.65.06"),
    ]
    assert report.warnings == []


def test_missing_package_and_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert dict(system_report(None).rows)["memory"] == "unknown available of 16.0 GiB"
    assert doctor_module._installed("no-such-package") == "not installed"


@pytest.mark.parametrize(
    ("memory", "row", "expected"),
    [
        (SharedMemory(64 * MIB, 60 * MIB), "60 MiB free of 64 MiB", [f"/dev/shm holds only 64 MiB{SMALL_SHM}"]),
        (SharedMemory(8 * GIB, 100 * MIB), "100 MiB free of 8.0 GiB", [f"only 100 MiB of /dev/shm is free{FULL_SHM}"]),
        (SharedMemory(GIB, GIB), "1.0 GiB free of 1.0 GiB", []),
        (None, "no /dev/shm", []),  # macOS
    ],
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, memory: SharedMemory | None, row: str, expected: list[str]) -> None:
    monkeypatch.setattr(machine, "shared_memory", lambda: memory)
    report = system_report(None)
    assert (dict(report.rows)["shared memory"], report.warnings) == (row, expected)


@pytest.mark.parametrize(
    ("limit", "row", "remedy"),
    [
        (OpenFiles(256, None), "256 (may be raised to unlimited)", "run 'ulimit -n 65536' first"),
        (OpenFiles(256, 4096), "256 (may be raised to 4096)", "run 'ulimit -n 4096' first"),
        (OpenFiles(512, 512), "512", RAISE_LIMIT),
        (OpenFiles(1024, 4096), "1024 (may be raised to 4096)", None),
        (OpenFiles(None, None), "unlimited", None),
        (None, None, None),  # Windows
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: OpenFiles | None, row: str | None, remedy: str | None) -> None:
    monkeypatch.setattr(machine, "open_files_limit", lambda: limit)
    report = system_report(None)
    assert dict(report.rows).get("open files") == row
    few = f"only {limit and limit.soft} open files are allowed, and DataLoader workers use one for each tensor they hand over"
    assert report.warnings == ([f"{few}: {remedy}"] if remedy else [])


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, StandIn(gpus=2, cuda="13.0"))
    report = torch_report(driver="580.65.06")
    assert report.rows == [
        ("torch imported", "9.8.7"),
        ("torch build", "CUDA 13.0 build"),
        ("CUDA available", "yes"),
        ("GPU 0", "Card 0, 80.0 GiB, compute capability 9.0, native bf16"),
        ("GPU 1", "Card 1, 80.0 GiB, compute capability 9.1, native bf16"),
        ("cuDNN", "9.24.0"),
        ("MPS available", "no"),
        ("CPU capability", "AVX2"),
        ("torch threads", "4"),
    ]
    assert report.warnings == []


def test_gpu_and_cudnn_that_fail_do_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("devices are\nbusy")

    torch = StandIn(gpus=1, cuda="13.0")
    torch.cuda.get_device_properties = torch.backends.cudnn.version = fail
    use(monkeypatch, torch)
    report = torch_report(driver="580.65.06")
    assert {("GPU 0", "not usable"), ("cuDNN", "not usable")} <= set(report.rows)
    assert report.warnings == [
        "GPU 0 cannot be used (devices are busy): see with 'nvidia-smi' what occupies it",
        "cuDNN cannot be used (devices are busy): install a torch for this GPU from https://pytorch.org/get-started/locally",
    ]


@pytest.mark.parametrize(
    ("torch", "driver", "because"),
    [
        (StandIn(), "580.65.06", f"is there, but this torch is a CPU build: install a CUDA build {INSTALL}"),
        (StandIn(hip="6.2"), "580.65.06", f"is there, but this torch is a ROCm 6.2 build: install a CUDA build {INSTALL}"),
        (StandIn(cuda="13.0"), "535.129.03", f"{TOO_OLD} {INSTALL}"),
        (StandIn(cuda="12.8"), "535.129.03", SEES_NONE),
        (StandIn(cuda="13.0"), "unknown", SEES_NONE),
    ],
)
def test_driver_without_cuda(monkeypatch: pytest.MonkeyPatch, torch: StandIn, driver: str, because: str) -> None:
    use(monkeypatch, torch)
    assert torch_report(driver).warnings == [f"NVIDIA driver {driver} {because}"]
    assert torch_report(driver=None).warnings == []


def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, StandIn(cuda="13.0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (warning,) = torch_report("580.65.06").warnings
    assert warning == "torch sees no GPU while CUDA_VISIBLE_DEVICES is '-1': unset it and run this again"


def test_what_torch_warns_about_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain() -> bool:
        warnings.warn("CUDA unknown\nerror", UserWarning, stacklevel=1)
        return False

    torch = StandIn(cuda="13.0")
    torch.cuda.is_available = complain
    use(monkeypatch, torch)
    assert torch_report(driver=None).warnings == ["torch says: CUDA unknown error"]


@pytest.mark.parametrize(("number", "text"), [(92400, "9.24.0"), (91002, "9.10.2"), (8907, "8.9.7"), (None, "none")])
def test_cudnn_version(number: int | None, text: str) -> None:
    assert doctor_module._cudnn_version(number) == text
