from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.verbs.predict import prepare_prediction
from tests.commands import refused

TASK = SimpleNamespace(spec=DigitsDataModule().spec)


def images(folder: Path, number: int) -> Path:
    (folder / "below").mkdir(parents=True, exist_ok=True)
    for index in range(number):
        name = f"below/{index}.png" if index % 2 else f"{index}.png"
        Image.new("L", (8, 8), index).save(folder / name)
    return folder


def prepare(folder: Path, rank: int = 0, processes: int = 1, **options: Any) -> Any:
    trainer = SimpleNamespace(global_rank=rank, world_size=processes, num_nodes=1)
    given = {"top_k": 1, "batch_size": 2, "num_workers": 0} | options
    return prepare_prediction(trainer, TASK, folder, folder / "table.csv", **given)


def test_table_has_a_row_for_each_image_in_a_stable_order(here: Path, trained_run: Path) -> None:
    images(here / "photos", 5)
    tables = []
    for batch_size, workers in (("64", "0"), ("2", "1")):
        args = [
            "--images",
            "photos",
            "--batch_size",
            batch_size,
            "--num_workers",
            workers,
            "--trainer.enable_progress_bar",
            "false",
        ]
        assert main(["predict", "--ckpt_path", str(trained_run), *args]) == 0
        with Path("predictions.csv").open() as file:
            tables.append(list(csv.DictReader(file)))
    names = ["photos/0.png", "photos/2.png", "photos/4.png", "photos/below/1.png", "photos/below/3.png"]
    for table in tables:
        assert [row["path"] for row in table] == names
        assert [row["label"] for row in table] == [row["label"] for row in tables[0]]
        probabilities = [float(row["probability"]) for row in table]
        assert probabilities == pytest.approx([float(row["probability"]) for row in tables[0]], abs=1e-6)


def test_prediction_leaves_the_trainer_as_it_was_and_makes_no_run(here: Path, trained_run: Path) -> None:
    images(here / "photos", 1)
    assert main(["predict", "--ckpt_path", str(trained_run), "--images", "photos/0.png", "--output", "new/one.jsonl"]) == 0
    assert (here / "new" / "one.jsonl").read_text().count("\n") == 1
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("number", "processes"), [(5, 2), (4, 2), (1, 2), (2, 4)])
def test_processes_share_the_images_out(tmp_path: Path, number: int, processes: int) -> None:
    folder = images(tmp_path, number)
    shares = []
    for rank in range(processes):
        loader, _ = prepare(folder, rank, processes)
        shares.append([index for _, batch in loader for index in batch.tolist()])
    assert all(shares)  # a process without a batch would leave the others waiting
    assert sorted({index for share in shares for index in share}) == list(range(number))
    assert sum(map(len, shares)) == max(number, processes)


def test_loader_gives_the_images_as_the_spec_says(tmp_path: Path) -> None:
    loader, writer = prepare(images(tmp_path, 3), batch_size=8)
    ((batch, index),) = loader
    assert (batch.shape, batch.dtype, index.tolist()) == ((3, 1, 8, 8), torch.uint8, [0, 1, 2])
    assert batch[:, 0, 0, 0].tolist() == [0, 2, 1]  # files of a folder come before those of the folders below it
    assert list(writer.paths) == [str(tmp_path / name) for name in ("0.png", "2.png", "below/1.png")]


@pytest.mark.parametrize(
    ("cores", "batch_size", "asked", "workers"), [(4, 2, None, 3), (2, 2, None, 2), (4, 64, None, 0), (2, 2, 9, 2), (4, 2, 1, 1)]
)
def test_workers_are_as_many_as_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, batch_size: int, asked: int | None, workers: int
) -> None:
    monkeypatch.setattr("fulgurite.verbs.predict.usable_cores", lambda: SimpleNamespace(number=cores))
    monkeypatch.setattr("torch.utils.data.DataLoader.check_worker_number_rationality", lambda self: None)
    loader, _ = prepare(images(tmp_path, 6), batch_size=batch_size, num_workers=asked)
    assert loader.num_workers == workers


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1, and a number of samples that exists"),
        ({"num_workers": -1}, "num_workers is -1; it must be 0 or more, or null to choose by itself"),
        ({"top_k": 11}, "top_k is 11; allowed: 1 to 10, the number of classes"),
    ],
)
def test_bad_numbers_are_named(tmp_path: Path, options: dict[str, int], text: str) -> None:
    with pytest.raises(UserError) as error:
        prepare(images(tmp_path, 1), **options)
    assert str(error.value) == text


@pytest.mark.parametrize("workers", ["0", "2"])
def test_images_that_cannot_be_read_are_listed_and_left_out(
    trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    for number in range(5):
        Image.new("L", (8, 8), 40 * number).save(here / f"{number}.png")
    Path("1.png").write_bytes(b"")
    Path("4.jpg").write_text("text")
    command = ["predict", "--ckpt_path", str(trained_run), "--images", ".", "--batch_size", "2", "--num_workers", workers]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "predictions 4 of 6 images in predictions.csv" in printed
    assert "skipped     2 of 6 images cannot be read: 1.png: an empty file (0 bytes), 4.jpg: not an image" in printed
    rows = Path("predictions.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["path", "0.png", "2.png", "3.png", "4.png"]
    assert "1.png: an empty file" in refused(capsys, *command, "--on_error", "raise")
    for path in Path().glob("*.png"):
        path.write_bytes(b"")
    assert "none of the 6 images can be read: 0.png: an empty file (0 bytes), " in refused(capsys, *command)
