from __future__ import annotations

import csv
import errno
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fulgurite.cli import main
from fulgurite.loggers import RunCSVLogger, RunTensorBoardLogger, run_loggers
from tests.conftest import SMALL

RUN = Path("runs/digits/v001")


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(run)).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_training_curve_of_a_short_run_is_in_both_files(here: Path) -> None:
    # 4 batches an epoch, far fewer than Lightning's interval of 50 steps.
    assert main(["fit", *SMALL, "--trainer.max_epochs", "3"]) == 0
    scalars = events(RUN)
    for name in ("train/loss", "train/acc", "val/loss", "val/acc"):
        written = [(int(row["step"]), float(row[name])) for row in rows(RUN) if name in row]
        assert [step for step, _ in written] == [3, 7, 11]
        assert [step for step, _ in scalars[name]] == [3, 7, 11]
        assert [value for _, value in scalars[name]] == pytest.approx([value for _, value in written])
    assert {path.name.split(".")[0] for path in RUN.iterdir()} == {"checkpoints", "config", "events", "metrics"}


def test_rate_is_logged(here: Path) -> None:
    assert main(["fit", *SMALL, "--trainer.max_epochs", "1", "--trainer.log_every_n_steps", "2"]) == 0
    assert len(events(RUN)["lr"]) == 2
    assert [int(row["step"]) for row in rows(RUN) if "train/loss_step" in row] == [1, 3]


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ("false", set()),
        ("csv", {"metrics"}),
        ("tensorboard", {"events"}),
        ("[csv, tensorboard]", {"metrics", "events"}),
    ],
)
def test_loggers_can_be_chosen(here: Path, given: str, files: set[str]) -> None:
    assert main(["fit", *SMALL, "--trainer.max_epochs", "1", "--trainer.logger", given]) == 0
    assert {path.name.split(".")[0] for path in RUN.iterdir()} == {"checkpoints", "config"} | files


def test_rows_keep_their_columns_when_new_ones_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = RunCSVLogger(tmp_path)
    logger.save()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    logged: list[dict[str, Any]] = [{"b": 1.0}, {"b": 2.0}, {"a": 3.0, "c": 4.0}, {"b": 5.0}]
    for step, metrics in enumerate(logged):
        logger.log_metrics(metrics, step)
        logger.save()
    assert rows(tmp_path) == [
        {"b": "1.0", "step": "0"},
        {"b": "2.0", "step": "1"},
        {"a": "3.0", "c": "4.0", "step": "2"},
        {"b": "5.0", "step": "3"},
    ]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "a,b,c,step"


class Full:
    """Stand for a disk that is full for a while: a write leaves a part and fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        write = csv.DictWriter.writerows

        def writerows(writer: Any, rows: Any) -> None:
            if not self.on:
                return write(writer, rows)
            writer.writer.writerow(["part of a row"])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(csv.DictWriter, "writerows", writerows)


@pytest.mark.parametrize("new_column", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_full_disk_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: bool, new_column: bool
) -> None:
    disk, logger = Full(monkeypatch), RunCSVLogger(tmp_path)
    expected = []
    for step, full in enumerate([first, True, True, False, False]):
        disk.on = full
        metrics: dict[str, Any] = {"b" if new_column and step == 2 else "a": float(step)}
        logger.log_metrics(metrics, step)
        logger.save()
        expected.append({**{name: str(value) for name, value in metrics.items()}, "step": str(step)})
        if full and (tmp_path / "metrics.csv").exists():
            assert rows(tmp_path) == expected[:1]
        assert not (tmp_path / "metrics.tmp").exists()
    assert rows(tmp_path) == expected
    assert capsys.readouterr().out == (
        f"warning     cannot write {tmp_path}/metrics.csv (No space left on device); the run goes on without it\n"
    )


def test_run_survives_a_full_disk_of_its_logs(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Full(monkeypatch)
    disk.on = True
    assert main(["fit", *SMALL, "--trainer.max_epochs", "2", "--trainer.logger", "csv"]) == 0
    assert capsys.readouterr().out.count("the run goes on without it") == 1
    assert not (RUN / "metrics.csv").exists()


@pytest.mark.parametrize("method", ["add_scalar", "flush"])
def test_tensorboard_that_cannot_write_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    logger = RunTensorBoardLogger(tmp_path)
    monkeypatch.setattr(logger.experiment, method, fail)
    for step in range(2):
        logger.log_metrics({"a": 1.0}, step)
        logger.save()
    logger.finalize("success")
    assert (
        capsys.readouterr().out == f"warning     cannot write {tmp_path} (No space left on device); the run goes on without it\n"
    )


def test_loggers_are_made_by_name(tmp_path: Path) -> None:
    made = run_loggers(["tensorboard", "csv"], tmp_path)
    assert [type(logger) for logger in made] == [RunTensorBoardLogger, RunCSVLogger]
    assert {Path(str(logger.log_dir)) for logger in made} == {tmp_path}
