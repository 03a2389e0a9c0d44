from __future__ import annotations

from typing import Any

import pytest
import torch

from fulgurite.data import DigitsDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.errors import UserError

SPLITS: tuple[Split, ...] = ("train", "val", "test")


def splits(**options: Any) -> list[ArrayDataset]:
    data = DigitsDataModule(**options)
    return [data.dataset(split) for split in SPLITS]


def test_splits_share_all_images_out() -> None:
    parts = splits()
    assert [len(part) for part in parts] == [1257, 270, 270]
    images = torch.cat([part.images for part in parts])
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), torch.uint8)
    assert (int(images.min()), int(images.max())) == (0, 255)
    # No two of the digits are equal, so that an image in two splits would show.
    assert len(images.unique(dim=0)) == 1797


def test_classes_are_as_frequent_in_each_split() -> None:
    for part in splits():
        counts = part.labels.bincount(minlength=10) / len(part)
        assert counts.sub(0.1).abs().max() < 0.01


def test_spec_is_what_the_images_are() -> None:
    spec = DigitsDataModule().spec
    values = torch.cat([part.images for part in splits()]) / 255
    assert spec.class_names == tuple("0123456789")
    assert (spec.channels, spec.height, spec.width) == (1, 8, 8)
    assert spec.mean[0] == pytest.approx(float(values.mean()), abs=5e-4)
    assert spec.std[0] == pytest.approx(float(values.std()), abs=5e-4)


def test_split_seed_draws_the_split() -> None:
    first, again, other = [splits(split_seed=seed)[2].images for seed in (0, 0, 1)]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_only_training_images_are_shifted() -> None:
    train, val, test = splits(shift=2)
    torch.manual_seed(0)
    assert not torch.equal(train.__getitems__(list(range(9)))[0], train.images[:9])
    for part in (val, test, splits(shift=0)[0]):
        assert torch.equal(part.__getitems__(list(range(9)))[0], part.images[:9])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"val_fraction": 0.0}, "val_fraction is 0.0 and test_fraction 0.15; both must be above 0 and their sum below 1"),
        ({"test_fraction": 0.85}, "val_fraction is 0.15 and test_fraction 0.85; both must be above 0 and their sum below 1"),
        ({"shift": 8}, "shift is 8; allowed: 0 to 7 pixels, since the images have 8"),
        ({"shift": -1}, "shift is -1; allowed: 0 to 7 pixels, since the images have 8"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ],
)
def test_bad_numbers_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        DigitsDataModule(**options)
    assert str(error.value) == text


@pytest.mark.parametrize("fractions", [(0.001, 0.15), (0.15, 0.001), (0.5, 0.499)])
def test_split_too_small_for_its_classes_is_refused(fractions: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"of 1797 images each split must get at least one of each digit"):
        splits(val_fraction=fractions[0], test_fraction=fractions[1])
