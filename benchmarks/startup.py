"""Answer: how long does ``fulgurite`` take to answer, and ``fit --help`` beyond importing ``lightning.pytorch.cli``?

Run ``python benchmarks/startup.py``; ``--repeats 11`` for steadier medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

IMPORT, FIT_HELP, DOCTOR = "import lightning.pytorch.cli", "fulgurite fit --help", "fulgurite doctor, first line"
COMMANDS: dict[str, list[str]] = {
    IMPORT: ["-c", IMPORT],
    FIT_HELP: ["-m", "fulgurite", "fit", "--help"],
    "fulgurite --version": ["-m", "fulgurite", "--version"],
    "fulgurite --help": ["-m", "fulgurite", "--help"],
    DOCTOR: ["-m", "fulgurite", "doctor"],  # goes on to import torch, which nobody has to wait for
}
MOST_RATIO = 1.15  # `fit` needs Lightning's parser, whose import takes seconds: what counts is what comes on top
MOST_SECONDS = 1.0  # the other three answer before anything large is imported

Times = dict[str, list[float]]


def time_whole(arguments: list[str]) -> float:
    """Return the seconds until Python, started with the arguments, has ended."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def time_first_line(arguments: list[str]) -> float:
    """Return the seconds until Python, started with the arguments, has printed its first line."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None, "stdout is a pipe"
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        process.kill()
    assert line, f"python {' '.join(arguments)} printed nothing"
    return seconds


def measure(repeats: int) -> Times:
    """Return the seconds of each command; they take turns, after a first turn that only warms the disk cache."""
    times: Times = {name: [] for name in COMMANDS}
    for _ in range(repeats + 1):
        for name, arguments in COMMANDS.items():
            times[name].append(time_first_line(arguments) if name == DOCTOR else time_whole(arguments))
    return {name: seconds[1:] for name, seconds in times.items()}


def report(times: Times) -> bool:
    """Print what was measured and the targets; return whether all of them hold."""
    print(f"{'seconds':<32}{'median':>8}{'least':>8}{'most':>8}")
    for name, seconds in times.items():
        print(f"{name:<32}{median(seconds):>8.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}")
    targets = {"fit --help / import": (median(times[FIT_HELP]) / median(times[IMPORT]), MOST_RATIO)}
    targets |= {name: (median(times[name]), MOST_SECONDS) for name in COMMANDS if name not in (IMPORT, FIT_HELP)}
    print(f"\n{'target':<32}{'found':>8}{'at most':>8}")
    for name, (found, most) in targets.items():
        print(f"{name:<32}{found:>8.2f}{most:>8.2f}  {'holds' if found <= most else 'MISSED'}")
    return all(found <= most for found, most in targets.values())


def main() -> int:
    """Return the exit status: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="how often each command is run")
    return 0 if report(measure(parser.parse_args().repeats)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
