"""Single-label image classification: loss, metrics and the visible steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fulgurite.data.decode import to_spec
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from fulgurite.models.preprocess import Preprocess
from fulgurite.recorded import Recorded
from fulgurite.tasks.prediction import Prediction

Direction = Literal["min", "max"]
Stage = Literal["train", "val", "test"]


class ClassificationTask(Recorded, LightningModule):
    """Learn one label per image by cross-entropy.

    Args:
        network: class whose first parameters are ``num_classes, in_channels``; it maps float (B, C, H, W) to logits (B, K)
        optimizer: class, or partial of one, that takes the parameters
        scheduler: class whose first parameters are the optimizer and the total number of steps; None keeps the rate
        label_smoothing: share of the target spread over all classes (arXiv:1512.00567)
        top_k: also report whether the label is among the k likeliest classes, where there are more than k
        spec: of the data; a configuration fills it in from the data module

    Raises:
        UserError: if the spec is missing or a number makes no sense
    """

    monitor: ClassVar[str] = "val/acc"
    """The metric that decides which checkpoint is best; its direction is in ``directions``."""

    def __init__(
        self,
        network: Callable[[int, int], nn.Module],
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        label_smoothing: float = 0.0,
        top_k: int = 5,
        spec: DataSpec | None = None,
    ) -> None:
        super().__init__()
        if spec is None:
            raise UserError("the task has no data spec: pass spec=data.spec")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing is {label_smoothing}; allowed: from 0 to below 1")
        if top_k < 1:
            raise UserError(f"top_k is {top_k}; it must be at least 1")
        self.spec = spec
        self.network = network(spec.num_classes, spec.channels)
        self.preprocess = Preprocess(spec.mean, spec.std)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.label_smoothing = label_smoothing
        # compute_groups: torchmetrics 1.9 merges metrics whose states are equal after one batch, so a first batch that is
        # all right would make top-k the same as top-1 for ever.
        accuracies = MetricCollection(self._accuracies(top_k), compute_groups=False)
        # Loss and micro accuracy are cheap enough for each training step; the rest is for evaluation.
        self.metrics = nn.ModuleDict(
            {
                "train_metrics": MetricCollection({"acc": accuracies["acc"]}, prefix="train/"),
                "val_metrics": accuracies.clone(prefix="val/"),
                "test_metrics": accuracies.clone(prefix="test/"),
            }
        )
        # "disable": looking for NaN would wait for the device at each step; a NaN loss shows as a NaN mean.
        self.losses = nn.ModuleDict({f"{stage}_loss": MeanMetric(nan_strategy="disable") for stage in ("train", "val", "test")})

    def _measures(self, stage: Stage) -> tuple[MeanMetric, MetricCollection]:
        measures: Any = self.losses[f"{stage}_loss"], self.metrics[f"{stage}_metrics"]
        return cast(tuple[MeanMetric, MetricCollection], measures)

    def _accuracies(self, top_k: int) -> dict[str, Any]:
        classes = self.spec.num_classes
        accuracies = {
            "acc": MulticlassAccuracy(classes, average="micro", validate_args=False),
            "acc_macro": MulticlassAccuracy(classes, average="macro", validate_args=False),
        }
        if 1 < top_k < classes:
            accuracies[f"acc_top{top_k}"] = MulticlassAccuracy(classes, average="micro", top_k=top_k, validate_args=False)
        return accuracies

    @property
    def directions(self) -> dict[str, Direction]:
        """Every metric that validation logs, with the direction in which it gets better."""
        accuracies = self._measures("val")[1].keys()
        better: dict[str, Direction] = {"val/loss": "min"}
        return better | {str(name): "max" for name in accuracies}

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) uint8 to logits (B, K) float."""
        logits: Tensor = self.network(self.preprocess(images))
        return logits

    def _step(self, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor:
        """Return the mean loss (scalar) of images (B, C, H, W) uint8 and labels (B,) int64; update the stage's metrics."""
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing if stage == "train" else 0.0)
        mean_loss, metrics = self._measures(stage)
        # Once for each sample, since torchmetrics 1.9 drops a weight when it is told not to look for NaN.
        mean_loss.update(loss.detach().expand(len(labels)))
        metrics.update(logits.detach(), labels)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss to minimise."""
        loss = self._step(batch, "train")
        # self.log costs as much as a small network's step, so it is called only when Lightning would write the value.
        trainer: Any = self.trainer
        if trainer.log_every_n_steps and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self.log("train/loss_step", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Measure on the validation split."""
        self._step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Measure on the test split."""
        self._step(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return each sample's index (B,) int64 and class probabilities (B, K) float32."""
        images, indices = batch
        return {"index": indices, "probability": self.probabilities(images)}

    def on_train_epoch_end(self) -> None:
        """Log the epoch's training metrics."""
        self._log_epoch("train")

    def on_validation_epoch_end(self) -> None:
        """Log the epoch's validation metrics."""
        self._log_epoch("val")

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_epoch("test")

    def _log_epoch(self, stage: Stage) -> None:
        # Metrics over the epoch, not means of batches; torchmetrics adds up the processes, so sync_dist is not needed.
        mean_loss, metrics = self._measures(stage)
        values = {f"{stage}/loss": mean_loss.compute(), **metrics.compute()}
        for name, value in values.items():
            self.log(name, value, prog_bar=name == self.monitor)
        # Lightning evaluates in inference mode; states that are reset there could not be updated by a later `fit`.
        with torch.inference_mode(False):
            mean_loss.reset()
            metrics.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer, and the schedule with the trainer's number of optimizer steps."""
        optimizer = self.optimizer(self.network.parameters())
        if self.scheduler is None:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise UserError("a schedule needs an end: set trainer.max_epochs or trainer.max_steps, or take the scheduler out")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer, int(total)), "interval": "step"}}

    def probabilities(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) uint8 to class probabilities (B, K) float32."""
        logits: Tensor = self(images)
        return logits.float().softmax(dim=1)

    @torch.inference_mode()
    def predict_images(self, images: Sequence[Any], *, top_k: int = 1, batch_size: int = 64) -> list[Prediction]:
        """Classify images: paths, PIL images, or uint8 tensors (C, H, W) of any size.

        Args:
            images: any number of them; they are resized as the data spec says
            top_k: how many classes to name for each, the likeliest first
            batch_size: images that pass through the network at once

        Raises:
            UserError: if an image cannot be read, naming it, or a number makes no sense
        """
        if isinstance(images, str | Path | Image):
            raise UserError("predict_images takes a list: predict_images([image])")
        if not 1 <= top_k <= self.spec.num_classes:
            raise UserError(f"top_k is {top_k}; allowed: 1 to {self.spec.num_classes}, the number of classes")
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1")
        training = [module for module in self.modules() if module.training]
        self.eval()
        predictions: list[Prediction] = []
        try:
            for start in range(0, len(images), batch_size):
                batch = torch.stack([to_spec(image, self.spec) for image in images[start : start + batch_size]])
                # Stable, as in the prediction table: equal probabilities keep the order of the labels.
                top = self.probabilities(batch.to(self.device)).sort(dim=1, descending=True, stable=True)
                rows = zip(top.values[:, :top_k].tolist(), top.indices[:, :top_k].tolist(), strict=True)
                predictions += [Prediction.from_top(values, indices, self.spec.class_names) for values, indices in rows]
        finally:
            for module in training:
                module.training = True
        return predictions
