from __future__ import annotations

import csv
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fulgurite import tables
from fulgurite.errors import MissingExtraError, UserError
from fulgurite.tables import TABLE_ENDINGS, Columns, check_output, read_table, write_table

NAMES = ["plain.png", "a,b.png", 'say "x".png', "two\nlines.png", "return\r.png", " ünï 雷\u2028.png", "", "=1+1"]
NUMBERS = np.array([0.1, 1 / 3, 1e-8, 1.0, 0.0, 1.1754944e-38, 0.99999994, 1e-45], np.float32)
COLUMNS: Columns = {"path": NAMES, "probability": NUMBERS}


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    parquet = pytest.importorskip("pyarrow.parquet")
    return list(parquet.read_table(path).to_pylist())


@pytest.mark.parametrize("ending", TABLE_ENDINGS)
def test_all_names_and_bits_survive(tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"table{ending}"
    write_table(COLUMNS, output)
    rows = read(output)
    assert [row["path"] for row in rows] == NAMES
    assert np.array_equal(np.array([float(row["probability"]) for row in rows], np.float32), NUMBERS)
    assert list(tmp_path.iterdir()) == [output]


def test_text_formats_are_what_a_person_expects(tmp_path: Path) -> None:
    columns: Columns = {"path": ["é.png", "b.png"], "probability": np.array([0.1, 0.75], np.float32)}
    write_table(columns, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes().decode() == "path,probability\r\né.png,0.1\r\nb.png,0.75\r\n"
    write_table(columns, tmp_path / "TABLE.JSONL")
    assert (tmp_path / "TABLE.JSONL").read_bytes().decode().splitlines() == [
        '{"path": "é.png", "probability": 0.1}',
        '{"path": "b.png", "probability": 0.75}',
    ]


def test_parquet_has_typed_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table(COLUMNS, tmp_path / "table.parquet")
    schema = parquet.read_schema(tmp_path / "table.parquet")
    assert [str(kind) for kind in schema.types] == ["string", "float"]


@pytest.mark.parametrize("ending", TABLE_ENDINGS)
def test_name_that_is_not_utf8_is_written_readably(tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"table{ending}"
    write_table({"path": ["a\udcff.png"]}, output)
    assert read(output)[0]["path"] == "a\\udcff.png"


@pytest.mark.parametrize("ending", TABLE_ENDINGS)
def test_failed_write_leaves_the_old_table_and_no_stray_file(tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"table{ending}"
    output.write_text("old")
    with pytest.raises(ValueError, match=r"zip\(\)|same length|shorter|length"):
        write_table({"path": NAMES, "probability": NUMBERS[:1]}, output)
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]
    write_table(COLUMNS, output)
    assert len(read(output)) == len(NAMES)


def test_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"cannot write \S*table\.csv: No space left on device"):
        write_table(COLUMNS, tmp_path / "table.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["table.txt", "table", "table.csv.gz"])
def test_unknown_ending_is_refused_before_a_folder_is_made(tmp_path: Path, name: str) -> None:
    ending = Path(name).suffix
    with pytest.raises(UserError, match=rf"its ending is '{ending}'; allowed: \.csv, \.jsonl, \.parquet"):
        check_output(tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


def test_missing_folders_are_made(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b" / "table.CSV")
    assert (tmp_path / "a" / "b").is_dir()


def test_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"making the folder \S*file failed: File exists"):
        check_output(tmp_path / "file" / "table.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError, match=r"folder\.csv: it is a folder"):
        check_output(tmp_path / "folder.csv")
    monkeypatch.setattr(tables.os, "access", lambda *_: False)  # type: ignore[attr-defined]  # root may write anywhere
    with pytest.raises(UserError, match=r"no permission to write in the folder"):
        check_output(tmp_path / "table.csv")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(tables, "find_spec", find_nothing)
    with pytest.raises(MissingExtraError, match=r'table\.parquet needs pyarrow: pip install "fulgurite\[parquet\]"'):
        check_output(tmp_path / "table.parquet")
    check_output(tmp_path / "table.csv")


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet"])
def test_columns_are_read_as_text_by_name(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"table{ending}"
    if ending == ".parquet":
        write_table({"path": ["a b", 'ä,\n"c"'], "label": ["1", "2"]}, path)
    else:
        tab = "\t" if ending == ".tsv" else ","
        path.write_text(f'\ufeffpath{tab} label \na b{tab}1\n\n"ä,\n""c"""{tab}2\n', encoding="utf-8")
    assert read_table(path) == {"path": ["a b", 'ä,\n"c"'], "label": ["1", "2"]}


def test_numbers_and_missing_cells_of_parquet_are_text(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"label": [3, None]}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet") == {"label": ["3", ""]}


def test_long_tables_are_read_piece_by_piece(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n\n" + "".join(f"{number}\n" for number in range(1234)), encoding="utf-8")
    assert read_table(tmp_path / "t.csv") == {"n": [str(number) for number in range(1234)]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "has no rows"),
        ("a,b\n", "has no rows"),
        ("a,a\n1,2\n", "has two columns of one name: a, a"),
        ("a,b\n1\n", "a row has 1 cells, the header 2: 1"),
        ('a\n"1', "unexpected end of data"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "t.csv").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=text):
        read_table(tmp_path / "t.csv")


def test_other_files_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its ending is '\.xlsx'; allowed: \.csv, \.tsv, \.parquet"):
        read_table(tmp_path / "t.xlsx")
    with pytest.raises(UserError, match=r"cannot read .*t\.csv: No such file"):
        read_table(tmp_path / "t.csv")
