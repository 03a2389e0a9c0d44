from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from fulgurite.cli import main
from fulgurite.data import ManifestDataModule
from fulgurite.data.samples import Split
from fulgurite.errors import UserError
from tests.commands import refused
from tests.images import save_image

Rows = Sequence[tuple[str, ...]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(8):
        save_image(tmp_path / "images" / f"{number}.png", number % 2, seed=number)
    return tmp_path


def rows(*labels: str) -> list[tuple[str, ...]]:
    return [(f"images/{number}.png", label) for number, label in enumerate(labels)]


def table(folder: Path, content: Rows, header: tuple[str, ...] = ("path", "label"), name: str = "table.csv") -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(dict(zip(header, map(list, zip(*content, strict=True)), strict=True))), path)
    else:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        path.write_text("\n".join(delimiter.join(row) for row in (header, *content)), encoding="utf-8-sig")
    return path


def module(path: Path, **options: Any) -> ManifestDataModule:
    return ManifestDataModule(path, **{"size": 16, "num_workers": 0} | options)


def content(data: ManifestDataModule, split: Split) -> list[tuple[str, Any]]:
    dataset: Any = data.dataset(split)
    return [(path.name, label) for path, label in zip(dataset.paths, dataset.labels.tolist(), strict=True)]


SPLITS = ["train", "train", "train", "val", "Validation", "valid", "test", "TEST "]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet"])
def test_columns_say_path_label_and_split(folder: Path, name: str) -> None:
    given = [(*row, split) for row, split in zip(rows(*"abcabcab"), SPLITS, strict=True)]
    data = module(table(folder, given, ("path", "label", "split"), name))
    assert data.spec.class_names == ("a", "b", "c")
    assert content(data, "train") == [("0.png", 0), ("1.png", 1), ("2.png", 2)]
    assert content(data, "val") == [("3.png", 0), ("4.png", 1), ("5.png", 2)]
    assert content(data, "test") == [("6.png", 0), ("7.png", 1)]
    images, labels = next(iter(data.val_dataloader()))
    assert (images.shape, labels.tolist()) == ((3, 3, 16, 16), [0, 1, 2])


def test_without_splits_they_are_made_and_groups_are_kept_together(folder: Path) -> None:
    assert [len(module(table(folder, rows(*"aaaabbbb"))).samples(split)) for split in ("train", "val", "test")] == [4, 2, 2]
    given = [(*row, group) for row, group in zip(rows(*"abababab"), "ppqqrrss", strict=True)]
    data = module(table(folder, given, ("path", "label", "patient")), group_column="patient")
    sides = [{name[0] for name, _ in content(data, split)} for split in data.splits]
    assert all(({a} <= side) == ({b} <= side) for side in sides for a, b in ("01", "23", "45", "67"))


def test_rows_without_a_group_are_groups_of_their_own(folder: Path) -> None:
    given = [(*row, group) for row, group in zip(rows(*"aaaabbbb"), ["", "", "", " ", "p", "p", "", ""], strict=True)]
    data = module(table(folder, given, ("path", "label", "group")))
    assert [len(data.samples(split)) for split in data.splits] != [8, 0, 0]
    groups = [data.samples(split).groups for split in data.splits]
    assert sum(len(part.unique()) for part in groups if part is not None) == 7


def test_a_group_on_two_sides_of_the_tables_own_splits_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = zip(rows(*"abab"), ("train", "train", "val", "test"), "pqpr", strict=True)
    given = [(*row, split, group) for row, split, group in sides]
    module(table(folder, given, ("path", "label", "split", "group"))).labelled  # noqa: B018
    assert "leak        1 groups of" in (printed := capsys.readouterr().out)
    assert "are in more than one split: p\n" in printed


def test_the_same_file_by_two_names(folder: Path) -> None:
    with pytest.raises(UserError, match=r"names images/0\.png in two data rows that differ"):
        module(table(folder, [("images/0.png", "a"), ("./images//0.png", "b")])).labelled  # noqa: B018


def test_lists_in_parquet_are_labels(folder: Path) -> None:
    paths = [row[0] for row in rows("", "", "")]
    parquet.write_table(pa.table({"path": paths, "label": [["a", "b"], [], ["b"]]}), folder / "t.parquet")
    data = module(folder / "t.parquet", multi_label=True, label_separator=";")
    assert data.spec.class_names == ("a", "b")


def test_names_that_are_numbers_are_in_their_order(folder: Path) -> None:
    assert module(table(folder, rows("10", "9", "2", "10", "9", "2"))).spec.class_names == ("2", "9", "10")
    assert module(table(folder, rows("1", "01", "1", "01", "001"))).spec.class_names == ("001", "01", "1")


