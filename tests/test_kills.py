"""A run that is killed by SIGKILL, again and again, ends in the same bits as one that was never killed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fulgurite.checkpoint import damage
from tests.conftest import SMALL
from tests.images import save_tree
from tests.kills import KILLED, MOMENTS, Kill, differences, fit, fit_under_kills, step_of_last, whole_run

# 3 epochs of 5 batches, with shuffling, shifts and dropout; every loss is logged, every step is saved.
RUN = [
    *SMALL,
    *("--trainer.max_epochs", "3"),
    *("--trainer.limit_train_batches", "5"),
    *("--trainer.log_every_n_steps", "1"),
    *("--checkpoint.every_n_steps", "1"),
    *("--model.network.dropout", "0.3"),
]
ACCUMULATION = ["--trainer.accumulate_grad_batches", "2"]
EMA = ["--ema.decay", "0.9"]
MIXING = ["--model.mixup", "0.4", "--model.cutmix", "1.0"]
WITHIN = ["--trainer.val_check_interval", "2"]  # validation within the epoch
PLATEAU = [
    *("--model.scheduler", "fulgurite.tasks.schedules.Plateau"),
    *("--model.scheduler.patience", "0"),
    *("--model.scheduler.factor", "0.5"),
]
FILES = [
    *("--data", "fulgurite.data.ImageFolderDataModule"),
    *("--data.root", "images"),
    *("--data.size", "16"),
    *("--data.batch_size", "4"),
]
KINDS = {
    "digits, cosine, dropout": [],
    "digits, mixup, validation within the epoch": [*MIXING, *WITHIN],
    "digits, accumulation, EMA": [*ACCUMULATION, *EMA],
    "digits, plateau, validation within the epoch": [*PLATEAU, *WITHIN],
    "digits, EMA, accumulation, validation within the epoch": [*EMA, *ACCUMULATION, *WITHIN],
    "files, cosine": FILES,
    "files, plateau, EMA, mixup, accumulation": [*FILES, *PLATEAU, *EMA, *MIXING, *ACCUMULATION],
}


@pytest.fixture(autouse=True)
def _images(here: Path) -> None:
    save_tree(here / "images", count=30, ending=".jpg")


def test_run_killed_at_every_moment(here: Path) -> None:
    args = [*RUN, *EMA, *MIXING, *WITHIN]
    plan: list[Kill] = [
        ("before the optimizer", 2),
        ("in validation", 2),
        ("linked", 1),
        ("half saved", 1),
        ("renamed", 1),
        ("after the optimizer", 2),
        ("at an epoch's end", 1),
        ("half a row", 2),
        ("half an event", 2),
        ("in a save", 1),
        ("at an epoch's start", 1),
        ("before a rename", 1),
    ]
    assert {kill[0] for kill in plan if isinstance(kill, tuple)} == {*MOMENTS}
    expected = whole_run(args)
    assert fit_under_kills(args, plan, random.Random(0)) == len(plan)
    assert differences(expected) == []


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ([*FILES, *PLATEAU, *ACCUMULATION], [("before the optimizer", 4), ("after the optimizer", 5)]),
        ([*PLATEAU, *WITHIN], [("before the optimizer", 5), ("in validation", 3)]),
    ],
    ids=["files", "before_the_plateau_step"],
)
def test_killed_runs_of_other_kinds(here: Path, options: list[str], plan: list[Kill]) -> None:
    args = [*RUN, *options]
    expected = whole_run(args)
    assert fit_under_kills(args, plan, random.Random(0)) == len(plan)
    assert differences(expected) == []


def test_run_killed_in_its_last_save_has_its_best_state(here: Path) -> None:
    args = [*RUN, "--trainer.max_epochs", "1"]
    expected = whole_run(args)
    assert fit_under_kills(args, [("linked", 1)], random.Random(0)) == 1
    assert differences(expected) == []


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_during_a_save_loses_no_checkpoint(here: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == here.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    monkeypatch.setenv("TMPDIR", str(other))
    rng = random.Random(count)
    # Wide enough for a file whose writing takes a while; long enough to be killed so often.
    args = [*RUN, "--model.network.width", "32", "--trainer.max_epochs", str(count)]
    now, checkpoints = args, Path("runs/digits/v001/checkpoints")
    for _ in range(count):
        before = step_of_last() if checkpoints.exists() else 0
        number = rng.randint(1 if before else 2, 2)
        assert fit([*now, "--data.num_workers", "0"], (rng.choice(["in a save", "half saved", "renamed"]), number)) == KILLED
        assert step_of_last() in (before + number - 1, before + number)
        assert {path: damage(path) for path in checkpoints.glob("*.ckpt") if damage(path)} == {}
        now = ["--resume"]
    assert fit(["--resume", "--data.num_workers", "0"]) == 0
    assert step_of_last() == 5 * count


def _some_kill(rng: random.Random) -> Kill:
    if rng.random() < 0.3:
        return rng.uniform(0.3, 1.5)
    moment = rng.choice([*MOMENTS])
    return moment, rng.randint(1, 2 if "epoch" in moment else 5)


@pytest.mark.slow
def test_a_hundred_kills_make_no_difference(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, total, found = random.Random(0), 0, []
    for kind, options in KINDS.items():
        args, count = [*RUN, *options], 0
        expected = whole_run(args)
        while count < 15:
            shutil.rmtree("runs", ignore_errors=True)
            plan = [_some_kill(rng) for _ in range(6)]
            count += fit_under_kills(args, plan, rng)
            found += [(kind, plan, name) for name in differences(expected)]
        with capsys.disabled():
            print(f"\n{count:4} kills  {len(found):3} differences so far  {kind}", end="", flush=True)
        shutil.rmtree("whole")
        total += count
    with capsys.disabled():
        print(f"\n{total:4} kills  {len(found):3} differences")
    assert found == []
    assert total >= 100
