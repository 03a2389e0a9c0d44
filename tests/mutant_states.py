"""Put values where a checkpoint's reader does not expect them."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import torch
import yaml

from tests.mutant_pickles import CANARY


def bomb(letter: str = "a") -> str:
    """Return the YAML of 2 to the power of 25 values."""
    lines = [
        f"{letter}: &{letter}0 [x, x]",
        *(f"{letter}{n}: &{letter}{n} [*{letter}{n - 1}, *{letter}{n - 1}]" for n in range(1, 25)),
    ]
    return "\n".join(lines)


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    "os.system",
    f"{CANARY}.run",
    "x" * 100_000,
    b"x",
    [],
    {},
    [1, "x"],
    {"a": 1},
    {1: 2, None: 3},
    (1, 2),
    {1},
    1j,
    torch.zeros(0),
    torch.zeros(3),
    torch.tensor(float("nan")),
    torch.zeros(100_000),
    torch.ones(2, dtype=torch.int64),
    torch.eye(2).to_sparse(),
    torch.float32,
    [[[[[[[[{"x": "x"}]]]]]]]],
    [0] * 10_000,
    bomb("z"),
    "[" * 2000,
    {"class_path": f"{CANARY}.run", "init_args": {"x": "touch ran"}},
]
Place = tuple[Any, ...]


def places_in(value: Any, place: Place = ()) -> list[Place]:
    """Return where something is: the keys and indices that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [places_in(item, (*place, key)) for key, item in items]
    return [place, *(each for several in found for each in several)]


def change(tree: Any, place: Place, rng: random.Random) -> str:
    """Put another value in a place, take it away, or put one beside it."""
    *way, last = place
    for key in way:
        tree = tree[key]
    kind = rng.choice(["replace", "replace", "replace", "remove", "add"])
    value = copy.deepcopy(rng.choice(VALUES))
    if kind == "remove":
        del tree[last]
    elif kind == "add" and isinstance(tree, list):
        tree.append(value)
    elif kind == "add":
        tree[rng.choice(["x", 0, None, (1, 2)])] = value
    else:
        tree[last] = value
    return f"{kind} {'.'.join(map(str, place))} {str(value)[:30]}"


def changed_states(intact: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield files with one or a few changes in what they hold, a part of them in the configuration's text."""
    for number in range(count):
        checkpoint = torch.load(io.BytesIO(intact), weights_only=True)
        what = []
        for _ in range(rng.choice([1, 1, 1, 3])):
            if rng.random() < 0.3 and isinstance(checkpoint.get("fulgurite"), dict):
                what.append(change_configuration(checkpoint["fulgurite"], rng))
                continue
            top = rng.choice([key for key in checkpoint if key is not None])  # the weights have the most places
            place = rng.choice(places_in(checkpoint[top], (top,)))
            what.append(change(checkpoint, place, rng))
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        yield f"{number} {'; '.join(what)}", buffer.getvalue()


HOSTILE_YAML = [
    "a: !!python/name:os.system ''",
    bomb(),
    "[" * 5000,
    "{" * 5000,
    "a:\n- " * 3,
    "&a [*a]",
    "x: 1:" * 99,
    "\x00",
    "- x",
]


def change_configuration(description: dict[str, Any], rng: random.Random) -> str:
    """Change a value in the configuration, or put another text in its place."""
    text = description.get("config")
    if not isinstance(text, str) or text in HOSTILE_YAML or rng.random() < 0.1:
        description["config"] = rng.choice(HOSTILE_YAML)
        return f"configuration {description['config'][:60]}"
    try:
        sections = yaml.safe_load(text)
        what = change(sections, rng.choice(places_in(sections)[1:]), rng)
        description["config"] = yaml.safe_dump(sections)
    except yaml.YAMLError:
        return "configuration as it was"  # YAML has no word for the value
    return f"configuration {what}"
