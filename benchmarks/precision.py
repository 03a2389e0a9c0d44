"""Answer: what do number format and memory format cost or save in a training step, on this machine?

Run ``python benchmarks/precision.py``; ``--rounds 10`` for steadier numbers, ``--threads 2`` for more cores.

Each job trains in 32-true and bf16-mixed, with its images and weights contiguous and channels last, and in a GPU's 16-mixed
where there is one. The four take turns step by step, so that all see the same machine; each counts with its median.
A step is what the trainer does of it on the device: preprocessing, forward, backward, optimizer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from fulgurite.models import ResNet, SmallCNN
from fulgurite.models.preprocess import Preprocess
from fulgurite.precision import settle_precision

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
JOBS: dict[str, tuple[Callable[[int, int], nn.Module], int, int]] = {  # network, side of the images, batch size
    "SmallCNN of width 24, 128 images of 28x28": (partial(SmallCNN, width=24), 28, 128),
    "ResNet-18, 16 images of 224x224": (partial(ResNet, stem="large"), 224, 16),
}


class Step:
    """Train a network on one batch, again and again."""

    def __init__(
        self, network: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype, memory_format: torch.memory_format
    ) -> None:
        self.images, self.labels = batch
        self.device = self.images.device
        self.preprocess = Preprocess((0.5,) * 3, (0.25,) * 3).to(self.device)
        self.preprocess.memory_format = memory_format
        # As the trainer does; the networks here have no other weights of four dimensions.
        self.network = network.to(self.device, memory_format=memory_format)  # type: ignore[call-overload]
        self.optimizer = SGD(self.network.parameters(), lr=0.01, momentum=0.9)
        self.autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)

    def seconds(self) -> float:
        """Return how long a step takes."""
        self._wait()
        start = time.perf_counter()
        with self.autocast:
            loss = F.cross_entropy(self.network(self.preprocess(self.images)), self.labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(
    make: Callable[[int, int], nn.Module], side: int, batch_size: int, device: str, rounds: int
) -> dict[tuple[str, str], float]:
    """Return the median milliseconds of a step by precision and memory format."""
    dtypes = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16} | ({"16-mixed": torch.float16} if device == "cuda" else {})
    images = torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, device=device)
    batch = images, torch.randint(0, 10, (batch_size,), device=device)
    steps = {
        (precision, name): Step(make(10, 3), batch, dtype, memory_format)
        for precision, dtype in dtypes.items()
        for name, memory_format in FORMATS.items()
    }
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for round_ in range(rounds + 1):  # the first warms up
        for key, step in steps.items():
            seconds = step.seconds()
            if round_ >= 1:
                taken[key].append(1000 * seconds)
    return {key: median(values) for key, values in taken.items()}


def main() -> None:
    """Print a table for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each kind of step is timed")
    parser.add_argument("--threads", type=int, default=1, help="cores, on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    settle_precision("auto", "gpu" if given.device == "cuda" else given.device)  # prints what it would choose, and why
    for title, (make, side, batch_size) in JOBS.items():
        found = measure(make, side, batch_size, given.device, given.rounds)
        first = next(iter(found.values()))
        print(f"{title:<44}{'ms a step':>10}{'against the first':>19}")
        for (precision, memory_format), milliseconds in found.items():
            print(f"  {precision:<14}{memory_format:<28}{milliseconds:>10.1f}{first / milliseconds:>17.2f} x", flush=True)


if __name__ == "__main__":
    main()
