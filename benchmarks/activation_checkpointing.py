"""Answer: how much memory does ``activation_checkpointing`` save, and how much time does it cost?

Run ``python benchmarks/activation_checkpointing.py``; ``--rounds 10`` for steadier times.

Memory is what forward leaves for the backward pass: the bytes of all tensors that autograd keeps, each storage once, without
the weights. It is counted, not measured, so it is the same on each machine. Time is that of the processor for a step forward
and backward, on one thread; the variants take turns. Not counted is what the backward pass needs itself: one block at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from fulgurite.callbacks.activation_checkpointing import ActivationCheckpointing
from fulgurite.models import ResNet

VARIANTS = (None, 2, 1)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": partial(ResNet, 1000, 3, block="bottleneck", layers=(3, 4, 6, 3), stem="large"),
    "ViT-S/16": partial(VisionTransformer, 224, 16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536),
}


def kept(network: nn.Module, images: Tensor) -> int:
    """Return how many bytes the forward pass leaves for the backward pass, recomputed blocks' inputs among them.

    Args:
        network: its weights do not count
        images: (B, C, H, W) float32
    """
    weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
    held: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return value

    # The outputs of recomputed blocks are held by their successors; their inputs are caught as arguments of the blocks.
    hooks = [block.register_forward_pre_hook(lambda _, args: [pack(arg) for arg in args] and None) for block in wrapped(network)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = network(images)
    del output
    for hook in hooks:
        hook.remove()
    return sum(held.values())


def wrapped(network: nn.Module) -> list[nn.Module]:
    """Return the blocks that are recomputed."""
    return [module for module in network.modules() if "forward" in vars(module)]


def prepare(network: nn.Module, every: int | None) -> nn.Module:
    """Wrap the blocks as the section of the configuration does."""
    task = cast(Any, SimpleNamespace(network=network))
    ActivationCheckpointing(every=every).setup(None, task, "fit")
    return network


def step(network: nn.Module, images: Tensor) -> float:
    """Return the seconds of the processor for forward and backward."""
    start = time.process_time()
    network(images).square().mean().backward()
    return time.process_time() - start


def main() -> None:
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant takes a step")
    parser.add_argument("--batch_size", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(options.batch_size, 3, 224, 224)
    for name, make in NETWORKS.items():
        networks = [prepare(make(), every) for every in VARIANTS]
        sizes = [kept(network, images) for network in networks]
        times: list[list[float]] = [[] for _ in networks]
        for _ in range(options.rounds + 1):
            for network, taken in zip(networks, times, strict=True):
                taken.append(step(network, images))
        print(f"{name}, {options.batch_size} images of 224x224{'kept, MiB':>16}{'of all':>9}{'s a step':>10}{'ratio':>8}")
        medians = [statistics.median(taken[1:]) for taken in times]  # the first step warms up
        for every, size, seconds in zip(VARIANTS, sizes, medians, strict=True):
            ratio, share = seconds / medians[0], size / sizes[0]
            print(f"  every: {every or 'null':<29}{size / 2**20:>16.0f}{share:>9.2f}{seconds:>10.2f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
