"""The classification loss, for one label per image or several, with smoothed, weighted and mixed targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError

ClassWeights = Literal["balanced"] | list[float]


class ClassificationLoss(nn.Module):
    """Compute the cross-entropy, or for several labels per image the binary cross-entropy of each class, as a mean.

    Args:
        spec: of the data
        label_smoothing: share of the target spread over all classes (arXiv:1512.00567), or over yes and no
        class_weights: one for each class, or "balanced", which needs the spec's class counts. With one label per image the
            mean is weighted; with several, a weight multiplies the loss where the label is present

    Raises:
        UserError: if a number makes no sense or the spec does not have what "balanced" needs
    """

    weight: Tensor | None

    def __init__(
        self, spec: DataSpec, *, label_smoothing: float = 0.0, class_weights: ClassWeights | Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing is {label_smoothing}; allowed: from 0 to below 1")
        self.multi_label = spec.multi_label
        self.label_smoothing = label_smoothing
        # Not persistent: the configuration and the spec in a checkpoint say it already.
        self.register_buffer("weight", _weight(spec, class_weights), persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss (scalar) of logits (B, K) and targets: labels (B,) int64, or shares of classes (B, K)."""
        if self.multi_label:
            targets = targets.float() * (1 - self.label_smoothing) + self.label_smoothing / 2
            return F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=self.weight)
        if self.weight is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        # PyTorch divides by the sum of the weights if the targets are labels, but by B if they are shares of classes.
        total = F.cross_entropy(logits, targets, self.weight, reduction="sum", label_smoothing=self.label_smoothing)
        weight = (self.weight[targets] if targets.ndim == 1 else targets * self.weight).sum()
        return total / weight.masked_fill(weight == 0, math.inf)  # nothing to learn from a batch that has no weight


def _weight(spec: DataSpec, class_weights: ClassWeights | Sequence[float] | None) -> Tensor | None:
    """Return the weights (K,) float32, or None."""
    if class_weights is None:
        return None
    if isinstance(class_weights, str):
        if class_weights != "balanced":
            raise UserError(f"class_weights is '{class_weights}'; allowed: balanced, a list of numbers, null")
        return torch.tensor(_balanced(spec))
    if len(class_weights) != spec.num_classes:
        raise UserError(f"class_weights has {len(class_weights)} values for {spec.num_classes} classes")
    if not all(0 <= weight < math.inf for weight in class_weights) or not any(class_weights):
        raise UserError(f"class_weights is {list(class_weights)}; each must be 0 or above, and one at least above")
    return torch.tensor([float(weight) for weight in class_weights])


def _balanced(spec: DataSpec) -> list[float]:
    """Return for each class N / (K * count): all classes then weigh the same over an epoch."""
    if spec.multi_label:
        raise UserError(
            "class_weights 'balanced' is for one label per image: class_counts do not tell how many images lack a label\n"
            "give a list of weights, such as images without the label / images with it"
        )
    if spec.class_counts is None or not any(spec.class_counts):
        found = "has none" if spec.class_counts is None else "counts no image"
        raise UserError(f"class_weights 'balanced' needs the class_counts of the data; its spec {found}")
    images = sum(spec.class_counts)
    return [images / (spec.num_classes * count) if count else 0.0 for count in spec.class_counts]
