from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler

from fulgurite.callbacks.step_log import StepLog
from fulgurite.step_cost import NoProfiler
from tests.classification import loader, make, quiet


class Counting(Callback):
    """Count the batches."""

    count = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.count += 1


def test_hooks_of_ones_own_are_called_wherever_they_stand_and_empty_ones_of_this_project_are_not(here: Path) -> None:
    own, seen = Counting(), []
    of_instance = LambdaCallback(on_train_batch_end=lambda *_: seen.append(1))
    trainer = quiet(max_epochs=1, callbacks=[own, of_instance])
    trainer.fit(make(), loader(8), loader(4))
    assert own.count == len(seen) == 2
    own.on_before_zero_grad(trainer, make(), None)  # type: ignore[arg-type]
    (log,) = [callback for callback in trainer.callbacks if isinstance(callback, StepLog)]
    assert log.on_before_zero_grad is None


def test_a_profiler_that_is_asked_for_measures(here: Path) -> None:
    plain: Any = quiet()
    assert type(plain.profiler) is NoProfiler
    profiler = SimpleProfiler()
    quiet(max_epochs=1, profiler=profiler).fit(make(), loader(8), loader(4))
    assert profiler.recorded_durations["run_training_batch"]


def test_a_task_knows_the_hook_it_is_in_and_its_submodules(here: Path) -> None:
    task = make()
    task._current_fx_name = "training_step"
    assert task._current_fx_name == "training_step"
    assert "network" in dict(task.named_children())  # assigned the usual way
