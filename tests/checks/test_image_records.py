from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor

from fulgurite.checks.image_records import SplitRecords, read_split
from fulgurite.data import DataSpec, ImageDataModule, ImageFolderDataModule
from fulgurite.data.samples import Split
from tests.images import save_image, save_splits


def read(root: Path, workers: int = 0, **options: Any) -> SplitRecords:
    return read_split(ImageFolderDataModule(root, size=16, **options), "train", workers=workers, progress=False)


def test_any_number_of_workers_sees_the_same(tmp_path: Path) -> None:
    root = save_splits(tmp_path, count=20)
    (root / "train/cat/5.png").write_bytes(b"no image")

    alone, together = read(root), read(root, workers=2)

    assert np.array_equal(alone.records, together.records)
    assert alone.broken == together.broken
    assert list(alone.broken) == [alone.dataset.paths.encoded().index(str(root / "train/cat/5.png").encode())]
    assert "5.png: not an image" in next(iter(alone.broken.values()))
    assert alone.records["readable"].sum() == 39


def test_sums_are_those_of_what_evaluation_sees(tmp_path: Path) -> None:
    split = read(save_splits(tmp_path))

    for index in range(len(split)):
        seen = split.seen(index).double()
        assert seen.shape == (3, 16, 16)
        assert split.records["sum"][index].tolist() == seen.sum((1, 2)).tolist()
        assert split.records["squares"][index].tolist() == (seen**2).sum((1, 2)).tolist()


def test_how_files_hold_their_images(tmp_path: Path) -> None:
    folder = save_splits(tmp_path, ("cat",)) / "train/cat"
    picture = Image.open(folder / "0.png").convert("RGB")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    picture.save(folder / "a.jpg", exif=exif)
    picture.convert("RGBA").save(folder / "b.png")
    picture.convert("CMYK").save(folder / "c.jpg")
    Image.fromarray(np.full((9, 9), 40000, np.uint16)).save(folder / "d.png")
    picture.save(folder / "e.gif", save_all=True, append_images=[Image.new("RGB", picture.size)])

    split = read(tmp_path)

    seen = dict(zip([Path(split.name(index)).name for index in range(len(split))], split.records, strict=True))
    assert [seen[name]["mode"] for name in ("0.png", "a.jpg", "b.png", "c.jpg")] == ["RGB", "RGB", "RGBA", "CMYK"]
    assert seen["d.png"]["mode"].startswith("I;16")
    assert [name for name, record in seen.items() if record["turned"]] == ["a.jpg"]
    assert [name for name, record in seen.items() if record["transparent"]] == ["b.png"]
    assert [name for name, record in seen.items() if record["animated"]] == ["e.gif"]
    assert (seen["a.jpg"]["height"], seen["a.jpg"]["width"]) == (24, 20)  # upright


def test_the_same_pixels_in_another_file_have_one_hash(tmp_path: Path) -> None:
    folder = save_splits(tmp_path, ("cat",)) / "train/cat"
    Image.open(folder / "0.png").save(folder / "4.bmp")
    tall = np.asarray(Image.open(folder / "0.png")).reshape(24, 20, 3)  # the same bytes, of other height and width
    Image.fromarray(tall).save(folder / "5.png")

    records = read(tmp_path).records

    assert records["pixels"][0] == records["pixels"][4]
    assert records["file"][0] != records["file"][4]
    assert records["pixels"][0] != records["pixels"][5]


class Own(ImageDataModule):
    """Stand for a data module of the user's, with a data set that says nothing but its samples."""

    @property
    def spec(self) -> DataSpec:
        return DataSpec(("a", "b"), 1, 8, 8, (0.5,), (0.5,))

    def dataset(self, split: Split) -> Any:
        return [(torch.full((1, 8, 8), 10 * index, dtype=torch.uint8), index % 2) for index in range(6)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_the_users(workers: int) -> None:
    split = read_split(Own(), "val", workers=workers, progress=False)

    assert split.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert split.records["sum"][:, 0].tolist() == [640 * index for index in range(6)]
    assert split.item(3) == {"split": "val", "path": "val image 3", "label": "b"}
    assert isinstance(split.seen(2), Tensor)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    module = ImageFolderDataModule(save_splits(tmp_path), size=16)
    assert module.splits
    gone = save_image(tmp_path / "train/cat/0.png")
    gone.unlink()

    split = read_split(module, "train", workers=0, progress=False)

    assert split.broken == {0: f"cannot read {gone}: No such file or directory"}
    assert split.labels.tolist() == [0] * 4 + [1] * 4
