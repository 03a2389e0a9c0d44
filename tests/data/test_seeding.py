from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch

from fulgurite.data.seeding import mix_seed, own_generators, seed_generators, seed_one

module_generator = np.random.default_rng(0)


def draw_from_module(image: float) -> float:
    return image + float(module_generator.random())


class Transforms:
    """Keep generators wherever people keep them."""

    def __init__(self) -> None:
        closed_over = torch.Generator()
        self.attribute = random.Random(0)
        self.steps: list[Any] = [
            draw_from_module,
            partial(np.add, np.random.RandomState(0)),
            lambda image: image + torch.rand((), generator=closed_over),
        ]
        self.names = [str(number) for number in range(1000)]
        self.itself = self


def test_mixed_seeds_never_change() -> None:
    # Another mixer would give every run another order and other augmentations.
    assert mix_seed(0, 1, 0) == 2966030176003100270
    assert mix_seed(-1) == mix_seed(2**64 - 1)


def test_mixed_seeds_differ() -> None:
    seeds = {mix_seed(seed, use, epoch, index) for seed in (0, 1) for use in (1, 2) for epoch in range(5) for index in range(50)}
    assert len(seeds) == 2 * 2 * 5 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_global_generators_are_seeded() -> None:
    def draws(seed: int) -> tuple[float, float, float]:
        seed_generators(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draws(3) == draws(3)
    assert all(one != other for one, other in zip(draws(3), draws(2**62), strict=True))


def test_generators_are_found_wherever_they_are_and_seeded() -> None:
    found = own_generators(Transforms())
    assert sorted(type(one).__name__ for one in found) == ["Generator", "Generator", "Random", "RandomState"]
    assert module_generator in found
    for generator in found:
        seed_one(generator, 2**62)
        first = draw(generator)
        seed_one(generator, 2**62)
        assert draw(generator) == first
        seed_one(generator, 1)
        assert draw(generator) != first


def draw(generator: Any) -> float:
    return float(torch.rand((), generator=generator)) if isinstance(generator, torch.Generator) else float(generator.random())


def test_data_without_generators_has_none() -> None:
    assert own_generators(torch.utils.data.TensorDataset(torch.zeros(3))) == []
