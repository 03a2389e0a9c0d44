"""Learning-rate schedules that are told the total number of optimizer steps.

A schedule is a class whose first two parameters are the optimizer and that total; the task calls it with the trainer's
numbers. PyTorch's ``CosineAnnealingLR`` and ``PolynomialLR`` already have this shape.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from fulgurite.errors import UserError
from fulgurite.tasks.metrics import Direction

# What PyTorch's schedules call the number of steps in the whole run.
_TOTALS = ("total_steps", "T_max", "total_iters")


def make_schedule(schedule: Callable[[Optimizer, int], LRScheduler], optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Make a schedule of an optimizer's steps.

    Args:
        schedule: class, or partial of one, whose first parameters are the optimizer and the number of steps
        optimizer: whose rate is scheduled
        total_steps: of the optimizer in the whole run

    Raises:
        UserError: if it is one of PyTorch's that takes something else there, and would take the number for that
    """
    advice = "take one of fulgurite.tasks.schedules: WarmupCosine, StepDecay, OneCycle, Plateau; or a class of your own around it"
    try:
        made = schedule(optimizer, total_steps)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        text = f"the scheduler cannot be made of the optimizer and {total_steps:,} steps: {error}"
        raise UserError(f"{text}\n{advice}") from error
    second = list(inspect.signature(type(made)).parameters)[1:2]
    if type(made).__module__.startswith("torch.optim") and not set(second) & set(_TOTALS):
        raise UserError(
            f"the scheduler {type(made).__name__} takes {second[0]} where a schedule is given the number of steps\n{advice}"
        )
    return made


class WarmupCosine(LambdaLR):
    """Rise linearly to the optimizer's rate, then fall to a share of it along half a cosine (arXiv:1608.03983).

    Args:
        optimizer: whose rate is scheduled
        total_steps: of the optimizer in the whole run
        warmup: share of the steps spent rising
        final: share of the rate left at the end

    Raises:
        UserError: if a share is outside 0..1
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, warmup: float = 0.05, final: float = 0.0) -> None:
        _require_shares(warmup=warmup, final=final)
        # Kept as attributes so that its saved state tells this plan from another.
        self.total_steps, self.warmup, self.final = total_steps, warmup, final
        self.warmup_steps = warmup_steps = round(warmup * total_steps)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return _rise(step, warmup_steps)
            progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

        super().__init__(optimizer, factor)


class StepDecay(LambdaLR):
    """Rise linearly to the optimizer's rate, keep it, and multiply it by a factor at milestones.

    Args:
        optimizer: whose rate is scheduled
        total_steps: of the optimizer in the whole run
        milestones: shares of the run after which the rate is lowered; a single number lowers it after every such share
        factor: what the rate is multiplied by
        warmup: share of the steps spent rising

    Raises:
        UserError: if a number makes no sense
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        milestones: float | list[float] = 1 / 3,
        factor: float = 0.1,
        warmup: float = 0.0,
    ) -> None:
        _require_shares(warmup=warmup)
        if not 0 < factor < 1:
            raise UserError(f"factor is {factor}; the rate is multiplied by it: above 0 and below 1")
        shares = milestones if isinstance(milestones, list) else _multiples(milestones)
        if not shares or any(not 0 < share < 1 for share in shares) or shares != sorted(set(shares)):
            raise UserError(f"milestones is {milestones}; they are rising shares of the run, above 0 and below 1")
        self.total_steps, self.milestones, self.factor, self.warmup = total_steps, milestones, factor, warmup
        self.warmup_steps = warmup_steps = round(warmup * total_steps)
        steps = [round(share * total_steps) for share in shares]

        def lowered(step: int) -> float:
            return float(_rise(step, warmup_steps) * factor ** bisect_right(steps, step))

        super().__init__(optimizer, lowered)


def _rise(step: int, warmup_steps: int) -> float:
    # Neither the first step is wasted on a rate of 0, nor the last on one that is already the highest.
    return min((step + 1) / (warmup_steps + 1), 1.0)


def _multiples(share: float) -> list[float]:
    """Return the multiples of a share that lie below 1; a tenth too many from rounding is none."""
    return [share * number for number in range(1, math.ceil(1 / share - 1e-9))] if 0 < share < 1 else []


