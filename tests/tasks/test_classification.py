from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader, IterableDataset

from fulgurite.cli import main
from fulgurite.data import DataSpec
from fulgurite.data.base import ArrayDataset
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks.schedules import Plateau
from tests.classification import SEVERAL, SPEC, data, linear, loader, make, quiet, several
from tests.training import at_batch, fit


@pytest.mark.parametrize("stage", ["val", "test"])
def test_epoch_metrics_are_those_of_all_samples(stage: str) -> None:
    # 9 samples in batches of 4, 4 and 1: a mean of the batches' values would count the last sample four times.
    task, samples = make(label_smoothing=0.3, top_k=2), data(9)
    run = {"val": quiet().validate, "test": quiet().test}[stage]
    (metrics,) = run(task, loader(9))
    logits = task.eval()(samples.images).detach()
    right = logits.argmax(1) == samples.labels
    per_class = [right[samples.labels == label].float().mean() for label in range(3)]
    in_top = (logits.topk(2).indices == samples.labels[:, None]).any(1)
    expected = {
        f"{stage}/loss": F.cross_entropy(logits, samples.labels),  # smoothing is for training
        f"{stage}/acc": right.float().mean(),
        f"{stage}/acc_macro": torch.stack(per_class).mean(),
        f"{stage}/acc_top2": in_top.float().mean(),
    }
    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()})
    assert len(set(metrics.values())) == 4


def test_evaluation_is_plain_and_training_is_not(here: Path) -> None:
    # Weights and mixing are for training; a rate of zero keeps the network.
    plain = make(network=linear, optimizer=partial(SGD, lr=0.0))
    other = make(network=linear, optimizer=partial(SGD, lr=0.0), class_weights=[1.0, 5.0, 0.0], mixup=1.0, label_smoothing=0.2)
    found = []
    for task in (plain, other):
        trainer = quiet(max_epochs=1)
        trainer.fit(task, loader(9), loader(9))
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    for name in found[0]:
        assert (found[0][name] == found[1][name]) is name.startswith("val/"), name


def test_epochs_do_not_add_up() -> None:
    task = make()
    first = quiet().validate(task, loader(9))
    quiet().validate(task, loader(4))
    assert quiet().validate(task, loader(9)) == first


def test_top_k_is_not_taken_for_top_1_after_a_batch_that_is_all_right() -> None:
    class Echo(nn.Module):
        """Find the first pixel's class likeliest, and the next class second."""

        def forward(self, images: Tensor) -> Tensor:
            values = (images[:, 0, 0, 0] * SPEC.std[0] + SPEC.mean[0]).mul(255).round().long()
            return F.one_hot(values, 3) + 0.5 * F.one_hot((values + 1) % 3, 3)

    images = torch.tensor([0, 1, 0, 1], dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 1, 4, 4)
    batches = DataLoader(ArrayDataset(images, torch.tensor([0, 1, 1, 2])), batch_size=2, collate_fn=lambda batch: batch)
    task = make(network=lambda classes, channels: Echo(), top_k=2)
    (metrics,) = quiet().validate(task, batches)
    assert (metrics["val/acc"], metrics["val/acc_top2"]) == (0.5, 1.0)


def test_training_metrics_are_those_of_all_samples(here: Path) -> None:
    # A rate of zero keeps the weights, so that all batches meet the same network.
    task = make(network=linear, optimizer=partial(SGD, lr=0.0), label_smoothing=0.3)
    trainer, samples = quiet(max_epochs=2), data(9)
    trainer.fit(task, loader(9), loader(4))
    logits = task(samples.images).detach()
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(
        float(F.cross_entropy(logits, samples.labels, label_smoothing=0.3))
    )
    assert float(trainer.callback_metrics["train/acc"]) == pytest.approx(
        float((logits.argmax(1) == samples.labels).float().mean())
    )


