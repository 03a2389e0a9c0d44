from __future__ import annotations

import csv
import multiprocessing as mp
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import AdamW

from fulgurite import Trainer, load
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.ema import EMA
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from tests.classification import loader, make, quiet

State = dict[str, Tensor]


def state(module: nn.Module) -> State:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def saved(trainer: Trainer) -> Any:
    trainer.save_checkpoint("now.ckpt")
    return read(Path("now.ckpt"))


class Watch(Callback):
    """Keep the weights after each optimizer step, and those that validation sees."""

    def __init__(self) -> None:
        self.trained: list[State] = []
        self.validated: list[State] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.trained.append(state(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == len(self.trained):
            self.trained.append(state(pl_module))

    def on_validation_batch_start(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        self.validated.append(state(pl_module))


def averaged(steps: list[State], kept: list[float]) -> State:
    """Return the moving average of the weights after each step, as the documentation has it."""
    average = {name: value.double() for name, value in steps[0].items()}
    for share, step in zip(kept, steps[1:], strict=True):
        average = {name: share * average[name] + (1 - share) * value for name, value in step.items()}
    return average


@pytest.mark.parametrize("accumulate", [1, 2])
def test_average_of_each_optimizer_step(here: Path, accumulate: int) -> None:
    watch, task = Watch(), make()
    trainer = quiet(max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[EMA(decay=0.2), watch])
    trainer.fit(task, loader(16 * accumulate), loader(8))
    assert trainer.global_step == 4
    expected = averaged(watch.trained, [1 / 10, 2 / 11, 0.2, 0.2])
    checkpoint = saved(trainer)
    for name, value in checkpoint["state_dict"].items():
        if name.endswith("num_batches_tracked"):
            assert value == 4 * accumulate
        else:
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected[name].float(), msg=name)
            assert torch.equal(checkpoint["ema"]["trained"][name], watch.trained[-1][name]), name
    assert not torch.equal(expected["network.head.bias"].float(), watch.trained[-1]["network.head.bias"])
    assert any("running_var" in name for name in expected)
    assert same(watch.validated[-1], checkpoint["state_dict"])
    assert same(state(task), checkpoint["state_dict"])


def test_training_goes_on_with_the_trained_weights_in_the_same_memory(here: Path) -> None:
    class Addresses(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
            found.append([value.data_ptr() for value in pl_module.state_dict().values()])

    found: list[list[int]] = []
    runs = []
    for average in ([], [EMA(decay=0.9)]):
        watch = Watch()
        quiet(max_epochs=2, val_check_interval=2, callbacks=[*average, watch, Addresses()]).fit(make(), loader(16), loader(8))
        runs.append(watch)
    assert [same(*states) for states in zip(runs[0].trained, runs[1].trained, strict=True)] == [True] * 9
    assert not same(runs[0].validated[-1], runs[1].validated[-1])
    assert found[-8:] == [found[-1]] * 8


def test_average_that_never_begins_leaves_the_trained_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch, task = Watch(), make()
    trainer = quiet(max_epochs=1, callbacks=[EMA(decay=0.9, start_step=1000), watch])
    trainer.fit(task, loader(16), loader(8))
    checkpoint = saved(trainer)
    assert "ema" not in checkpoint
    assert same(checkpoint["state_dict"], watch.trained[-1])
    assert same(watch.validated[-1], watch.trained[-1])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ema")]
    assert said == [
        "ema         from step 1,000 an average of the weights, decay 0.9, is what is validated and saved",
        "ema         no average: it begins at step 1,000, and the run ended at 4",
    ]


def test_average_begins_with_the_weights_of_its_step(here: Path) -> None:
    watch = Watch()
    trainer = quiet(max_epochs=1, callbacks=[EMA(decay=0.9, start_step=3), watch])
    trainer.fit(make(), loader(16), loader(8))
    expected = averaged(watch.trained[3:], [1 / 10])
    torch.testing.assert_close(saved(trainer)["state_dict"]["network.head.bias"], expected["network.head.bias"].float())


def test_off_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(max_epochs=1, callbacks=[EMA()])
    trainer.fit(make(), loader(16), loader(8))
    assert "ema" not in saved(trainer)
    assert "ema" not in capsys.readouterr().out


class Stopped(Exception):
    pass


class StoppingTask(ClassificationTask):
    """Stop in the middle of a validation, but not in the one before the training."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 1 and not self.trainer.sanity_checking:
            raise Stopped


class SaveOften(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("trained.ckpt")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("stopped.ckpt")


@pytest.mark.parametrize("first", [True, False])
def test_interrupted_validation_neither_keeps_nor_saves_swapped_weights(here: Path, first: bool) -> None:
    plain, watch = make(), Watch()
    task = StoppingTask(**{name: value for name, value in plain.init_args.items() if name != "self"})
    average, save = EMA(decay=0.9), SaveOften()
    trainer = quiet(max_epochs=2, callbacks=[save, average, watch] if first else [average, save, watch])
    with pytest.raises(Stopped):
        trainer.fit(task, loader(16), loader(8))
    assert same(state(task), watch.trained[-1])
    before, after = read(Path("trained.ckpt")), read(Path("stopped.ckpt"))
    if not first:  # else the average of that step was not yet taken when it was saved
        assert same(after["state_dict"], before["state_dict"])
    assert same(after["state_dict"], watch.validated[-1])
    assert same({name: watch.trained[-1][name] for name in after["ema"]["trained"]}, after["ema"]["trained"])
    assert same(saved(trainer)["state_dict"], after["state_dict"])


class Digits(ClassificationTask):
    """Stop or die in a batch."""

    stop_at: int | None = None
    die = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step + 1 == self.stop_at:
            if self.die:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stopped
        return super().training_step(batch, batch_idx)


def train(
    average: EMA | None, stop_at: int | None = None, ckpt_path: Path | None = None, die: bool = False, **options: Any
) -> tuple[Path, Trainer, Digits]:
    """Train two epochs of four steps, with dropout, a schedule's worth of state, and a checkpoint after each step."""
    data = DigitsDataModule(shift=1)
    torch.manual_seed(0)
    network = partial(SmallCNN, width=4, dropout=0.3)
    task = Digits(network, partial(AdamW, lr=0.05), spec=data.spec)
    task.stop_at, task.die = stop_at, die
    callbacks: list[Any] = [Checkpoints(every_n_steps=1), *([average] if average else [])]
    defaults = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2, "enable_progress_bar": False}
    trainer = Trainer(**{**defaults, "logger": False, "callbacks": callbacks, **options})
    with suppress(Stopped):
        trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
    assert trainer.run_dir is not None
    return trainer.run_dir, trainer, task


def end(run: Path) -> tuple[str, list[Any]]:
    """Return what has to be the same to the bit."""
    checkpoint = read(run / "checkpoints" / "last.ckpt")
    parts = {name: checkpoint[name] for name in ("state_dict", "ema", "optimizer_states", "global_step")}
    leaves, structure = torch.utils._pytree.tree_flatten(parts)
    return str(structure), [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}], ids=["epochs", "validation_within_the_epoch"])
