from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fulgurite.checks.findings import Findings
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule, ImageFolderDataModule, ManifestDataModule, TorchvisionDataModule
from fulgurite.errors import UserError
from fulgurite.verbs.check_data import check_data
from tests.commands import refused
from tests.conftest import DIGITS, ROOT
from tests.images import save_image, save_splits, save_tree


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save half a second a test where the pictures do not matter."""
    if "pictures" not in request.function.__name__ and "experiment" not in request.function.__name__:
        monkeypatch.setattr("fulgurite.verbs.check_data._draw", lambda *_: [])


def check(module: Any, output: Path, **options: Any) -> Findings:
    return check_data(module, output=output / "out", num_workers=options.pop("num_workers", 0), **options)


def check_tree(root: Path, **options: Any) -> Findings:
    return check(ImageFolderDataModule(root, size=16), root.parent, **options)


def topics(findings: Findings) -> list[tuple[str, str]]:
    return [(finding.severity, finding.topic) for finding in findings.findings]


def smooth(path: Path, seed: int, size: tuple[int, int] = (48, 64)) -> Path:
    """Write an image of large soft shapes, as photographs are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = F.interpolate(torch.rand(1, 3, 5, 5, generator=generator) * 255, size, mode="bicubic")[0].clamp(0, 255)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(shapes.byte().permute(1, 2, 0).numpy()).save(path)
    return path


def smooth_splits(root: Path) -> Path:
    for number, split in enumerate(("train", "val", "test")):
        for label, name in enumerate(("cat", "dog")):
            for image in range(6):
                smooth(root / split / name / f"{image}.png", 100 * number + 10 * label + image)
    return root


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def truncate(root: Path) -> None:
    path = root / "train/cat/0.png"
    path.write_bytes(path.read_bytes()[:300])


def no_image(root: Path) -> None:
    (root / "val/dog/notes.jpg").write_text("no image")


def leak(root: Path) -> None:
    copy(root / "train/cat/0.png", root / "test/cat/copy.png")


def leak_of_pixels(root: Path) -> None:
    Image.open(root / "train/cat/0.png").save(root / "val/cat/copy.bmp")


def leak_of_looks(root: Path) -> None:
    Image.open(root / "train/cat/0.png").resize((40, 30)).save(root / "val/cat/copy.jpg", quality=80)


def contradiction(root: Path) -> None:
    copy(root / "train/cat/0.png", root / "train/dog/copy.png")


def near_contradiction(root: Path) -> None:
    Image.open(root / "train/cat/0.png").save(root / "train/dog/copy.jpg", quality=90)


def twice(root: Path) -> None:
    copy(root / "train/cat/0.png", root / "train/cat/copy.png")


def nearly_twice(root: Path) -> None:
    Image.open(root / "train/cat/0.png").save(root / "train/cat/copy.jpg", quality=90)


def no_training_image(root: Path) -> None:
    (root / "train/bird").mkdir()


def no_val_image(root: Path) -> None:
    smooth(root / "train/bird/0.png", 900)
    smooth(root / "train/bird/1.png", 901)
    smooth(root / "test/bird/0.png", 902)
    smooth(root / "test/bird/1.png", 903)


def wrong_ending(root: Path) -> None:
    path = root / "train/cat/0.png"
    Image.open(path).save(path, format="JPEG")


def blank(root: Path) -> None:
    Image.new("RGB", (30, 30), (9, 9, 9)).save(root / "train/cat/blank.png")


def long(root: Path) -> None:
    smooth(root / "train/cat/long.png", 900, (20, 200))


def unbalanced(root: Path) -> None:
    for number in range(60):
        smooth(root / f"train/dog/more{number}.png", 1000 + number)


