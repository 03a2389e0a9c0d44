"""Two real processes on the CPU, started by Lightning and by torchrun: one run, each sample once, the numbers of one process."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from fulgurite import load
from fulgurite.checkpoint import describe, read_checkpoint
from fulgurite.cli import main
from fulgurite.console import note
from tests.conftest import DIGITS, ROOT, SMALL
from tests.images import save_splits

DDP = ["-c", str(ROOT / "configs" / "trainer" / "ddp_cpu.yaml")]
FULGURITE = ["-m", "fulgurite"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *FULGURITE]  # standalone: on a free port
# 271 test samples: 136 and 135, in batches of 27 that is 6 batches on one process and 5 on the other.
UNEQUAL = ["--data.test_fraction", "0.1501", "--data.batch_size", "27"]
FIT = ["fit", *SMALL, *DDP, *UNEQUAL, "--trainer.max_epochs", "1", "--test"]


class Done(NamedTuple):
    """What a command left: its exit status, what it printed, its folder."""

    status: int
    out: str
    err: str
    folder: Path

    def notes(self, topic: str) -> list[str]:
        return [line.removeprefix(topic).strip() for line in self.out.splitlines() if line.split(" ")[0] == topic]


def launch(how: list[str], command: list[str], folder: Path) -> Done:
    """Run a command in processes of its own; none of them outlives the call."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *how, *command],
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Done(process.returncode, out, err, folder)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Train and test with two processes; tests read what is left and leave it as it is."""
    return launch(FULGURITE, FIT, tmp_path_factory.mktemp("ddp"))


def check_one_run(done: Done) -> None:
    assert (done.status, done.err) == (0, "")
    for topic in ("device", "network", "workers", "trained", "test"):  # by rank zero alone
        assert len(done.notes(topic)) == 1
    assert done.notes("device")[0].startswith("2 x cpu")
    assert set(done.notes("run")) == {"runs/digits/v001"}
    (run,) = done.folder.glob("runs/*/*")
    names = sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if not path.name.startswith("events"))
    assert names == ["checkpoints", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml", "metrics.csv"]


def test_one_run(fitted: Done) -> None:
    check_one_run(fitted)


def test_checkpoint_needs_no_processes(fitted: Done) -> None:
    run = fitted.folder / "runs" / "digits" / "v001"
    task = load(run)
    assert [len(parameter) for parameter in task.network.parameters()][-1] == 10
    last = run / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(last)
    assert not any(key.startswith("module.") for key in checkpoint["state_dict"])  # DistributedDataParallel's prefix
    assert checkpoint["global_step"] == 4
    assert describe(checkpoint, last).config == (run / "config.yaml").read_text()


def test_each_test_sample_counts_once(fitted: Done, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(fitted.folder)
    other_batches = ["--data.batch_size", "64"]  # nor may it matter how the samples are cut into batches
    assert main(["test", "--ckpt_path", "best", *other_batches, "--trainer.enable_progress_bar", "false"]) == 0
    alone = Done(0, capsys.readouterr().out, "", fitted.folder)
    assert alone.notes("test") == fitted.notes("test")


@pytest.mark.slow
def test_torchrun_does_the_same(fitted: Done, here: Path) -> None:
    done = launch(TORCHRUN, FIT, here)
    check_one_run(done)
    assert done.notes("test") == fitted.notes("test")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 7])
def test_predicts_each_image_once(number: int, fitted: Done, here: Path) -> None:
    (here / "photos").mkdir()
    for index in range(number):
        Image.new("L", (8, 8), 30 * index).save(here / "photos" / f"{index}.png")
    command = ["predict", "--ckpt_path", str(fitted.folder / "runs" / "digits"), "--images", "photos", "--batch_size", "2"]
    quiet = ["--trainer.enable_progress_bar", "false"]
    done = launch(FULGURITE, [*command, *DDP, *quiet, "--output", "two.csv"], here)
    assert (done.status, done.err) == (0, "")
    assert done.notes("predictions") == [f"{number} of {number} images in two.csv"]
    assert main([*command, *quiet, "--output", "one.csv"]) == 0
    two, one = (table(here / name) for name in ("two.csv", "one.csv"))
    assert [path for path, _, _ in two] == [str(Path("photos", f"{index}.png")) for index in range(number)]
    assert [row[:2] for row in two] == [row[:2] for row in one]
    assert [row[2] for row in two] == pytest.approx([row[2] for row in one], abs=1e-5)


def table(path: Path) -> list[tuple[str, str, float]]:
    header, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    assert header == ["path", "label", "probability"]
    return [(name, label, float(probability)) for name, label, probability in rows]


@pytest.mark.slow
def test_a_mistake_seen_by_all_processes_ends_them(here: Path) -> None:
    done = launch(FULGURITE, [*FIT, "--checkpoint.monitor", "val/accuracy"], here)
    assert done.status == 2
    assert "did you mean 'val/acc'?" in done.err
    assert "Traceback" not in done.err
    assert not list(here.glob("runs/*/*"))


def test_processes_that_the_trainer_does_not_expect_are_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    assert main(["fit", *SMALL]) == 2
    assert "2 processes were started, and the trainer is set to 1: --trainer.devices 2" in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"])
def test_only_the_first_process_speaks(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv(variable, rank)
        note("rank", rank)
    assert capsys.readouterr().out == "rank        0\n"


@pytest.mark.slow
def test_a_batch_that_cannot_be_read_does_not_stop_the_other_process(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "data", count=6)
    (root / "train" / "cat" / "3.png").write_bytes(b"")
    data = ["--data", "ImageFolderDataModule", "--data.root", "data", "--data.size", "16", "--data.batch_size", "1"]
    skip = ["--data.on_error", "skip", "--data.max_broken", "0.2", "--data.num_workers", "0", "--trainer.max_epochs", "2"]
    model = ["-c", str(DIGITS), "--model.network.width", "4", "--trainer.enable_progress_bar", "false"]
    done = launch(FULGURITE, ["fit", *model, *DDP, *data, *skip, "--test"], tmp_path)
    assert (done.status, done.err) == (0, "")
    (trained,) = done.notes("trained")
    assert "12 steps" in trained  # 12 images on 2 processes, 2 epochs
