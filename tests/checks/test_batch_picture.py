from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fulgurite.checks.batch_picture import draw_counts, draw_images
from fulgurite.checks.image_records import SplitRecords, read_split
from fulgurite.data import DigitsDataModule, ImageFolderDataModule
from fulgurite.errors import UserError
from tests.images import save_splits, save_tree


class Black(nn.Module):
    """Blacken an image."""

    def forward(self, image: Tensor) -> Tensor:
        return image * 0


def draw(module: Any, path: Path) -> Any:
    """Return the picture's pixels (h, w, 3)."""
    assert draw_images(module, train(module), path)
    return np.asarray(Image.open(path).convert("RGB"))


def train(module: Any) -> SplitRecords:
    return read_split(module, "train", workers=0, progress=False)


def test_the_upper_row_is_as_evaluation_sees_it_and_the_lower_ones_are_augmented(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "tree")

    pixels = draw(ImageFolderDataModule(root, size=16, augment=[Black()]), tmp_path / "images.png")

    black = (pixels.max(2) == 0).mean(1)  # of each line; frames and names are some
    assert black[: len(black) // 4].mean() < 0.2
    assert black[len(black) // 4 :].mean() > 0.7
    assert pixels.shape[0] < pixels.shape[1] < 2000


def test_augmentation_is_the_same_each_time(tmp_path: Path) -> None:
    module = ImageFolderDataModule(save_splits(tmp_path / "tree"), size=16, augment="strong")

    first = draw(module, tmp_path / "a.png")
    random.seed(7)
    torch.manual_seed(7)

    assert np.array_equal(first, draw(module, tmp_path / "b.png"))


def test_erasing_is_shown(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "tree")
    module = ImageFolderDataModule(root, size=16, augment="none", mean=[0.0, 1.0, 0.0])
    object.__setattr__(module.augmentation, "erase", 1.0)

    pixels = draw(module, tmp_path / "images.png")

    assert (pixels == (0, 255, 0)).all(2).any(1).nonzero()[0].min() > len(pixels) / 4


def test_broken_images_and_images_of_one_class_alone(tmp_path: Path) -> None:
    root = save_tree(tmp_path / "tree", ("only",), count=10)
    (root / "only/0.png").write_bytes(b"")

    draw(ImageFolderDataModule(root, size=16), tmp_path / "images.png")


def test_nothing_to_draw(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "tree", count=1)
    for path in root.rglob("*.png"):
        path.write_bytes(b"")
    module = ImageFolderDataModule(root, size=16)

    assert not draw_images(module, train(module), tmp_path / "images.png")
    assert not (tmp_path / "images.png").exists()


def test_counts_of_many_classes(tmp_path: Path) -> None:
    names = [f"$class_{number}$ 猫" for number in range(30)]
    module = ImageFolderDataModule(save_splits(tmp_path / "tree", names, count=1), size=16)

    draw_counts([train(module)], tmp_path / "classes.png")

    with Image.open(tmp_path / "classes.png") as picture:
        assert picture.height == round(120 * (1.2 + 0.3 * 10))  # ten bars


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*missing"):
        draw_counts([train(DigitsDataModule())], tmp_path / "missing" / "classes.png")
