"""Find how many processes should load the data, and how far ahead: the function behind ``fulgurite find-workers``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from fulgurite import machine
from fulgurite.console import note
from fulgurite.data.base import ImageDataModule
from fulgurite.data.cache_file import replaced
from fulgurite.data.files import FileDataset
from fulgurite.errors import UserError
from fulgurite.tables import check_output
from fulgurite.verbs.loading_speed import Speed, measure_speed, settings_kept

Setting = tuple[int, int | None]  # (num_workers, prefetch_factor), which needs workers

_ENOUGH = 0.95  # of the fastest
_ENDINGS = (".jpeg", ".jpg", ".pdf", ".png", ".svg", ".webp")


@dataclass(frozen=True)
class FoundWorkers:
    """What was measured, in that order, and the setting to take."""

    measured: tuple[Speed, ...]
    best: Speed


def find_workers(
    datamodule: ImageDataModule,
    *,
    output: Path = Path("find_workers.png"),
    workers: list[int] | None = None,
    prefetch: Sequence[int] = (2, 4),
    seconds: float = 5.0,
) -> FoundWorkers:
    """Measure how many loader processes pay, on this machine with this data.

    Nothing but loading is measured: a network that trains on the CPU wants cores, too.

    Args:
        datamodule: its training images are loaded as for training, in one process
        output: plot of samples per second against workers; its ending says the format
        workers: numbers of workers to try; null takes 0, 1, 2, 4, ... up to the cores really usable
        prefetch: numbers of batches that each worker prepares ahead to try
        seconds: how long to measure each setting

    Raises:
        UserError: if a number makes no sense, there is no training image, or the plot cannot be written
    """
    cores, output = machine.usable_cores(), Path(output)
    _check_numbers("workers", workers, least=0)
    _check_numbers("prefetch", prefetch, least=1)
    if workers and max(workers) > cores.number:
        raise UserError(f"workers is {workers}; at most {cores.number} can run here: {cores.reason}")
    if not 0 < seconds < math.inf:
        raise UserError(f"seconds is {seconds}; it must be above 0")
    check_output(output, _ENDINGS)
    if "prefetch_factor" not in datamodule.init_args:
        prefetch = [datamodule.prefetch_factor]
        note("prefetch", f"{prefetch[0]} only: {type(datamodule).__name__} takes no prefetch_factor")
    numbers = sorted(set(workers)) if workers else _doubling(cores.number)
    settings: list[Setting] = [(number, factor) for number in numbers for factor in (sorted(set(prefetch)) if number else [None])]
    with settings_kept(datamodule):
        datamodule.prepare_data()
        datamodule.setup("fit")
        try:
            measured = tuple(_measure(datamodule, settings, seconds))
        finally:
            datamodule.teardown("fit")
    best = choose(measured)
    _report(datamodule, measured, best)
    plot(measured, best, output)
    note("plot", str(output))
    return FoundWorkers(measured, best)


def choose(measured: Sequence[Speed]) -> Speed:
    """Return the setting with the fewest workers, then the fewest batches ahead, within 5% of the fastest."""
    least = _ENOUGH * _fastest(measured).rate
    return min((one for one in measured if one.rate >= least), key=lambda one: (one.num_workers, one.prefetch_factor or 0))


def _measure(datamodule: ImageDataModule, settings: Sequence[Setting], seconds: float) -> Iterator[Speed]:
    datamodule.train_dataloader()  # refuses a split that is empty, and says what it would choose
    note("measuring", f"{len(settings)} settings of {seconds:g} s, after as long to warm up; batch_size {datamodule.batch_size}")
    # The first to read a file waits for the disk, as in the first epoch alone if the files fit into memory.
    batch_bytes = measure_speed(datamodule, 0, None, seconds).batch_bytes
    settings = _fitting(settings, batch_bytes)
    print(f"{'workers':>7}  {'prefetch':>8}  {'samples/s':>10}  {'first batch':>11}", flush=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    # No thread that refreshes: it would take time from what is measured, and workers are forked.
    with Progress(*columns, auto_refresh=False, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=len(settings))
        for number, (workers, factor) in enumerate(settings, 1):
            progress.update(task, completed=number - 1, description=str(Speed(workers, factor, 0, 0)), refresh=True)
            # In another order each time, lest the images of the one before are still at hand.
            speed = measure_speed(datamodule, workers, factor, seconds, epoch=1000 * number)
            print(f"{workers:>7}  {factor or '-':>8}  {_shown(speed.rate):>10}  {speed.first_batch:>9.2f} s", flush=True)
            yield speed


def _fitting(settings: Sequence[Setting], batch_bytes: int) -> list[Setting]:
    """Leave out the settings whose batches do not fit into shared memory: the system would kill their workers."""
    memory = machine.shared_memory()
    if memory is None:
        return list(settings)
    needs = {(workers, factor): (workers * factor + 1) * batch_bytes if factor else 0 for workers, factor in settings}
    fitting = [setting for setting in settings if needs[setting] <= memory.free]
    if len(fitting) < len(settings):
        large = ", ".join(f"{workers} x {factor}" for workers, factor in settings if (workers, factor) not in fitting)
        text = (
            f"workers x prefetch_factor of {large}: up to {max(needs.values()) / 2**20:,.1f} MiB of batches, and /dev/shm has "
            f"{memory.free / 2**20:,.1f} MiB free; start the container with --shm-size=8g (or --ipc=host)"
        )
        if not fitting:
            raise UserError(f"too little shared memory for {text}")
        note("left out", text)
    return fitting


def _report(datamodule: ImageDataModule, measured: Sequence[Speed], best: Speed) -> None:
    note("best", f"{best}: {_shown(best.rate)} samples/s, {_reason(measured, best)}")
    if best.num_workers == 0 and len(measured) > 1:
        wait = f"without workers the network waits for each batch, about {1000 * datamodule.batch_size / best.rate:,.1f} ms"
        in_memory = "the images are in memory: to send them between processes takes longer than to load them"
        note("", in_memory if datamodule.in_memory else f"{wait}; if a step takes about as long or longer, 1 worker is better")
    lines = ["data:", "  init_args:", f"    num_workers: {best.num_workers}"]
    if best.prefetch_factor and "prefetch_factor" in datamodule.init_args:
        lines.append(f"    prefetch_factor: {best.prefetch_factor}")
    print("\n" + "\n".join(lines) + "\n", flush=True)
    dataset: Any = datamodule.dataset("train")
    if isinstance(dataset, FileDataset) and dataset.cache is None and "cache" in datamodule.init_args:
        note("hint", "each epoch decodes all images anew; if training waits for them, cache: ram or cache: disk may help")


def _reason(measured: Sequence[Speed], best: Speed) -> str:
    fastest = _fastest(measured)
    if len(measured) == 1:
        return "the only setting measured"
    if best is not fastest:
        return f"within {1 - _ENOUGH:.0%} of the fastest ({fastest}: {_shown(fastest.rate)}), with less to keep in memory"
    fewer = [one for one in measured if one.num_workers < best.num_workers]
    return f"the fastest; with fewer workers at most {_shown(max(one.rate for one in fewer))}" if fewer else "the fastest"


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _fastest(measured: Sequence[Speed]) -> Speed:
    return max(measured, key=lambda one: one.rate)


def plot(measured: Sequence[Speed], best: Speed, output: Path) -> None:
    """Draw samples per second against workers, a line for each prefetch factor, and mark the choice.

    Raises:
        UserError: if the file cannot be written
    """
    numbers = sorted({one.num_workers for one in measured})
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axis = figure.subplots()
    factors: list[int | None] = [*sorted({one.prefetch_factor for one in measured if one.prefetch_factor})]
    for factor in factors or [None]:
        line = [one for one in measured if one.prefetch_factor in (None, factor)]
        # Evenly spaced, as the numbers double: 0, 1 and 2 would lie on top of each other beside 64.
        places = [numbers.index(one.num_workers) for one in line]
        axis.plot(places, [one.rate for one in line], "o-", label=f"prefetch_factor {factor}" if factor else "no workers")
    axis.axhline(_ENOUGH * _fastest(measured).rate, color="gray", linestyle="--", linewidth=1, label="95% of the fastest")
    place = numbers.index(best.num_workers)
    axis.plot(place, best.rate, "o", markersize=16, markerfacecolor="none", markeredgecolor="black", label=f"choice: {best}")
    axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axis.set_xlim(-0.5, len(numbers) - 0.5)
    axis.set_ylim(0, 1.1 * _fastest(measured).rate)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set_xlabel("workers")
    axis.set_ylabel("samples/s")
    figure.legend(loc="outside lower center", ncols=2, markerscale=0.6, frameon=False)
    try:
        with replaced(output) as file:
            figure.savefig(file, format=output.suffix[1:])
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error


def _doubling(most: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and ``most``."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def _check_numbers(name: str, numbers: Sequence[int] | None, *, least: int) -> None:
    if numbers is None:
        return
    if not numbers:
        raise UserError(f"{name} is empty; give at least one number, such as [{least}, {least + 1}]")
    if min(numbers) < least:
        raise UserError(f"{name} is {list(numbers)}; each must be at least {least}")
