from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fulgurite import load
from fulgurite.callbacks.compute import Compute, _overflowing
from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.models import ResNet, SmallCNN
from fulgurite.tasks import ClassificationTask
from tests import kills
from tests.classification import loader, make, quiet
from tests.commands import refused
from tests.conftest import SMALL
from tests.training import RUN, at_batch, fit

LAST = ["--trainer.memory_format", "channels_last"]
# Its shortcuts are 1x1 convolutions with a stride over 4 and 8 channels.
NARROW = ["--model.network", "ResNet", "--model.network.width", "4", "--model.network.layers", "[1,1,1]"]


@pytest.fixture(autouse=True)
def _matmul() -> Iterator[None]:
    """Leave PyTorch's precision of matrix products as it was."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def layouts(module: nn.Module) -> set[str]:
    """Return how those convolutions of a module lie in memory whose two formats differ."""
    weights = [p for p in module.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2:] != (1, 1)]
    return {"contiguous" if weight.is_contiguous() else "channels last" for weight in weights}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_of_matrix_products(here: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    assert main(["fit", *SMALL, "--trainer.fast_dev_run", "true", "--trainer.matmul_precision", precision]) == 0
    assert torch.get_float32_matmul_precision() == precision
    assert f"matmul      float32 products in precision '{precision}'\n" in capsys.readouterr().out


def test_precision_of_matrix_products_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_float32_matmul_precision("medium")
    assert main(["fit", *SMALL, "--trainer.fast_dev_run", "true"]) == 0
    assert torch.get_float32_matmul_precision() == "medium"
    assert "matmul" not in capsys.readouterr().out


def test_the_newer_setting_of_pytorch_may_be_set(here: Path) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # from here on PyTorch refuses to tell the older one
    assert main(["fit", *SMALL, "--trainer.fast_dev_run", "true", "--trainer.matmul_precision", "high"]) == 0
    assert torch.get_float32_matmul_precision() == "high"


def test_unknown_values_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"trainer\.memory_format is 'nhwc'; allowed: contiguous, channels_last"):
        Compute("nhwc")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"trainer\.matmul_precision is 'tf32'; allowed: highest, high, medium, null"):
        Compute(matmul_precision="tf32")  # type: ignore[arg-type]
    said = refused(capsys, "fit", *SMALL, "--trainer.memory_format", "channel_last")
    assert "trainer.memory_format is 'channel_last' (did you mean 'channels_last'?)" in said


def test_weights_and_images_lie_channels_last_while_training(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    forward = SmallCNN.forward

    def watched(self: SmallCNN, images: torch.Tensor) -> torch.Tensor:
        seen.append((layouts(self), images.is_contiguous(memory_format=torch.channels_last)))
        return forward(self, images)

    monkeypatch.setattr(SmallCNN, "forward", watched)
    assert fit(*LAST, epochs=1) == 0
    assert seen == [({"channels last"}, True)] * len(seen) != []
    assert "memory      channels last, as configured\n" in capsys.readouterr().out


def test_nothing_of_it_is_left(here: Path) -> None:
    assert fit(*LAST, "--ema.decay", "0.5", epochs=1) == 0
    checkpoint = torch.load(RUN / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(value.is_contiguous() for value in checkpoint["state_dict"].values())
    assert layouts(load(RUN)) == {"contiguous"}

    task = make(network=partial(SmallCNN, width=8, depth=2))
    quiet(max_epochs=1, accelerator="cpu", memory_format="channels_last").fit(task, loader(8), loader(8))
    assert layouts(task) == {"contiguous"}
    assert task.preprocess.memory_format == torch.contiguous_format


def test_nothing_of_it_is_left_by_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(network=partial(SmallCNN, width=8, depth=2))
    at_batch(monkeypatch, 1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, accelerator="cpu", memory_format="channels_last").fit(task, loader(8), loader(8))
    assert layouts(task) == {"contiguous"}


def test_it_learns_what_contiguous_learns(here: Path) -> None:
    states = {}
    for memory_format in ("contiguous", "channels_last"):
        args = ["--trainer.memory_format", memory_format, "--trainer.runs_dir", memory_format, "--model.optimizer.lr", "1e-4"]
        assert fit(*args, epochs=1) == 0
        states[memory_format] = torch.load(next(here.glob(f"{memory_format}/*/v001/checkpoints/last.ckpt")), weights_only=True)
    first, second = (states[name]["state_dict"] for name in states)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("begins", "goes_on"), [("channels_last", "contiguous"), ("contiguous", "channels_last")])
def test_a_resumed_run_may_lie_otherwise(here: Path, monkeypatch: pytest.MonkeyPatch, begins: str, goes_on: str) -> None:
    assert fit("--trainer.memory_format", begins, epochs=1) == 0
    differ: list[Any] = []
    step = ClassificationTask.training_step

    def training_step(self: ClassificationTask, *args: Any) -> Any:
        for weight, state in self.trainer.optimizers[0].state.items():
            differ.extend(value for value in state.values() if value.dim() and value.stride() != weight.stride())
        return step(self, *args)

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)
    assert main(["fit", "--resume", "--trainer.max_epochs", "2", "--trainer.memory_format", goes_on]) == 0
    assert differ == []


def test_run_killed_and_resumed_ends_in_the_same_bits(here: Path) -> None:
    args = [*SMALL, *LAST, "--trainer.max_epochs", "2", "--checkpoint.every_n_steps", "1", "--ema.decay", "0.9"]
    args += ["--trainer.log_every_n_steps", "1"]
    expected = kills.whole_run(args)
    plan: list[kills.Kill] = [("before the optimizer", 2), ("after the optimizer", 3)]
    assert kills.fit_under_kills(args, plan, random.Random(0)) == 2
    assert kills.differences(expected) == []


def test_convolutions_that_write_past_their_buffer_are_found() -> None:
    def named(**options: Any) -> list[str]:
        return list(_overflowing(ResNet(3, 3, **options)))

    assert named(width=4, layers=(1, 1, 1)) == ["stages.1.0.shortcut.0", "stages.2.0.shortcut.0"]
    assert named(width=16) == []
    assert list(_overflowing(nn.Conv2d(4, 8, 1))) == []
    assert list(_overflowing(nn.Conv2d(4, 8, 3, stride=2))) == []
    assert list(_overflowing(nn.Conv2d(32, 32, 1, stride=(1, 2), groups=8))) == [""]
    assert list(_overflowing(nn.ConvTranspose2d(8, 4, 1, stride=2))) == [""]
    assert list(_overflowing(nn.ParameterList([torch.zeros(8, 4, 1, 1)]))) == [""]
    assert list(_overflowing(nn.Conv3d(4, 8, 1, stride=2))) == []


@pytest.mark.parametrize("stem", ["small", "large"])
def test_narrow_network_on_a_processor_stays_contiguous(here: Path, stem: str) -> None:
    # Not in this process: with its weights channels last, most runs of this end in "double free or corruption".
    args = [*SMALL[:2], *NARROW, "--model.network.stem", stem, *SMALL[4:], *LAST, "--trainer.max_epochs", "2"]
    assert kills.fit(args) == 0
    said = (here / "output.txt").read_text(encoding="utf-8")
    name = "network.stages.1.0.shortcut.0"
    assert (
        f"memory      contiguous: on a CPU, channels last would corrupt it in the gradient of {name} (oneDNN issue 6035)" in said
    )


def test_strategies_that_split_weights_are_refused() -> None:
    class Splits:
        restore_checkpoint_after_setup = True
        root_device = torch.device("cpu")

    class Trainer:
        precision, strategy = "32-true", Splits()

    with pytest.raises(UserError, match=r"trainer\.memory_format is channels_last, and Splits takes contiguous weights only"):
        Compute("channels_last").setup(Trainer(), make(), "fit")


def test_three_dimensional_convolutions_are_left_alone(here: Path) -> None:
    class Volumes(nn.Module):
        def __init__(self, num_classes: int, in_channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv3d(in_channels, num_classes, 3, padding=1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.conv(images[:, :, None]).mean((2, 3, 4))
            return scores

    task = make(network=Volumes)
    quiet(max_epochs=1, accelerator="cpu", memory_format="channels_last").fit(task, loader(8), loader(8))
