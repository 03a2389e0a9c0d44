"""Learning-rate schedules that are told the total number of optimizer steps.

A schedule is a class whose first two parameters are the optimizer and that total; the task calls it with the trainer's
numbers. PyTorch's ``CosineAnnealingLR`` and ``PolynomialLR`` already have this shape.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fulgurite.errors import UserError


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
        for name, share in (("warmup", warmup), ("final", final)):
            if not 0 <= share <= 1:
                raise UserError(f"{name} is {share}; it is a share, from 0 to 1")
        # Kept as attributes so that its saved state tells this plan from another.
        self.total_steps, self.warmup, self.final = total_steps, warmup, final
        warmup_steps = round(warmup * total_steps)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

        super().__init__(optimizer, factor)
