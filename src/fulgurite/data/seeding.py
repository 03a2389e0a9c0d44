"""Seeds that depend on where a run is and on nothing else, and the generators that must be given them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_MOST = 100  # longer lists hold samples; to look at each would take seconds and copy their memory into each worker


def mix_seed(*parts: int) -> int:
    """Return one well-spread 63-bit seed from several integers (splitmix64, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch, at 6 us a call."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed costs 170 us: it queues a lazy call for every kind of device.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_one(generator: Any, seed: int) -> None:
    """Seed a generator that somebody made, at 3 to 20 us a call."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed & 0xFFFFFFFF)


def own_generators(thing: Any) -> list[Any]:
    """Find the generators that a data set's code may draw from: in attributes, closures, and globals of its modules.

    Each worker inherits a copy in the same state, so all would make the same draws, and the same in each epoch.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, _GENERATORS):
                found.append(one)
            else:
                waiting.extend(_within(one))
    return [one for one in found if one is not torch.default_generator]


def _within(one: Any) -> Iterator[Any]:
    if isinstance(one, dict | list | tuple):
        if len(one) <= _MOST:
            yield from one.values() if isinstance(one, dict) else one
    elif isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, FunctionType):
        yield from _globals(one.__globals__)
        yield from (cell.cell_contents for cell in one.__closure__ or ())
    elif not isinstance(one, type | ModuleType) and hasattr(one, "__dict__"):
        yield from vars(one).values()
        for base in type(one).__mro__:
            yield from _globals(vars(sys.modules.get(base.__module__, object)))


def _globals(names: Any) -> Iterator[Any]:
    return (value for value in list(names.values()) if isinstance(value, _GENERATORS))
