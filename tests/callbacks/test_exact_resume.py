from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAUROC

from fulgurite import Trainer
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.exact_resume import ExactResume
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.data.samples import Split
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from tests import kills
from tests.conftest import SMALL
from tests.kills import KILLED
from tests.training import logged

# 2 epochs of 4 batches, with everything that draws: shuffling, shifts, dropout; a checkpoint after each step.
RUN = [*SMALL, "--trainer.max_epochs", "2", "--model.network.dropout", "0.3", "--checkpoint.every_n_steps", "1"]


class Samples(Dataset[Any]):
    """Give digits one by one, with noise from PyTorch's generator."""

    def __init__(self, split: Split) -> None:
        self.whole = DigitsDataModule().dataset(split)

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.whole[index]
        return image + torch.randint(0, 50, image.shape).to(torch.uint8), label


class SampleDigits(DigitsDataModule):
    def dataset(self, split: Split) -> Any:
        return Samples(split)


def fit(*args: str) -> int:
    return main(["fit", *args])


def kill_at(number: int, args: Sequence[str]) -> None:
    """Run ``fit`` in a process that is killed inside its so-manieth batch."""
    assert kills.fit(args, ("before the optimizer", number)) == KILLED


def end(run: Path) -> tuple[Any, ...]:
    """Return what has to be the same to the bit, and the metrics of the last epoch."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    parts = {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
    leaves, structure = torch.utils._pytree.tree_flatten(parts)
    values = [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return str(structure), values, logged(run)[-2:]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("whole")
    assert fit(*RUN, "--trainer.runs_dir", str(runs)) == 0
    return runs / "digits" / "v001"


@pytest.mark.parametrize(("batch", "workers"), [(3, 0), (4, 2), (5, 0), (7, 2)])
def test_killed_run_ends_in_the_same_bits(here: Path, whole_run: Path, batch: int, workers: int) -> None:
    # Batch 5 is the first of the second epoch.
    kill_at(batch, [*RUN, "--data.num_workers", str(2 - workers)])
    assert fit("--resume", "--data.num_workers", str(workers)) == 0
    assert end(here / "runs/digits/v001") == end(whole_run)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (8, ["--trainer.accumulate_grad_batches", "2", "--trainer.limit_train_batches", "5"]),
        (8, ["--trainer.val_check_interval", "2"]),
        (6, ["--trainer.val_check_interval", "3", "--trainer.check_val_every_n_epoch", "null"]),
        (8, ["--data", "tests.callbacks.test_exact_resume.SampleDigits", "--model.scheduler", "null"]),
    ],
    ids=["accumulation", "validation_within_the_epoch", "validation_across_epochs", "sample_by_sample"],
)
def test_other_kinds_of_run_end_in_the_same_bits(here: Path, batch: int, options: list[str]) -> None:
    args = [*RUN, *options, "--trust", "tests"]
    assert fit(*args, "--trainer.experiment", "whole") == 0
    kill_at(batch, args)
    assert fit("--ckpt_path", "runs/digits/v001", "--trust", "tests", "--data.num_workers", "1") == 0
    assert end(here / "runs/digits/v002") == end(here / "runs/whole/v001")


PROGRAM = """
import os, sys
from fulgurite.cli import main
from fulgurite.tasks import ClassificationTask
step, count = ClassificationTask.training_step, iter(range(1, 100))
def training_step(self, batch, batch_idx):
    loss = step(self, batch, batch_idx)
    if next(count) == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), 9)
    return loss
