"""Encoded images, read one by one: decoded, augmented, and put together to a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulgurite.data.augment import Augmentation, check_policy, random_flip
from fulgurite.data.broken import Broken, Incomplete, Skipped
from fulgurite.data.decode import decode_image, scale_window
from fulgurite.data.spec import DataSpec
from fulgurite.data.windows import Choice, centre, random_crop, whole
from fulgurite.errors import UserError


class EncodedDataset(Dataset[Any], ABC):
    """Give (image (C, H, W) uint8, label); a subclass says where the encoded images and the labels are.

    Args:
        spec: gives the images' channels and size
        augmentation: what may happen to an image; None for evaluation
        skipped: counts the images that cannot be read, for which a :class:`Broken` is given; None raises what is wrong
    """

    def __init__(self, spec: DataSpec, *, augmentation: Augmentation | None = None, skipped: Skipped | None = None) -> None:
        self.spec = spec
        self.augmentation = augmentation
        self.skipped = skipped
        self.choose = _choice(spec, augmentation)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[Path | bytes | Tensor, Tensor]:
        """Return an image, encoded or decoded to (C, h, w) uint8, and its label.

        Raises:
            UserError: if it cannot be read
        """

    def name(self, index: int) -> str:
        """Say which image it is, for an error."""
        return f"image {index}"

    def item(self, index: int) -> Any:
        """Return what the list of samples has on one, in plain values; None leaves it to :meth:`read`, in a worker."""
        return None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Broken:
        return self.load(index, self.item(index))

    def load(self, index: int, item: Any) -> tuple[Tensor, Tensor] | Broken:
        """Return a sample, given what :meth:`item` has said of it."""
        try:
            encoded, label = self.read(index) if item is None else (Path(item[0]), torch.from_numpy(item[1]))
            if isinstance(encoded, Tensor):
                image = scale_window(encoded, self.choose(*encoded.shape[1:]))
            else:
                image = decode_image(encoded, self.spec, self.choose, name=self.name(index))
        except UserError as error:
            if self.skipped is None:
                raise
            return Broken(index, str(error))
        return image if self.augmentation is None else self._augmented(image, self.augmentation), label

    def _augmented(self, image: Tensor, chosen: Augmentation) -> Tensor:
        if chosen.flip:
            image = random_flip(image)
        if chosen.policy is not None:
            image = check_policy(chosen.policy(image), (self.spec.channels, None, None))
        return scale_window(image, centre(*image.shape[1:], out_height=self.spec.height, out_width=self.spec.width))

    def collate(self, samples: Sequence[tuple[Tensor, Tensor] | Broken]) -> Any:
        """Make a batch: images (B, C, H, W) uint8, channels last in memory as they come, and labels.

        In training the place of a broken sample is taken by another one of the batch, so that its size stays; in evaluation
        it stays away, so that none counts twice.
        """
        read = [sample for sample in samples if not isinstance(sample, Broken)]
        broken = [sample for sample in samples if isinstance(sample, Broken)]
        if self.augmentation is not None:
            read = read or self._next_readable(broken)
            read += [read[place % len(read)] for place in range(len(samples) - len(read))] if read else []
        if not read:
            return Incomplete(None, broken)
        images = torch.stack([image.permute(1, 2, 0) for image, _ in read]).permute(0, 3, 1, 2)
        batch = images, torch.stack([label for _, label in read])
        return Incomplete(batch, broken) if broken else batch

    def _next_readable(self, broken: Sequence[Broken]) -> list[tuple[Tensor, Tensor]]:
        """Return the first sample behind these that can be read: a process that left out a step would stop all others."""
        for step in range(1, len(self)):
            sample = self[(broken[-1].index + step) % len(self)]
            if not isinstance(sample, Broken):
                return [sample]
        return []


def _choice(spec: DataSpec, augmentation: Augmentation | None) -> Choice:
    if augmentation is not None and augmentation.whole:
        return whole
    if augmentation is not None and augmentation.area is not None:
        return partial(random_crop, out_height=spec.height, out_width=spec.width, area=(augmentation.area, 1.0))
    return partial(centre, out_height=spec.height, out_width=spec.width)
