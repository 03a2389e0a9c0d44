"""Image files with labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fulgurite.data.encoded import EncodedDataset
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec


class FileDataset(EncodedDataset):
    """Read image files with their labels.

    Args:
        paths: of the N files
        labels: (N,) int64, or (N, K) uint8 where an image has any number of labels
        spec: gives the images' channels and size
        cache: gives the decoded image (C, h, w) uint8 of an index; None decodes the files each time
        options: those of :class:`EncodedDataset`
    """

    def __init__(
        self,
        paths: Paths,
        labels: Tensor,
        spec: DataSpec,
        *,
        cache: Callable[[int], Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.paths = paths
        self.labels = labels
        self.cache = cache

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Return where an image is."""
        return self.paths[index]

    def item(self, index: int) -> Any:
        """Return an image's path and label; with a cache nothing, as it has its own list."""
        return (str(self.paths[index]), self.labels[index].numpy()) if self.cache is None else None

    def read(self, index: int) -> tuple[Path | bytes | Tensor, Tensor]:
        """Return an image's path, or its pixels from the cache, and its label."""
        return self.paths[index] if self.cache is None else self.cache(index), self.labels[index]
