"""What the processes of a job tell each other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def of_each_process(mine: T) -> list[T]:
    """Return what each process has, by rank; all must call it, and a job of one need not be distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs
