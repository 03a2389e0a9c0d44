from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.optim import AdamW

from fulgurite import load
from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from tests.classification import SPEC, Lights, data, make, quiet

QUIET = ["--trainer.enable_progress_bar", "false"]


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


def test_several_labels_are_learnt_and_told_from_the_checkpoint_alone(here: Path) -> None:
    torch.manual_seed(0)
    lights = Lights(batch_size=16)
    task = ClassificationTask(partial(SmallCNN, width=8, depth=1), partial(AdamW, lr=0.02), mixup=0.1, spec=lights.spec)
    trainer = quiet(max_epochs=8, enable_checkpointing=True)
    trainer.fit(task, datamodule=lights)
    assert trainer.callback_metrics["val/map"] > 0.99
    assert trainer.callback_metrics["val/f1_macro"] > 0.95
    assert trainer.run_dir is not None
    last = trainer.run_dir / "checkpoints" / "last.ckpt"
    loaded = load(last)
    assert loaded.spec == lights.spec
    test = lights.dataset("test")
    expected = [{name for name, label in zip(lights.spec.class_names, row, strict=True) if label} for row in test.labels.tolist()]
    found = loaded.predict_images(list(test.images), batch_size=10)
    assert sum(set(one.labels) == names for one, names in zip(found, expected, strict=True)) >= 60
    for one in found:
        assert list(one.probabilities) == sorted(one.probabilities, reverse=True)
    with pytest.raises(UserError, match="leave top_k out"):
        loaded.predict_images([], top_k=2)

    folder = here / "photos"
    folder.mkdir()
    for number in range(4):
        Image.fromarray(test.images[number].permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    assert main(["predict", "--ckpt_path", str(last), "--images", "photos", *QUIET]) == 0
    with Path("predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["labels"] for row in rows] == ["|".join(one.labels) for one in found[:4]]
    assert [[float(cell) for cell in row["probabilities"].split("|") if cell] for row in rows] == [
        pytest.approx(one.probabilities, abs=1e-6) for one in found[:4]
    ]
