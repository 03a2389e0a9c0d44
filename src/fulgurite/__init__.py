"""Fulgurite: a PyTorch Lightning project template that is also a working program."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulgurite.trainer import Trainer as Trainer
    from fulgurite.verbs.load import load as load

__version__ = version("fulgurite")
__all__ = ["Trainer", "__version__", "load"]


def __getattr__(name: str) -> Any:
    # Importing Lightning takes seconds, and `fulgurite --version` needs none of it.
    if name == "load":
        from fulgurite.verbs.load import load

        return load
    if name == "Trainer":
        from fulgurite.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'fulgurite' has no attribute {name!r}")
