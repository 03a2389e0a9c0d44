from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from fulgurite.data.shard_dataset import ShardDataset
from fulgurite.data.shard_store import ShardStore
from fulgurite.errors import UserError
from tests.pictures import PictureDataModule, small_shards

pytest.importorskip("litdata", reason="litdata is not installed: pip install 'fulgurite[stream]'")


def validation(folder: Path, *, multi_label: bool = False) -> ShardDataset:
    """Return the 11 pictures of the validation split, in two shards."""
    spec = PictureDataModule(folder / "pictures", multi_label=multi_label).spec
    root = small_shards(folder, multi_label=multi_label) if not (folder / "shards").exists() else folder / "shards"
    return ShardDataset(ShardStore(str(root)), "val", json.loads((root / "val" / "index.json").read_text()), spec)


def test_any_sample_can_be_read_in_any_order(tmp_path: Path) -> None:
    dataset = validation(tmp_path)
    assert (len(dataset), len(dataset.sizes)) == (11, 2)
    assert dataset.sizes[1] < dataset.sizes[0]  # a short last shard
    pictures = PictureDataModule(tmp_path / "pictures").dataset("val")
    for index in (10, 0, 7, 6, 7):
        assert dataset.read(index) == (pictures.path(index).read_bytes(), torch.tensor(index % 3))
        image, label = dataset[index]  # type: ignore[misc]  # it is not broken
        assert image.equal(torch.full((1, 4, 4), index, dtype=torch.uint8))
        assert label == index % 3
    for index in (-1, 11):
        with pytest.raises(IndexError, match=f"index {index} of 11 samples"):
            dataset[index]


def test_copy_for_a_worker_reads_the_same(tmp_path: Path) -> None:
    dataset = validation(tmp_path)
    first = dataset.read(0)  # with a shard open
    assert pickle.loads(pickle.dumps(dataset)).read(0) == first


def test_several_labels_are_a_row_of_uint8(tmp_path: Path) -> None:
    dataset = validation(tmp_path, multi_label=True)
    labels = torch.stack([dataset.read(index)[1] for index in range(11)])
    assert labels.dtype == torch.uint8
    assert labels.equal(PictureDataModule(tmp_path / "pictures", multi_label=True).dataset("val").labels)


def test_damaged_image_is_named(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: b"no image")
        patch.setattr("fulgurite.data.shards.decode_image", lambda *_: None)  # which would refuse it
        small_shards(tmp_path)
    with pytest.raises(UserError, match=r"^sample 3 of val/chunk-0-0\.bin in .*shards: not an image"):
        validation(tmp_path)[3]


def test_shard_that_is_not_whole_is_named(tmp_path: Path) -> None:
    dataset = validation(tmp_path)
    shard = tmp_path / "shards" / "val" / "chunk-0-1.bin"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{shard} has {size - 1} bytes, and its index says {size}: damaged, or not wholly"):
        dataset[10]
    shard.unlink()
    with pytest.raises(UserError, match=f"cannot read {shard}: No such file"):
        dataset[10]


@pytest.mark.parametrize(("place", "content"), [(0, b"\xff\xff\xff\x7f"), (4, b"\xff\xff\xff\x7f"), (8, b"\x01\x00\x00\x00")])
def test_a_shard_that_is_damaged_within_is_named(tmp_path: Path, place: int, content: bytes) -> None:
    dataset = validation(tmp_path)
    shard = tmp_path / "shards" / "val" / "chunk-0-0.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[place : place + 4] = content
    shard.write_bytes(damaged)
    with pytest.raises(UserError, match=r"sample 0 of val/chunk-0-0\.bin in .*shards"):
        dataset[0]
