"""The optimizer and its schedule for the steps that a run will have, told before the run begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.console import note
from fulgurite.errors import UserError
from fulgurite.tasks.metrics import Direction
from fulgurite.tasks.optimizers import Factory, make_optimizer
from fulgurite.tasks.rate_scaling import GlobalBatch, RateScaling
from fulgurite.tasks.schedules import Plateau, make_schedule


def plan_training(
    trainer: Any,
    network: nn.Module,
    optimizer: Factory,
    scheduler: Callable[[Optimizer, int], LRScheduler] | None,
    *,
    scaling: RateScaling,
    layer_decay: float,
    decay_all: bool,
    monitor: str,
    direction: Direction,
) -> OptimizerLRScheduler:
    """Make optimizer and schedule as Lightning takes them, and tell what the training will be.

    Args:
        trainer: of the run; the loaders are made, as their length counts
        network: what is optimized
        optimizer: class, or partial of one, that takes the parameters
        scheduler: class whose first parameters are the optimizer and the number of its steps; None keeps the rate
        scaling: of the rate to the samples of a step
        layer_decay: what a layer's rate is multiplied by for each layer that follows it
        decay_all: whether weight decay is for norms, biases and embeddings, too
        monitor: what a plateau schedule follows
        direction: in which that gets better

    Raises:
        UserError: if a schedule or a scaled rate needs a number that nobody knows
    """
    total = total_steps(trainer)
    batch = GlobalBatch.of(trainer)
    made = make_optimizer(optimizer, network, trainer, scale=scaling.factor(batch), layer_decay=layer_decay, decay_all=decay_all)
    rate = max(float(group.get("lr", 0.0)) for group in made.param_groups)
    config: dict[str, Any] = {"optimizer": made}
    if scheduler is not None:
        config["lr_scheduler"] = _schedule(scheduler, made, trainer, total, monitor, direction)
    steps = "no end set" if total is None else f"{total:,} steps"
    note("plan", f"{batch}, {steps}; {scaling.describe(rate, batch)}{_course(config)}")
    return cast(OptimizerLRScheduler, config)


def total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of the whole run, or None where it has no end that is known beforehand."""
    total = trainer.estimated_stepping_batches
    return None if total in (math.inf, -1) else int(total)  # Lightning's -1: a stream of unknown length


def _schedule(
    scheduler: Callable[[Optimizer, int], LRScheduler],
    optimizer: Optimizer,
    trainer: Any,
    total: int | None,
    monitor: str,
    direction: Direction,
) -> dict[str, Any]:
    schedule = make_schedule(scheduler, optimizer, total or 1)
    if isinstance(schedule, Plateau):
        return schedule.lightning_config(trainer, monitor, direction)
    if total is None:
        timed = "\ntrainer.max_time alone does not tell how many steps there will be" if trainer.init_args.get("max_time") else ""
        raise UserError(f"a schedule needs an end: set trainer.max_epochs or trainer.max_steps, or take the scheduler out{timed}")
    return {"scheduler": schedule, "interval": "step"}


def _course(config: dict[str, Any]) -> str:
    if "lr_scheduler" not in config:
        return ""
    schedule = config["lr_scheduler"]["scheduler"]
    rising = getattr(schedule, "warmup_steps", 0)
    return f"{f', highest at step {rising + 1:,}' if rising else ''}: {type(schedule).__name__}"
