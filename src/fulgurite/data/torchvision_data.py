"""The classification data sets that torchvision knows by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torchvision import datasets
from torchvision.datasets import MNIST, DatasetFolder

from fulgurite.console import note
from fulgurite.data.decode import to_spec
from fulgurite.data.labelled import LabelledDataModule
from fulgurite.data.samples import Labelled, Samples, Split
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.machine import available_memory

# What the data sets call their splits, the usual name first.
_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "trainval", "train-standard", "train_noval"),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}


class TorchvisionDataModule(LabelledDataModule):
    """Load a data set of ``torchvision.datasets`` by its name: CIFAR10, MNIST, FashionMNIST, SVHN, Food101, FakeData, ...

    The official splits are kept; what is missing is held out of the training images. Data sets of image files are read as any
    other files, the rest is held in memory, scaled to ``size``.

    Args:
        name: of the class
        root: the folder that holds the data sets, in torchvision's layout
        download: fetch what is not there yet
        arguments: further ones of the class, such as ``{split: letters}`` of EMNIST
        options: those of :class:`fulgurite.data.labelled.LabelledDataModule`

    Raises:
        UserError: if there is no such class, it is no classification data set, or its files are not there
    """

    def __init__(
        self,
        name: str,
        *,
        root: Path = Path("data"),
        download: bool = False,
        arguments: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.name = name
        self.root = Path(root).expanduser()
        self.download = download
        self.arguments = arguments or {}
        self._class = _find(name)

    @property
    def source(self) -> str:
        """The name of the data set."""
        return str(self.name)

    def prepare_data(self) -> None:
        """Download, in one process of each machine; Lightning calls it."""
        if self.download:
            self._official(download=True)

    def read_source(self) -> Labelled:
        """List or load the samples of each official split."""
        found = self._official(download=self.download)
        names = self.class_names or _class_names(found["train"])
        return Labelled(tuple(names), {split: self._samples(dataset, len(names)) for split, dataset in found.items()})

    def _official(self, *, download: bool) -> dict[Split, Any]:
        """Return the data sets of the splits that this one comes with; what has none is all for training."""
        known = inspect.signature(self._class.__init__).parameters
        options = dict(self.arguments)
        if "root" in known:
            options["root"] = str(self.root)
        if "download" in known:
            options["download"] = download
        if "loader" in known or issubclass(self._class, DatasetFolder):
            options["loader"] = _path_itself
        with self._explained():
            if "train" in known or issubclass(self._class, MNIST):
                return {split: self._class(**options, train=split == "train") for split in ("train", "test")}
            if "split" not in known or "split" in self.arguments:
                return {"train": self._class(**options)}
            made = {split: self._first(names, options) for split, names in _NAMES.items()}
        if made["train"] is None:
            raise UserError(f"{self.name} has no training split that this module knows: give one in arguments, as split")
        return {split: dataset for split, dataset in made.items() if dataset is not None}

    def _first(self, names: tuple[str, ...], options: dict[str, Any]) -> Any:
        for name in names:
            try:
                return self._class(**options, split=name)
            except ValueError as error:
                if "argument split" not in str(error):  # torchvision's check of a name, before it looks for any file
                    raise
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except URLError as error:
            raise UserError(f"{self.name} cannot be downloaded: {error.reason}") from error
        except (RuntimeError, FileNotFoundError, OSError, TypeError, ValueError) as error:
            if isinstance(error, TypeError | ValueError):
                advice = f"\narguments is {self.arguments}; null leaves them out" if self.arguments else ""
            elif self.download:
                advice = "\ndownloading needs a network; or put the files there by hand"
            else:
                advice = "\n--data.download true fetches it, where torchvision knows from where"
            raise UserError(f"{self.name} in {self.root}: {' '.join(str(error).split())}{advice}") from error

    def _samples(self, dataset: Any, classes: int) -> Samples:
        first, label = dataset[0]
        try:
            index(label)
        except TypeError as error:
            raise UserError(f"{self.name} gives {type(label).__name__} as a label: it is no classification data set") from error
        if isinstance(first, str | Path):
            pairs = [dataset[place] for place in range(len(dataset))]
            return Samples(labels=torch.tensor([int(label) for _, label in pairs]), files=[str(path) for path, _ in pairs])
        needed, free = len(dataset) * self.channels * self.height * self.width, available_memory()
        if free is not None and needed > 0.8 * free:
            raise UserError(
                f"{self.name} at {self.height} x {self.width} takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free: "
                "a smaller size fits"
            )
        # The classes do not matter for the pixels, and are known only when all labels are.
        fit = DataSpec(("any",), self.channels, self.height, self.width, (0.5,) * self.channels, (0.5,) * self.channels)
        pixels = torch.empty(len(dataset), self.channels, self.height, self.width, dtype=torch.uint8)
        labels = torch.empty(len(dataset), dtype=torch.int64)
        for place in range(len(dataset)):
            image, labels[place] = dataset[place]
            pixels[place] = to_spec(image, fit)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise UserError(f"{self.name} has labels from {labels.min()} to {labels.max()} and {classes} class names")
        return Samples(labels=labels, pixels=pixels)


def _find(name: str) -> Any:
    public = [each for each in datasets.__all__ if isinstance(getattr(datasets, each), type)]
    if name not in public:
        raise UserError(f"torchvision.datasets has no '{name}'{did_you_mean(name, public)}; it has {name_list(public)}")
    return getattr(datasets, name)


def _path_itself(path: Any) -> str:
    """Stand in for a loader of images: the files are read by this project."""
    return str(path)


def _class_names(dataset: Any) -> list[str]:
    names = getattr(dataset, "classes", None)
    if names:
        return [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]
    labels = {int(dataset[place][1]) for place in range(len(dataset))}
    note("classes", f"named by their numbers, 0 to {max(labels)}: the data set has no names for them")
    return [str(number) for number in range(max(labels) + 1)]
