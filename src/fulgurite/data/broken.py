"""Samples that cannot be read: told from those that can, counted over a run, and limited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from fulgurite.console import note
from fulgurite.errors import UserError, name_list

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Broken:
    """A sample that cannot be read, and why."""

    index: int
    reason: str


class Incomplete(NamedTuple):
    """A batch, None if nothing of it could be read, and the samples that are missing in it."""

    batch: Any
    broken: list[Broken]


class Skipped:
    """Count the samples that could not be read, over all epochs of a run.

    Args:
        split: named in what is printed
        most: share of the split's samples from which on the run is refused
    """

    def __init__(self, split: str, most: float) -> None:
        self.split = split
        self.most = most
        self.reasons: dict[int, str] = {}
        self._told = 0

    def add(self, broken: Sequence[Broken], samples: int, *, is_share: bool = False) -> None:
        """Remember broken samples.

        Args:
            broken: the samples
            samples: that were looked at
            is_share: whether other processes look at others; one broken sample is then no measure of the whole

        Raises:
            UserError: if there are too many
        """
        self.reasons |= {one.index: one.reason for one in broken}
        if len(self.reasons) > max(self.most * samples, int(is_share)):
            self.refuse(samples)

    def refuse(self, samples: int) -> NoReturn:
        """Say that there are too many.

        Raises:
            UserError: always
        """
        raise UserError(
            f"{len(self.reasons)} of {samples:,} images of the {self.split} split cannot be read; on_error: skip allows "
            f"{self.most:.1%} (max_broken), and not all\n{self._listing()}\n"
            "fulgurite check-data names them all in its report.json"
        )

    def tell(self) -> None:
        """Print what was added since the last time."""
        if len(self.reasons) > self._told:
            note("skipped", f"{len(self.reasons)} images of the {self.split} split cannot be read: {self._listing()}")
            self._told = len(self.reasons)

    def _listing(self) -> str:
        return name_list((" ".join(reason.splitlines()) for reason in self.reasons.values()), limit=5)
