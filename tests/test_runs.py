from __future__ import annotations

import multiprocessing as mp
from pathlib import Path

import pytest

from fulgurite.errors import UserError
from fulgurite.runs import create_run


def test_versions_count_up_and_are_never_used_again(tmp_path: Path) -> None:
    assert create_run(tmp_path / "runs", "mine") == tmp_path / "runs" / "mine" / "v001"
    assert create_run(tmp_path / "runs", "mine").name == "v002"
    (tmp_path / "runs" / "mine" / "v001").rmdir()
    (tmp_path / "runs" / "mine" / "v1234").mkdir()
    (tmp_path / "runs" / "mine" / "version_x").mkdir()
    assert create_run(tmp_path / "runs", "mine").name == "v1235"
    assert create_run(tmp_path / "runs", "other").name == "v001"


def create_many(runs_dir: Path, number: int) -> None:
    for _ in range(number):
        run = create_run(runs_dir, "mine")
        (run / "mine").touch(exist_ok=False)


def test_processes_at_once_never_get_the_same_folder(tmp_path: Path) -> None:
    processes = [mp.get_context("fork").Process(target=create_many, args=(tmp_path, 25)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(run.name for run in (tmp_path / "mine").iterdir()) == [f"v{number:03d}" for number in range(1, 101)]


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "a\nb", "-x"])
def test_name_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as error:
        create_run(tmp_path, name)
    assert str(error.value) == f"experiment is '{name}'; it names a folder: letters, digits, space and _ . + - only"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["digits", "Zahlen-ä 2.1+b", "7", "_"])
def test_plain_names_are_taken(tmp_path: Path, name: str) -> None:
    assert create_run(tmp_path, name).parent.name == name


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        create_run(tmp_path / "file", "mine")
    assert str(error.value) == (
        f"cannot make a run folder in {tmp_path}/file/mine: Not a directory\nchoose another place with --trainer.runs_dir FOLDER"
    )