ClassificationTask.training_step = training_step
sys.exit(main())
"""


@pytest.mark.slow
def test_two_processes_end_in_the_same_bits(here: Path) -> None:
    Path("program.py").write_text(PROGRAM)
    two = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp"]

    def run(kill_at: int, *args: str) -> int:
        environment = os.environ | {"KILL_AT": str(kill_at), "PL_GLOBAL_SEED": "0"}
        return subprocess.run([sys.executable, "program.py", "fit", *args], env=environment, timeout=120, check=False).returncode

    assert run(0, *RUN, *two, "--trainer.experiment", "whole") == 0
    assert run(7, *RUN, *two) == -signal.SIGKILL
    assert run(0, "--ckpt_path", "runs/digits/v001") == 0
    assert end(here / "runs/digits/v002") == end(here / "runs/whole/v001")


class PlateauTask(ClassificationTask):
    """Lower the rate when validation does not get better, which it never does."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.network.parameters(), lr=0.0)
        schedule = ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/acc"}}


class Stopped(Exception):
    pass


class AurocTask(ClassificationTask):
    """Keep all predictions of an epoch in a metric, whose state is a list; stop in a batch."""

    stop_at = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.auroc = MulticlassAUROC(10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.auroc.update(self(batch[0]).detach(), batch[1])
        if self.trainer.global_step + 1 == self.stop_at:
            raise Stopped
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("train/auroc", self.auroc.compute())
        self.auroc.reset()


def train(task: type[ClassificationTask], stop_at: int = 0, ckpt_path: Path | None = None) -> tuple[Path, dict[str, float]]:
    data = DigitsDataModule()
    torch.manual_seed(0)
    model = task(partial(SmallCNN, width=4), partial(SGD, lr=0.1), spec=data.spec)
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=1,
        enable_progress_bar=False,
        logger=False,
        callbacks=Checkpoints(every_n_steps=1),
    )
    if isinstance(model, AurocTask):
        model.stop_at = stop_at
    with suppress(Stopped):
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    assert trainer.run_dir is not None
    return trainer.run_dir, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("stop_at", [3, 7])
def test_metrics_that_keep_all_predictions_are_restored(here: Path, stop_at: int) -> None:
    _, expected = train(AurocTask)
    stopped, _ = train(AurocTask, stop_at)
    _, found = train(AurocTask, ckpt_path=stopped / "checkpoints" / "last.ckpt")
    assert found == expected
    assert 0 < expected["train/auroc"] < 1


def test_resumed_epoch_keeps_its_plateau_step(here: Path) -> None:
    class Stopping(PlateauTask, AurocTask):
        pass

    run, _ = train(Stopping)
    stopped, _ = train(Stopping, 7)
    resumed, _ = train(Stopping, ckpt_path=stopped)
    plans = [torch.load(one / "checkpoints/last.ckpt", weights_only=True)["lr_schedulers"] for one in (run, resumed)]
    assert plans[0] == plans[1]
    assert plans[0][0]["last_epoch"] == 2


def test_each_process_gets_its_own_metrics_back() -> None:
    task: Any = nn.Module()
    task.auroc, task.device = MulticlassAUROC(10), torch.device("cpu")
    progress = SimpleNamespace(total=SimpleNamespace(processed=0), current=SimpleNamespace(processed=0, ready=0))
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=progress),
        _load_combined_loader_states=lambda: None,
        _combined_loader=SimpleNamespace(flattened=[]),
        epoch_progress=SimpleNamespace(current=SimpleNamespace(ready=1, processed=0)),
    )
    states = [{"auroc": {"updates": rank, "states": {"preds": [torch.tensor([rank])], "target": []}}} for rank in range(2)]
    for rank in range(2):
        callback, trainer = (
            ExactResume(),
            SimpleNamespace(
                accumulate_grad_batches=1,
                global_rank=rank,
                world_size=2,
                num_training_batches=1,
                datamodule=None,
                fit_loop=loop,
                _logger_connector=SimpleNamespace(_callback_metrics={}),
            ),
        )
        callback.on_load_checkpoint(cast(Any, trainer), task, {"metric_states": states})
        callback.on_train_start(cast(Any, trainer), task)
        assert (task.auroc.preds, task.auroc._update_count) == ([torch.tensor([rank])], rank)
