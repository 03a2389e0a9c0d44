"""Answer: how many images a second does a ResNet-50 train on here, and what share of a raw PyTorch loop's is that?

Run ``python benchmarks/gpu.py``; ``--device cpu --steps 3 --batch_size 4 --side 64`` only shows that it works.

Images are random and lie on the device, so that nothing but the training is measured. Each line is one precision, with or
without ``torch.compile``; the raw loop and this project's trainer, everything on, take turns. Clocks are read after the
device has caught up, once before and once after the measured steps. Compiling takes a minute or two for each compiled line:
``--only bf16`` measures one precision.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

from fulgurite import Trainer
from fulgurite.callbacks.compiling import Compile
from fulgurite.data import DataSpec
from fulgurite.models import ResNet
from fulgurite.models.preprocess import Preprocess
from fulgurite.tasks import ClassificationTask

LEAST_SHARE = 0.98  # of the raw loop, compiled
CLASSES = 1000
optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=5e-5)


class Job(NamedTuple):
    """What is trained, and how."""

    device: torch.device
    batch_size: int
    side: int
    steps: int
    precision: str = "32-true"
    compiled: bool = False

    @property
    def warmup(self) -> int:
        """Steps before the clock starts: compilation, the allocator, cuDNN's choice of algorithms."""
        return max(2, self.steps // 5)

    def images_per_second(self, seconds: float) -> float:
        """Return the throughput."""
        return self.steps * self.batch_size / seconds


class OneBatch(IterableDataset[tuple[Tensor, Tensor]]):
    """Give the same batch again and again, from the device's own memory."""

    def __init__(self, job: Job) -> None:
        images = torch.randint(256, (job.batch_size, 3, job.side, job.side), dtype=torch.uint8, device=job.device)
        self.batch = images, torch.randint(CLASSES, (job.batch_size,), device=job.device)
        self.number = job.warmup + job.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.number):
            yield self.batch

    def __len__(self) -> int:
        return self.number


class Stopwatch(Callback):
    """Measure the steps after the warm-up."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = self.seconds = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the clock twice."""
        if batch_idx + 1 == self.job.warmup:
            self.begun = now(self.job.device)
        if batch_idx + 1 == self.job.warmup + self.job.steps:
            self.seconds = now(self.job.device) - self.begun


def now(device: torch.device) -> float:
    """Return the time once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spec(job: Job) -> DataSpec:
    """Return what the images are."""
    names = tuple(str(label) for label in range(CLASSES))
    return DataSpec(class_names=names, channels=3, height=job.side, width=job.side, mean=(0.5,) * 3, std=(0.3,) * 3)


def network(num_classes: int, in_channels: int) -> nn.Module:
    """Return a ResNet-50."""
    return ResNet(num_classes, in_channels, block="bottleneck", layers=(3, 4, 6, 3), stem="large")


def run_raw(job: Job) -> float:
    """Return the images per second of a loop of PyTorch."""
    of = spec(job)
    net = network(CLASSES, 3).to(job.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    preprocess = Preprocess(of.mean, of.std).to(job.device)
    sgd = optimizer(net.parameters(), fused=True)
    if job.compiled:
        net.compile()
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(job.precision)
    scaler = torch.amp.GradScaler(job.device.type, enabled=dtype is torch.float16)
    begun = 0.0
    for number, (images, labels) in enumerate(OneBatch(job)):
        if number == job.warmup:
            begun = now(job.device)
        sgd.zero_grad()
        with torch.autocast(job.device.type, dtype=dtype, enabled=dtype is not None):
            inputs = preprocess(images).contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(net(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
    return job.images_per_second(now(job.device) - begun)


def run_ours(job: Job) -> float:
    """Return the images per second of this project, everything on."""
    task = ClassificationTask(network, optimizer, spec=spec(job))
    watch, loader = Stopwatch(job), DataLoader(OneBatch(job), batch_size=None)
    callbacks = [watch, Compile(mode="default" if job.compiled else None)]
    where: dict[str, Any] = {"accelerator": job.device.type, "devices": 1, "precision": job.precision}
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        trainer = Trainer(max_epochs=1, memory_format="channels_last", callbacks=callbacks, runs_dir=Path(folder), **where)
        trainer.fit(task, loader)
    if failed := [line for line in said.getvalue().splitlines() if "uncompiled" in line]:
        raise RuntimeError(failed[0])  # it would be measured as what it is not
    return job.images_per_second(watch.seconds)


def report(job: Job, rounds: int) -> bool:
    """Print a line of the table and return whether the target holds."""
    line = f"{job.precision:<12}{'yes' if job.compiled else 'no':<10}"
    try:
        pairs = [(run_raw(job), run_ours(job)) for _ in range(rounds)]
    except Exception as error:  # the other lines are worth having
        print(f"{line}  failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    raw, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    share = statistics.median(own / other for other, own in pairs)
    verdict = "" if not job.compiled else "holds" if share >= LEAST_SHARE else "MISSED"
    print(f"{line}{raw:>10.0f}{ours:>12.0f}{share:>8.3f}  {verdict}", flush=True)
    return not job.compiled or share >= LEAST_SHARE


def main() -> int:
    """Return the exit status: 1 if a target is missed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 60), ("batch_size", 256), ("side", 224), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="what the precision begins with")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: nothing was measured")
        return 2
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, which says nothing about a GPU"
    images = f"{options.batch_size} images of {options.side}x{options.side}"
    print(f"ResNet-50, {images}, channels_last, {name}, torch {torch.__version__}")
    print(f"{'precision':<12}{'compiled':<10}{'raw im/s':>10}{'fulgurite':>12}{'share':>8}  at least {LEAST_SHARE} compiled")
    job = Job(device, options.batch_size, options.side, options.steps)
    all_precisions = ("bf16-mixed", "16-mixed", "32-true") if device.type == "cuda" else ("32-true", "bf16-mixed")
    precisions = [precision for precision in all_precisions if precision.startswith(options.only)]
    jobs = [job._replace(precision=precision, compiled=compiled) for precision in precisions for compiled in (True, False)]
    held = [report(one, options.rounds) for one in jobs]  # all of them, also after a miss
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
