"""Lightning's Trainer with this project's defaults, run folders, and one short method per verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS

from fulgurite.callbacks.accumulation import ShortWindow
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.exact_resume import ExactResume
from fulgurite.callbacks.overrides import Overrides
from fulgurite.callbacks.run_record import RunRecord
from fulgurite.callbacks.sections import sections_of, with_defaults
from fulgurite.checkpoint import AtomicCheckpointIO
from fulgurite.console import ctrl_c, note, quiet_lightning
from fulgurite.data.broken import OnError
from fulgurite.data.shards import make_shards
from fulgurite.errors import RunStopped
from fulgurite.loggers import LoggerName, names_and_loggers
from fulgurite.recorded import Recorded, run_config
from fulgurite.resuming import is_restarted, run_to_resume
from fulgurite.runs import find_checkpoint, resumable
from fulgurite.verbs.check_data import check_data
from fulgurite.verbs.find_workers import find_workers
from fulgurite.verbs.predict import prepare_prediction, tell_unread

Evaluation = list[Any]


class Trainer(Recorded, pl.Trainer):
    """Train and evaluate; each ``fit`` gets a folder of its own, ``runs/<experiment>/<version>/``.

    Args:
        experiment: names the folder that runs of one experiment share
        runs_dir: where experiments are kept
        logger: ``tensorboard``, ``csv`` or a Lightning logger, or several of them; True means both files; False none
        callbacks: besides those for checkpoints, exact resume and the learning rate, which are always there
        enable_checkpointing: whether to write checkpoints
        enable_model_summary: print Lightning's table of layers; the number of parameters is printed anyway
        use_distributed_sampler: let Lightning replace samplers; this project's loaders share out their samples themselves
        options: those of :class:`lightning.pytorch.Trainer`
    """

    callbacks: list[Callback]
    fast_dev_run: bool | int

    # Verbs that look at data alone; they are methods because LightningCLI finds its verbs here.
    check_data = staticmethod(check_data)
    find_workers = staticmethod(find_workers)
    make_shards = staticmethod(make_shards)

    def __init__(
        self,
        *,
        experiment: str = "default",
        runs_dir: Path = Path("runs"),
        logger: bool | LoggerName | Logger | list[LoggerName | Logger] = True,
        callbacks: Callback | list[Callback] | None = None,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = False,
        use_distributed_sampler: bool = False,
        plugins: Any = None,
        **options: Any,
    ) -> None:
        quiet_lightning()
        self.experiment = experiment
        self.runs_dir = Path(runs_dir).expanduser()
        self.run_dir: Path | None = None
        self.resume_from: Path | None = None  # the checkpoint that the present or last fit began from
        self.config: str | None = None  # YAML text; the command line sets it, from Python it is derived
        self.logger_names, self.given_loggers = names_and_loggers(logger)
        self.record = RunRecord()
        self.exact_resume = ExactResume()
        logs = (self.logger_names or self.given_loggers) and not options.get("fast_dev_run")
        rates = [LearningRateMonitor(logging_interval="step")] if logs else []
        always: list[Callback] = [self.exact_resume, Overrides(), self.record, ShortWindow(), *rates]
        enable_checkpointing = enable_checkpointing and not options.get("fast_dev_run")
        super().__init__(
            logger=self.given_loggers or False,
            callbacks=always + with_defaults(callbacks, checkpoints=enable_checkpointing),
            enable_checkpointing=enable_checkpointing,
            enable_model_summary=enable_model_summary,
            use_distributed_sampler=use_distributed_sampler,
            plugins=[AtomicCheckpointIO(), *(plugins if isinstance(plugins, list) else [plugins] if plugins else [])],
            **options,
        )

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The callback that keeps the best and the last state, or None where checkpoints are off."""
        return next((callback for callback in self.callbacks if isinstance(callback, Checkpoints)), None)

    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: TRAIN_DATALOADERS | pl.LightningDataModule | None = None,
        val_dataloaders: EVAL_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        test: bool = False,
        resume: bool | str | Path | None = None,
        resume_inexact: bool = False,
    ) -> None:
        """Train, in a new run folder or in that of a run to go on with.

        Args:
            model: the task
            train_dataloaders: instead of a data module
            val_dataloaders: instead of a data module
            datamodule: gives the loaders
            ckpt_path: begin from this checkpoint: a file, a run folder, or best or last for those of the latest run
            weights_only: always true here; Lightning's argument
            test: measure the best checkpoint on the test split afterwards
            resume: go on with a run, in its folder: true for the latest of the experiment, its folder, or auto for the latest
                with this same configuration if that is not complete, and a new run otherwise
            resume_inexact: go on even if batch size, data, accumulation, seed or number of batches or processes differ

        Raises:
            UserError: if the run cannot start, has nothing left to train, or its last checkpoint could not be saved
        """
        data: Any = datamodule
        if test and "test" not in getattr(data, "splits", ("test",)):
            data.dataset("test")  # says what is missing, before anything is trained
        run = run_to_resume(resume, self.runs_dir / self.experiment, lambda: self.describe_config(model, datamodule))
        self.resume_from = resumable(run) if run else self._resolve(ckpt_path, prefer="last")
        self.exact_resume.allow_inexact = resume_inexact
        with self.record.running(self, run):
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, self.resume_from, True)
            if not (run and (test or is_restarted())):  # a complete run may have its test to do still
                self.record.require_trained(self)
        if kept := self.checkpoints:
            kept.require_saved(self)
        try:
            if test:
                self.test(model, datamodule=datamodule, ckpt_path="best" if kept else None)
        except KeyboardInterrupt:
            raise (kept.stopped(self) if kept else RunStopped("the training was complete")) from None
        self.record.tell_next(self)

    def validate(  # type: ignore[override]  # one argument of Lightning's is left out
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        datamodule: pl.LightningDataModule | None = None,
    ) -> Evaluation:
        """Measure a checkpoint on the validation split.

        Args:
            model: the task
            dataloaders: instead of a data module
            ckpt_path: a file, a run folder, or best or last for those of the latest run; none for the initial weights
            datamodule: gives the loader
        """
        with ctrl_c():
            results = super().validate(model, dataloaders, self._resolve(ckpt_path), False, datamodule, True)
        return _report_metrics("validate", results)

    def test(  # type: ignore[override]  # one argument of Lightning's is left out
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        datamodule: pl.LightningDataModule | None = None,
    ) -> Evaluation:
        """Measure a checkpoint on the test split.

        Args:
            model: the task
            dataloaders: instead of a data module
            ckpt_path: a file, a run folder, or best or last for those of the latest run; none for the initial weights
            datamodule: gives the loader
        """
        with ctrl_c():
            results = super().test(model, dataloaders, self._resolve(ckpt_path), False, datamodule, True)
        return _report_metrics("test", results)

    def predict(  # type: ignore[override]  # predicts image files into a table
        self,
        model: pl.LightningModule,
        images: Path,
        output: Path = Path("predictions.csv"),
        top_k: int = 1,
        batch_size: int = 64,
        num_workers: int | None = None,
        on_error: OnError = "skip",
        ckpt_path: str | Path | None = None,
    ) -> Path:
        """Classify image files into a table of path, label, probability.

        Args:
            model: the task
            images: a folder, searched with all its subfolders, or one image
            output: the table; its ending says the kind: .csv, .jsonl or .parquet
            top_k: how many classes to name for each image, the likeliest first
            batch_size: per device
            num_workers: processes that read images; null chooses from the cores really usable
            on_error: what to do with an image that cannot be read: list it at the end, or stop
            ckpt_path: a file, a run folder, or best or last for those of the latest run; from Python None keeps the weights
        """
        checkpoint, images, output = self._resolve(ckpt_path), Path(images), Path(output)
        loader, writer = prepare_prediction(
            self, model, images, output, top_k=top_k, batch_size=batch_size, num_workers=num_workers, on_error=on_error
        )
        self.callbacks.append(writer)
        try:
            with ctrl_c():
                super().predict(model, loader, return_predictions=False, ckpt_path=checkpoint, weights_only=True)
        finally:
            self.callbacks.remove(writer)
        tell_unread(writer, model)
        return output

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The optimizer steps of the whole run."""
        return self.exact_resume.total_steps(self, super().estimated_stepping_batches)

    def describe_config(self, task: pl.LightningModule | None = None, data: Any = None) -> str:
        """Return the configuration of this run, or of one that is about to begin, as YAML text.

        Raises:
            TypeError: if the run was started from Python with an object that a configuration cannot name
        """
        if self.config is not None:
            return self.config
        data = data or getattr(self, "datamodule", None)
        return run_config(self, task or self.lightning_module, data, sections_of(self.callbacks))

    def _resolve(self, given: str | Path | None, prefer: str = "best") -> Path | None:
        if given is None or str(given) == "none":
            return None
        if self.run_dir and given in ("best", "last"):  # after fit: of this run, also when others have started since
            path = find_checkpoint(self.run_dir, self.runs_dir, prefer=str(given))
        else:
            path = find_checkpoint(given, self.runs_dir, prefer=prefer)
        note("checkpoint", str(path))
        return path


def _report_metrics(verb: str, results: Evaluation) -> Evaluation:
    for metrics in results:
        note(verb, "  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))
    return results
