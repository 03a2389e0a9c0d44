"""What the modules over labelled images share: size and normalisation, splits, classes, and a cache."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fulgurite.console import note
from fulgurite.data.augment import BatchAugment
from fulgurite.data.augmented import AugmentedDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.cache import CacheKind, build_cache
from fulgurite.data.files import FileDataset
from fulgurite.data.paths import Paths
from fulgurite.data.samples import Labelled, Samples, Split
from fulgurite.data.spec import MAX_PIXELS, DataSpec, height_and_width
from fulgurite.data.splits import Holdout
from fulgurite.errors import UserError, name_list

# Of ImageNet, in RGB and in grey: right for networks trained on it, near enough for photographs.
_MEAN = {1: (0.449,), 3: (0.485, 0.456, 0.406)}
_STD = {1: (0.226,), 3: (0.229, 0.224, 0.225)}
_DEFAULT_SPLIT = Holdout()
_CACHED = 8 / 7  # a cached training image is so much larger than what the network sees: 256 pixels for 224


class LabelledDataModule(AugmentedDataModule):
    """Load labelled images from a source; a subclass says what it holds.

    Args:
        size: of what the network sees, in pixels: one number, or height and width
        channels: 3 for RGB, 1 for grey
        mean: per channel, of images scaled to 0..1; None takes ImageNet's
        std: per channel, of images scaled to 0..1; None takes ImageNet's
        split: how to make the splits that the source does not come with
        class_names: in the order of the labels; None takes those of the training images, or of the checkpoint
        background: RGB colour, 0..255 each, that shows through where an image is transparent; None is white
        max_pixels: refuse to decode an image of more
        cache: keep decoded images in memory or in a file; pays where decoding is what a run waits for
        cache_dir: where the files of a cache are kept
        options: those of :class:`fulgurite.data.augmented.AugmentedDataModule`

    Raises:
        UserError: if a number makes no sense
    """

    def __init__(
        self,
        *,
        size: int | list[int] = 224,
        channels: Literal[1, 3] = 3,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        split: Holdout = _DEFAULT_SPLIT,
        class_names: list[str] | None = None,
        background: list[int] | None = None,
        max_pixels: int = MAX_PIXELS,
        cache: CacheKind = "none",
        cache_dir: Path = Path(".cache/images"),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.height, self.width = height_and_width(size)
        self.channels = channels
        self.mean = mean or _MEAN[channels]
        self.std = std or _STD[channels]
        self.holdout = split
        self.class_names = class_names
        self.background = background or (255, 255, 255)
        self.max_pixels = max_pixels
        self.cache = cache
        self.cache_dir = Path(cache_dir).expanduser()

    @property
    @abstractmethod
    def source(self) -> str:
        """Names where the images are, in messages."""

    @abstractmethod
    def read_source(self) -> Labelled:
        """List the samples, without reading the images.

        Raises:
            UserError: if that cannot be done
        """

    @cached_property
    def labelled(self) -> Labelled:
        """The classes and the samples of each split."""
        found = self.read_source()
        splits = self.holdout.complete(found.splits, self.source)
        # The names as bytes from here on: a list of a million would stay in memory, and in that of each worker.
        return Labelled(found.class_names, {split: samples.packed() for split, samples in splits.items()})

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that there are."""
        return tuple(self.labelled.splits)

    @property
    def in_memory(self) -> bool:  # type: ignore[override]  # a constant in simpler modules
        """Whether a sample costs too little to be worth sending between processes."""
        return self.augmentation.policy is None and all(one.pixels is not None for one in self.labelled.splits.values())

    @cached_property
    def spec(self) -> DataSpec:
        """What the data is; the classes and their numbers are those of the training split."""
        names, train = self.labelled.class_names, self.labelled.splits.get("train")
        counts = None if train is None else tuple(_count(train.labels, len(names)).tolist())
        return DataSpec(
            class_names=names,
            channels=self.channels,
            height=self.height,
            width=self.width,
            mean=tuple(self.mean),
            std=tuple(self.std),
            multi_label=any(samples.labels.ndim == 2 for samples in self.labelled.splits.values()),
            class_counts=counts,
            background=tuple(self.background),
            max_pixels=self.max_pixels,
        )

    def samples(self, split: Split) -> Samples:
        """Return what a split consists of.

        Raises:
            UserError: if there is no such split
        """
        if split not in self.labelled.splits:
            advice = "; split.test_fraction makes one of training images" if split == "test" else ""
            raise UserError(f"{self.source} has no {split} split, only {name_list(self.splits)}{advice}")
        return self.labelled.splits[split]

    def make_dataset(self, split: Split) -> ArrayDataset | FileDataset:
        """Make the data set of a split; its cache is filled in ``setup``."""
        samples, train = self.samples(split), split == "train"
        if samples.pixels is not None:
            return ArrayDataset(samples.pixels, samples.labels, BatchAugment(self.augmentation) if train else None)
        if not isinstance(samples.files, Paths):
            raise TypeError("a split holds pixels or files")
        augment = self.augmentation if train else None
        return FileDataset(samples.files, samples.labels, self.spec, augmentation=augment, skipped=self.skipped(split))

    def setup(self, stage: str) -> None:
        """Fill the caches that this stage needs; Lightning calls it."""
        if self.cache == "none":
            return
        needed: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
        for split in needed[stage]:
            dataset = self.dataset(split)
            if isinstance(dataset, ArrayDataset):
                note("cache", f"none for the {split} split: its images are in memory")
            elif dataset.cache is None:
                larger = round(_CACHED * max(self.height, self.width))
                dataset.cache = build_cache(
                    self.cache,
                    dataset.paths,
                    self.spec,
                    split=split,
                    shorter=larger if split == "train" else None,
                    folder=self.cache_dir,
                    workers=self._workers()[0],
                    skip=self.on_error == "skip",
                    processes=self.trainer.world_size // self.trainer.num_nodes if self.trainer else 1,
                )

    def fingerprint(self) -> str:
        """Return a short hash of what the data is: the spec, and each sample's path and label."""
        digest = hashlib.sha256(repr(self.spec).encode())
        for split in self.splits:
            dataset = self.dataset(split)
            digest.update(dataset.labels.numpy().tobytes())
            digest.update(dataset.paths.digest() if isinstance(dataset, FileDataset) else dataset.images.numpy().tobytes())
        return digest.hexdigest()[:16]


def _count(labels: Tensor, classes: int) -> Tensor:
    return labels.sum(0, dtype=torch.int64) if labels.ndim == 2 else labels.bincount(minlength=classes)
