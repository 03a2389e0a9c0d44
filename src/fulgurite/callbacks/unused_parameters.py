"""Name the parameters that take no part in the loss, before several processes wait for their gradients for ever."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch.nn.parallel import DistributedDataParallel

from fulgurite.console import note
from fulgurite.errors import UserError, name_list


class UnusedParameters(Callback):
    """Look once, after the first backward pass that ends in a step, for parameters that got no gradient.

    DistributedDataParallel fails on them at the second step and does not name them; where they differ between the processes,
    those that have a gradient for each wait within the first backward pass. So each process judges for itself: the one that
    ends ends the others, and to ask them here would be to wait, too. Frozen parameters are no fault.
    """

    def __init__(self) -> None:
        self._looked = False

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leave a task alone that steps by itself: it may use a part of its parameters in each backward pass."""
        self._looked = not pl_module.automatic_optimization

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Look once.

        Raises:
            UserError: naming the parameters, where the strategy cannot do without a gradient for each
        """
        if self._looked or trainer.fit_loop._should_accumulate():  # the processes exchange gradients in a window's last pass only
            return
        self._looked = True
        unused = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad and parameter.grad is None]
        if not unused:
            return
        names = f"{len(unused)} parameters take no part in the loss: {name_list(unused)}"
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or ddp.static_graph:
            note("unused", names)
            return
        raise UserError(
            f"{names}\nDDP waits for the gradient of each: use them, freeze them (requires_grad_(False)) or take them out\n"
            "or, at the cost of a search in each step: --trainer.strategy ddp_find_unused_parameters_true"
        )
