"""What a classifier says of one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """The likeliest class, its probability, and the likeliest few as (label, probability)."""

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]

    @classmethod
    def from_top(cls, probabilities: Sequence[float], indices: Sequence[int], class_names: Sequence[str]) -> Prediction:
        """Name the classes of a top-k result, the likeliest first."""
        top = tuple((class_names[index], probability) for index, probability in zip(indices, probabilities, strict=True))
        return cls(label=top[0][0], probability=top[0][1], top=top)
