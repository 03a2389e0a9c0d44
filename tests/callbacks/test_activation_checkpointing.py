from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import SGD

from fulgurite import Trainer
from fulgurite.callbacks.activation_checkpointing import ActivationCheckpointing
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.compiling import Compile
from fulgurite.callbacks.ema import EMA
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.models import ResNet
from fulgurite.tasks import ClassificationTask
from tests.classification import loader, make, quiet
from tests.conftest import SMALL

NETWORK = partial(ResNet, width=8, layers=(2, 1), drop_path=0.3, zero_init=False)


class Transformer(nn.Module):
    """Two encoder layers with dropout over the rows of an image."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(4 * in_channels, 2, 8, dropout=0.2, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(4 * in_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(images.transpose(1, 2).flatten(2)).mean(1))
        return logits


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def end(*callbacks: Callback, network: Any = NETWORK, **options: Any) -> list[Tensor]:
    """Train for two epochs, and return the weights and what the next random number is."""
    task = make(network=network)
    torch.manual_seed(5)
    quiet(max_epochs=2, callbacks=list(callbacks), **options).fit(task, loader(16), loader(8))
    return [value.clone() for value in task.state_dict().values()] + [torch.rand(1)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("network", [NETWORK, Transformer])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str)
def test_ends_in_the_same_bits(here: Path, every: int, network: Any, options: dict[str, Any]) -> None:
    plain = end(network=network, **options)
    assert same(end(ActivationCheckpointing(every=every), network=network, **options), plain)


def test_with_an_average(here: Path) -> None:
    assert same(end(ActivationCheckpointing(every=1), EMA(decay=0.5)), end(EMA(decay=0.5)))


def test_statistics_would_count_a_batch_twice(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = end()
    monkeypatch.setattr("fulgurite.callbacks.activation_checkpointing._spare_buffers", lambda block: nullcontext())
    assert not same(end(ActivationCheckpointing(every=1)), plain)


def kept(network: nn.Module, images: Tensor) -> int:
    """Return how many bytes wait for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        network(images)
    return sum(sizes.values())


class Look(Callback):
    """Look at the network in the middle of a training."""

    def __init__(self) -> None:
        self.bytes = self.in_evaluation = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = copy.deepcopy(pl_module.network.state_dict())
        self.bytes = kept(pl_module.network, torch.zeros(8, 1, 8, 8))
        pl_module.network.load_state_dict(state)
        inside = copy.deepcopy(pl_module.network)
        inside.load_state_dict(state)
        pickle.dumps(inside)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.profiler.profile() as profile:
            pl_module.network(torch.zeros(8, 1, 8, 8))
        self.in_evaluation = len(profile.events() or [])


def test_less_waits_for_the_backward_pass_and_evaluation_is_as_ever(here: Path) -> None:
    looks = [Look(), Look(), Look()]
    for look, every in zip(looks, (None, 2, 1), strict=True):
        quiet(max_epochs=1, callbacks=[ActivationCheckpointing(every=every), look]).fit(
            make(network=NETWORK), loader(8), loader(4)
        )
    none, second, all_blocks = looks
    assert all_blocks.bytes < second.bytes < none.bytes
    assert all_blocks.bytes < 0.5 * none.bytes
    assert all_blocks.in_evaluation == none.in_evaluation > 0


class Stop(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("stopped", [False, True])
def test_network_is_left_as_it_was(here: Path, capsys: pytest.CaptureFixture[str], stopped: bool) -> None:
    task = make(network=NETWORK)
    before = task.state_dict().keys()
    callbacks = [ActivationCheckpointing(every=2), *([Stop()] if stopped else [])]
    with suppress(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=callbacks).fit(task, loader(8), loader(4))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("activations")]
    assert lines == ["activations 2 of 3 blocks are computed again in the backward pass: less memory, more time"]
    assert task.state_dict().keys() == before
    assert not any("forward" in vars(module) for module in task.modules())
    pickle.loads(pickle.dumps(copy.deepcopy(task.network)))


def test_compiled(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = end()
    monkeypatch.setattr(
        "fulgurite.callbacks.compiling._compile", lambda network, mode, device: network.compile(backend="aot_eager")
    )
    assert same(end(ActivationCheckpointing(every=1), Compile(mode="default")), plain)
    assert "default: 2 graphs, 0 graph breaks" in capsys.readouterr().out


def train(ckpt_path: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    digits = DigitsDataModule(shift=1)
    task = ClassificationTask(NETWORK, partial(SGD, lr=0.05), spec=digits.spec)
    settings: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2, "logger": False}
    callbacks = [Checkpoints(every_n_steps=1), ActivationCheckpointing(every=1)]
    trainer = Trainer(**settings | {"enable_progress_bar": False, "callbacks": callbacks} | options)
    trainer.fit(task, datamodule=digits, ckpt_path=ckpt_path)
    return trainer


def test_resumes_in_the_same_bits(here: Path) -> None:
    whole, stopped = train(), train(max_steps=6)
    resumed = train(ckpt_path=stopped.run_dir)
    states = [list(trainer.lightning_module.state_dict().values()) for trainer in (whole, resumed)]
    assert same(*states)


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (0, "activation_checkpointing.every is 0; allowed: 1 for each block, 2 for every second, ..., or null"),
        (-1, "activation_checkpointing.every is -1; allowed: 1 for each block, 2 for every second, ..., or null"),
    ],
)
def test_senseless_numbers_are_refused(every: int, text: str) -> None:
    with pytest.raises(UserError) as error:
        ActivationCheckpointing(every=every)
    assert str(error.value) == text


def test_network_of_plain_layers_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--activation_checkpointing.every", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: the command line: activation_checkpointing.every is 1, and SmallCNN has nothing to recompute: it has "
        "no blocks of several layers in an nn.Sequential or nn.ModuleList\nset it to null\n"
    )


def test_off_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same(end(ActivationCheckpointing()), end())
    assert "activations" not in capsys.readouterr().out


@pytest.mark.gpu
def test_takes_less_memory_on_gpu(here: Path) -> None:
    peaks, digits = [], DigitsDataModule(batch_size=512)
    for every in (None, 1):
        task = ClassificationTask(partial(ResNet, width=64), partial(SGD, lr=0.05), spec=digits.spec)
        torch.cuda.reset_peak_memory_stats()
        trainer = quiet(accelerator="gpu", devices=1, max_epochs=1, callbacks=[ActivationCheckpointing(every=every)])
        trainer.fit(task, datamodule=digits)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 0.7 * peaks[0]
