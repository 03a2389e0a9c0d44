"""Let what the user sets win over what a checkpoint remembers, and say so."""

from __future__ import annotations

import warnings
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fulgurite.checkpoint import KEY, Description
from fulgurite.config import differences
from fulgurite.console import note
from fulgurite.errors import UserError, name_list, shown
from fulgurite.plain_yaml import read_yaml

Settings = dict[str, Any]
# Where this run writes, and what is filled in from the checkpoint or the data.
_OF_THIS_RUN = ("trainer.runs_dir", "trainer.experiment", "model.init_args.spec")

# The sections of the configuration that say how a run trains.
_OF_A_FIT = ("model", "data", "seed_everything", "trainer", "ema", "freeze", "compile", "activation_checkpointing")

# Which kernels a step is computed with: a matter of the machine, so that a run can go on on another.
_KERNELS = ("fused", "foreach")
_MOST_STEPS = 20_000_000  # which takes a minute or two


class Overrides(Callback):
    """Compare the run with the one that a checkpoint comes from, print what differs, and use this run's settings.

    Lightning restores an optimizer's and a schedule's settings from their saved state, so that a new learning rate on
    the command line would be shown and not used. So a checkpoint also holds the settings that its run began with, from
    the rate to the length of the schedule. Where this run begins with others, they are put back after the restore, and
    the schedule is played anew up to the present step: as if the settings had been these from the start.
    """

    def __init__(self) -> None:
        self._settings: list[Settings] = []
        self._of_checkpoint: list[Settings] = []
        self._saved_optimizers: list[Any] = []  # until the optimizers take it

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget a checkpoint that was loaded earlier, such as for a test."""
        self._of_checkpoint, self._saved_optimizers = [], []

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Print each difference between the two configurations.

        Raises:
            UserError: if the data has other classes than the network was trained on
        """
        if trainer.state.fn == "fit":
            self._saved_optimizers = checkpoint.get("optimizer_states", [])
        if KEY not in checkpoint:
            return
        _require_classes(checkpoint[KEY].get("spec") or {}, getattr(pl_module, "spec", None))
        stored, current = Description(**checkpoint[KEY]).sections, {}
        with suppress(TypeError):  # a task that no configuration can name; the run record says so
            current = read_yaml(trainer.describe_config())
        fitting = trainer.state.fn == "fit"
        sections = _OF_A_FIT if fitting else ("model", "data")
        for path, old, new in differences(stored, current):
            filled_in = path == "data.init_args.class_names" and old is None  # from the checkpoint itself
            if stored and path.partition(".")[0] in sections and not path.startswith(_OF_THIS_RUN) and not filled_in:
                note("differs", f"{path} is {new}; the checkpoint has {old}")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep the settings that optimizers and schedules begin with, before their saved state replaces them.

        Raises:
            UserError: if the saved state belongs to another class, or to other parameter groups
        """
        schedules = {id(config.scheduler.optimizer): config.scheduler for config in trainer.lr_scheduler_configs}
        self._settings = [_settings(optimizer, schedules.get(id(optimizer))) for optimizer in trainer.optimizers]
        for old, new in zip(self._of_checkpoint, self._settings, strict=False):
            for part in ("optimizer", "schedule"):
                if old[part] != new[part]:
                    raise UserError(
                        f"the checkpoint's {part} is {shown(old[part])}, so this run cannot be continued with {new[part]}\n"
                        f"keep the {part}, or start a new run"
                    )
        for saved, optimizer in zip(self._saved_optimizers, trainer.optimizers, strict=False):
            try:
                _fit_to(saved["param_groups"], optimizer)
                _require_shapes(saved, optimizer)
            except (AttributeError, KeyError, TypeError) as error:
                what = f"{type(error).__name__}: {shown(error)}"
                raise UserError(f"the checkpoint cannot be restored: {what}\n--debug shows where") from error
        self._saved_optimizers = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put this run's settings back where they differ from the checkpoint's."""
        schedules = {id(config.scheduler.optimizer): config.scheduler for config in trainer.lr_scheduler_configs}
        for old, new, optimizer in zip(self._of_checkpoint, self._settings, trainer.optimizers, strict=False):
            if old == new:
                continue
            schedule = schedules.get(id(optimizer))
            if schedule is None or isinstance(schedule, ReduceLROnPlateau):
                _put_back_changed(old, new, optimizer, schedule)
            else:
                _require_within(schedule.last_epoch, max(trainer.estimated_stepping_batches, trainer.global_step))
                _play_anew(new, optimizer, schedule)
                rate = optimizer.param_groups[0]["lr"]
                note("schedule", f"{new['schedule']} is played anew to step {trainer.global_step:,}: the rate is {rate:.3g}")

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that this run began with."""
        return {"settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings that the checkpoint's run began with."""
        self._of_checkpoint = state_dict["settings"]


