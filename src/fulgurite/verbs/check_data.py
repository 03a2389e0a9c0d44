"""Look for what is wrong with a data set before a network is trained on it: the verb behind ``fulgurite check-data``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from fulgurite.checks import image_checks, label_checks
from fulgurite.checks.duplicates import MAX_NEAR
from fulgurite.checks.findings import Findings
from fulgurite.checks.image_records import SplitRecords, read_split
from fulgurite.console import note
from fulgurite.data.augmented import AugmentedDataModule
from fulgurite.data.base import ImageDataModule
from fulgurite.errors import UserError
from fulgurite.machine import usable_cores

_WORTH_A_WORKER = 500  # images; a worker takes a second to start


def check_data(
    datamodule: ImageDataModule,
    *,
    output: Path = Path("data_check"),
    json: bool = False,
    near: int = 4,
    num_workers: int | None = None,
) -> Findings:
    """Look through all images and labels of every split, print what was found, and write it to a folder.

    Each image is read and decoded once. The folder gets ``report.json``, ``images.png`` and ``classes.png``.

    Args:
        datamodule: gives the splits
        output: the folder of the report and the pictures
        json: print the report as JSON, and nothing else, on the standard output
        near: bits of a 64-bit hash of its look in which an image may differ from a near duplicate; 0 looks for exact ones only
        num_workers: processes that decode images; None chooses from the cores really usable

    Returns:
        the findings; the caller decides what faults come to

    Raises:
        UserError: if a number makes no sense, the folder cannot be written to, or the data module has no splits to give
    """
    output = Path(output)
    if not 0 <= near <= MAX_NEAR:
        raise UserError(f"near is {near}; allowed: 0 (exact duplicates only) to {MAX_NEAR} bits")
    if num_workers is not None and num_workers < 0:
        raise UserError(f"num_workers is {num_workers}; it must be 0 or more, or null to choose by itself")
    _make_folder(output)
    if isinstance(datamodule, AugmentedDataModule):
        datamodule = datamodule.skipping()  # a file that a table names and that is not there is a finding, too
    with redirect_stdout(sys.stderr) if json else nullcontext():  # data modules tell what they choose
        splits = _read(datamodule, num_workers, progress=not json)
        findings = _judge(splits, datamodule, near)
        written = _draw(datamodule, splits, output)
    report = output / "report.json"
    findings.write(report)
    if json:
        print(findings.to_json())
        return findings
    print(findings.to_text())
    faults, warned = len(findings.faults), len(findings.warnings)
    note("found", f"{faults} faults, {warned} warnings" if faults or warned else "nothing wrong")
    note("written", ", ".join(map(str, [report, *written])))
    return findings


def _read(datamodule: ImageDataModule, num_workers: int | None, *, progress: bool) -> list[SplitRecords]:
    datamodule.prepare_data()
    datasets: list[Any] = [datamodule.dataset(split) for split in datamodule.splits]
    images = sum(map(len, datasets))
    cores = usable_cores()
    wanted = images // _WORTH_A_WORKER if num_workers is None else num_workers
    workers = min(wanted, cores.number)
    reason = cores.reason if workers < wanted else "as configured" if num_workers is not None else f"for {images:,} images"
    note("workers", f"{workers} ({reason})")
    began = time.monotonic()
    splits = [read_split(datamodule, split, workers=workers, progress=progress) for split in datamodule.splits]
    note("read", f"{images:,} images in {time.monotonic() - began:.0f} s")
    return splits


def _judge(splits: list[SplitRecords], datamodule: ImageDataModule, near: int) -> Findings:
    findings, spec = Findings(), datamodule.spec
    label_checks.check_labels(findings, splits, spec)
    label_checks.check_groups(findings, splits, spec)
    image_checks.check_formats(findings, splits, spec)
    image_checks.check_sizes(findings, splits, spec)
    image_checks.check_normalisation(findings, splits, spec)
    image_checks.check_copies(findings, splits, near=near)
    image_checks.check_broken(findings, splits)
    return findings


def _draw(datamodule: ImageDataModule, splits: list[SplitRecords], output: Path) -> list[Path]:
    """Draw the pictures and return where they are."""
    from fulgurite.checks.batch_picture import draw_counts, draw_images  # Matplotlib takes half a second that others save

    images, classes = output / "images.png", output / "classes.png"
    written = [images for split in splits if split.split == "train" and draw_images(datamodule, split, images)]
    draw_counts(splits, classes)
    return [*written, classes]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {folder}: no permission to write in this folder")
