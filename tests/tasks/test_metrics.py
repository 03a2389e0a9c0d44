from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import average_precision_score

from fulgurite.data import DataSpec
from fulgurite.tasks.metrics import EpochMetrics, MeanAveragePrecision

SPEC = DataSpec(class_names=("ant", "bee", "cat"), channels=1, height=4, width=4, mean=(0.5,), std=(0.25,), multi_label=True)
# Four images, three classes; nothing shows a cat.
PROBABILITIES = torch.tensor([[0.9, 0.6, 0.2], [0.8, 0.45, 0.2], [0.7, 0.4, 0.2], [0.1, 0.3, 0.2]])
LABELS = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.uint8)


def test_several_labels_are_measured_over_all_samples() -> None:
    metrics = EpochMetrics("val", SPEC, top_k=5)
    for rows, loss in ((slice(0, 3), 1.0), (slice(3, 4), 2.0)):
        metrics.update(torch.tensor(loss), PROBABILITIES[rows].logit(), LABELS[rows])
    expected = {
        "val/loss": 5 / 4,
        "val/acc": 9 / 12,  # wrong: an ant too many, a bee too many, a bee missed
        "val/f1_macro": (4 / 5 + 0 + 0) / 3,
        "val/map": ((1 / 1 + 2 / 3) / 2 + 1 / 3) / 2,  # the ants are found first and third, the bee third
    }
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(expected)
    assert metrics.directions == {"val/loss": "min", "val/acc": "max", "val/f1_macro": "max", "val/map": "max"}
    metrics.reset()
    metrics.update(torch.tensor(0.0), PROBABILITIES[:1].logit(), LABELS[:1])
    assert metrics.compute()["val/acc"] == pytest.approx(2 / 3)


def test_training_measures_what_is_cheap() -> None:
    assert list(EpochMetrics("train", SPEC, top_k=5).directions) == ["train/loss", "train/acc"]


def test_logits_are_never_taken_for_probabilities() -> None:
    metrics = EpochMetrics("train", SPEC, top_k=5)
    metrics.update(torch.tensor(0.0), torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[1, 1, 1]]))
    assert metrics.compute()["train/acc"] == 1


def test_average_precision_is_scikit_learns_where_the_bins_keep_the_probabilities_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = (torch.randint(0, 50, (200, 4), generator=generator) + 0.5) / 50  # with many that are equal
    labels = (torch.rand(200, 4, generator=generator) < 0.3).long()
    metric = MeanAveragePrecision(4, bins=50)
    for rows in torch.arange(200).split(64):
        metric.update(probabilities[rows], labels[rows])
    assert float(metric.compute()) == pytest.approx(average_precision_score(labels, probabilities, average="macro"))


def test_state_does_not_grow() -> None:
    metric = MeanAveragePrecision(3)
    for _ in range(3):
        metric.update(PROBABILITIES, LABELS)
    assert [tuple(state.shape) for state in metric.metric_state.values() if isinstance(state, torch.Tensor)] == [(2, 3, 1000)]


@pytest.mark.filterwarnings("error")
def test_average_precision_without_any_label_is_no_number() -> None:
    metric = MeanAveragePrecision(3)
    metric.update(PROBABILITIES, torch.zeros(4, 3))
    assert math.isnan(metric.compute())


def test_probabilities_at_the_ends_and_of_a_diverged_network_have_a_bin() -> None:
    metric = MeanAveragePrecision(1)
    metric.update(torch.tensor([[1.0], [0.0], [math.nan]]), torch.tensor([[1], [0], [0]]))
    assert metric.compute() == 1
    assert int(metric.counts.sum()) == 3