def _require_classes(stored: dict[str, Any], spec: Any) -> None:
    trained, here = list(stored.get("class_names", [])), list(getattr(spec, "class_names", []))
    if trained and here and trained != here:
        raise UserError(
            f"the checkpoint was trained on the classes {name_list(trained)}; the data has {name_list(here)}\n"
            "their order counts, as a label is a number; data.class_names sets it"
        )


def _fit_to(saved: list[Settings], optimizer: Any) -> None:
    """Let saved groups be computed with this run's kernels: with others, PyTorch puts their counts of steps on another device."""
    names, here = _names(saved), _names(optimizer.param_groups)
    if names != here:
        raise UserError(
            f"the checkpoint's optimizer has {names}, and this run's has {here}, so it cannot be continued\n"
            "keep the network and layer_decay, or start a new run from its weights: --weights.path"
        )
    for old, new in zip(saved, optimizer.param_groups, strict=True):
        old.update({name: new[name] for name in _KERNELS if name in new})


def _require_shapes(saved: Settings, optimizer: Any) -> None:
    """Refuse a state that the fused kernels would read past its end: they do not look at its size."""
    for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        for number, parameter in zip(old["params"], group["params"] if group.get("fused") else (), strict=False):
            for name, value in saved["state"].get(number, {}).items():
                wanted = torch.Size() if name == "step" else parameter.shape
                if isinstance(value, torch.Tensor) and value.shape != wanted:
                    raise UserError(
                        f"the checkpoint cannot be restored: {shown(name)} of the optimizer's tensor {shown(number)} "
                        f"has the shape {tuple(value.shape)}; it must be {tuple(wanted)}"
                    )


def _names(groups: list[Settings]) -> str:
    names = [f"{group.get('name', 'all')} of {len(group['params'])} tensors" for group in groups]
    return shown(f"{len(names)} parameter groups ({name_list(names, 2)})")


def _settings(optimizer: Any, schedule: Any) -> Settings:
    left_out = ("params", *_KERNELS)
    groups = [{name: value for name, value in group.items() if name not in left_out} for group in optimizer.param_groups]
    return {
        "optimizer": type(optimizer).__name__,
        "groups": deepcopy(groups),
        "schedule": type(schedule).__name__ if schedule else None,
        "plan": deepcopy(schedule.state_dict()) if schedule else {},
    }


def _put_back_changed(old: Settings, new: Settings, optimizer: Any, schedule: Any) -> None:
    for before, now, group in zip(old["groups"], new["groups"], optimizer.param_groups, strict=True):
        group.update({name: value for name, value in now.items() if before.get(name) != value})
    if schedule:
        schedule.load_state_dict({name: value for name, value in new["plan"].items() if old["plan"].get(name) != value})


def _require_within(steps: Any, total: float) -> None:
    most = min(total, _MOST_STEPS)
    if not (isinstance(steps, int) and 0 <= steps <= most):
        raise UserError(f"the checkpoint's schedule is at step {shown(steps)}, and can be played anew to {most:,.0f}")


def _play_anew(new: Settings, optimizer: Any, schedule: Any) -> None:
    steps = schedule.last_epoch  # PyTorch's name for the number of calls of step()
    for now, group in zip(new["groups"], optimizer.param_groups, strict=True):
        group.update(deepcopy(now))
    schedule.load_state_dict(deepcopy(new["plan"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch expects a step of the optimizer before each of the schedule
        for _ in range(steps):
            schedule.step()
