from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD

from fulgurite.callbacks.step_log import StepLog, _size
from tests.classification import loader, make, quiet
from tests.training import RUN, THROUGHPUT, fit, logged

EACH = ("--trainer.log_every_n_steps", "1")


def test_each_row_has_loss_and_rate_of_its_step(here: Path) -> None:
    assert fit(*EACH, "--model.scheduler.warmup", "0.5", epochs=1) == 0
    rows = [row for row in logged(RUN) if "lr" in row]
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert [float(row["lr"]) for row in rows] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.005])
    assert all(float(row["train/loss_step"]) > 0 and row["epoch"] == "0" for row in rows)


def test_one_row_for_a_window_of_accumulation(here: Path) -> None:
    assert fit(*EACH, "--trainer.accumulate_grad_batches", "2", epochs=1) == 0
    rows = [row for row in logged(RUN) if "lr" in row]
    assert [row["step"] for row in rows] == ["0", "1"]
    assert all(1.5 < float(row["train/loss_step"]) < 4 for row in rows)  # of ten classes: about 2.3, and not half of it


def test_throughput_leaves_out_the_first_batch_and_validation(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = [0.0], {"train": 2.0, "val": 50.0}
    monkeypatch.setattr("fulgurite.callbacks.step_log.time.perf_counter", lambda: clock[0])
    task = make()
    step = task._step

    def slow(batch: tuple[Tensor, Tensor], stage: Any) -> Any:
        clock[0] += 1000.0 if clock[0] == 0 else seconds[stage]
        return step(batch, stage)

    monkeypatch.setattr(task, "_step", slow)
    seen: list[dict[str, float]] = []
    monkeypatch.setattr(
        StepLog, "on_train_batch_end", _then(StepLog.on_train_batch_end, lambda log: seen.append(dict(log.latest)))
    )
    quiet(max_epochs=2, log_every_n_steps=1, num_sanity_val_steps=0).fit(task, loader(7), loader(4))
    # Batches of 4 and 3 samples, each in 2 seconds.
    assert [row.get(THROUGHPUT) for row in seen] == [None, 1.5, 2.0, 1.5]


def _then(hook: Any, action: Any) -> Any:
    def both(self: StepLog, *args: Any) -> None:
        hook(self, *args)
        action(self)

    return both


def test_a_task_of_ones_own_need_not_log(here: Path) -> None:
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = make()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.task._step(batch, "val")

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), lr=0.5)

    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(Own(), loader(8))
    (log,) = [callback for callback in trainer.callbacks if isinstance(callback, StepLog)]
    assert log.latest["lr"] == 0.5
    assert log.latest["train/loss_step"] > 0


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 1), lambda x: ["name", x], lambda x: {"image": x}])
def test_size_of_a_batch(wrap: Any) -> None:
    images, _ = next(iter(loader(4)))
    assert _size(wrap(images)) == len(images)
    assert _size(None) == 1
