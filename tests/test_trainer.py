from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from fulgurite import Trainer, load
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from fulgurite.tasks.schedules import WarmupCosine
from tests.conftest import SMALL
from tests.training import at_batch, fit

RUNS = Path("runs/digits")


def make(**options: Any) -> tuple[Trainer, ClassificationTask, DigitsDataModule]:
    data = DigitsDataModule(batch_size=32)
    optimizer, schedule = partial(AdamW, lr=1e-3), partial(WarmupCosine, warmup=0.1)
    task = ClassificationTask(partial(SmallCNN, width=4), optimizer, schedule, spec=data.spec)
    defaults = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 2, "enable_progress_bar": False}
    return Trainer(**defaults | options), task, data


def rows(run: Path) -> int:
    with (run / "metrics.csv").open() as file:
        return len(list(csv.reader(file)))


def folder(run: Path) -> set[str]:
    return {path.name.split(".")[0] for path in run.iterdir()}


# From Python


def test_whole_way_from_python_without_yaml(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, task, data = make(experiment="x")
    trainer.fit(task, datamodule=data)
    (metrics,) = trainer.test(task, datamodule=data, ckpt_path="best")
    run = Path("runs/x/v001")
    assert trainer.run_dir == run
    assert folder(run) == {"checkpoints", "config", "events", "metrics"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 1
    assert config["model"]["init_args"]["network"] == {
        "class_path": "fulgurite.models.SmallCNN",
        "init_args": {"width": 4, "depth": 3, "dropout": 0.0, "init": "default"},
    }
    assert config["data"]["init_args"]["batch_size"] == 32
    loaded = load(run)
    again = make(logger=False, enable_checkpointing=False)[0].test(loaded, datamodule=data)
    assert again == [metrics]
    capsys.readouterr()
    assert main(["test", "--ckpt_path", str(run), "--trainer.enable_progress_bar", "false"]) == 0
    said = "  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
    assert f"test        {said}\n" in capsys.readouterr().out


def test_best_is_that_of_this_run_also_when_another_has_started_since(here: Path) -> None:
    trainer, task, data = make()
    trainer.fit(task, datamodule=data)
    other, other_task, other_data = make()
    other.fit(other_task, datamodule=other_data)
    (metrics,) = trainer.validate(task, datamodule=data, ckpt_path="last")
    assert metrics["val/loss"] == pytest.approx(float(trainer.callback_metrics["val/loss"]))
    assert trainer._resolve("best") == Path("runs/default/v001/checkpoints/best.ckpt")
    assert make()[0]._resolve("best") == Path("runs/default/v002/checkpoints/best.ckpt")


def test_second_fit_of_a_trainer_is_a_run_of_its_own(here: Path) -> None:
    trainer, task, data = make()
    trainer.fit(task, datamodule=data)
    before = rows(Path("runs/default/v001"))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, datamodule=data)
    assert trainer.run_dir == Path("runs/default/v002")
    assert rows(Path("runs/default/v001")) == before
    assert torch.load("runs/default/v002/checkpoints/last.ckpt", weights_only=True)["global_step"] == 8
    with pytest.raises(UserError, match=r"^nothing to train: 2 epochs and 8 steps are done"):
        trainer.fit(task, datamodule=data)
    assert sorted(path.name for path in Path("runs/default").iterdir()) == ["v001", "v002"]


def test_callbacks_of_ones_own_stand_beside_the_built_in_ones(here: Path) -> None:
    stopping = EarlyStopping("val/loss")
    for given in (stopping, [stopping]):
        found = make(callbacks=given)[0].callbacks
        assert stopping in found
        assert sum(isinstance(one, Checkpoints) for one in found) == 1
    own = Checkpoints(monitor="val/loss")
    trainer = make(callbacks=[own])[0]
    assert [one for one in trainer.callbacks if isinstance(one, Checkpoints)] == [own] == [trainer.checkpoints]
    assert make(callbacks=own, enable_checkpointing=False)[0].checkpoints is None


def test_a_callback_that_does_not_go_with_schedules_is_refused() -> None:
    with pytest.raises(UserError, match=r"set trainer.accumulate_grad_batches"):
        make(callbacks=GradientAccumulationScheduler({0: 2}))


def test_logger_of_ones_own(here: Path) -> None:
    mine = CSVLogger(str(here / "mine"), name="", version="")
    trainer, task, data = make(logger=["csv", mine], log_every_n_steps=1)
    trainer.fit(task, datamodule=data)
    assert (here / "mine" / "metrics.csv").is_file()
    assert folder(Path("runs/default/v001")) == {"checkpoints", "config", "metrics"}


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert make(runs_dir=Path("~/runs"))[0].runs_dir == Path("/home/me/runs")


# Folders


def test_two_runs_of_an_experiment_share_nothing(here: Path) -> None:
    assert fit(epochs=1) == 0
    before = {path: path.read_bytes() for path in RUNS.rglob("*") if path.is_file()}
    assert fit(epochs=1) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in RUNS.iterdir()) == ["v001", "v002"]
    assert folder(RUNS / "v001") == folder(RUNS / "v002")
    assert rows(RUNS / "v001") == rows(RUNS / "v002") == 3


