from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from fulgurite.data.augment import Augmentation
from fulgurite.data.broken import Broken, Incomplete, Skipped
from fulgurite.data.decode import decode_image
from fulgurite.data.files import FileDataset
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from tests.images import save_image

SPEC = DataSpec(("a", "b"), 3, 16, 16, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def files(tmp_path: Path) -> Paths:
    return Paths([save_image(tmp_path / f"{number}.png", number, seed=number) for number in range(4)])


def dataset(files: Paths, **options: Any) -> FileDataset:
    return FileDataset(files, torch.tensor([0, 1, 0, 1]), SPEC, **options)


def test_evaluation_sees_what_decode_image_gives(files: Paths) -> None:
    data = dataset(files)
    image, label = data[3]  # type: ignore[misc]  # it is not broken
    assert torch.equal(image, decode_image(files[3], SPEC))
    assert label == 1
    images, labels = data.collate([data[index] for index in range(4)])
    assert images.shape == (4, 3, 16, 16)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images[2], decode_image(files[2], SPEC))
    assert labels.tolist() == [0, 1, 0, 1]


def test_training_crops_and_mirrors(files: Paths) -> None:
    random.seed(0)
    flipping = dataset(files, augmentation=Augmentation(flip=True))
    plain = decode_image(files[0], SPEC)
    seen = [flipping[0][0] for _ in range(20)]  # type: ignore[index]  # none is broken
    mirrored = sum(torch.equal(image, plain.flip(-1)) for image in seen)
    assert 3 < mirrored < 17
    assert mirrored + sum(torch.equal(image, plain) for image in seen) == 20
    cropping = dataset(files, augmentation=Augmentation(area=0.1))
    assert len({tuple(cropping[0][0].flatten().tolist()) for _ in range(20)}) == 20  # type: ignore[index]


def test_a_cache_stands_in_for_the_files(files: Paths) -> None:
    pixels = torch.arange(3 * 32 * 32, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(3, 32, 32)
    (image, _) = dataset(files, cache=lambda index: pixels + index)[2]  # type: ignore[misc]
    assert torch.equal(image, nn.functional.interpolate((pixels + 2)[None], (16, 16), mode="bilinear", antialias=True)[0])


def test_transforms_of_the_users_get_the_whole_image(files: Paths) -> None:
    sizes: list[Any] = []

    class Look(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            sizes.append((image.dtype, tuple(image.shape)))
            return image[:, :10]

    image, _ = dataset(files, augmentation=Augmentation(policy=Look(), whole=True))[0]  # type: ignore[misc]
    assert sizes == [(torch.uint8, (3, 20, 24))]
    assert image.shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (v2.ToDtype(torch.float32, scale=True), r"returned torch\.float32 of \(3, 20, 24\)"),
        (
            v2.Grayscale(),
            r"returned torch\.uint8 of \(1, 20, 24\); they get and return .* of 3 x any x any",
        ),
        (v2.ToPILImage(), "returned Image"),
    ],
)
def test_transforms_that_return_something_else_are_refused(files: Paths, transform: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        dataset(files, augmentation=Augmentation(policy=transform, whole=True))[0]


def test_a_broken_file_is_named_or_counted(files: Paths) -> None:
    files[1].write_bytes(b"")
    with pytest.raises(UserError, match=r"1\.png: an empty file"):
        dataset(files)[1]
    data = dataset(files, skipped=Skipped("val", 0.5))
    broken = data[1]
    assert isinstance(broken, Broken)
    assert broken.index == 1
    batch = data.collate([data[index] for index in range(4)])
    assert isinstance(batch, Incomplete)
    assert batch.broken == [broken]
    assert batch.batch[1].tolist() == [0, 0, 1]  # evaluation counts no image twice
    batch = dataset(files, skipped=Skipped("train", 0.5), augmentation=Augmentation()).collate([data[1], data[2], data[3]])
    assert batch.batch[1].tolist() == [0, 1, 0]  # training keeps its batch size
    assert data.collate([broken]) == Incomplete(None, [broken])


def test_a_batch_of_broken_files_alone_takes_the_next_that_can_be_read(files: Paths) -> None:
    for place in (1, 2):
        files[place].write_bytes(b"")
    data = dataset(files, skipped=Skipped("train", 0.9), augmentation=Augmentation())
    batch = data.collate([data[1], data[2]])
    assert len(batch.broken) == 2
    images, labels = batch.batch
    assert labels.tolist() == [1, 1]
    assert torch.equal(images[0], decode_image(files[3], SPEC))
    for place in (0, 3):
        files[place].write_bytes(b"")
    assert data.collate([data[1]]).batch is None