@pytest.mark.parametrize(("every", "logged"), [(1, True), (2, True), (3, False), (0, False)])
def test_loss_of_a_step_is_logged_only_where_it_is_written(here: Path, every: int, logged: bool) -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=every, logger="csv")
    trainer.fit(make(), loader(8), loader(4))
    assert ("train/loss_step" in trainer.callback_metrics) is logged


def test_directions_are_those_of_what_validation_logs() -> None:
    task = make(top_k=2)
    (metrics,) = quiet().validate(task, loader(4))
    assert task.directions == {"val/loss": "min", "val/acc": "max", "val/acc_macro": "max", "val/acc_top2": "max"}
    assert task.directions.keys() == metrics.keys()
    assert task.monitor in task.directions


def test_several_labels_are_judged_by_their_average_precision() -> None:
    task = make(spec=SEVERAL)
    (metrics,) = quiet().validate(task, DataLoader(several(9), batch_size=4, collate_fn=lambda batch: batch))
    assert task.monitor == "val/map"
    assert task.directions == {"val/loss": "min", "val/acc": "max", "val/f1_macro": "max", "val/map": "max"}
    assert task.directions.keys() == metrics.keys()
    logits = task.eval()(several(9).images).detach()
    assert metrics["val/loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, several(9).labels.float())))


@pytest.mark.parametrize("spec", [SPEC, SEVERAL])
@pytest.mark.parametrize("options", [{}, {"class_weights": [1.0, 2.0, 3.0]}, {"mixup": 0.2}, {"mixup": 0.2, "cutmix": 1.0}])
def test_training_step_never_waits_for_the_device(spec: DataSpec, options: dict[str, Any]) -> None:
    # Tensors of the meta device hold no numbers, so that a step that would fetch one fails.
    task = make(spec=spec, label_smoothing=0.1, **options).to("meta")
    task.trainer = SimpleNamespace(log_every_n_steps=0)
    labels = torch.zeros(8, 3, dtype=torch.uint8) if spec.multi_label else torch.zeros(8, dtype=torch.long)
    loss = task.training_step((torch.zeros(8, 1, 4, 4, dtype=torch.uint8, device="meta"), labels.to("meta")), 0)
    loss.backward()
    assert loss.is_meta


@pytest.mark.parametrize("spec", [SPEC, SEVERAL])
@pytest.mark.parametrize("options", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_batch_of_one_sample_can_be_mixed(here: Path, spec: DataSpec, options: dict[str, Any]) -> None:
    samples = several(1) if spec.multi_label else data(1)
    trainer = quiet(max_epochs=1)
    task = make(spec=spec, network=linear, class_weights=[1.0, 2.0, 3.0], label_smoothing=0.1, **options)
    batches = DataLoader(samples, collate_fn=lambda batch: batch)
    trainer.fit(task, batches, batches)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


@pytest.mark.parametrize("weights", [None, "balanced", [1.0, 2.0, 0.5]])
def test_balanced_weights_are_said(here: Path, capsys: pytest.CaptureFixture[str], weights: Any) -> None:
    spec = replace(SPEC, class_counts=(1, 3, 2))  # 6 / (3 * 1), 6 / (3 * 3), 6 / (3 * 2)
    quiet(max_epochs=1).fit(make(class_weights=weights, spec=spec), loader(8), loader(4))
    said = [line for line in capsys.readouterr().out.splitlines() if "weights" in line]
    balanced = weights == "balanced"
    assert said == ["loss        class weights 0.667 to 2, balanced by the spec's class counts"] * balanced


MIXED = ["--model.mixup", "0.4", "--model.cutmix", "1.0", "--model.class_weights", "[1,2,1,1,1,1,1,1,1,3]"]


def test_mixed_run_that_was_stopped_ends_in_the_same_bits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(*MIXED) == 0
    with monkeypatch.context() as patch:
        at_batch(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert fit(*MIXED) == 75
    assert main(["fit", "--ckpt_path", "runs/digits/v002"]) == 0
    whole, resumed = (torch.load(f"runs/digits/{run}/checkpoints/last.ckpt", weights_only=True) for run in ("v001", "v003"))
    assert resumed["global_step"] == whole["global_step"]
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name


def test_weights_of_another_number_of_classes_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--model.class_weights", "[1,2]") == 2
    assert capsys.readouterr().err.endswith("class_weights has 2 values for 10 classes\n")


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_top_k_needs_more_classes_than_k(top_k: int) -> None:
    assert list(make(top_k=top_k).directions) == ["val/loss", "val/acc", "val/acc_macro"]


def test_schedule_is_told_the_number_of_optimizer_steps(here: Path) -> None:
    totals: list[int] = []

    def schedule(optimizer: Any, total_steps: int) -> PolynomialLR:
        totals.append(total_steps)
        return PolynomialLR(optimizer, total_steps)

    task = make(scheduler=schedule)
    # 3 batches an epoch, 2 of them to a step: the second step of an epoch has what is left.
    trainer = quiet(max_epochs=5, accumulate_grad_batches=2)
    trainer.fit(task, loader(12), loader(4))
    assert totals == [10] == [trainer.global_step]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0


def test_rate_is_kept_without_a_schedule(here: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(make(), loader(8), loader(4))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert trainer.lr_scheduler_configs == []


class Stream(IterableDataset[Any]):
    """Give batches without saying how many."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(8))


@pytest.mark.parametrize(
    ("epochs", "batches"), [(-1, loader(8)), (1, DataLoader(Stream(), batch_size=None))], ids=["epochs", "batches"]
)
def test_schedule_without_an_end_is_refused(here: Path, epochs: int, batches: Any) -> None:
    with pytest.raises(UserError, match=r"^a schedule needs an end: set trainer.max_epochs or trainer.max_steps, or take"):
        quiet(max_epochs=epochs).fit(make(scheduler=PolynomialLR), batches, loader(4))
    assert list((here / "runs" / "default").iterdir()) == []


@pytest.mark.parametrize(
    ("epochs", "batches"), [(-1, loader(8)), (3, DataLoader(Stream(), batch_size=None))], ids=["epochs", "batches"]
)
def test_plateau_needs_no_end(here: Path, epochs: int, batches: Any) -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
            trainer.should_stop = trainer.current_epoch == 2

    trainer = quiet(max_epochs=epochs, callbacks=[Stop()])
    trainer.fit(make(scheduler=partial(Plateau, patience=0, threshold=10.0)), batches, loader(4))
    assert trainer.current_epoch == 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize(("spec", "monitor"), [(SPEC, "val/acc"), (SEVERAL, "val/map")])
def test_plateau_follows_the_monitor(here: Path, spec: DataSpec, monitor: str) -> None:
    trainer = quiet(max_epochs=1)
    samples: Any = several(8) if spec.multi_label else data(8)
    batches = DataLoader(samples, batch_size=4, collate_fn=lambda batch: batch)
    trainer.fit(make(spec=spec, scheduler=Plateau), batches, batches)
    (config,) = trainer.lr_scheduler_configs
    assert (config.monitor, config.interval) == (monitor, "epoch")
    assert config.scheduler.state_dict()["best"] == pytest.approx(float(trainer.callback_metrics[monitor]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"spec": None}, "the task has no data spec: pass spec=data.spec"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; allowed: from 0 to below 1"),
        ({"class_weights": [1.0]}, "class_weights has 1 values for 3 classes"),
        ({"mixup": -1.0}, "mixup is -1.0; it is the alpha of a Beta distribution: above 0, or 0 for none"),
        ({"cutmix": -1.0}, "cutmix is -1.0; it is the alpha of a Beta distribution: above 0, or 0 for none"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        make(**options)
    assert str(error.value) == text


def test_network_gets_the_numbers_of_the_spec() -> None:
    given: list[tuple[int, int]] = []

    def network(num_classes: int, in_channels: int) -> nn.Module:
        given.append((num_classes, in_channels))
        return SmallCNN(num_classes, in_channels, width=2)

    make(network=network)
    assert given == [(3, 1)]
