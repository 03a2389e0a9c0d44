"""Keep the last and the best state of a run in ``checkpoints/last.ckpt`` and ``checkpoints/best.ckpt``."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint

from fulgurite.callbacks.best_states import Best, BestStates
from fulgurite.callbacks.finite import not_finite, require_finite
from fulgurite.callbacks.monitor import require_logged, settle_monitor
from fulgurite.callbacks.stop_signals import StopSignals
from fulgurite.console import note
from fulgurite.errors import RunStopped, UserError
from fulgurite.processes import Poll
from fulgurite.recorded import Recorded
from fulgurite.tasks.metrics import Direction


class Checkpoints(Recorded, Checkpoint):
    """Keep the last and the best states of a run.

    They are saved when the next batch starts: by then the validation, plateau step and epoch end of the last one are done,
    one of which Lightning's own resume loses where ModelCheckpoint saves.

    Args:
        monitor: validation metric that decides which state is best; None takes the task's
        mode: whether a larger or a smaller value is better; None takes the task's direction
        keep_best: how many of the best states are kept: ``best.ckpt``, and if it is more than 1, each as ``best-STEP.ckpt``
        every_n_steps: also save ``last.ckpt`` each so many optimizer steps, besides each epoch's end
        every_n_minutes: the same by the clock

    Raises:
        UserError: if a number makes no sense; before the first batch, if the task does not log the metric
    """

    def __init__(
        self,
        *,
        monitor: str | None = None,
        mode: Direction | None = None,
        keep_best: int = 1,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
    ) -> None:
        if keep_best < 1:
            raise UserError(f"checkpoint.keep_best is {keep_best}; it must be at least 1")
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"checkpoint.every_n_steps is {every_n_steps}; it must be at least 1, or null")
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise UserError(f"checkpoint.every_n_minutes is {every_n_minutes}; it must be above 0, or null")
        self.monitor = monitor
        self.mode = mode
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.states = BestStates(keep_best)
        self.save_error: str | None = None
        self._signals = StopSignals()
        self._poll: Poll  # from setup on: by then the processes of the job know each other
        self._saved_step = 0
        self._saved_at = 0.0  # by the monotonic clock
        self._epoch = 0  # of the last batch
        self._begun = self._complete = False
        self._folder = Path()

    @property
    def best(self) -> Best | None:
        """The best validation so far."""
        return self.states.ranked[0] if self.states.ranked else None

    @property
    def last_path(self) -> Path:
        """Where the latest state is."""
        return self._folder / "last.ckpt"

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Settle the metric and its direction, and refuse one that the task does not log."""
        if stage != "fit":
            return
        self._signals.prepare(trainer)
        self._folder = trainer.run_dir / "checkpoints"
        self.states = BestStates(self.states.keep)
        self.save_error = None
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self._begun = self._complete = False
        self._poll = Poll()
        if not trainer.enable_validation:
            self.monitor = None
            note("checkpoints", "no validation: only last.ckpt is kept, at each epoch's end; best means the last")
            return
        self.monitor, self.mode = settle_monitor(self.monitor, self.mode, pl_module)

    def stopped(self, trainer: Any) -> RunStopped:
        """Return the error that ends a run the user stopped, with the command that goes on."""
        if not self._complete and (self.last_path.is_file() or trainer.ckpt_path):
            error = self.save_error
            lost = f"; what came after step {self._saved_step:,} could not be saved: {error}" if error else ""
            return RunStopped(f"at step {trainer.global_step:,}{lost}\ngo on with: {self._go_on(trainer)}")
        complete = f"the training was complete; its state is in {self.last_path}"
        stopped = RunStopped(complete if self._complete else "there was no checkpoint yet")
        if self._complete or self._signals.received in (0, signal.SIGINT):  # else a scheduler is to try again
            stopped.exit_status = 128 + (self._signals.received or signal.SIGINT)
        return stopped

    def _go_on(self, trainer: Any) -> str:
        return str(trainer.record.command_to_go_on(trainer, None if self.last_path.is_file() else trainer.ckpt_path))

    def require_saved(self, trainer: Any) -> None:
        """Refuse to call a run done whose last state is not on the disk.

        Raises:
            UserError: if it could not be saved
        """
        if self.save_error:
            on = f"\nonce that is mended, go on with: {self._go_on(trainer)}" if self.last_path.is_file() else ""
            raise UserError(f"the last checkpoint could not be saved: {self.save_error}{on}")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Bring the best states along into a new folder, and put right what a kill between two files left in this one."""
        if self.states.ranked:
            self.states.bring_along(trainer.resume_from, self._saved_step, self._folder, write=trainer.is_global_zero)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take the signals that ask for a stop; Lightning has taken them just before."""
        self._signals.install(trainer)
        self._begun = True

    on_sanity_check_start = on_train_start

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Give the signals their usual meaning back."""
        self._signals.restore()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note whether this state is among the best so far; it is saved when the next batch starts."""
        if self.monitor is None or self.mode is None or trainer.state.fn != "fit":
            return
        require_logged(self.monitor, trainer.callback_metrics, pl_module)  # for a task that does not declare what it logs
        if not trainer.sanity_checking:
            score = float(trainer.callback_metrics[self.monitor])
            self.states.add(Best(score, trainer.current_epoch, trainer.global_step), self.mode)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save the state between two optimizer steps if it is due."""
        self._save_if_due(trainer, batch_idx)
        self._epoch = trainer.current_epoch

    def _save_if_due(self, trainer: Any, batch_idx: int) -> None:
        step, unsaved = trainer.global_step, self.states.unsaved
        if batch_idx % trainer.accumulate_grad_batches:
            # Nobody can go on exactly from here: the gradients summed up so far are in no checkpoint.
            if unsaved:
                self._save(trainer, self.states.path(unsaved, self._folder))
            return
        waited = self.every_n_minutes and time.monotonic() - self._saved_at > 60 * self.every_n_minutes
        stop, is_time = divmod(self._poll.ask(2 * self._signals.received + bool(waited)), 2)
        due = batch_idx == 0 or stop or is_time or (self.every_n_steps and step % self.every_n_steps == 0)
        if (due or unsaved) and step != self._saved_step:
            self._save(trainer, self.last_path)
        if stop:
            raise self.stopped(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the final state."""
        self._complete = True
        self._save(trainer, self.last_path)
        if self.monitor and self.best is None:
            note("checkpoints", f"{self.monitor} gave no score: only last.ckpt is kept; best means the last")

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what an error would lose: as usual if it came between two steps, such as from a loader, else aside.

        With several processes nothing is saved: the others may not have come to the same error.
        """
        self.teardown(trainer, pl_module, "fit")  # Lightning calls none after an exception
        nothing_new = not self._begun or self._complete or trainer.global_step == self._saved_step
        wanted = isinstance(exception, Exception) and not isinstance(exception, RunStopped)
        if nothing_new or trainer.world_size > 1 or not wanted or not_finite(pl_module):
            return
        loop = trainer.fit_loop.epoch_loop
        batches = loop.batch_progress.current
        between = trainer.training and batches.ready == batches.completed < trainer.num_training_batches
        if between and batches.ready % trainer.accumulate_grad_batches == 0 and loop._batches_that_stepped == trainer.global_step:
            loop.batch_progress.increment_ready()  # as if the next batch had started, which is where states are saved
            self._save(trainer, self.last_path)
            note("checkpoint", f"saved at step {trainer.global_step:,}; go on with: {self._go_on(trainer)}")
        else:
            self._save(trainer, self._folder / "exception.ckpt")
            note("checkpoint", f"the state at the error is in {self._folder / 'exception.ckpt'}")

    def _save(self, trainer: Any, path: Path) -> None:
        require_finite(trainer, self.last_path)
        before = self._saved_step, self.states.saved
        self._saved_step, self.states.saved = trainer.global_step, list(self.states.ranked)  # first: they are part of it
        self._saved_at = time.monotonic()
        self.save_error = trainer.strategy.broadcast(self._write(trainer, path, before[1]))
        if self.save_error:
            # A run must not die at step 90,000 of a full disk; it says so now and fails at its end if it stays so.
            note("warning", f"could not save {path} ({self.save_error}); the previous one is kept and the run goes on")
            self._saved_step, self.states.saved = before
            self.states.forget_unsaved()

    def _write(self, trainer: Any, path: Path, saved_before: list[Best]) -> str | None:
        """Return what went wrong, if anything."""
        try:
            for logger in trainer.loggers:
                logger.save()  # what is logged up to here must not be lost by a kill from which the run goes on here
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            trainer.strategy.barrier()  # the other processes wait at the one that the exception left out
            return error.strerror or str(error)
        try:
            if self.states.ranked != saved_before and trainer.is_global_zero:
                self.states.place(path, saved_before)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Name the epoch that the state comes from, for people; Lightning names the one that comes next."""
        checkpoint["epoch"] = self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know."""
        return {
            "monitor": self.monitor,
            "mode": self.mode,
            "best": self.states.state_dict(),
            "saved_step": self._saved_step,
            "complete": self._complete,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result; a score of another metric says nothing about this run's best."""
        if self.monitor is None:  # nothing is trained, or nothing validated
            return
        same = (state_dict["monitor"], state_dict["mode"]) == (self.monitor, self.mode)
        if same:
            self.states.load_state_dict(state_dict["best"])
        elif state_dict["best"]:
            note("checkpoints", f"the best so far, by {state_dict['monitor']}, does not count by {self.monitor}")
        self._saved_step = state_dict["saved_step"]
