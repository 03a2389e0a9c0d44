"""Which part of an image is looked at, and how large it becomes; chosen from the image's size, before it is decoded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

_ATTEMPTS = 10
_REDUCTIONS = (8, 4, 2)  # by which libjpeg can decode smaller, at a fraction of the time


class Window(NamedTuple):
    """A region of an upright image and the size it is scaled to, in pixels."""

    top: int
    left: int
    height: int
    width: int
    out_height: int
    out_width: int

    def reduction(self) -> int:
        """Return by how much an image may be decoded smaller.

        Two pixels stay for each that is wanted, in both directions: an edge, which then falls on a whole pixel of the smaller
        image, is off by a quarter of a pixel of the result at most.
        """
        most = min(self.height // (2 * self.out_height), self.width // (2 * self.out_width))
        return next((factor for factor in _REDUCTIONS if factor <= most), 1)

    def divided(self, factor: int) -> Window:
        """Return the window on an image that was decoded so many times smaller."""
        if factor == 1:
            return self
        edges = self.top, self.left, self.top + self.height, self.left + self.width
        top, left, bottom, right = (round(edge / factor) for edge in edges)
        return Window(top, left, bottom - top, right - left, self.out_height, self.out_width)


Choice = Callable[[int, int], Window]
"""Chooses a window for an image of height x width."""


def centre(height: int, width: int, *, out_height: int, out_width: int) -> Window:
    """Return the largest centred region of the output's proportions: what evaluation sees."""
    scale = max(out_height / height, out_width / width)
    tall, wide = max(1, min(height, round(out_height / scale))), max(1, min(width, round(out_width / scale)))
    return Window((height - tall) // 2, (width - wide) // 2, tall, wide, out_height, out_width)


def whole(height: int, width: int, *, shorter: int | None = None) -> Window:
    """Return the whole image, scaled down until its shorter side is at most ``shorter``; None keeps its size."""
    scale = 1.0 if shorter is None else min(1.0, shorter / min(height, width))
    return Window(0, 0, height, width, max(1, round(height * scale)), max(1, round(width * scale)))


def random_crop(
    height: int,
    width: int,
    *,
    out_height: int,
    out_width: int,
    area: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Window:
    """Return a region of random area and proportions at a random place (Inception's crop, arXiv:1409.4842).

    Args:
        height: of the image
        width: of the image
        out_height: of what the network sees
        out_width: of what the network sees
        area: least and largest share of the image's area
        ratio: least and largest width / height of the region, if the output is square
    """
    least, most = (math.log(bound * out_width / out_height) for bound in ratio)
    for _ in range(_ATTEMPTS):
        target = height * width * random.uniform(*area)
        aspect = math.exp(random.uniform(least, most))
        tall, wide = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
        if 0 < tall <= height and 0 < wide <= width:
            top, left = random.randint(0, height - tall), random.randint(0, width - wide)
            return Window(top, left, tall, wide, out_height, out_width)
    return centre(height, width, out_height=out_height, out_width=out_width)  # an image too long or thin for any of these
