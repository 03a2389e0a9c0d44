"""The two loggers that are on by default; both write into the run's folder and nothing else.

A log is worth less than the run: on a full disk they say so once and the training goes on.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from fulgurite.console import note

LoggerName = Literal["tensorboard", "csv"]


class _MetricsFile(ExperimentWriter):
    """``metrics.csv``: rows are appended whole or not at all."""

    def _check_log_dir_exists(self) -> None:
        pass  # a run's folder is new, and what else is in it stays

    def save(self) -> None:
        """Write the waiting rows; if the disk is full they wait for the next time."""
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        names = sorted({*self.metrics_keys}.union(*self.metrics))
        try:
            if names != self.metrics_keys:
                self._write_anew(path, names)
            else:
                self._append(path)
        except OSError as error:
            _note_once(self, path, error)
        else:
            self.metrics_keys, self.metrics = names, []

    def _write_anew(self, path: Path, names: list[str]) -> None:
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=names)
                writer.writeheader()
                if path.is_file():
                    with path.open(newline="", encoding="utf-8") as old:
                        writer.writerows(csv.DictReader(old))
                writer.writerows(self.metrics)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _append(self, path: Path) -> None:
        size = path.stat().st_size
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, fieldnames=self.metrics_keys).writerows(self.metrics)
        except OSError:
            with path.open("r+b") as file:
                file.truncate(size)
            raise


def _note_once(writer: Any, path: Path, error: OSError) -> None:
    if not getattr(writer, "_noted", False):
        writer._noted = True
        note("warning", f"cannot write {path} ({error.strerror or error}); the run goes on without it")


class RunCSVLogger(CSVLogger):
    """Write ``metrics.csv`` into the run's folder, a row each time something is logged."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=str(run_dir), name="", version="", flush_logs_every_n_steps=1)
        self._experiment = _MetricsFile(str(run_dir))

    def save(self) -> None:
        """Write the rows that are waiting."""
        self.experiment.save()

    def log_hyperparams(self, params: Any = None) -> None:
        """Do nothing: ``config.yaml`` has them."""


class RunTensorBoardLogger(TensorBoardLogger):
    """Write event files into the run's folder, without the ``hparams.yaml`` that would repeat ``config.yaml``."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(save_dir=run_dir, name="", version="", default_hp_metric=False)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write scalars; TensorBoard's writer raises here what went wrong in its thread, and is then left alone."""
        if getattr(self, "_noted", False):
            return
        try:
            super().log_metrics(metrics, step)
        except ValueError as error:  # Lightning's, for whatever goes wrong
            if not isinstance(error.__cause__, OSError):
                raise
            _note_once(self, Path(self.log_dir), error.__cause__)

    def save(self) -> None:
        """Flush the event file."""
        if getattr(self, "_noted", False):
            return
        try:
            FabricTensorBoardLogger.save(self)
        except OSError as error:
            _note_once(self, Path(self.log_dir), error)

    def finalize(self, status: str) -> None:
        """Close the event file."""
        try:
            super().finalize(status)
        except OSError as error:
            _note_once(self, Path(self.log_dir), error)


def run_loggers(names: list[LoggerName], run_dir: Path) -> list[Logger]:
    """Make the named loggers for a run."""
    made: dict[LoggerName, Callable[[Path], Logger]] = {"csv": RunCSVLogger, "tensorboard": RunTensorBoardLogger}
    return [made[name](run_dir) for name in names]
