"""Answer: how much faster are image files read here than by torchvision's reference training pipeline, without and with a cache?

Run ``python benchmarks/image_files.py``. One core; JPEGs of 500 x 375 and of 4000 x 3000 pixels, made for the purpose; random
crop to 224 and mirroring; they take turns, and the best of each counts. The reference is what torchvision's own training script
does by default: PIL, RandomResizedCrop, flip, PILToTensor, normalise. Here a loader gives uint8, and the device normalises: on
a CPU that is one more line below, on a GPU it does not show.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from fulgurite.data.augment import Augmentation
from fulgurite.data.cache import build_cache
from fulgurite.data.files import FileDataset
from fulgurite.data.loader import EpochSampler, ResumableLoader
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.models.preprocess import Preprocess

BATCH, SIZE, CACHED = 32, 224, 256
LEAST_RATIO = {"files": 1.9, "cache in memory": 8.0, "cache in a file": 8.0}
SPEC = DataSpec(("a", "b"), 3, SIZE, SIZE, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Reference(Dataset[tuple[Tensor, int]]):
    """Read a file as torchvision's references/classification does."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        steps: list[Any] = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        self.transform = v2.Compose(
            [*steps, v2.ToDtype(torch.float, scale=True), v2.Normalize(SPEC.mean, SPEC.std), v2.ToPureTensor()]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(pil_loader(str(self.paths[index]))), 0


def reference(paths: list[Path]) -> Callable[[], int]:
    """Return what takes an epoch with torchvision's pipeline, and says how many images came."""
    loader = DataLoader(Reference(paths), batch_size=BATCH, shuffle=True)
    return lambda: sum(len(batch) for batch, _ in loader)


def ours(paths: list[Path], cache: Any = None) -> Callable[[], int]:
    """Return what takes an epoch with this project's data set and loader."""
    augmentation = Augmentation(area=0.08, flip=True)
    dataset = FileDataset(Paths(paths), torch.zeros(len(paths)), SPEC, augmentation=augmentation, cache=cache)
    sampler = EpochSampler(len(paths), shuffle=True, seed=0, rank=0, world_size=1, equal_shares=True)
    loader = ResumableLoader(dataset, batch_size=BATCH, sampler=sampler)
    return lambda: sum(len(batch) for batch, _ in loader)


def normalise() -> Callable[[], int]:
    """Return what normalises a batch as it comes from the loader."""
    preprocess = Preprocess(SPEC.mean, SPEC.std)
    batch = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    return lambda: len(preprocess(batch))


def save_photos(folder: Path, count: int, height: int, width: int) -> list[Path]:
    """Write JPEGs with edges, areas and noise, of about the size that photographs of this many pixels have."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    paths = []
    for number in range(count):
        small = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
        noisy = smooth + rng.normal(0, 6, smooth.shape)
        paths.append(folder / f"{number}.jpg")
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


def compare(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Return the seconds that each side takes for an image."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, epoch in sides.items():
            start = time.perf_counter()
            count = epoch()
            best[name] = min(best[name], (time.perf_counter() - start) / count)
    return best


def main() -> int:
    """Measure, print, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for height, width, count in ((375, 500, 128), (3000, 4000, 4)):
            paths = save_photos(Path(folder, f"{width}x{height}"), count, height, width)
            sides = {"torchvision's reference": reference(paths), "files": ours(paths)}
            if count >= BATCH:
                build = partial(build_cache, split="train", shorter=CACHED, folder=Path(folder), workers=0, skip=False)
                sides["cache in memory"] = ours(paths, build("ram", Paths(paths), SPEC))
                sides["cache in a file"] = ours(paths, build("disk", Paths(paths), SPEC))
            best = compare(sides, rounds)
            print(f"JPEG {width} x {height} to {SIZE} x {SIZE}")
            for name, seconds in best.items():
                ratio = best["torchvision's reference"] / seconds
                target = LEAST_RATIO.get(name) if count >= BATCH else None
                missed |= target is not None and ratio < target
                aim = "" if target is None else f"   target: at least {target:g}"
                print(f"  {name:<24}{1e3 * seconds:8.3f} ms an image   ratio {ratio:5.1f}{aim}")
    print(f"normalising on this CPU   {1e3 * compare({'': normalise()}, rounds)['']:8.3f} ms an image")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
