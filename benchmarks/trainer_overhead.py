"""Answer: what does a training step cost here beyond a raw PyTorch loop, and how much of that is bare Lightning's?

Run ``python benchmarks/trainer_overhead.py``; ``--rounds 20`` for steadier numbers, ``--only ResNet`` for one network.

All three loops train the same network on the same batches with the same optimizer and schedule. Bare Lightning does
nothing else. Fulgurite also writes both logs, keeps checkpoints, moves a progress bar (on a pretended terminal), adds up
loss and accuracy, logs loss, rate and throughput, and can resume exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from fulgurite.models import ResNet, SmallCNN
from fulgurite.models.preprocess import Preprocess
from fulgurite.tasks import ClassificationTask
from fulgurite.tasks.schedules import WarmupCosine

MOST_RATIO = 1.3  # above the raw loop, of what bare Lightning costs
MOST_SHARE = 1.02  # of the raw loop's time, for a network of a usual size
BLOCKS = 5  # of a round; the first one warms up

optimizer = partial(AdamW, lr=1e-3, fused=True)  # as this project would choose by itself


class Terminal(io.StringIO):
    """Take what is printed as a terminal would, so that the progress bar moves."""

    def isatty(self) -> bool:
        """Return that it is one."""
        return True


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
        """Return the microseconds of each step but the first block's, (BLOCKS - 1, steps of a block) float64."""
        block = (len(self.calls) - 1) // BLOCKS
        return torch.tensor(self.calls[block:], dtype=torch.float64).diff().reshape(-1, block) * 1e6


class GeneratedData(ImageDataModule):
    """Serve random images, enough for one epoch.

    Args:
        shape: of an image (C, H, W)
        batch_size: of a step
        block: steps of a block
    """

    in_memory = True

    def __init__(self, *, shape: tuple[int, int, int], batch_size: int, block: int) -> None:
        super().__init__(batch_size=batch_size)
        self.shape = shape
        self.steps = BLOCKS * block + 1  # the last step ends the last block
        self._splits = {"train": self._generate(batch_size * self.steps), "val": self._generate(batch_size)}

    def _generate(self, count: int) -> ArrayDataset:
        images = torch.randint(256, (count, *self.shape), dtype=torch.uint8)
        return ArrayDataset(images, torch.randint(10, (count,)))

    @property
    def spec(self) -> DataSpec:
        """Ten classes of images."""
        (channels, height, width), names = self.shape, tuple(str(label) for label in range(10))
        mean, std = (0.5,) * channels, (0.3,) * channels
        return DataSpec(class_names=names, channels=channels, height=height, width=width, mean=mean, std=std)

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

    def __init__(self, network: nn.Module, preprocess: Preprocess, steps: int) -> None:
        super().__init__()
        self.network = network
        self.preprocess = preprocess
        self.steps = steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return F.cross_entropy(self.network(self.preprocess(images)), labels)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and the schedule."""
        adamw = optimizer(self.network.parameters())
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": WarmupCosine(adamw, self.steps), "interval": "step"}}


def run_raw(network: Clock, data: GeneratedData) -> None:
    """Train with a loop of PyTorch."""
    preprocess = Preprocess(data.spec.mean, data.spec.std)
    adamw = optimizer(network.parameters())
    schedule = WarmupCosine(adamw, data.steps)
    for images, labels in data.plain_loader():
        loss = F.cross_entropy(network(preprocess(images)), labels)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        schedule.step()


def run_bare(network: Clock, data: GeneratedData) -> None:
    """Train with Lightning, everything off."""
    module = BareModule(network, Preprocess(data.spec.mean, data.spec.std), data.steps)
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(max_epochs=1, accelerator="cpu", **off).fit(module, data.plain_loader())


def run_ours(network: Clock, data: GeneratedData) -> None:
    """Train with this project, everything on."""
    task = ClassificationTask(lambda *_: network, optimizer, WarmupCosine, spec=data.spec)
    with tempfile.TemporaryDirectory() as folder:
        every = data.steps // BLOCKS  # every block writes the logs once
        Trainer(max_epochs=1, accelerator="cpu", runs_dir=Path(folder), log_every_n_steps=every).fit(task, datamodule=data)


LOOPS: dict[str, Callable[[Clock, GeneratedData], None]] = {"raw": run_raw, "bare Lightning": run_bare, "fulgurite": run_ours}


class Job(NamedTuple):
    """What is trained."""

    title: str
    network: Callable[[int, int], nn.Module]
    shape: tuple[int, int, int]  # of an image
    batch_size: int
    block: int = 50  # steps


JOBS = (
    Job("Linear 64-10, 64 images of 8x8", linear, (1, 8, 8), 64),
    Job("SmallCNN, 64 images of 8x8", partial(SmallCNN, width=4, depth=2), (1, 8, 8), 64),
    Job("MLP 784-256-10, 256 images of 28x28", mlp, (1, 28, 28), 256),
    Job("ResNet-18, 4 images of 224x224", partial(ResNet, stem="large"), (3, 224, 224), 4, block=2),
)


def measure(make: Callable[[int, int], nn.Module], data: GeneratedData, rounds: int) -> dict[str, float]:
    """Return the microseconds per step of each loop; they take turns, so that all see the same machine.

    Each of a block's steps counts with the least time it ever took: whatever disturbs a measurement adds to it.
    """
    blocks: dict[str, list[Tensor]] = {name: [] for name in LOOPS}
    for _ in range(rounds):
        for name, run in LOOPS.items():
            clock = Clock(make(data.spec.num_classes, data.spec.channels))
            with contextlib.redirect_stdout(Terminal()):
                run(clock, data)
            blocks[name].append(clock.blocks())
    return {name: torch.cat(taken).amin(dim=0).mean().item() for name, taken in blocks.items()}


def report(job: Job, steps: dict[str, float]) -> bool:
    """Print the microseconds of each loop and return whether the target holds."""
    small = job.block == JOBS[0].block
    above = {name: microseconds - steps["raw"] for name, microseconds in steps.items()}
    print(f"{job.title:<40}{'us a step':>10}{'above raw':>10}")
    for name, microseconds in steps.items():
        print(f"  {name:<38}{microseconds:>10.0f}{above[name]:>10.0f}")
    of = above["bare Lightning"] if small else steps["raw"]
    ratio = (above if small else steps)["fulgurite"] / of
    name, most = ("fulgurite / bare Lightning, above raw", MOST_RATIO) if small else ("fulgurite / raw", MOST_SHARE)
    verdict = "holds" if ratio <= most else "MISSED"
    print(f"  {name:<38}{ratio:>20.3f}  at most {most}: {verdict}", flush=True)
    return ratio <= most


def main() -> int:
    """Return the exit status: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="how often each loop is run for each network")
    parser.add_argument("--only", default="", help="what the name of the network begins with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")  # bare Lightning advises to use more workers
    holds = []
    for job in JOBS:
        if job.title.startswith(options.only):
            data = GeneratedData(shape=job.shape, batch_size=job.batch_size, block=job.block)
            holds.append(report(job, measure(job.network, data, options.rounds)))
    return 0 if all(holds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
