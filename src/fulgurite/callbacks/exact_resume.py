"""Work round what Lightning 2.6 loses when a run stops in the middle of an epoch.

Each of these was reproduced with Lightning 2.6.6: an unfinished batch is counted as done, epoch metrics are not saved, the
loaders' position is lost if a schedule asks for the number of steps, and ReduceLROnPlateau misses its step in the epoch
that was resumed.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from fulgurite.data.loader import ResumableLoader
from fulgurite.errors import UserError
from fulgurite.processes import of_each_process

_KEY = "metric_states"
State = dict[str, Any]


class ExactResume(Callback):
    """Make a resumed run end in the same bits as one that was never stopped."""

    def __init__(self) -> None:
        self._metric_states: list[State] = []  # one for each process

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the loaders ask the trainer for their position; restore the epoch's metrics.

        Raises:
            UserError: if the checkpoint was taken inside what is now one window of gradient accumulation
        """
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        within_epoch = progress.current.ready > done
        if within_epoch and done % trainer.accumulate_grad_batches:
            raise UserError(
                f"the checkpoint was taken after {done} batches of an epoch, inside a window of accumulate_grad_batches "
                f"{trainer.accumulate_grad_batches}, and does not hold the gradients summed up by then\n"
                f"continue from another one, such as last.ckpt, or with a number of which {done} is a multiple"
            )
        # An unfinished batch is done again; without this the total is one too high after each restart.
        progress.total.ready = progress.total.started = progress.total.processed
        # A schedule that asks for the number of steps has the loaders made before Lightning knows their saved position.
        trainer.fit_loop._load_combined_loader_states()
        loaders: Any = trainer.fit_loop._combined_loader
        for loader in loaders.flattened:
            if isinstance(loader, ResumableLoader):
                loader.batches_done = lambda: int(progress.current.processed)
        if self._metric_states:
            _restore_metrics(pl_module, self._metric_states[trainer.global_rank % len(self._metric_states)])
        self._metric_states = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Lower the flag that makes Lightning skip the plateau step of a resumed epoch."""
        trainer.fit_loop._restarting = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the epoch's metrics when the checkpoint is taken in the middle of an epoch."""
        loop: Any = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress.current
        if 0 < progress.processed < trainer.num_training_batches:
            mine = {name: _metric_state(metric) for name, metric in pl_module.named_modules() if isinstance(metric, Metric)}
            checkpoint[_KEY] = of_each_process(mine)
        if progress.ready == progress.started + 1 and not loop._should_accumulate():
            # Taken when a batch starts, before it counts; on restart Lightning adds one to this number all the same.
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the epoch's metrics until the metrics are on their device."""
        self._metric_states = checkpoint.get(_KEY, [])


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
