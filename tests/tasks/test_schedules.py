from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.tasks.metrics import Direction
from fulgurite.tasks.schedules import OneCycle, Plateau, StepDecay, WarmupCosine, make_schedule
from tests.callbacks.test_exact_resume import RUN, end, kill_at
from tests.commands import refused
from tests.conftest import SMALL
from tests.training import fit

# Lowers the rate of 0.01 after each look but the first, as no score is eleven times as good as the first.
PLATEAU = ["--model.scheduler", "fulgurite.tasks.schedules.Plateau", "--model.scheduler.patience", "0"]
NEVER_BETTER = [*PLATEAU, "--model.scheduler.threshold", "10"]


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


def follow(values: list[float], direction: Direction = "max", **options: Any) -> list[float]:
    """Return the rate after each value of the metric."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = Plateau(optimizer, 1, **options)
    trainer = SimpleNamespace(enable_validation=True, check_val_every_n_epoch=3, _val_check_time_interval=None)
    config = schedule.lightning_config(trainer, "val/x", direction)
    assert config == {"scheduler": schedule, "interval": "epoch", "frequency": 3, "monitor": "val/x", "strict": False}
    found = []
    for value in values:
        optimizer.step()
        schedule.step(value)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize(("direction", "values"), [("max", [1.0, 2.0, 1.5, 3.0]), ("min", [3.0, 2.0, 2.5, 1.0])])
def test_plateau_follows_the_metric_in_its_direction(direction: Direction, values: list[float]) -> None:
    assert follow(values, direction, patience=0) == pytest.approx([1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patience": 1}, [1.0, 1.0, 0.1, 0.1, 0.01]),
        ({"patience": 0, "factor": 0.5}, [1.0, 0.5, 0.25, 0.125, 0.0625]),
        ({"patience": 0, "cooldown": 2}, [1.0, 0.1, 0.1, 0.1, 0.01]),
        ({"patience": 0, "min_lr": 0.05}, [1.0, 0.1, 0.05, 0.05, 0.05]),
        ({"patience": 0, "threshold": 0.0005}, [1.0] * 5),
        ({}, [1.0] * 5),
    ],
)
def test_plateau_waits_and_lowers(options: dict[str, Any], expected: list[float]) -> None:
    a_little_better = [1.0, 1.001, 1.002, 1.003, 1.004]
    assert follow(a_little_better, **{"threshold": 0.01, **options}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"factor": 1.0}, "factor is 1.0; the rate is multiplied by it: above 0 and below 1"),
        ({"factor": 0.0}, "factor is 0.0; the rate is multiplied by it: above 0 and below 1"),
        ({"patience": -1}, "patience is -1; it must be at least 0"),
        ({"threshold": -0.1}, "threshold is -0.1; it must be at least 0"),
        ({"cooldown": -1}, "cooldown is -1; it must be at least 0"),
        ({"min_lr": float("nan")}, "min_lr is nan; it must be at least 0"),
    ],
)
def test_senseless_plateau_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        follow([], **options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("options", "looks"),
    [([], 3), (["--trainer.check_val_every_n_epoch", "2"], 1), (["--trainer.val_check_interval", "0.25"], 3)],
    ids=["each_epoch", "every_second_epoch", "four_times_an_epoch"],
)
def test_plateau_looks_once_in_each_epoch_with_a_validation(here: Path, options: list[str], looks: int) -> None:
    assert fit(*NEVER_BETTER, *options, epochs=3) == 0
    checkpoint = torch.load("runs/digits/v001/checkpoints/last.ckpt", weights_only=True)
    (schedule,), (optimizer,) = checkpoint["lr_schedulers"], checkpoint["optimizer_states"]
    assert schedule["last_epoch"] == looks
    assert schedule["mode"] == "max"  # the direction of val/acc
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0.01 * 0.1 ** (looks - 1))


@pytest.mark.parametrize(
    "options",
    [[], ["--trainer.check_val_every_n_epoch", "2"], ["--trainer.val_check_interval", "0.5"]],
    ids=["each_epoch", "every_second_epoch", "twice_an_epoch"],
)
def test_killed_run_with_a_plateau_ends_in_the_same_bits(here: Path, options: list[str]) -> None:
    args = [*RUN, *NEVER_BETTER, *options, "--trainer.max_epochs", "4"]
    assert main(["fit", *args, "--trainer.experiment", "whole"]) == 0
    kill_at(7, args)  # in the second epoch
    assert main(["fit", "--resume", "runs/digits/v001"]) == 0
    assert end(here / "runs/digits/v001") == end(here / "runs/whole/v001")


def test_plateau_without_validation_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "fit", *SMALL, *PLATEAU, "--trainer.limit_val_batches", "0") == (
        "a plateau schedule follows val/acc, and this run has no validation: "
        "give it a validation split and trainer.limit_val_batches above 0, or another scheduler"
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.val_check_interval", "6", "--trainer.check_val_every_n_epoch", "null"],
        ["--trainer.val_check_interval", "00:00:01:00"],
    ],
    ids=["batches", "time"],
)
def test_plateau_needs_validation_at_the_pace_of_epochs(
    here: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert refused(capsys, "fit", *SMALL, *PLATEAU, *options) == (
        "a plateau schedule looks at epochs, and this run validates without regard to them: "
        "set trainer.check_val_every_n_epoch, and trainer.val_check_interval to batches or a share of the epoch"
    )


@pytest.mark.parametrize("momentum", [(0.85, 0.95), None])
def test_one_cycle_rises_to_the_rate_and_falls(momentum: tuple[float, float] | None) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    schedule = make_schedule(partial(OneCycle, warmup=0.25, momentum=momentum), optimizer, 40)
    found = []
    for _ in range(40):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.step()
    rates = [rate for rate, _ in found]
    assert rates[0] == pytest.approx(0.02)
    assert max(rates) == pytest.approx(0.5, rel=0.01)
    assert rates.index(max(rates)) in (9, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 4e-6)
    momenta = [value for _, value in found]
    assert (min(momenta), max(momenta)) == (pytest.approx(momentum, abs=0.001) if momentum else (0.9, 0.9))


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (partial(ExponentialLR), "the scheduler ExponentialLR takes gamma where a schedule is given the number of steps"),
        (partial(StepLR, gamma=0.5), "the scheduler StepLR takes step_size where"),
        (partial(LinearLR), "the scheduler cannot be made of the optimizer and 40 steps: "),
        (partial(OneCycleLR), "the scheduler cannot be made of the optimizer and 40 steps: "),
        (partial(ReduceLROnPlateau), "the scheduler cannot be made of the optimizer and 40 steps: "),
    ],
)
def test_pytorchs_schedule_that_would_take_the_steps_for_something_else_is_refused(schedule: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        make_schedule(schedule, SGD([nn.Parameter(torch.zeros(1))], lr=0.5), 40)
    assert str(error.value).startswith(text)
    assert str(error.value).endswith("WarmupCosine, StepDecay, OneCycle, Plateau; or a class of your own around it")


@pytest.mark.parametrize("schedule", [CosineAnnealingLR, partial(PolynomialLR, power=2.0), WarmupCosine, StepDecay, OneCycle])
def test_schedules_that_are_told_the_steps_are_made(schedule: Any) -> None:
    make_schedule(schedule, SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9), 40)


@pytest.mark.parametrize("window", ["1", "3"])
def test_one_cycle_of_a_configuration_ends_with_the_run(here: Path, window: str) -> None:
    options = ["--model.scheduler", "fulgurite.tasks.schedules.OneCycle", "--trainer.accumulate_grad_batches", window]
    assert fit(*options) == 0
    state = torch.load("runs/digits/v001/checkpoints/last.ckpt", weights_only=True)
    assert state["lr_schedulers"][0]["last_epoch"] == state["global_step"]
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.01 * 4e-6)


def test_all_groups_keep_their_ratio() -> None:
    for schedule in (WarmupCosine, StepDecay, OneCycle, partial(PolynomialLR, power=2.0)):
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.5)]
        optimizer = SGD(groups, momentum=0.9)
        made = make_schedule(schedule, optimizer, 20)
        for _ in range(20):
            high, low = (group["lr"] for group in optimizer.param_groups)
            assert low == pytest.approx(high / 2)
            optimizer.step()
            made.step()


def test_plateau_keeps_the_ratio_of_groups_down_to_its_least_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 1e-9)]
    optimizer = SGD(groups)
    schedule = Plateau(optimizer, 1, factor=0.5, patience=0, min_lr=0.2)
    for expected in (1.0, 0.5, 0.25, 0.2, 0.2):
        schedule.step(1.0)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected, expected * 1e-9])


def stepped(total_steps: int, **options: Any) -> list[float]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, found = StepDecay(optimizer, total_steps, **options), []
    for _ in range(total_steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0] * 3 + [0.1] * 4 + [0.01] * 3),
        ({"milestones": [0.5, 0.8]}, [1.0] * 5 + [0.1] * 3 + [0.01] * 2),
        ({"milestones": 0.25, "factor": 0.5}, [1.0] * 2 + [0.5] * 3 + [0.25] * 3 + [0.125] * 2),
        ({"milestones": 0.2}, [1.0] * 2 + [0.1] * 2 + [0.01] * 2 + [0.001] * 2 + [0.0001] * 2),
        ({"milestones": 0.6, "warmup": 0.3}, [0.25, 0.5, 0.75] + [1.0] * 3 + [0.1] * 4),
        ({"milestones": [0.1], "warmup": 0.3}, [0.25, 0.05, 0.075] + [0.1] * 7),  # lowered while it rises
    ],
)
def test_step_decay(options: dict[str, Any], expected: list[float]) -> None:
    assert stepped(10, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"factor": 1.0}, "factor is 1.0; the rate is multiplied by it: above 0 and below 1"),
        ({"warmup": 2.0}, "warmup is 2.0; it is a share, from 0 to 1"),
        ({"milestones": []}, "milestones is []; they are rising shares of the run, above 0 and below 1"),
        ({"milestones": [0.5, 0.5]}, "milestones is [0.5, 0.5]; they are rising shares of the run, above 0 and below 1"),
        ({"milestones": [30, 60]}, "milestones is [30, 60]; they are rising shares of the run, above 0 and below 1"),
        ({"milestones": 30}, "milestones is 30; they are rising shares of the run, above 0 and below 1"),
        ({"milestones": 0.0}, "milestones is 0.0; they are rising shares of the run, above 0 and below 1"),
    ],
)
def test_senseless_step_decay_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        stepped(10, **options)
    assert str(error.value) == text


def test_step_decay_of_a_configuration(here: Path) -> None:
    steps = ["--model.scheduler", "fulgurite.tasks.schedules.StepDecay", "--model.scheduler.milestones", "[0.25,0.5]"]
    assert fit(*steps) == 0
    state = torch.load("runs/digits/v001/checkpoints/last.ckpt", weights_only=True)
    assert state["lr_schedulers"][0]["milestones"] == [0.25, 0.5]
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.0001)
    assert main(["fit", "--resume", "--model.scheduler.milestones", "[0.75]", "--trainer.max_epochs", "3"]) == 0
    state = torch.load("runs/digits/v001/checkpoints/last.ckpt", weights_only=True)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.001)
