"""What all image data modules share: pinned, persistent-worker loaders over three splits."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from fulgurite.console import note
from fulgurite.data.loader import EpochSampler, ResumableLoader
from fulgurite.data.samples import Split
from fulgurite.data.shared import release_free_memory
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from fulgurite.machine import usable_cores
from fulgurite.recorded import Recorded


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """Hold a split in memory and give whole batches of it.

    Args:
        images: (N, C, H, W) uint8
        labels: (N,) int64
        augment: maps (B, C, H, W) uint8 to the same, or None
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> None:
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) uint8 and labels (B,) int64."""
        chosen = torch.tensor(indices)  # once, not for each of both
        images, labels = self.images[chosen], self.labels[chosen]
        return (self.augment(images) if self.augment else images), labels


class ImageDataModule(Recorded, LightningDataModule, ABC):
    """Load (images, labels): uint8 (B, C, H, W) and int64 (B,). Subclasses say what the data is and give its splits.

    Args:
        batch_size: per device
        num_workers: processes that load; None chooses from the cores really usable
        prefetch_factor: batches each worker prepares ahead
        pin_memory: None pins when the trainer's device is a CUDA device, where it speeds up the transfer
        balanced: draw the training images so that each class comes equally often; an epoch keeps its length, so that images
            of frequent classes are left out and those of rare ones repeated

    Raises:
        UserError: if a number makes no sense
    """

    in_memory = False  # whether a sample costs too little to be worth sending between processes

    def __init__(
        self,
        *,
        batch_size: int = 64,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        for name, number in (("batch_size", batch_size), ("prefetch_factor", prefetch_factor)):
            if number < 1:
                raise UserError(f"{name} is {number}; it must be at least 1")
        if num_workers is not None and num_workers < 0:
            raise UserError(f"num_workers is {num_workers}; it must be 0 or more, or null to choose by itself")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.balanced = balanced

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that there are."""
        return ("train", "val", "test")

    @property
    @abstractmethod
    def spec(self) -> DataSpec:
        """What the data is; known without loading it all."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any]:
        """Return a split as a map-style data set of (image (C, H, W) uint8, label)."""

    def fingerprint(self) -> str:
        """Return a short hash of what the data is: the spec, the splits' sizes, and what is in memory of labels and images."""
        digest = hashlib.sha256(repr(self.spec).encode())
        for split in self.splits:
            dataset: Any = self.dataset(split)
            digest.update(str(len(dataset)).encode())
            for part in ("labels", "images"):
                if isinstance(tensor := getattr(dataset, part, None), Tensor):
                    digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def train_dataloader(self) -> ResumableLoader:
        """Return the loader over the training split: shuffled, a short last batch dropped."""
        return self._loader("train")

    def val_dataloader(self) -> ResumableLoader:
        """Return the loader over the validation split: in order, every sample once."""
        return self._loader("val")

    def test_dataloader(self) -> ResumableLoader:
        """Return the loader over the test split: in order, every sample once."""
        return self._loader("test")

    def _loader(self, split: Split) -> ResumableLoader:
        dataset: Any = self.dataset(split)
        train = split == "train"
        trainer: Any = self.trainer
        processes = trainer.world_size if trainer else 1
        if len(dataset) < processes:
            few = f"has {len(dataset)} samples for {processes} processes" if len(dataset) else "is empty"
            raise UserError(f"the {split} split of {type(self).__name__} {few}")
        sampler = EpochSampler(
            len(dataset),
            shuffle=train and not (trainer and trainer.overfit_batches),
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),  # what lightning.seed_everything was given
            rank=trainer.global_rank if trainer else 0,
            world_size=processes,
            equal_shares=train,  # evaluation counts each sample once, also on unequal shares
            weights=_class_weights(dataset.labels) if train and self.balanced else None,
        )
        workers, why = self._workers()
        pins, why_pins = self._pins()
        if workers:
            release_free_memory()
        if train:
            ahead = f", {self.prefetch_factor} batches ahead each" if workers else ""
            note("workers", f"{workers} per process ({why}){ahead}, batches {'' if pins else 'not '}pinned ({why_pins})")
        return ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=self.prefetch_factor if workers else None,
            pin_memory=pins,
            # BatchNorm cannot train on a last batch of one sample; a split smaller than one batch is used as it is.
            drop_last=train and len(sampler) >= self.batch_size,
        )

    def _workers(self) -> tuple[int, str]:
        """Return how many processes load, and why."""
        cores = usable_cores()
        processes = self.trainer.world_size // self.trainer.num_nodes if self.trainer else 1
        most = max(cores.number // processes, 1)
        if self.num_workers is not None:
            workers = min(self.num_workers, most)
            reason = "as configured" if workers == self.num_workers else f"not {self.num_workers}: {cores.reason}"
        elif self.in_memory:
            workers, reason = 0, "the images are in memory"
        else:
            workers, reason = most, cores.reason
        return workers, reason

    def _pins(self) -> tuple[bool, str]:
        """Return whether batches are put into memory that a GPU can fetch by itself, and why."""
        if self.pin_memory is not None:
            return self.pin_memory, "as configured"
        on_gpu = self.trainer is not None and torch.device(self.trainer.strategy.root_device).type == "cuda"
        return on_gpu, "for the GPU" if on_gpu else "no GPU"


def _class_weights(labels: Tensor) -> Tensor:
    """Return a weight (N,) for each sample with which all classes that occur weigh the same."""
    if labels.ndim > 1:
        raise UserError(
            "balanced needs one label for each image; here an image has any number of them\n"
            "class_weights of the task, a list, weighs the classes"
        )
    return 1 / labels.bincount()[labels]
