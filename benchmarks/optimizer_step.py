"""What does an optimizer step cost with the kernels that PyTorch offers: a loop, foreach, fused?

    python benchmarks/optimizer_step.py

Prints microseconds a step, the least of many, in turns, for a small network and a ResNet-18 on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from fulgurite.models import ResNet, SmallCNN

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "SmallCNN": partial(SmallCNN, 10, 1),
    "ResNet-18": partial(ResNet, 1000, 3, stem="large"),
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(AdamW, lr=1e-3, weight_decay=0.05),
    "SGD": partial(SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4),
}
KERNELS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def make(network: nn.Module, factory: Any, kernels: dict[str, bool]) -> Optimizer:
    """Return an optimizer that has made its first step."""
    for parameter in network.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    optimizer: Optimizer = factory(network.parameters(), **kernels)
    optimizer.step()
    return optimizer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for network, build in NETWORKS.items():
        for name, factory in OPTIMIZERS.items():
            optimizers = {kernels: make(build(), factory, options) for kernels, options in KERNELS.items()}
            best = dict.fromkeys(KERNELS, float("inf"))
            for _ in range(repeats):
                for kernels, optimizer in optimizers.items():
                    start = time.perf_counter()
                    optimizer.step()
                    best[kernels] = min(best[kernels], time.perf_counter() - start)
            print(f"{network:<10} {name:<6}", *(f"{kernels} {1e6 * seconds:,.0f} us" for kernels, seconds in best.items()))


if __name__ == "__main__":
    main()
