"""What is measured over an epoch: counts, whose size does not grow with the number of samples."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelAccuracy, MultilabelF1Score

from fulgurite.data.spec import DataSpec

Direction = Literal["min", "max"]
Stage = Literal["train", "val", "test"]


class EpochMetrics(nn.Module):
    """Measure a stage over all samples of an epoch, not as a mean of batches, and over all processes.

    Args:
        stage: begins each name, as in ``val/loss``
        spec: of the data
        top_k: for one label per image, also whether it is among the k likeliest classes, where there are more than k
    """

    def __init__(self, stage: Stage, spec: DataSpec, *, top_k: int) -> None:
        super().__init__()
        self.stage = stage
        self.multi_label = spec.multi_label
        # "disable": looking for NaN would wait for the device at each step; a NaN loss shows as a NaN mean.
        self.mean_loss = MeanMetric(nan_strategy="disable")
        metrics = _of_several_labels(spec.num_classes) if spec.multi_label else _of_one_label(spec.num_classes, top_k)
        if stage == "train":
            # Loss and micro accuracy are cheap enough for each training step; the rest is for evaluation.
            metrics = {"acc": metrics["acc"]}
        # compute_groups: torchmetrics 1.9 merges metrics whose states are equal after one batch, so a first batch that is
        # all right would make top-k the same as top-1 for ever.
        self.metrics = MetricCollection(metrics, prefix=f"{stage}/", compute_groups=False)

    @property
    def directions(self) -> dict[str, Direction]:
        """Every name, with the direction in which the value gets better."""
        better: dict[str, Direction] = {f"{self.stage}/loss": "min"}
        return better | {str(name): "max" for name in self.metrics.keys()}  # noqa: SIM118  # only keys() has the prefix

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its mean loss (scalar), logits (B, K), and labels (B,) int64 or multi-hot (B, K) uint8."""
        # Once for each sample, since torchmetrics 1.9 drops a weight when it is told not to look for NaN.
        self.mean_loss.update(loss.detach().expand(len(labels)))
        scores = logits.detach()
        # Left to itself, torchmetrics takes a batch of logits that happen to lie within 0..1 for probabilities.
        self.metrics.update(scores.float().sigmoid() if self.multi_label else scores, labels)

    def compute(self) -> dict[str, Tensor]:
        """Return the epoch's values by name."""
        return {f"{self.stage}/loss": self.mean_loss.compute(), **self.metrics.compute()}

    def reset(self) -> None:
        """Begin another epoch."""
        # Lightning evaluates in inference mode; states that are reset there could not be updated by a later `fit`.
        with torch.inference_mode(False):
            self.mean_loss.reset()
            self.metrics.reset()


def _of_one_label(num_classes: int, top_k: int) -> dict[str, Any]:
    metrics = {
        "acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
        "acc_macro": MulticlassAccuracy(num_classes, average="macro", validate_args=False),
    }
    if 1 < top_k < num_classes:
        metrics[f"acc_top{top_k}"] = MulticlassAccuracy(num_classes, average="micro", top_k=top_k, validate_args=False)
    return metrics


def _of_several_labels(num_classes: int) -> dict[str, Any]:
    return {
        "acc": MultilabelAccuracy(num_classes, average="micro", validate_args=False),
        "f1_macro": MultilabelF1Score(num_classes, average="macro", validate_args=False),
        "map": MeanAveragePrecision(num_classes),
    }


class MeanAveragePrecision(Metric):
    """Average the precision over the recall of each class, then over the classes that occur; NaN where none does.

    Probabilities count in bins: (B, K) work a step, where torchmetrics compares each with each threshold, (B, K, bins).

    Args:
        num_classes: number of classes K
        bins: of equal width; probabilities of one bin count as equal
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int, *, bins: int = 1000) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.bins = bins
        self.add_state("counts", torch.zeros(2, num_classes, bins, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Count probabilities (B, K) float and multi-hot labels (B, K) of any type."""
        # Clamped on both sides: of NaN, `long` makes any number.
        bins = (probabilities * self.bins).long().clamp(0, self.bins - 1)
        classes = torch.arange(self.num_classes, device=bins.device)
        cells = ((labels.long() * self.num_classes + classes) * self.bins + bins).flatten()
        # Not bincount, which waits for a CUDA device.
        self.counts.view(-1).index_add_(0, cells, torch.ones_like(cells))

    def compute(self) -> Tensor:
        """Return the mean average precision (scalar)."""
        false, true = self.counts.flip(-1).cumsum(-1)  # (K, bins) positives from each bin upwards, the highest first
        precision = true / (true + false).clamp(min=1)
        recall = true / true[:, -1:]  # NaN in a class that does not occur
        steps = recall.diff(dim=-1, prepend=torch.zeros_like(recall[:, :1]))
        of_class: Tensor = (precision * steps).sum(-1)
        return of_class.nanmean()