def test_columns_and_root_of_another_name(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("tables")
    given = [(row[0].removeprefix("images/"), row[1]) for row in rows(*"abab")]
    data = module(table(elsewhere, given, ("file", "kind")), root=folder / "images", path_column="file", label_column="kind")
    assert sum(len(data.samples(split)) for split in data.splits) == 4
    absolute = [(str(folder / "images" / "0.png"), "a"), (str(folder / "images" / "1.png"), "a")]
    assert len(module(table(elsewhere, absolute)).samples("train")) == 1


def test_quotes_newlines_and_other_scripts(folder: Path) -> None:
    names = ["it's, 'so'.png", "日本.png", "a b.png", "new\nline.png"]
    for name in names:
        save_image(folder / name)
    path = folder / "t.csv"
    path.write_text("path,label\n" + "\n".join(f'"{name}","x, ""y"""' for name in names), encoding="utf-8")
    data = module(path)
    assert data.spec.class_names == ('x, "y"',)
    assert {file.name for split in data.splits for file in data.dataset(split).paths} == set(names)


def test_any_number_of_labels(folder: Path) -> None:
    given = [(*row, split) for row, split in zip(rows("a|c", "b", "", "c | a", "a", "", "b|c", "c"), SPLITS, strict=True)]
    data = module(table(folder, given, ("path", "label", "split")), multi_label=True)
    assert data.spec.multi_label
    assert data.spec.class_names == ("a", "b", "c")
    assert data.spec.class_counts == (1, 1, 1)
    assert [label for _, label in content(data, "train")] == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert [label for _, label in content(data, "val")] == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert next(iter(data.val_dataloader()))[1].tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]
    semicolons = table(folder, rows("a;b", "b", "a", "a"), name="s.csv")
    assert module(semicolons, multi_label=True, label_separator=";").spec.class_names == ("a", "b")


def test_rows_that_repeat_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = rows(*"abab")
    data = module(table(folder, [*given, given[0], given[0]]))
    assert sum(len(data.samples(split)) for split in data.splits) == 4
    assert "ignored     2 rows of" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"names images/0\.png in two data rows that differ: 1 says 'a', 5 says 'b'"):
        module(table(folder, [*given, ("images/0.png", "b")])).labelled  # noqa: B018


@pytest.mark.parametrize(
    ("header", "given", "options", "text"),
    [
        (("paht", "label"), rows("a"), {}, r"no column 'path' \(did you mean 'paht'\?\); it has paht, label"),
        (("path", "label"), rows("a"), {"split_column": "fold"}, "no column 'fold'; it has path, label"),
        (("path", "path"), rows("a"), {}, "two columns of one name: path, path"),
        (("path", "label"), [], {}, r"table\.csv has no rows"),
        (("path", "label"), [("images/0.png", "a", "b")], {}, r"a row has 3 cells, the header 2: images/0\.png,a,b"),
        (("path", "label"), [("", "a")], {}, "the path in data row 1 is empty"),
        (("path", "label"), rows("a", " "), {}, "the label in data row 2 is empty; multi_label allows none"),
        (("path", "label", "split"), [("images/0.png", "a", "trian")], {}, r"a split 'trian' \(did you mean 'train'\?\)"),
        (
            ("path", "label", "split"),
            [("images/0.png", "cat", "train"), ("images/1.png", "cats", "val")],
            {},
            r"a label 'cats' that no training image has \(did you mean 'cat'\?\); the classes are cat",
        ),
        (("path", "label"), rows("a", "b"), {"class_names": ["a"]}, "a label 'b' that no training image has"),
        (("path;label",), [("images/0.png;a",)], {}, "are its cells separated by semicolons"),
        (("path", "label", "split"), [("images/0.png", "a", "val")], {}, "has no training rows, which say what the classes are"),
        (("path", "label"), rows("", ""), {"multi_label": True}, r"no row of .*table\.csv has a label in its column 'label'"),
        (
            ("path", "label"),
            [("images/0.png", "a"), ("images/x.png", "a"), ("gone/y.png", "a")],
            {},
            r"2 of 3 files that .*table\.csv names do not exist: .*images/x\.png, .*gone/y\.png",
        ),
    ],
)
def test_tables_that_are_wrong(folder: Path, header: Any, given: Rows, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        module(table(folder, given, header), **options).labelled  # noqa: B018


def test_a_table_that_cannot_be_read(folder: Path) -> None:
    (folder / "t.csv").write_bytes(b'path,label\n"a')
    (folder / "t.parquet").write_bytes(b"rubbish")
    (folder / "t.tsv").write_bytes(b"path\xff")
    for name, text in (
        ("t.csv", "unexpected end"),
        ("t.parquet", "cannot read"),
        ("t.tsv", "utf-8"),
        ("t.xls", "does not exist"),
    ):
        with pytest.raises(UserError, match=text):
            module(folder / name).labelled  # noqa: B018
    with pytest.raises(UserError, match=r"its ending is '\.png'; allowed: \.csv, \.tsv, \.parquet"):
        module(folder / "images" / "0.png").labelled  # noqa: B018


def test_missing_files_may_be_skipped(folder: Path) -> None:
    given = [(*row, "train") for row in [*rows(*"abab"), ("images/gone.png", "a")]]
    data = module(table(folder, given, ("path", "label", "split")), on_error="skip", max_broken=0.5, batch_size=8)
    assert len(next(iter(data.train_dataloader()))[1]) == len(data.samples("train"))


MODEL = [
    *("--model", "ClassificationTask", "--model.network", "SmallCNN", "--model.network.width", "4"),
    *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.01"),
]


def test_several_labels_from_training_to_prediction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = [(*row, split) for row, split in zip(rows("a|c", "b", "", "c|a", "a", "", "b|c", "c"), SPLITS, strict=True)]
    table(folder, given, ("path", "label", "split"))
    data = ["--data", "ManifestDataModule", "--data.table", "table.csv", "--data.multi_label", "true", "--data.size", "16"]
    short = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false", "--data.num_workers", "0"]
    assert main(["fit", *MODEL, *data, *short, "--test"]) == 0
    assert main(["predict", "--ckpt_path", "best", "--images", "images"]) == 0
    assert (folder / "predictions.csv").read_text().startswith("path,labels,probabilities")


def test_errors_reach_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    text = refused(capsys, "fit", *MODEL, "--data", "ManifestDataModule", "--data.table", "tabel.csv")
    assert text.startswith("tabel.csv does not exist")
