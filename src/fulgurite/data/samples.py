"""Labelled images before they are read: what a folder, a table or a published data set comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fulgurite.data.paths import Paths
from fulgurite.data.shared import shared

Split = Literal["train", "val", "test"]


@dataclass(frozen=True, eq=False)
class Samples:
    """Labelled images: files, or pixels in memory.

    Args:
        labels: (N,) int64, or (N, K) uint8 where an image has any number of labels
        files: of the N images
        pixels: (N, C, H, W) uint8
        groups: (N,) int64; what is of one group must not be on two sides of a split
    """

    labels: Tensor
    files: Sequence[str | Path] | None = None
    pixels: Tensor | None = None
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def strata(self) -> Any:
        """(N,) int64: the class, or where there is any number of labels their combination."""
        labels = self.labels.numpy()
        return labels if labels.ndim == 1 else np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)

    def take(self, chosen: Any) -> Samples:
        """Return some of the samples; ``chosen`` is (N,) bool or a list of indices."""
        indices = torch.as_tensor(chosen)
        indices = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        return Samples(
            labels=self.labels[indices],
            files=None if self.files is None else [self.files[index] for index in indices.tolist()],
            pixels=None if self.pixels is None else self.pixels[indices],
            groups=None if self.groups is None else self.groups[indices],
        )

    def packed(self) -> Samples:
        """Return the same with the labels and the files' paths in tensors that workers share."""
        return replace(self, labels=shared(self.labels), files=None if self.files is None else Paths(self.files))

    def joined(self, other: Samples) -> Samples:
        """Return these samples and then the others."""

        def both(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
            return None if mine is None or theirs is None else torch.cat([mine, theirs])

        return Samples(
            labels=torch.cat([self.labels, other.labels]),
            files=None if self.files is None or other.files is None else [*self.files, *other.files],
            pixels=both(self.pixels, other.pixels),
            groups=both(self.groups, other.groups),
        )


@dataclass(frozen=True)
class Labelled:
    """What a source of data holds: the classes, in the order of their labels, and the splits that it comes with."""

    class_names: tuple[str, ...]
    splits: dict[Split, Samples]
