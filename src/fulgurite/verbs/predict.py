"""Classify image files: the loader and the table behind ``fulgurite predict``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fulgurite.callbacks.predictions import PredictionWriter
from fulgurite.console import note
from fulgurite.data.broken import Broken, OnError, Skipped
from fulgurite.data.decode import decode_image
from fulgurite.data.files import FileDataset
from fulgurite.data.images import list_images
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError, name_list
from fulgurite.machine import usable_cores

_MOST_REASONS = 5


def prepare_prediction(
    trainer: Any,
    task: Any,
    images: Path,
    output: Path,
    *,
    top_k: int,
    batch_size: int,
    num_workers: int | None,
    on_error: OnError = "raise",
) -> tuple[DataLoader[Any], PredictionWriter]:
    """Make what a Trainer needs to classify every image under a folder once, over all its processes.

    Returns:
        a loader of (image (B, C, H, W) uint8, index (B,) int64) and the callback that writes the table; the index of an image
        that could not be read and is to be skipped is -1 minus what it would be

    Raises:
        UserError: if there is no image, the table cannot be written, or a number makes no sense
    """
    if not 1 <= batch_size <= sys.maxsize:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1, and a number of samples that exists")
    if num_workers is not None and num_workers < 0:
        raise UserError(f"num_workers is {num_workers}; it must be 0 or more, or null to choose by itself")
    paths = list_images(images)
    names = [str(path) for path in paths]
    writer = PredictionWriter(
        output, paths=names, class_names=task.spec.class_names, top_k=top_k, multi_label=task.spec.multi_label
    )
    cores = max(usable_cores().number // (trainer.world_size // trainer.num_nodes), 1)
    # A worker costs a second to start, which one batch does not earn back.
    workers = min(cores, len(paths) // batch_size) if num_workers is None else min(num_workers, cores)
    # A process without a share would leave the others waiting for it; the table counts an image once all the same.
    mine = range(trainer.global_rank, len(paths), trainer.world_size) or range(1)
    # A plain DataLoader, because Lightning takes it apart and makes another one from its arguments when it predicts.
    skipped = Skipped("predict", most=1.0) if on_error == "skip" else None
    dataset = FileDataset(Paths(paths), torch.arange(len(paths)), task.spec, skipped=skipped)
    collate = partial(_collate, dataset)
    return DataLoader(dataset, batch_size=batch_size, sampler=mine, num_workers=workers, collate_fn=collate), writer


def tell_unread(writer: PredictionWriter, task: Any) -> None:
    """List the images that a prediction has skipped, with what is wrong with the first of them.

    Raises:
        UserError: if there was no other
    """
    unread = sorted(set(writer.unread))
    if not unread:
        return
    reasons = [_reason(writer.paths[index], task.spec) for index in unread[:_MOST_REASONS]]
    listing = name_list([*reasons, *(writer.paths[index] for index in unread[_MOST_REASONS:])], limit=_MOST_REASONS)
    if len(unread) == len(writer.paths):
        raise UserError(f"none of the {len(unread)} images can be read: {listing}")
    note("skipped", f"{len(unread)} of {len(writer.paths)} images cannot be read: {listing}")


def _collate(dataset: FileDataset, samples: Sequence[tuple[Tensor, Tensor] | Broken]) -> Any:
    """Make a batch in which a black image keeps the place of one that cannot be read."""
    spec = dataset.spec
    black = torch.zeros(spec.channels, spec.height, spec.width, dtype=torch.uint8)
    return dataset.collate([(black, torch.tensor(-1 - one.index)) if isinstance(one, Broken) else one for one in samples])


def _reason(path: str, spec: DataSpec) -> str:
    try:
        decode_image(path, spec)
    except UserError as error:
        return str(error)
    return path  # mended meanwhile
