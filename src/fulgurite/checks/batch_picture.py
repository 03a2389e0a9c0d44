"""Draw training images as evaluation sees them and after augmentation, and how many images there are of each class."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from fulgurite.checks.findings import label_text, printable
from fulgurite.checks.image_records import SplitRecords
from fulgurite.checks.label_checks import class_counts, listed_classes
from fulgurite.data.augment import random_erase
from fulgurite.data.augmented import AugmentedDataModule
from fulgurite.data.seeding import seed_generators
from fulgurite.errors import UserError

_COLUMNS = 8
_DRAWS = 3  # rows of augmented images
_LONGEST = 18  # characters of a name, as wide as an image is drawn
_SHARP = 64  # pixels; smaller images are shown as squares, not blurred


def draw_images(datamodule: Any, train: SplitRecords, path: Path) -> bool:
    """Draw a few training images, below each what augmentation makes of it; return whether there are any.

    Args:
        datamodule: that the images are from
        train: the training split
        path: of the PNG file

    Raises:
        UserError: if the file cannot be written, or a transform of the user's fails
    """
    chosen = _choose(train)
    if not chosen:
        return False
    rows = [("evaluation", [train.seen(index) for index in chosen])]
    with _seeded():
        rows += [(f"training {draw}", _augmented(datamodule, train, chosen)) for draw in range(1, _DRAWS + 1)]
    figure = Figure(figsize=(1.5 * max(len(chosen), 3) + 0.5, 1.55 * len(rows) + 0.4), dpi=120, layout="constrained")
    grid = figure.subplots(len(rows), len(chosen), squeeze=False)
    for (name, images), axes in zip(rows, grid, strict=True):
        for axis, image in zip(axes, images, strict=True):
            pixels = image.movedim(0, -1).squeeze(-1).numpy()
            smooth = None if min(pixels.shape[:2]) >= _SHARP else "nearest"
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation=smooth)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0].set_ylabel(name)
    for axis, index in zip(grid[0], chosen, strict=True):
        axis.set_title(_short(label_text(train.item(index)["label"])), fontsize=9, parse_math=False)
    _save(figure, path)
    return True


def draw_counts(splits: Sequence[SplitRecords], path: Path) -> None:
    """Draw how many images of each class there are; of many classes the largest and the smallest.

    Raises:
        UserError: if the file cannot be written
    """
    counts = [class_counts(split) for split in splits]
    listed = listed_classes(counts[0])
    names = splits[0].spec.class_names
    figure = Figure(figsize=(7, 1.2 + 0.3 * len(listed)), dpi=120, layout="constrained")
    axis = figure.subplots()
    places, thick = np.arange(len(listed)), 0.8 / len(splits)
    for number, (split, of_split) in enumerate(zip(splits, counts, strict=True)):
        axis.barh(places + (number - (len(splits) - 1) / 2) * thick, of_split[listed], thick, label=split.split)
    axis.set_yticks(places, [_short(names[label]) for label in listed], parse_math=False)
    axis.invert_yaxis()
    several = len(listed) < len(names)
    axis.set_xlabel(f"images, of the {len(listed) // 2} largest and smallest of {len(names)} classes" if several else "images")
    figure.legend(loc="outside upper center", ncols=len(splits), frameon=False)
    _save(figure, path)


def _choose(train: SplitRecords) -> list[int]:
    """Return indices of images of as many classes as possible, by class."""
    generator = np.random.default_rng(0)
    indices = generator.permutation(np.flatnonzero(train.records["readable"]))
    if train.labels.ndim == 2:
        return sorted(indices[:_COLUMNS].tolist())
    order = indices[np.argsort(train.labels[indices], kind="stable")]
    labels = train.labels[order]
    rank = np.arange(len(order)) - np.searchsorted(labels, labels)  # of an image within its class
    chosen: NDArray[Any] = order[np.lexsort((generator.random(len(order)), rank))[:_COLUMNS]]
    return [int(index) for index in chosen[np.argsort(train.labels[chosen], kind="stable")]]


def _augmented(datamodule: Any, train: SplitRecords, chosen: Sequence[int]) -> list[Tensor]:
    images = torch.stack([train.dataset[index][0] for index in chosen])
    if isinstance(datamodule, AugmentedDataModule) and datamodule.augmentation.erase:
        images = random_erase(images, datamodule.augmentation.erase, fill=datamodule.spec.mean)
    return list(images)


@contextmanager
def _seeded() -> Iterator[None]:
    """Make the same draws each time, and leave the global generators as they were."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_generators(0)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."


def _save(figure: Figure, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            # A class name in a script that matplotlib's font lacks is drawn as boxes.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
