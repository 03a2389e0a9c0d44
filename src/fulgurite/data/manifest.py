"""A table that names each image and its label."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulgurite.console import note
from fulgurite.data.images import require
from fulgurite.data.labelled import LabelledDataModule
from fulgurite.data.samples import Labelled, Samples, Split
from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.tables import read_table

_SPLITS: dict[str, Split] = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


class ManifestDataModule(LabelledDataModule):
    """Load the images that a CSV, TSV or Parquet table names, with one label each or any number of them.

    Args:
        table: a row for each image, and a first row with the names of the columns
        root: the folder that relative paths start from; None takes that of the table
        path_column: names the image
        label_column: names its class, or its classes with ``label_separator`` between them
        split_column: train, val or test; None takes a column ``split`` if there is one
        group_column: what must not be on two sides of a split, such as the patient; None takes a column ``group`` if there
            is one
        multi_label: whether an image has any number of labels, an empty cell being none
        label_separator: between the labels of an image
        options: those of :class:`fulgurite.data.labelled.LabelledDataModule`

    Raises:
        UserError: if the table lacks a column, names files that do not exist or a label that training does not know, or
            contradicts itself
    """

    def __init__(
        self,
        table: Path,
        *,
        root: Path | None = None,
        path_column: str = "path",
        label_column: str = "label",
        split_column: str | None = None,
        group_column: str | None = None,
        multi_label: bool = False,
        label_separator: str = "|",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not label_separator:
            raise UserError("label_separator is empty; it is what stands between two labels, such as |")
        self.table = Path(table).expanduser()
        self.root = self.table.parent if root is None else Path(root).expanduser()
        self.path_column, self.label_column = path_column, label_column
        self.split_column, self.group_column = split_column, group_column
        self.multi_label = multi_label
        self.label_separator = label_separator

    @property
    def source(self) -> str:
        """The table's path."""
        return str(self.table)

    def read_source(self) -> Labelled:
        """List the images of each split."""
        require(self.table)
        columns = read_table(self.table, list_separator=self.label_separator)
        paths, labels = self._column(columns, self.path_column), self._column(columns, self.label_column)
        together = "\n".join(paths)
        if "./" in together or "//" in together:
            paths = [os.path.normpath(path) for path in paths]  # so that one file has one name; a second for a million
        splits = self._optional(columns, self.split_column, "split")
        groups = self._optional(columns, self.group_column, "group")
        if len(set(paths)) < len(paths):
            keep = self._without_repeats(paths, [column for column in (labels, splits, groups) if column])
            paths, labels, splits, groups = (
                [column[row] for row in keep if column] for column in (paths, labels, splits, groups)
            )
        files = self._files(paths)
        split_of = self._split_of(splits) if splits else np.zeros(len(paths), dtype=np.int64)
        class_names, numbers = self._labels(labels, split_of == 0)
        group_of = _group_of(groups) if groups else None
        if group_of is not None and splits:
            self._tell_leaks(group_of.numpy(), split_of, groups)
        every = Samples(labels=numbers, files=files, groups=group_of)
        order: tuple[Split, ...] = ("train", "val", "test")
        found = {name: every.take(split_of == number) for number, name in enumerate(order) if (split_of == number).any()}
        return Labelled(class_names, found)

    def _column(self, columns: dict[str, list[str]], name: str) -> list[str]:
        if name not in columns:
            is_one = len(columns) == 1 and ";" in next(iter(columns))
            semicolons = "\nare its cells separated by semicolons? allowed: commas, or tabs in a .tsv" if is_one else ""
            raise UserError(
                f"{self.table} has no column '{name}'{did_you_mean(name, columns)}; it has {name_list(columns)}{semicolons}"
            )
        return columns[name]

    def _optional(self, columns: dict[str, list[str]], name: str | None, default: str) -> list[str]:
        return columns.get(default, []) if name is None else self._column(columns, name)

    def _without_repeats(self, paths: list[str], rest: list[list[str]]) -> list[int]:
        """Return the first row of each image; a repetition must say the same."""
        first: dict[str, int] = {}
        for row, path in enumerate(paths):
            before, now = ([column[each] for column in rest] for each in (first.setdefault(path, row), row))
            if before != now:
                raise UserError(
                    f"{self.table} names {path} in two data rows that differ: "
                    f"{first[path] + 1} says {_quoted(before)}, {row + 1} says {_quoted(now)}"
                )
        note("ignored", f"{len(paths) - len(first):,} rows of {self.table} that repeat another")
        return list(first.values())

    def _files(self, paths: list[str]) -> list[str]:
        if "" in paths:
            raise UserError(f"{self.table}: the path in data row {paths.index('') + 1} is empty")
        root = str(self.root)
        # By hand, for speed; a Windows path may also start with a drive.
        files = [path if path[0] in "/\\" or path[1:2] == ":" else f"{root}{os.sep}{path}" for path in paths]
        missing = _missing_files(files)
        if missing and self.on_error == "raise":
            raise UserError(
                f"{len(missing):,} of {len(files):,} files that {self.table} names do not exist: {name_list(missing, 5)}\n"
                f"relative paths start from {root} (root); on_error: skip leaves them out"
            )
        return files

    def _tell_leaks(self, group_of: Any, split_of: Any, names: list[str]) -> None:
        """Say so if the table puts images of one group on two sides of a split."""
        pairs = np.unique(np.stack([group_of, split_of]), axis=1)[0]
        leaking = np.unique(pairs[1:][pairs[1:] == pairs[:-1]])
        if len(leaking):
            shown = name_list((names[int(np.argmax(group_of == group))] for group in leaking.tolist()), 5)
            note("leak", f"{len(leaking)} groups of {self.table} are in more than one split: {shown}")

    def _split_of(self, cells: list[str]) -> Any:
        numbers = {"train": 0, "val": 1, "test": 2}
        codes = {cell: _SPLITS.get(cell.strip().lower()) for cell in set(cells)}
        for cell, split in codes.items():
            if split is None:
                raise UserError(f"{self.table} names a split '{cell}'{did_you_mean(cell, _SPLITS)}; allowed: train, val, test")
        return np.array([numbers[str(codes[cell])] for cell in cells])

    def _labels(self, cells: list[str], train: Any) -> tuple[tuple[str, ...], Tensor]:
        """Return the class names, and each row's label or labels."""
        if not self.class_names and not train.any():
            raise UserError(f"{self.table} has no training rows, which say what the classes are: give class_names")
        if not self.multi_label:
            cells = self._stripped(cells)
            in_training = cells if train.all() else itertools.compress(cells, train)
            names = self.class_names or _sorted_names(set(in_training))
            numbers = self._numbers(set(cells), names)
            return tuple(names), torch.from_numpy(np.fromiter(map(numbers.__getitem__, cells), np.int64, len(cells)))
        sets = {cell: {part.strip() for part in cell.split(self.label_separator)} - {""} for cell in set(cells)}
        known = {cell for cell, of_train in zip(cells, train, strict=True) if of_train}
        names = self.class_names or _sorted_names(set().union(*(sets[cell] for cell in known)))
        if not names:
            raise UserError(f"no row of {self.table} has a label in its column '{self.label_column}'")
        numbers = self._numbers(set().union(*sets.values()), names)
        rows = {cell: torch.tensor([name in labels for name in names], dtype=torch.uint8) for cell, labels in sets.items()}
        return tuple(names), torch.stack([rows[cell] for cell in cells])

    def _stripped(self, cells: list[str]) -> list[str]:
        cells = list(map(str.strip, cells))
        if "" in cells:
            raise UserError(f"{self.table}: the label in data row {cells.index('') + 1} is empty; multi_label allows none")
        return cells

    def _numbers(self, found: set[str], names: Sequence[str]) -> dict[str, int]:
        numbers = {name: number for number, name in enumerate(names)}
        for label in sorted(found - numbers.keys()):
            raise UserError(
                f"{self.table} has a label '{label}' that no training image has{did_you_mean(label, names)}; "
                f"the classes are {name_list(names)}"
            )
        return numbers


