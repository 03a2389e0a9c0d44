"""Keep loader workers alive when a scheduler signals a whole job."""

from __future__ import annotations

import signal
from typing import Any


def outlive_signals(worker: int) -> None:
    """Leave the signals that ask for a stop to the process that trains: it needs its workers until it has saved.

    Schedulers send them to all processes of a job. PyTorch ends a worker that does not end by itself with SIGTERM, so only
    the first one is left alone.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _once)


def _once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
