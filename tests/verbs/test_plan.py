from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.optim import SGD
from torch.optim.lr_scheduler import PolynomialLR

from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.tasks.schedules import OneCycle, Plateau, StepDecay, WarmupCosine
from fulgurite.verbs.plan import _MOST_POINTS, _course
from tests.classification import Lights, make, quiet
from tests.commands import refused
from tests.conftest import ROOT, SMALL


def test_plan_of_a_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ddp = ["-c", str(ROOT / "configs" / "trainer" / "ddp_cpu.yaml")]  # no second process is started
    scaled = ["--model.rate_scaling", "linear", "--model.reference_batch", "64", "--trainer.accumulate_grad_batches", "2"]
    assert main(["plan", *SMALL, *ddp, *scaled]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["workers", "optimizer", "plan", "plot"]
    assert lines[2].endswith(
        "256 samples a step (64 x 2 processes x 2 batches), 40 steps; "
        "rate 0.04 (0.01 scaled linearly from 64), highest at step 3: WarmupCosine"
    )
    assert [path.name for path in here.iterdir()] == ["plan.png"]  # and no run
    Image.open("plan.png").verify()


def digits(**options: Any) -> Any:
    data = DigitsDataModule(batch_size=100)
    return make(
        network=lambda classes, channels: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes)),
        spec=data.spec,
        **options,
    ), data


@pytest.mark.parametrize("schedule", [None, WarmupCosine, StepDecay, PolynomialLR, Plateau])
def test_plan_is_what_the_training_then_does(here: Path, schedule: Any) -> None:
    (task, data), trainer = digits(scheduler=schedule), quiet(max_epochs=2, limit_val_batches=1)
    plan = trainer.plan(task, datamodule=data)
    used: list[float] = []
    task.on_before_optimizer_step = lambda optimizer: used.append(optimizer.param_groups[0]["lr"])
    trainer.fit(task, datamodule=data)
    assert plan.total_steps == trainer.global_step == len(plan.steps) == 24
    assert plan.samples_per_step == 100
    assert plan.rates == {"decay": used, "no_decay": used}
    assert (plan.steps[0], plan.steps[-1]) == (1, 24)


def test_plan_can_follow_a_training(here: Path) -> None:
    (task, data), trainer = digits(), quiet(max_epochs=1, limit_val_batches=1)
    trainer.fit(task, datamodule=data)
    assert trainer.plan(task, data, here / "after.svg").total_steps == 12
    assert "<svg" in (here / "after.svg").read_text()


def test_momentum_and_the_rate_of_each_group_are_drawn(here: Path) -> None:
    options = {"optimizer": partial(SGD, lr=0.1, momentum=0.9), "scheduler": OneCycle, "layer_decay": 0.5}
    data = Lights(batch_size=64)
    task = make(spec=data.spec, **options)
    plan = quiet(max_epochs=5).plan(task, datamodule=data)
    assert max(plan.rates["head_decay"]) == pytest.approx(2 * max(plan.rates["layer_4_no_decay"]), rel=1e-6)
    assert min(plan.momentum) == pytest.approx(0.85, abs=0.01)
    assert max(plan.momentum) == 0.95


def test_plan_without_an_end_is_of_one_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, data = digits(scheduler=Plateau)
    plan = quiet(max_epochs=-1).plan(task, datamodule=data)
    assert (plan.total_steps, plan.steps) == (None, [1])
    assert "Plateau lowers the rate by what validation will give" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", [WarmupCosine, OneCycle, StepDecay, PolynomialLR])
def test_long_course_has_few_points_and_is_right_in_each(schedule: Any) -> None:
    total = 2 * _MOST_POINTS + 1

    def made() -> tuple[Any, Any]:
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, schedule(optimizer, total)

    steps, rates, momentum = _course(*made(), total=total)
    assert len(steps) == len(momentum) <= _MOST_POINTS + 1
    assert (steps[0], steps[-1]) == (1, total)
    optimizer, scheduler = made()
    for step in range(1, total + 1):
        if step == steps[1234]:
            assert rates["all"][1234] == pytest.approx(optimizer.param_groups[0]["lr"])
            assert momentum[1234] == pytest.approx(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        scheduler.step()


def test_training_that_could_not_start_has_no_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "plan", *SMALL, "--trainer.max_epochs", "-1").startswith("a schedule needs an end: ")
    assert refused(capsys, "plan", *SMALL, "--output", "plan.xyz").startswith("cannot write plan.xyz: its ending is '.xyz'")
    assert refused(capsys, "plan").startswith("plan has no model and no data")
    assert list(here.iterdir()) == []


def test_folder_in_the_place_of_the_plot_is_refused(here: Path) -> None:
    task, data = digits()
    (here / "plots.png").mkdir()
    with pytest.raises(UserError, match=r"^cannot write .*: it is a folder$"):
        quiet(max_epochs=1).plan(task, datamodule=data, output=here / "plots.png")
