from __future__ import annotations

import pytest
import torch
from torchvision.transforms import v2

from fulgurite.data.augment import Augmentation, BatchAugment, augmentation, random_erase, random_shift
from fulgurite.errors import UserError


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


def test_flip_mirrors_each_image_by_itself() -> None:
    torch.manual_seed(0)
    images = torch.arange(64 * 3 * 4 * 5, dtype=torch.int64).reshape(64, 3, 4, 5)
    moved = random_shift(images, 0, flip=True)
    mirrored = [torch.equal(after, before.flip(-1)) for after, before in zip(moved, images, strict=True)]
    assert 20 < sum(mirrored) < 44
    assert all(flipped or torch.equal(moved[place], images[place]) for place, flipped in enumerate(mirrored))
    both = random_shift(images[:8], 1, flip=True)
    assert both.shape == (8, 3, 4, 5)


def test_presets_get_stronger_and_none_changes_nothing() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    assert BatchAugment(augmentation("none", flip=True))(images) is images
    changed = [
        (BatchAugment(augmentation(name, flip=False))(images).float() - images.float()).abs().mean()
        for name in ("light", "strong")
    ]
    assert 0 < changed[0] < changed[1]
    assert not augmentation("strong", flip=False).flip
    assert augmentation([], flip=True) == Augmentation()


def test_erasing_fills_rectangles_of_some_images_with_the_mean() -> None:
    torch.manual_seed(0)
    images = torch.full((200, 3, 20, 30), 7, dtype=torch.uint8)
    erased = random_erase(images, 0.5, (0.0, 0.5, 1.0))
    assert (images == 7).all()
    changed = (erased != images).any(1)
    assert 70 < changed.flatten(1).any(1).sum() < 130
    shares = changed.flatten(1).float().mean(1)
    shares = shares[shares > 0]
    assert 0.005 < shares.min() < 0.05
    assert 0.25 < shares.max() < 0.36
    for image, where in zip(erased, changed, strict=True):
        if where.any():
            rows, columns = where.any(1).nonzero(), where.any(0).nonzero()
            assert where[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
            assert image[:, where].unique(dim=1)[:, 0].tolist() == [0, 128, 255]
    assert torch.equal(random_erase(images, 0.0, (0.0,) * 3), images)


def test_a_transform_that_changes_the_size_is_refused_in_memory() -> None:
    chosen = augmentation([v2.CenterCrop(4)], flip=True)
    with pytest.raises(UserError, match=r"returned torch\.uint8 of \(1, 4, 4\); .* of 1 x 8 x 8"):
        BatchAugment(chosen)(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
