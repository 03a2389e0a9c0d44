"""Decode all images of a split, in several processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader

from fulgurite.console import is_rank_zero, note
from fulgurite.data.decode import decode_image, image_size
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.data.windows import whole
from fulgurite.errors import UserError

T = TypeVar("T")
_CHUNK = 8  # images that a worker hands over at once: more would not fit into a container's 64 MiB of shared memory


@dataclass(frozen=True)
class SplitDecoder:
    """Decode the images of a split.

    Args:
        paths: of the N image files
        spec: gives the channels, the size and the background
        split: named in messages
        shorter: pixels; take whole images, scaled until their shorter side is at most that. None takes what
            :func:`decode_image` gives
        workers: processes that decode; 0 decodes in this one
        skip: remember the images that cannot be read instead of stopping
    """

    paths: Paths
    spec: DataSpec
    split: str
    shorter: int | None
    workers: int
    skip: bool

    def measure(self) -> int:
        """Return how many bytes the pixels take; reads no more than the files' headers.

        Raises:
            UserError: if one cannot be read, and is not to be skipped
        """
        total = 0
        for num_bytes, broken in self._chunks(_measured, "image sizes"):
            if broken is not None and not self.skip:
                raise UserError(broken)
            total += num_bytes
        return total

    def decode(self, num_bytes: int, add: Callable[[int, Tensor], object]) -> tuple[Tensor, dict[int, str]]:
        """Decode all images.

        Args:
            num_bytes: what :meth:`measure` said
            add: takes where in the whole the next pixels start, and these, flat uint8 in the order (h, w, C)

        Returns:
            (N, 3) int64: where each image starts, its height and its width, 0 if it could not be read; and why not

        Raises:
            UserError: if one cannot be read, and is not to be skipped
        """
        places: list[tuple[int, ...]] = []
        broken: dict[int, str] = {}
        end = 0
        began = time.monotonic()
        for pixels, sizes in self._chunks(_decoded, "decoding"):
            if end + len(pixels) > num_bytes:
                raise UserError(f"image files of the {self.split} split have changed while they were read; start again")
            add(end, pixels)
            for size in sizes:
                if isinstance(size, str):
                    if not self.skip:
                        raise UserError(size)
                    broken[len(places)], size = size, (0, 0)
                places.append((end, *size))
                end += size[0] * size[1] * self.spec.channels
        note("cache", f"decoded in {time.monotonic() - began:.0f} s")
        return torch.tensor(places, dtype=torch.int64).view(-1, 3), broken

    def _chunks(self, work: Callable[..., T], description: str) -> Iterator[T]:
        """Yield what ``work`` makes of each few images, in order; with a progress bar on a terminal."""
        count = len(self.paths)
        chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
        loader: Any = DataLoader(
            chunks,  # type: ignore[arg-type]  # a list is as good as a Dataset
            batch_size=None,
            collate_fn=partial(work, paths=self.paths, spec=self.spec, shorter=self.shorter),  # called in the workers
            num_workers=min(self.workers, len(chunks)),
            generator=torch.Generator(),  # the global one would go on from another state than without a build
        )
        shown = sys.stdout.isatty() and is_rank_zero()
        yield from track(loader, f"{self.split}: {description}", len(chunks), transient=True, disable=not shown)


def _measured(chunk: range, *, paths: Paths, spec: DataSpec, shorter: int | None) -> tuple[int, str | None]:
    """Return how many bytes these images take when decoded, and why the first of those that cannot be read cannot."""
    num_pixels, broken = 0, None
    for index in chunk:
        try:
            size = image_size(paths[index], spec)
        except UserError as error:
            broken = broken or str(error)
        else:
            window = whole(*size, shorter=shorter)
            num_pixels += spec.height * spec.width if shorter is None else window.out_height * window.out_width
    return num_pixels * spec.channels, broken


def _decoded(chunk: range, *, paths: Paths, spec: DataSpec, shorter: int | None) -> tuple[Tensor, list[tuple[int, int] | str]]:
    """Return the pixels of these images, flat, and of each its height and width or why it cannot be read."""
    choose = None if shorter is None else partial(whole, shorter=shorter)
    pixels, sizes = [torch.empty(0, dtype=torch.uint8)], list[tuple[int, int] | str]()
    for index in chunk:
        try:
            image = decode_image(paths[index], spec, choose)
        except UserError as error:
            sizes.append(str(error))
        else:
            pixels.append(image.permute(1, 2, 0).flatten())
            sizes.append((image.shape[1], image.shape[2]))
    return torch.cat(pixels), sizes
