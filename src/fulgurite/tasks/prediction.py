"""What a classifier says of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from fulgurite.data.decode import to_spec
from fulgurite.errors import UserError

THRESHOLD = 0.5
"""Where an image may have several labels, it has those of this probability and above."""


@dataclass(frozen=True)
class Prediction:
    """The likeliest class, its probability, and the likeliest few as (label, probability)."""

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]

    @classmethod
    def from_top(cls, probabilities: Sequence[float], indices: Sequence[int], class_names: Sequence[str]) -> Prediction:
        """Name the classes of a top-k result, the likeliest first."""
        top = tuple((class_names[index], probability) for index, probability in zip(indices, probabilities, strict=True))
        return cls(label=top[0][0], probability=top[0][1], top=top)


@dataclass(frozen=True)
class MultiLabelPrediction:
    """The labels of an image that may have any number of them, the likeliest first, and their probabilities."""

    labels: tuple[str, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def from_top(cls, probabilities: Sequence[float], indices: Sequence[int], class_names: Sequence[str]) -> MultiLabelPrediction:
        """Name the classes of a top-k result that reach ``THRESHOLD``."""
        chosen = [pair for pair in zip(indices, probabilities, strict=True) if pair[1] >= THRESHOLD]
        return cls(
            labels=tuple(class_names[index] for index, _ in chosen), probabilities=tuple(probability for _, probability in chosen)
        )


def check_top_k(top_k: int, num_classes: int, *, multi_label: bool) -> None:
    """Refuse a number of classes to name that cannot be.

    Raises:
        UserError: if it is not in 1..K, or not 1 where the threshold decides
    """
    if multi_label and top_k != 1:
        raise UserError(
            f"top_k is {top_k}, but an image has any number of labels: those of probability {THRESHOLD} and above are named\n"
            "leave top_k out"
        )
    if not 1 <= top_k <= num_classes:
        raise UserError(f"top_k is {top_k}; allowed: 1 to {num_classes}, the number of classes")


def likeliest(probability: Tensor, top_k: int, *, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Sort each image's classes by probability and keep the first k; equal ones keep the order of the labels.

    Args:
        probability: (B, K) float
        top_k: k, where each image has one label
        multi_label: whether k is the number of classes that reach ``THRESHOLD`` in the image that has most of them

    Returns:
        probabilities (B, k) float32 and class indices (B, k) int64, the likeliest first
    """
    # A stable sort, where topk may order equal probabilities in any way.
    values, indices = probability.float().sort(dim=1, descending=True, stable=True)
    k = int((values >= THRESHOLD).sum(dim=1).max()) if multi_label else top_k
    return values[:, :k], indices[:, :k]


@torch.inference_mode()
def predict_images(task: Any, images: Sequence[Any], *, top_k: int, batch_size: int) -> list[Any]:
    """Classify images, in evaluation mode; the task is left as it was.

    Args:
        task: a :class:`~fulgurite.tasks.ClassificationTask`
        images: paths, PIL images, or uint8 tensors (C, H, W)
        top_k: how many classes to name for each
        batch_size: images that pass through the network at once

    Raises:
        UserError: if an image cannot be read, naming it, or a number makes no sense
    """
    if isinstance(images, str | Path | Image):
        raise UserError("predict_images takes a list: predict_images([image])")
    names, multi_label = task.spec.class_names, task.spec.multi_label
    check_top_k(top_k, len(names), multi_label=multi_label)
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1")
    kind: Any = MultiLabelPrediction if multi_label else Prediction
    training = [module for module in task.modules() if module.training]
    task.eval()
    predictions: list[Any] = []
    try:
        for start in range(0, len(images), batch_size):
            batch = torch.stack([to_spec(image, task.spec) for image in images[start : start + batch_size]])
            top = likeliest(task.probabilities(batch.to(task.device)), top_k, multi_label=multi_label)
            rows = zip(*(part.tolist() for part in top), strict=True)
            predictions += [kind.from_top(probabilities, indices, names) for probabilities, indices in rows]
    finally:
        for module in training:
            module.training = True
    return predictions
