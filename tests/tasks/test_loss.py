from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fulgurite.data import DataSpec
from fulgurite.errors import UserError
from fulgurite.tasks.loss import ClassificationLoss

LOGITS = torch.tensor([[log(3), 0.0], [log(3), 0.0]])  # probabilities 3/4 and 1/4
A, B = log(4 / 3), log(4)  # the loss of each class


def spec(**options: Any) -> DataSpec:
    names = tuple("abcdefgh"[: options.pop("classes", 2)])
    return DataSpec(class_names=names, channels=1, height=4, width=4, mean=(0.5,), std=(0.25,), **options)


def loss(targets: Any, logits: Tensor = LOGITS, **options: Any) -> float:
    data = {name: options.pop(name) for name in ("class_counts", "multi_label") if name in options}
    return float(ClassificationLoss(spec(**data), **options)(logits, torch.as_tensor(targets)))


@pytest.mark.parametrize(
    ("options", "targets", "expected"),
    [
        ({}, [0, 1], (A + B) / 2),
        ({"label_smoothing": 0.5}, [0, 0], 0.75 * A + 0.25 * B),
        ({"class_weights": [1, 3]}, [0, 1], (A + 3 * B) / 4),
        ({"class_weights": [1, 3]}, [0, 0], A),
        # 8 images, 2 classes: weights 8 / (2 * 2) and 8 / (2 * 6)
        ({"class_weights": "balanced", "class_counts": (2, 6)}, [0, 1], (2 * A + 2 / 3 * B) / (2 + 2 / 3)),
        ({}, [[0.25, 0.75], [1.0, 0.0]], (0.25 * A + 0.75 * B + A) / 2),
        ({"class_weights": [1, 3]}, [[0.25, 0.75], [1.0, 0.0]], (0.25 * A + 3 * 0.75 * B + A) / (0.25 + 3 * 0.75 + 1)),
    ],
)
def test_one_label(options: dict[str, Any], targets: Any, expected: float) -> None:
    assert loss(targets, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (A + log(2)) / 2),
        ({"label_smoothing": 0.2}, (0.9 * A + 0.1 * B + log(2)) / 2),
        ({"class_weights": [5, 7]}, (5 * A + log(2)) / 2),  # the second label is absent
    ],
)
def test_several_labels(options: dict[str, Any], expected: float) -> None:
    hot = torch.tensor([[1, 0]], dtype=torch.uint8)
    assert loss(hot, LOGITS[:1], multi_label=True, **options) == pytest.approx(expected)
    assert loss(hot.float(), LOGITS[:1], multi_label=True, **options) == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weights", [None, [0.5, 2, 1]])
def test_labels_and_their_shares_give_the_same(smoothing: float, weights: Any) -> None:
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 1])
    measure = ClassificationLoss(spec(classes=3), label_smoothing=smoothing, class_weights=weights)
    weight = weights and torch.tensor(weights)
    expected = F.cross_entropy(logits, labels, weight, label_smoothing=smoothing)
    torch.testing.assert_close(measure(logits, labels), expected)
    torch.testing.assert_close(measure(logits, F.one_hot(labels, 3).float()), expected)


def test_class_without_images_has_no_weight() -> None:
    measure = ClassificationLoss(spec(classes=3, class_counts=(4, 0, 2)), class_weights="balanced")
    assert measure.weight is not None
    assert measure.weight.tolist() == pytest.approx([6 / 12, 0, 6 / 6])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("targets", [torch.tensor([1]), torch.tensor([[0.0, 1.0]])])
def test_batch_without_weight_teaches_nothing(targets: Tensor, smoothing: float) -> None:
    logits = LOGITS[:1].clone().requires_grad_()
    value = ClassificationLoss(spec(), label_smoothing=smoothing, class_weights=[1, 0])(logits, targets)
    value.backward()
    assert value == 0
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0, 0]]


def test_weights_are_not_in_the_state() -> None:
    assert ClassificationLoss(spec(), class_weights=[1, 2]).state_dict() == {}


