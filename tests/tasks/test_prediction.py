from __future__ import annotations

import pytest
import torch

from fulgurite.errors import UserError
from fulgurite.tasks.prediction import MultiLabelPrediction, Prediction, check_top_k, likeliest

NAMES = ["cat", "dog", "eel"]


def test_classes_are_named_in_the_order_given() -> None:
    prediction = Prediction.from_top([0.75, 0.25], [2, 0], NAMES)
    assert prediction == Prediction(label="eel", probability=0.75, top=(("eel", 0.75), ("cat", 0.25)))


def test_labels_below_the_threshold_are_left_out() -> None:
    assert MultiLabelPrediction.from_top([0.75, 0.5, 0.49], [2, 0, 1], NAMES) == MultiLabelPrediction(("eel", "cat"), (0.75, 0.5))
    assert MultiLabelPrediction.from_top([0.49], [2], NAMES) == MultiLabelPrediction((), ())


def test_likeliest_come_first_and_equal_ones_in_the_order_of_the_labels() -> None:
    probability = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.75, 1.0]], dtype=torch.bfloat16)
    values, indices = likeliest(probability, 2, multi_label=False)
    assert (values.tolist(), values.dtype) == ([[0.5, 0.25], [1.0, 0.75]], torch.float32)
    assert indices.tolist() == [[1, 0], [2, 1]]
    assert likeliest(torch.full((1, 100), 0.01), 3, multi_label=False)[1].tolist() == [[0, 1, 2]]


def test_several_labels_keep_as_many_classes_as_one_image_needs() -> None:
    probability = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.75, 0.0]])
    assert likeliest(probability, 1, multi_label=True)[1].tolist() == [[1, 0], [1, 0]]
    assert likeliest(probability[:, :1] / 2, 1, multi_label=True)[0].shape == (2, 0)


@pytest.mark.parametrize(
    ("top_k", "multi_label", "text"),
    [
        (0, False, "top_k is 0; allowed: 1 to 3, the number of classes"),
        (4, False, "top_k is 4; allowed: 1 to 3, the number of classes"),
        (
            2,
            True,
            "top_k is 2, but an image has any number of labels: those of probability 0.5 and above are named\nleave top_k out",
        ),
    ],
)
def test_number_of_classes_that_cannot_be_is_refused(top_k: int, multi_label: bool, text: str) -> None:
    with pytest.raises(UserError) as error:
        check_top_k(top_k, 3, multi_label=multi_label)
    assert str(error.value) == text
    check_top_k(1, 3, multi_label=multi_label)
