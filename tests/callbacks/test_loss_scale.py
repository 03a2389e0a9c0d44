from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from fulgurite import Trainer
from fulgurite.callbacks.ema import EMA
from fulgurite.callbacks.loss_scale import LossScale
from fulgurite.errors import UserError
from fulgurite.tasks import ClassificationTask
from fulgurite.tasks.schedules import WarmupCosine
from tests.classification import loader, make, quiet
from tests.training import at_batch, fit

# With this scale, gradients of about 1 overflow; they fit when it has been halved some ten times.
TOO_LARGE = 2.0**26


def scaled(init_scale: float = 2.0**10, **options: Any) -> Trainer:
    """Return a trainer in float16 on the CPU, which only a plugin of one's own gives."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return quiet(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **options)


def train(trainer: Trainer, **options: Any) -> Any:
    """Train with 8 batches an epoch."""
    task = make(scheduler=WarmupCosine, **options)
    trainer.fit(task, loader(32), loader(8))
    return task


def scale_of(trainer: Any) -> float:
    return float(trainer.precision_plugin.scaler.get_scale())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("train/loss_scale")]


def test_it_is_there_for_float16_alone() -> None:
    assert not any(isinstance(callback, LossScale) for callback in quiet(accelerator="cpu").callbacks)
    assert sum(isinstance(callback, LossScale) for callback in scaled().callbacks) == 1


def test_skipped_steps_are_counted_logged_and_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = scaled(TOO_LARGE, max_epochs=5, log_every_n_steps=4, logger="csv", runs_dir=here)
    train(trainer)  # a warning of the schedule's, which steps before the optimizer, would be an error
    skipped = round(torch.log2(torch.tensor(TOO_LARGE / scale_of(trainer))).item())
    assert 3 < skipped < 40
    (file,) = here.glob("*/v001/metrics.csv")
    logged = [(int(row["step"]), int(float(row["train/skipped_steps"])), float(row["train/loss_scale"])) for row in rows(file)]
    assert [step for step, *_ in logged] == list(range(3, 40, 4))
    assert logged[0] == (3, 4, TOO_LARGE / 16)
    assert logged[-1] == (39, skipped, scale_of(trainer))
    assert trainer.callback_metrics["train/skipped_steps"] == skipped
    end = f"loss scale  {scale_of(trainer):g} at the end; {skipped} of 40 steps skipped, as float16 overflowed\n"
    assert end in capsys.readouterr().out


def test_a_scale_that_grows_skips_nothing(here: Path) -> None:
    trainer = scaled(2.0, max_epochs=1, log_every_n_steps=8)
    trainer.precision_plugin.scaler.set_growth_interval(2)  # type: ignore[attr-defined]
    train(trainer)
    assert scale_of(trainer) == 2.0**5
    assert trainer.callback_metrics["train/skipped_steps"] == 0


def test_accumulated_batches_are_one_step(here: Path) -> None:
    trainer = scaled(2.0**60, max_epochs=1, log_every_n_steps=2, accumulate_grad_batches=2)
    train(trainer)
    assert trainer.global_step == 4
    assert trainer.callback_metrics["train/skipped_steps"] == 4
    assert scale_of(trainer) == 2.0**56


def test_a_skipped_step_counts_and_leaves_the_weights(here: Path) -> None:
    trainer = scaled(2.0**60, max_epochs=1)
    task = train(trainer)
    assert trainer.global_step == 8
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 8
    for name, value in make().network.named_parameters():
        assert torch.equal(value, task.network.get_parameter(name))


class Nan(nn.Linear):
    """Give NaN for whatever image."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(16 * in_channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1)) * torch.nan


@pytest.mark.parametrize("log_every_n_steps", [1, 1000])
def test_a_scale_that_collapses_ends_the_run(here: Path, log_every_n_steps: int) -> None:
    trainer = scaled(16.0, max_epochs=9, log_every_n_steps=log_every_n_steps)
    with pytest.raises(UserError) as caught:
        train(trainer, network=Nan)
    step, scale = (15, "0.000488") if log_every_n_steps == 1 else (16, "0.000244")
    assert str(caught.value) == (
        f"nothing is learnt in float16: its loss scale has fallen to {scale} by step {step}, with {step} steps skipped: "
        "gradients are NaN, or too large at any scale\n"
        "try --trainer.precision bf16-mixed, a smaller rate, or --trainer.precision 32-true to see where the NaN is from"
    )


def test_one_nan_is_no_alarm(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    count, step = iter(range(1, 100)), ClassificationTask.training_step

    def training_step(self: ClassificationTask, *args: Any) -> torch.Tensor:
        loss = step(self, *args)
        return loss * torch.nan if next(count) == 3 else loss

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)
    trainer = scaled(max_epochs=1, enable_checkpointing=True, runs_dir=here)
    train(trainer)
    assert "loss scale  512 at the end; 1 of 8 steps skipped, as float16 overflowed\n" in capsys.readouterr().out
    assert len(list(here.glob("*/v001/checkpoints/last.ckpt"))) == 1


@pytest.mark.parametrize("stop", [8, 20])
def test_resumed_run_goes_on_with_scale_and_count(here: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    def run(name: str, **how: Any) -> Any:
        options: Any = {"enable_checkpointing": True, "logger": "csv", "log_every_n_steps": 1}
        trainer = scaled(TOO_LARGE, max_epochs=4, runs_dir=here / name, callbacks=EMA(decay=0.5), **options)
        trainer.fit(make(scheduler=WarmupCosine), loader(32), loader(8), **how)
        return torch.load(here / name / "default" / "v001" / "checkpoints" / "last.ckpt", weights_only=True)

    whole = run("whole")
    with monkeypatch.context() as patched:
        at_batch(patched, stop + 1, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("resumed")
    resumed = run("resumed", resume=True)
    assert whole["MixedPrecision"] == resumed["MixedPrecision"]
    assert whole["callbacks"]["LossScale"] == resumed["callbacks"]["LossScale"] != {"skipped_steps": 0}
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name
    last = [rows(here / name / "default" / "v001" / "metrics.csv")[-1] for name in ("whole", "resumed")]
    assert last[0]["train/skipped_steps"] == last[1]["train/skipped_steps"]


def test_other_precisions_save_nothing_of_it(here: Path) -> None:
    assert fit(epochs=1) == 0
    (last,) = here.glob("runs/*/v001/checkpoints/last.ckpt")
    assert "LossScale" not in torch.load(last, weights_only=True)["callbacks"]


@pytest.mark.gpu
def test_on_gpu(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--trainer.accelerator", "gpu", "--trainer.precision", "16-mixed", epochs=2) == 0
    assert "of 8 steps skipped, as float16 overflowed" in capsys.readouterr().out
