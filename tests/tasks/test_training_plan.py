"""The steps that are planned are those that are made, and the rates those of the plan."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD
from torch.utils.data import DataLoader

from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.tasks.schedules import OneCycle, StepDecay, WarmupCosine
from tests.callbacks.test_exact_resume import RUN, end, kill_at
from tests.classification import linear, loader, make, quiet
from tests.commands import refused
from tests.conftest import SMALL
from tests.tasks.test_classification import Stream
from tests.test_ddp import DDP, FULGURITE, launch
from tests.training import fit

COSINE = partial(WarmupCosine, warmup=0.25)


class Rates(Callback):
    """Keep the rate that each optimizer step is made with."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.used.append(float(optimizer.param_groups[0]["lr"]))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the plan, which is printed once."""
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")]
    return line.removeprefix("plan").strip()


def expected(schedule: Any, total: int) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    made, found = schedule(optimizer, total), []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize("schedule", [COSINE, OneCycle, StepDecay])
@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"max_epochs": 4}, 12),
        ({"max_epochs": 4, "accumulate_grad_batches": 2}, 8),
        ({"max_epochs": 4, "accumulate_grad_batches": 5}, 4),  # longer than an epoch
        ({"max_steps": 7}, 7),
        ({"max_steps": 5, "accumulate_grad_batches": 2}, 5),
        ({"max_epochs": 2, "max_steps": 100}, 6),
        ({"max_epochs": 4, "max_steps": 4}, 4),
        ({"max_epochs": 3, "max_time": "00:01:00:00"}, 9),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
    ],
)
def test_schedule_takes_the_steps_that_there_are(here: Path, schedule: Any, options: dict[str, Any], total: int) -> None:
    rates = Rates()
    trainer = quiet(num_sanity_val_steps=0, limit_val_batches=0, callbacks=[rates], **options)
    task = make(network=linear, optimizer=partial(SGD, lr=0.1, momentum=0.9), scheduler=schedule)
    trainer.fit(task, loader(12), loader(4))
    assert trainer.global_step == total
    assert rates.used == expected(partial(schedule, momentum=None) if schedule is OneCycle else schedule, total)


def test_time_alone_is_no_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlimited = ["--trainer.max_epochs", "null", "--trainer.max_time", "00:01:00:00"]
    assert refused(capsys, "fit", *SMALL, *unlimited) == (
        "a schedule needs an end: set trainer.max_epochs or trainer.max_steps, or take the scheduler out\n"
        "trainer.max_time alone does not tell how many steps there will be"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "64 samples a step, 8 steps; rate 0.01: WarmupCosine"),
        (
            ["--model.scheduler.warmup", "0.25", "--trainer.accumulate_grad_batches", "2"],
            "128 samples a step (64 x 2 batches), 4 steps; rate 0.01, highest at step 2: WarmupCosine",
        ),
        (
            ["--model.rate_scaling", "linear", "--model.reference_batch", "16", "--model.scheduler", "null"],
            "64 samples a step, 8 steps; rate 0.04 (0.01 scaled linearly from 16)",
        ),
        (
            ["--model.rate_scaling", "sqrt", "--model.reference_batch", "16", "--model.scheduler", "PolynomialLR"],
            "64 samples a step, 8 steps; rate 0.02 (0.01 scaled by the square root from 16): PolynomialLR",
        ),
    ],
)
def test_plan_is_told(here: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    assert fit(*options) == 0
    assert said(capsys) == text


def test_plan_without_an_end_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    quiet(max_epochs=-1, callbacks=[Stop()]).fit(make(), DataLoader(Stream(), batch_size=None), loader(4))
    assert said(capsys) == "batches of unknown size, no end set; rate 0.1"


def test_scaled_rate_is_used(here: Path) -> None:
    rates = Rates()
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[rates])
    trainer.fit(make(rate_scaling="linear", reference_batch=2), loader(8), loader(4))
    assert rates.used == [pytest.approx(0.4)]


def test_stream_of_unknown_batches_is_not_scaled_by(here: Path) -> None:
    batches = DataLoader(Stream(), batch_size=None)
    with pytest.raises(UserError, match=r"^rate_scaling is linear, and the data has no batch_size to scale by"):
        quiet(max_epochs=1).fit(make(rate_scaling="linear", reference_batch=2), batches, loader(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--model.layer_decay", "0.5"], ["--model.rate_scaling", "sqrt", "--model.reference_batch", "7"]]
)
def test_killed_run_with_groups_ends_in_the_same_bits(here: Path, options: list[str]) -> None:
    args = [*RUN, *options, "--trainer.max_epochs", "3"]
    assert main(["fit", *args, "--trainer.experiment", "whole"]) == 0
    kill_at(7, args)
    assert main(["fit", "--resume", "runs/digits/v001"]) == 0
    assert end(here / "runs/digits/v001") == end(here / "runs/whole/v001")


@pytest.mark.slow
def test_two_processes_scale_the_rate_and_end_their_schedule_with_the_run(here: Path) -> None:
    options = ["--model.rate_scaling", "linear", "--model.reference_batch", "64", "--trainer.accumulate_grad_batches", "2"]
    done = launch(FULGURITE, ["fit", *SMALL, *DDP, *options, "--trainer.max_epochs", "3"], here)
    assert (done.status, done.err) == (0, "")
    (line,) = done.notes("plan")
    start = "256 samples a step (64 x 2 processes x 2 batches), 6 steps; rate 0.04 (0.01 scaled linearly from 64)"
    assert line == f"{start}: WarmupCosine"
    assert len(done.notes("optimizer")) == 1
    state = torch.load(here / "runs/digits/v001/checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == state["lr_schedulers"][0]["last_epoch"] == 6
    assert math.isclose(state["optimizer_states"][0]["param_groups"][0]["initial_lr"], 0.04)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == 0


@pytest.mark.parametrize("layer_decay", [0.0, 1.5, -0.5])
def test_layer_decay_outside_its_range_is_refused(layer_decay: float) -> None:
    with pytest.raises(UserError, match=f"^layer_decay is {layer_decay}; allowed: above 0, up to 1, which is off$"):
        make(layer_decay=layer_decay)


def test_rate_of_a_run_that_goes_on_with_other_steps_is_scaled_anew(here: Path) -> None:
    scaled = ["--model.rate_scaling", "linear", "--model.reference_batch", "64"]
    assert fit(*scaled) == 0
    more = ["--trainer.accumulate_grad_batches", "2", "--trainer.max_epochs", "3", "--resume_inexact"]
    assert main(["fit", "--resume", *more]) == 0
    state = torch.load(here / "runs/digits/v001/checkpoints/last.ckpt", weights_only=True)
    assert state["optimizer_states"][0]["param_groups"][0]["initial_lr"] == pytest.approx(0.02)
