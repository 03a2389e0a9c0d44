"""What the modules over encoded images share: augmentation, and what to do with an image that cannot be read."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Any, Self

from torch import nn

from fulgurite.data.augment import Preset, augmentation, random_erase
from fulgurite.data.base import ArrayDataset, ImageDataModule
from fulgurite.data.broken import OnError, Skipped
from fulgurite.data.encoded import EncodedDataset
from fulgurite.data.samples import Split
from fulgurite.errors import UserError
from fulgurite.processes import of_each_process


class AugmentedDataModule(ImageDataModule):
    """Load images that are augmented in training, and perhaps damaged.

    Args:
        augment: a preset, or transforms (torchvision's v2 or your own) that each training image passes through, uint8
        flip: whether a preset may mirror an image; not where left and right differ, as in text
        on_error: what to do with an image that cannot be read: stop the run, or skip it, count it and list it
        max_broken: share of a split's images that may be skipped
        options: those of :class:`ImageDataModule`

    Raises:
        UserError: if a number makes no sense
    """

    def __init__(
        self,
        *,
        augment: Preset | list[nn.Module] = "standard",
        flip: bool = True,
        on_error: OnError = "raise",
        max_broken: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not 0 <= max_broken <= 1:
            raise UserError(f"max_broken is {max_broken}; it is a share, from 0 to 1")
        self.augmentation = augmentation(augment, flip=flip)
        self.on_error = on_error
        self.max_broken = max_broken
        self._datasets: dict[Split, Any] = {}

    @abstractmethod
    def make_dataset(self, split: Split) -> ArrayDataset | EncodedDataset:
        """Make the data set of a split.

        Raises:
            UserError: if there is no such split
        """

    def dataset(self, split: Split) -> Any:
        """Return a split, the same object each time.

        Raises:
            UserError: if there is no such split
        """
        if split not in self._datasets:
            self._datasets[split] = self.make_dataset(split)
        return self._datasets[split]

    def skipping(self) -> Self:
        """Return a copy that skips images that cannot be read, whatever this module does with them."""
        made = copy(self)
        made.on_error, made._datasets = "skip", {}
        return made

    def skipped(self, split: Split) -> Skipped | None:
        """Return what counts the images of a split that cannot be read; None if the first one is to stop the run."""
        return Skipped(split, self.max_broken) if self.on_error == "skip" else None

    def teardown(self, stage: str) -> None:
        """List the images that could not be read; Lightning calls it at the end."""
        if self.on_error == "raise":
            return
        counts = {split: one.skipped for split, one in self._datasets.items() if isinstance(one, EncodedDataset) and one.skipped}
        # Each process has read its share, and the first may have made data sets that the others did not.
        for theirs in of_each_process({split: skipped.reasons for split, skipped in counts.items()}):
            for split, reasons in theirs.items():
                counts.setdefault(split, Skipped(split, self.max_broken)).reasons.update(reasons)
        for skipped in counts.values():
            skipped.tell()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Erase parts of training images, on the device."""
        share = self.augmentation.erase
        if not share or self.trainer is None or not self.trainer.training:
            return batch
        images, labels = batch
        return random_erase(images, share, fill=self.spec.mean), labels
