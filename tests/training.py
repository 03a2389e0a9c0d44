"""Small runs of the digits experiment, and what to do in the middle of one."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite.cli import main
from fulgurite.tasks import ClassificationTask
from tests.conftest import SMALL

RUN = Path("runs/digits/v001")
THROUGHPUT = "train/samples_per_second"


class Killed(Exception):
    """What ends a run in the middle."""


def stop() -> None:
    """End the run."""
    raise Killed


def fit(*args: str, epochs: int = 2) -> int:
    """Train on the digits, 4 steps an epoch."""
    return main(["fit", *SMALL, "--trainer.max_epochs", str(epochs), *args])


def steps(run: Path) -> dict[str, int]:
    """Return the optimizer step of each checkpoint; what else is in the folder fails."""
    found = {path.name: torch.load(path, weights_only=True)["global_step"] for path in (run / "checkpoints").iterdir()}
    return {name.removesuffix(".ckpt"): step for name, step in sorted(found.items())}


def logged(run: Path) -> list[dict[str, str]]:
    """Return what each row of the metrics says, but the throughput, which is never the same twice."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if value and name != THROUGHPUT} for row in rows]


def at_batch(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], Any]) -> None:
    """Do something inside the so-manieth training batch of this test."""
    step, count = ClassificationTask.training_step, iter(range(1, 100))

    def training_step(self: ClassificationTask, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if next(count) == number:
            action()
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)
