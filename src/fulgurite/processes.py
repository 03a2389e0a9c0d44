"""What the processes of a job tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fulgurite.errors import UserError

T = TypeVar("T")


def of_each_process(mine: T) -> list[T]:
    """Return what each process has, by rank; all must call it, and a job of one need not be distributed."""
    if not _is_job():
        return [mine]
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def of_first(get: Callable[[], T], *, needed: bool = True) -> T:
    """Return what the first process gets, on all of them; all must call it, and a job of one need not be distributed.

    Args:
        get: called on the first process
        needed: False where each process can get it by itself, which it then does

    Raises:
        UserError: on all, if it is raised on the first
    """
    if not (needed and _is_job()):
        return get()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = get()
        except UserError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise UserError(box[1])
    result: T = box[0]
    return result


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
