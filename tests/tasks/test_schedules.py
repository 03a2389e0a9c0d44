from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD

from fulgurite.errors import UserError
from fulgurite.tasks.schedules import WarmupCosine


def rates(total_steps: int, **options: Any) -> list[float]:
    """Return the rate of each step of a run, and the one after the last."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = WarmupCosine(optimizer, total_steps, **options)
    found = []
    for _ in range(total_steps + 1):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


def test_rises_then_falls_to_zero() -> None:
    found = rates(10, warmup=0.4)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert found[4:] == pytest.approx([1 + math.cos(math.pi * step / 6) for step in range(7)])


def test_final_is_a_share_of_the_rate() -> None:
    found = rates(4, warmup=0.0, final=0.25)
    assert found == pytest.approx([2.0, 0.5 + 0.75 * (1 + math.sqrt(0.5)), 1.25, 0.5 + 0.75 * (1 - math.sqrt(0.5)), 0.5])


@pytest.mark.parametrize(("total_steps", "warmup"), [(1, 0.0), (1, 1.0), (3, 1.0), (0, 0.5)])
def test_extremes_stay_within_the_rate(total_steps: int, warmup: float) -> None:
    assert all(0 <= rate <= 2.0 for rate in rates(total_steps, warmup=warmup))


def test_rate_stays_at_the_end_after_the_last_step() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = WarmupCosine(optimizer, 3, final=0.5)
    for _ in range(6):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["warmup", "final"])
@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_share_outside_its_range_is_refused(name: str, share: float) -> None:
    with pytest.raises(UserError, match=rf"^{name} is {share}; it is a share, from 0 to 1$"):
        rates(4, **{name: share})
