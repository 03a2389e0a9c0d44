from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from fulgurite.cli import main
from fulgurite.data import ImageFolderDataModule
from fulgurite.data.files import FileDataset
from fulgurite.data.samples import Split
from fulgurite.data.splits import Holdout
from fulgurite.errors import UserError
from tests.commands import refused
from tests.images import save_image, save_splits, save_tree


def module(root: Path, **options: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(root, **{"size": 16, "num_workers": 0} | options)


def names(data: ImageFolderDataModule, split: Split) -> list[tuple[str, str]]:
    """Return (path within the root, class) of each sample."""
    dataset: Any = data.dataset(split)
    return [
        (path.relative_to(data.root).as_posix(), data.spec.class_names[label])
        for path, label in zip(dataset.paths, dataset.labels.tolist(), strict=True)
    ]


def test_splits_are_folders_and_classes_are_folders_in_them(tmp_path: Path) -> None:
    data = module(save_splits(tmp_path))
    assert data.splits == ("train", "val", "test")
    assert data.spec.class_names == ("cat", "dog")
    assert data.spec.class_counts == (4, 4)
    assert (data.spec.height, data.spec.width, data.spec.channels) == (16, 16, 3)
    assert names(data, "val")[3:5] == [("val/cat/3.png", "cat"), ("val/dog/0.png", "dog")]
    images, labels = next(iter(data.val_dataloader()))
    assert images.shape == (8, 3, 16, 16)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize("folders", [("training", "Validation", "TEST"), ("train", "valid", "testing")])
def test_other_names_of_splits(tmp_path: Path, folders: tuple[str, ...]) -> None:
    save_splits(tmp_path / "given")
    for split, folder in zip(("train", "val", "test"), folders, strict=True):
        (tmp_path / "given" / split).rename(tmp_path / "given" / folder)
    assert module(tmp_path / "given").splits == ("train", "val", "test")


def test_one_tree_is_split_and_the_seed_of_the_split_decides(tmp_path: Path) -> None:
    save_tree(tmp_path, count=20)
    data = module(tmp_path)
    assert [len(data.samples(split)) for split in data.splits] == [28, 6, 6]
    assert names(data, "val") == names(module(tmp_path), "val")
    assert names(data, "val") != names(module(tmp_path, split=Holdout(split_seed=1)), "val")


def test_images_lie_at_any_depth_and_rubbish_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tree(tmp_path / "train", count=1)
    save_image(tmp_path / "train" / "cat" / "a" / "b" / "deep.JPG")
    hidden = (".ipynb_checkpoints/0.png", "cat/._0.png", "cat/.DS_Store", "dog/Thumbs.db", "__MACOSX/cat/0.png")
    for rubbish in (*hidden, "dog/notes.txt"):
        path = tmp_path / "train" / rubbish
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"rubbish")
    save_image(tmp_path / "train" / "loose.png")
    save_image(tmp_path / "other" / "0.png")
    data = module(tmp_path)
    data.labelled  # noqa: B018  # reads it
    assert data.spec.class_names == ("cat", "dog")
    everything = sorted(name for split in data.splits for name, _ in names(data, split))
    assert everything == ["train/cat/0.png", "train/cat/a/b/deep.JPG", "train/dog/0.png"]
    printed = capsys.readouterr().out
    assert "ignored     1 files in" in printed
    assert f"ignored     other in {tmp_path}" in printed


def test_training_numbers_the_classes_of_every_split(tmp_path: Path) -> None:
    save_splits(tmp_path, ("a", "b", "c"))
    shutil.rmtree(tmp_path / "val" / "a")
    shutil.rmtree(tmp_path / "test" / "b")
    (tmp_path / "test" / "b").mkdir()
    data = module(tmp_path)
    assert {label for _, label in names(data, "val")} == {"b", "c"}
    assert data.dataset("val").labels.unique().tolist() == [1, 2]
    assert data.dataset("test").labels.unique().tolist() == [0, 2]


