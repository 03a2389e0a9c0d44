"""Give the last window of gradient accumulation in an epoch the weight of its batches."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.optim import Optimizer


class ShortWindow(Callback):
    """Make the gradient of a window that the epoch's end cuts short the mean over its batches.

    Lightning 2.6.6 divides each loss by ``accumulate_grad_batches``, also where fewer batches are left: of 5 batches and a
    window of 4, the fifth would count a quarter. Called before gradients are clipped, after float16's scale is taken off.
    """

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Scale the gradients of a short window."""
        wanted = trainer.accumulate_grad_batches
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready % wanted
        if batches:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # none where every batch of the window was left out
                torch._foreach_mul_(gradients, wanted / batches)
