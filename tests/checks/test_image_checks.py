from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import ExifTags, Image

from fulgurite.checks.findings import Findings
from fulgurite.checks.image_checks import check_copies, check_formats, check_normalisation, check_sizes
from fulgurite.checks.image_records import SplitRecords, read_split
from fulgurite.data import ImageFolderDataModule
from tests.images import save_image, save_splits


def read(root: Path, **options: Any) -> list[SplitRecords]:
    module = ImageFolderDataModule(root, **({"size": 16} | options))
    return [read_split(module, split, workers=0, progress=False) for split in module.splits]


def test_conversions_are_counted(tmp_path: Path) -> None:
    folder = save_splits(tmp_path) / "train/cat"
    picture, exif = Image.open(folder / "0.png").convert("RGB"), Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    picture.save(folder / "a.jpg", exif=exif)
    picture.convert("CMYK").save(folder / "b.jpg")
    picture.convert("P").save(folder / "c.png")
    picture.convert("L").save(folder / "d.png")
    Image.fromarray(np.full((20, 24), 40000, np.uint16)).save(folder / "e.png")
    splits, findings = read(tmp_path), Findings()

    check_formats(findings, splits, splits[0].spec)

    assert findings.facts["formats"] == {"PNG": 27, "JPEG": 2}
    assert findings.facts["modes"] == {"RGB": 25, "CMYK": 1, "palette": 1, "grey": 1, "16-bit grey": 1}
    assert findings.facts["converted"] == {
        "16-bit grey scaled to 8 bits": 1,
        "grey repeated in three channels": 2,
        "CMYK turned to RGB": 1,
        "turned upright by EXIF": 1,
    }
    assert findings.findings == []


def test_colours_turned_to_grey_are_counted(tmp_path: Path) -> None:
    splits, findings = read(save_splits(tmp_path), channels=1), Findings()

    check_formats(findings, splits, splits[0].spec)

    assert findings.facts["converted"] == {"colours turned to grey": 24}


@pytest.mark.parametrize(("name", "kind", "wrong"), [("x.JPG", "PNG", True), ("x.jpeg", "JPEG", False), ("x.tif", "TIFF", False)])
def test_an_ending_that_does_not_match(tmp_path: Path, name: str, kind: str, wrong: bool) -> None:
    folder = save_splits(tmp_path) / "train/cat"
    Image.open(folder / "0.png").save(folder / name, format=kind)
    splits, findings = read(tmp_path), Findings()

    check_formats(findings, splits, splits[0].spec)

    assert [finding.topic for finding in findings.findings] == ["endings"] * wrong


def test_sizes(tmp_path: Path) -> None:
    save_image(save_splits(tmp_path) / "train/cat/wide.png", size=(10, 41))
    splits, findings = read(tmp_path), Findings()

    check_sizes(findings, splits, splits[0].spec)

    assert findings.facts["sizes"]["height"] == {"min": 10, "median": 20, "max": 20}
    assert findings.facts["sizes"]["smaller_than_input"] == 1
    assert ("proportions", "width : height from 1.20 to 4.10") in findings.rows
    assert ("enlarged", "1 images that are smaller than the 16 x 16 that the network sees") in findings.rows
    assert [(finding.topic, len(finding.items)) for finding in findings.findings] == [("long", 1)]


def test_normalisation_is_that_of_the_training_images(tmp_path: Path) -> None:
    root = save_splits(tmp_path)
    (root / "train/cat/4.png").write_bytes(b"broken")
    splits, findings = read(root, size=20), Findings()

    check_normalisation(findings, splits, splits[0].spec)

    images = np.stack([splits[0].seen(index).numpy() / 255 for index in range(len(splits[0])) if index not in splits[0].broken])
    assert findings.facts["mean"] == pytest.approx(images.mean((0, 2, 3)), rel=1e-12)
    assert findings.facts["std"] == pytest.approx(images.std((0, 2, 3)), rel=1e-9)
    lines = "\n".join(text for _, text in findings.rows[:2])
    assert yaml.safe_load(lines)["mean"] == pytest.approx(findings.facts["mean"], abs=1e-4)


@pytest.mark.parametrize(("mean", "std", "told"), [(0.4, 0.1, False), (0.9, 0.1, True), (0.4, 0.02, True)])
def test_a_normalisation_that_is_far_off_is_told(tmp_path: Path, mean: float, std: float, told: bool) -> None:
    splits, findings = read(save_splits(tmp_path), channels=1, mean=[mean], std=[std]), Findings()

    check_normalisation(findings, splits, splits[0].spec)

    assert any("far from what is configured" in text for _, text in findings.rows) is told


def test_a_leak_that_is_a_contradiction_too_is_said_twice_and_counted_once(tmp_path: Path) -> None:
    root = save_splits(tmp_path)
    (root / "val/dog/copy.png").write_bytes((root / "train/cat/0.png").read_bytes())
    findings = Findings()

    check_copies(findings, read(root), near=4)

    assert [finding.topic for finding in findings.findings] == ["duplicates_leak", "duplicates_labels"]
    assert findings.facts["duplicates"] == 1
    assert findings.facts["near_duplicates"] == 0
