"""Take Ctrl-C and a scheduler's signals as a wish to stop between two steps, in all processes of a job at the same one."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_AT_ONCE = 0.5  # seconds


class StopSignals:
    """Remember which signal asked this process to stop; a second Ctrl-C stops it at once.

    SIGINT is Ctrl-C. SIGTERM and SIGUSR1 are what schedulers send before they kill: SLURM with ``--signal``, Kubernetes,
    torchrun.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the signal, or 0."""
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def prepare(self, trainer: Any) -> None:
        """Keep Lightning from answering SLURM's signal by a checkpoint of its own, which its next start would take for ours."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False

    def install(self, trainer: Any) -> None:
        """Take the signals from Lightning, whose own handlers are made for SLURM alone, and wait for other processes.

        Lightning 2.6.6 exchanges what its handler has seen before each batch, and reads the result back from the device.
        """
        if self._previous_handlers:
            return
        self.received = 0
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        if threading.current_thread() is threading.main_thread():  # Python allows it there alone
            for number in SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Give the signals their usual meaning back."""
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.received:
            # A scheduler may follow one signal by another, and torchrun passes on the Ctrl-C that the terminal has sent already.
            if number == signal.SIGINT and time.monotonic() - self._received_at > _AT_ONCE:
                raise KeyboardInterrupt
            return
        self.received, self._received_at = number, time.monotonic()
        # Not by print(): the signal may have come in the middle of one, which Python refuses to enter twice.
        os.write(2, b"stopping after this step (Ctrl-C again stops at once)\n")