@pytest.mark.parametrize(("multi_label", "targets"), [(False, [0, 1]), (False, [[0.25, 0.75], [1, 0]]), (True, [[1, 0], [0, 1]])])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_low_precision(multi_label: bool, targets: Any, weights: Any) -> None:
    measure = ClassificationLoss(spec(multi_label=multi_label), label_smoothing=0.1, class_weights=weights)
    expected = float(measure(LOGITS, torch.tensor(targets)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(measure(LOGITS, torch.tensor(targets))) == pytest.approx(expected, rel=1e-6)
    assert float(measure.bfloat16()(LOGITS.bfloat16(), torch.tensor(targets))) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        ({}, {"label_smoothing": 1.0}, "label_smoothing is 1.0; allowed: from 0 to below 1"),
        ({}, {"label_smoothing": -0.1}, "label_smoothing is -0.1; allowed: from 0 to below 1"),
        ({}, {"class_weights": [1.0]}, "class_weights has 1 values for 2 classes"),
        ({}, {"class_weights": [1, -1]}, "class_weights is [1, -1]; each must be 0 or above, and one at least above"),
        ({}, {"class_weights": [0, 0]}, "class_weights is [0, 0]; each must be 0 or above, and one at least above"),
        ({}, {"class_weights": [1, float("nan")]}, "class_weights is [1, nan]; each must be 0 or above, and one at least above"),
        ({}, {"class_weights": "balance"}, "class_weights is 'balance'; allowed: balanced, a list of numbers, null"),
        (
            {},
            {"class_weights": "balanced"},
            "class_weights 'balanced' needs the class_counts of the data; its spec has none",
        ),
        (
            {"class_counts": (0, 0)},
            {"class_weights": "balanced"},
            "class_weights 'balanced' needs the class_counts of the data; its spec counts no image",
        ),
        (
            {"class_counts": (3, 2), "multi_label": True},
            {"class_weights": "balanced"},
            (
                "class_weights 'balanced' is for one label per image: class_counts do not tell how many images lack a label\n"
                "give a list of weights, such as images without the label / images with it"
            ),
        ),
    ],
)
def test_bad_arguments_are_named(data: dict[str, Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        ClassificationLoss(spec(**data), **options)
    assert str(error.value) == text


def test_bce_asks_of_each_class_whether_it_is_the_label() -> None:
    # logits log 3 and 0: the first class is there with 3/4, the second with 1/2
    assert loss([0, 1], kind="bce") == pytest.approx((A + log(2) + B + log(2)) / 4)
    assert loss([[1.0, 0.0], [0.0, 1.0]], kind="bce") == loss([0, 1], kind="bce")  # as mixing gives them
    smooth = 0.9 * A + 0.1 * B + log(2)  # 0.2 spread over two classes
    assert loss([0, 0], kind="bce", label_smoothing=0.2) == pytest.approx(smooth / 2)
    hot = torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)
    assert loss(hot, multi_label=True, kind="bce") == loss(hot, multi_label=True)


@pytest.mark.parametrize(
    ("options", "targets", "expected"),
    [
        ({}, [0, 1], (A / 16 + B * 9 / 16) / 2),
        ({"class_weights": [1, 3]}, [0, 1], (A / 16 + 3 * B * 9 / 16) / 4),
        ({"label_smoothing": 0.5}, [0, 0], 0.75 * A / 16 + 0.25 * B * 9 / 16),
        ({}, [[0.25, 0.75], [1.0, 0.0]], (0.25 * A / 16 + 0.75 * B * 9 / 16 + A / 16) / 2),
        ({"kind": "bce"}, [0, 1], (A / 16 + log(2) / 4 + B * 9 / 16 + log(2) / 4) / 4),
    ],
)
def test_focal_loss(options: dict[str, Any], targets: Any, expected: float) -> None:
    assert loss(targets, focal_gamma=2.0, **options) == pytest.approx(expected)


def test_focal_loss_without_focus_is_the_plain_one_and_has_finite_gradients_when_sure() -> None:
    each: tuple[dict[str, Any], ...] = ({}, {"label_smoothing": 0.3, "class_weights": [1, 3]})
    for options in each:
        logits = torch.tensor([[0.5, -1.0], [2.0, 1.0], [-0.3, 0.4]])
        assert loss([0, 0, 1], logits, focal_gamma=1e-9, **options) == pytest.approx(loss([0, 0, 1], logits, **options))
    for kind in ("cross_entropy", "bce"):
        logits = torch.tensor([[100.0, -100.0]], requires_grad=True)
        ClassificationLoss(spec(), kind=kind, focal_gamma=0.5)(logits, torch.tensor([0])).backward()
        assert logits.grad is not None
        assert bool(logits.grad.isfinite().all())


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"loss is 'cross_entrpy' \(did you mean 'cross_entropy'\?\); allowed: cross_entropy, bce"
    ):
        ClassificationLoss(spec(), kind="cross_entrpy")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="focal_gamma is -1; it must be at least 0"):
        ClassificationLoss(spec(), focal_gamma=-1)
