"""Tell what a run is: on the screen, in ``config.yaml`` in its folder, and in each of its checkpoints."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from fulgurite.checkpoint import KEY, Description, provenance
from fulgurite.console import is_rank_zero, note
from fulgurite.errors import UserError
from fulgurite.loggers import run_loggers
from fulgurite.runs import create_run
from fulgurite.trust import trust_flags


class RunRecord(Callback):
    """Make the run's folder, save its configuration there, and make its checkpoints explain themselves."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self._has_trained = False
        self._start = 0.0

    @property
    def config(self) -> str:
        """The run's configuration as YAML text; empty before it begins, or if Python objects cannot be named."""
        return self.description.config if self.description else ""

    def begin(self, trainer: Any) -> None:
        """Make the folder of a new run, where the trainer is to leave anything behind.

        Raises:
            UserError: if torchrun or the like has started other processes than the trainer expects
        """
        self._has_trained, self._start = False, time.monotonic()
        if trainer.accumulate_grad_batches < 1:
            raise UserError(f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}; it must be at least 1")
        started = int(os.environ.get("WORLD_SIZE", trainer.world_size))
        if started != trainer.world_size:  # each would train by itself
            raise UserError(
                f"{started} processes were started, and the trainer is set to {trainer.world_size}: "
                f"--trainer.devices {started} --trainer.strategy ddp"
            )
        if trainer.fast_dev_run:
            trainer.run_dir = None
        elif is_rank_zero():
            trainer.run_dir = create_run(trainer.runs_dir, trainer.experiment)
            note("run", str(trainer.run_dir))
        else:
            trainer.run_dir = trainer.runs_dir  # until rank zero tells, in setup

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
                f"trainer.max_epochs is {trainer.max_epochs} and trainer.max_steps {trainer.max_steps}\n"
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
        if trainer.run_dir and self._has_nothing(trainer):
            if is_rank_zero():
                shutil.rmtree(trainer.run_dir, ignore_errors=True)
            trainer.run_dir = None

    def _has_nothing(self, trainer: Any) -> bool:
        # The files count, too: where Lightning trains in child processes by fork or spawn, this process sees no batch.
        files = [trainer.run_dir / name for name in ("metrics.csv", "checkpoints/last.ckpt")] if trainer.run_dir else []
        return not self._has_trained and not any(file.exists() for file in files)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Share the run folder that rank zero made; describe the run."""
        if stage != "fit":
            return
        _report_start(trainer, pl_module)
        if trainer.run_dir is None:  # fast_dev_run leaves nothing behind
            return
        trainer.run_dir = Path(trainer.strategy.broadcast(str(trainer.run_dir)))
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
        (trainer.run_dir / "config.yaml").write_text(config, encoding="utf-8")

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the description."""
        if self.description is not None:
            checkpoint[KEY] = self.description.to_dict()

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._has_trained = True

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say what the run came to."""
        if self._has_trained:
            kept = trainer.checkpoints
            best = ""
            if kept and kept.best:
                best = f"best {kept.monitor} {kept.best.score:.4f} at epoch {kept.best.epoch} (counted from 0), "
            seconds = time.monotonic() - self._start
            note("trained", f"{best}{trainer.current_epoch} epochs, {trainer.global_step:,} steps, {seconds:.0f} s")


def _report_start(trainer: Any, pl_module: LightningModule) -> None:
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    automatic = "no GPU found" if device == "cpu" else "the fastest found"
    chosen = automatic if trainer.init_args["accelerator"] == "auto" else "as configured"
    network: Any = getattr(pl_module, "network", pl_module)
    note("device", f"{trainer.world_size} x {device} ({chosen}), precision {trainer.precision}")
    note("network", f"{type(network).__name__}, {sum(p.numel() for p in network.parameters()):,} parameters")
