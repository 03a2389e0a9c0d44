"""Turn the errors of the libraries that a user can mend into a few lines."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from fulgurite.errors import UserError, shown

_MOST_LINES = 7  # and one of our own
_WIDEST = 200
_NO_GPU = (
    "trainer.accelerator is gpu, and PyTorch finds no GPU that it can use\n"
    "fulgurite doctor says why; --trainer.accelerator cpu does without"
)
# Whose checks of arguments word what the user gave.
_LIBRARIES = ("lightning.pytorch", "lightning.fabric", "torch.optim", "torch.nn", "torch.utils.data", "torchvision")
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise UserError for what the user can mend; let our own faults through with their traceback."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith("Caught "):
            raise
        # A DataLoader hands over what its worker raised with the worker's traceback for a text.
        raise UserError(str(error).rpartition("Error: ")[2].strip()) from error
    except (ArgumentError, MisconfigurationException) as error:
        raise UserError(_mendable(str(error)) or shorten(str(error))) from error
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise UserError(f"cannot use {error.filename or 'the disk'}: {error.strerror}") from error
    except (RuntimeError, KeyError) as error:
        text = _mendable(str(error)) or _while_restoring(error)
        if text is None:
            raise
        raise UserError(text) from error
    except (AttributeError, IndexError, ArithmeticError, ValueError, TypeError) as error:
        inner = _user_error_within(error)
        if inner is not None:
            raise inner from inner.__cause__
        if text := _while_restoring(error):
            raise UserError(text) from error
        library = _refusing_library(error) if isinstance(error, ValueError | TypeError) else None
        if library is None:
            raise
        raise UserError(f"{shorten(str(error))}\nrefused by {library}; --debug shows where") from error


@contextmanager
def restore_errors(trainer: Any) -> Iterator[None]:
    """Raise UserError for what breaks on the state in a checkpoint; what breaks in the steps of a run keeps its traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if trainer.resume_from is None or trainer.record.has_trained or not _is_of_restored_state(error):
            raise
        what = f"{type(error).__name__}: {str(error)[:_WIDEST]}"
        raise UserError(f"cannot go on from {trainer.resume_from}: {what}\n--debug shows where") from error


@contextmanager
def build_errors(source: str | None) -> Iterator[None]:
    """Raise UserError for whatever keeps from being built what a checkpoint names, if there is one."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if source is None:
            raise
        text = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        raise UserError(
            f"what {source} names cannot be built: {type(error).__name__}: {shown(text.strip())}\n--debug shows where"
        ) from error


def require_accelerator(trainer: Any) -> None:
    """Refuse a trainer's settings that ask for a GPU where there is none, as Lightning would later.

    Raises:
        UserError: with what to do
    """
    wanted = trainer.get("accelerator") if isinstance(trainer, dict) else None
    if wanted in ("gpu", "cuda") and not (CUDAAccelerator.is_available() or (wanted == "gpu" and MPSAccelerator.is_available())):
        raise UserError(_NO_GPU)


def _is_of_restored_state(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    in_a_step = any(frame.name == "advance" and frame.filename.endswith("training_epoch_loop.py") for frame in frames)
    # The state of an optimizer or a schedule is looked at in the first step.
    last = frames[-1].filename.replace("\\", "/")
    return not in_a_step or "/torch/optim/" in last or last.endswith("/tasks/schedules.py")


def _mendable(text: str) -> str | None:
    """Word an error of these libraries that does not say what to do; None where it is none, or says it well."""
    if "No supported gpu backend" in text:
        return _NO_GPU
    if "Error(s) in loading state_dict" in text:
        return "the checkpoint's weights do not fit this network\n" + shorten(text.partition("\n")[2], 5)
    if "Early stopping conditioned on metric" in text:
        return shorten(text)
    if "You restored a checkpoint with current_epoch" in text:
        return f"{shorten(text)}\nepochs are counted over the whole run: take a larger trainer.max_epochs"
    if "Connection closed by peer" in text or "Connection reset by peer" in text:
        return "another process of this job ended; it said why above or below"
    if "restore optimizer state" in text or "restore learning rate scheduler state" in text:
        return "the checkpoint holds weights alone, so that no training can go on from it"
    return None


def _user_error_within(error: BaseException | None) -> UserError | None:
    # jsonargparse wraps what a class raises in an error of its own.
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def _while_restoring(error: Exception) -> str | None:
    """Word an error that a part of a checkpoint caused which is not what whoever takes it over expects."""
    if not any("checkpoint_connector" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return None
    return f"the checkpoint cannot be restored: {type(error).__name__}: {shorten(str(error), 1)}\n--debug shows where"


def _refusing_library(error: Exception) -> str | None:
    """Name the library that checked an argument and raised; a call that broke inside one is a fault of ours."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if not (last.line or "").startswith(f"raise {type(error).__name__}("):
        return None
    return next((name for name in _LIBRARIES if f"/{name.replace('.', '/')}/" in last.filename.replace("\\", "/")), None)


def shorten(text: str, most: int = _MOST_LINES) -> str:
    """Keep what a person reads of a library's message: its first lines, without dumps of whole objects."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "Given value" not in line]
    lines = [line if len(line) <= _WIDEST else line[: _WIDEST - 4] + " ..." for line in lines]
    return "\n".join(lines[:most])
