"""Measuring a loader: what is counted, and that nothing is left behind, not even by Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fulgurite.data import DigitsDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.verbs import loading_speed
from fulgurite.verbs.loading_speed import Speed, measure_speed, settings_kept


class CtrlCDataset(ArrayDataset):
    """Stop the process whose worker this is in, as Ctrl-C does."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if get_worker_info() is not None:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.2)
        return super().__getitems__(indices)


class CtrlC(DigitsDataModule):
    def dataset(self, split: Split) -> ArrayDataset:
        whole = super().dataset(split)
        return CtrlCDataset(whole.images, whole.labels)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass at each look at the clock."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))


def batches_seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def num_bytes(batch: Any) -> int:
        seen.append(batch)
        return 1

    monkeypatch.setattr(loading_speed, "_num_bytes", num_bytes)
    return seen


def test_rate_leaves_out_the_first_batch(clock: None) -> None:
    speed = measure_speed(DigitsDataModule(), 0, None, 3.0)
    assert speed == Speed(0, None, rate=64.0, first_batch=1.0, batch_bytes=64 * (64 + 8))


def test_whole_rounds_of_the_workers_are_counted(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = batches_seen(monkeypatch)
    speed = measure_speed(DigitsDataModule(num_workers=2), 2, 1, 2.5)
    assert (speed.rate, len(seen)) == (64.0, 6)  # two to start, and four where three are enough


def test_short_epochs_follow_each_other(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = batches_seen(monkeypatch)
    data = DigitsDataModule(batch_size=2000, shift=0)  # one batch an epoch
    measure_speed(data, 0, None, 2.0, epoch=7)
    assert len(seen) == 3
    loader = data.train_dataloader()
    for epoch, (_, labels) in enumerate(seen, 7):
        loader.order.set_epoch(epoch)
        assert torch.equal(labels, next(iter(loader))[1])


def test_bytes_of_nested_batches() -> None:
    batch = (torch.zeros(2, 3), [{"boxes": torch.zeros(4, dtype=torch.uint8), "name": "x"}])
    assert loading_speed._num_bytes(batch) == 24 + 4


def test_workers_are_ended_and_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.Process, "kill", lambda self: pytest.fail("killed"))
    assert measure_speed(DigitsDataModule(), 1, 2, 0.05).first_batch > 0
    assert not multiprocessing.active_children()


def test_ctrl_c_ends_workers_and_restores_settings() -> None:
    data = CtrlC()
    with pytest.raises(KeyboardInterrupt), settings_kept(data):
        measure_speed(data, 1, 3, 5.0)
    assert not multiprocessing.active_children()
    assert (data.num_workers, data.prefetch_factor, data.pin_memory) == (None, 2, None)


# PyTorch's half-made iterator complains when it is collected that it has no _workers_status.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def interrupted(self: Any) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(self)
        start(self)

    start = multiprocessing.Process.start
    monkeypatch.setattr(multiprocessing.Process, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as held:  # and with it PyTorch's half-made iterator, as a notebook does
        measure_speed(DigitsDataModule(), 2, 2, 5.0)
    assert started
    assert not multiprocessing.active_children()
    del held


def test_pins_memory_as_a_trainer_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data, own = DigitsDataModule(), DigitsDataModule()
    own.pin_memory = False
    with settings_kept(data), settings_kept(own):
        assert (data.pin_memory, own.pin_memory) == (True, False)
    assert data.pin_memory is None


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (Speed(0, None, 1, 1), "0 workers"),
        (Speed(1, 2, 1, 1), "1 worker, prefetch_factor 2"),
        (Speed(8, 4, 1, 1), "8 workers, prefetch_factor 4"),
    ],
)
def test_a_speed_says_its_setting(speed: Speed, text: str) -> None:
    assert str(speed) == text
