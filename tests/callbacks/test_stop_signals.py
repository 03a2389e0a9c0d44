from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from fulgurite.callbacks.stop_signals import SIGNALS, StopSignals


def trainer(environment: Any = None) -> Any:
    loop = SimpleNamespace(_broadcast_sigterm_tensor=None)
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), strategy=SimpleNamespace(cluster_environment=environment))


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = [signal.getsignal(number) for number in SIGNALS]
    signals = StopSignals()
    signals.install(trainer())
    yield signals
    signals.restore()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_remembered(signals: StopSignals, number: signal.Signals) -> None:
    assert signals.received == 0
    os.kill(os.getpid(), number)
    assert signals.received == number


def test_second_ctrl_c_stops_at_once(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.6)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_scheduler_may_send_more_than_one(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGUSR1


def test_wish_of_an_earlier_run_is_forgotten(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signals.restore()
    signals.install(trainer())
    assert signals.received == 0


def test_other_threads_leave_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: StopSignals().install(trainer()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_requeueing_is_left_to_the_job_script() -> None:
    environment = SLURMEnvironment(auto_requeue=True)
    StopSignals().prepare(trainer(environment))
    assert environment.auto_requeue is False
    StopSignals().prepare(trainer(LightningEnvironment()))
