"""Answer: what does a training step cost here beyond a raw PyTorch loop, and how much of that is bare Lightning's?

Run ``python benchmarks/step_overhead.py``; ``--rounds 20`` for steadier numbers.

All three loops train the same network on the same batches with the same optimizer and schedule. Bare Lightning does
nothing else. Fulgurite also writes both logs, keeps checkpoints, moves a progress bar (that no terminal shows), adds up
loss and accuracy, logs the learning rate, and can resume exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader

from fulgurite import Trainer
from fulgurite.data import DataSpec, ImageDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.models import SmallCNN
from fulgurite.models.preprocess import Preprocess
from fulgurite.tasks import ClassificationTask
from fulgurite.tasks.schedules import WarmupCosine

MOST_RATIO = 1.3
BLOCK = 50  # steps; the logging interval, so that every block writes the logs once
STEPS = 5 * BLOCK + 1  # of a round: the first block warms up, and the last step ends the last block

optimizer = partial(AdamW, lr=1e-3)


class Clock(nn.Module):
    """Note when the network is called, which every kind of loop does once a step, in CPU time of this process.

    CPU time, since a clock on the wall would also count what other processes do meanwhile.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.calls: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, K)."""
        if self.training:
            self.calls.append(time.process_time())
        logits: Tensor = self.network(images)
        return logits

    def blocks(self) -> Tensor:
        """Return the microseconds of each step but the first block's, (blocks, BLOCK) float64."""
        return torch.tensor(self.calls[BLOCK:], dtype=torch.float64).diff().reshape(-1, BLOCK) * 1e6


class GeneratedData(ImageDataModule):
    """Serve random grey images, enough for one epoch of ``STEPS`` steps.

    Args:
        side: height and width in pixels
        batch_size: of a step
    """

    in_memory = True

    def __init__(self, *, side: int, batch_size: int) -> None:
        super().__init__(batch_size=batch_size)
        self.side = side
        self._splits = {"train": self._generate(batch_size * STEPS), "val": self._generate(batch_size)}

    def _generate(self, count: int) -> ArrayDataset:
        images = torch.randint(256, (count, 1, self.side, self.side), dtype=torch.uint8)
        return ArrayDataset(images, torch.randint(10, (count,)))

    @property
    def spec(self) -> DataSpec:
        """Ten classes of square grey images."""
        names = tuple(str(label) for label in range(10))
        return DataSpec(class_names=names, channels=1, height=self.side, width=self.side, mean=(0.5,), std=(0.3,))

    def dataset(self, split: Split) -> ArrayDataset:
        """Return one split, held in memory; there is one batch to validate on, and to test."""
        return self._splits["train" if split == "train" else "val"]

    def plain_loader(self) -> DataLoader[Any]:
        """Return PyTorch's own loader over the same batches."""
        return DataLoader(self.dataset("train"), self.batch_size, shuffle=True, collate_fn=lambda batch: batch)


def linear(num_classes: int, in_channels: int) -> nn.Module:
    """Return one layer for images of 8x8 pixels: next to nothing, so that what surrounds it shows."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, num_classes))


def mlp(num_classes: int, in_channels: int) -> nn.Module:
    """Return 784-256-10 for images of 28x28 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784 * in_channels, 256), nn.ReLU(), nn.Linear(256, num_classes))


class BareModule(pl.LightningModule):
    """Do what the raw loop does, and nothing else."""

    def __init__(self, network: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.network = network
        self.preprocess = preprocess

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return F.cross_entropy(self.network(self.preprocess(images)), labels)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and the schedule."""
        adamw = optimizer(self.network.parameters())
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": WarmupCosine(adamw, STEPS), "interval": "step"}}


def run_raw(network: Clock, data: GeneratedData) -> None:
    """Train with a loop of PyTorch."""
    preprocess = Preprocess(data.spec.mean, data.spec.std)
    adamw = optimizer(network.parameters())
    schedule = WarmupCosine(adamw, STEPS)
    for images, labels in data.plain_loader():
        loss = F.cross_entropy(network(preprocess(images)), labels)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        schedule.step()


def run_bare(network: Clock, data: GeneratedData) -> None:
    """Train with Lightning, everything off."""
    module = BareModule(network, Preprocess(data.spec.mean, data.spec.std))
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(max_epochs=1, accelerator="cpu", **off).fit(module, data.plain_loader())


def run_ours(network: Clock, data: GeneratedData) -> None:
    """Train with this project, everything on."""
    task = ClassificationTask(lambda *_: network, optimizer, WarmupCosine, spec=data.spec)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(max_epochs=1, accelerator="cpu", runs_dir=Path(folder)).fit(task, datamodule=data)


LOOPS: dict[str, Callable[[Clock, GeneratedData], None]] = {"raw": run_raw, "bare Lightning": run_bare, "fulgurite": run_ours}
JOBS: dict[str, tuple[Callable[[int, int], nn.Module], int, int]] = {  # network, side of the images, batch size
    "Linear 64-10, 64 images of 8x8": (linear, 8, 64),
    "SmallCNN, 64 images of 8x8": (partial(SmallCNN, width=4, depth=2), 8, 64),
    "MLP 784-256-10, 256 images of 28x28": (mlp, 28, 256),
}


def measure(make: Callable[[int, int], nn.Module], data: GeneratedData, rounds: int) -> dict[str, float]:
    """Return the microseconds per step of each loop; they take turns, so that all see the same machine.

    Each of a block's steps counts with the least time it ever took: whatever disturbs a measurement adds to it.
    """
    blocks: dict[str, list[Tensor]] = {name: [] for name in LOOPS}
    for _ in range(rounds):
        for name, run in LOOPS.items():
            clock = Clock(make(data.spec.num_classes, data.spec.channels))
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                run(clock, data)
            blocks[name].append(clock.blocks())
    return {name: torch.cat(taken).amin(dim=0).mean().item() for name, taken in blocks.items()}


def report(title: str, steps: dict[str, float]) -> bool:
    """Print the microseconds of each loop and return whether the target holds."""
    above = {name: microseconds - steps["raw"] for name, microseconds in steps.items()}
    ratio = above["fulgurite"] / above["bare Lightning"]
    print(f"{title:<40}{'us a step':>10}{'above raw':>10}")
    for name, microseconds in steps.items():
        print(f"  {name:<38}{microseconds:>10.0f}{above[name]:>10.0f}")
    verdict = "holds" if ratio <= MOST_RATIO else "MISSED"
    print(f"  {'fulgurite / bare Lightning, above raw':<38}{ratio:>20.2f}  at most {MOST_RATIO}: {verdict}", flush=True)
    return ratio <= MOST_RATIO


def main() -> int:
    """Return the exit status: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="how often each loop is run for each network")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")  # bare Lightning advises to use more workers
    holds = []
    for title, (make, side, batch_size) in JOBS.items():
        data = GeneratedData(side=side, batch_size=batch_size)
        holds.append(report(title, measure(make, data, rounds)))
    return 0 if all(holds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
