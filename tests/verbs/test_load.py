from __future__ import annotations

import csv
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn
from torch.optim import SGD

from fulgurite import Trainer, load
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.models import ResNet
from fulgurite.tasks import ClassificationTask


def digit(index: int) -> Tensor:
    return DigitsDataModule().dataset("test").images[index]


class OwnNetwork(nn.Module):
    """Stand for a class of the user's own package."""

    def __init__(self, num_classes: int, in_channels: int, *, path: Path = Path("x")) -> None:
        super().__init__()
        self.layer = nn.Linear(64 * in_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(images.flatten(1))
        return logits


def train(network: Any, **options: Any) -> Path:
    data = DigitsDataModule()
    task = ClassificationTask(network, partial(SGD, lr=0.1), spec=data.spec)
    trainer = Trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, enable_progress_bar=False, **options)
    trainer.fit(task, datamodule=data)
    assert trainer.run_dir is not None
    return trainer.run_dir


def test_loaded_task_agrees_with_predict(here: Path, trained_run: Path) -> None:
    for index in range(3):
        Image.fromarray(digit(index)[0].numpy()).save(f"{index}.png")
    assert main(["predict", "--ckpt_path", str(trained_run), "--images", ".", "--output", "table.csv", "--top_k", "10"]) == 0
    with Path("table.csv").open() as file:
        table = list(csv.DictReader(file))
    task = load(trained_run, device="cpu")
    for index, row in enumerate(table):
        columns = ["probability", *(f"probability_{rank}" for rank in range(2, 11))]
        labels = ["label", *(f"label_{rank}" for rank in range(2, 11))]
        (prediction,) = task.predict_images([digit(index)], top_k=10)
        assert [label for label, _ in prediction.top] == [row[name] for name in labels]
        assert [value for _, value in prediction.top] == pytest.approx([float(row[name]) for name in columns], abs=1e-6)


def test_task_is_ready_for_use(trained_run: Path) -> None:
    task = load(trained_run, device="cpu")
    assert type(task) is ClassificationTask
    assert {module.training for module in task.modules()} == {False}
    assert task.spec == DigitsDataModule().spec
    weights = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(task.state_dict()[name], value) for name, value in weights.items())
    images = torch.stack([digit(index) for index in range(4)])
    assert torch.equal(task(images)[:2], task(images)[:2])
    assert task(images).shape == (4, 10)


def test_best_and_last_of_the_latest_run(here: Path, trained_run: Path) -> None:
    shutil.copytree(trained_run, "runs/digits/v001")
    for name in ("best", "last"):
        weights = torch.load(trained_run / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
        task = load(name)
        assert all(torch.equal(task.state_dict()[key], value) for key, value in weights.items())
    with pytest.raises(UserError, match=r"^no checkpoint under \S*elsewhere\n"):
        load("best", runs_dir="elsewhere")


def test_network_made_from_python_is_made_again(here: Path) -> None:
    task = load(train(partial(ResNet, width=4, layers=(1, 1), activation=nn.GELU)))
    assert isinstance(task.network, ResNet)
    assert any(isinstance(module, nn.GELU) for module in task.modules())


def test_class_of_ones_own_is_loaded_if_it_is_trusted(here: Path) -> None:
    run = train(partial(OwnNetwork, path=Path("a/b")))
    assert type(load(run, trust=["tests"]).network).__name__ == "OwnNetwork"
    with pytest.raises(UserError, match=r"tests\.verbs\.test_load\.OwnNetwork\S*, which is not in a trusted package"):
        load(run)


def rewrite(run: Path, old: str, new: str) -> Path:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    description = checkpoint["fulgurite"]
    assert old in description["config"]
    description["config"] = description["config"].replace(old, new)
    torch.save(checkpoint, "changed.ckpt")
    return Path("changed.ckpt")


def test_weights_of_another_network_are_refused(here: Path, trained_run: Path) -> None:
    with pytest.raises(UserError, match=r"^the checkpoint's weights do not fit this network\nsize mismatch for network"):
        load(rewrite(trained_run, "width: 4", "width: 5"))


def test_configuration_that_cannot_be_built_is_refused(here: Path, trained_run: Path) -> None:
    with pytest.raises(UserError, match="widht"):
        load(rewrite(trained_run, "width: 4", "widht: 4"))


def test_code_of_a_stranger_is_refused(here: Path, trained_run: Path) -> None:
    with pytest.raises(UserError, match=r"os\.system\S*, which is not in a trusted package; nothing was imported"):
        load(rewrite(trained_run, "torch.optim.AdamW", "os.system"))


def test_value_that_is_the_name_of_a_file_is_not_opened(here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "probe_of_load.py").write_text("from fulgurite.models import SmallCNN\n")
    monkeypatch.syspath_prepend(here)
    (here / "net.cfg").write_text("class_path: probe_of_load.SmallCNN\n")
    stored = yaml.safe_load((trained_run / "config.yaml").read_text())
    stored["model"]["init_args"]["network"] = "net.cfg"
    checkpoint = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)
    checkpoint["fulgurite"]["config"] = yaml.safe_dump(stored)
    torch.save(checkpoint, here / "evil.ckpt")
    with pytest.raises(UserError):
        load(here / "evil.ckpt")
    assert "probe_of_load" not in sys.modules


def test_lightnings_own_way_is_refused(trained_run: Path) -> None:
    text = r"^ClassificationTask\.load_from_checkpoint runs code that a checkpoint names: use fulgurite\.load\(path\)$"
    with pytest.raises(UserError, match=text):
        ClassificationTask.load_from_checkpoint(trained_run / "checkpoints" / "best.ckpt")
