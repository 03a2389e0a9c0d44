"""Classification tasks of a few weights, and generated data for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from fulgurite import Trainer
from fulgurite.data import DataSpec, ImageDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask

SPEC = DataSpec(class_names=("ant", "bee", "cat"), channels=1, height=4, width=4, mean=(0.5,), std=(0.25,))
SEVERAL = replace(SPEC, multi_label=True)
NETWORK = partial(SmallCNN, width=2, depth=1)


def linear(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_channels, num_classes))


class Lights(ImageDataModule):
    """Show any of three lights, which are the colour channels."""

    in_memory = True

    @property
    def spec(self) -> DataSpec:
        return DataSpec(("red", "green", "blue"), 3, 4, 4, mean=(0.5,) * 3, std=(0.25,) * 3, multi_label=True)

    def dataset(self, split: Split) -> ArrayDataset:
        generator = torch.Generator().manual_seed(["train", "val", "test"].index(split))
        number = 256 if split == "train" else 64
        labels = torch.randint(0, 2, (number, 3), generator=generator, dtype=torch.uint8)
        noise = torch.randint(0, 100, (number, 3, 4, 4), generator=generator, dtype=torch.uint8)
        return ArrayDataset(noise + 100 * labels[:, :, None, None], labels)


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return ClassificationTask(**{"network": NETWORK, "optimizer": partial(SGD, lr=0.1), "spec": SPEC, **options})


def data(number: int, classes: int = 3) -> ArrayDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (number, 1, 4, 4), generator=generator, dtype=torch.uint8)
    # Far from balanced, so that macro and micro accuracy differ.
    return ArrayDataset(images, torch.arange(number) % 5 % classes)


def several(number: int) -> ArrayDataset:
    return ArrayDataset(data(number).images, (torch.arange(number)[:, None] % torch.tensor([2, 3, 5]) == 0).to(torch.uint8))


def loader(number: int, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(data(number), batch_size=batch_size, collate_fn=lambda batch: batch)


def quiet(**options: Any) -> Trainer:
    return Trainer(**{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options})