@pytest.mark.parametrize(
    ("plant", "expected", "where"),
    [
        (truncate, ("fault", "broken"), "train/cat/0.png"),
        (no_image, ("fault", "broken"), "val/dog/notes.jpg"),
        (leak, ("fault", "duplicates_leak"), "test/cat/copy.png"),
        (leak_of_pixels, ("fault", "duplicates_leak"), "val/cat/copy.bmp"),
        (leak_of_looks, ("fault", "near_duplicates_leak"), "val/cat/copy.jpg"),
        (contradiction, ("fault", "duplicates_labels"), "train/dog/copy.png"),
        (near_contradiction, ("fault", "near_duplicates_labels"), "train/dog/copy.jpg"),
        (twice, ("warning", "duplicates_within"), "train/cat/copy.png"),
        (nearly_twice, ("warning", "near_duplicates_within"), "train/cat/copy.jpg"),
        (no_training_image, ("fault", "missing"), "the train split has no image of bird"),
        (no_val_image, ("warning", "missing"), "the val split has no image of bird"),
        (wrong_ending, ("warning", "endings"), "train/cat/0.png: of format JPEG"),
        (blank, ("warning", "blank"), "train/cat/blank.png"),
        (long, ("warning", "long"), "train/cat/long.png"),
        (unbalanced, ("warning", "balance"), "11.0 : 1 in train, dog (66) : cat (6)"),
    ],
)
def test_a_planted_fault_is_found(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Path], None],
    expected: tuple[str, str],
    where: str,
) -> None:
    root = smooth_splits(tmp_path / "tree")
    plant(root)

    findings = check_tree(root)

    found = [finding for finding in findings.findings if finding.topic == expected[1]]
    assert expected in topics(findings)
    assert where.replace("/", os.sep) in "\n".join(line for finding in found for line in finding.lines())
    assert where.replace("/", os.sep) in capsys.readouterr().out
    # A class without training images is missing in the other splits, too; nothing else is said.
    assert {topic for _, topic in topics(findings)} == {expected[1]}


@pytest.mark.parametrize("make", [save_splits, smooth_splits])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_clean_tree_has_nothing_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path], num_workers: int
) -> None:
    findings = check_tree(make(tmp_path / "tree"), num_workers=num_workers)

    assert findings.findings == []
    assert "found       nothing wrong" in capsys.readouterr().out


def test_plain_noise_has_no_duplicates(tmp_path: Path) -> None:
    for label, name in enumerate(("a", "b")):
        for number in range(60):
            pixels = np.random.default_rng(100 * label + number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
            path = tmp_path / "tree" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)

    assert check_tree(tmp_path / "tree", near=10).findings == []


@pytest.mark.parametrize("near", [4, 10])
def test_the_digits_have_nothing_wrong(tmp_path: Path, near: int) -> None:
    findings = check(DigitsDataModule(), tmp_path, near=near)

    assert findings.findings == []
    assert findings.facts["images"] == {"train": 1257, "val": 270, "test": 270}
    assert findings.facts["mean"] == pytest.approx([0.3056], abs=1e-4)


def test_a_leak_between_images_in_memory_is_found(tmp_path: Path) -> None:
    module = TorchvisionDataModule("FakeData", arguments={"size": 40, "image_size": (3, 16, 16), "num_classes": 2}, size=16)
    module.samples("val").pixels[0] = module.samples("train").pixels[3]  # type: ignore[index]  # it is in memory
    module.samples("val").labels[0] = module.samples("train").labels[3]

    findings = check(module, tmp_path)

    assert topics(findings) == [("fault", "duplicates_leak")]
    assert findings.faults[0].lines()[1].startswith("  train image 3 (train: ")


def test_a_copy_with_another_label_in_another_split_is_two_faults(tmp_path: Path) -> None:
    root = smooth_splits(tmp_path / "tree")
    copy(root / "train/cat/0.png", root / "val/dog/copy.png")

    assert topics(check_tree(root)) == [("fault", "duplicates_leak"), ("fault", "duplicates_labels")]


def manifest(root: Path, rows: list[str], **options: Any) -> ManifestDataModule:
    names = [row.split(",")[0] for row in rows[1:]]
    for number, name in enumerate(names):
        smooth(root / name, number)
    (root / "table.csv").write_text("\n".join(rows) + "\n")
    return ManifestDataModule(root / "table.csv", size=16, **options)


