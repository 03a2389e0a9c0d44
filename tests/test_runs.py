from __future__ import annotations

import multiprocessing as mp
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fulgurite.errors import UserError, shown
from fulgurite.runs import create_run, find_checkpoint, find_run


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
    assert str(error.value) == f"experiment is '{shown(name)}'; it names a folder: letters, digits, space and _ . + - only"
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


# Finding


def make_run(run: Path, *names: str, age: int = 0) -> Path:
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    os.utime(run / "config.yaml", (1000 - age, 1000 - age))
    for name in names:
        (run / "checkpoints" / f"{name}.ckpt").touch()
    return run


def test_what_a_user_may_call_a_checkpoint(here: Path) -> None:
    old = make_run(Path("runs/b/v002"), "best", "last", age=9)
    new = make_run(Path("runs/a/v001"), "best", "last", age=5)
    only_last = make_run(Path("runs/a/v000"), "last", age=4)
    make_run(Path("runs/a/v003"), age=3)  # stopped before its first checkpoint
    runs = Path("runs")
    for given, prefer, run, name in (
        ("runs/b/v002/checkpoints/last.ckpt", "best", old, "last"),
        ("runs/b/v002", "best", old, "best"),
        ("runs/b/v002", "last", old, "last"),
        ("runs/b/v002/checkpoints", "last", old, "last"),
        ("runs/b", "best", old, "best"),
        ("best", "last", only_last, "last"),  # without validation the last one stands for the best
        ("last", "best", only_last, "last"),
        ("runs/a", "best", only_last, "last"),
        ("runs", "best", only_last, "last"),
    ):
        assert find_checkpoint(given, runs, prefer=prefer) == run / "checkpoints" / f"{name}.ckpt"
    shutil.rmtree(only_last)
    assert find_checkpoint("best", runs) == new / "checkpoints" / "best.ckpt"
    # Of runs of the same second, the higher version is the later one.
    twins = [make_run(Path(f"runs/a/v{number:03d}"), "best", age=5) for number in (4, 9, 8, 7)]
    assert find_checkpoint("best", runs) == twins[1] / "checkpoints" / "best.ckpt"


def test_home_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(here / "runs" / "a" / "v001", "best")
    monkeypatch.setenv("HOME", str(here))
    assert find_checkpoint("~/runs/a/v001", Path("none")) == find_checkpoint("best", Path("~/runs"))
    assert find_checkpoint("best", Path("~/runs")).is_relative_to(run)


def test_nothing_found_says_where_it_was_looked_for(here: Path) -> None:
    make_run(Path("runs/a/v001"))
    for given, place in (("best", here / "runs"), ("runs/a/v001", here / "runs/a/v001"), ("runs/a", here / "runs/a")):
        with pytest.raises(UserError) as error:
            find_checkpoint(given, Path("runs"))
        assert str(error.value) == (
            f"no checkpoint under {place}\ntrain one first: fulgurite fit -c configs/experiment/digits.yaml"
        )
    with pytest.raises(UserError) as error:
        find_checkpoint("runs/a/v0001", Path("runs"))
    assert str(error.value) == (
        "no checkpoint at runs/a/v0001 (did you mean 'v001'?)\n"
        "allowed: a .ckpt file, a run folder, or best or last for those of the latest run"
    )


@pytest.mark.parametrize("find", [find_run, lambda given: find_checkpoint(given, Path("runs"))])
def test_address_is_not_fetched(find: Callable[[str], Path]) -> None:
    with pytest.raises(UserError) as error:
        find("s3://bucket/run")
    assert str(error.value) == "s3://bucket/run is an address, which is not fetched: give a file or folder on this machine"


def test_run_that_is_not_there_is_told_with_the_nearest(here: Path) -> None:
    make_run(Path("runs/a/v001"), "last")
    with pytest.raises(UserError, match=r"^no run at /.*/runs/a/v0001 \(did you mean 'v001'\?\)\ntrain one first: "):
        find_run("runs/a/v0001")
