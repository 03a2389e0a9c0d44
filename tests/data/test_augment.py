from __future__ import annotations

import torch

from fulgurite.data.augment import random_shift


def test_images_move_whole_and_apart() -> None:
    torch.manual_seed(0)
    images = torch.arange(1, 41, dtype=torch.uint8).reshape(2, 1, 4, 5).repeat(50, 3, 1, 1)
    moved = random_shift(images, pixels=2)
    assert (moved.shape, moved.dtype) == (images.shape, images.dtype)
    assert moved.is_contiguous()
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for image, source in zip(moved, padded, strict=True):
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(image, source[:, y : y + 4, x : x + 5])]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == 25  # 100 images over all 5 x 5 shifts, the extremes among them


def test_no_shift_changes_nothing() -> None:
    images = torch.rand(2, 3, 4, 4)
    assert random_shift(images, pixels=0) is images
