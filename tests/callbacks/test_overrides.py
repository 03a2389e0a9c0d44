from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from fulgurite import Trainer
from fulgurite.callbacks.overrides import Overrides
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from fulgurite.tasks.schedules import WarmupCosine
from tests.commands import refused
from tests.conftest import DIGITS, SMALL

RECIPE = yaml.safe_load(DIGITS.read_text())["model"]["init_args"]
LR = RECIPE["optimizer"]["init_args"]["lr"]
WEIGHT_DECAY = RECIPE["optimizer"]["init_args"]["weight_decay"]
SCHEDULE = partial(WarmupCosine, **RECIPE["scheduler"]["init_args"])
SGD_ = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1", "--model.optimizer.momentum", "0.9"]
COSINE = ["--model.scheduler", "torch.optim.lr_scheduler.CosineAnnealingLR"]

Settings = list[dict[str, Any]]


LAYERS = ["--model.layer_decay", "0.5"]


def groups_of(run: Path | str) -> dict[str, tuple[float, float]]:
    """Return each parameter group's rate at the start of the schedule, and its weight decay."""
    state = torch.load(Path(run) / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]
    return {group["name"]: (group.get("initial_lr", group["lr"]), group["weight_decay"]) for group in state["param_groups"]}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Collect the settings that each optimizer step is made with."""
    seen: Settings = []

    def look(self: LightningModule, optimizer: Optimizer) -> None:
        seen.append({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})

    monkeypatch.setattr(LightningModule, "on_before_optimizer_step", look)
    return seen


def fit(*args: str) -> int:
    return main(["fit", *SMALL, "--trainer.max_epochs", "2", *args])


def resume(run: Path | str, *args: str, epochs: int = 3) -> int:
    return main(["fit", "--ckpt_path", str(run), "--trainer.max_epochs", str(epochs), *args])


def differing(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line[12:] for line in capsys.readouterr().out.splitlines() if line.startswith("differs")]


def plan(schedule: Any, total_steps: int, lr: float = 0.1) -> list[float]:
    """Return the rates of a run that had this schedule from its start."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    made = schedule(optimizer, total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        made.step()
    return rates


