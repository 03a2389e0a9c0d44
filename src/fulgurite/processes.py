"""What the processes of a job tell each other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def of_each_process(mine: T) -> list[T]:
    """Return what each process has, by rank; all must call it, and a job of one need not be distributed."""
    if not _is_job():
        return [mine]
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


class Poll:
    """Let all processes learn in the same step what one of them wants, without waiting for each other.

    Each call starts an exchange between the CPUs and returns the outcome of the one before, which is there by now: the
    gradients of the step between have been exchanged, too. A job of one process gets its own answer at once.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if _is_job() and dist.get_world_size() > 1 else None
        self._outcome = torch.zeros(1, dtype=torch.int64)
        self._exchange: Any = None

    def ask(self, mine: int) -> int:
        """Return the largest number that any process gave in its call before this one.

        Args:
            mine: 0 or more; give it in each call until it is heard
        """
        if self._group is None:
            return mine
        if self._exchange is not None:
            self._exchange.wait()
        largest = int(self._outcome)
        self._outcome = torch.tensor([mine])
        self._exchange = dist.all_reduce(self._outcome, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return largest


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized()
