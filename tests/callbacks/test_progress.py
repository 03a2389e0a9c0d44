import re
from pathlib import Path

import pytest
from rich.console import Console

from fulgurite.callbacks import progress
from fulgurite.callbacks.progress import Progress
from fulgurite.cli import main
from tests.classification import loader, make, quiet
from tests.training import fit


def test_a_line_for_each_epoch_where_there_is_no_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--trainer.enable_progress_bar", "true") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [re.sub(r"[\d.]+(?= |$)", "N", line) for line in lines] == [
        "epoch       1/N  val/acc N  train/loss N  N s",
        "epoch       2/N  val/acc N  train/loss N  N s",
    ]


def test_nothing_is_said_if_it_is_off(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--trainer.enable_progress_bar", "false", epochs=1) == 0
    assert "epoch  " not in capsys.readouterr().out


class Terminal(Console):
    """A terminal, whatever the test writes to."""

    def __init__(self) -> None:
        super().__init__(force_terminal=True, force_jupyter=False, width=100)


def test_a_bar_on_a_terminal_tells_where_the_run_is(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "Console", Terminal)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    assert fit("--trainer.enable_progress_bar", "true", "--trainer.log_every_n_steps", "1", "--test", "true") == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    for text in ("epoch 1/2 ", "epoch 2/2, validation ", " 3/4 ", "train/loss_step ", "test "):
        assert text in plain
    assert "epoch       2/2  val/acc " in plain  # the bar is out of the way


def test_a_bar_is_drawn_by_the_clock_and_not_at_each_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", Terminal)
    monkeypatch.setattr("fulgurite.callbacks.progress.time.monotonic", lambda: 0.0)
    drawn: list[int] = []
    monkeypatch.setattr(Progress, "_draw", lambda self, trainer, done: drawn.append(done))
    quiet(max_epochs=1, enable_progress_bar=True, num_sanity_val_steps=0).fit(make(), loader(40), loader(8))
    assert drawn == [0, 0, 10]  # when training, validation and training begin


def test_the_bar_goes_when_the_run_fails(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", Terminal)
    trainer, task = quiet(max_epochs=1, enable_progress_bar=True), make()
    monkeypatch.setattr(task, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(task, loader(8), loader(4))
    (bar,) = [callback for callback in trainer.callbacks if isinstance(callback, Progress)]
    assert bar._bar is None
    assert capsys.readouterr().out.rstrip("\n").endswith(("\x1b[2K", "\x1b[?25h"))


def test_an_evaluation_ends_with_its_result(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--trainer.enable_progress_bar", "false", epochs=1) == 0
    capsys.readouterr()
    assert main(["validate", "--ckpt_path", "best"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("validate  ")
