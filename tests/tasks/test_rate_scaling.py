from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fulgurite.errors import UserError
from fulgurite.tasks.rate_scaling import GlobalBatch, RateScaling


def trainer(data: Any = None, loaders: Any = None, processes: int = 1, accumulate: int = 1) -> Any:
    combined = SimpleNamespace(flattened=loaders) if loaders is not None else None
    loop = SimpleNamespace(_combined_loader=combined, setup_data=lambda: None)
    return SimpleNamespace(datamodule=data, fit_loop=loop, world_size=processes, accumulate_grad_batches=accumulate)


def size(number: Any) -> Any:
    return SimpleNamespace(batch_size=number)


@pytest.mark.parametrize(
    ("given", "samples", "text"),
    [
        (trainer(size(64)), 64, "64 samples a step"),
        (trainer(size(64), processes=2), 128, "128 samples a step (64 x 2 processes)"),
        (trainer(size(64), [size(7)], accumulate=4), 256, "256 samples a step (64 x 4 batches)"),
        (trainer(size(2000), processes=2, accumulate=4), 16000, "16,000 samples a step (2,000 x 2 processes x 4 batches)"),
        (trainer(None, [size(8)]), 8, "8 samples a step"),
        (trainer(object(), [size(8), size(8)]), 8, "8 samples a step"),
        (trainer(None, [size(8), size(9)]), None, "batches of unknown size"),
        (trainer(None, [size(None)], processes=2), None, "batches of unknown size x 2 processes"),
        (trainer(), None, "batches of unknown size"),
    ],
)
def test_samples_of_a_step(given: Any, samples: int | None, text: str) -> None:
    batch = GlobalBatch.of(given)
    assert (batch.samples, str(batch)) == (samples, text)


@pytest.mark.parametrize(
    ("rule", "factor", "text"),
    [
        ("none", 1.0, "rate 0.01"),
        ("linear", 4.0, "rate 0.01 (0.0025 scaled linearly from 64)"),
        ("sqrt", 2.0, "rate 0.01 (0.005 scaled by the square root from 64)"),
    ],
)
def test_rules(rule: Any, factor: float, text: str) -> None:
    scaling, batch = RateScaling(rule, 64), GlobalBatch(64, processes=2, accumulate=2)
    assert scaling.factor(batch) == factor
    assert scaling.describe(0.01, batch) == text
    assert RateScaling(rule, 256).factor(batch) == 1


def test_batch_that_nobody_knows_cannot_be_scaled_by() -> None:
    unknown = GlobalBatch(None, 1, 1)
    assert RateScaling("none", 64).factor(unknown) == 1
    with pytest.raises(UserError) as error:
        RateScaling("sqrt", 64).factor(unknown)
    assert str(error.value) == (
        "rate_scaling is sqrt, and the data has no batch_size to scale by: "
        "take a data module that has one, or set rate_scaling to none"
    )


@pytest.mark.parametrize(
    ("rule", "reference", "text"),
    [
        ("linar", 64, "rate_scaling is 'linar' (did you mean 'linear'?); allowed: none, linear, sqrt"),
        ("linear", None, "rate_scaling is linear: set reference_batch, the samples of a step that the rate suits"),
        ("none", 0, "reference_batch is 0; it must be at least 1"),
    ],
)
def test_rule_that_cannot_be_followed_is_refused(rule: Any, reference: int | None, text: str) -> None:
    with pytest.raises(UserError) as error:
        RateScaling(rule, reference)
    assert str(error.value) == text
