from __future__ import annotations

from typing import Any

import numpy as np

from fulgurite.checks.findings import Findings
from fulgurite.checks.image_records import SplitRecords, record_type
from fulgurite.checks.label_checks import check_groups, check_labels, class_counts, listed_classes
from fulgurite.data import DataSpec


def spec(classes: int, **options: Any) -> DataSpec:
    return DataSpec(tuple(f"c{number}" for number in range(classes)), 1, 8, 8, (0.5,), (0.5,), **options)


def split(name: Any, labels: Any, of: DataSpec, groups: Any = None) -> SplitRecords:
    labels = np.array(labels)
    dataset = type("Named", (), {"path": lambda self, index: f"{name}{index}.png"})()
    return SplitRecords(
        name, dataset, of, np.zeros(len(labels), record_type(of)), labels, None if groups is None else np.array(groups)
    )


def checked(*splits: SplitRecords) -> Findings:
    findings = Findings()
    check_labels(findings, splits, splits[0].spec)
    return findings


def test_counts_leave_unknown_labels_out() -> None:
    assert class_counts(split("train", [0, 2, 2, -1, 3], spec(3))).tolist() == [1, 0, 2]


def test_few_classes_are_listed_in_order_and_of_many_the_ends() -> None:
    assert listed_classes(np.array([1, 3, 2])) == [0, 1, 2]
    assert listed_classes(np.arange(30)) == [29, 28, 27, 26, 25, 4, 3, 2, 1, 0]


def test_the_table_says_where_it_leaves_classes_out() -> None:
    data = spec(30)

    rows = checked(split("train", list(range(30)) * 3, data)).rows

    assert rows[1] == ("classes", "c0   train 3")
    assert rows[6] == ("", "... 20 more")
    assert rows[11] == ("", "c29  train 3")


def test_balance_is_of_the_classes_that_there_are() -> None:
    findings = checked(split("train", [0] * 25 + [1] * 2, spec(3)))

    assert ("balance", "12.5 : 1 in train, c0 (25) : c1 (2)") in findings.rows
    [warning] = findings.warnings
    assert "--data.balanced true" in warning.text
    assert "--model.class_weights balanced" in warning.text
    assert [fault.text for fault in findings.faults] == ["the train split has no image of c2"]


def test_a_class_without_images_does_not_count_in_the_balance() -> None:
    assert checked(split("train", [1, 1, 2, 2], spec(3))).facts["balance"] == 1


def test_balance_of_any_number_of_labels_is_one_of_the_loss() -> None:
    data = spec(2, multi_label=True)

    [warning] = checked(split("train", [[1, 0]] * 30 + [[1, 1]] * 2, data)).warnings

    assert "--data.balanced" not in warning.text
    assert "--model.class_weights balanced" in warning.text


def test_few_images_in_a_held_out_split_are_worth_a_look() -> None:
    data = spec(4)

    findings = checked(split("train", [0, 1, 2, 3] * 2, data), split("val", [0, 0, 1], data))

    assert [(finding.severity, finding.topic, finding.text) for finding in findings.findings] == [
        ("warning", "missing", "the val split has no image of c2, c3"),
        ("warning", "single", "the val split has one image only of c1"),
        ("warning", "few", "the val split has fewer images (3) than there are classes (4)"),
    ]


def test_each_pair_of_splits_is_looked_at_for_groups() -> None:
    data, findings = spec(2), Findings()

    check_groups(
        findings,
        [
            split("train", [0, 1, 0], data, [1, 2, 3]),
            split("val", [0, 1], data, [4, 2]),
            split("test", [0, 1], data, [3, 4]),
        ],
        data,
    )

    assert [fault.text.split(";")[0] for fault in findings.faults] == [
        "1 groups are in both train and val",
        "1 groups are in both train and test",
        "1 groups are in both val and test",
    ]
    assert findings.faults[0].lines()[1] == "  train1.png (train: c1)  =  val1.png (val: c1)"
