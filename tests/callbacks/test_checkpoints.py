from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from fulgurite import Trainer, load
from fulgurite.callbacks.best_states import Best
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.tasks import ClassificationTask
from tests.training import RUN, at_batch, fit, steps


def validations(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open() as file:
        return [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file) if row["val/loss"]]


# Which state is best


def test_last_is_the_last_epoch_even_when_the_score_never_improves(here: Path) -> None:
    assert fit("--model.optimizer.lr", "0", epochs=3) == 0
    assert steps(RUN) == {"best": 4, "last": 12}
    epochs = [torch.load(RUN / "checkpoints" / f"{name}.ckpt", weights_only=True)["epoch"] for name in ("best", "last")]
    assert epochs == [0, 2]


@pytest.mark.parametrize(
    ("args", "epoch"),
    [
        ([], 2),  # val/acc, the larger the better
        (["--checkpoint.monitor", "val/loss"], 1),
        (["--checkpoint.monitor", "val/loss", "--checkpoint.mode", "max"], 3),
        (["--checkpoint.mode", "min"], 1),
    ],
)
def test_direction_is_the_metrics_own_unless_a_mode_is_given(
    here: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], epoch: int
) -> None:
    scores = iter([(0.9, 0.9), (0.1, 0.1), (0.8, 0.3), (0.3, 1.5)])  # acc, loss: first of the sanity check
    log = LightningModule.log

    def fixed(self: ClassificationTask) -> None:
        acc, loss = next(scores)
        log(self, "val/acc", acc)
        log(self, "val/loss", loss)

    monkeypatch.setattr(ClassificationTask, "on_validation_epoch_end", fixed)
    assert fit(*args, epochs=3) == 0
    assert steps(RUN) == {"best": 4 * epoch, "last": 12}


def test_best_within_a_window_of_accumulation_is_the_state_that_was_validated(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.0, 0.1, 0.1, 0.9, 0.1])  # first of the sanity check, then after each batch
    log = LightningModule.log
    monkeypatch.setattr(ClassificationTask, "on_validation_epoch_end", lambda self: log(self, "val/acc", next(scores)))
    assert fit("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "1", epochs=1) == 0
    assert steps(RUN) == {"best": 1, "last": 2}
    # One cannot go on exactly from there, and is told so.
    assert main(["fit", "--ckpt_path", str(RUN / "checkpoints" / "best.ckpt")]) == 2


def test_best_is_the_very_state_that_was_validated(here: Path) -> None:
    assert fit("--checkpoint.monitor", "val/loss") == 0
    best = min(validations(RUN), key=lambda row: row["val/loss"])
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=2)
    (metrics,) = trainer.validate(load(RUN), datamodule=DigitsDataModule())
    assert metrics["val/loss"] == pytest.approx(best["val/loss"], abs=1e-6)


def test_score_that_is_no_number_is_never_best() -> None:
    for mode, scores, best in (("max", [math.nan, 0.5, math.nan], 0.5), ("min", [math.nan, 0.5, math.nan, 0.4], 0.4)):
        callback = Checkpoints(monitor="score", mode=cast(Any, mode))
        for epoch, score in enumerate(scores):
            state = {"sanity_checking": False, "state": SimpleNamespace(fn="fit"), "current_epoch": epoch, "global_step": epoch}
            callback.on_validation_end(SimpleNamespace(callback_metrics={"score": score}, **state), BoringModel())
        assert callback.best is not None
        assert callback.best.score == best


# What the user set


def test_misspelt_monitor_is_refused_before_the_first_batch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--checkpoint.monitor", "val/accuracy") == 2
    assert capsys.readouterr().err.endswith(
        "checkpoint.monitor is 'val/accuracy', which ClassificationTask does not log in validation"
        " (did you mean 'val/acc'?)\nallowed: val/loss, val/acc, val/acc_macro, val/acc_top5\n"
    )
    assert not RUN.exists()


