"""What the Checkpoints callback keeps when the user or the disk stops it."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from fulgurite.cli import main
from fulgurite.tasks import ClassificationTask
from tests.conftest import SMALL
from tests.training import RUN, at_batch, fit, steps


def press_ctrl_c(times: int = 1, wait: float = 0.6) -> None:
    for number in range(times):
        time.sleep(wait * min(number, 1))
        os.kill(os.getpid(), signal.SIGINT)


# Ctrl-C


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, before)


def command_in(text: str) -> list[str]:
    program, *args = shlex.split(text.rpartition("go on with: ")[2])
    assert program == "fulgurite"
    return args


@pytest.mark.usefixtures("handler")
def test_ctrl_c_saves_and_names_the_command_that_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    at_batch(monkeypatch, 6, press_ctrl_c)
    assert fit() == 75
    error = capfd.readouterr().err
    assert error == (
        "stopping after this step (Ctrl-C again stops at once)\n"
        "stopped: at step 6\ngo on with: fulgurite fit --resume runs/digits/v001\n"
    )
    assert steps(RUN) == {"best": 4, "last": 6}
    assert main(command_in(error)) == 0
    assert steps(RUN)["last"] == 8


@pytest.mark.usefixtures("handler")
def test_ctrl_c_waits_for_the_end_of_a_window_of_accumulation(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_batch(monkeypatch, 1, press_ctrl_c)
    assert fit("--trainer.accumulate_grad_batches", "2") == 75
    progress = torch.load(RUN / "checkpoints/last.ckpt", weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"]["processed"] == 2


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize(
    ("batch", "args", "status", "text"),
    [
        (6, [], 75, "stopped: at step 5\ngo on with: fulgurite fit --resume runs/digits/v001\n"),
        (1, [], 130, "stopped: there was no checkpoint yet\n"),
        (2, ["--trainer.enable_checkpointing", "false"], 130, "stopped: by Ctrl-C\n"),
    ],
)
def test_second_ctrl_c_stops_at_once(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    batch: int,
    args: list[str],
    status: int,
    text: str,
) -> None:
    at_batch(monkeypatch, batch, lambda: press_ctrl_c(2))
    assert fit(*args) == status
    assert capsys.readouterr().err.endswith(text)


@pytest.mark.usefixtures("handler")
def test_ctrl_c_right_after_a_resume_names_what_was_resumed(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_batch(monkeypatch, 1, lambda: press_ctrl_c(2))
    assert main(["fit", "--ckpt_path", str(trained_run), "--trainer.max_epochs", "3"]) == 75
    assert command_in(capsys.readouterr().err) == ["fit", "--ckpt_path", str(trained_run / "checkpoints" / "last.ckpt")]
    assert list(Path("runs/digits").iterdir()) == []


@pytest.mark.usefixtures("handler")
def test_ctrl_c_that_torchrun_passes_on_once_more_is_the_same_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_batch(monkeypatch, 6, lambda: press_ctrl_c(3, wait=0))
    assert fit() == 75
    assert steps(RUN) == {"best": 4, "last": 6}


USR1 = pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, USR1])
def test_signal_from_outside(here: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "fulgurite", "fit", *SMALL, "--trainer.max_epochs", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (RUN / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 75
    last = RUN / "checkpoints" / "last.ckpt"
    step = torch.load(last, weights_only=True)["global_step"]
    assert f"stopped: at step {step:,}\n" in error
    args = command_in(error)
    assert args == ["fit", "--resume", str(RUN)]
    epochs = step // 4 + 1
    assert main([*args, "--trainer.max_epochs", str(epochs)]) == 0
    assert steps(RUN)["last"] == 4 * epochs


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_stop_before_the_first_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals, status: int
) -> None:
    step = ClassificationTask.validation_step

    def validation_step(self: ClassificationTask, batch: Any, batch_idx: int) -> None:
        os.kill(os.getpid(), number)  # in the sanity check
        step(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "validation_step", validation_step)
    assert fit("--trainer.num_sanity_val_steps", "1") == status
    assert capsys.readouterr().err.endswith("stopped: there was no checkpoint yet\n")
    assert list(Path("runs/digits").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, USR1])
def test_signal_to_the_whole_job_leaves_the_workers_at_work(here: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "fulgurite", "fit", *SMALL, "--trainer.max_epochs", "5000", "--data.num_workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (RUN / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a scheduler does
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert error.endswith("go on with: fulgurite fit --resume runs/digits/v001\n")


# A full disk


def fill_disk(monkeypatch: pytest.MonkeyPatch, failing: set[int], *, wrapped: bool = False) -> None:
    """Let the so-manieth calls of torch.save fail after they have written a part."""
    save, count = torch.save, iter(range(1, 100))

    def torch_save(checkpoint: Any, file: Any) -> None:
        if next(count) not in failing:
            return save(checkpoint, file)
        file.write(b"PK part of a checkpoint")
        full = OSError(errno.ENOSPC, "No space left on device")
        if not wrapped:
            raise full
        try:
            raise full
        except OSError:
            raise RuntimeError("PytorchStreamWriter failed writing file")  # noqa: B904  # as PyTorch does it

    monkeypatch.setattr(torch, "save", torch_save)


@pytest.mark.parametrize("wrapped", [False, True])
def test_full_disk_leaves_the_previous_checkpoint_and_fails_at_the_end(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrapped: bool
) -> None:
    fill_disk(monkeypatch, {2, 3}, wrapped=wrapped)
    assert fit("--checkpoint.monitor", "val/loss", epochs=3) == 2
    out, err = capsys.readouterr()
    warning = "could not save runs/digits/v001/checkpoints/last.ckpt (No space left on device)"
    assert out.count(f"{warning}; the previous one is kept and the run goes on\n") == 2
    assert "3 epochs, 12 steps" in out
    assert err.startswith("error: the last checkpoint could not be saved: No space left on device\nonce that is mended, go on")
    assert steps(RUN) == {"best": 4, "last": 4}


def test_full_disk_that_has_room_again_is_no_failure(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, {1})
    assert fit() == 0
    assert steps(RUN)["last"] == 8


def test_score_whose_state_was_lost_is_not_best(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second epoch has the best score, and its state cannot be saved.
    scores = iter([0.0, 0.1, 0.9, 0.5])
    log = LightningModule.log
    monkeypatch.setattr(ClassificationTask, "on_validation_epoch_end", lambda self: log(self, "val/acc", next(scores)))
    fill_disk(monkeypatch, {2})
    assert fit(epochs=3) == 0
    assert steps(RUN) == {"best": 12, "last": 12}
    state = torch.load(RUN / "checkpoints" / "best.ckpt", weights_only=True)["callbacks"]["Checkpoints"]
    assert state["best"] == [{"score": 0.5, "epoch": 2, "step": 12}]


def test_stop_on_a_full_disk_says_what_is_lost(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_batch(monkeypatch, 6, press_ctrl_c)
    fill_disk(monkeypatch, {2})
    assert fit() == 75
    assert "stopped: at step 6; what came after step 4 could not be saved: No space left on device\n" in capsys.readouterr().err
    assert steps(RUN) == {"best": 4, "last": 4}


def test_file_system_without_hard_links(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert fit("--model.optimizer.lr", "0") == 0
    assert steps(RUN) == {"best": 4, "last": 8}
