"""Image classification, with one label per image or any number: the visible steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.console import note
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from fulgurite.models.preprocess import Preprocess
from fulgurite.recorded import Recorded
from fulgurite.step_cost import LeanModule
from fulgurite.tasks.loss import ClassificationLoss, Kind
from fulgurite.tasks.metrics import Direction, EpochMetrics, Stage
from fulgurite.tasks.mixing import make_mixing
from fulgurite.tasks.prediction import MultiLabelPrediction, Prediction, predict_images
from fulgurite.tasks.rate_scaling import RateScaling, Rule
from fulgurite.tasks.training_plan import plan_training


class ClassificationTask(Recorded, LeanModule):
    """Learn the label of each image by cross-entropy, or where the spec says so its labels by binary cross-entropy.

    Smoothing, weights and mixing are for training: the loss of an evaluation is the plain one. The training accuracy is
    that of the mixed images against the labels before mixing, so mixing lowers it.

    Args:
        network: class whose first parameters are ``num_classes, in_channels``; it maps float (B, C, H, W) to logits (B, K)
        optimizer: class, or partial of one, that takes the parameters
        scheduler: class whose first parameters are the optimizer and the total number of steps; None keeps the rate
        loss: "bce" asks of each class whether it is the label (arXiv:2110.00476), as is done for several labels anyway
        focal_gamma: above 0, labels of which the network is sure count less, by (1 - p) to this power (arXiv:1708.02002)
        label_smoothing: share of the target spread over all classes (arXiv:1512.00567)
        class_weights: a weight of each class in the loss, or "balanced" for N / (K * images of the class). Where an image
            may have several labels, a list only: it multiplies the loss of the labels that are present
        mixup: alpha of the Beta distribution that mixes each image with another of its batch (arXiv:1710.09412); 0: none
        cutmix: the same for pasting a rectangle (arXiv:1905.04899); with both, one of the two is drawn for each batch
        top_k: also report whether the label is among the k likeliest classes, where there are more than k
        decay_all: let weight decay shrink norms, biases, position embeddings and class tokens, too
        layer_decay: what the rate of a layer is multiplied by for each layer that follows it (arXiv:2106.08254); 1 is off
        rate_scaling: rule by which the rate, which suits ``reference_batch``, is made to suit the samples of an optimizer step:
            batch_size x processes x accumulated batches. "linear" is for SGD (arXiv:1706.02677), "sqrt" for Adam
        reference_batch: samples of an optimizer step that the optimizer's rate was found with
        spec: of the data; a configuration fills it in from the data module

    Raises:
        UserError: if the spec is missing or a number makes no sense
    """

    def __init__(
        self,
        network: Callable[[int, int], nn.Module],
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        loss: Kind = "cross_entropy",
        focal_gamma: float = 0.0,
        label_smoothing: float = 0.0,
        class_weights: Literal["balanced"] | list[float] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        top_k: int = 5,
        decay_all: bool = False,
        layer_decay: float = 1.0,
        rate_scaling: Rule = "none",
        reference_batch: int | None = None,
        spec: DataSpec | None = None,
    ) -> None:
        super().__init__()
        if spec is None:
            raise UserError("the task has no data spec: pass spec=data.spec")
        if top_k < 1:
            raise UserError(f"top_k is {top_k}; it must be at least 1")
        if not 0 < layer_decay <= 1:
            raise UserError(f"layer_decay is {layer_decay}; allowed: above 0, up to 1, which is off")
        self.spec = spec
        self.monitor = "val/map" if spec.multi_label else "val/acc"
        """The metric that decides which checkpoint is best; its direction is in ``directions``."""
        self.network = network(spec.num_classes, spec.channels)
        self.preprocess = Preprocess(spec.mean, spec.std)
        self.mixing = make_mixing(mixup, cutmix, spec.num_classes)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.decay_all, self.layer_decay = decay_all, layer_decay
        self.rate_scaling = RateScaling(rate_scaling, reference_batch)
        self.class_weights = class_weights
        # Data without a training split, for an evaluation, has no counts and needs no weights; `fit` refuses it below.
        weights = None if class_weights == "balanced" and spec.class_counts is None else class_weights
        self.train_loss = ClassificationLoss(
            spec, kind=loss, focal_gamma=focal_gamma, label_smoothing=label_smoothing, class_weights=weights
        )
        self.loss = ClassificationLoss(spec)
        self.train_metrics = EpochMetrics("train", spec, top_k=top_k)
        self.val_metrics = EpochMetrics("val", spec, top_k=top_k)
        self.test_metrics = EpochMetrics("test", spec, top_k=top_k)

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **options: Any) -> Any:
        """Refuse Lightning's way, which calls whatever the hyper-parameters in a stranger's file name.

        Raises:
            UserError: always
        """
        raise UserError(f"{cls.__name__}.load_from_checkpoint runs code that a checkpoint names: use fulgurite.load(path)")

    @property
    def directions(self) -> dict[str, Direction]:
        """Every metric that validation logs, with the direction in which it gets better."""
        return self.val_metrics.directions

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) uint8 to logits (B, K) float."""
        logits: Tensor = self.network(self.preprocess(images))
        return logits

    def _step(self, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor:
        """Return the mean loss (scalar) and update the stage's metrics.

        Args:
            batch: images (B, C, H, W) uint8, and labels: (B,) int64, or multi-hot (B, K) uint8
            stage: smoothing, weights and mixing are for training
        """
        images, labels = self.preprocess(batch[0]), batch[1]
        mixing, measure = (self.mixing, self.train_loss) if stage == "train" else (None, self.loss)
        images, targets = mixing(images, labels) if mixing else (images, labels)
        images = images.contiguous(memory_format=self.preprocess.memory_format)  # which mixing on a GPU forgets
        logits = self.network(images)
        loss: Tensor = measure(logits, targets)
        self._metrics(stage).update(loss, logits, labels)
        return loss

    def _metrics(self, stage: Stage) -> EpochMetrics:
        metrics: EpochMetrics = getattr(self, f"{stage}_metrics")
        return metrics

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss to minimise."""
        return self._step(batch, "train")

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

    def on_fit_start(self) -> None:
        """Say what "balanced" comes to.

        Raises:
            UserError: if nobody counted the classes
        """
        if self.class_weights == "balanced":
            if self.train_loss.weight is None:
                raise UserError("class_weights 'balanced' needs the class_counts of the data; its spec has none")
            weights = self.train_loss.weight.tolist()
            note("loss", f"class weights {min(weights):.3g} to {max(weights):.3g}, balanced by the spec's class counts")

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
        metrics = self._metrics(stage)
        # torchmetrics adds up the processes, so sync_dist is not needed.
        for name, value in metrics.compute().items():
            self.log(name, value, prog_bar=name in (self.monitor, "train/loss"))
        metrics.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer, and the schedule with the trainer's number of optimizer steps."""
        return plan_training(
            self.trainer,
            self.network,
            self.optimizer,
            self.scheduler,
            scaling=self.rate_scaling,
            layer_decay=self.layer_decay,
            decay_all=self.decay_all,
            monitor=self.monitor,
            direction=self.directions[self.monitor],
        )

    def probabilities(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) uint8 to class probabilities (B, K) float32; they add up to 1 only for one label per image."""
        logits: Tensor = self(images).float()
        return logits.sigmoid() if self.spec.multi_label else logits.softmax(dim=1)

    def predict_images(
        self, images: Sequence[Any], *, top_k: int = 1, batch_size: int = 64
    ) -> list[Prediction] | list[MultiLabelPrediction]:
        """Classify images: paths, PIL images, or uint8 tensors (C, H, W) of any size.

        Args:
            images: any number of them; they are resized as the data spec says
            top_k: how many classes to name for each, the likeliest first; not for images that may have several labels
            batch_size: images that pass through the network at once

        Raises:
            UserError: if an image cannot be read, naming it, or a number makes no sense
        """
        return predict_images(self, images, top_k=top_k, batch_size=batch_size)
