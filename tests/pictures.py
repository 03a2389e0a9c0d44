"""Small image files that tell which they are, the data module over them, and shards made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fulgurite.data import DataSpec, ImageDataModule
from fulgurite.data.samples import Split
from fulgurite.data.shards import make_shards

CLASSES = ("a", "b", "c")


class Pictures:
    """Image files of 4x4 pixels, each filled with its index."""

    def __init__(self, folder: Path, number: int, multi_label: bool) -> None:
        self.folder = folder
        index = torch.arange(number)
        self.labels = torch.stack([index % 2, index % 3 == 0, index * 0], dim=1).byte() if multi_label else index % 3

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        path = self.folder / f"{index}.png"
        if not path.exists():
            Image.new("L", (4, 4), index).save(path)
        return path


class PictureDataModule(ImageDataModule):
    """Stand for the modules over people's own image files."""

    def __init__(self, folder: Path, sizes: tuple[int, int, int] = (50, 11, 3), multi_label: bool = False) -> None:
        super().__init__()
        self.multi_label = multi_label
        self.parts = {}
        for split, size in zip(("train", "val", "test"), sizes, strict=True):
            (folder / split).mkdir(parents=True, exist_ok=True)
            self.parts[split] = Pictures(folder / split, size, multi_label)

    @property
    def spec(self) -> DataSpec:
        return DataSpec(CLASSES, 1, 4, 4, (0.25,), (0.5,), multi_label=self.multi_label, class_counts=(17, 17, 16))

    def dataset(self, split: Split) -> Any:
        return self.parts[split]


def small_shards(folder: Path, *, unit: int = 500, **options: Any) -> Path:
    """Make shards of so many bytes, which is about 7 pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fulgurite.data.shards._MIB", unit)
        return make_shards(PictureDataModule(folder / "pictures", **options), folder / "shards", chunk_mb=1, num_workers=2)


def batches(loader: Any) -> list[tuple[list[int], list[Any]]]:
    """Return which pictures each batch has, and their labels."""

    def numbers(images: Tensor) -> list[int]:
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (1, 4, 4)
        return images[:, 0, 1, 2].tolist()

    return [(numbers(images), labels.tolist()) for images, labels in loader]


def flat(found: list[tuple[list[int], list[Any]]]) -> list[int]:
    """Return the pictures of all batches in one list."""
    return [number for numbers, _ in found for number in numbers]
