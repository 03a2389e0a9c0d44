"""Classify image files: the loader and the table behind ``fulgurite predict``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from fulgurite.callbacks.predictions import PredictionWriter
from fulgurite.data.images import ImageFiles, list_images
from fulgurite.errors import UserError
from fulgurite.machine import usable_cores


def prepare_prediction(
    trainer: Any, task: Any, images: Path, output: Path, *, top_k: int, batch_size: int, num_workers: int | None
) -> tuple[DataLoader[Any], PredictionWriter]:
    """Make what a Trainer needs to classify every image under a folder once, over all its processes.

    Returns:
        a loader of (image (B, C, H, W) uint8, index (B,) int64) and the callback that writes the table

    Raises:
        UserError: if there is no image, the table cannot be written, or a number makes no sense
    """
    if not 1 <= batch_size <= sys.maxsize:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1, and a number of samples that exists")
    if num_workers is not None and num_workers < 0:
        raise UserError(f"num_workers is {num_workers}; it must be 0 or more, or null to choose by itself")
    paths = list_images(images)
    names = [str(path) for path in paths]
    writer = PredictionWriter(output, paths=names, class_names=task.spec.class_names, top_k=top_k)
    cores = max(usable_cores().number // (trainer.world_size // trainer.num_nodes), 1)
    # A worker costs a second to start, which one batch does not earn back.
    workers = min(cores, len(paths) // batch_size) if num_workers is None else min(num_workers, cores)
    # A process without a share would leave the others waiting for it; the table counts an image once all the same.
    mine = range(trainer.global_rank, len(paths), trainer.world_size) or range(1)
    # A plain DataLoader, because Lightning takes it apart and makes another one from its arguments when it predicts.
    return DataLoader(ImageFiles(paths, task.spec), batch_size=batch_size, sampler=mine, num_workers=workers), writer
