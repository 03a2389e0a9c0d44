"""Which of a run's states are its best, and the files that hold them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulgurite.checkpoint import damage, replace_by_link
from fulgurite.tasks.metrics import Direction


@dataclass(frozen=True)
class Best:
    """A validation: its score, and after which epochs and optimizer steps."""

    score: float
    epoch: int
    step: int


class BestStates:
    """The best states so far: ``best.ckpt`` and, if more than one is kept, each as ``best-STEP.ckpt``.

    Args:
        keep: how many
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.ranked: list[Best] = []
        """The best first; those not in a file yet included."""
        self.saved: list[Best] = []
        """Those in files."""

    @property
    def unsaved(self) -> Best | None:
        """The state that is among the best and in no file yet: the one that was validated last."""
        return next((state for state in self.ranked if state not in self.saved), None)

    def add(self, state: Best, mode: Direction) -> None:
        """Rank a state; a score that is no number never counts, and of equal ones the first is the better."""
        if math.isnan(state.score):
            return
        sign = -1 if mode == "max" else 1
        self.ranked = sorted([*self.ranked, state], key=lambda one: (sign * one.score, one.step))[: self.keep]

    def forget_unsaved(self) -> None:
        """Go back to what is in files: the state behind a better score could not be saved."""
        self.ranked = list(self.saved)

    def path(self, state: Best, folder: Path) -> Path:
        """Return where a state is kept."""
        return folder / (f"best-{state.step:06d}.ckpt" if self.keep > 1 else "best.ckpt")

    def place(self, saved_in: Path, before: list[Best]) -> None:
        """Give the state in a file its name among the best, and remove what is no longer one of them.

        Args:
            saved_in: the file that has just been written, in the folder of all
            before: those that were in files until now

        Raises:
            OSError: if that cannot be done
        """
        folder = saved_in.parent
        new = next(state for state in self.ranked if state not in before)
        for target in dict.fromkeys([self.path(new, folder), *([folder / "best.ckpt"] if new == self.ranked[0] else [])]):
            if target != saved_in:
                replace_by_link(saved_in, target)
        dropped = [path for state in before if state not in self.ranked and (path := self.path(state, folder)).is_file()]
        # Reading the new file costs less than writing it did; an old one must not go before the new one is known to be whole.
        if self.keep > 1 and dropped and damage(saved_in) is None:
            for path in dropped:
                path.unlink()

    def bring_along(self, resumed_from: Path, step: int, folder: Path, *, write: bool) -> None:
        """Find the files of a resumed run's best states and give them their names in this run's folder.

        Args:
            resumed_from: the checkpoint that the run goes on from
            step: of its state
            folder: of this run's checkpoints
            write: whether this process does it; each forgets those whose file is gone
        """
        found: dict[Best, Path] = {}
        for rank, state in enumerate(self.ranked[: self.keep]):
            # Stopped between its two files, a run has its best state in the checkpoint itself.
            candidates = [resumed_from] if state.step == step else [resumed_from.with_name(f"best-{state.step:06d}.ckpt")]
            if rank == 0 and state.step != step:
                candidates.append(resumed_from.with_name("best.ckpt"))
            if file := next((path for path in candidates if path.is_file()), None):
                found[state] = file
        self.ranked = list(found)
        self.saved = list(found)
        if not write:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for state, file in reversed(found.items()):  # the best one last: its file may be another's source
            for target in dict.fromkeys([self.path(state, folder), *([folder / "best.ckpt"] if state == self.ranked[0] else [])]):
                if target != file:
                    replace_by_link(file, target)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return plain values."""
        return [asdict(state) for state in self.ranked]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take :meth:`state_dict`'s result."""
        self.ranked = [Best(**state) for state in states]
        self.saved = list(self.ranked)
