from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule

from fulgurite.callbacks.best_states import Best, BestStates
from fulgurite.tasks import ClassificationTask
from tests.training import RUN, fit, steps


def ranked(scores: list[float], keep: int, mode: str) -> list[int]:
    states = BestStates(keep)
    for step, score in enumerate(scores):
        states.add(Best(score, 0, step), mode)  # type: ignore[arg-type]
    return [state.step for state in states.ranked]


@pytest.mark.parametrize(
    ("keep", "mode", "expected"), [(1, "max", [1]), (2, "max", [1, 4]), (3, "min", [0, 3, 2]), (9, "max", [1, 4, 2, 3, 0])]
)
def test_the_best_come_first_and_of_equal_ones_the_earliest(keep: int, mode: str, expected: list[int]) -> None:
    scores = [0.1, 0.9, 0.5, 0.3, 0.9, float("nan")]
    assert ranked(scores, keep, mode) == expected


@pytest.fixture
def better_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LightningModule.log
    monkeypatch.setattr(
        ClassificationTask, "on_validation_epoch_end", lambda self: log(self, "val/acc", self.trainer.global_step / 100)
    )


@pytest.mark.usefixtures("better_each_epoch")
def test_several_best_are_kept_and_the_others_removed(here: Path) -> None:
    assert fit("--checkpoint.keep_best", "2", epochs=3) == 0
    assert steps(RUN) == {"best": 12, "best-000008": 8, "best-000012": 12, "last": 12}
    folder = RUN / "checkpoints"
    assert (folder / "best.ckpt").samefile(folder / "best-000012.ckpt")
    assert fit("--resume", "--checkpoint.keep_best", "2", epochs=4) == 0
    assert steps(RUN) == {"best": 16, "best-000012": 12, "best-000016": 16, "last": 16}


@pytest.mark.usefixtures("better_each_epoch")
def test_all_best_come_along_into_a_new_folder(here: Path) -> None:
    assert fit("--checkpoint.keep_best", "2", epochs=2) == 0
    assert fit("--ckpt_path", str(RUN), "--checkpoint.keep_best", "3", epochs=3) == 0
    names = {"best": 12, "best-000004": 4, "best-000008": 8, "best-000012": 12, "last": 12}
    assert steps(Path("runs/digits/v002")) == names


def test_nothing_is_removed_while_the_new_one_is_damaged(tmp_path: Path) -> None:
    states = BestStates(2)
    for step in (1, 2):
        states.add(Best(step / 10, 0, step), "max")
        torch.save({"state_dict": {}}, tmp_path / f"best-{step:06d}.ckpt")
    states.saved = list(states.ranked)
    states.add(Best(0.3, 0, 3), "max")
    (tmp_path / "last.ckpt").write_bytes(b"PK, and then nothing")
    states.place(tmp_path / "last.ckpt", states.saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best-000001.ckpt",
        "best-000002.ckpt",
        "best-000003.ckpt",
        "best.ckpt",
        "last.ckpt",
    ]


def test_state_that_could_not_be_saved_is_forgotten() -> None:
    states = BestStates(1)
    states.add(Best(0.5, 0, 1), "max")
    assert states.unsaved == Best(0.5, 0, 1)
    states.forget_unsaved()
    assert states.ranked == []
