"""Answer: does what a loader's worker needs in memory grow with the number of samples?

Run ``python benchmarks/worker_memory.py`` (Linux). For 10^4, 10^5 and 10^6 paths of image files a process of its own starts a
loader with workers, reads batches, and reads each worker's private memory and its proportional set size (PSS, in which shared
pages count in part) from /proc. The resident size would count what all processes share once for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fulgurite.data.labelled import LabelledDataModule
from fulgurite.data.samples import Labelled, Samples

MOST_GROWTH = 0.05
SAMPLES = (10**4, 10**5, 10**6)
FILES, BATCHES = 100, 20
MIB = 2**20


class ManyPaths(LabelledDataModule):
    """Name a few files many times."""

    def __init__(self, folder: Path, count: int, **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.count = folder, count

    @property
    def source(self) -> str:
        """The folder."""
        return str(self.folder)

    def read_source(self) -> Labelled:
        """List the paths."""
        files: list[Any] = [f"{self.folder}/class_{index % 10:03d}/image_{index % FILES:08d}.jpg" for index in range(self.count)]
        train = Samples(labels=torch.arange(self.count) % 10, files=files)
        return Labelled(tuple(map(str, range(10))), {"train": train, "val": train.take([0]), "test": train.take([0])})


def children() -> list[int]:
    """Return the process ids of this process's workers."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(number) for number in text.split()]


def memory(pid: int) -> dict[str, float]:
    """Return the private memory and the PSS of a process, in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = {name: 1024 * int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return {"private": found["Private_Clean"] + found["Private_Dirty"], "pss": found["Pss"]}


def measure(folder: Path, count: int, workers: int) -> dict[str, float]:
    """Return the mean over the workers of a loader that has read some batches."""
    data = ManyPaths(folder, count, size=64, batch_size=32, num_workers=workers)
    loader = data.train_dataloader()
    gc.collect()
    batches = iter(loader)
    for _ in range(BATCHES):
        next(batches)
    each = [memory(pid) for pid in children()]
    if len(each) != workers:
        raise RuntimeError(f"{workers} workers were asked for, and {len(each)} are there")
    return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


def main() -> int:
    """Measure, print, and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", nargs=2, metavar=("FOLDER", "SAMPLES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(Path(given.only[0]), int(given.only[1]), given.workers)))
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(FILES):
            path = Path(folder, f"class_{index % 10:03d}", f"image_{index:08d}.jpg")
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.full((64, 64, 3), index, dtype=np.uint8)).save(path)
        for count in SAMPLES:
            command = [sys.executable, __file__, "--workers", str(given.workers), "--only", folder, str(count)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results[count] = json.loads(output.splitlines()[-1])
            print(f"{count:>9,} samples", *(f"   {name} {value / MIB:7.1f} MiB" for name, value in results[count].items()))
    growth = {name: results[SAMPLES[-1]][name] / value - 1 for name, value in results[SAMPLES[0]].items()}
    shown = "".join(f"   {name} {value:+7.1%}    " for name, value in growth.items())
    print(f"growth           {shown}target: at most {MOST_GROWTH:.0%}")
    return int(max(growth.values()) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
