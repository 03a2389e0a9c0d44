"""Tell the user, once and from one process, what was chosen and why; take Ctrl-C for what it is."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fulgurite.errors import shown

_WIDEST = 2000  # characters of a line

_EXPECTED_WARNINGS = (
    # The data modules choose the number of workers and say why.
    "The '.*_dataloader' does not have many workers",
    # Metrics over the epoch are logged whatever its length.
    "The number of training batches .* is smaller than the logging interval",
    # sync_dist would average the processes' means, whatever their shares; tasks log what torchmetrics has added up.
    "It is recommended to use `self.log\\(.*, sync_dist=True\\)`",
    # The strides of a kernel over one channel can be read in two ways, so DDP copies its gradient: a few numbers.
    "Grad strides do not match bucket view strides",
    # What differs from the checkpoint's run is printed, setting by setting.
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
    # Lightning 2.6.6 with torch 2.13 and newer; its own code, in lightning/pytorch/utilities/_pytree.py.
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
)


def is_rank_zero() -> bool:
    """Return whether this is the first process of the job, also before the process group exists."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"))


def note(topic: str, text: str) -> None:
    """Print ``topic  text``, on rank zero only."""
    if is_rank_zero():
        print(f"{topic:<12}{shown(text, _WIDEST)}", flush=True)


def report_metrics(verb: str, results: list[Any]) -> list[Any]:
    """Print what an evaluation gave, and return it."""
    for metrics in results:
        note(verb, "  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))
    return results


def printable(text: str) -> str:
    """Return the lines of a text with nothing in them that steers the terminal: it may have come from a stranger's file."""
    return "\n".join(shown(line, _WIDEST) for line in text.split("\n"))


@contextmanager
def ctrl_c() -> Iterator[None]:
    """Turn the SystemExit that Lightning makes of Ctrl-C or SIGTERM into a KeyboardInterrupt; let Ctrl-C work again."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt) and type(error).__name__ != "SIGTERMException":
            raise
        signal.signal(signal.SIGINT, handler)  # Lightning leaves it ignored
        raise KeyboardInterrupt from None


def quiet_lightning() -> None:
    """Leave out what Lightning says of its choices: devices and tips by INFO, and the warnings listed above."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
