"""Two real processes that are stopped by signals or killed, and go on: together, and in the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT, SMALL
from tests.training import logged

DDP = ["-c", str(ROOT / "configs" / "trainer" / "ddp_cpu.yaml")]
FIT = ["fit", *SMALL, *DDP, "--trainer.max_epochs", "3", "--checkpoint.every_n_steps", "1"]
# Slow steps, so that a signal comes in the middle; a rank kills itself once in the batch that KILL names.
PROGRAM = """
import os, sys, time
from pathlib import Path
from fulgurite.cli import main
from fulgurite.tasks import ClassificationTask
step, count = ClassificationTask.training_step, iter(range(1, 1000))
rank, batch = os.environ.get("KILL", "9 0").split()
def training_step(self, batch_, batch_idx):
    time.sleep(float(os.environ.get("SLEEP", "0")))
    if next(count) == int(batch) and os.environ.get("LOCAL_RANK", "0") == rank and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), 9)
    return step(self, batch_, batch_idx)
ClassificationTask.training_step = training_step
sys.exit(main())
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "2"]


def start(folder: Path, how: list[str], args: list[str], **environment: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, *how, "program.py", *args],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=180)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def outcome(run: Path) -> tuple[Any, ...]:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    parts = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    leaves, structure = torch.utils._pytree.tree_flatten(parts)
    return str(structure), [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves], logged(run)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    status, _, err = finish(start(folder, [], FIT))
    assert (status, err) == (0, "")
    return folder / "runs" / "digits" / "v001"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_signal_to_one_process_stops_both_after_the_same_step(here: Path, whole_run: Path, number: signal.Signals) -> None:
    process = start(here, [], FIT, SLEEP="0.2")
    run = here / "runs" / "digits" / "v001"
    deadline = time.monotonic() + 60
    while not (run / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)  # to the first process alone, as a person or SLURM's batch shell would
    status, _, err = finish(process)
    assert status == 75
    lines = err.splitlines()
    assert lines[0] == "stopping after this step (Ctrl-C again stops at once)"
    assert lines[-1] == "go on with: fulgurite fit --resume runs/digits/v001"
    assert len(lines) == 3
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] < 12
    status, _, err = finish(start(here, [], ["fit", "--resume", "runs/digits/v001"]))
    assert (status, err) == (0, "")
    assert outcome(run) == outcome(whole_run)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_torchrun_restarts_a_killed_process_and_the_run_goes_on(here: Path, whole_run: Path, rank: int) -> None:
    # Without the variable a restart now and then meets keys of the first start: https://github.com/pytorch/pytorch/issues/135712
    status, out, err = finish(start(here, TORCHRUN, FIT, KILL=f"{rank} 6", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    assert status == 0, err
    assert (here / "killed").exists()
    assert out.count("resume      auto, as this job has been restarted\n") == 1
    assert "warning" not in out
    assert [path.name for path in (here / "runs" / "digits").iterdir()] == ["v001"]
    assert outcome(here / "runs" / "digits" / "v001") == outcome(whole_run)
