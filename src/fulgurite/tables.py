"""Write a table as CSV, JSON Lines or Parquet, whole or not at all; read one from CSV or Parquet."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulgurite.errors import MissingExtraError, UserError, did_you_mean, name_list

Columns = Mapping[str, Sequence[str] | NDArray[np.float32]]

# Rows read at once: fewer than the 700 lists that set off Python's garbage collector, which then goes through all of PyTorch.
_PIECE = 500
TABLE_ENDINGS = (".csv", ".jsonl", ".parquet")


def check_output(output: Path, endings: Sequence[str] = TABLE_ENDINGS) -> None:
    """Make the folder of an output file, and refuse now what could not be written later.

    Args:
        output: the file
        endings: that are allowed, in any case

    Raises:
        UserError: if the ending is another, a package is missing, or the place cannot be written to
    """
    ending = output.suffix.lower()
    if ending not in endings:
        hint = did_you_mean(ending, endings)
        raise UserError(f"cannot write {output}: its ending is '{output.suffix}'{hint}; allowed: {', '.join(endings)}")
    if ending == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "parquet", f"writing {output}")
    if output.is_dir():
        raise UserError(f"cannot write {output}: it is a folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {output}: making the folder {output.parent} failed: {error.strerror}") from error
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {output}: no permission to write in the folder {output.parent}")


def write_table(columns: Columns, output: Path) -> None:
    """Write columns of equal length in the format that the output's ending names.

    An existing file is replaced when the new one is complete. Numbers keep all their bits: in text, as the shortest
    decimal that is the same float32.

    Args:
        columns: by name; strings, or (N,) float32
        output: ending in one of ``TABLE_ENDINGS``

    Raises:
        UserError: if the file cannot be written
    """
    write = {".csv": _write_csv, ".jsonl": _write_json_lines, ".parquet": _write_parquet}[output.suffix.lower()]
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")  # in the same folder: replacing is then atomic
    try:
        write(columns, temporary)
        temporary.replace(output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_csv(columns: Columns, path: Path) -> None:
    # The csv module's defaults are RFC 4180: its CRLF also makes it quote a name that holds a carriage return.
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(_rows(columns))


def _write_json_lines(columns: Columns, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in _rows(columns):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


def _write_parquet(columns: Columns, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = {name: column if isinstance(column, np.ndarray) else list(_plain(column)) for name, column in columns.items()}
    parquet.write_table(pa.table(table), path)


def _rows(columns: Columns) -> Iterator[tuple[Any, ...]]:
    return zip(*map(_plain, columns.values()), strict=True)


def _plain(column: Sequence[str] | NDArray[np.float32]) -> Iterable[str | float]:
    if isinstance(column, np.ndarray):
        return (float(str(number)) for number in column)  # NumPy's str is the shortest: 0.1, not 0.10000000149011612
    # A file name that is not UTF-8 has lone surrogates in Python, which no table can hold: they are written as \udcff.
    return (text.encode("utf-8", "backslashreplace").decode() for text in column)


def read_table(path: Path, list_separator: str = "|") -> dict[str, list[str]]:
    """Return the columns of a .csv (comma), .tsv (tab) or .parquet file as text, by name.

    Args:
        path: of the file
        list_separator: put between the items of a Parquet cell that is a list

    Raises:
        UserError: if it cannot be read, has no header or no rows, or a row has more or fewer cells than the header
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".tsv", ".parquet"):
        raise UserError(f"cannot read {path}: its ending is '{path.suffix}'; allowed: .csv, .tsv, .parquet")
    try:
        columns = (
            _read_parquet(path, list_separator) if ending == ".parquet" else _read_csv(path, "," if ending == ".csv" else "\t")
        )
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not columns or not len(next(iter(columns.values()))):
        raise UserError(f"{path} has no rows")
    return columns


def _read_csv(path: Path, delimiter: str) -> dict[str, list[str]]:
    csv.field_size_limit(sys.maxsize)
    try:
        # -sig: spreadsheets put a byte-order mark before the first name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = (row for row in csv.reader(file, delimiter=delimiter, strict=True) if row)
            names = [name.strip() for name in next(rows, [])]
            if len(set(names)) < len(names):
                raise UserError(f"{path} has two columns of one name: {name_list(names)}")
            columns: dict[str, list[str]] = {name: [] for name in names}

            while piece := list(islice(rows, _PIECE)):
                odd = next((row for row in piece if len(row) != len(names)), None)
                if odd is not None:
                    raise UserError(f"{path}: a row has {len(odd)} cells, the header {len(names)}: {delimiter.join(odd)}")
                for column, cells in zip(columns.values(), zip(*piece, strict=True), strict=True):
                    column += cells
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return columns


def _read_parquet(path: Path, list_separator: str) -> dict[str, list[str]]:
    if find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path}")
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"cannot read {path}: {error}") from error

    def text(cell: Any) -> str:
        if cell is None or cell != cell:  # a missing cell, or NaN, is an empty one, as in CSV
            return ""
        return list_separator.join(map(str, cell)) if isinstance(cell, list) else str(cell)

    return {name: [text(cell) for cell in table[name].to_pylist()] for name in table.column_names}
