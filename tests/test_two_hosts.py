"""Two hosts on one machine: network namespaces joined by a cable, a torchrun in each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fulgurite.cli import main
from tests.conftest import ROOT, SMALL

pytestmark = pytest.mark.slow

OVERLAY = ["-c", str(ROOT / "configs" / "trainer" / "multi_host.yaml")]
ON_CPU = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.precision", "32-true"]
ON_CPU += ["--trainer.sync_batchnorm", "false"]  # PyTorch's is for GPUs
# 271 test samples: 136 and 135, in batches of 27 that is 6 batches on one host and 5 on the other.
UNEQUAL = ["--data.test_fraction", "0.1501", "--data.batch_size", "27"]
FIT = ["fit", *SMALL, *OVERLAY, *ON_CPU, *UNEQUAL, "--trainer.max_epochs", "1", "--test"]
CABLE = "fulgurite"  # the name of the network card in each namespace
Hosts = list[str]


def ip(*command: str) -> None:
    done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(command)}: {done.stderr.strip() or done.returncode}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Make two namespaces that reach each other as 10.77.0.1 and 10.77.0.2, and nothing else."""
    if not shutil.which("ip"):
        pytest.skip("no network namespaces here: iproute2 is not installed")
    names = [f"fulgurite-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(host: str, rank: int, command: list[str], folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--node-rank", str(rank), "--master-addr", "10.77.0.1", "-m", "fulgurite"]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *torchrun, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def launch(hosts: Hosts, command: list[str], folders: list[Path]) -> tuple[list[int], list[str], list[str]]:
    """Run a command on both hosts; return status, output and errors of each. None of the processes outlives the call."""
    processes = [start(host, rank, command, folder) for rank, (host, folder) in enumerate(zip(hosts, folders, strict=True))]
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [process.returncode for process in processes], [out for out, _ in texts], [err for _, err in texts]


def results(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("test ")]


def test_hosts_without_a_shared_disk(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    statuses, (first, second), errors = launch(hosts, FIT, folders)
    assert statuses == [0, 0], errors
    assert second == ""
    assert list(folders[1].iterdir()) == []  # only the first host writes
    assert "device      2 x cpu" in first
    assert "run         on the first host alone" in first
    monkeypatch.chdir(folders[0])
    assert main(["test", "--ckpt_path", "best", "--trainer.enable_progress_bar", "false"]) == 0
    assert results(first) == results(capsys.readouterr().out) != []


def test_hosts_with_a_shared_disk_go_on_with_a_run(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statuses, (first, _), errors = launch(hosts, FIT, [tmp_path, tmp_path])
    assert statuses == [0, 0], errors
    assert "on the first host alone" not in first
    more = ["fit", "--resume", "--trainer.num_nodes", "2", "--trainer.max_epochs", "2", "--test"]
    statuses, (first, _), errors = launch(hosts, more, [tmp_path, tmp_path])
    assert statuses == [0, 0], errors
    assert "runs/digits/v001 goes on" in first
    assert [path.name for path in tmp_path.glob("runs/*/*")] == ["v001"]
    assert main(["test", "--ckpt_path", str(tmp_path / "runs"), "--trainer.enable_progress_bar", "false"]) == 0
    assert results(first) == results(capsys.readouterr().out) != []
