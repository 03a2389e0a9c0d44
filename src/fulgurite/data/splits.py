"""Share samples out over splits or folds: by a seed, each class in the same proportion, no group on two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fulgurite.console import note
from fulgurite.data.samples import Samples, Split
from fulgurite.errors import UserError, name_list

_DEFAULT = 0.15  # of the images, for a split that a source does not come with
Indices = NDArray[np.int64]


def split(classes: Indices, shares: Sequence[float], seed: int, groups: Indices | None = None) -> Indices:
    """Return the part of each sample: 0 is the training split, the others are held out.

    A class of one sample stays in part 0; of a class of more, each held-out part gets at least one while part 0 keeps one.

    Args:
        classes: (N,) class of each sample
        shares: of the parts, which add up to 1
        seed: draws which samples go where
        groups: (N,) group of each sample; a group is kept together, and the shares are met as nearly as that allows
    """
    if groups is not None:
        return _split_groups(classes, groups, shares, seed)
    parts = np.zeros(len(classes), dtype=np.int64)
    for samples in _by_class(classes, seed):
        end = len(samples)
        for part, share in enumerate(shares[1:], 1):
            count = min(max(round(share * len(samples)), int(share > 0)), end - 1)
            parts[samples[end - count : end]] = part
            end -= count
    return parts


def spread(strata: Indices, shares: Sequence[float], seed: int) -> Indices:
    """Return the part of each sample where strata are many and small, such as combinations of labels.

    The parts have their very shares of the whole, and of each stratum as nearly as whole numbers allow.

    Args:
        strata: (N,) stratum of each sample
        shares: of the parts, which add up to 1
        seed: draws which samples go where
    """
    parts = np.zeros(len(strata), dtype=np.int64)
    left = np.concatenate([*_by_class(strata, seed), np.zeros(0, dtype=np.int64)])
    for part in range(len(shares) - 1, 0, -1):
        # Every so-manieth of those that are left, the neighbours of which are of the same stratum.
        steps = np.floor(np.arange(len(left) + 1) * (shares[part] / sum(shares[: part + 1])) + 0.5)
        chosen = np.diff(steps) > 0
        parts[left[chosen]] = part
        left = left[~chosen]
    return parts


def folds(classes: Indices, number: int, seed: int, groups: Indices | None = None) -> Indices:
    """Return the fold of each sample, 0..number-1; sizes, of each class too, differ by one at most unless there are groups.

    Args:
        classes: (N,) class of each sample
        number: of folds
        seed: draws which samples go where
        groups: (N,) group of each sample; a group is kept together
    """
    if groups is not None:
        return _split_groups(classes, groups, [1 / number] * number, seed)
    parts = np.zeros(len(classes), dtype=np.int64)
    order = np.concatenate([*_by_class(classes, seed), np.zeros(0, dtype=np.int64)])
    parts[order] = np.arange(len(classes)) % number
    return parts


def _by_class(classes: Indices, seed: int) -> list[Indices]:
    """Return the samples of each class in a random order."""
    shuffled = np.random.default_rng(seed).permutation(len(classes))
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    starts = np.flatnonzero(np.diff(classes[by_class])) + 1
    return list(np.split(by_class, starts)) if len(classes) else []


def _split_groups(classes: Indices, groups: Indices, shares: Sequence[float], seed: int) -> Indices:
    """Give group after group, the largest first, to the part that lacks most of what the group holds."""
    _, group_of = np.unique(groups, return_inverse=True)
    kinds, class_of = np.unique(classes, return_inverse=True)
    held = np.zeros((group_of.max(initial=-1) + 1, len(kinds)))  # samples of each class in each group
    np.add.at(held, (group_of, class_of), 1)
    # In shares of the class, so that a rare class counts as much as a frequent one.
    held /= np.maximum(held.sum(0), 1)
    lacking = np.outer(shares, np.ones(len(kinds)))
    part_of = np.zeros(len(held), dtype=np.int64)
    shuffled = np.random.default_rng(seed).permutation(len(held))
    for group in shuffled[np.argsort(-held[shuffled].sum(1), kind="stable")]:
        part = int(np.argmax((lacking * held[group]).sum(1)))
        part_of[group] = part
        lacking[part] -= held[group]
    return part_of[group_of]


@dataclass(frozen=True)
class Holdout:
    """Make the splits that a source does not come with.

    Args:
        val_fraction: share of the training images that is held out for validation; None means 0.15 if there is no such split
        test_fraction: share held out for the test; None means 0.15 if there is neither of the other splits, else no test
        split_seed: draws the split; apart from the run's seed, so that runs with other seeds see the same test images
        num_folds: of cross-validation: all that is not of the test split is shared out over so many folds
        fold: the one that validates, 0..num_folds-1

    Raises:
        UserError: if a number makes no sense
    """

    val_fraction: float | None = None
    test_fraction: float | None = None
    split_seed: int = 0
    num_folds: int | None = None
    fold: int = 0

    def __post_init__(self) -> None:
        for name in ("val_fraction", "test_fraction"):
            share = getattr(self, name)
            if share is not None and not 0 < share < 1:
                raise UserError(f"{name} is {share}; it is a share, above 0 and below 1; null means the default")
        if (self.val_fraction or 0) + (self.test_fraction or 0) >= 1:
            raise UserError(
                f"val_fraction is {self.val_fraction} and test_fraction {self.test_fraction}; their sum must be below 1"
            )
        if self.num_folds is None and self.fold:
            raise UserError(f"fold is {self.fold}, and num_folds is not set")
        if self.num_folds is not None:
            if self.num_folds < 2:
                raise UserError(f"num_folds is {self.num_folds}; it must be at least 2")
            if not 0 <= self.fold < self.num_folds:
                raise UserError(f"fold is {self.fold}; allowed: 0 to {self.num_folds - 1}, as num_folds is {self.num_folds}")
            if self.val_fraction is not None:
                raise UserError("val_fraction and num_folds are both set; with folds, a fold validates")

    def complete(self, given: dict[Split, Samples], source: str) -> dict[Split, Samples]:
        """Return the splits of a source, those that are missing made from its training images.

        Args:
            given: the splits that it comes with
            source: names it in errors

        Raises:
            UserError: if there is nothing to split, or a share is asked for that the source has as a split
        """
        for name, share in (("val", self.val_fraction), ("test", self.test_fraction)):
            if share is not None and name in given:
                raise UserError(f"{name}_fraction is {share}, and {source} has a {name} split of its own: leave it out")
        if "train" not in given:
            if self.num_folds is not None or self.val_fraction is not None or self.test_fraction is not None:
                raise UserError(f"{source} has no training images to split: it has {name_list(given)} only")
            return given
        splits = dict(given)
        test = self.test_fraction if "val" in given or self.test_fraction is not None or "test" in given else _DEFAULT
        if self.num_folds is not None:
            self._hold_out(splits, {"test": test})
            pool = splits["train"].joined(splits["val"]) if "val" in splits else splits["train"]
            fold = folds(pool.strata, self.num_folds, self.split_seed, _groups(pool))
            splits |= {"train": pool.take(fold != self.fold), "val": pool.take(fold == self.fold)}
            made = f"fold {self.fold} of {self.num_folds} validates"
        else:
            val = None if "val" in given else self.val_fraction or _DEFAULT
            self._hold_out(splits, {"val": val, "test": test})
            made = ", ".join(f"{name} made of training images" for name in splits if name not in given)
        if not len(splits["val"]):
            raise UserError(
                f"no val split can be made of the {len(splits['train'])} training images of {source}: each class (or group) is "
                "too small\nadd images, or a val split of your own"
            )
        if made:
            kept = ", groups kept together" if splits["train"].groups is not None else ""
            sizes = ", ".join(f"{name} {len(samples):,}" for name, samples in splits.items())
            note("splits", f"{sizes} ({made}; stratified{kept}, split_seed {self.split_seed})")
        return splits

    def _hold_out(self, splits: dict[Split, Samples], shares: dict[Split, float | None]) -> None:
        wanted = {name: share for name, share in shares.items() if share is not None}
        if not wanted:
            return
        pool = splits["train"]
        parts = [1 - sum(wanted.values()), *wanted.values()]
        if pool.labels.ndim == 2 and pool.groups is None:
            part = spread(pool.strata, parts, self.split_seed)
        else:
            part = split(pool.strata, parts, self.split_seed, _groups(pool))
        for number, name in enumerate(wanted, 1):
            splits[name] = pool.take(part == number)
        splits["train"] = pool.take(part == 0)


def _groups(samples: Samples) -> Indices | None:
    return None if samples.groups is None else samples.groups.numpy()
