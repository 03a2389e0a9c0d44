"""Measure how fast a data module's training loader is, and leave nothing behind: no process, no changed setting."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fulgurite.data.base import ImageDataModule
from fulgurite.data.loader import ResumableLoader


@dataclass(frozen=True)
class Speed:
    """What one setting came to.

    Args:
        num_workers: processes that load
        prefetch_factor: batches each of them prepares ahead; None without workers
        rate: samples per second, once the workers run
        first_batch: seconds from the start of the workers to the first batch
        batch_bytes: of the largest batch
    """

    num_workers: int
    prefetch_factor: int | None
    rate: float
    first_batch: float
    batch_bytes: int = 0

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' * (self.num_workers != 1)}"
        return workers if self.prefetch_factor is None else f"{workers}, prefetch_factor {self.prefetch_factor}"


@contextmanager
def settings_kept(datamodule: ImageDataModule) -> Iterator[None]:
    """Give a module back its own settings of the loader at the end, however it comes."""
    kept = {name: getattr(datamodule, name) for name in ("num_workers", "prefetch_factor", "pin_memory")}
    try:
        if datamodule.pin_memory is None and datamodule.trainer is None:
            datamodule.pin_memory = torch.cuda.is_available()  # as a trainer would have it
        yield
    finally:
        for name, value in kept.items():
            setattr(datamodule, name, value)


def measure_speed(
    datamodule: ImageDataModule, num_workers: int, prefetch_factor: int | None, seconds: float, *, epoch: int = 0
) -> Speed:
    """Load training batches for so many seconds, over several epochs if they are short.

    Args:
        datamodule: its settings are changed
        num_workers: processes that load
        prefetch_factor: batches each of them prepares ahead; None without workers
        seconds: how long to measure, from when the workers run
        epoch: the first one, which decides the order
    """
    datamodule.num_workers = num_workers
    datamodule.prefetch_factor = prefetch_factor or datamodule.prefetch_factor
    with redirect_stdout(StringIO()):  # what the module says of a loader is not worth repeating for each setting
        loader = datamodule.train_dataloader()
    with _workers_ended(loader):
        # Workers that started together deliver together: only whole rounds of them are counted, and not the first one.
        a_round = max(num_workers, 1)
        samples = batch_bytes = 0
        start = began = time.perf_counter()
        first_batch = 0.0
        for number, batch in enumerate(_epochs(loader, epoch), 1):
            now = time.perf_counter()
            batch_bytes = max(batch_bytes, _num_bytes(batch))
            first_batch = first_batch or now - began
            if number <= a_round:
                start = now
                continue
            samples += len(batch[0])
            if number % a_round == 0 and now - start >= seconds:
                break
    return Speed(num_workers, prefetch_factor, samples / (now - start), first_batch, batch_bytes)


def _epochs(loader: ResumableLoader, first: int) -> Iterator[Any]:
    for epoch in count(first):
        loader.order.set_epoch(epoch)
        yield from loader


@contextmanager
def _workers_ended(loader: ResumableLoader) -> Iterator[None]:
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        iterator: Any = loader._iterator  # Lightning ends them so too: PyTorch has no public way
        if iterator is not None:
            iterator._shutdown_workers()
            loader._iterator = None
        for child in set(multiprocessing.active_children()) - before:  # Ctrl-C while they were being started
            child.kill()  # not terminate: SIGTERM may have a handler that the worker has inherited
            child.join()


def _num_bytes(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(map(_num_bytes, batch.values()))
    return sum(map(_num_bytes, batch)) if isinstance(batch, list | tuple) else 0
