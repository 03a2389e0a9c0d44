from __future__ import annotations

from fulgurite.tasks.prediction import Prediction


def test_classes_are_named_in_the_order_given() -> None:
    prediction = Prediction.from_top([0.75, 0.25], [2, 0], ["cat", "dog", "eel"])
    assert prediction == Prediction(label="eel", probability=0.75, top=(("eel", 0.75), ("cat", 0.25)))
