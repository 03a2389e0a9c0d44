from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulgurite.checks.findings import Finding, Findings, label_text, printable
from fulgurite.errors import UserError


def image(path: str, label: str | list[str] = "cat") -> dict[str, object]:
    return {"split": "train", "path": path, "label": label}


def test_text_has_rows_then_warnings_then_faults() -> None:
    findings = Findings(rows=[("images", "train 3")])
    findings.add("fault", "broken", "one image cannot be read", [image("a.png") | {"reason": "a.png: truncated"}])
    findings.add("warning", "blank", "one image shows nothing", [image("b.png")])

    assert findings.to_text().splitlines() == [
        "images      train 3",
        "warning: one image shows nothing",
        "  b.png (train: cat)",
        "fault: one image cannot be read",
        "  a.png: truncated",
    ]


def test_sets_of_images_are_one_line_and_long_ones_are_cut() -> None:
    pair = {"images": [image("a.png"), image("b.png", "dog")]}
    many = {"images": [image(f"{number}.png") for number in range(7)]}

    lines = Finding("fault", "leak", "sets", [pair, many]).lines()

    assert lines[1] == "  a.png (train: cat)  =  b.png (train: dog)"
    assert lines[2].endswith("4.png (train: cat)  =  ... and 2 more")


def test_json_has_whole_lists_and_ascii_only(tmp_path: Path) -> None:
    findings = Findings(facts={"broken": 9})
    findings.add("fault", "broken", "nine", [image(f"{number}\udcff.png") for number in range(9)])

    findings.write(tmp_path / "report.json")

    text = (tmp_path / "report.json").read_bytes().decode("ascii")
    document = json.loads(text)
    assert document["broken"] == 9
    assert len(document["faults"][0]["items"]) == 9
    assert document["warnings"] == []


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*missing"):
        Findings().write(tmp_path / "missing" / "report.json")


def test_odd_characters_are_escaped() -> None:
    assert printable("a\n\x1b[31m\udcff 猫") == "a\\n\\x1b[31m\\udcff 猫"


def test_labels_as_text() -> None:
    assert [label_text(label) for label in ("cat", ["a", "b"], [])] == ["cat", "a|b", "no label"]
