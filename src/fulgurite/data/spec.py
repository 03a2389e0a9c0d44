"""What the data is, in plain values: the only place for class names, image size and normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from fulgurite.errors import UserError, did_you_mean, name_list

_SEQUENCES: tuple[tuple[str, type], ...] = (
    ("class_names", str),
    ("mean", float),
    ("std", float),
    ("class_counts", int),
    ("background", int),
)
_WIDEST = 200  # characters of a refusal: what is refused may be a stranger's
_LONGEST_SIDE = 16_384  # pixels; more would be a mistake, and too much for any memory
MAX_PIXELS = 178_956_970  # 512 MiB as RGB; PIL, too, refuses from there on


@dataclass(frozen=True)
class DataSpec:
    """Describe a data set to everything that comes after it: task, checkpoint, prediction, export.

    Args:
        class_names: one name per class, in the order of the labels 0..K-1
        channels: 1 (grey) or 3 (RGB)
        height: of the images the network sees, in pixels
        width: of the images the network sees, in pixels
        mean: per channel, of images scaled to 0..1
        std: per channel, of images scaled to 0..1
        kind: what a sample is
        multi_label: whether an image has any number of labels, not exactly one
        class_counts: training images of each class; None where nobody counted
        background: RGB colour, 0..255 each, that shows through where an image is transparent
        max_pixels: refuse to decode an image of more

    Raises:
        UserError: if the values contradict each other
    """

    class_names: tuple[str, ...]
    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: Literal["image"] = "image"
    multi_label: bool = False
    class_counts: tuple[int, ...] | None = None
    background: tuple[int, ...] = (255, 255, 255)
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if isinstance(self.class_names, str):
            raise UserError(f"class_names is '{self.class_names}'; it is a list of names")
        # YAML and checkpoints give lists; a frozen value should compare equal whatever it was made from.
        for name, kind in _SEQUENCES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(kind(value) for value in getattr(self, name)))
        self._check_image()
        self._check_classes()

    def _check_image(self) -> None:
        for name in ("channels", "height", "width", "max_pixels"):
            if not isinstance(getattr(self, name), int):
                raise UserError(f"{name} is {getattr(self, name)!r}; it is a whole number")
        if self.channels not in (1, 3):
            raise UserError(f"channels is {self.channels}; allowed: 1 (grey), 3 (RGB)")
        if not (1 <= self.height <= _LONGEST_SIDE and 1 <= self.width <= _LONGEST_SIDE):
            raise UserError(
                f"the image size is {self.height} x {self.width}; both must be at least 1 pixel, and {_LONGEST_SIDE:,} at most"
            )
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise UserError(
                f"mean has {len(self.mean)} and std {len(self.std)} values; {self.channels} channels need {self.channels} of each"
            )
        if not all(math.isfinite(value) for value in self.mean):
            raise UserError(f"mean is {self.mean}; every value must be a finite number")
        if not all(0 < value < math.inf for value in self.std):
            raise UserError(f"std is {self.std}; every value must be above 0, and finite")
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise UserError(f"background is {list(self.background)}; it is a colour of three values from 0 to 255, [R, G, B]")
        if self.max_pixels < 1:
            raise UserError(f"max_pixels is {self.max_pixels}; it must be at least 1")

    def _check_classes(self) -> None:
        if not self.class_names:
            raise UserError("class_names is empty; there must be at least one class")
        if len(set(self.class_names)) != len(self.class_names):
            twice = sorted({name for name in self.class_names if self.class_names.count(name) > 1})
            raise UserError(f"class names must differ; given more than once: {name_list(twice)}")
        if self.class_counts is not None and len(self.class_counts) != len(self.class_names):
            raise UserError(f"class_counts has {len(self.class_counts)} values for {len(self.class_names)} classes")

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only: what a checkpoint may hold and YAML can write."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataSpec:
        """Make a spec from :meth:`to_dict`'s result.

        Raises:
            UserError: if a key is unknown or missing
        """
        allowed = [field.name for field in fields(cls)]
        for name in values:
            if name not in allowed:
                raise UserError(
                    f"unknown key '{name}' in a data spec{did_you_mean(str(name), allowed)}; allowed: {', '.join(allowed)}"
                )
        missing = [field.name for field in fields(cls) if field.name not in values and field.default is MISSING]
        if missing:
            raise UserError(f"a data spec lacks {name_list(missing)}")
        try:
            return cls(**values)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:  # a number where a list belongs; what is refused
            text = str(error) if isinstance(error, UserError) else f"a data spec holds values of the wrong kind: {error}"
            raise UserError(text[:_WIDEST]) from error


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return both sides of an image size that may be one number.

    Raises:
        UserError: if it is neither one number of pixels nor two
    """
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or min(sides) < 1:
        raise UserError(f"size is {size}; it is one number of pixels, or two: [height, width]")
    return sides[0], sides[1]