class Plain(BoringModel):
    """Log a score and declare nothing."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", 1.0)


def fit_plain(**options: Any) -> None:
    trainer = Trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, logger=False, callbacks=Checkpoints(**options))
    trainer.fit(Plain())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Plain declares no metric to monitor: set checkpoint.monitor and checkpoint.mode"),
        ({"monitor": "score"}, "the direction of 'score' is not known: set checkpoint.mode to min or max"),
        (
            {"monitor": "scores", "mode": "max"},
            "checkpoint.monitor is 'scores', which Plain does not log in validation (did you mean 'score'?)\nallowed: score",
        ),
    ],
)
def test_any_module_is_asked_for_its_monitor_before_the_first_batch(here: Path, options: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        fit_plain(**options)
    assert str(error.value) == text
    assert list((here / "runs" / "default").iterdir()) == []


def test_any_module_is_kept_by_a_monitor_with_a_mode(here: Path) -> None:
    fit_plain(monitor="score", mode="min")
    assert steps(Path("runs/default/v001")) == {"best": 1, "last": 1}


def test_saving_every_no_steps_is_refused() -> None:
    with pytest.raises(UserError, match=r"^checkpoint.every_n_steps is 0; it must be at least 1, or null$"):
        Checkpoints(every_n_steps=0)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--trainer.limit_val_batches", "0"], "no validation: only last.ckpt is kept, at each epoch's end; best means the last"),
        (["--trainer.check_val_every_n_epoch", "9"], "val/acc gave no score: only last.ckpt is kept; best means the last"),
    ],
)
def test_without_validation_the_last_is_kept_and_the_rule_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], text: str
) -> None:
    assert fit(*args) == 0
    assert f"checkpoints {text}\n" in capsys.readouterr().out
    assert steps(RUN) == {"last": 8}
    assert main(["test", "--ckpt_path", "best", "--trainer.enable_progress_bar", "false"]) == 0


def test_steps_between_epochs_are_kept_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    at_batch(monkeypatch, 4, lambda: found.append(steps(RUN)["last"]))
    assert fit("--checkpoint.every_n_steps", "2", epochs=1) == 0
    assert found == [2]


def test_the_clock_can_ask_for_a_save(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    at_batch(monkeypatch, 4, lambda: found.append(steps(RUN)["last"]))
    assert fit("--checkpoint.every_n_minutes", "1e-9", epochs=1) == 0
    assert found == [3]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"keep_best": 0}, "checkpoint.keep_best is 0; it must be at least 1"),
        ({"every_n_minutes": 0}, "checkpoint.every_n_minutes is 0; it must be above 0, or null"),
        ({"every_n_minutes": float("nan")}, "checkpoint.every_n_minutes is nan; it must be above 0, or null"),
    ],
)
def test_senseless_numbers_are_refused(option: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        Checkpoints(**option)
    assert str(error.value) == text


# Into a new folder


def resume(checkpoint: Path, *args: str) -> int:
    return main(["fit", "--ckpt_path", str(checkpoint), "--trainer.max_epochs", "3", *args])


def never_better(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LightningModule.log
    monkeypatch.setattr(ClassificationTask, "on_validation_epoch_end", lambda self: log(self, "val/acc", 0.0))


def test_best_comes_along(here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_better(monkeypatch)
    before = {path: path.read_bytes() for path in trained_run.rglob("*.ckpt")}
    assert resume(trained_run) == 0
    assert (RUN / "checkpoints/best.ckpt").read_bytes() == before[trained_run / "checkpoints" / "best.ckpt"]
    assert steps(RUN)["last"] == 12
    assert {path: path.read_bytes() for path in trained_run.rglob("*.ckpt")} == before


def test_best_is_the_checkpoint_itself_where_the_run_was_killed_between_its_two_files(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_better(monkeypatch)
    shutil.copy(trained_run / "checkpoints/best.ckpt", "last.ckpt")
    Path("best.ckpt").write_bytes(b"of an earlier epoch")
    assert resume(Path("last.ckpt")) == 0
    assert (RUN / "checkpoints/best.ckpt").read_bytes() == Path("last.ckpt").read_bytes()


def test_best_that_is_gone_is_forgotten(here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_better(monkeypatch)
    shutil.copy(trained_run / "checkpoints/last.ckpt", "k.ckpt")
    assert resume(Path("k.ckpt")) == 0
    assert steps(RUN) == {"best": 12, "last": 12}


def test_best_by_another_metric_does_not_count(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(trained_run, "--checkpoint.monitor", "val/loss") == 0
    assert "checkpoints the best so far, by val/acc, does not count by val/loss\n" in capsys.readouterr().out
    assert steps(RUN) == {"best": 12, "last": 12}


def test_state_is_plain() -> None:
    callback = Checkpoints(monitor="a", mode="min")
    callback.states.add(Best(0.5, 1, 8), "min")
    other = Checkpoints(monitor="a", mode="min")
    other.load_state_dict(callback.state_dict())
    assert other.best == callback.best
    assert callback.state_dict() == {
        "monitor": "a",
        "mode": "min",
        "best": [{"score": 0.5, "epoch": 1, "step": 8}],
        "saved_step": 0,
        "complete": False,
    }
