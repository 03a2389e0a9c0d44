"""A tree of folders, one for each class: what most people have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fulgurite.console import note
from fulgurite.data.images import IMAGE_ENDINGS, find_images, is_hidden, list_folders, require
from fulgurite.data.labelled import LabelledDataModule
from fulgurite.data.samples import Labelled, Samples, Split
from fulgurite.errors import UserError, did_you_mean, name_list

# Folder names that mean a split, whatever their case.
_SPLITS: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


class ImageFolderDataModule(LabelledDataModule):
    """Load ``root/{train,val,test}/class/...``, or ``root/class/...`` in a seeded, stratified split.

    A class is a folder; images may lie at any depth within it. Files count as images by their ending, in any case. Hidden and
    system files are skipped, links are followed. One list of classes numbers every split: that of the training images.

    Args:
        root: the folder
        options: those of :class:`fulgurite.data.labelled.LabelledDataModule`

    Raises:
        UserError: if there are no such folders, or a split has a class that training does not know
    """

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root).expanduser()

    @property
    def source(self) -> str:
        """The root folder."""
        return str(self.root)

    def read_source(self) -> Labelled:
        """List the images of each split."""
        require(self.root)
        if not self.root.is_dir():
            raise UserError(f"{self.root} is a file; root is the folder that holds the classes")
        tops = list_folders(self.root)
        named = [folder for folder in tops if folder.name.lower() in _SPLITS]
        if not named:
            return self._labelled({"train": self.root})
        if others := [folder.name for folder in tops if folder not in named]:
            note("ignored", f"{name_list(others)} in {self.root}: beside folders of splits, they are no classes")
        roots = {_SPLITS[folder.name.lower()]: folder for folder in named}
        if len(roots) < len(named):
            raise UserError(f"{self.root} has two folders of one split: {name_list(folder.name for folder in named)}")
        return self._labelled({split: roots[split] for split in ("train", "val", "test") if split in roots})

    def _labelled(self, roots: dict[Split, Path]) -> Labelled:
        if "train" not in roots and not self.class_names:
            raise UserError(
                f"{self.root} has no training images, which say what the classes are: it has {name_list(roots)} only\n"
                "give class_names, or the checkpoint that they come from"
            )
        names = self.class_names or [folder.name for folder in list_folders(roots["train"])]
        if not names:
            raise UserError(f"no class folders in {roots['train']}: images of a class lie in a folder of its name")
        splits = {split: _samples(root, names) for split, root in roots.items()}
        for split, root in roots.items():
            if not len(splits[split]):
                raise UserError(
                    f"no images in the class folders of {root}; looked for files ending in {', '.join(IMAGE_ENDINGS)}"
                )
        train = splits.get("train")
        if train is not None and (empty := [name for label, name in enumerate(names) if not (train.labels == label).any()]):
            note("empty", f"no training images of {name_list(empty)}")
        return Labelled(tuple(names), splits)


def _samples(root: Path, names: Sequence[str]) -> Samples:
    files: list[str | Path] = []
    labels: list[int] = []
    numbers = {name: number for number, name in enumerate(names)}
    for folder in list_folders(root):
        if folder.name not in numbers:
            raise UserError(
                f"{folder}: no class of that name{did_you_mean(folder.name, names)}; the classes are {name_list(names)}"
            )
        found = find_images(folder)
        files += found
        labels += [numbers[folder.name]] * len(found)
    loose = sum(entry.is_file() and not is_hidden(entry.name) for entry in root.iterdir())
    if loose:
        note("ignored", f"{loose:,} files in {root} that lie in no class folder")
    return Samples(labels=torch.tensor(labels, dtype=torch.int64), files=files)
