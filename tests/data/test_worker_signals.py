from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from typing import Any

from fulgurite.data.worker_signals import outlive_signals


def work(ready: Any) -> None:
    outlive_signals(0)
    ready.set()
    time.sleep(60)


def test_worker_outlives_what_is_meant_for_the_whole_job_once() -> None:
    context = mp.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=work, args=(ready,))
    worker.start()
    assert ready.wait(10)
    assert worker.pid is not None
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        os.kill(worker.pid, number)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()  # by PyTorch, when it does not end by itself
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM
