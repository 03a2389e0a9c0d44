"""Look for what is wrong with labels and splits: classes that lack images, imbalance, groups on two sides of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fulgurite.checks.findings import Findings
from fulgurite.checks.image_records import SplitRecords
from fulgurite.data.samples import Split
from fulgurite.data.spec import DataSpec
from fulgurite.errors import name_list

_UNBALANCED = 10  # times as many images of the largest class as of the smallest
_FEW_CLASSES = 20  # so many are all listed
_ENDS = 5  # otherwise so many of the largest, and of the smallest


def class_counts(split: SplitRecords) -> NDArray[np.int64]:
    """Return (K,) how many images of each class a split has."""
    classes = split.spec.num_classes
    if split.labels.ndim == 2:
        return np.asarray(split.labels.sum(0, dtype=np.int64))
    known = (split.labels >= 0) & (split.labels < classes)
    return np.bincount(split.labels[known], minlength=classes)


def listed_classes(counts: NDArray[np.int64]) -> list[int]:
    """Return which classes to list: all in their order, or where they are many the largest and the smallest."""
    if len(counts) <= _FEW_CLASSES:
        return list(range(len(counts)))
    order = np.argsort(-counts, kind="stable").tolist()
    return [*order[:_ENDS], *order[-_ENDS:]]


def check_labels(findings: Findings, splits: Sequence[SplitRecords], spec: DataSpec) -> None:
    """Count the images of each class in each split."""
    counts = {split.split: class_counts(split) for split in splits}
    names = spec.class_names
    findings.facts["images"] = {split.split: len(split) for split in splits}
    findings.facts["counts"] = {split: dict(zip(names, numbers.tolist(), strict=True)) for split, numbers in counts.items()}
    sizes = ", ".join(f"{split.split} {len(split):,}" for split in splits)
    findings.rows.append(("images", f"{sizes}; {spec.num_classes} {'labels' if spec.multi_label else 'classes'}"))
    _table(findings, counts, names)
    if spec.multi_label:
        _unlabelled(findings, splits)
    elif spec.num_classes == 1:
        findings.add("warning", "classes", f"there is one class only, {names[0]}: nothing to tell apart")
    for split in splits:
        _check_split(findings, split, counts[split.split], spec)
    if "train" in counts:
        _balance(findings, counts["train"], spec)


def check_groups(findings: Findings, splits: Sequence[SplitRecords], spec: DataSpec) -> None:
    """Look for groups on two sides of a split."""
    known = [(split, split.groups) for split in splits if split.groups is not None]
    if not known:
        return
    numbers = {split.split: len(np.unique(groups)) for split, groups in known}
    findings.facts["groups"] = numbers
    findings.rows.append(("groups", ", ".join(f"{split} {number:,}" for split, number in numbers.items())))
    for (one, of_one), (other, of_other) in combinations(known, 2):
        shared = np.intersect1d(of_one, of_other)
        # A group is shown by its first image on each side; its name is not known any more.
        items = [
            {"images": [one.item(int(np.argmax(of_one == group))), other.item(int(np.argmax(of_other == group)))]}
            for group in shared
        ]
        if items:
            text = f"{len(items):,} groups are in both {one.split} and {other.split}; of each an image on either side:"
            findings.add("fault", "groups", text, items)


def _table(findings: Findings, counts: Mapping[Split, NDArray[np.int64]], names: Sequence[str]) -> None:
    first = next(iter(counts.values()))
    listed = listed_classes(first)
    width = max(len(names[label]) for label in listed)
    for place, label in enumerate(listed):
        if place == _ENDS and len(listed) < len(names):
            findings.rows.append(("", f"... {len(names) - len(listed):,} more"))
        numbers = "  ".join(f"{split} {of_split[label]:,}" for split, of_split in counts.items())
        findings.rows.append(("" if place else "classes", f"{names[label]:<{width}}  {numbers}"))


def _unlabelled(findings: Findings, splits: Sequence[SplitRecords]) -> None:
    numbers = {split.split: int((split.labels.sum(1) == 0).sum()) for split in splits}
    labels = sum(int(split.labels.sum()) for split in splits) / max(1, sum(map(len, splits)))
    findings.facts["unlabelled"] = numbers
    findings.rows.append(("labels", f"{labels:.2f} on an image, on average"))
    findings.rows.append(("unlabelled", ", ".join(f"{split} {number:,}" for split, number in numbers.items())))


def _check_split(findings: Findings, split: SplitRecords, counts: NDArray[np.int64], spec: DataSpec) -> None:
    name, names = split.split, np.array(spec.class_names, dtype=object)
    if not len(split):
        findings.add("fault", "empty", f"the {name} split is empty")
        return
    if split.labels.ndim == 1:
        unknown = np.flatnonzero((split.labels < 0) | (split.labels >= spec.num_classes))
        if len(unknown):
            text = f"{len(unknown):,} labels of the {name} split are none of the {spec.num_classes} classes"
            findings.add("fault", "labels", text, [split.item(int(index)) for index in unknown])
    missing, lone = names[counts == 0].tolist(), names[counts == 1].tolist()
    if missing:
        severity = "fault" if name == "train" else "warning"
        findings.add(severity, "missing", f"the {name} split has no image of {name_list(missing)}")  # type: ignore[arg-type]
    if lone:
        findings.add("warning", "single", f"the {name} split has one image only of {name_list(lone)}")
    if len(split) < spec.num_classes:
        text = f"the {name} split has fewer images ({len(split):,}) than there are classes ({spec.num_classes:,})"
        findings.add("warning", "few", text)


def _balance(findings: Findings, counts: NDArray[np.int64], spec: DataSpec) -> None:
    if counts.max() == 0 or spec.num_classes == 1:
        return
    largest, smallest = int(counts.argmax()), int(np.where(counts > 0, counts, counts.max() + 1).argmin())
    ratio = float(counts[largest] / counts[smallest])
    findings.facts["balance"] = ratio
    names = spec.class_names
    text = f"{ratio:.1f} : 1 in train, {names[largest]} ({counts[largest]:,}) : {names[smallest]} ({counts[smallest]:,})"
    findings.rows.append(("balance", text))
    if ratio >= _UNBALANCED:
        draw = "" if spec.multi_label else "--data.balanced true draws the classes equally often, "
        advice = f"{draw}--model.class_weights balanced weighs them in the loss"
        findings.add("warning", "balance", f"the classes are far from balanced, {text}: {advice}")
