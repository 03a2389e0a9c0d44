"""Lightning's Trainer with this project's defaults, run folders, and one short method per verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS

from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.compute import Compute, MatmulPrecision, MemoryFormat
from fulgurite.callbacks.exact_resume import ExactResume
from fulgurite.callbacks.loss_scale import LossScale
from fulgurite.callbacks.run_record import RunRecord
from fulgurite.callbacks.sections import all_callbacks, sections_of
from fulgurite.checkpoint import AtomicCheckpointIO
from fulgurite.console import ctrl_c, quiet_lightning, report_metrics
from fulgurite.data.broken import OnError
from fulgurite.data.shards import make_shards
from fulgurite.errors import RunStopped
from fulgurite.loggers import LoggerName, names_and_loggers
from fulgurite.precision import Precision, settle_precision
from fulgurite.recorded import Recorded, run_config
from fulgurite.resuming import is_restarted, run_to_resume
from fulgurite.runs import resumable
from fulgurite.step_cost import lighten
from fulgurite.strategies import require_processes
from fulgurite.verbs.check_data import check_data
from fulgurite.verbs.find_workers import find_workers
from fulgurite.verbs.plan import plan
from fulgurite.verbs.predict import prepare_prediction, tell_unread


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
        precision: of numbers; auto takes what the device is fast in; null is 32-true
        matmul_precision: of float32 matrix products on a GPU; high is TF32; null leaves PyTorch's, which is highest
        memory_format: channels_last is faster where convolutions are the work
        options: those of :class:`lightning.pytorch.Trainer`
    """

    callbacks: list[Callback]
    fast_dev_run: bool | int

    # Verbs that look at data alone; they are methods because LightningCLI finds its verbs here.
    check_data = staticmethod(check_data)
    find_workers = staticmethod(find_workers)
    make_shards = staticmethod(make_shards)
    plan = plan

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
        precision: Precision | None = None,
        matmul_precision: MatmulPrecision | None = None,
        memory_format: MemoryFormat = "contiguous",
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
        enable_checkpointing = enable_checkpointing and not options.get("fast_dev_run")
        progress = options.get("enable_progress_bar") in (None, True)
        own = all_callbacks(callbacks, self.exact_resume, self.record, checkpoints=enable_checkpointing, progress=progress)
        super().__init__(
            logger=self.given_loggers or False,
            callbacks=[*own, Compute(memory_format, matmul_precision)],
            enable_checkpointing=enable_checkpointing,
            enable_model_summary=enable_model_summary,
            use_distributed_sampler=use_distributed_sampler,
            precision=settle_precision(precision, options.get("accelerator", "auto")),
            plugins=[AtomicCheckpointIO(), *(plugins if isinstance(plugins, list) else [plugins] if plugins else [])],
            **options,
        )
        require_processes(self)
        if getattr(self.precision_plugin, "scaler", None):
            self.callbacks.insert(0, LossScale())
        lighten(self)

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
    ) -> list[Any]:
        """Measure a checkpoint on the validation split.

        Args:
            model: the task
            dataloaders: instead of a data module
            ckpt_path: a file, a run folder, or best or last for those of the latest run; none for the initial weights
            datamodule: gives the loader
        """
        with ctrl_c():
            results = super().validate(model, dataloaders, self._resolve(ckpt_path), False, datamodule, True)
        return report_metrics("validate", results)

    def test(  # type: ignore[override]  # one argument of Lightning's is left out
        self,
        model: pl.LightningModule | None = None,
        dataloaders: EVAL_DATALOADERS | pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        datamodule: pl.LightningDataModule | None = None,
    ) -> list[Any]:
        """Measure a checkpoint on the test split.

        Args:
            model: the task
            dataloaders: instead of a data module
            ckpt_path: a file, a run folder, or best or last for those of the latest run; none for the initial weights
            datamodule: gives the loader
        """
        with ctrl_c():
            results = super().test(model, dataloaders, self._resolve(ckpt_path), False, datamodule, True)
        return report_metrics("test", results)

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
        return self.record.given_checkpoint(self, given, prefer)
