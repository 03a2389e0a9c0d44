"""Memory that workers see without having it."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor


def shared(tensor: Tensor) -> Tensor:
    """Copy a tensor into memory that forked processes map but do not inherit.

    Ordinary memory is mapped whole into each forked worker, and so counts for each in part; of this a worker has only the
    pages that it has read. A spawned worker gets it through PyTorch's shared memory, as any tensor.
    """
    if not tensor.numel():
        return tensor
    memory = mmap.mmap(-1, tensor.nbytes)  # anonymous: not bounded by /dev/shm, gone with the last process
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def release_free_memory() -> None:
    """Give what was freed back to the system; glibc keeps up to 64 MiB, which each forked worker would map."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