def test_a_class_that_training_lacks_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(tmp_path)
    (tmp_path / "val" / "cat").rename(tmp_path / "val" / "cats")
    with pytest.raises(UserError, match=r"val/cats: no class of that name \(did you mean 'cat'\?\); the classes are cat, dog"):
        module(tmp_path).labelled  # noqa: B018
    save_splits(tmp_path / "b", ("x", "y"))
    (tmp_path / "b" / "train" / "w").mkdir()
    assert module(tmp_path / "b").spec.class_counts == (0, 4, 4)
    assert "empty       no training images of w" in capsys.readouterr().out


def test_one_image_of_a_class_and_one_class_alone(tmp_path: Path) -> None:
    save_tree(tmp_path / "few", ("a", "b", "c"), count=1)
    with pytest.raises(UserError, match=r"no val split can be made of the 3 training images of .*few: each class"):
        module(tmp_path / "few").labelled  # noqa: B018
    save_tree(tmp_path / "few" / "train", ("a", "b", "c"), count=1)
    save_tree(tmp_path / "few" / "val", ("a",), count=1)
    for name in "abc":
        shutil.rmtree(tmp_path / "few" / name)
    assert module(tmp_path / "few").spec.class_counts == (1, 1, 1)
    save_tree(tmp_path / "one", ("only",), count=8)
    assert module(tmp_path / "one").spec.class_names == ("only",)


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    save_tree(tmp_path / "data", count=2)
    save_image(tmp_path / "elsewhere" / "x.png")
    (tmp_path / "data" / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "cat" / "loop").symlink_to(tmp_path / "data" / "cat")
    (tmp_path / "data" / "round").symlink_to(tmp_path / "data")
    data = module(tmp_path / "data")
    assert data.spec.class_names == ("cat", "dog")
    assert sum(len(data.samples(split)) for split in data.splits) == 5


def test_odd_names(tmp_path: Path) -> None:
    classes = ("a b", 'it\'s "so"', "new\nline", "日本語")
    data = module(save_tree(tmp_path / "odd 'root'", classes, count=4))
    assert data.spec.class_names == classes
    assert len(next(iter(data.train_dataloader()))[1]) == sum(data.spec.class_counts or ())


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda root: None, r"data/pics does not exist: there is no .*/data$"),
        (lambda root: root.mkdir(parents=True), "no class folders in .*pics: images of a class lie in a folder of its name"),
        (lambda root: (root / "cat").mkdir(parents=True), "no images in the class folders of .*pics; looked for files ending"),
        (lambda root: (root.parent.mkdir(), root.write_text("x")), "pics is a file; root is the folder that holds the classes"),
        (lambda root: save_tree(root / "test"), "has no training images, which say what the classes are: it has test only"),
        (lambda root: (save_tree(root / "val"), save_tree(root / "valid")), "two folders of one split: val, valid"),
    ],
)
def test_what_is_no_tree_of_classes(tmp_path: Path, build: Any, text: str) -> None:
    root = tmp_path / "data" / "pics"
    build(root)
    with pytest.raises(UserError, match=text):
        module(root).labelled  # noqa: B018


SMALL = [
    *("--model", "ClassificationTask", "--model.network", "SmallCNN", "--model.network.width", "4"),
    *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.01"),
    *("--data", "ImageFolderDataModule", "--data.size", "16", "--data.batch_size", "4", "--data.num_workers", "0"),
    *("--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"),
]


