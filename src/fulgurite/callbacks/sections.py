"""The callbacks that are always there, each with a section of the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback

from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.ema import EMA
from fulgurite.callbacks.initial_weights import InitialWeights

SECTIONS: dict[str, type[Callback]] = {"checkpoint": Checkpoints, "ema": EMA, "weights": InitialWeights}


def with_defaults(given: Callback | list[Callback] | None, *, checkpoints: bool) -> list[Callback]:
    """Add what is missing of the callbacks that are always there, with their default settings.

    Args:
        given: by the user
        checkpoints: whether any are written
    """
    given = [given] if isinstance(given, Callback) else list(given or [])
    defaults = [kind() for kind in SECTIONS.values() if not any(isinstance(callback, kind) for callback in given)]
    wanted = [callback for callback in [*given, *defaults] if checkpoints or not isinstance(callback, Checkpoints)]
    # Whatever else looks at the weights when it is set up is to find those of the file.
    return sorted(wanted, key=lambda callback: not isinstance(callback, InitialWeights))


def sections_of(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks that have a section, by its name."""
    names = {kind: name for name, kind in SECTIONS.items()}
    found = ((name, callback) for callback in callbacks for kind, name in names.items() if isinstance(callback, kind))
    return dict(found)
