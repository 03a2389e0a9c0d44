"""Keep weights that are no longer numbers out of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fulgurite.errors import UserError


def not_finite(module: nn.Module) -> str | None:
    """Name the first parameter with NaN or infinity in it; the same on all processes of a job."""
    return next((name for name, weight in module.named_parameters() if not weight.detach().isfinite().all()), None)


def require_finite(trainer: Any, last: Path) -> None:
    """Refuse to save weights that are no numbers over those that still are.

    Raises:
        UserError: naming the parameter, the step, the epoch, and the last good checkpoint if there is one
    """
    name = not_finite(trainer.lightning_module)
    if name is None:
        return
    good = f"\nthe last good state is in {last}" if last.is_file() else ""
    raise UserError(
        f"{name} has NaN or infinity at step {trainer.global_step:,}, epoch {trainer.current_epoch} (counted from 0)\n"
        f"try a smaller rate or --trainer.gradient_clip_val 1{good}"
    )
