"""What the Checkpoints callback saves when an error ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite.cli import main
from fulgurite.data.base import ArrayDataset
from fulgurite.tasks import ClassificationTask
from tests.training import RUN, at_batch, fit, logged, steps


class Broken(Exception):
    pass


def fail() -> None:
    raise Broken


def break_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, when: Callable[..., bool]) -> None:
    """Let the so-manieth call of a method for which ``when`` holds fail."""
    method, count = getattr(owner, name), iter(range(1, 100))

    def call(self: Any, *args: Any) -> Any:
        if when(self) and next(count) == number:
            raise Broken
        return method(self, *args)

    monkeypatch.setattr(owner, name, call)


def state(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return found


@pytest.mark.parametrize("batch", [3, 6])
@pytest.mark.parametrize("options", [[], ["--ema.decay", "0.5"]])
def test_error_between_two_steps_loses_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], batch: int, options: list[str]
) -> None:
    assert fit(*options) == 0
    with monkeypatch.context() as patched:
        break_call(patched, ArrayDataset, "__getitems__", batch, lambda dataset: dataset.augment is not None)
        with pytest.raises(Broken):
            fit(*options)
    run = Path("runs/digits/v002")
    assert steps(run)["last"] == batch - 1
    text = f"checkpoint  saved at step {batch - 1}; go on with: fulgurite fit --resume runs/digits/v002\n"
    assert text in capsys.readouterr().out
    assert main(["fit", "--resume", str(run)]) == 0
    assert logged(run) == logged(RUN)
    torch.testing.assert_close(state(run), state(RUN), rtol=0, atol=0)


def test_error_within_a_step_leaves_last_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_batch(monkeypatch, 7, fail)
    with pytest.raises(Broken):
        fit()
    assert steps(RUN) == {"best": 4, "exception": 6, "last": 4}
    assert "checkpoint  the state at the error is in runs/digits/v001/checkpoints/exception.ckpt\n" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main(["fit", "--ckpt_path", str(RUN / "checkpoints" / "exception.ckpt")]) == 0
    assert steps(Path("runs/digits/v002"))["last"] == 8


@pytest.mark.parametrize("options", [[], ["--ema.decay", "0.5"]])
def test_error_in_validation_saves_the_trained_weights_and_their_average(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    assert fit(*options) == 0
    with monkeypatch.context() as patched:
        # Two batches of the sanity check and of each of two epochs: the last one of all.
        break_call(patched, ClassificationTask, "validation_step", 6, lambda task: True)
        with pytest.raises(Broken):
            fit(*options)
    found, whole = (
        torch.load(path, weights_only=True)
        for path in (Path("runs/digits/v002/checkpoints/exception.ckpt"), RUN / "checkpoints" / "last.ckpt")
    )
    (found["optimizer"],), (whole["optimizer"],) = ([one["state"] for one in each["optimizer_states"]] for each in (found, whole))
    for part in ("state_dict", "optimizer", "ema"):
        torch.testing.assert_close(found.get(part), whole.get(part), rtol=0, atol=0)


def test_error_before_the_first_step_saves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_batch(monkeypatch, 1, fail)
    with pytest.raises(Broken):
        fit()
    assert not list(here.rglob("*.ckpt"))


def test_error_right_after_a_resume_leaves_the_run_as_it_was(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit() == 0
    before = {path: path.read_bytes() for path in RUN.rglob("*.ckpt")}
    at_batch(monkeypatch, 1, fail)
    with pytest.raises(Broken):
        main(["fit", "--resume", "--trainer.max_epochs", "3"])
    assert {path: path.read_bytes() for path in RUN.rglob("*.ckpt")} == before