def test_new_rate_is_used_from_the_first_step_and_said(
    here: Path, trained_run: Path, steps: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(trained_run, "--model.optimizer.lr", "0.5") == 0
    assert [step["lr"] for step in steps] == plan(SCHEDULE, 12, lr=0.5)[8:]
    out = capsys.readouterr().out
    assert f"differs     model.init_args.optimizer.init_args.lr is 0.5; the checkpoint has {LR}\n" in out
    assert f"schedule    WarmupCosine is played anew to step 8: the rate is {steps[0]['lr']:.3g}\n" in out


def test_new_rate_is_used_without_a_schedule(here: Path, steps: Settings) -> None:
    assert fit(*SGD_, "--model.scheduler", "null") == 0
    steps.clear()
    assert resume("last", "--model.optimizer.lr", "0.5") == 0
    assert [(step["lr"], step["momentum"]) for step in steps] == [(0.5, 0.9)] * 4


@pytest.mark.parametrize(
    ("name", "value", "new"), [("weight_decay", "0.25", 0.25), ("betas", "[0.5, 0.75]", (0.5, 0.75)), ("eps", "0.1", 0.1)]
)
def test_other_settings_of_the_optimizer_are_used(
    here: Path, trained_run: Path, steps: Settings, capsys: pytest.CaptureFixture[str], name: str, value: str, new: Any
) -> None:
    assert resume(trained_run, f"--model.optimizer.{name}", value, epochs=4) == 0
    assert [step[name] for step in steps] == [new] * 8
    assert [step["lr"] for step in steps] == plan(SCHEDULE, 16, lr=LR)[8:]
    assert any(line.startswith(f"model.init_args.optimizer.init_args.{name} is ") for line in differing(capsys))


@pytest.mark.parametrize("more", [[], ["--model.scheduler", "null"]], ids=["schedule", "none"])
def test_each_group_gets_its_share_of_what_is_new(here: Path, more: list[str]) -> None:
    runs = {}
    for name, rate, decay in (("old", "0.1", "0.5"), ("new", "0.2", "0.25")):
        options = ["--model.optimizer.lr", rate, "--model.optimizer.weight_decay", decay, "--trainer.experiment", name]
        assert fit(*LAYERS, *options, *more) == 0
        runs[name] = groups_of(f"runs/{name}/v001")
    assert runs["old"]["head_decay"] == (0.1, 0.5)
    assert runs["old"]["head_no_decay"] == (0.1, 0.0)
    assert resume("runs/old/v001", "--model.optimizer.lr", "0.2", "--model.optimizer.weight_decay", "0.25") == 0
    assert groups_of("runs/old/v002") == runs["new"]


def test_decay_of_all_can_begin_in_the_middle(here: Path, trained_run: Path) -> None:
    assert resume(trained_run, "--model.decay_all") == 0
    assert groups_of("runs/digits/v001") == {"decay": (LR, WEIGHT_DECAY), "no_decay": (LR, WEIGHT_DECAY)}


def test_state_of_other_groups_is_refused(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "fit", "--ckpt_path", str(trained_run), "--trainer.max_epochs", "3", *LAYERS) == (
        "the checkpoint's optimizer has 2 parameter groups (decay of 7 tensors, no_decay of 13 tensors), and this run's has "
        "14 parameter groups (layer_1_decay of 1 tensors, layer_2_no_decay of 2 tensors, ... (12 more)), so it cannot be "
        "continued\nkeep the network and layer_decay, or start a new run from its weights: --weights.path"
    )
    assert list(Path("runs/digits").iterdir()) == []


def test_momentum_is_used(here: Path, steps: Settings) -> None:
    assert fit(*SGD_, *COSINE) == 0
    steps.clear()
    assert resume("last", "--model.optimizer.momentum", "0.5") == 0
    assert {step["momentum"] for step in steps} == {0.5}


@pytest.mark.parametrize(
    ("first", "args", "schedule"),
    [
        (COSINE, ["--model.scheduler.eta_min", "0.05"], partial(CosineAnnealingLR, eta_min=0.05)),
        ([], ["--model.scheduler.final", "0.5"], partial(SCHEDULE, final=0.5)),
        ([], ["--model.scheduler.warmup", "0.9"], partial(SCHEDULE, warmup=0.9)),
        (COSINE, ["--trainer.max_epochs", "5"], CosineAnnealingLR),
        ([], ["--trainer.max_epochs", "5"], SCHEDULE),
    ],
    ids=["eta_min", "final", "warmup", "longer_cosine", "longer_warmup_cosine"],
)
def test_new_schedule_goes_on_as_if_it_had_been_there_from_the_start(
    here: Path, steps: Settings, first: list[str], args: list[str], schedule: Any
) -> None:
    assert fit(*SGD_, *first) == 0
    steps.clear()
    assert resume("last", *args) == 0
    rates = plan(schedule, 8 + len(steps))
    assert [step["lr"] for step in steps] == rates[8:]
    # The old plan had come down to zero; the new one must not climb out of it.
    assert steps[0]["lr"] == max(step["lr"] for step in steps) or "warmup" in args[0]


def test_settings_of_task_and_data_are_used(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[float, int]] = []
    step = ClassificationTask.training_step

    def training_step(self: ClassificationTask, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        seen.append((self.train_loss.label_smoothing, len(batch[1])))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)
    others = ["--model.label_smoothing", "0.25", "--data.batch_size", "16", "--seed_everything", "5"]
    assert resume(trained_run, *others, "--resume_inexact") == 0
    assert seen == [(0.25, 16)] * 4
    assert differing(capsys) == [
        "seed_everything is 5; the checkpoint has 0",
        "trainer.max_epochs is 3; the checkpoint has 2",
        f"model.init_args.label_smoothing is 0.25; the checkpoint has {RECIPE.get('label_smoothing', 0.0)}",
        "data.init_args.batch_size is 16; the checkpoint has 64",
    ]


def test_what_was_set_stays_set_in_the_next_resume(
    here: Path, trained_run: Path, steps: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(trained_run, "--model.optimizer.lr", "0.5") == 0
    steps.clear()
    capsys.readouterr()
    assert resume("last", epochs=4) == 0
    assert [step["lr"] for step in steps] == plan(SCHEDULE, 16, lr=0.5)[12:]
    assert differing(capsys) == ["trainer.max_epochs is 4; the checkpoint has 3"]


@pytest.mark.parametrize(
    ("args", "part", "old", "new"),
    [
        (["--model.optimizer", "torch.optim.SGD"], "optimizer", "AdamW", "SGD"),
        (COSINE, "schedule", "WarmupCosine", "CosineAnnealingLR"),
        (["--model.scheduler", "null"], "schedule", "WarmupCosine", "None"),
    ],
)
def test_state_of_another_class_is_refused(
    here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str], args: list[str], part: str, old: str, new: str
) -> None:
    assert resume(trained_run, *args) == 2
    assert capsys.readouterr().err == (
        f"error: the checkpoint's {part} is {old}, so this run cannot be continued with {new}\n"
        f"keep the {part}, or start a new run\n"
    )
    assert list(Path("runs/digits").iterdir()) == []


def python_run(optimizer: Any = AdamW, **options: Any) -> Trainer:
    data = DigitsDataModule()
    optimizer = partial(optimizer, **RECIPE["optimizer"]["init_args"] | options)
    smoothing = RECIPE.get("label_smoothing", 0.0)
    task = ClassificationTask(partial(SmallCNN, width=4), optimizer, SCHEDULE, label_smoothing=smoothing, spec=data.spec)
    trainer = Trainer(experiment="digits", max_epochs=3, limit_train_batches=4, limit_val_batches=2, enable_progress_bar=False)
    trainer.task, trainer.data = task, data  # type: ignore[attr-defined]
    return trainer


def test_python_and_the_command_line_continue_each_others_runs(
    here: Path, trained_run: Path, steps: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    trainer: Any = python_run(weight_decay=0.25)
    trainer.fit(trainer.task, datamodule=trainer.data, ckpt_path=trained_run)
    assert [step["weight_decay"] for step in steps] == [0.25] * 4
    assert differing(capsys) == [
        "trainer.max_epochs is 3; the checkpoint has 2",
        f"model.init_args.optimizer.init_args.weight_decay is 0.25; the checkpoint has {WEIGHT_DECAY}",
    ]
    assert resume("last", epochs=4) == 0
    assert [step["weight_decay"] for step in steps] == [0.25] * 8
    assert differing(capsys) == ["trainer.max_epochs is 4; the checkpoint has 3"]


def test_earlier_test_of_a_checkpoint_does_not_reach_a_new_run(here: Path, trained_run: Path, steps: Settings) -> None:
    trainer: Any = python_run(SGD)
    trainer.test(trainer.task, datamodule=trainer.data, ckpt_path=trained_run)
    trainer.fit(trainer.task, datamodule=trainer.data)
    assert [step["lr"] for step in steps] == plan(SCHEDULE, 12, lr=LR)


def test_plateau_schedule_keeps_its_history_and_takes_what_is_new() -> None:
    def make(**options: Any) -> Any:
        optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=options.pop("lr", 0.1))
        schedule = ReduceLROnPlateau(optimizer, **options)
        return SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)], global_step=3)

    first, module = make(factor=0.5, patience=0), cast(LightningModule, None)
    callback = Overrides()
    callback.on_fit_start(first, module)
    state, schedule = callback.state_dict(), first.lr_scheduler_configs[0].scheduler
    for _ in range(2):
        schedule.step(1.0)
    assert first.optimizers[0].param_groups[0]["lr"] == 0.05

    second = make(factor=0.1, patience=0)
    callback = Overrides()
    callback.load_state_dict(state)
    callback.on_fit_start(second, module)
    second.optimizers[0].load_state_dict(first.optimizers[0].state_dict())
    second.lr_scheduler_configs[0].scheduler.load_state_dict(schedule.state_dict())
    callback.on_train_start(second, module)
    found = second.lr_scheduler_configs[0].scheduler
    assert (found.factor, found.best, found.last_epoch) == (0.1, 1.0, 2)
    assert second.optimizers[0].param_groups[0]["lr"] == 0.05


def test_schedule_of_a_strangers_checkpoint_is_not_played_for_ever(
    here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(trained_run / "checkpoints" / "last.ckpt", weights_only=True)
    checkpoint["lr_schedulers"][0]["last_epoch"] = 10**15
    torch.save(checkpoint, "odd.ckpt")
    said = refused(capsys, "fit", "--ckpt_path", "odd.ckpt", "--trainer.max_epochs", "3")
    assert said == "the checkpoint's schedule is at step 1000000000000000, and can be played anew to 12"