@pytest.mark.parametrize(("stop_at", "start_step"), [(3, 0), (5, 0), (7, 0), (3, 3), (7, 6)])
def test_killed_run_ends_in_the_same_bits(here: Path, stop_at: int, start_step: int, options: dict[str, Any]) -> None:
    make_average = partial(EMA, decay=0.9, start_step=start_step)
    whole, *_ = train(make_average(), **options)
    process = mp.get_context("fork").Process(target=train, args=(make_average(), stop_at, None, True), kwargs=options)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed, *_ = train(make_average(), ckpt_path=Path("runs/default/v002"), **options)
    assert end(resumed) == end(whole)


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("ema").strip() for line in capsys.readouterr().out.splitlines() if line.startswith("ema")]


@pytest.mark.parametrize(
    ("average", "reason"), [(None, "decay is null"), (EMA(decay=0.9, start_step=1000), "start_step is 1,000")]
)
def test_run_without_the_average_goes_on_from_the_trained_weights(
    here: Path, capsys: pytest.CaptureFixture[str], average: EMA | None, reason: str
) -> None:
    whole, *_ = train(None)
    stopped, *_ = train(EMA(decay=0.9), 7)
    capsys.readouterr()
    resumed, *_ = train(average or EMA(), ckpt_path=stopped)
    assert notes(capsys)[0] == f"{reason}: the checkpoint's average is left out, and its trained weights are trained on"
    ends = [read(run / "checkpoints" / "last.ckpt") for run in (whole, resumed)]
    assert same(ends[0]["state_dict"], ends[1]["state_dict"])
    assert "ema" not in ends[1]


def test_average_can_begin_when_a_run_is_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    train(None, callbacks=[watch])
    stopped, *_ = train(None, 7)  # the checkpoint is of step 6
    capsys.readouterr()
    resumed, *_ = train(EMA(decay=0.9), ckpt_path=stopped)
    assert notes(capsys)[0] == "the checkpoint has no average: a new one begins with its weights"
    expected = averaged(watch.trained[6:], [1 / 10, 2 / 11])
    found = read(resumed / "checkpoints" / "last.ckpt")["state_dict"]
    torch.testing.assert_close(found["network.head.bias"], expected["network.head.bias"].float())


def test_checkpoint_scores_what_was_validated_for_whoever_reads_it(here: Path) -> None:
    run, trainer, _ = train(EMA(decay=0.5), limit_val_batches=1.0)
    expected = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    evaluator, data = Trainer(logger=False, enable_progress_bar=False), DigitsDataModule()
    task = Digits(partial(SmallCNN, width=4), AdamW, spec=data.spec)
    last = run / "checkpoints" / "last.ckpt"
    assert evaluator.validate(task, datamodule=data, ckpt_path=last) == [expected]
    loaded = load(last, trust=["tests"])
    assert evaluator.validate(loaded, datamodule=data) == [expected]
    loaded.load_state_dict(read(last)["ema"]["trained"], strict=False)
    assert evaluator.validate(loaded, datamodule=data) != [expected]


