"""Show how far a run is: a bar that moves in a terminal, and a line for each epoch anywhere."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from fulgurite.callbacks.step_log import StepLog
from fulgurite.console import note

_EVERY = 0.5  # seconds between two pictures of the bar, each of which takes some milliseconds and waits for the device


class Progress(ProgressBar):
    """Draw a bar twice a second, not at each step, and only on a terminal; print what an epoch came to once it is over.

    What is shown is what the task logs with ``prog_bar=True``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Bar | None = None
        self._drawn = 0.0  # by the monotonic clock
        self._epoch: int | None = None  # that has no line yet
        self._begun = 0.0

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Show it again."""
        self._enabled = True

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Tell of the epoch before, and begin with this one."""
        self._tell_epoch(trainer)
        self._epoch, self._begun = trainer.current_epoch, time.monotonic()
        self._begin(trainer, f"epoch {_number(trainer)}", self.total_train_batches)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin with a validation."""
        within = f"epoch {_number(trainer)}, " if trainer.state.fn == "fit" else ""
        self._begin(trainer, f"{within}validation", sum(trainer.num_val_batches))

    def on_test_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin with a test."""
        self._begin(trainer, "test", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin with a prediction."""
        self._begin(trainer, "predict", sum(trainer.num_predict_batches))

    def on_train_batch_end(  # what evaluations call is given the loader's index, too
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Move the bar if it is time."""
        if self._bar is not None and time.monotonic() - self._drawn > _EVERY:
            self._draw(trainer, batch_idx + 1)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Go on with the epoch's bar."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._begin(trainer, f"epoch {_number(trainer)}", self.total_train_batches, done)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Tell of the last epoch."""
        self._end()
        self._tell_epoch(trainer)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Take the bar away."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the bar away, so that what is said next is not written over."""
        self._end()

    def _begin(self, trainer: Any, what: str, batches: float, done: int = 0) -> None:
        console = Console()
        if not self._enabled or not console.is_terminal or console.is_jupyter:
            return
        if self._bar is None:
            what_column = TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=22))
            metrics = TextColumn("{task.fields[metrics]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
            columns = (what_column, BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn(), metrics)
            self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True, expand=True)
            self._bar.add_task(what, total=None, metrics="")
            self._bar.start()
        self._bar.reset(self._bar.task_ids[0], total=batches if batches < float("inf") else None, description=what)
        self._draw(trainer, done)

    def _draw(self, trainer: Any, done: int) -> None:
        assert self._bar is not None
        self._bar.update(self._bar.task_ids[0], completed=done, metrics=_metrics(trainer), refresh=True)
        self._drawn = time.monotonic()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _tell_epoch(self, trainer: Any) -> None:
        if self._enabled and self._epoch is not None:
            note("epoch", f"{_number(trainer, self._epoch)}  {_metrics(trainer)}  {time.monotonic() - self._begun:.1f} s")
        self._epoch = None


def _number(trainer: Any, epoch: int | None = None) -> str:
    """Return the epoch's number, counted from 1, of how many."""
    number = (trainer.current_epoch if epoch is None else epoch) + 1
    return f"{number}/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else str(number)


def _metrics(trainer: Any) -> str:
    shown = [f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items()]
    latest = next((one.latest for one in trainer.callbacks if isinstance(one, StepLog)), {}) if trainer.training else {}
    if "train/loss_step" in latest:
        shown.append(f"train/loss_step {latest['train/loss_step']:.4g}")
    if "train/samples_per_second" in latest:
        shown.append(f"{latest['train/samples_per_second']:,.0f} samples/s")
    return "  ".join(shown)
