"""The built-in data: 1,797 real handwritten digits of 8x8 pixels that come with scikit-learn."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from fulgurite.data.augment import random_shift
from fulgurite.data.base import ArrayDataset, ImageDataModule
from fulgurite.data.samples import Split
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError


class DigitsDataModule(ImageDataModule):
    """Serve scikit-learn's digits (Alpaydin & Kaynak, 1998) in a stratified, seeded split; nothing is downloaded.

    Args:
        val_fraction: share of the samples kept for validation
        test_fraction: share of the samples kept for the test
        split_seed: draws the split; apart from the run's seed, so that runs with other seeds see the same test set
        shift: largest random shift of a training image, in pixels
        batch_size: per device
        num_workers: processes that load; None means 0, since the images are in memory

    Raises:
        UserError: if the fractions leave nothing to train on
    """

    in_memory = True

    def __init__(
        self,
        *,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 0,
        shift: int = 1,
        batch_size: int = 64,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        if not (0 < val_fraction and 0 < test_fraction and val_fraction + test_fraction < 1):
            raise UserError(
                f"val_fraction is {val_fraction} and test_fraction {test_fraction}; both must be above 0 and their sum below 1"
            )
        if not 0 <= shift < 8:
            raise UserError(f"shift is {shift}; allowed: 0 to 7 pixels, since the images have 8")
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.split_seed = split_seed
        self.shift = shift

    @property
    def spec(self) -> DataSpec:
        """Ten classes, grey, 8x8; mean and standard deviation of all images."""
        names = tuple(str(digit) for digit in range(10))
        return DataSpec(class_names=names, channels=1, height=8, width=8, mean=(0.305,), std=(0.376,))

    def dataset(self, split: Split) -> ArrayDataset:
        """Return one split, held in memory."""
        images, labels = self._splits[split]
        augment = partial(random_shift, pixels=self.shift) if split == "train" and self.shift else None
        return ArrayDataset(images, labels, augment)

    @cached_property
    def _splits(self) -> dict[Split, tuple[Tensor, Tensor]]:
        from sklearn.datasets import load_digits  # a second of import that other commands do not need
        from sklearn.model_selection import train_test_split

        pixels, targets = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
        labels = torch.from_numpy(targets).long()
        holdout = self.val_fraction + self.test_fraction
        try:
            train, rest = train_test_split(range(len(labels)), test_size=holdout, stratify=targets, random_state=self.split_seed)
            val, test = train_test_split(
                rest, test_size=self.test_fraction / holdout, stratify=targets[rest], random_state=self.split_seed
            )
        except ValueError as error:  # a part would have fewer images than there are classes
            raise UserError(
                f"val_fraction is {self.val_fraction} and test_fraction {self.test_fraction}; "
                f"of {len(labels)} images each split must get at least one of each digit"
            ) from error
        parts: dict[Split, list[int]] = {"train": train, "val": val, "test": test}
        return {split: (images[indices], labels[indices]) for split, indices in parts.items()}