def test_from_training_to_prediction(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data", ("a", "b", "c"))
    assert main(["fit", *SMALL, "--data.root", "data", "--test"]) == 0
    shutil.rmtree(here / "data" / "train")  # the checkpoint knows the classes, and numbers what is there
    shutil.rmtree(here / "data" / "test" / "a")
    capsys.readouterr()
    assert main(["test", "--ckpt_path", "best"]) == 0
    assert "differs" not in capsys.readouterr().out
    assert main(["predict", "--ckpt_path", "best", "--images", "data/test"]) == 0
    (here / "data" / "test" / "c").rename(here / "data" / "test" / "zebra")
    assert "test/zebra: no class of that name" in refused(capsys, "test", "--ckpt_path", "best")


def test_other_classes_than_those_of_the_checkpoint_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data")
    save_splits(here / "other", ("cow", "pig"))
    assert main(["fit", *SMALL, "--data.root", "data"]) == 0
    text = refused(capsys, "test", "--ckpt_path", "best", "--data.root", "other", "--data.class_names", "[cow, pig]")
    assert "trained on the classes cat, dog; the data has cow, pig" in text


def test_broken_files_stop_the_run_or_are_skipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data", count=20)
    (here / "data" / "train" / "cat" / "7.png").write_bytes(b"")
    (here / "data" / "val" / "dog" / "3.png").write_bytes((here / "data" / "val" / "dog" / "3.png").read_bytes()[:200])
    command = ["fit", *SMALL, "--data.root", "data"]
    every = ("--trainer.num_sanity_val_steps", "-1")
    assert "3.png: a truncated or damaged image" in refused(capsys, *command, *every)
    assert "7.png: an empty file (0 bytes)" in refused(capsys, *command, "--data.num_workers", "2")
    assert main([*command, "--data.on_error", "skip"]) == 0
    printed = capsys.readouterr().out
    assert "skipped     1 images of the train split cannot be read: data/train/cat/7.png: an empty file (0 bytes)" in printed
    assert printed.count("of the val split cannot be read") == 1
    text = refused(capsys, *command, "--data.on_error", "skip", "--data.max_broken", "0.01")
    assert "1 of 40 images of the train split cannot be read; on_error: skip allows 1.0% (max_broken)" in text


def test_a_whole_batch_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    root = save_splits(tmp_path)
    for path in (root / "val" / "cat").iterdir():
        path.write_bytes(b"")
    data = module(root, on_error="skip", max_broken=0.5, batch_size=4)
    assert [labels.tolist() for _, labels in data.val_dataloader()] == [[1, 1, 1, 1]]


def test_16_bit_grey_and_transparency_come_as_the_spec_says(tmp_path: Path) -> None:
    save_splits(tmp_path)
    Image.new("I;16", (16, 16), 32768).save(tmp_path / "val" / "cat" / "0.png")
    Image.new("RGBA", (16, 16), (9, 9, 9, 0)).save(tmp_path / "val" / "cat" / "1.png")
    dataset = module(tmp_path, background=[10, 20, 30]).dataset("val")
    assert isinstance(dataset, FileDataset)
    assert dataset[0][0].unique().tolist() == [128]  # type: ignore[index]
    assert dataset[1][0][:, 0, 0].tolist() == [10, 20, 30]  # type: ignore[index]


def test_a_test_that_cannot_be_is_refused_before_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data")
    shutil.rmtree(here / "data" / "test")
    assert "data has no test split, only train, val; split.test_fraction makes one of" in refused(
        capsys, "fit", *SMALL, "--data.root", "data", "--test"
    )
    assert not (here / "runs").exists()
    assert main(["fit", *SMALL, "--data.root", "data", "--data.split.test_fraction", "0.3", "--test"]) == 0
    (config,) = here.glob("runs/*/v001/config.yaml")
    assert yaml.safe_load(config.read_text())["data"]["init_args"]["split"]["test_fraction"] == 0.3


def test_a_checkpoint_does_not_say_where_to_write(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data")
    cache = ["--data.cache", "disk", "--data.cache_dir", "elsewhere"]
    assert main(["fit", *SMALL, "--data.root", "data", *cache]) == 0
    shutil.rmtree(here / "elsewhere")
    assert main(["test", "--ckpt_path", "best"]) == 0
    assert "differs     data.init_args.cache_dir is .cache/images; the checkpoint has elsewhere" in capsys.readouterr().out
    assert not (here / "elsewhere").exists()


def test_a_split_of_which_nothing_can_be_read_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data")
    for path in here.glob("data/val/*/*.png"):
        path.write_bytes(b"")
    command = ["fit", *SMALL, "--data.root", "data", "--data.on_error", "skip", "--data.max_broken", "1"]
    assert "8 of 8 images of the val split cannot be read" in refused(capsys, *command)