def _group_of(cells: list[str]) -> Tensor:
    """Return the number of each row's group; a row without one is a group of its own."""
    names, numbers = np.unique(cells, return_inverse=True)
    alone = np.char.strip(np.asarray(cells)) == ""
    numbers[alone] = len(names) + np.arange(int(alone.sum()))
    return torch.from_numpy(numbers)


def _quoted(cells: list[str]) -> str:
    return ", ".join(f"'{cell}'" for cell in cells)


def _sorted_names(names: set[str]) -> list[str]:
    """Return names in their order; numbers by their value, so that 10 comes after 9."""
    return sorted(names, key=lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else sorted(names)


def _missing_files(files: list[str]) -> list[str]:
    """Return those that do not exist; a folder is listed once, which takes a tenth of the time of asking for each file."""
    listed: dict[str, set[str]] = {}
    candidates = []
    for file in files:
        folder, _, name = file.rpartition(os.sep)
        names = listed.get(folder)
        if names is None:
            names = listed[folder] = set(os.listdir(folder or os.sep)) if os.path.isdir(folder or os.sep) else set()  # noqa: PTH112, PTH208  # text
        if name not in names:
            candidates.append(file)
    # Another case, or a name normalised in another way; Path.exists raises for a name that is too long.
    return [file for file in candidates if not os.path.exists(file)]  # noqa: PTH110
