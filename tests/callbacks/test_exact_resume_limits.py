"""Runs that a limit of steps or time has ended, taken on: as if the limit had been the later one from the start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite.cli import main
from fulgurite.tasks import ClassificationTask
from tests.commands import refused
from tests.conftest import SMALL
from tests.training import RUN, at_batch, logged

# 4 batches an epoch, a constant rate.
FIT = ["fit", *SMALL, "--model.scheduler", "null", "--trainer.log_every_n_steps", "1"]
OTHER = Path("runs/digits/v002")


def limits(epochs: int, steps: int) -> list[str]:
    return ["--trainer.max_epochs", str(epochs), "--trainer.max_steps", str(steps)]


def state(run: Path) -> list[Any]:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    parts = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "global_step", "epoch")}
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in torch.utils._pytree.tree_leaves(parts)]


def rows(run: Path, *, after: int = -1) -> list[dict[str, str]]:
    return [row for row in logged(run) if int(row["step"]) > after]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (limits(-1, 6), limits(-1, 14)),  # in the middle of an epoch
        (limits(-1, 8), limits(-1, 14)),  # at the end of one
        (limits(2, -1), limits(-1, 14)),
        (limits(-1, 6), limits(4, -1)),
        (limits(-1, 6), limits(-1, 7)),
    ],
    ids=["middle", "end", "epochs_then_steps", "steps_then_epochs", "same_epoch"],
)
def test_longer_limit_is_as_if_from_the_start(here: Path, first: list[str], then: list[str]) -> None:
    assert main([*FIT, *then]) == 0
    assert main([*FIT, *first]) == 0
    assert main(["fit", "--resume", *then]) == 0
    assert state(OTHER) == state(RUN)
    assert rows(OTHER, after=7) == rows(RUN, after=7)


def test_stop_by_the_clock_goes_on_in_the_middle_of_the_epoch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*FIT, *limits(3, -1)]) == 0
    with monkeypatch.context() as patched:
        at_batch(patched, 6, lambda: time.sleep(3))
        assert main([*FIT, *limits(3, -1), "--trainer.max_time", "00:00:00:03"]) == 0
    assert torch.load(OTHER / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 6
    assert main(["fit", "--resume", "--trainer.max_time", "00:01:00:00"]) == 0
    assert state(OTHER) == state(RUN)


def test_stop_within_a_window_of_accumulation_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ClassificationTask.training_step

    def training_step(self: ClassificationTask, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.trainer.should_stop = batch_idx == 2
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(ClassificationTask, "training_step", training_step)
        assert main([*FIT, *limits(2, -1), "--trainer.accumulate_grad_batches", "2"]) == 0
    said = refused(capsys, "fit", "--resume")
    assert "taken after 3 batches of an epoch, inside a window of accumulate_grad_batches 2" in said
    assert main(["fit", "--resume", "--resume_inexact"]) == 0
