"""Work round what Lightning 2.6 loses when a run stops in the middle of an epoch.

Each of these was reproduced with Lightning 2.6.6: an unfinished batch is counted as done, epoch metrics are not saved, the
loaders' position is lost if a schedule asks for the number of steps, ReduceLROnPlateau misses its step in the epoch that was
resumed, an epoch that max_steps or max_time cuts is counted as done, and with max_steps an empty epoch follows a done one.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from fulgurite.console import note
from fulgurite.data.loader import ResumableLoader
from fulgurite.errors import UserError, shown
from fulgurite.processes import of_each_process

_KEY, _LOGGED = "metric_states", "logged"
_DATA, _DATA_DIFFER = "data", "the data differ: other images, labels, classes, sizes or splits"
State = dict[str, Any]


class Done(NamedTuple):
    """What a run has behind it: whole epochs, optimizer steps in all, batches of the epoch it is in."""

    epochs: int
    steps: int
    batches: int


class ExactResume(Callback):
    """Make a resumed run end in the same bits as one that was never stopped, or refuse."""

    def __init__(self) -> None:
        self.allow_inexact = False
        self._metric_states: list[State] = []  # one for each process
        self._cut: list[State] | None = None  # the same, of an epoch that a limit of steps or time ends
        self._logged: State = {}  # what a plateau schedule looks at, at the epoch's end
        self._done: Done | None = None
        self._conditions: State = {}
        self._of_checkpoint: State = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget a checkpoint that was loaded earlier, such as for a test."""
        self._of_checkpoint, self._metric_states, self._cut, self._logged = {}, [], None, {}
        self._done = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the loaders ask the trainer for their position; restore the epoch's metrics.

        Raises:
            UserError: if the run cannot go on exactly and that is not allowed
        """
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        loop: Any = trainer.fit_loop
        loaders = [loader for loader in loop._combined_loader.flattened if isinstance(loader, ResumableLoader)]
        # A schedule that asks for the number of steps has the loaders made before Lightning knows their saved position.
        loop._load_combined_loader_states()
        self._conditions = _conditions(trainer)
        within_epoch = progress.current.ready > progress.current.processed
        if obstacles := self._obstacles(progress.current.processed if within_epoch else 0, trainer.accumulate_grad_batches):
            if not self.allow_inexact:
                what, remedy = "the run cannot go on exactly:", "to go on all the same: --resume_inexact"
                raise UserError("\n".join([what, *obstacles, remedy]))
            note("inexact", "; ".join([*obstacles, *(["the epoch begins anew"] if within_epoch else [])]))
            if within_epoch:
                progress.current.reset()
                self._metric_states = []
                for loader in loaders:
                    loader.begin_anew()
        if loop.epoch_progress.current.ready == loop.epoch_progress.current.processed:
            _begin_next_epoch(loop)
        # An unfinished batch is done again; without this the total is one too high after each restart.
        progress.total.ready = progress.total.started = progress.total.processed
        for loader in loaders:
            loader.batches_done = lambda: int(progress.current.processed)
        if self._metric_states:
            _restore_metrics(pl_module, self._metric_states[trainer.global_rank % len(self._metric_states)])
        logged = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._logged.items()}
        trainer._logger_connector._callback_metrics.update(logged)
        self._metric_states, self._logged = [], {}

    def _obstacles(self, done: int, accumulate: int) -> list[str]:
        found = [
            _DATA_DIFFER if name == _DATA else f"{name} is {now}; the checkpoint has {shown(self._of_checkpoint[name])}"
            for name, now in self._conditions.items()
            if self._of_checkpoint.get(name, now) != now
        ]
        if not found and done % accumulate:
            found.append(
                f"the checkpoint was taken after {done} batches of an epoch, inside a window of accumulate_grad_batches "
                f"{accumulate}, and does not hold the gradients summed up by then; last.ckpt never is"
            )
        return found

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Lower the flag that makes Lightning skip the plateau step of a resumed epoch."""
        trainer.fit_loop._restarting = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the metrics of an epoch that is not at its end; the task is about to begin them anew."""
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._cut = _states_of_metrics(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the epoch's metrics when the checkpoint is taken in the middle of an epoch."""
        loop: Any = trainer.fit_loop.epoch_loop
        progress, saved = loop.batch_progress.current, checkpoint["loops"]["fit_loop"]
        checkpoint[_LOGGED] = {name: value.item() for name, value in trainer.callback_metrics.items()}
        if self._cut is not None:
            checkpoint[_KEY] = self._cut
            _count_as_unfinished(saved)
        elif 0 < progress.processed < trainer.num_training_batches:
            checkpoint[_KEY] = _states_of_metrics(pl_module)
        next_batch = progress.ready + (self._cut is not None)
        if next_batch > progress.processed and _steps_after(next_batch, loop, trainer):
            # Taken before the batch counts; on restart Lightning adds one to this number all the same.
            saved["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the epoch's metrics until the metrics are on their device."""
        self._metric_states, self._logged = checkpoint.get(_KEY, []), checkpoint.get(_LOGGED, {})
        if "loops" not in checkpoint:  # weights alone, which Lightning refuses
            return
        loops = checkpoint["loops"]["fit_loop"]
        batches = loops["epoch_loop.batch_progress"]["current"]
        within_epoch = batches["processed"] if batches["ready"] > batches["processed"] else 0
        self._done = Done(loops["epoch_progress"]["current"]["completed"], checkpoint["global_step"], within_epoch)

    def total_steps(self, trainer: Any, planned: float) -> float:
        """Return the optimizer steps of a whole run, also if its epochs had another length before it went on.

        Args:
            trainer: of the run
            planned: the steps if they always had the present one
        """
        if self._done is None or planned == math.inf or trainer.max_epochs is None or trainer.max_steps > 0:
            return planned
        accumulate = trainer.accumulate_grad_batches
        self._conditions = _conditions(trainer)
        begins_anew = self._obstacles(self._done.batches, accumulate)
        counted_twice = 0 if begins_anew else math.ceil(self._done.batches / accumulate)
        per_epoch = math.ceil(trainer.num_training_batches / accumulate)
        return int(self._done.steps - counted_twice + max(trainer.max_epochs - self._done.epochs, 0) * per_epoch)

    def state_dict(self) -> State:
        """Return what a run that goes on must have in common with this one."""
        return {"conditions": self._conditions}

    def load_state_dict(self, state_dict: State) -> None:
        """Remember what the checkpoint's run had."""
        self._of_checkpoint = state_dict["conditions"]


def _begin_next_epoch(loop: Any) -> None:
    # Not by the fit loop's own setter, by which there always is an epoch to restart where max_steps is set.
    loop._restarting = False
    loop.epoch_loop.restarting = False


def _conditions(trainer: Any) -> State:
    """Return what decides which samples make up which step."""
    loaders: Any = trainer.fit_loop._combined_loader
    fingerprint = getattr(trainer.datamodule, "fingerprint", None)
    return {
        "batch_size": ", ".join(str(loader.batch_size) for loader in loaders.flattened),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "the number of processes": trainer.world_size,
        "the number of batches in an epoch": trainer.num_training_batches,
        _DATA: fingerprint() if fingerprint else "",
        "the seed": os.environ.get("PL_GLOBAL_SEED", "0"),  # as the loaders have it
    }


def _count_as_unfinished(saved: State) -> None:
    """Change the saved progress of an epoch that was cut to that of one whose next batch has just started."""
    for count in ("total", "current"):
        for stage in ("processed", "completed"):
            saved["epoch_progress"][count][stage] -= 1
        saved["epoch_loop.batch_progress"][count]["ready"] += 1


def _steps_after(batch: int, loop: Any, trainer: Any) -> bool:
    # As Lightning asks of the batch that is in progress.
    ends_window = batch % trainer.accumulate_grad_batches == 0
    return bool(ends_window or batch == trainer.num_training_batches or loop.batch_progress.is_last_batch)


def _states_of_metrics(module: LightningModule) -> list[State]:
    """Return the states of all metrics of each process."""
    return of_each_process({name: _metric_state(metric) for name, metric in module.named_modules() if isinstance(metric, Metric)})


def _metric_state(metric: Any) -> State:
    # A state is a tensor, or a list of them in metrics that keep all predictions.
    states = {
        name: [item.cpu() for item in value] if isinstance(value, list) else value.detach().clone().cpu()
        for name, value in metric.metric_state.items()
    }
    return {"updates": metric._update_count, "states": states}


def _restore_metrics(pl_module: LightningModule, saved: State) -> None:
    def place(value: Tensor) -> Tensor:
        return value.to(pl_module.device)

    for name, module in pl_module.named_modules():
        if isinstance(module, Metric) and name in saved:
            metric: Any = module
            metric._update_count, metric._computed = saved[name]["updates"], None
            for state, value in saved[name]["states"].items():
                setattr(metric, state, [place(item) for item in value] if isinstance(value, list) else place(value))
