from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fulgurite.cli import main
from fulgurite.data import DataSpec, DigitsDataModule, StreamingDataModule, shards
from fulgurite.data.shards import MANIFEST, make_shards
from fulgurite.errors import MissingExtraError, UserError
from tests.commands import refused
from tests.images import save_splits
from tests.pictures import PictureDataModule, small_shards

litdata = pytest.importorskip("litdata", reason="litdata is not installed: pip install 'fulgurite[stream]'")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_folder_explains_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = small_shards(tmp_path)
    printed = capfd.readouterr()
    assert printed.err == ""
    assert [line.split()[1] for line in printed.out.splitlines()] == ["train:", "val:", "test:"]  # and nothing of LitData's
    manifest = json.loads((folder / MANIFEST).read_text())
    assert DataSpec.from_dict(manifest["spec"]) == PictureDataModule(tmp_path / "other").spec
    assert {split: facts["samples"] for split, facts in manifest["splits"].items()} == {"train": 50, "val": 11, "test": 3}
    for split, facts in manifest["splits"].items():
        assert facts["shards"] == len(list((folder / split).glob("*.bin")))
        assert facts["bytes"] == sum(path.stat().st_size for path in (folder / split).glob("*.bin"))
    assert not list(folder.rglob("*.partial"))


def test_litdata_reads_what_the_files_hold(tmp_path: Path) -> None:
    folder = small_shards(tmp_path)
    dataset = PictureDataModule(tmp_path / "pictures").dataset("val")
    found = [(bytes(data), label) for data, label in litdata.StreamingDataset(str(folder / "val"))]
    assert found == [(dataset.path(index).read_bytes(), int(label)) for index, label in enumerate(dataset.labels)]


def test_several_labels_are_kept(tmp_path: Path) -> None:
    folder = small_shards(tmp_path, multi_label=True)
    labels = [label.tolist() for _, label in litdata.StreamingDataset(str(folder / "val"))]
    assert labels == PictureDataModule(tmp_path, multi_label=True).dataset("val").labels.tolist()


def test_training_images_are_mixed_and_the_same_whatever_the_threads(tmp_path: Path) -> None:
    first, second = (small_shards(tmp_path / name) for name in ("one", "two"))
    assert contents(first) == contents(second)
    pictures = [data for data, _ in litdata.StreamingDataset(str(first / "train"))]
    dataset = PictureDataModule(tmp_path / "one" / "pictures").dataset("train")
    files = [dataset.path(index).read_bytes() for index in range(50)]
    assert pictures != files
    assert sorted(map(bytes, pictures)) == sorted(files)


def test_shards_are_not_larger_than_asked_for(tmp_path: Path) -> None:
    folder = small_shards(tmp_path)
    index = json.loads((folder / "train" / "index.json").read_text())
    sizes = [chunk["chunk_bytes"] for chunk in index["chunks"]]
    assert len(sizes) == 9
    assert max(sizes) < 500 + 7 * 20 + 8  # 20 bytes for each sample: its place, two lengths and its label


def test_image_larger_than_a_shard_has_its_own(tmp_path: Path) -> None:
    folder = small_shards(tmp_path, unit=10)
    assert len(list((folder / "val").glob("*.bin"))) == 11


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk_mb": 0}, "chunk_mb is 0; allowed: 1 to 1024"),
        ({"num_workers": 0}, "num_workers is 0; it must be at least 1, or null to choose by itself"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        make_shards(PictureDataModule(tmp_path / "pictures"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    data = PictureDataModule(tmp_path / "pictures")
    folder = small_shards(tmp_path)
    with pytest.raises(UserError, match=f"^{folder} is not empty\nremove it, or choose another folder$"):
        make_shards(data, folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"is not empty, and has no fulgurite\.json: was writing it stopped"):
        make_shards(data, folder)
    with pytest.raises(UserError, match="is a file; shards are written to a folder"):
        make_shards(data, data.dataset("val").path(0))


def test_data_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the train split is not made of image files"):
        make_shards(DigitsDataModule(), tmp_path / "out")
    with pytest.raises(UserError, match="the val split is empty"):
        make_shards(PictureDataModule(tmp_path, (2, 0, 1)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PictureDataModule(tmp_path / "pictures")
    dataset = data.dataset("val")
    monkeypatch.setattr(dataset, "path", lambda index: tmp_path / f"missing{index}.png")
    with pytest.raises(UserError, match=r"cannot read .*/missing\d+\.png: No such file"):
        make_shards(data, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    with pytest.raises(MissingExtraError, match=r'writing shards needs litdata: pip install "fulgurite\[stream\]"'):
        make_shards(PictureDataModule(tmp_path / "pictures"), tmp_path / "out")


def test_killed_run_leaves_nothing_that_passes_for_shards(here: Path) -> None:
    process = mp.get_context("fork").Process(target=_write_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(here.glob("shards/*/*.bin"))) == 10
    assert not (here / "shards" / MANIFEST).exists()


def _write_and_die() -> None:
    write, number = shards._write_shard, iter(range(100))

    def write_shard(*args: Any) -> Any:
        if next(number) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    shards._write_shard, shards._MIB = write_shard, 500  # type: ignore[assignment]
    make_shards(PictureDataModule(Path("pictures")), Path("shards"), 1, 1)


def test_from_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "images")
    command = ["make-shards", "--data", "ImageFolderDataModule", "--data.root", "images", "--output", "shards"]
    assert main(command) == 0
    data = StreamingDataModule(root="shards", size=16, num_workers=0)
    assert data.spec.class_names == ("cat", "dog")
    assert {split: len(data.dataset(split)) for split in data.splits} == {"train": 8, "val": 8, "test": 8}
    assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 16, 16)
    assert "not empty" in refused(capsys, *command)


def test_broken_images_stop_it_or_are_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "images")
    (here / "images" / "train" / "cat" / "1.png").write_bytes(b"")
    command = ["make-shards", "--data", "ImageFolderDataModule", "--data.root", "images"]
    assert "1.png: an empty file" in refused(capsys, *command, "--output", "a")
    skip = ["--data.on_error", "skip", "--data.max_broken", "0.2"]
    assert main([*command, "--output", "b", *skip]) == 0
    assert "skipped     1 images of the train split cannot be read: images/train/cat/1.png" in capsys.readouterr().out
    assert len(StreamingDataModule(root="b").dataset("train")) == 7
