"""Show what a training would do, step by step, without any: the verb behind ``fulgurite plan``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from fulgurite.console import note
from fulgurite.data.cache_file import replaced
from fulgurite.errors import UserError
from fulgurite.tables import check_output
from fulgurite.tasks.rate_scaling import GlobalBatch
from fulgurite.tasks.training_plan import total_steps

_ENDINGS = (".jpeg", ".jpg", ".pdf", ".png", ".svg", ".webp")
_MOST_POINTS = 5000  # of a line; a plot is some 1000 pixels wide
_MOST_NAMES = 12  # in the legend


@dataclass(frozen=True)
class Plan:
    """What a training would do.

    Args:
        samples_per_step: of all processes together; None where nobody knows the batch size
        total_steps: of the optimizer; None where the run has no end that is known beforehand
        steps: optimizer steps, counted from 1, that the values below are of
        rates: of each parameter group in those steps, by its name
        momentum: in those steps, of the first group; empty where the optimizer has none
    """

    samples_per_step: int | None
    total_steps: int | None
    steps: list[int]
    rates: dict[str, list[float]]
    momentum: list[float]


def plan(
    trainer: Any, model: LightningModule, datamodule: LightningDataModule | None = None, output: Path = Path("plan.png")
) -> Plan:
    """Print what a training would come to, and draw its learning rate, without training.

    Args:
        trainer: its devices and limits count; no process is started
        model: the task
        datamodule: its length and batch size count
        output: plot of the rate over the optimizer steps; its ending says the format

    Returns:
        the numbers that were drawn

    Raises:
        UserError: if the training could not start, or the plot cannot be written
    """
    output = Path(output)
    check_output(output, _ENDINGS)
    with _as_before_training(trainer, model, datamodule):
        (optimizer, *_), schedules = _init_optimizers_and_lr_schedulers(model)
        scheduler = schedules[0].scheduler if schedules else None
        total, samples = total_steps(trainer), GlobalBatch.of(trainer).samples
    if isinstance(scheduler, ReduceLROnPlateau):
        note("plot", f"{type(scheduler).__name__} lowers the rate by what validation will give: it is drawn as it begins")
        scheduler = None
    steps, rates, momentum = _course(optimizer, scheduler, total or 1)
    made = Plan(samples, total, steps, rates, momentum)
    _draw(made, output)
    note("plot", str(output))
    return made


@contextmanager
def _as_before_training(trainer: Any, model: LightningModule, datamodule: LightningDataModule | None) -> Iterator[None]:
    """Bring a trainer to where it asks for optimizers, as its ``fit`` does, but start no process and call no callback."""
    trainer.state.fn, trainer.state.status, trainer.training = TrainerFn.FITTING, TrainerStatus.RUNNING, True
    loop = trainer.fit_loop
    limits = loop.min_epochs, loop.max_epochs
    loop.min_epochs, loop.max_epochs = _parse_loop_limits(
        trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs, trainer
    )
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model, datamodule=datamodule)
    try:
        trainer._data_connector.prepare_data()
        if datamodule is not None:
            datamodule.setup("fit")
        yield
    finally:
        loop.teardown()
        if datamodule is not None:
            datamodule.teardown("fit")
        loop._combined_loader, (loop.min_epochs, loop.max_epochs) = None, limits
        trainer.state.fn, trainer.state.status, trainer.state.stage = None, TrainerStatus.FINISHED, None


def _course(optimizer: Optimizer, scheduler: Any, total: int) -> tuple[list[int], dict[str, list[float]], list[float]]:
    """Step through a schedule, and return some of the steps with the rates and the momentum in them."""
    names = [group.get("name", "all") if len(optimizer.param_groups) > 1 else "all" for group in optimizer.param_groups]
    steps = sorted({*range(1, total + 1, math.ceil(total / _MOST_POINTS)), total})
    rates: dict[str, list[float]] = {name: [] for name in names}
    momentum, done = [], 0
    for step in steps:
        _move_on(scheduler, step - 1 - done, step - 1)
        done = step - 1
        for name, group in zip(names, optimizer.param_groups, strict=True):
            rates[name].append(float(group["lr"]))
        first = optimizer.param_groups[0]
        if "momentum" in first or "betas" in first:
            momentum.append(float(first["momentum"] if "momentum" in first else first["betas"][0]))
    return steps, rates, momentum


def _move_on(scheduler: Any, calls: int, to: int) -> None:
    """Call a schedule's ``step()`` so often; only the last time where its rate follows from the number of calls alone."""
    if isinstance(scheduler, LambdaLR | OneCycleLR) and calls:
        scheduler.last_epoch, calls = to - 1, 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch expects a step of the optimizer before each of the schedule
        for _ in range(calls if scheduler is not None else 0):
            scheduler.step()


def _draw(plan: Plan, output: Path) -> None:
    cycles = len(set(plan.momentum)) > 1
    same: dict[tuple[float, ...], list[str]] = {}
    for name, values in plan.rates.items():
        same.setdefault(tuple(values), []).append(name)
    figure = Figure(figsize=(9 if len(same) > 1 else 7, 6.5 if cycles else 4.5), dpi=120, layout="constrained")
    rate, *rest = figure.subplots(1 + cycles, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + cycles])[:, 0]
    colors = colormaps["viridis"].resampled(len(same))
    lines = [
        rate.plot(plan.steps, values, label=", ".join(names), color=colors(number))[0]
        for number, (values, names) in enumerate(same.items())
    ]
    rate.set_ylabel("learning rate")
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    for axis in rest:
        axis.plot(plan.steps, plan.momentum, color="gray")
        axis.set_ylabel("momentum")
    figure.axes[-1].set_xlabel("optimizer step")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if len(lines) > 1:
        named = lines[:: -math.ceil(len(lines) / _MOST_NAMES)]  # from the head, whose rate is the highest
        figure.legend(handles=named, loc="outside right upper", frameon=False)
    try:
        with replaced(output) as file:
            figure.savefig(file, format=output.suffix[1:])
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error
