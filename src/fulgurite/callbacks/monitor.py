"""The metric by which a run's states are compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule

from fulgurite.errors import UserError, did_you_mean, shown
from fulgurite.tasks.metrics import Direction


def settle_monitor(monitor: str | None, mode: Direction | None, task: LightningModule) -> tuple[str, Direction]:
    """Return the metric and its direction: as given, else as the task declares them.

    Raises:
        UserError: if they are not known, or the task declares that it does not log the metric
    """
    declared: Any = task
    directions: dict[str, Direction] = getattr(declared, "directions", {})
    monitor = monitor or getattr(declared, "monitor", None)
    if monitor is None:
        raise UserError(f"{type(task).__name__} declares no metric to monitor: set checkpoint.monitor and checkpoint.mode")
    if directions:
        require_logged(monitor, directions, task)
    mode = mode or directions.get(monitor)
    if mode is None:
        raise UserError(f"the direction of '{monitor}' is not known: set checkpoint.mode to min or max")
    return monitor, mode


def require_logged(monitor: str, names: Iterable[str], task: LightningModule) -> None:
    """Refuse a metric that is not among those that a task logs.

    Raises:
        UserError: if it is not
    """
    names = list(names)
    if monitor not in names:
        raise UserError(
            f"checkpoint.monitor is '{shown(monitor)}', which {type(task).__name__} does not log in validation"
            f"{did_you_mean(monitor, names)}\nallowed: {', '.join(names) or 'nothing, as it logs nothing'}"
        )