def test_a_group_on_two_sides_is_a_fault(tmp_path: Path) -> None:
    rows = ["path,label,split,group"]
    for number in range(8):
        split = "train" if number < 4 else "val"
        rows.append(f"{number}.png,{'ab'[number % 2]},{split},{'p0' if number in (2, 5) else f'p{number + 1}'}")

    findings = check(manifest(tmp_path, rows), tmp_path)

    assert topics(findings) == [("fault", "groups")]
    assert [image["path"][-5:] for image in findings.faults[0].items[0]["images"]] == ["2.png", "5.png"]
    assert findings.faults[0].text.startswith("1 groups are in both train and val")


def test_groups_that_are_kept_together_are_no_fault(tmp_path: Path) -> None:
    rows = ["path,label,group", *(f"{number}.png,{'ab'[number % 2]},p{number // 4}" for number in range(40))]

    assert check(manifest(tmp_path, rows), tmp_path).findings == []


def test_any_number_of_labels(tmp_path: Path) -> None:
    labels = ["a|b", "a", "b", "", "a|b", "b", "a", "a|b"]
    rows = ["path,label,split", *(f"{n}.png,{text},{'train' if n < 4 else 'val'}" for n, text in enumerate(labels))]

    findings = check(manifest(tmp_path, rows, multi_label=True), tmp_path)

    assert findings.findings == []
    assert findings.facts["counts"] == {"train": {"a": 2, "b": 2}, "val": {"a": 3, "b": 3}}
    assert findings.facts["unlabelled"] == {"train": 1, "val": 0}
    assert ("unlabelled", "train 1, val 0") in findings.rows


def test_a_copy_with_other_labels_where_there_is_any_number(tmp_path: Path) -> None:
    rows = ["path,label,split", *(f"{n}.png,{text},train" for n, text in enumerate(("a|b", "a", "b", ""))), "4.png,a|b,val"]
    module = manifest(tmp_path, rows, multi_label=True)
    copy(tmp_path / "0.png", tmp_path / "1.png")

    findings = check(module, tmp_path)

    assert ("fault", "duplicates_labels") in topics(findings)
    assert "(train: a|b)" in findings.faults[0].lines()[1]


def test_one_class_is_worth_a_word(tmp_path: Path) -> None:
    findings = check_tree(save_tree(tmp_path / "tree", ("cat",), count=20))

    assert topics(findings) == [("warning", "classes")]


def test_few_images(tmp_path: Path) -> None:
    save_tree(tmp_path / "tree" / "train", ("a", "b", "c"), count=1)
    save_image(tmp_path / "tree" / "val" / "a" / "0.png", seed=99)

    findings = check_tree(tmp_path / "tree")

    assert ("warning", "single") in topics(findings)
    assert not findings.faults


def test_files_that_a_table_names_and_that_are_not_there(tmp_path: Path) -> None:
    rows = [f"{save_image(tmp_path / f'{number}.png', seed=number).name},a" for number in range(8)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows, "gone.png,a"]), encoding="utf-8")

    module = ManifestDataModule(tmp_path / "table.csv", size=16)
    findings = check(module, tmp_path)

    assert module.on_error == "raise"  # it is left as it was
    (fault,) = findings.faults
    assert fault.topic == "broken"
    assert "gone.png" in str(fault.items)


def test_json_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = save_tree(tmp_path / "tree", count=20)  # the data module tells how it splits this
    for number in range(9):
        (root / "cat" / f"bad{number}.png").write_bytes(b"")

    findings = check_tree(root, json=True)

    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document == json.loads((tmp_path / "out/report.json").read_text())
    assert document["broken"] == 9
    assert len(next(fault for fault in document["faults"] if fault["topic"] == "broken")["items"]) == 9
    assert "splits " in printed.err
    assert len(findings.faults) == len(document["faults"])


def test_a_long_list_is_cut_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = save_splits(tmp_path / "tree")
    for number in range(9):
        (root / "train/cat" / f"bad{number}.png").write_bytes(b"")

    check_tree(root)

    text = capsys.readouterr().out
    assert "fault: 9 images cannot be read" in text
    assert text.count("an empty file (0 bytes)") == 5
    assert "  ... and 4 more" in text