def _require_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise UserError(f"{name} is {share}; it is a share, from 0 to 1")


class OneCycle(OneCycleLR):
    """Rise to the optimizer's rate and fall far below where it began, with the momentum the other way (arXiv:1708.07120).

    Args:
        optimizer: whose rate is the highest of the cycle
        total_steps: of the optimizer in the whole run
        warmup: share of the steps spent rising
        initial: share of the rate to begin with
        final: share of the rate left at the end
        momentum: lowest and highest momentum of the cycle, or the first of Adam's betas; None leaves it alone

    Raises:
        UserError: if a share is outside 0..1
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup: float = 0.3,
        initial: float = 0.04,
        final: float = 4e-6,
        momentum: tuple[float, float] | None = (0.85, 0.95),
    ) -> None:
        for name, share in (("warmup", warmup), ("initial", initial), ("final", final)):
            if not 0 < share < 1:
                raise UserError(f"{name} is {share}; it is a share, above 0 and below 1")
        lowest, highest = momentum or (0.0, 0.0)
        self.warmup_steps = max(round(warmup * (total_steps + 1)) - 1, 0)
        super().__init__(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            max(total_steps, 1) + 1,  # PyTorch counts the rate before the first step, too, and stops at the last
            pct_start=warmup,
            div_factor=1 / initial,
            final_div_factor=initial / final,
            cycle_momentum=momentum is not None,
            base_momentum=lowest,
            max_momentum=highest,
        )


class Plateau(ReduceLROnPlateau):
    """Lower the rate when the task's monitored metric has stopped getting better.

    It looks once in each epoch that has a validation, at the last one's value, after that epoch.

    Args:
        optimizer: whose rate is scheduled
        total_steps: of the optimizer in the whole run; not used, so the run needs no end
        factor: what the rate is multiplied by
        patience: looks without a better value that are waited for; the next one lowers the rate
        threshold: share of the best value by which another must be better to count
        cooldown: looks after a lowering that do not count
        min_lr: where the highest rate stays; parameter groups keep their ratio

    Raises:
        UserError: if a number makes no sense
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise UserError(f"factor is {factor}; the rate is multiplied by it: above 0 and below 1")
        for name, value in (("patience", patience), ("threshold", threshold), ("cooldown", cooldown), ("min_lr", min_lr)):
            if not value >= 0:
                raise UserError(f"{name} is {value}; it must be at least 0")
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        least = [min_lr * rate / max(rates) if max(rates) > 0 else min_lr for rate in rates]  # groups keep their ratio
        super().__init__(
            optimizer,
            factor=factor,
            patience=patience,
            threshold=threshold,
            cooldown=cooldown,
            min_lr=least,
            eps=0.0,  # the least change that PyTorch cares to make; a layer's rate may well be below its default of 1e-8
        )

    def lightning_config(self, trainer: Any, monitor: str, direction: Direction) -> dict[str, Any]:
        """Begin to follow a metric, and return how Lightning is to step this schedule.

        Args:
            trainer: of the run
            monitor: a metric that validation logs
            direction: in which it gets better

        Raises:
            UserError: if the trainer does not validate, or not at the pace of epochs
        """
        if not trainer.enable_validation:
            raise UserError(
                f"a plateau schedule follows {monitor}, and this run has no validation: "
                "give it a validation split and trainer.limit_val_batches above 0, or another scheduler"
            )
        every = trainer.check_val_every_n_epoch
        if every is None or trainer._val_check_time_interval is not None:
            raise UserError(
                "a plateau schedule looks at epochs, and this run validates without regard to them: "
                "set trainer.check_val_every_n_epoch, and trainer.val_check_interval to batches or a share of the epoch"
            )
        self.load_state_dict({"mode": direction, "best": -math.inf if direction == "max" else math.inf})
        # Lightning would step at each epoch, with the value of an earlier one where there was no validation. Not strict:
        # in an epoch that is resumed after its last validation the value may be unknown, which is a warning and no crash.
        return {"scheduler": self, "interval": "epoch", "frequency": every, "monitor": monitor, "strict": False}
