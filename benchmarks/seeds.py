"""How good is an experiment, and how much of that is luck? Train and test it with several seeds.

    python benchmarks/seeds.py configs/experiment/digits.yaml --seeds 5

Prints the test score of each seed, then the mean, the standard deviation, the lowest and the time: what a recipe card
says. Flags after ``--`` go to each ``fulgurite fit``.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path

from fulgurite.cli import main as fulgurite


def test_score(run: Path, metric: str) -> float:
    """Return the value of ``metric`` that a run logged last.

    Raises:
        SystemExit: if it logged none, naming what it did log
    """
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = [float(row[metric]) for row in rows if row.get(metric)]
    if not values:
        raise SystemExit(f"{run} has no {metric}; it has {', '.join(rows[0])}")
    return values[-1]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def main() -> None:
    """Run the seeds one after another, in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--metric", default="test/acc")
    own, flags = _split(sys.argv[1:])
    options = parser.parse_args(own)
    scores, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            runs, start = Path(folder, str(seed)), time.monotonic()
            place = ["--seed_everything", str(seed), "--trainer.runs_dir", str(runs), "--trainer.enable_progress_bar", "false"]
            if status := fulgurite(["fit", "-c", str(options.experiment), *place, "--test", *flags]):
                sys.exit(status)
            seconds.append(time.monotonic() - start)
            scores.append(test_score(next(runs.glob("*/v001")), options.metric))
    for seed, (score, duration) in enumerate(zip(scores, seconds, strict=True)):
        print(f"seed {seed}  {options.metric} {score:.4f}  {duration:.0f} s")
    mean, spread = statistics.mean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0
    print(f"mean {mean:.4f}  std {spread:.4f}  lowest {min(scores):.4f}  median {statistics.median(seconds):.0f} s")


if __name__ == "__main__":
    main()
