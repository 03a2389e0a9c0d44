"""What is measured over an epoch: counts, whose size does not grow with the number of samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

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
        self.totals = Totals(spec.num_classes if spec.multi_label else 1)  # cheap enough for each training step
        metrics = _of_several_labels(spec.num_classes) if spec.multi_label else _of_one_label(spec.num_classes, top_k)
        # compute_groups: torchmetrics 1.9 merges metrics whose states are equal after one batch, so a first batch that is
        # all right would make top-k the same as top-1 for ever.
        self.of_evaluation = None if stage == "train" else MetricCollection(metrics, compute_groups=False)

    @property
    def directions(self) -> dict[str, Direction]:
        """Every name, with the direction in which the value gets better."""
        better: dict[str, Direction] = {"loss": "min", "acc": "max"}
        better |= dict.fromkeys(map(str, self.of_evaluation or ()), "max")
        return {f"{self.stage}/{name}": direction for name, direction in better.items()}

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its mean loss (scalar), logits (B, K), and labels (B,) int64 or multi-hot (B, K) uint8."""
        self.totals.update(loss.detach(), logits, labels)
        if self.of_evaluation is not None:
            scores = logits.detach()
            # Left to itself, torchmetrics takes a batch of logits that happen to lie within 0..1 for probabilities.
            self.of_evaluation.update(scores.float().sigmoid() if self.multi_label else scores, labels)

    def compute(self) -> dict[str, Tensor]:
        """Return the epoch's values by name."""
        values = self.totals.compute() | (self.of_evaluation.compute() if self.of_evaluation is not None else {})
        return {f"{self.stage}/{name}": value for name, value in values.items()}

    def reset(self) -> None:
        """Begin another epoch."""
        # Lightning evaluates in inference mode; states that are reset there could not be updated by a later `fit`.
        with torch.inference_mode(False):
            self.totals.reset()
            if self.of_evaluation is not None:
                self.of_evaluation.reset()


def _of_one_label(num_classes: int, top_k: int) -> dict[str, Any]:
    metrics = {
        "acc_macro": MulticlassAccuracy(num_classes, average="macro", validate_args=False),
    }
    if 1 < top_k < num_classes:
        metrics[f"acc_top{top_k}"] = MulticlassAccuracy(num_classes, average="micro", top_k=top_k, validate_args=False)
    return metrics


def _of_several_labels(num_classes: int) -> dict[str, Any]:
    return {
        "f1_macro": MultilabelF1Score(num_classes, average="macro", validate_args=False),
        "map": MeanAveragePrecision(num_classes),
    }


class Totals(Metric):
    """Average the loss over the samples, and whether a label is right over the labels: one for each image, or its K yes and no.

    It looks at no value, which would wait for the device: a NaN loss shows as a NaN mean.

    Args:
        labels: K where an image has any number of labels, else 1
    """

    full_state_update = False
    loss: Tensor
    samples: Tensor
    right: Tensor

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.labels = labels
        self.add_state("loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Count the updates, as ``compute`` wants; what else torchmetrics 1.9 wraps round each takes as long as the update."""

        @wraps(update)
        def counted(*batch: Tensor) -> None:
            state = vars(self)  # not through nn.Module's __setattr__
            state["_computed"] = None
            state["_update_count"] += 1
            update(*batch)

        return counted

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its mean loss (scalar), logits (B, K), and labels (B,) int64 or multi-hot (B, K)."""
        right = logits.argmax(dim=1) == labels if labels.ndim == 1 else (logits > 0) == labels.bool()
        if self.loss.dtype in (torch.float16, torch.bfloat16):  # a task in 16 bits casts it along, and it soon stands still
            self.loss = self.loss.float()
        # In place: assigning an attribute of a metric costs as much as adding.
        self.loss.add_(loss, alpha=len(labels))
        self.right.add_(right.count_nonzero())  # quicker than sum()
        self.samples.add_(len(labels))

    def compute(self) -> dict[str, Tensor]:
        """Return the means (scalars) by name; NaN of nothing."""
        return {"loss": self.loss / self.samples, "acc": self.right / (self.samples * self.labels)}


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
