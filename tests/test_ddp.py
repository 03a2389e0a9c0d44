"""Several real processes on the CPU: one run, each sample once, the numbers of one process."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from fulgurite import load
from fulgurite.checkpoint import describe, read_checkpoint
from fulgurite.cli import main
from fulgurite.console import note
from fulgurite.data import DataSpec
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.errors import UserError
from tests.classification import Lights, make, quiet
from tests.conftest import DIGITS, ROOT, SMALL
from tests.images import save_splits
from tests.jobs import run_job

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


# Forked processes: the same numbers for any number of them, also where some have a batch more than others


class OneLabel(Lights):
    """Name the first light that is on, or the third."""

    @property
    def spec(self) -> DataSpec:
        return replace(super().spec, multi_label=False)

    def dataset(self, split: Split) -> ArrayDataset:
        of_all = super().dataset(split)
        return ArrayDataset(of_all.images, torch.cat([of_all.labels[:, :2], torch.ones(len(of_all), 1)], dim=1).argmax(dim=1))


def evaluate(kind: type[Lights], folder: Path, processes: int) -> tuple[dict[str, float], dict[str, float], list[list[str]]]:
    data: Any = kind(batch_size=7)  # 64 samples: 10 batches; 5 and 5; 4, 3 and 3
    task = make(spec=data.spec)
    trainer = quiet(accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto")
    (validated,), (tested,) = trainer.validate(task, datamodule=data), trainer.test(task, datamodule=data)
    output = folder / f"{processes}.csv"
    trainer.predict(task, images=folder / "photos", output=output, batch_size=2)
    seen_by_all = sorted(path.name for path in folder.glob("*.csv"))
    assert seen_by_all == [output.name]
    return validated, tested, list(csv.reader(output.read_text().splitlines()))


@pytest.mark.parametrize("kind", [OneLabel, Lights])
def test_numbers_are_those_of_one_process(kind: type[Lights], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = {}
    for processes in (1, 2, 3):
        folder = tmp_path / str(processes)
        (folder / "photos").mkdir(parents=True)
        for index in range(7):
            Image.new("RGB", (4, 4), (30 * index, 200 - 20 * index, 60)).save(folder / "photos" / f"{index}.png")
        results[processes] = run_job(processes, partial(evaluate, kind, folder, processes), folder)
        assert len([line for line in capfd.readouterr().out.splitlines() if line.startswith("predictions ")]) == 1
    (validated, tested, (header, *rows)) = results[1][0]
    assert len(rows) == 7
    assert [Path(row[0]).name for row in rows] == [f"{index}.png" for index in range(7)]
    for others in (*results[2], *results[3]):
        assert others[0] == pytest.approx(validated, abs=1e-6)
        assert others[1] == pytest.approx(tested, abs=1e-6)
        assert others[2][0] == header
        for row, other in zip(rows, others[2][1:], strict=True):
            assert [Path(other[0]).name, other[1]] == [Path(row[0]).name, row[1]]
            assert numbers(other[2]) == pytest.approx(numbers(row[2]), abs=1e-6)


def numbers(cell: str) -> list[float]:
    return [float(number) for number in cell.split("|") if number]


def fit_apart(folder: Path) -> dict[str, float]:
    os.chdir(folder / os.environ.get("LOCAL_RANK", "0"))
    data: Any = Lights(batch_size=32)
    trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, enable_checkpointing=True, logger=True)
    trainer.fit(make(spec=data.spec), datamodule=data, test=True)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_the_best_checkpoint_is_tested_where_only_the_first_process_sees_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    first, second = run_job(2, partial(fit_apart, tmp_path), tmp_path)
    assert first["test/loss"] == second["test/loss"]
    assert list((tmp_path / "1").iterdir()) == []
    assert (tmp_path / "0" / "runs" / "default" / "v001" / "checkpoints" / "best.ckpt").is_file()
    assert "run         on the first host alone, as the others do not see it" in capfd.readouterr().out


class Few(Lights):
    """Have two samples."""

    def dataset(self, split: Split) -> ArrayDataset:
        of_all = super().dataset(split)
        return ArrayDataset(of_all.images[:2], of_all.labels[:2])


def evaluate_few() -> None:
    data: Any = Few(batch_size=7)
    quiet(accelerator="cpu", devices=3, strategy="ddp").test(make(spec=data.spec), datamodule=data)


def test_more_processes_than_samples_are_refused(tmp_path: Path) -> None:
    for result in run_job(3, evaluate_few, tmp_path):
        assert isinstance(result, UserError)
        assert str(result) == "the test split of Few has 2 samples for 3 processes"


class Odd(Lights):
    """Have 128 training samples, and a few more."""

    def __init__(self, more: int) -> None:
        super().__init__(batch_size=16)
        self.more = more

    def dataset(self, split: Split) -> ArrayDataset:
        of_all = super().dataset(split)
        return ArrayDataset(of_all.images[: 128 + self.more], of_all.labels[: 128 + self.more])


def fit_odd(more: int) -> int:
    data: Any = Odd(more)
    trainer = quiet(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1)
    trainer.fit(make(spec=data.spec), datamodule=data)
    return trainer.global_step


@pytest.mark.parametrize("number", [0, 1])
def test_a_sample_more_than_whole_batches_trains(number: int, here: Path) -> None:
    # A last batch of one sample would be one that BatchNorm cannot train on; on 2 processes 128 + 2 samples leave one each.
    assert run_job(2, partial(fit_odd, 2 * number), here) == [4, 4]


@pytest.mark.slow
def test_a_mistake_seen_by_all_processes_ends_them(here: Path) -> None:
    done = launch(FULGURITE, [*FIT, "--checkpoint.monitor", "val/accuracy"], here)
    assert done.status == 2
    assert "did you mean 'val/acc'?" in done.err
    assert "Traceback" not in done.err
    assert not list(here.glob("runs/*/*"))


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


@pytest.mark.gpu
@pytest.mark.parametrize("overlay", ["ddp_16mixed", "ddp_bf16mixed", "fsdp2"])
def test_one_gpu_by_nccl_leaves_what_a_cpu_can_use(overlay: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["-c", str(ROOT / "configs" / "trainer" / f"{overlay}.yaml")]
    done = launch(FULGURITE, ["fit", *SMALL, *file, "--trainer.devices", "1", "--trainer.max_epochs", "1", "--test"], here)
    assert (done.status, done.err) == (0, "")
    assert done.notes("device")[0].startswith("1 x cuda")
    on_cpu = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    assert main(["test", "--ckpt_path", "best", *on_cpu]) == 0
    alone = Done(0, capsys.readouterr().out, "", here)
    assert values(alone.notes("test")[0]) == pytest.approx(values(done.notes("test")[0]), abs=0.02)  # 16 bits there, 32 here


def values(line: str) -> list[float]:
    return [float(word) for word in line.split()[1::2]]
