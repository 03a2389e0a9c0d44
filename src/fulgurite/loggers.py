"""The two loggers that are on by default; both write into the run's folder and nothing else.

A log is worth less than the run: on a full disk they say so once and the training goes on.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from fulgurite.console import is_rank_zero, note
from fulgurite.errors import UserError

LoggerName = Literal["tensorboard", "csv"]


class _MetricsFile(ExperimentWriter):
    """``metrics.csv``: rows are appended whole or not at all."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.is_file():  # of a run that goes on
            with path.open(newline="", encoding="utf-8") as file:
                self.metrics_keys = list(csv.DictReader(file).fieldnames or ())

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

    def drop_from(self, step: int) -> None:
        """Keep the rows that were logged before an optimizer step; the run does it and the following ones again."""
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        try:
            *whole, _ = path.read_text(encoding="utf-8").split("\n")  # a kill may have left a part of a row
            kept: list[Any] = [row for row in csv.DictReader(whole) if row["step"] and int(row["step"]) < step]
        except (KeyError, ValueError) as error:
            raise UserError(f"{path} holds no rows of this run's metrics ({error}): move it away to go on") from error
        try:
            self._replace(path, kept, self.metrics_keys)
        except OSError as error:
            _note_once(self, path, error)

    def _write_anew(self, path: Path, names: list[str]) -> None:
        with path.open(newline="", encoding="utf-8") if path.is_file() else nullcontext() as old:
            earlier: Iterable[Any] = csv.DictReader(old) if old else ()
            self._replace(path, chain(earlier, self.metrics), names)

    def _replace(self, path: Path, rows: Iterable[Any], names: list[str]) -> None:
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=names)
                writer.writeheader()
                writer.writerows(rows)
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
        if is_rank_zero():  # it makes the folder, also on a host that does not see the first one's
            self._experiment = _MetricsFile(str(run_dir))

    def save(self) -> None:
        """Write the rows that are waiting."""
        self.experiment.save()

    def log_hyperparams(self, params: Any = None) -> None:
        """Do nothing: ``config.yaml`` has them."""

    def go_on_from(self, step: int) -> None:
        """Drop what was logged from this optimizer step on."""
        self.experiment.drop_from(step)


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

    def go_on_from(self, step: int) -> None:
        """Tell TensorBoard to leave out what was logged from this optimizer step on."""
        if self._experiment is not None:
            self._experiment.close()
            self._experiment = None
        self._kwargs["purge_step"] = step

    def save(self) -> None:
        """Flush the event file."""
        if getattr(self, "_noted", False) or self._experiment is None:
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


def names_and_loggers(given: Any) -> tuple[list[LoggerName], list[Logger]]:
    """Part what the trainer is given as its logger; True stands for both names."""
    wanted = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    names: list[Any] = ["csv", "tensorboard"] if given is True else [name for name in wanted if isinstance(name, str)]
    return names, [one for one in wanted if isinstance(one, Logger)]


def run_loggers(names: list[LoggerName], run_dir: Path) -> list[Logger]:
    """Make the named loggers for a run."""
    made: dict[LoggerName, Callable[[Path], Logger]] = {"csv": RunCSVLogger, "tensorboard": RunTensorBoardLogger}
    return [made[name](run_dir) for name in names]
