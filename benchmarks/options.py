"""What does each option of training give on the digits? Train and test with it and without, with several seeds.

    python benchmarks/options.py --seeds 5

Prints for each option the mean and the standard deviation over the seeds of the test accuracy and of the test loss, which is
finer: one of the 270 test images is 0.0037. What helps a small network on small clean images says little about large ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from seeds import test_score

from fulgurite.cli import main as fulgurite

DIGITS = Path(__file__).parents[1] / "configs" / "experiment" / "digits.yaml"
OPTIONS: dict[str, list[str]] = {
    "the experiment as it is": [],
    "no label smoothing": ["--model.label_smoothing", "0"],
    "mixup 0.2": ["--model.mixup", "0.2"],
    "cutmix 1.0": ["--model.cutmix", "1.0"],
    "loss bce": ["--model.loss", "bce"],
    "focal_gamma 2, no smoothing": ["--model.focal_gamma", "2", "--model.label_smoothing", "0"],
    "ema.decay 0.99": ["--ema.decay", "0.99"],
    "ema.uniform from step 150": ["--ema.uniform", "true", "--ema.start_step", "150", "--model.scheduler.final", "0.1"],
    "rate kept at a tenth at the end": ["--model.scheduler.final", "0.1"],
    "dropout 0.2": ["--model.network.dropout", "0.2"],
    "ResNet, drop_path 0": ["--model.network", "ResNet", "--model.network.width", "16"],
    "ResNet, drop_path 0.1": ["--model.network", "ResNet", "--model.network.width", "16", "--model.network.drop_path", "0.1"],
    "clipping by norm 1": ["--trainer.gradient_clip_val", "1"],
    "clipping by value 0.1": ["--trainer.gradient_clip_val", "0.1", "--trainer.gradient_clip_algorithm", "value"],
    "decay_all": ["--model.decay_all", "true"],
    "layer_decay 0.9": ["--model.layer_decay", "0.9"],
    "OneCycle": ["--model.scheduler", "OneCycle"],
    "StepDecay": ["--model.scheduler", "StepDecay"],
    "Plateau, patience 2": ["--model.scheduler", "Plateau", "--model.scheduler.patience", "2"],
    "no schedule": ["--model.scheduler", "null"],
}


def scores(flags: list[str], seeds: int) -> tuple[list[float], list[float]]:
    """Return test accuracy and test loss of each seed."""
    found: tuple[list[float], list[float]] = ([], [])
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            place = ["--seed_everything", str(seed), "--trainer.runs_dir", folder, "--trainer.enable_progress_bar", "false"]
            if status := fulgurite(["fit", "-c", str(DIGITS), *place, "--test", *flags]):
                raise SystemExit(status)
            run = next(Path(folder).glob("*/v001"))
            for values, metric in zip(found, ("test/acc", "test/loss"), strict=True):
                values.append(test_score(run, metric))
    return found


def main() -> None:
    """Print the table, a line as soon as it is known; what the runs say goes above it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="what the name of the option has in it")
    options = parser.parse_args()
    lines = [f"{'option':<34}{'test/acc':>10}{'std':>9}{'test/loss':>12}{'std':>9}"]
    for name, flags in OPTIONS.items():
        if options.only in name:
            columns = [(statistics.mean(one), statistics.stdev(one)) for one in scores(flags, options.seeds)]
            lines.append(f"{name:<34}{columns[0][0]:>10.4f}{columns[0][1]:>9.4f}{columns[1][0]:>12.4f}{columns[1][1]:>9.4f}")
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
