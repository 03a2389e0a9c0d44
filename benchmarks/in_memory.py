"""Answer: how much faster is fetching whole batches from memory than torchvision's usual transforms, image by image?

Run ``python benchmarks/in_memory.py``. One core, 28 x 28 grey images, random crop of 4 pixels and mirroring. Both sides give
normalised float batches on the CPU; they take turns, and the best of each counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from fulgurite.data.augment import Augmentation, BatchAugment
from fulgurite.data.base import ArrayDataset
from fulgurite.data.loader import EpochSampler, ResumableLoader
from fulgurite.models.preprocess import Preprocess

LEAST_RATIO = 20.0
IMAGES, BATCH, SHIFT = 10_240, 256, 4
MEAN, STD = 0.5, 0.25


class PerSample(Dataset[tuple[Tensor, int]]):
    """Give one image after the other through PIL, as torchvision's MNIST and CIFAR do."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images[:, 0].numpy(), labels.tolist()
        steps: list[Any] = [transforms.RandomCrop(28, padding=SHIFT), transforms.RandomHorizontalFlip()]
        self.transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def ours(images: Tensor, labels: Tensor) -> Callable[[], int]:
    """Return what takes an epoch with this project's data set and loader, and says how many images came."""
    augment = BatchAugment(Augmentation(shift=SHIFT / 28, flip=True))
    sampler = EpochSampler(len(labels), shuffle=True, seed=0, rank=0, world_size=1, equal_shares=True)
    loader = ResumableLoader(ArrayDataset(images, labels, augment), batch_size=BATCH, sampler=sampler)
    preprocess = Preprocess((MEAN,), (STD,))
    return lambda: sum(len(preprocess(batch)) for batch, _ in loader)


def per_sample(images: Tensor, labels: Tensor) -> Callable[[], int]:
    """Return what takes an epoch with torchvision's transforms."""
    loader = DataLoader(PerSample(images, labels), batch_size=BATCH, shuffle=True)
    return lambda: sum(len(batch) for batch, _ in loader)


def main() -> int:
    """Measure, print, and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (IMAGES, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (IMAGES,))
    sides = {"image by image": per_sample(images, labels), "batch by batch": ours(images, labels)}
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, epoch in sides.items():
            best[name] = min(best[name], seconds_per_image(epoch))
    for name, seconds in best.items():
        print(f"{name:<16}{1e6 * seconds:8.1f} us an image")
    ratio = best["image by image"] / best["batch by batch"]
    print(f"{'ratio':<16}{ratio:8.1f}    target: at least {LEAST_RATIO:g}")
    return int(ratio < LEAST_RATIO)


def seconds_per_image(epoch: Callable[[], int]) -> float:
    """Take an epoch and return its time by the number of images that came."""
    start = time.perf_counter()
    count = epoch()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    sys.exit(main())
