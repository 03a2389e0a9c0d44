from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fulgurite.callbacks.finite import not_finite
from fulgurite.tasks import ClassificationTask
from tests.commands import refused
from tests.conftest import SMALL
from tests.training import RUN, fit, steps


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_first_parameter_that_is_no_number_is_named(value: float) -> None:
    second = nn.Linear(2, 1)
    network = nn.Sequential(nn.Linear(2, 2), second)
    assert not_finite(network) is None
    second.weight.data[0, 1] = value
    assert not_finite(network) == "1.weight"


def loss_becomes_nan(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    step, count = ClassificationTask.training_step, iter(range(1, 100))

    def training_step(self: ClassificationTask, samples: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = step(self, samples, batch_idx)
        return loss * torch.nan if next(count) == batch else loss

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)


@pytest.mark.parametrize("options", [[], ["--ema.decay", "0.5"], ["--checkpoint.keep_best", "3"]])
def test_loss_that_is_no_number_never_gives_a_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    # val/acc of such weights is a number, a tenth, and could be the best.
    loss_becomes_nan(monkeypatch, 6)
    said = refused(capsys, "fit", *SMALL, "--trainer.max_epochs", "3", *options)
    assert said == (
        "network.stages.0.weight has NaN or infinity at step 8, epoch 2 (counted from 0)\n"
        "try a smaller rate or --trainer.gradient_clip_val 1\n"
        "the last good state is in runs/digits/v001/checkpoints/last.ckpt"
    )
    assert set(steps(RUN).values()) == {4}


def test_loss_that_is_no_number_from_the_start_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss_becomes_nan(monkeypatch, 1)
    assert "the last good state" not in refused(capsys, "fit", *SMALL, "--trainer.max_epochs", "1")
    assert not list(here.rglob("*.ckpt"))


def test_finite_weights_are_not_complained_of(here: Path) -> None:
    assert fit(epochs=1) == 0
