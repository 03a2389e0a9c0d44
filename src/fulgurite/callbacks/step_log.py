"""Log what training does now: the loss, the rate, the throughput."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fulgurite.step_cost import look_up_hooks_once


class StepLog(Callback):
    """Log each ``log_every_n_steps`` optimizer steps, in one row, whatever the task.

    ``train/loss_step`` is the loss of the last batch, on the first process; ``lr`` the highest rate of that step;
    ``train/samples_per_second`` what all processes have trained on since the last row, validation and the first batch of the
    fit, which may compile, left out. They go to the loggers at once: ``self.log`` of three values costs 2 ms.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        """The last row."""
        self._due = False
        self._rate = 0.0
        self._samples = 0  # since the last row
        self._seconds = 0.0  # spent on them, up to the last pause
        self._since = 0.0  # by the performance counter
        self._started = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Make the steps that are measured cheaper."""
        look_up_hooks_once(trainer)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin anew."""
        self._samples, self._seconds, self._started = 0, 0.0, False

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look whether a row is due, and note the rate: when the batch ends the schedule has moved on."""
        every = trainer.log_every_n_steps
        self._due = every > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0
        if self._due:
            self._rate = max(float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the row once all batches of an accumulated step are done."""
        if self._started:
            self._samples += _size(batch)
        else:
            self._started, self._since = True, time.perf_counter()
        if not self._due or trainer.fit_loop._should_accumulate():
            return
        row = {"lr": self._rate}
        if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
            if pl_module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
            row["train/loss_step"] = loss.item()
            # Not by trainer.callback_metrics, which goes through all that was ever logged.
            trainer._logger_connector._callback_metrics["train/loss_step"] = loss
        now = time.perf_counter()
        if self._samples:
            seconds = self._seconds + now - self._since
            row["train/samples_per_second"] = self._samples * trainer.world_size / seconds
            self._samples, self._seconds, self._since = 0, 0.0, now
        self.latest = row
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch} | row, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._seconds += time.perf_counter() - self._since if self._started else 0.0

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Let the clock go on."""
        self._since = time.perf_counter()


def _size(batch: Any) -> int:
    """Return the samples of a batch: the length of its first tensor."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.ndim), 1)
