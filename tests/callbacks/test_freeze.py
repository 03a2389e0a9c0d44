import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from fulgurite.callbacks.freeze import Freeze
from fulgurite.callbacks.step_log import StepLog
from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.tasks import ClassificationTask
from tests.classification import loader, make, quiet
from tests.training import RUN, Killed, at_batch, fit, stop


def net(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network with a norm in the frozen part, and one in the head."""
    body = nn.Sequential(nn.Conv2d(in_channels, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten())
    return nn.ModuleDict({"body": body, "head": nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, num_classes))})


class Chain(nn.Module):
    """Apply both parts."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.parts = net(num_classes, in_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, 4, 4) to logits (B, K)."""
        assert isinstance(self.parts, nn.ModuleDict)
        logits: Tensor = self.parts["head"](self.parts["body"](images))
        return logits


def changed(task: ClassificationTask, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in task.network.state_dict().items() if not torch.equal(value, before[name])}


def train(freeze: Freeze, epochs: int = 1, **options: Any) -> tuple[ClassificationTask, set[str]]:
    task = make(network=Chain)
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    quiet(max_epochs=epochs, callbacks=freeze, **options).fit(task, loader(16), loader(4))
    return task, changed(task, before)


HEAD = {f"parts.head.{name}" for name in ("0.weight", "0.bias", "0.running_mean", "0.running_var", "0.num_batches_tracked")} | {
    "parts.head.1.weight",
    "parts.head.1.bias",
}


@pytest.mark.parametrize(
    "freeze",
    [Freeze(names=["*"], but=["parts.head"]), Freeze(names=["parts.body"]), Freeze(names=["parts.bod?.*"])],
)
def test_what_is_frozen_stays_to_the_bit_with_the_statistics_of_its_norms(here: Path, freeze: Freeze) -> None:
    task, moved = train(freeze, epochs=2)
    assert moved == HEAD
    assert all(parameter.requires_grad for parameter in task.parameters())  # afterwards it can be trained


def test_unfreezing_at_an_epoch_trains_all_and_needs_no_new_groups(here: Path) -> None:
    assert train(Freeze(names=["parts.body"], unfreeze={2: ["*"]}), epochs=2)[1] == HEAD
    _, moved = train(Freeze(names=["parts.body"], unfreeze={1: ["parts.body.1"], 2: ["*"]}), epochs=3)
    assert moved == set(make(network=Chain).network.state_dict())
    _, moved = train(Freeze(names=["parts.body"], unfreeze={1: ["parts.body.1"]}), epochs=2)
    assert {name for name in moved if "body" in name} == {
        f"parts.body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_it_is_told_what_is_frozen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--freeze.names", '["*"]', "--freeze.but", "[head]", "--freeze.unfreeze", "{1: ['*']}") == 0
    out = capsys.readouterr().out
    assert re.search(r"freeze      \d+ of \d+ parameters are frozen, [\d,]+ values; \d+ BatchNorms keep their statistics\n", out)
    assert "            from epoch 1 (counted from 0) also trained: *\n" in out


@pytest.mark.parametrize("killed_at", [3, 6])
def test_a_run_that_goes_on_ends_in_the_same_bits(here: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int) -> None:
    options = ["--freeze.names", '["*"]', "--freeze.but", "[head]", "--freeze.unfreeze", "{1: ['*']}", "--ema.decay", "0.5"]
    each = ["--checkpoint.every_n_steps", "1"]
    assert fit(*options, *each) == 0
    with monkeypatch.context() as patched:
        at_batch(patched, killed_at, stop)
        with pytest.raises(Killed):
            fit(*options, *each)
    assert main(["fit", "--resume"]) == 0
    whole, again = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (RUN, Path("runs/digits/v002")))
    for part in ("state_dict", "ema"):
        torch.testing.assert_close(again[part], whole[part], rtol=0, atol=0)


class OneOfTwo(Freeze):
    """Freeze as in a job of two processes, in one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(SimpleNamespace(world_size=2, max_epochs=trainer.max_epochs), pl_module, stage)


def test_in_ddp_gradients_are_dropped_in_place_of_not_being_computed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool] = []

    def look(self: StepLog, trainer: Any, pl_module: Any, *rest: Any) -> None:
        wanted.append(pl_module.network.parts["body"][0].weight.requires_grad)

    monkeypatch.setattr(StepLog, "on_train_batch_end", look)
    _, moved = train(OneOfTwo(names=["parts.body"], unfreeze={1: ["*"]}))
    assert wanted == [True] * 4
    assert moved == HEAD
    assert train(OneOfTwo(names=["parts.body"], unfreeze={1: ["*"]}), epochs=2)[1] > HEAD


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"but": ["head"]}, "freeze.names is empty, so there is nothing to leave out or to unfreeze: set it"),
        ({"unfreeze": {1: ["*"]}}, "freeze.names is empty"),
        ({"names": ["*"], "unfreeze": {0: ["*"]}}, "freeze.unfreeze has epoch 0; epochs count from 0, so it must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        Freeze(**options)


def test_names_that_fit_nothing_are_refused_with_the_nearest(here: Path) -> None:
    with pytest.raises(UserError, match=re.escape("nothing in the network is named 'parts.bdy' (did you mean 'parts.body'?)")):
        train(Freeze(names=["parts.bdy"]))
    with pytest.raises(UserError, match="all of the network is frozen: name what to train"):
        train(Freeze(names=["*"]))


def test_what_the_network_itself_does_not_train_is_left_alone(here: Path) -> None:
    class Fixed(Chain):
        def __init__(self, num_classes: int, in_channels: int) -> None:
            super().__init__(num_classes, in_channels)
            self.idle = nn.Parameter(torch.ones(1), requires_grad=False)

    task = make(network=Fixed)
    quiet(max_epochs=2, callbacks=Freeze(names=["parts.body"], unfreeze={1: ["*"]})).fit(task, loader(16), loader(4))
    assert not task.network.idle.requires_grad


def test_a_run_that_fails_leaves_a_module_that_can_be_trained(here: Path) -> None:
    task, step = make(network=Chain), ClassificationTask.training_step
    task.training_step = lambda batch, batch_idx: step(task, batch, batch_idx) if batch_idx < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=Freeze(names=["parts.body"])).fit(task, loader(16), loader(4))
    assert all(parameter.requires_grad for parameter in task.parameters())
    assert all(module.training for module in task.network.modules())


def test_norms_that_a_strategy_puts_in_the_place_of_others_keep_their_statistics(here: Path) -> None:
    class Swapping(SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:  # as DDP does for sync_batchnorm
            body = trainer.lightning_module.network.parts["body"]
            new = nn.BatchNorm2d(4)
            new.weight, new.bias = body[1].weight, body[1].bias
            body[1] = new
            super().setup(trainer)

    _, moved = train(Freeze(names=["parts.body"]), strategy=Swapping("cpu"))
    assert moved == HEAD