def test_later_run_is_not_taken_for_the_average(here: Path) -> None:
    run, trainer, task = train(EMA(decay=0.9))
    assert same(saved(trainer)["ema"]["trained"], read(run / "checkpoints/last.ckpt")["ema"]["trained"])
    trainer.test(task, datamodule=DigitsDataModule(), ckpt_path=run / "checkpoints/best.ckpt")
    checkpoint = saved(trainer)
    assert "ema" not in checkpoint
    assert same(checkpoint["state_dict"], read(run / "checkpoints/best.ckpt")["state_dict"])


def test_compiled_network_keeps_its_keys(here: Path) -> None:
    plain, compiled = make(), make()
    compiled.network.compile(backend="eager")
    checkpoints = []
    for task in (plain, compiled):
        trainer = quiet(max_epochs=1, callbacks=[EMA(decay=0.9)])
        trainer.fit(task, loader(8), loader(4))
        checkpoints.append(saved(trainer))
    assert same(checkpoints[0]["state_dict"], checkpoints[1]["state_dict"])
    assert same(checkpoints[0]["ema"]["trained"], checkpoints[1]["ema"]["trained"])


def test_small_changes_of_half_precision_weights_are_not_lost() -> None:
    task: Any = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.zeros_(task.weight)
    average, trainer = EMA(decay=0.9999), cast(Any, SimpleNamespace(global_step=0))
    average._updates = 10**6
    average.on_train_start(trainer, task)
    nn.init.ones_(task.weight)
    for step in range(1, 1001):
        trainer.global_step = step
        average.on_train_batch_end(trainer, task, None, None, 0)
    checkpoint = {"state_dict": task.state_dict()}
    average.on_save_checkpoint(trainer, task, checkpoint)
    assert float(checkpoint["state_dict"]["weight"]) == pytest.approx(1 - 0.9999**1000, rel=1e-3)  # bfloat16 gives 0.03
    average.on_validation_start(trainer, task)
    assert task.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": 1.0}, "ema.decay is 1.0; allowed: above 0 and below 1, such as 0.999, or null for no average"),
        ({"decay": 0.0}, "ema.decay is 0.0; allowed: above 0 and below 1, such as 0.999, or null for no average"),
        ({"decay": float("nan")}, "ema.decay is nan; allowed: above 0 and below 1, such as 0.999, or null for no average"),
        ({"decay": 0.9, "start_step": -1}, "ema.start_step is -1; it must be at least 0"),
    ],
)
def test_senseless_numbers_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        EMA(**options)
    assert str(error.value) == text


def test_strategy_that_splits_the_weights_is_refused() -> None:
    class FSDPStrategy:
        restore_checkpoint_after_setup = True

    trainer = cast(Any, SimpleNamespace(strategy=FSDPStrategy()))
    with pytest.raises(UserError, match=r"^ema is on \(decay 0.9\), and FSDPStrategy splits the weights between processes\nuse "):
        EMA(decay=0.9).setup(trainer, cast(Any, None), "fit")
    EMA().setup(trainer, cast(Any, None), "fit")


PROGRAM = """
import sys
from pathlib import Path
from lightning.pytorch.strategies import DDPStrategy
from fulgurite.callbacks.ema import EMA
from tests.callbacks.test_ema import train
stop_at, experiment, *ckpt_path = sys.argv[1:]
# By itself DDP copies rank 0's buffers to the others, unless it is told not to.
strategy = DDPStrategy(broadcast_buffers=False)
options = {"devices": 2, "accelerator": "cpu", "strategy": strategy, "logger": "csv", "experiment": experiment}
train(EMA(decay=0.9), int(stop_at), Path(*ckpt_path) if ckpt_path else None, True, **options)
"""


def measured(run: Path) -> list[dict[str, str]]:
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return [{name: value for name, value in row.items() if value} for row in rows][-2:]


@pytest.mark.slow
def test_two_processes_end_in_the_same_bits(here: Path) -> None:
    Path("program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[2])

    def run(stop_at: int, *args: str) -> int:
        environment = os.environ | {"PYTHONPATH": root, "PL_GLOBAL_SEED": "0"}
        command = [sys.executable, "program.py", str(stop_at), *args]
        return subprocess.run(command, env=environment, timeout=120, check=False).returncode

    assert run(0, "whole") == 0
    assert run(7, "killed") == -signal.SIGKILL
    assert run(0, "resumed", "runs/killed/v001") == 0
    ends = [end(here / "runs" / name / "v001") for name in ("resumed", "whole")]
    assert ends[0] == ends[1]
    # What validation measured on both processes, too: BatchNorm's statistics are not the same on each.
    assert measured(here / "runs/resumed/v001") == measured(here / "runs/whole/v001")
