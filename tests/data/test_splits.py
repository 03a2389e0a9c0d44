from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fulgurite.data.samples import Samples, Split
from fulgurite.data.splits import Holdout, folds, split, spread
from fulgurite.errors import UserError


def classes_of(*counts: int) -> Any:
    return np.repeat(np.arange(len(counts)), counts)


def test_each_class_is_split_in_the_same_proportion() -> None:
    classes = classes_of(100, 40, 20)
    parts = split(classes, [0.7, 0.2, 0.1], seed=0)
    for label, total in enumerate((100, 40, 20)):
        assert np.bincount(parts[classes == label]).tolist() == [0.7 * total, 0.2 * total, 0.1 * total]


@pytest.mark.parametrize(("count", "expected"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1])])
def test_a_rare_class_is_in_training_first_and_then_in_the_others(count: int, expected: list[int]) -> None:
    parts = split(classes_of(count, 50), [0.7, 0.15, 0.15], seed=0)
    assert np.bincount(parts[:count], minlength=3).tolist() == expected


def test_the_seed_alone_decides() -> None:
    classes = classes_of(30, 30)
    first, again, other = (split(classes, [0.5, 0.5], seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_folds_differ_by_one_sample_at_most() -> None:
    classes = classes_of(23, 7, 1, 1, 1)
    fold = folds(classes, 5, seed=0)
    for chosen in (slice(None), classes == 0, classes == 1):
        sizes = np.bincount(fold[chosen], minlength=5)
        assert sizes.max() - sizes.min() <= 1
    assert len({*fold[-3:].tolist()}) == 3  # classes of one sample do not pile up in one fold


@pytest.mark.parametrize("shares", [[0.7, 0.15, 0.15], [0.25, 0.25, 0.25, 0.25]])
def test_groups_stay_together_and_shares_are_nearly_met(shares: list[float]) -> None:
    rng = np.random.default_rng(0)
    groups, classes = rng.integers(0, 60, 1000), rng.integers(0, 3, 1000)
    parts = split(classes, shares, 0, groups) if len(shares) == 3 else folds(classes, 4, 0, groups)
    assert all(len({*parts[groups == group].tolist()}) == 1 for group in range(60))
    assert np.bincount(parts) / 1000 == pytest.approx(np.array(shares), abs=0.03)
    for label in range(3):
        assert np.bincount(parts[classes == label]) / (classes == label).sum() == pytest.approx(np.array(shares), abs=0.06)


def test_small_strata_leave_the_shares_as_they_are() -> None:
    strata = np.random.default_rng(0).integers(0, 30, 100)
    parts = spread(strata, [0.7, 0.15, 0.15], seed=0)
    assert np.bincount(parts).tolist() == [70, 15, 15]
    large = spread(classes_of(100, 40, 20), [0.7, 0.2, 0.1], seed=0)
    assert [np.bincount(large[classes_of(100, 40, 20) == label]).tolist() for label in range(2)] == [[70, 20, 10], [28, 8, 4]]
    assert len(spread(np.zeros(0, dtype=np.int64), [0.5, 0.5], 0)) == 0


def test_no_samples() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert len(split(none, [0.5, 0.5], 0)) == len(folds(none, 2, 0)) == len(split(none, [0.5, 0.5], 0, none)) == 0


def samples(*counts: int, **options: Any) -> Samples:
    labels = torch.from_numpy(classes_of(*counts))
    return Samples(labels=labels, files=[f"{number}.jpg" for number in range(len(labels))], **options)


def sizes(splits: dict[Any, Samples]) -> dict[str, int]:
    return {name: len(part) for name, part in splits.items()}


def test_what_is_missing_is_made_of_training_images(capsys: pytest.CaptureFixture[str]) -> None:
    whole = samples(60, 40)
    splits = Holdout().complete({"train": whole}, "here")
    assert sizes(splits) == {"train": 70, "val": 15, "test": 15}
    assert capsys.readouterr().out == (
        "splits      train 70, val 15, test 15 (val made of training images, test made of training images; "
        "stratified, split_seed 0)\n"
    )
    assert sorted(file for part in splits.values() for file in part.files or []) == sorted(map(str, whole.files or []))
    assert sizes(Holdout().complete({"train": whole, "test": samples(5)}, "here")) == {"train": 85, "test": 5, "val": 15}
    capsys.readouterr()
    given: dict[Split, Samples] = {"train": whole, "val": samples(5)}
    assert Holdout().complete(given, "here") == given
    assert capsys.readouterr().out == ""
    assert sizes(Holdout(test_fraction=0.2).complete(given, "here")) == {"train": 80, "val": 5, "test": 20}


def test_folds_take_everything_but_the_test_split() -> None:
    seen: list[str] = []
    for fold in range(4):
        splits = Holdout(num_folds=4, fold=fold).complete({"train": samples(30), "val": samples(10), "test": samples(7)}, "here")
        assert sizes(splits) == {"train": 30, "val": 10, "test": 7}
        seen += map(str, splits["val"].files or [])
    assert len(seen) == 40
    assert sizes(Holdout(num_folds=5, test_fraction=0.5).complete({"train": samples(100)}, "here")) == {
        "train": 40,
        "val": 10,
        "test": 50,
    }


def test_groups_and_multi_hot_labels_are_split_too() -> None:
    groups = torch.arange(100) // 10
    splits = Holdout().complete({"train": samples(50, 50, groups=groups)}, "here")
    sides = [{*part.groups.tolist()} for part in splits.values() if part.groups is not None]
    assert sum(map(len, sides)) == 10
    multi = Samples(labels=torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]] * 25, dtype=torch.uint8), files=["x"] * 100)
    splits = Holdout(val_fraction=0.2, test_fraction=0.2).complete({"train": multi}, "here")
    assert sizes(splits) == {"train": 60, "val": 20, "test": 20}
    assert splits["val"].labels.unique(dim=0, return_counts=True)[1].tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"val_fraction": 0.0}, r"val_fraction is 0\.0; it is a share, above 0 and below 1"),
        ({"test_fraction": 1.0}, r"test_fraction is 1\.0; it is a share"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "their sum must be below 1"),
        ({"num_folds": 1}, "num_folds is 1; it must be at least 2"),
        ({"num_folds": 3, "fold": 3}, "fold is 3; allowed: 0 to 2"),
        ({"fold": 1}, "fold is 1, and num_folds is not set"),
        ({"num_folds": 3, "val_fraction": 0.1}, "both set"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Holdout(**options)


def test_a_share_of_a_split_that_is_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"val_fraction is 0\.1, and here has a val split of its own"):
        Holdout(val_fraction=0.1).complete({"train": samples(5), "val": samples(5)}, "here")
    with pytest.raises(UserError, match="here has no training images to split: it has test only"):
        Holdout(val_fraction=0.1).complete({"test": samples(5)}, "here")
