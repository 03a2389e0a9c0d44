"""Watch the loss scale of float16: count the steps that it skips, and stop when nothing is learnt any more."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fulgurite.console import note
from fulgurite.errors import UserError

# fairseq gives up at 1e-4, DeepSpeed and Megatron at 1. A scale of 1 is what a float32 run has.
_LEAST_SCALE = 2.0**-10


class LossScale(Callback):
    """Log ``train/skipped_steps`` and ``train/loss_scale`` each ``log_every_n_steps`` optimizer steps.

    The loss is multiplied by a scale so that small gradients are not zero in float16. Where one overflows, PyTorch leaves
    out the optimizer's step and halves the scale (https://docs.pytorch.org/docs/stable/amp.html). Such a step counts as one
    all the same: in ``global_step``, for the schedule, and for the moving average.
    """

    def __init__(self) -> None:
        self._skipped = 0  # up to the last look
        self._since = self._scale = torch.zeros(())  # skipped since, and the scale, on the device: to look means to wait for it

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin anew."""
        self._skipped, self._since = 0, torch.zeros(())
        # The first scale is often too large, and then PyTorch finds a schedule that steps and an optimizer that has not.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the scale to begin with, which a resumed run has from its checkpoint."""
        self._since = torch.zeros((), device=pl_module.device)
        self._scale = self._scale_now(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step whose scale is less than before; log when it is time."""
        before, self._scale = self._scale, self._scale_now(trainer)
        self._since += self._scale < before
        step, every = trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.log_every_n_steps
        if every > 0 and (step + 1) % every == 0 and not trainer.fit_loop._should_accumulate():
            self._look()
            row = {"train/skipped_steps": float(self._skipped), "train/loss_scale": self._scale.item()}
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in row.items()})
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": trainer.current_epoch} | row, step=step)
            self._require_scale(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Look at the scale, also where an epoch is shorter than the logging interval."""
        self._look()
        self._require_scale(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say how many steps were skipped."""
        steps = f"{self._skipped:,} of {trainer.global_step:,} steps skipped, as float16 overflowed"
        note("loss scale", f"{self._scale.item():g} at the end; {steps}")

    def state_dict(self) -> dict[str, Any]:
        """Return the count; the scale itself is in the precision plugin's state."""
        self._look()
        return {"skipped_steps": self._skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._skipped = state_dict["skipped_steps"]

    def _scale_now(self, trainer: Any) -> Tensor:
        # Not get_scale(), which waits for the device.
        scaled: Tensor = trainer.precision_plugin.scaler.scale(torch.ones((), device=trainer.strategy.root_device))
        return scaled

    def _look(self) -> None:
        self._skipped += int(self._since.item())
        self._since.zero_()

    def _require_scale(self, trainer: Any) -> None:
        if (scale := self._scale.item()) < _LEAST_SCALE:
            raise UserError(
                f"nothing is learnt in float16: its loss scale has fallen to {scale:.3g} by step {trainer.global_step:,}, with "
                f"{self._skipped:,} steps skipped: gradients are NaN, or too large at any scale\n"
                "try --trainer.precision bf16-mixed, a smaller rate, or --trainer.precision 32-true to see where the NaN is from"
            )