@pytest.mark.skipif(os.name == "nt", reason="Windows allows no such names")
def test_odd_names_also_in_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = save_splits(tmp_path / "tree", ("cat", "$x$ 猫\n"))
    folder = root / "train" / "cat"
    for name in (b"line\nbreak.png", b"latin\xff.png", b"[bold]a b,c.PNG"):
        target = folder / os.fsdecode(name)
        copy(folder / "0.png", target)

    findings = check_tree(root, num_workers=2)

    assert topics(findings) == [("warning", "duplicates_within")]
    text = capsys.readouterr().out
    assert "line\\nbreak.png" in text
    assert "latin\\udcff.png" in text
    assert "[bold]a b,c.PNG" in text
    assert (tmp_path / "out/images.png").exists()


def test_report_and_pictures_are_written(tmp_path: Path) -> None:
    check_tree(save_splits(tmp_path / "tree"))

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["classes.png", "images.png", "report.json"]


def test_files_that_are_skipped_in_training_are_faults_here(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "tree")
    truncate(root)

    findings = check(ImageFolderDataModule(root, size=16, on_error="skip", max_broken=0.0), tmp_path)

    assert topics(findings) == [("fault", "broken")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"near": 11}, r"near is 11; allowed: 0 \(exact duplicates only\) to 10 bits"),
        ({"num_workers": -1}, "num_workers is -1; it must be 0 or more"),
    ],
)
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(DigitsDataModule(), tmp_path, **options)


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")

    with pytest.raises(UserError, match=r"cannot write to .*out: File exists"):
        check(DigitsDataModule(), tmp_path)


def test_near_0_looks_for_exact_copies_only(tmp_path: Path) -> None:
    root = smooth_splits(tmp_path / "tree")
    leak_of_looks(root)

    assert check_tree(root, near=0).findings == []


def test_pictures_leave_random_states_alone(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "tree")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # a tuple

    check_tree(root, num_workers=2)

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # type: ignore[index]  # a tuple


def test_a_label_that_is_no_class(tmp_path: Path) -> None:
    module = ImageFolderDataModule(save_splits(tmp_path / "tree"), size=16)
    module.dataset("val").labels[0] = 7

    findings = check(module, tmp_path)

    assert topics(findings) == [("fault", "labels")]
    assert "(val: label 7)" in findings.faults[0].lines()[1]


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    module = ImageFolderDataModule(save_splits(tmp_path / "tree"), size=16)
    assert module.splits
    save_image(tmp_path / "tree/train/cat/0.png").unlink()

    assert "cannot read" in check(module, tmp_path).faults[0].items[0]["reason"]


DATA = ["--data", "ImageFolderDataModule", "--data.root", "data", "--data.size", "16"]


def test_the_exit_status_says_whether_something_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_splits(here / "data")
    assert main(["check-data", *DATA]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    (here / "data" / "test" / "cat" / "0.png").write_bytes((here / "data" / "train" / "cat" / "0.png").read_bytes())
    (here / "data" / "train" / "dog" / "1.png").write_bytes(b"")
    assert main(["check-data", *DATA]) == 1
    printed = capsys.readouterr()
    assert "data/train/dog/1.png: an empty file" in printed.out
    assert printed.err == "found: faults in the data: 2, listed above\n"
    assert main(["check_data", *DATA, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 2


def test_an_experiment_says_where_the_data_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-data", "-c", str(DIGITS), "-c", str(ROOT / "configs" / "trainer" / "gpu.yaml")]) == 0  # needs no GPU
    assert "images      train 1,257, val 270, test 270" in capsys.readouterr().out
    assert {path.name for path in (here / "data_check").iterdir()} == {"report.json", "images.png", "classes.png"}


def test_what_the_command_line_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "check-data").startswith("check_data has no data: give an experiment, such as -c configs/")
    assert "data does not exist" in refused(capsys, "check-data", *DATA)
    assert "trainer is not a key; allowed: data, json" in refused(capsys, "check-data", *DATA, "--trainer.max_epochs", "3")
