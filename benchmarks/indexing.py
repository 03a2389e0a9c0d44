"""Answer: how long does it take to index a million image files that a table names, and as many in folders?

Run ``python benchmarks/indexing.py``; it makes the (empty) files in a temporary folder first, which takes longer than what is
measured. Indexing reads the table, checks that each file is there, splits by class, and packs the paths; best of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from fulgurite.data import ImageFolderDataModule, ManifestDataModule
from fulgurite.data.labelled import LabelledDataModule

MOST_SECONDS = 3.0  # for the table
FOLDERS = 100


def save_files(root: Path, count: int) -> Path:
    """Write empty files in folders, and a table that names them."""
    for folder in range(FOLDERS):
        (root / "images" / f"class_{folder:03d}").mkdir(parents=True)
    names = [f"images/class_{number % FOLDERS:03d}/image_{number:08d}.jpg" for number in range(count)]
    for name in names:
        os.close(os.open(root / name, os.O_CREAT | os.O_WRONLY))
    table = root / "table.csv"
    table.write_text("path,label\n" + "".join(f"{name},{name[7:16]}\n" for name in names), encoding="utf-8")
    return table


def seconds(data: LabelledDataModule) -> float:
    """Return how long a data module takes until it knows all its samples."""
    start = time.perf_counter()
    for split in data.splits:
        data.dataset(split)
    return time.perf_counter() - start


def main() -> int:
    """Measure, print, and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = save_files(Path(folder), given.files)
        manifest = min(seconds(ManifestDataModule(table)) for _ in range(given.rounds))
        tree = min(seconds(ImageFolderDataModule(Path(folder, "images"))) for _ in range(given.rounds))
    print(f"{given.files:,} files: table {manifest:.2f} s   target: below {MOST_SECONDS:g} s for a million")
    print(f"{given.files:,} files: folders {tree:.2f} s")
    return int(manifest >= MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
