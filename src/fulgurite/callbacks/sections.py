"""The callbacks that are always there, each with a section of the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ProgressBar

from fulgurite.callbacks.accumulation import ShortWindow
from fulgurite.callbacks.activation_checkpointing import ActivationCheckpointing
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.compiling import Compile
from fulgurite.callbacks.ema import EMA
from fulgurite.callbacks.freeze import Freeze
from fulgurite.callbacks.initial_weights import InitialWeights
from fulgurite.callbacks.overrides import Overrides
from fulgurite.callbacks.progress import Progress
from fulgurite.callbacks.step_log import StepLog
from fulgurite.callbacks.unused_parameters import UnusedParameters
from fulgurite.errors import UserError

SECTIONS: dict[str, type[Callback]] = {
    "checkpoint": Checkpoints,
    "ema": EMA,
    "weights": InitialWeights,
    "freeze": Freeze,
    "compile": Compile,
    "activation_checkpointing": ActivationCheckpointing,
}


def all_callbacks(given: Callback | list[Callback] | None, *own: Callback, checkpoints: bool, progress: bool) -> list[Callback]:
    """Add what is missing of the callbacks that are always there, with their default settings.

    Args:
        given: by the user
        own: of the trainer
        checkpoints: whether any are written
        progress: whether it is shown

    Raises:
        UserError: if a callback does not go with the others
    """
    given = [given] if isinstance(given, Callback) else list(given or [])
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in given):
        raise UserError(
            "GradientAccumulationScheduler changes the number of batches in a step from epoch to epoch, which neither schedules "
            "nor resuming can go by: set trainer.accumulate_grad_batches"
        )
    given = [*own, Overrides(), ShortWindow(), UnusedParameters(), StepLog(), *given]
    if progress and not any(isinstance(callback, ProgressBar) for callback in given):
        given.append(Progress())
    defaults = [kind() for kind in SECTIONS.values() if not any(isinstance(callback, kind) for callback in given)]
    wanted = [callback for callback in [*given, *defaults] if checkpoints or not isinstance(callback, Checkpoints)]
    # Whatever else looks at the weights when it is set up is to find those of the file.
    return sorted(wanted, key=lambda callback: not isinstance(callback, InitialWeights))


def sections_of(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks that have a section, by its name."""
    names = {kind: name for name, kind in SECTIONS.items()}
    found = ((name, callback) for callback in callbacks for kind, name in names.items() if isinstance(callback, kind))
    return dict(found)
