from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.data import ImageFolderDataModule
from fulgurite.data.splits import Holdout
from fulgurite.errors import UserError
from tests.images import save_image, save_splits, save_tree


def module(root: Path, **options: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(root, **{"size": 16, "num_workers": 0} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "size is 0; it is one number of pixels, or two"),
        ({"size": [3, 4, 5]}, r"size is \[3, 4, 5\]"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        module(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"mean": [0.5]}, "mean has 1 and std 3 values"), ({"background": [1, 2]}, r"background is \[1, 2\]")],
)
def test_values_that_contradict_each_other(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        module(save_tree(tmp_path), **options).spec  # noqa: B018


def test_height_and_width(tmp_path: Path) -> None:
    data = module(save_splits(tmp_path), size=[8, 12], channels=1)
    assert next(iter(data.train_dataloader()))[0].shape == (8, 1, 8, 12)
    assert data.spec.mean == (0.449,)


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    save_tree(tmp_path / "train")
    save_tree(tmp_path / "val")
    data = module(tmp_path)
    assert data.splits == ("train", "val")
    with pytest.raises(UserError, match=r"has no test split, only train, val; split\.test_fraction makes one"):
        data.test_dataloader()
    assert module(tmp_path, split=Holdout(test_fraction=0.25)).splits == ("train", "val", "test")


def test_balanced_draws_each_class_equally_often(tmp_path: Path) -> None:
    save_tree(tmp_path / "train", ("many",), count=30)
    save_tree(tmp_path / "train", ("few",), count=2)
    save_tree(tmp_path / "val", ("few", "many"), count=2)

    def share_of_few(**options: Any) -> float:
        loader = module(tmp_path, batch_size=8, **options).train_dataloader()
        labels = []
        for epoch in range(20):
            loader.order.set_epoch(epoch)
            labels += [labels for _, labels in loader]
        return (torch.cat(labels) == 0).double().mean().item()

    assert share_of_few() == pytest.approx(2 / 32)
    assert share_of_few(balanced=True) == pytest.approx(0.5, abs=0.06)


def test_the_fingerprint_tells_other_data(tmp_path: Path) -> None:
    root = save_splits(tmp_path)
    first = module(root).fingerprint()
    assert module(root).fingerprint() == first
    assert module(root, size=20).fingerprint() != first
    save_image(root / "test" / "dog" / "new.png")
    assert module(root).fingerprint() != first


def test_batches_depend_neither_on_workers_nor_on_how_they_start(tmp_path: Path) -> None:
    root = save_splits(tmp_path)
    seen = []
    for workers in (0, 1, 2):
        data = module(root, num_workers=workers, augment="strong", batch_size=3)
        seen.append([images for images, _ in data.train_dataloader()])
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_cache_leaves_evaluation_as_it_is(tmp_path: Path, kind: Any) -> None:
    root = save_splits(tmp_path / "data")
    plain, cached = module(root), module(root, cache=kind, cache_dir=tmp_path / "cache")
    cached.setup("validate")
    assert torch.equal(next(iter(plain.val_dataloader()))[0], next(iter(cached.val_dataloader()))[0])
    dataset: Any = cached.dataset("val")
    assert dataset.cache is not None
    cached.setup("fit")
    assert next(iter(cached.train_dataloader()))[0].shape == (8, 3, 16, 16)


@pytest.mark.slow  # each worker imports PyTorch
@pytest.mark.parametrize("cache", ["none", "ram", "disk"])
def test_spawned_workers_give_the_same_batches(tmp_path: Path, cache: Any) -> None:
    options: dict[str, Any] = {"cache": cache, "cache_dir": tmp_path / "cache", "augment": "strong", "batch_size": 3}
    root = save_splits(tmp_path / "data")
    seen = []
    for workers in (0, 1):
        data = module(root, num_workers=workers, **options)
        if cache != "none":
            data.setup("fit")
        loader = data.train_dataloader()
        if workers:
            loader.multiprocessing_context = "spawn"
        seen.append([images for images, _ in loader])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
