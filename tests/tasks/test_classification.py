from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader

from fulgurite import Trainer
from fulgurite.data import DataSpec
from fulgurite.data.base import ArrayDataset
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask

SPEC = DataSpec(class_names=("ant", "bee", "cat"), channels=1, height=4, width=4, mean=(0.5,), std=(0.25,))
NETWORK = partial(SmallCNN, width=2, depth=1)


def linear(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_channels, num_classes))


def make(**options: Any) -> ClassificationTask:
    torch.manual_seed(0)
    return ClassificationTask(**{"network": NETWORK, "optimizer": partial(SGD, lr=0.1), "spec": SPEC, **options})


def data(number: int, classes: int = 3) -> ArrayDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (number, 1, 4, 4), generator=generator, dtype=torch.uint8)
    # Far from balanced, so that macro and micro accuracy differ.
    return ArrayDataset(images, torch.arange(number) % 5 % classes)


def loader(number: int, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(data(number), batch_size=batch_size, collate_fn=lambda batch: batch)


def quiet(**options: Any) -> Trainer:
    return Trainer(**{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options})


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
    assert ("train/loss_step" in trainer.logged_metrics) is logged


def test_directions_are_those_of_what_validation_logs() -> None:
    task = make(top_k=2)
    (metrics,) = quiet().validate(task, loader(4))
    assert task.directions == {"val/loss": "min", "val/acc": "max", "val/acc_macro": "max", "val/acc_top2": "max"}
    assert task.directions.keys() == metrics.keys()
    assert task.monitor in task.directions


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


def test_schedule_without_an_end_is_refused(here: Path) -> None:
    with pytest.raises(UserError, match=r"^a schedule needs an end: set trainer.max_epochs or trainer.max_steps, or take"):
        quiet(max_epochs=-1).fit(make(scheduler=PolynomialLR), loader(8), loader(4))
    assert list((here / "runs" / "default").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"spec": None}, "the task has no data spec: pass spec=data.spec"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; allowed: from 0 to below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1; allowed: from 0 to below 1"),
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


def probabilities(task: ClassificationTask, images: Tensor) -> list[list[float]]:
    with torch.no_grad():
        return task.eval().probabilities(images).tolist()


def test_predict_images_takes_paths_images_and_tensors(tmp_path: Path) -> None:
    task, pixels = make(), data(1).images[0]
    (expected,) = probabilities(task, pixels[None])
    picture = Image.fromarray(pixels[0].numpy())
    picture.save(tmp_path / "one.png")
    images = [
        tmp_path / "one.png",
        str(tmp_path / "one.png"),
        (tmp_path / "one.png").read_bytes(),
        picture,
        pixels,
        np.array(picture),
    ]
    predictions = task.predict_images(images, top_k=3)
    assert len(predictions) == len(images)
    for prediction in predictions:
        assert prediction == predictions[0]
    order = sorted(range(3), key=lambda label: -expected[label])
    assert [label for label, _ in predictions[0].top] == [SPEC.class_names[label] for label in order]
    assert [value for _, value in predictions[0].top] == pytest.approx([expected[label] for label in order], abs=1e-6)
    assert predictions[0].label == predictions[0].top[0][0]


def test_predict_images_does_not_depend_on_the_batches_and_keeps_the_order() -> None:
    task, images = make(), data(7).images
    expected = probabilities(task, images)
    for batch_size in (1, 3, 64):
        found = task.predict_images(list(images), batch_size=batch_size)
        assert [one.probability for one in found] == pytest.approx([max(row) for row in expected], abs=1e-6)
    assert task.predict_images([]) == []


def test_predict_images_leaves_each_module_in_its_mode() -> None:
    task = make()
    task.train()
    frozen = task.network.get_submodule("stages")
    frozen.eval()
    modes = [module.training for module in task.modules()]
    task.predict_images([data(1).images[0]])
    with pytest.raises(UserError, match=r"cannot read missing\.png"):
        task.predict_images(["missing.png"])
    assert [module.training for module in task.modules()] == modes
    assert {True, False} == set(modes)


@pytest.mark.parametrize(
    ("images", "options", "text"),
    [
        ("one.png", {}, "predict_images takes a list: predict_images([image])"),
        (Image.new("L", (4, 4)), {}, "predict_images takes a list: predict_images([image])"),
        ([], {"top_k": 4}, "top_k is 4; allowed: 1 to 3, the number of classes"),
        ([], {"top_k": 0}, "top_k is 0; allowed: 1 to 3, the number of classes"),
        ([], {"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ],
)
def test_predict_images_names_what_is_wrong(images: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        make().predict_images(images, **options)
    assert str(error.value) == text
