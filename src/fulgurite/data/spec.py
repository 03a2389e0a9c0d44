"""What the data is, in plain values: the only place for class names, image size and normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from fulgurite.errors import UserError, did_you_mean, name_list


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

    def __post_init__(self) -> None:
        if isinstance(self.class_names, str):
            raise UserError(f"class_names is '{self.class_names}'; it is a list of names")
        # YAML and checkpoints give lists; a frozen value should compare equal whatever it was made from.
        for name, kind in (("class_names", str), ("mean", float), ("std", float)):
            object.__setattr__(self, name, tuple(kind(value) for value in getattr(self, name)))
        for name in ("channels", "height", "width"):
            if not isinstance(getattr(self, name), int):
                raise UserError(f"{name} is {getattr(self, name)!r}; it is a whole number")
        if self.channels not in (1, 3):
            raise UserError(f"channels is {self.channels}; allowed: 1 (grey), 3 (RGB)")
        if self.height < 1 or self.width < 1:
            raise UserError(f"the image size is {self.height} x {self.width}; both must be at least 1 pixel")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise UserError(
                f"mean has {len(self.mean)} and std {len(self.std)} values; {self.channels} channels need {self.channels} of each"
            )
        if not all(math.isfinite(value) for value in self.mean):
            raise UserError(f"mean is {self.mean}; every value must be a finite number")
        if not all(0 < value < math.inf for value in self.std):
            raise UserError(f"std is {self.std}; every value must be above 0, and finite")
        if not self.class_names:
            raise UserError("class_names is empty; there must be at least one class")
        if len(set(self.class_names)) != len(self.class_names):
            twice = sorted({name for name in self.class_names if self.class_names.count(name) > 1})
            raise UserError(f"class names must differ; given more than once: {name_list(twice)}")

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
                    f"unknown key '{name}' in a data spec{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
                )
        missing = [name for name in allowed if name not in values and name != "kind"]
        if missing:
            raise UserError(f"a data spec lacks {name_list(missing)}")
        return cls(**values)
