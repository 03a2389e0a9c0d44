"""Answer: how much throughput does exact resume cost on JPEG files?

Run ``python benchmarks/exactness.py``; ``--rounds 20`` for steadier numbers.

Both sides read the same files with the same decoding and augmentation, in this process. The exact side does it through
ResumableLoader, which seeds the generators for each sample and each batch; the stock side through PyTorch's DataLoader with
shuffling and no seeds. The loader is measured alone, and in a fit whose trainer has the callback for exact resume, or not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_files import save_photos  # beside this script
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from fulgurite import Trainer
from fulgurite.data.augment import Augmentation
from fulgurite.data.files import FileDataset
from fulgurite.data.loader import EpochSampler, ResumableLoader
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.tasks import ClassificationTask

# Height, width, and the share of the throughput that may be lost: for small files the seeds weigh more.
SIZES: list[tuple[int, int, float | None]] = [(375, 500, 0.03), (120, 160, None)]
BATCH, SIZE, COUNT = 32, 224, 256
SPEC = DataSpec(("a", "b"), 3, SIZE, SIZE, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def loader(paths: list[Path], *, exact: bool) -> DataLoader[Any]:
    """Return the loader of one side, ``COUNT`` images an epoch."""
    chosen = [paths[number % len(paths)] for number in range(COUNT)]
    labels = torch.arange(COUNT) % 2
    dataset = FileDataset(Paths(chosen), labels, SPEC, augmentation=Augmentation(area=0.08, flip=True))
    if not exact:
        return DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=dataset.collate)
    sampler = EpochSampler(COUNT, shuffle=True, seed=0, rank=0, world_size=1, equal_shares=True)
    return ResumableLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)


def read(paths: list[Path], rounds: int) -> tuple[float, float, float]:
    """Return the seconds an image of the exact and of the stock loader, and the median of the ratios of pairs of batches.

    They take turns batch by batch, so that both of a pair meet what the machine is like at the time. The first epoch is
    left out: in it the exact loader looks once for generators of the data set's own, 5 ms in each process.
    """
    loaders = {exact: loader(paths, exact=exact) for exact in (True, False)}
    taken: dict[bool, list[float]] = {True: [], False: []}
    for epoch in range(rounds + 1):
        batches = {exact: iter(loaders[exact]) for exact in loaders}
        for number in range(COUNT // BATCH):
            for exact in ((number + epoch) % 2 == 0, (number + epoch) % 2 == 1):
                start = time.process_time()  # of this process: a clock on the wall would count what others do meanwhile
                next(batches[exact])
                if epoch:
                    taken[exact].append((time.process_time() - start) / BATCH)
    ratios = [one / other for one, other in zip(taken[True], taken[False], strict=True)]
    return statistics.median(taken[True]), statistics.median(taken[False]), statistics.median(ratios)


class Clock(nn.Module):
    """A small network that notes when it is called."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(in_channels * (SIZE // 32) ** 2, num_classes))
        self.calls: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, K)."""
        self.calls.append(time.process_time())
        logits: Tensor = self.layers(images)
        return logits


def train(paths: list[Path], *, exact: bool) -> float:
    """Return the seconds that a fit takes for an image: the median step's share."""
    task = ClassificationTask(Clock, partial(SGD, lr=0.1), spec=SPEC)
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = Trainer(max_epochs=2, accelerator="cpu", runs_dir=Path(folder), limit_val_batches=0)
        if not exact:
            trainer.callbacks.remove(trainer.exact_resume)
        trainer.fit(task, loader(paths, exact=exact))
    clock: Any = task.network
    return float(np.median(np.diff(clock.calls))) / BATCH


def train_both(paths: list[Path], rounds: int) -> tuple[float, float, float]:
    """Return the seconds an image of an exact and of a stock fit, and the median of the rounds' ratios; they take turns."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for exact in (number % 2 == 0, number % 2 == 1):
            taken[exact].append(train(paths, exact=exact))
    exact_times, stock_times = taken[True][1:], taken[False][1:]  # the first round warms up
    ratios = [one / other for one, other in zip(exact_times, stock_times, strict=True)]
    return statistics.median(exact_times), statistics.median(stock_times), statistics.median(ratios)


def main() -> int:
    """Measure, print, and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Lightning misses a validation
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for height, width, target in SIZES:
            paths = save_photos(Path(folder, f"{width}x{height}"), 64, height, width)
            print(f"JPEG {width} x {height} to {SIZE} x {SIZE}{'exact':>12}{'stock':>10}  ms an image")
            for name, measure in (("loader alone", read), ("fit", train_both)):
                exact, stock, ratio = measure(paths, rounds)
                lost = 1 - 1 / ratio
                missed |= target is not None and lost > target
                aim = "" if target is None else f"   target: at most {target:.0%}"
                print(f"  {name:<28}{1e3 * exact:>10.3f}{1e3 * stock:>10.3f}  throughput lost {lost:6.1%}{aim}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
