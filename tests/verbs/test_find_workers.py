"""What ``fulgurite find-workers`` measures, chooses, prints and draws, and what it refuses. No test is about speed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from fulgurite import machine
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule, ImageFolderDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.errors import UserError
from fulgurite.machine import Cores, SharedMemory
from fulgurite.verbs import find_workers as module
from fulgurite.verbs.find_workers import choose, find_workers, plot
from fulgurite.verbs.loading_speed import Speed
from tests.conftest import DIGITS
from tests.images import save_tree

CORES = Cores(2, "CPU affinity allows 2 of 8")
BATCH = 64 * (64 + 8)  # bytes of one of the digits


@pytest.fixture(autouse=True)
def two_cores(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: CORES)
    monkeypatch.setattr("fulgurite.data.base.usable_cores", lambda: CORES)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int | None], float]:
    """Answer with these rates instead of measuring."""
    rates: dict[tuple[int, int | None], float] = {}

    def measure_speed(datamodule: Any, workers: int, factor: int | None, seconds: float, *, epoch: int = 0) -> Speed:
        return Speed(workers, factor, rates[workers, factor], 0.5, BATCH)

    monkeypatch.setattr(module, "measure_speed", measure_speed)
    return rates


def speeds(rates: dict[tuple[int, int | None], float]) -> list[Speed]:
    return [Speed(workers, factor, rate, 0.1) for (workers, factor), rate in rates.items()]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({(0, None): 100.0, (1, 2): 90.0}, (0, None)),
        ({(0, None): 94.0, (1, 2): 100.0}, (1, 2)),
        ({(0, None): 95.0, (1, 2): 100.0}, (0, None)),
        ({(0, None): 10.0, (4, 4): 96.0, (4, 2): 95.0, (8, 2): 100.0}, (4, 2)),
        ({(0, None): 10.0, (4, 2): 90.0, (4, 4): 96.0, (8, 2): 100.0}, (4, 4)),
        ({(0, None): 7.0}, (0, None)),
    ],
)
def test_fewest_workers_within_5_percent(rates: dict[tuple[int, int | None], float], chosen: tuple[int, int | None]) -> None:
    best = choose(speeds(rates))
    assert (best.num_workers, best.prefetch_factor) == chosen


def test_measures_an_image_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageFolderDataModule(save_tree(here / "pets"), size=16, batch_size=2)
    found = find_workers(data, workers=[1, 0, 1], prefetch=[2], seconds=0.05)
    assert [(one.num_workers, one.prefetch_factor) for one in found.measured] == [(0, None), (1, 2)]
    assert all(one.rate > 0 and one.first_batch > 0 and one.batch_bytes == 2 * (3 * 16 * 16 + 8) for one in found.measured)
    assert found.best is choose(found.measured)
    assert (data.num_workers, data.prefetch_factor, data.pin_memory) == (None, 2, None)
    assert not multiprocessing.active_children()
    with Image.open("find_workers.png") as image:
        assert image.format == "PNG"
    printed = capsys.readouterr().out
    assert "measuring   2 settings of 0.05 s, after as long to warm up; batch_size 2\n" in printed
    assert "workers  prefetch   samples/s  first batch\n      0         -  " in printed
    assert "\n      1         2  " in printed
    assert printed.count("per process") == 1  # what the module says of its loader, once
    assert "hint        each epoch decodes all images anew; if training waits for them, cache: ram or cache: disk may" in printed


def test_data_in_a_cache_is_measured_from_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageFolderDataModule(save_tree(here / "pets"), size=16, batch_size=2, cache="ram")
    find_workers(data, workers=[0], seconds=0.05)
    printed = capsys.readouterr().out
    assert "of the train split" in printed
    assert "hint" not in printed


def test_images_in_memory(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made_up |= {(0, None): 12345.6, (1, 2): 50.25, (2, 2): 60.0}
    found = find_workers(DigitsDataModule())
    assert len(found.measured) == 3
    printed = capsys.readouterr().out
    assert "prefetch    2 only: DigitsDataModule takes no prefetch_factor\n" in printed
    assert "      0         -      12,346       0.50 s\n      1         2        50.2       0.50 s\n" in printed
    assert "best        0 workers: 12,346 samples/s, the fastest\n" in printed
    assert "the images are in memory: to send them between processes takes longer than to load them\n" in printed
    assert "\ndata:\n  init_args:\n    num_workers: 0\n\n" in printed


def test_lines_to_paste(here: Path, made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made_up |= {(0, None): 200.0, (1, 2): 396.0, (1, 4): 390.0, (2, 2): 400.0, (2, 4): 390.0}
    find_workers(ImageFolderDataModule(save_tree(here / "pets")))
    printed = capsys.readouterr().out
    reason = "within 5% of the fastest (2 workers, prefetch_factor 2: 400), with less to keep in memory"
    assert f"best        1 worker, prefetch_factor 2: 396 samples/s, {reason}\n" in printed
    assert "\ndata:\n  init_args:\n    num_workers: 1\n    prefetch_factor: 2\n\n" in printed


def test_workers_that_pay(here: Path, made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made_up |= {(0, None): 200.0, (1, 2): 300.0, (2, 2): 400.0}
    find_workers(ImageFolderDataModule(save_tree(here / "pets")), prefetch=[2])
    printed = capsys.readouterr().out
    assert "best        2 workers, prefetch_factor 2: 400 samples/s, the fastest; with fewer workers at most 300\n" in printed


def test_without_workers_the_network_waits(here: Path, made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made_up |= {(0, None): 200.0, (1, 2): 190.0}
    find_workers(ImageFolderDataModule(save_tree(here / "pets"), batch_size=5), workers=[0, 1], prefetch=[2])
    wait = "without workers the network waits for each batch, about 25.0 ms; if a step takes about as long or longer, 1 worker is"
    assert wait in capsys.readouterr().out


def test_one_setting_wins_nothing(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made_up |= {(0, None): 200.0}
    find_workers(DigitsDataModule(), workers=[0])
    printed = capsys.readouterr().out
    assert "best        0 workers: 200 samples/s, the only setting measured\n" in printed
    assert "takes longer" not in printed


@pytest.mark.parametrize(("cores", "numbers"), [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_numbers_of_workers_double(cores: int, numbers: list[int]) -> None:
    assert module._doubling(cores) == numbers


def test_settings_too_large_for_shared_memory(
    made_up: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up |= {(0, None): 10.0, (1, 2): 20.0}
    monkeypatch.setattr(machine, "shared_memory", lambda: SharedMemory(1 << 26, 4 * BATCH))
    assert len(find_workers(DigitsDataModule()).measured) == 2
    assert (
        "left out    workers x prefetch_factor of 2 x 2: up to 0.0 MiB of batches, and /dev/shm has 0.0 MiB free; "
        "start the container with --shm-size=8g (or --ipc=host)\n"
    ) in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^too little shared memory for workers x prefetch_factor of 2 x 2: up to 0.0 MiB"):
        find_workers(DigitsDataModule(), workers=[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": []}, "workers is empty; give at least one number, such as [0, 1]"),
        ({"prefetch": []}, "prefetch is empty; give at least one number, such as [1, 2]"),
        ({"workers": [2, -1]}, "workers is [2, -1]; each must be at least 0"),
        ({"prefetch": (0, 2)}, "prefetch is [0, 2]; each must be at least 1"),
        ({"workers": [0, 3]}, "workers is [0, 3]; at most 2 can run here: CPU affinity allows 2 of 8"),
        ({"seconds": 0.0}, "seconds is 0.0; it must be above 0"),
        ({"seconds": float("nan")}, "seconds is nan; it must be above 0"),
        ({"output": Path("plot.pgn")}, "cannot write plot.pgn: its ending is '.pgn' (did you mean '.png'?); allowed: .jpeg, .j"),
        ({"output": Path("plot")}, "cannot write plot: its ending is ''; allowed: .jpeg, .jpg, .pdf, .png, .svg, .webp"),
        ({"output": Path("dir.png")}, "cannot write dir.png: it is a folder"),
        ({"output": Path("file/a.png")}, "cannot write file/a.png: making the folder file failed: File exists"),
    ],
)
def test_refused_before_measuring(made_up: Any, here: Path, options: dict[str, Any], message: str) -> None:
    (here / "dir.png").mkdir()
    (here / "file").touch()
    with pytest.raises(UserError) as refused:
        find_workers(DigitsDataModule(), **options)
    assert str(refused.value).startswith(message)


def test_empty_training_split() -> None:
    class Empty(DigitsDataModule):
        def dataset(self, split: Split) -> ArrayDataset:
            return ArrayDataset(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))

    data = Empty(num_workers=1)
    with pytest.raises(UserError, match=r"^the train split of Empty is empty$"):
        find_workers(data)
    assert data.num_workers == 1


def test_settings_survive_a_failure() -> None:
    class BrokenDataset(ArrayDataset):
        def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
            raise KeyboardInterrupt

    class Stopped(DigitsDataModule):
        ended = False

        def dataset(self, split: Split) -> ArrayDataset:
            whole = super().dataset(split)
            return BrokenDataset(whole.images, whole.labels)

        def teardown(self, stage: str) -> None:
            self.ended = True

    data = Stopped(num_workers=1)
    with pytest.raises(KeyboardInterrupt):
        find_workers(data, workers=[0], seconds=0.05)
    assert (data.num_workers, data.prefetch_factor, data.pin_memory) == (1, 2, None)
    assert data.ended
    assert not Path("find_workers.png").exists()


@pytest.mark.parametrize("ending", module._ENDINGS)
def test_plot_is_written_in_each_format(here: Path, ending: str) -> None:
    measured = speeds({(0, None): 2.0, (1, 2): 3.0})
    plot(measured, measured[1], here / f"plot.{ending.upper()}")
    assert (here / f"plot.{ending.upper()}").stat().st_size > 1000
    assert len(list(here.iterdir())) == 1


def test_plot_that_cannot_be_written(here: Path) -> None:
    (here / "plot.png").mkdir()
    measured = speeds({(0, None): 2.0})
    with pytest.raises(UserError, match=r"^cannot write .*plot.png: Is a directory$"):
        plot(measured, measured[0], here / "plot.png")
    assert [path.name for path in here.iterdir()] == ["plot.png"]


def test_plot_is_replaced_whole_or_not_at_all(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    (here / "plot.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", full)
    measured = speeds({(0, None): 2.0})
    with pytest.raises(UserError, match=r"^cannot write plot.png: No space left on device$"):
        plot(measured, measured[0], Path("plot.png"))
    assert [path.read_bytes() for path in here.iterdir()] == [b"old"]


def test_folder_of_the_plot_is_made(made_up: Any) -> None:
    made_up |= {(0, None): 10.0}
    find_workers(DigitsDataModule(), workers=[0], output=Path("new/er/plot.svg"))
    assert "<svg" in Path("new/er/plot.svg").read_text()


def test_from_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--seconds", "0.05", "--workers", "[0]", "--output", "plots/workers.png"]
    assert main(["find-workers", "-c", str(DIGITS), *quick]) == 0
    assert "num_workers: 0" in capsys.readouterr().out
    assert (here / "plots" / "workers.png").stat().st_size > 1000
