"""The classification loss, for one label per image or several, with smoothed, weighted and mixed targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError, did_you_mean

ClassWeights = Literal["balanced"] | list[float]
Kind = Literal["cross_entropy", "bce"]
_LEAST = 1e-6  # that a focal loss takes a network for unsure


class ClassificationLoss(nn.Module):
    """Compute the cross-entropy, or for several labels per image the binary cross-entropy of each class, as a mean.

    Args:
        spec: of the data
        kind: "bce" asks of each class whether it is the label, also where there is one for each image (arXiv:2110.00476)
        focal_gamma: above 0, a label counts the less the surer the network is of it: by (1 - p) to this power (arXiv:1708.02002)
        label_smoothing: share of the target spread over all classes (arXiv:1512.00567), or over yes and no
        class_weights: one for each class, or "balanced", which needs the spec's class counts. With one label per image the
            mean is weighted; with several, a weight multiplies the loss where the label is present

    Raises:
        UserError: if a number makes no sense or the spec does not have what "balanced" needs
    """

    weight: Tensor | None

    def __init__(
        self,
        spec: DataSpec,
        *,
        kind: Kind = "cross_entropy",
        focal_gamma: float = 0.0,
        label_smoothing: float = 0.0,
        class_weights: ClassWeights | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(Kind):
            raise UserError(f"loss is '{kind}'{did_you_mean(kind, get_args(Kind))}; allowed: {', '.join(get_args(Kind))}")
        if not 0 <= focal_gamma < math.inf:
            raise UserError(f"focal_gamma is {focal_gamma}; it must be at least 0, which is off, and finite")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing is {label_smoothing}; allowed: from 0 to below 1")
        self.multi_label = spec.multi_label
        self.of_each_class = spec.multi_label or kind == "bce"
        self.focal_gamma = focal_gamma
        self.num_classes = spec.num_classes
        self.label_smoothing = label_smoothing
        # Not persistent: the configuration and the spec in a checkpoint say it already.
        self.register_buffer("weight", _weight(spec, class_weights), persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss (scalar) of logits (B, K) and targets: labels (B,) int64, or shares of classes (B, K)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # of a network in 16 bits
        weight = None if self.weight is None else self.weight.to(logits.dtype)
        if self.of_each_class:
            return self._of_each_class(logits, targets, weight)
        if self.focal_gamma:
            return self._focal(logits, targets, weight)
        if weight is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        # PyTorch divides by the sum of the weights if the targets are labels, but by B if they are shares of classes.
        total = F.cross_entropy(logits, targets, weight, reduction="sum", label_smoothing=self.label_smoothing)
        of_all = (weight[targets] if targets.ndim == 1 else targets * weight).sum()
        return total / of_all.masked_fill(of_all == 0, math.inf)  # nothing to learn from a batch that has no weight

    def _of_each_class(self, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        spread = self.label_smoothing / (self.num_classes if not self.multi_label else 2)
        targets = self._shares(targets) * (1 - self.label_smoothing) + spread
        losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        if self.focal_gamma:
            yes = logits.sigmoid()
            losses = losses * self._unsure(targets * (1 - yes) + (1 - targets) * yes)
        return losses.mean()

    def _focal(self, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        shares = self._shares(targets)
        smooth = shares * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes
        if weight is not None:
            shares, smooth = shares * weight, smooth * weight
        log_probabilities = logits.log_softmax(dim=1)
        total = shares.sum()  # as for the plain loss: of the labels before smoothing
        return -(smooth * self._unsure(-log_probabilities.expm1()) * log_probabilities).sum() / total.masked_fill(
            total == 0, math.inf
        )

    def _unsure(self, wrong: Tensor) -> Tensor:
        # Of a power below 1 the slope at 0 is infinite.
        return wrong.clamp(min=_LEAST) ** self.focal_gamma

    def _shares(self, targets: Tensor) -> Tensor:
        """Return the share (B, K) float32 of each class in an image's label."""
        return (F.one_hot(targets, self.num_classes) if targets.ndim == 1 else targets).float()


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
