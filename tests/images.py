"""Trees of small images of the shape that people have on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def save_image(path: Path, label: int = 0, seed: int = 0, size: tuple[int, int] = (20, 24)) -> Path:
    """Write an RGB image of height x width, brighter in the channel ``label``, otherwise noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 120, (*size, 3), dtype=np.uint8)
    pixels[..., label % 3] += 100
    Image.fromarray(pixels).save(path)
    return path


def save_tree(root: Path, classes: Sequence[str] = ("cat", "dog"), *, count: int = 4, ending: str = ".png") -> Path:
    """Write ``root/class/0.png``, ``1.png``, ..., all different."""
    for label, name in enumerate(classes):
        for number in range(count):
            save_image(root / name / f"{number}{ending}", label, seed=1000 * label + number)
    return root


def save_splits(root: Path, classes: Sequence[str] = ("cat", "dog"), *, count: int = 4) -> Path:
    """Write such a tree for train, val and test, again all different."""
    for offset, split in enumerate(("train", "val", "test")):
        for label, name in enumerate(classes):
            for number in range(count):
                save_image(root / split / name / f"{number}.png", label, seed=10_000 * offset + 1000 * label + number)
    return root


def save_mnist(root: Path, name: str = "MNIST", *, train: int = 40, test: int = 10) -> None:
    """Write the four files of MNIST and the like (yann.lecun.com/exdb/mnist): a header, then bytes."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = np.array([2048 + array.ndim, *array.shape], dtype=">i4").tobytes()
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
