"""Write a table as CSV, JSON Lines or Parquet, whole or not at all."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulgurite.errors import MissingExtraError, UserError

Columns = Mapping[str, Sequence[str] | NDArray[np.float32]]

TABLE_ENDINGS = (".csv", ".jsonl", ".parquet")


def check_output(output: Path) -> None:
    """Make the folder of an output file, and refuse now what :func:`write_table` could not write later.

    Raises:
        UserError: if the ending is unknown, a package is missing, or the place cannot be written to
    """
    ending = output.suffix.lower()
    if ending not in TABLE_ENDINGS:
        raise UserError(f"cannot write {output}: its ending is '{output.suffix}'; allowed: {', '.join(TABLE_ENDINGS)}")
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
