"""Tell what a run is: on the screen, in ``config.yaml`` in its folder, and in each of its checkpoints."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from fulgurite.checkpoint import KEY, Description, provenance
from fulgurite.console import ctrl_c, is_rank_zero, note
from fulgurite.errors import UserError
from fulgurite.loggers import RunCSVLogger, RunTensorBoardLogger, run_loggers
from fulgurite.plain_yaml import read_yaml
from fulgurite.processes import of_each_process, of_first
from fulgurite.run_lock import RunLock
from fulgurite.runs import create_run, given_checkpoint
from fulgurite.trust import split_settings, trust_flags


class RunRecord(Callback):
    """Make the run's folder, save its configuration there, and make its checkpoints explain themselves."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self.has_trained = False
        self._start = 0.0
        self._lock = RunLock()
        self._resumes = False
        self._last_written = 0  # time of last.ckpt before this fit
        self._was_complete = False

    @property
    def config(self) -> str:
        """The run's configuration as YAML text; empty before it begins, or if Python objects cannot be named."""
        return self.description.config if self.description else ""

    @contextmanager
    def running(self, trainer: Any, run: Path | None) -> Iterator[None]:
        """Hold a run's folder while it is trained; leave none behind that has nothing in it."""
        self.begin(trainer, run)
        try:
            with ctrl_c():
                yield
        except BaseException as error:
            self.drop_untrained(trainer)
            if isinstance(error, KeyboardInterrupt) and trainer.checkpoints:
                raise trainer.checkpoints.stopped(trainer) from None
            raise
        finally:
            self._lock.release()

    def begin(self, trainer: Any, run: Path | None) -> None:
        """Go on in a run's folder, or make that of a new one; nothing where the trainer is to leave nothing behind.

        Raises:
            UserError: if another process trains in that run
        """
        self.has_trained, self._start, self._resumes = False, time.monotonic(), run is not None
        if trainer.accumulate_grad_batches < 1:
            raise UserError(f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}; it must be at least 1")
        started = int(os.environ.get("WORLD_SIZE", trainer.world_size))
        if started != trainer.world_size:  # each would train by itself
            raise UserError(
                f"{started} processes were started, and the trainer is set to {trainer.world_size}: "
                f"--trainer.devices {started} --trainer.strategy ddp"
            )
        if run:
            self._last_written = _time_of(run / "checkpoints" / "last.ckpt")
        if trainer.fast_dev_run:
            trainer.run_dir = None
        elif is_rank_zero():
            trainer.run_dir = run or create_run(trainer.runs_dir, trainer.experiment)
            self._lock.take(trainer.run_dir)
            note("run", f"{trainer.run_dir}{' goes on' if run else ''}")
        else:
            trainer.run_dir = trainer.runs_dir  # until rank zero tells, in setup

    def given_checkpoint(self, trainer: Any, given: str | Path | None, prefer: str) -> Path | None:
        """Resolve what a user may call a checkpoint; best and last are this run's, if there was one."""
        find = partial(given_checkpoint, given, trainer.run_dir, trainer.runs_dir, prefer=prefer)
        return of_first(find, needed=getattr(trainer.strategy.checkpoint_io, "first_reads", False))

    def require_trained(self, trainer: Any) -> None:
        """Refuse a run that ended before its first batch.

        Raises:
            UserError: if it did
        """
        if self._has_nothing(trainer):
            if trainer.num_training_batches == 0:
                raise UserError("nothing to train: no batch is left by trainer.limit_train_batches")
            raise UserError(
                f"nothing to train: {trainer.current_epoch} epochs and {trainer.global_step:,} steps are done, "
                f"trainer.max_epochs is {trainer.max_epochs} and trainer.max_steps {trainer.max_steps}{_time_limit(trainer)}\n"
                f"for more: --trainer.max_epochs {trainer.current_epoch + 1}"
            )

    def tell_next(self, trainer: Any) -> None:
        """Say where the run is, and how to go on."""
        if not trainer.run_dir:
            return
        note("run", str(trainer.run_dir))
        if trainer.checkpoints and self.config:
            predict = ["fulgurite", "predict", "--ckpt_path", str(trainer.run_dir), "--images", "FOLDER"]
            note("next", shlex.join([*predict, "--output", "predictions.csv", *trust_flags(self.config, ("model",))]))
        if trainer.logger_names:
            note("", shlex.join(["tensorboard", "--logdir", str(trainer.runs_dir)]))

    def drop_untrained(self, trainer: Any) -> None:
        """Remove the folder of a run that ended before it had anything to keep."""
        if trainer.run_dir and not self._resumes and self._has_nothing(trainer):
            if is_rank_zero():
                shutil.rmtree(trainer.run_dir, ignore_errors=True)
            trainer.run_dir = None

    def _has_nothing(self, trainer: Any) -> bool:
        # The files count, too: where Lightning trains in child processes by fork or spawn, this process sees no batch.
        if self.has_trained or not trainer.run_dir:
            return not self.has_trained
        last, metrics = trainer.run_dir / "checkpoints" / "last.ckpt", trainer.run_dir / "metrics.csv"
        return _time_of(last) == self._last_written if self._resumes else not (last.exists() or metrics.exists())

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Share the run folder that rank zero made; describe the run."""
        if stage != "fit":
            return
        _report_start(trainer, pl_module)
        if trainer.run_dir is None:  # fast_dev_run leaves nothing behind
            return
        if len(set(of_each_process(str(trainer.resume_from)))) > 1:
            raise UserError("the processes of this job found different checkpoints to go on from: is runs_dir on a shared disk?")
        trainer.run_dir = Path(trainer.strategy.broadcast(str(trainer.run_dir)))
        trainer.strategy.checkpoint_io.first_reads = not all(of_each_process(trainer.run_dir.is_dir()))
        if trainer.strategy.checkpoint_io.first_reads:
            note("run", "on the first host alone, as the others do not see it; it can be resumed where runs_dir is a shared disk")
        # On every process: they write on rank zero alone, but code may call them anywhere.
        trainer.loggers = [*run_loggers(trainer.logger_names, trainer.run_dir), *trainer.given_loggers]
        if not trainer.is_global_zero:
            return
        try:
            config = trainer.describe_config()
        except TypeError as error:
            note("config", f"not recorded, so the checkpoints need code to be loaded: {error}")
            config = ""
        fingerprint = getattr(trainer.datamodule, "fingerprint", None)
        spec = getattr(pl_module, "spec", None)
        self.description = Description(
            config=config,
            spec=spec.to_dict() if spec else {},
            provenance=provenance(
                seed=int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None,
                data_fingerprint=fingerprint() if fingerprint else "",
            ),
        )

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember whether the training had come to its end."""
        self._was_complete = bool(checkpoint.get("callbacks", {}).get("Checkpoints", {}).get("complete"))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the configuration; drop from the logs of a resumed run what it does again after its checkpoint.

        Only now, as until here the run may have been refused.
        """
        if trainer.run_dir and trainer.is_global_zero:
            _write_config(trainer.run_dir / "config.yaml", self.config)
        if self._resumes and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, RunCSVLogger | RunTensorBoardLogger):
                    # What was logged after the end, such as a test, is not done again.
                    logger.go_on_from(trainer.global_step + self._was_complete)

    def command_to_go_on(self, trainer: Any, checkpoint: str | Path | None = None) -> str:
        """Return the command that goes on with this run, or from a checkpoint in a new one."""
        if not self.config:
            given = f'ckpt_path="{checkpoint}"' if checkpoint else f'resume="{trainer.run_dir}"'
            return f"trainer.fit(task, datamodule=data, {given})"
        settings = read_yaml(self.config).get("trainer") or {}
        file = ["-c", str(trainer.run_dir / "config.yaml")] if split_settings(settings)[1] else []
        place = ["--ckpt_path", str(checkpoint)] if checkpoint else ["--resume", str(trainer.run_dir)]
        nodes = ["--trainer.num_nodes", str(trainer.num_nodes)] if trainer.num_nodes > 1 else []
        return shlex.join(["fulgurite", "fit", *file, *place, *nodes, *trust_flags(self.config)])

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the description."""
        if self.description is not None:
            checkpoint[KEY] = self.description.to_dict()

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_trained = True

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say what the run came to."""
        if self.has_trained:
            kept = trainer.checkpoints
            best = ""
            if kept and kept.best:
                best = f"best {kept.monitor} {kept.best.score:.4f} in epoch {kept.best.epoch + 1}, "
            seconds = time.monotonic() - self._start
            note("trained", f"{best}{trainer.current_epoch} epochs, {trainer.global_step:,} steps, {seconds:.0f} s")


def _report_start(trainer: Any, pl_module: LightningModule) -> None:
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    automatic = "no GPU found" if device == "cpu" else "the fastest found"
    chosen = automatic if trainer.init_args["accelerator"] == "auto" else "as configured"
    network: Any = getattr(pl_module, "network", pl_module)
    note("device", f"{trainer.world_size} x {device} ({chosen}), precision {trainer.precision}")
    note("network", f"{type(network).__name__}, {sum(p.numel() for p in network.parameters()):,} parameters")


def _time_limit(trainer: Any) -> str:
    limit = trainer.init_args.get("max_time")
    return f", trainer.max_time {limit}, which counts earlier parts of the run, too" if limit else ""


def _time_of(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0


def _write_config(file: Path, config: str) -> None:
    """Write the configuration; that of an earlier part of the run is kept where it differs."""
    earlier = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else config
    if earlier != config:
        number = 1 + len(list(file.parent.glob("config-*.yaml")))
        file.rename(file.with_name(f"config-{number}.yaml"))
    file.write_text(config, encoding="utf-8")
