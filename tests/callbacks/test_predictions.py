from __future__ import annotations

import csv
import json
import multiprocessing as mp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fulgurite.callbacks.predictions import PredictionWriter
from fulgurite.errors import UserError

CLASSES = ("cat", "dog", "eel")
PATHS = [f"photos/{number}.png" for number in range(5)]
PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
TOP_2 = [
    ("cat", 0.7, "dog", 0.2),
    ("eel", 0.7, "dog", 0.2),
    ("dog", 0.4, "cat", 0.3),
    ("cat", 0.5, "dog", 0.5),
    ("eel", 1, "cat", 0),
]


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return len(PATHS)

    def __getitem__(self, index: int) -> int:
        return index


class Lookup(LightningModule):
    """Know the answer for each index."""

    def predict_step(self, batch: Tensor) -> dict[str, Tensor]:
        return {"index": batch, "probability": PROBABILITIES[batch]}


def predict(writer: PredictionWriter, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[writer],
        **options,
    )
    trainer.predict(Lookup(), DataLoader(Indices(), batch_size=2), return_predictions=False)


def read(output: Path) -> list[list[str]]:
    with output.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


pytestmark = pytest.mark.filterwarnings("ignore:The 'predict_dataloader' does not have many workers")


def test_table_has_a_row_for_each_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "table.csv"
    predict(PredictionWriter(output, PATHS, CLASSES))
    assert read(output) == [
        ["path", "label", "probability"],
        *([path, label, str(float(probability))] for path, (label, probability, *_) in zip(PATHS, TOP_2, strict=True)),
    ]
    assert f"5 of 5 images in {output}" in capsys.readouterr().out


def test_top_k_adds_columns_and_equal_probabilities_keep_the_order_of_the_labels(tmp_path: Path) -> None:
    output = tmp_path / "table.csv"
    predict(PredictionWriter(output, PATHS, CLASSES, top_k=2))
    header, *rows = read(output)
    assert header == ["path", "label", "probability", "label_2", "probability_2"]
    assert [(row[1], float(row[2]), row[3], float(row[4])) for row in rows] == TOP_2


def test_many_equal_probabilities_are_named_in_the_order_of_the_labels(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "table.csv", PATHS, [str(label) for label in range(100)], top_k=3)
    add(writer, torch.tensor([0]), torch.full((1, 100), 0.01))
    assert writer._batches[0][2].tolist() == [[0, 1, 2]]


def test_fewer_rows_than_images_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table.csv"
    predict(PredictionWriter(output, PATHS, CLASSES), limit_predict_batches=1)
    assert len(read(output)) == 1 + 2
    assert "2 of 5 images" in capsys.readouterr().out


def add(writer: PredictionWriter, index: Tensor, probability: Tensor) -> None:
    trainer: Any = None  # not looked at
    writer.write_on_batch_end(trainer, Lookup(), {"index": index, "probability": probability}, None, None, 0, 0)


def test_rows_are_sorted_and_counted_once(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "table.csv", PATHS, CLASSES)
    trainer: Any = SimpleNamespace(is_global_zero=True)
    for indices in ([4, 2], [0, 3], [1, 0], [4]):
        add(writer, torch.tensor(indices), PROBABILITIES[indices])
    writer.on_predict_epoch_end(trainer, Lookup())
    assert [row[0] for row in read(tmp_path / "table.csv")[1:]] == PATHS


def test_rows_of_an_interrupted_prediction_are_forgotten(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "table.csv", PATHS, CLASSES)
    add(writer, torch.tensor([0]), torch.tensor([[0.0, 1.0, 0.0]]))
    predict(writer)
    assert read(tmp_path / "table.csv")[1][1] == "cat"


def test_only_the_top_k_of_a_batch_are_kept(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "table.csv", PATHS, CLASSES, top_k=2)
    index = torch.tensor([0, 1])
    add(writer, index, PROBABILITIES[:2].bfloat16())
    ((kept_index, kept_probability, kept_label),) = writer._batches
    assert kept_index.data_ptr() != index.data_ptr()  # it may lie in memory that a loader's worker shares
    assert kept_probability.dtype == torch.float32
    assert kept_probability.untyped_storage().nbytes() == 2 * 2 * 4
    assert kept_label.untyped_storage().nbytes() == 2 * 2 * 8


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_several_labels_are_in_one_cell_the_likeliest_first(tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"table.{ending}"
    predict(PredictionWriter(output, PATHS, CLASSES, multi_label=True))
    lines = output.read_text(encoding="utf-8").splitlines()
    rows = read(output)[1:] if ending == "csv" else [list(json.loads(line).values()) for line in lines]
    # The third image has no label, the fourth has two of the same probability.
    answers = [("cat", "0.7"), ("eel", "0.7"), ("", ""), ("cat|dog", "0.5|0.5"), ("eel", "1.0")]
    assert rows == [[path, *answer] for path, answer in zip(PATHS, answers, strict=True)]
    assert (list(json.loads(lines[0])) if ending == "jsonl" else read(output)[0]) == ["path", "labels", "probabilities"]


def test_several_labels_are_counted_once_for_each_image(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "table.csv", PATHS, CLASSES, multi_label=True)
    trainer: Any = SimpleNamespace(is_global_zero=True)
    for indices, probabilities in (([2, 0], [[0.0, 0.0, 0.0], [0.6, 0.7, 0.8]]), ([1, 2], [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])):
        add(writer, torch.tensor(indices), torch.tensor(probabilities))
    writer.on_predict_epoch_end(trainer, Lookup())
    assert read(tmp_path / "table.csv")[1:] == [
        [PATHS[0], "eel|dog|cat", "0.8|0.7|0.6"],
        [PATHS[1], "cat", "0.5"],
        [PATHS[2], "", ""],
    ]


def test_top_k_is_refused_where_the_threshold_decides(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^top_k is 2, but an image has any number of labels: those of probability 0.5 and above"
    ):
        PredictionWriter(tmp_path / "table.csv", PATHS, CLASSES, top_k=2, multi_label=True)


@pytest.mark.parametrize("top_k", [0, -1, 4])
def test_top_k_out_of_range_is_refused_before_a_folder_is_made(tmp_path: Path, top_k: int) -> None:
    with pytest.raises(UserError, match=rf"top_k is {top_k}; allowed: 1 to 3, the number of classes"):
        PredictionWriter(tmp_path / "new" / "table.csv", PATHS, CLASSES, top_k=top_k)
    assert list(tmp_path.iterdir()) == []


def test_output_is_checked_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its ending is '\.xlsx'"):
        PredictionWriter(tmp_path / "table.xlsx", PATHS, CLASSES)


def write_in_process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    writer = PredictionWriter(Path(folder) / "table.csv", PATHS, CLASSES)
    trainer: Any = SimpleNamespace(is_global_zero=rank == 0)
    with torch.inference_mode():  # as in Trainer.predict
        for index in ([0, 2, 4], [1, 3, 0])[rank]:
            add(writer, torch.tensor([index]), PROBABILITIES[[index]])
        writer.on_predict_epoch_end(trainer, Lookup())
    dist.destroy_process_group()


def test_two_processes_write_one_table(tmp_path: Path) -> None:
    # Forked, as spawned processes would import Lightning anew: 2 x 8 s.
    processes = [mp.get_context("fork").Process(target=write_in_process, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    rows = read(tmp_path / "table.csv")[1:]
    assert [row[0] for row in rows] == PATHS
    assert [row[1] for row in rows] == [label for label, *_ in TOP_2]
