from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fulgurite.data.files import FileDataset
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from tests.images import save_image

SPEC = DataSpec(("a", "b"), 3, 16, 16, (0.5,) * 3, (0.5,) * 3)


def dataset(folder: Path, labels: torch.Tensor, **options: Any) -> FileDataset:
    paths = [save_image(folder / f"{number}.png", seed=number) for number in range(len(labels))]
    return FileDataset(Paths(paths), labels, SPEC, **options)


def test_a_sample_is_a_path_and_a_label_until_it_is_read(tmp_path: Path) -> None:
    data = dataset(tmp_path, torch.tensor([1, 0]))
    assert len(data) == 2
    assert data.path(1) == tmp_path / "1.png"
    assert data.read(0) == (tmp_path / "0.png", torch.tensor(1))
    path, label = data.item(0)
    assert (path, label) == (str(tmp_path / "0.png"), 1)
    image, loaded = data.load(0, (str(tmp_path / "1.png"), label))  # type: ignore[misc]  # what the item says counts
    assert torch.equal(image, data[1][0])  # type: ignore[index]
    assert loaded.dtype == torch.int64


def test_several_labels_stay_as_they_are(tmp_path: Path) -> None:
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.uint8)
    data = dataset(tmp_path, labels)
    assert torch.equal(data.collate([data[index] for index in range(3)])[1], labels)


def test_with_a_cache_no_file_is_looked_at(tmp_path: Path) -> None:
    pixels = torch.full((3, 16, 16), 9, dtype=torch.uint8)
    data = FileDataset(Paths(["nowhere.png"]), torch.tensor([1]), SPEC, cache=lambda index: pixels)
    assert data.item(0) is None
    image, label = data[0]  # type: ignore[misc]
    assert torch.equal(image, pixels)
    assert label == 1
