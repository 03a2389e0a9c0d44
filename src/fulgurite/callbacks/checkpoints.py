"""Keep the last and the best state of a run in ``checkpoints/last.ckpt`` and ``checkpoints/best.ckpt``."""

from __future__ import annotations

import math
import os
import shlex
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint

from fulgurite.checkpoint import replace_by_link
from fulgurite.console import note
from fulgurite.errors import RunStopped, UserError, did_you_mean
from fulgurite.trust import trust_flags

Direction = Literal["min", "max"]


@dataclass(frozen=True)
class Best:
    """The best validation so far: its score, and after which epochs and optimizer steps."""

    score: float
    epoch: int
    step: int


class Checkpoints(Checkpoint):
    """Save when the next batch starts: by then the validation, plateau step and epoch end of the last one are done.

    Lightning's ModelCheckpoint saves inside a step or epoch end, where its own resume loses one or the other, and leaves
    ``last.ckpt`` behind when the score does not improve.

    Args:
        monitor: validation metric that decides which state is best; None takes the task's
        mode: whether a larger or a smaller value is better; None takes the task's direction
        every_n_steps: also save ``last.ckpt`` each so many optimizer steps, besides each epoch's end

    Raises:
        UserError: before the first batch, if the task does not log the metric
    """

    def __init__(self, *, monitor: str | None = None, mode: Direction | None = None, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"checkpoint.every_n_steps is {every_n_steps}; it must be at least 1, or null")
        self.monitor = monitor
        self.mode = mode
        self.every_n_steps = every_n_steps
        self.best: Best | None = None
        self.save_error: str | None = None
        self._saved_best: Best | None = None  # of the state in best.ckpt
        self._saved_step = 0
        self._epoch = 0  # of the last batch
        self._stop = 0  # the number of the signal that asks for it
        self._complete = False
        self._previous_handlers: dict[int, Any] = {}
        self._folder = Path()

    @property
    def last_path(self) -> Path:
        """Where the latest state is."""
        return self._folder / "last.ckpt"

    @property
    def best_path(self) -> Path:
        """Where the best state is, once validation has run."""
        return self._folder / "best.ckpt"

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Settle the metric and its direction, and refuse one that the task does not log."""
        if stage != "fit":
            return
        self._folder = trainer.run_dir / "checkpoints"
        self.best = self._saved_best = self.save_error = None
        self._saved_step, self._stop, self._complete = trainer.global_step, 0, False
        if not trainer.enable_validation:
            self.monitor = None
            note("checkpoints", "no validation: only last.ckpt is kept, at each epoch's end; best means the last")
            return
        directions: dict[str, Direction] = getattr(pl_module, "directions", {})
        self.monitor = self.monitor or getattr(pl_module, "monitor", None)
        if self.monitor is None:
            raise UserError(
                f"{type(pl_module).__name__} declares no metric to monitor: set checkpoint.monitor and checkpoint.mode"
            )
        if directions:
            self._require_logged(directions, pl_module)
        self.mode = self.mode or directions.get(self.monitor)
        if self.mode is None:
            raise UserError(f"the direction of '{self.monitor}' is not known: set checkpoint.mode to min or max")

    def _require_logged(self, names: Any, pl_module: LightningModule) -> None:
        if self.monitor is not None and self.monitor not in names:
            raise UserError(
                f"checkpoint.monitor is '{self.monitor}', which {type(pl_module).__name__} does not log in validation"
                f"{did_you_mean(self.monitor, names)}\nallowed: {', '.join(names) or 'nothing, as it logs nothing'}"
            )

    def stopped(self, trainer: Any) -> RunStopped:
        """Return the error that ends a run the user stopped, with the command that goes on."""
        place = self.last_path if self.last_path.is_file() else trainer.ckpt_path
        if place is None:
            stopped = RunStopped("there was no checkpoint yet")
        elif self._complete:
            stopped = RunStopped(f"the training was complete; its state is in {place}")
        else:
            error = self.save_error
            lost = f"; what came after step {self._saved_step:,} could not be saved: {error}" if error else ""
            stopped = RunStopped(f"at step {trainer.global_step:,}{lost}\ngo on with: {self.command_to_go_on(trainer, place)}")
        stopped.exit_status = 128 + (self._stop or signal.SIGINT)
        return stopped

    def require_saved(self, trainer: Any) -> None:
        """Refuse to call a run done whose last state is not on the disk.

        Raises:
            UserError: if it could not be saved
        """
        if self.save_error:
            command = self.command_to_go_on(trainer, self.last_path)
            on = f"\nonce that is mended, go on with: {command}" if self.last_path.is_file() else ""
            raise UserError(f"the last checkpoint could not be saved: {self.save_error}{on}")

    def command_to_go_on(self, trainer: Any, place: str | Path) -> str:
        """Return the command that continues from a checkpoint into the same folder of runs."""
        elsewhere = ["--trainer.runs_dir", str(trainer.runs_dir)] if trainer.runs_dir != Path("runs") else []
        return shlex.join(["fulgurite", "fit", "--ckpt_path", str(place), *elsewhere, *trust_flags(trainer.record.config)])

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take Ctrl-C and SIGTERM as a wish to stop after the step; bring the best state along into a new folder."""
        if self.best is not None:
            # Stopped between its two files, a run has its best state in the checkpoint itself.
            resumed_from = Path(trainer.ckpt_path)
            earlier = resumed_from if self.best.step == trainer.global_step else resumed_from.with_name("best.ckpt")
            if not earlier.is_file():
                self.best = self._saved_best = None
            elif trainer.is_global_zero:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_by_link(earlier, self.best_path)
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            # With several processes each would stop at another step; there a signal ends the run at once.
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Give the signals their usual meaning back."""
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals their usual meaning back: Lightning calls no teardown after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = number
        # Not by print(): the signal may have come in the middle of one, which Python refuses to enter twice.
        os.write(2, b"stopping after this step (Ctrl-C again stops at once)\n")

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note whether this state is the best so far; it is saved when the next batch starts."""
        if self.monitor is None or trainer.state.fn != "fit":
            return
        self._require_logged(trainer.callback_metrics, pl_module)  # for a task that does not declare what it logs
        if trainer.sanity_checking:
            return
        score = float(trainer.callback_metrics[self.monitor])
        better = self.best is None or (score > self.best.score if self.mode == "max" else score < self.best.score)
        if better and not math.isnan(score):
            self.best = Best(score, trainer.current_epoch, trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save the state between two optimizer steps if it is due."""
        self._save_if_due(trainer, batch_idx)
        self._epoch = trainer.current_epoch

    def _save_if_due(self, trainer: Any, batch_idx: int) -> None:
        step, is_better = trainer.global_step, self.best != self._saved_best
        if batch_idx % trainer.accumulate_grad_batches:
            # Nobody can go on exactly from here: the gradients summed up so far are in no checkpoint.
            if is_better:
                self._save(trainer, self.best_path)
            return
        due = batch_idx == 0 or self._stop or (self.every_n_steps and step % self.every_n_steps == 0)
        if (due or is_better) and step != self._saved_step:
            self._save(trainer, self.last_path)
        if self._stop:
            raise self.stopped(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Save the final state."""
        self._save(trainer, self.last_path)
        self._complete = True
        if self.monitor and self.best is None:
            note("checkpoints", f"{self.monitor} gave no score: only last.ckpt is kept; best means the last")

    def _save(self, trainer: Any, path: Path) -> None:
        before = self._saved_step, self._saved_best
        also_best = path == self.last_path and self.best != self._saved_best
        self._saved_step, self._saved_best = trainer.global_step, self.best  # first: they are part of what is saved
        self.save_error = trainer.strategy.broadcast(self._write(trainer, path, also_best=also_best))
        if self.save_error:
            # A run must not die at step 90,000 of a full disk; it says so now and fails at its end if it stays so.
            note("warning", f"could not save {path} ({self.save_error}); the previous one is kept and the run goes on")
            self._saved_step, self._saved_best = before
            self.best = self._saved_best  # the state behind a better score is lost

    def _write(self, trainer: Any, path: Path, *, also_best: bool) -> str | None:
        """Return what went wrong, if anything."""
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            trainer.strategy.barrier()  # the other processes wait at the one that the exception left out
            return error.strerror or str(error)
        try:
            if also_best and trainer.is_global_zero:
                replace_by_link(path, self.best_path)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Name the epoch that the state comes from, for people; Lightning names the one that comes next."""
        checkpoint["epoch"] = self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know."""
        best = asdict(self.best) if self.best else None
        return {"monitor": self.monitor, "mode": self.mode, "best": best, "saved_step": self._saved_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result; a score of another metric says nothing about this run's best."""
        if self.monitor is None:  # nothing is trained, or nothing validated
            return
        same = (state_dict["monitor"], state_dict["mode"]) == (self.monitor, self.mode)
        self.best = self._saved_best = Best(**state_dict["best"]) if same and state_dict["best"] else None
        if not same and state_dict["best"]:
            note("checkpoints", f"the best so far, by {state_dict['monitor']}, does not count by {self.monitor}")
        self._saved_step = state_dict["saved_step"]