def test_two_runs_at_once(here: Path) -> None:
    command = [sys.executable, "-m", "fulgurite", "fit", *SMALL, "--trainer.max_epochs", "1"]
    processes = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for run in ("v001", "v002"):
        assert torch.load(RUNS / run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
        assert rows(RUNS / run) == 3


def break_down() -> None:
    raise RuntimeError("broken")


def test_run_that_fails_before_its_first_step_leaves_no_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_batch(monkeypatch, 1, break_down)
    with pytest.raises(RuntimeError, match="broken"):
        fit(epochs=1)
    assert list(RUNS.iterdir()) == []


def test_resumed_run_that_fails_before_its_first_step_leaves_no_folder(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_batch(monkeypatch, 1, break_down)
    before = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError, match="broken"):
        main(["fit", "--ckpt_path", str(trained_run), "--trainer.max_epochs", "3"])
    assert list(RUNS.iterdir()) == []
    assert {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()} == before


def test_run_that_fails_later_keeps_what_it_has(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_batch(monkeypatch, 6, break_down)
    with pytest.raises(RuntimeError, match="broken"):
        fit(epochs=2)
    assert folder(RUNS / "v001") == {"checkpoints", "config", "events", "metrics"}


@pytest.mark.parametrize(
    "args",
    [
        ["--trainer.experiment", "a/b"],
        ["--data.batch_size", "0"],
        ["--data.val_fraction", "0.001"],
        ["--model.top_k", "0"],
        ["--trainer.max_epochs", "-1"],
        ["--checkpoint.monitor", "loss"],
    ],
)
def test_refused_run_leaves_no_folder(here: Path, args: list[str]) -> None:
    assert fit(*args, epochs=1) == 2
    assert [path for path in here.rglob("*") if path.is_file()] == []
    assert list(here.glob("runs/*/*")) == []


def test_finished_run_has_nothing_left_to_train(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--ckpt_path", str(trained_run)]) == 2
    assert capsys.readouterr().err == (
        "error: nothing to train: 2 epochs and 8 steps are done, trainer.max_epochs is 2 and trainer.max_steps -1\n"
        "for more: --trainer.max_epochs 3\n"
    )
    assert list(RUNS.iterdir()) == []


# Ways to run


def test_fast_dev_run_leaves_nothing_behind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--trainer.fast_dev_run", "true", "--test", "true", epochs=1) == 0
    assert list(here.iterdir()) == []
    out = capsys.readouterr().out
    assert "test/acc" in out
    assert "run  " not in out


def test_without_checkpoints(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--trainer.enable_checkpointing", "false", "--test", "true", epochs=1) == 0
    assert folder(RUNS / "v001") == {"config", "events", "metrics"}
    out = capsys.readouterr().out
    assert "\ntest        test/acc 0." in out
    assert "predict" not in out


def test_fit_can_test_the_best_afterwards(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--test", "true", epochs=1) == 0
    out = capsys.readouterr().out
    measured = next(line for line in out.splitlines() if line.startswith("test "))
    assert f"checkpoint  {RUNS}/v001/checkpoints/best.ckpt\n{measured}\n" in out
    assert out.endswith(
        f"run         {RUNS}/v001\n"
        f"next        fulgurite predict --ckpt_path {RUNS}/v001 --images FOLDER --output predictions.csv\n"
        "            tensorboard --logdir runs\n"
    )
    assert main(["test", "--ckpt_path", "best"]) == 0
    assert f"\n{measured}\n" in capsys.readouterr().out


def test_overfitting_sees_the_same_batches_each_epoch(here: Path) -> None:
    # Any warning would be an error here.
    seen: list[list[int]] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch[1].tolist())

    trainer, task, data = make(overfit_batches=2, max_epochs=2, callbacks=Look())
    trainer.fit(task, datamodule=data)
    assert seen[:2] == seen[2:] == [data.dataset("train").labels[start : start + 32].tolist() for start in (0, 32)]


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_ctrl_c_in_evaluation(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    def press_ctrl_c(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ClassificationTask, "_step", press_ctrl_c)
    handler = signal.getsignal(signal.SIGINT)
    assert main([verb, "--ckpt_path", str(trained_run)]) == 130
    assert capsys.readouterr().err.startswith("stopped: ")
    assert signal.getsignal(signal.SIGINT) is handler


def test_initial_weights_are_meant_by_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *SMALL[:2], "--ckpt_path", "none", "--trainer.enable_progress_bar", "false"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("test        test/acc 0.")
    assert "checkpoint" not in out


def test_task_trains_after_it_was_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, task, data = make()
    trainer.validate(task, datamodule=data)
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, ckpt_path="best")
    make()[0].fit(task, datamodule=data)
    assert "does not count" not in capsys.readouterr().out


def test_window_of_no_batches_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--trainer.accumulate_grad_batches", "0"]) == 2
    assert capsys.readouterr().err.endswith(": trainer.accumulate_grad_batches is 0; it must be at least 1\n")
