"""What cannot go on exactly: refused with the reason, or done on request."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fulgurite.cli import main
from fulgurite.tasks import ClassificationTask
from tests.commands import refused
from tests.conftest import SMALL
from tests.training import RUN, Killed, at_batch, fit, steps, stop


@pytest.fixture
def stopped(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose last.ckpt is of the second of four batches of its second epoch."""
    with monkeypatch.context() as patched:
        at_batch(patched, 7, stop)
        with pytest.raises(Killed):
            fit("--checkpoint.every_n_steps", "2")
    assert steps(RUN)["last"] == 6
    return RUN


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (["--data.batch_size", "32"], ["batch_size is 32; the checkpoint has 64"]),
        (["--trainer.accumulate_grad_batches", "2"], ["accumulate_grad_batches is 2; the checkpoint has 1"]),
        (["--trainer.limit_train_batches", "3"], ["the number of batches in an epoch is 3; the checkpoint has 4"]),
        (["--data.split_seed", "1"], ["the data differ: other images, labels, classes, sizes or splits"]),
        (["--seed_everything", "1"], ["the seed is 1; the checkpoint has 0"]),
        (["--data.test_fraction", "0.2"], ["the data differ: other images, labels, classes, sizes or splits"]),
        (["--seed_everything", "1", "--data.batch_size", "8"], ["batch_size is 8; the checkpoint has 64", "the seed is 1; the"]),
    ],
)
@pytest.mark.parametrize("how", ["--resume", "--ckpt_path"])
def test_what_cannot_go_on_exactly_is_refused(
    stopped: Path, capsys: pytest.CaptureFixture[str], how: str, options: list[str], reasons: list[str]
) -> None:
    first, *found, last = refused(capsys, "fit", how, str(stopped), *options).splitlines()
    assert (first, last) == ("the run cannot go on exactly:", "to go on all the same: --resume_inexact")
    assert len(found) == len(reasons)
    assert all(line.startswith(reason) for line, reason in zip(found, reasons, strict=True))


def test_on_request_the_epoch_begins_anew(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int, int]] = []
    step = ClassificationTask.training_step

    def training_step(self: ClassificationTask, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        seen.append((self.trainer.current_epoch, batch_idx, len(batch[1])))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "training_step", training_step)
    assert main(["fit", "--resume", "--data.batch_size", "32", "--resume_inexact"]) == 0
    assert "inexact     batch_size is 32; the checkpoint has 64; the epoch begins anew\n" in capsys.readouterr().out
    assert seen == [(1, number, 32) for number in range(4)]
    assert steps(RUN)["last"] == 10
    assert [row.split(",")[:2] for row in (RUN / "metrics.csv").read_text().splitlines()[1:]] == [
        ["0", "3"],
        ["0", "3"],
        ["1", "9"],
        ["1", "9"],
    ]
    assert main(["fit", "--resume", "--trainer.max_epochs", "3"]) == 0  # exact again, by what the run now has
    assert steps(RUN)["last"] == 14


def rates(run: Path) -> dict[int, float]:
    with (run / "metrics.csv").open() as file:
        return {int(row["step"]): float(row["lr"]) for row in csv.DictReader(file) if row.get("lr")}


@pytest.mark.parametrize("batch", ["32", "256"])
def test_schedule_ends_where_the_run_ends(here: Path, monkeypatch: pytest.MonkeyPatch, batch: str) -> None:
    # No limit of batches: epochs of 39 or 4 steps, where the checkpoint's had 19.
    whole = [*SMALL, "--trainer.limit_train_batches", "1.0"]
    log = ["--trainer.log_every_n_steps", "1"]
    with monkeypatch.context() as patched:
        at_batch(patched, 30, stop)
        with pytest.raises(Killed):
            main(["fit", *whole, *log, "--trainer.max_epochs", "3", "--checkpoint.every_n_steps", "2"])
    done = steps(RUN)["last"]
    per_epoch = {"32": 39, "256": 4}[batch]
    for epochs in (3, 4):  # once more, as the run now has epochs of two lengths behind it
        more = ["--trainer.max_epochs", str(epochs)]
        assert main(["fit", "--resume", "--data.batch_size", batch, "--resume_inexact", *more]) == 0
        total = done + (epochs - 1) * per_epoch
        assert steps(RUN)["last"] == total
        found = rates(RUN)
        assert 0 <= found[total - 1] < 0.2 * max(found.values())
        assert min(found[step] for step in range(done, total - 2)) > 0


def test_number_of_workers_and_place_do_not_matter(stopped: Path) -> None:
    Path("moved").mkdir()
    stopped.rename("moved/run")
    assert main(["fit", "--resume", "moved/run", "--data.num_workers", "1"]) == 0


def test_state_within_a_window_of_accumulation_is_no_place_to_go_on_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The only best state is that of the validation after the first of two batches of a window.
    options = ["--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "1", "--model.optimizer.lr", "0"]
    assert main(["fit", *SMALL, "--trainer.max_epochs", "2", *options]) == 0
    best = RUN / "checkpoints" / "best.ckpt"
    assert torch.load(best, weights_only=True)["global_step"] == 0
    assert refused(capsys, "fit", "--ckpt_path", str(best)) == (
        "the run cannot go on exactly:\n"
        "the checkpoint was taken after 1 batches of an epoch, inside a window of accumulate_grad_batches 2, "
        "and does not hold the gradients summed up by then; last.ckpt never is\n"
        "to go on all the same: --resume_inexact"
    )
    assert main(["fit", "--ckpt_path", str(best), "--resume_inexact"]) == 0
