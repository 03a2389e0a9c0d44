from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from PIL import Image
from torchvision import datasets

from fulgurite.cli import main
from fulgurite.data import TorchvisionDataModule
from fulgurite.errors import UserError
from tests.images import save_image, save_mnist


def module(name: str, **options: Any) -> TorchvisionDataModule:
    return TorchvisionDataModule(name, **{"size": 28, "num_workers": 0} | options)


def test_official_splits_are_kept_and_validation_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_mnist(tmp_path, "FashionMNIST")
    data = module("FashionMNIST", root=tmp_path, channels=1)
    assert {split: len(data.samples(split)) for split in data.splits} == {"train": 30, "test": 10, "val": 10}
    assert data.spec.class_names[:2] == ("T-shirt/top", "Trouser")
    assert data.spec.class_counts == (3,) * 10
    assert data.in_memory
    official = datasets.FashionMNIST(tmp_path, train=False)
    assert (data.dataset("test").images.numpy()[:, 0] == official.data.numpy()).all()
    assert "val made of training images" in capsys.readouterr().out
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, labels.shape) == ((30, 1, 28, 28), (30,))


def test_emnist_takes_both_kinds_of_split(tmp_path: Path) -> None:
    save_mnist(tmp_path, "x")
    folder = tmp_path / "EMNIST" / "raw"
    folder.mkdir(parents=True)
    for path in (tmp_path / "x" / "raw").iterdir():
        (folder / f"emnist-digits-{path.name.replace('t10k', 'test')}").write_bytes(path.read_bytes())
    data = module("EMNIST", root=tmp_path, channels=1, arguments={"split": "digits"})
    assert {split: len(data.samples(split)) for split in data.splits} == {"train": 30, "test": 10, "val": 10}


def test_image_files_are_read_as_files(tmp_path: Path) -> None:
    root = tmp_path / "rendered-sst2"
    for split, count in (("train", 6), ("valid", 4), ("test", 2)):
        for label, name in enumerate(("negative", "positive")):
            for number in range(count // 2):
                save_image(root / split / name / f"{number}.png", label, seed=number)
    data = module("RenderedSST2", root=tmp_path, cache="ram")
    assert {split: len(data.samples(split)) for split in data.splits} == {"train": 6, "val": 4, "test": 2}
    assert data.spec.class_names == ("negative", "positive")
    assert not data.in_memory
    assert next(iter(data.val_dataloader()))[0].shape == (4, 3, 28, 28)


def test_made_up_images_have_no_splits_and_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"size": 100, "image_size": [3, 30, 40], "num_classes": 4}
    data = module("FakeData", arguments=arguments)
    assert data.splits == ("train", "val", "test")
    assert sum(len(data.samples(split)) for split in data.splits) == 100
    assert data.spec.class_names == ("0", "1", "2", "3")
    assert "named by their numbers, 0 to 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("CIFAR11", {}, r"torchvision\.datasets has no 'CIFAR11' \(did you mean 'CIFAR10'\?\)"),
        ("CIFAR10", {}, r"CIFAR10 in .*Dataset not found .*\n--data\.download true fetches it"),
        ("Food101", {}, r"Food101 in .*Dataset not found"),
        ("FakeData", {"arguments": {"siz": 3}}, "unexpected keyword argument 'siz'"),
        ("CocoDetection", {}, "missing 1 required positional argument: 'annFile'"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        module(name, root=tmp_path, **options).labelled  # noqa: B018


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.utils.urllib.request.urlopen", fail)
    with pytest.raises(UserError, match="CIFAR10 cannot be downloaded: no route to host"):
        module("CIFAR10", root=tmp_path, download=True).prepare_data()


def test_too_large_for_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulgurite.data.torchvision_data.available_memory", lambda: 2**20)
    with pytest.raises(UserError, match=r"FakeData at 300 x 300 takes 0\.3 GiB, 0\.0 are free: a smaller size fits"):
        module("FakeData", size=300).labelled  # noqa: B018


def test_it_trains(here: Path) -> None:
    save_mnist(here / "data")
    model = ["--model", "ClassificationTask", "--model.network", "SmallCNN", "--model.network.width", "4"]
    optimizer = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.01"]
    data = ["--data", "TorchvisionDataModule", "--data.name", "MNIST", "--data.size", "28", "--data.channels", "1"]
    short = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false", "--data.augment", "strong"]
    assert main(["fit", *model, *optimizer, *data, *short, "--data.num_workers", "0", "--test"]) == 0
    Image.new("L", (28, 28)).save("x.png")
    assert main(["predict", "--ckpt_path", "best", "--images", "x.png"]) == 0
