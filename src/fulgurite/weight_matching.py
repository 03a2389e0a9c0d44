"""Match the tensors of a file to those of a network by name, and say what would make more of them fit."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.weights import Tensors, WeightsFile

_NAME = re.compile(r"[\w.]*")  # others are a stranger's joke, and what is printed may be pasted into a shell


@dataclass
class Match:
    """Which tensors of a file go where in a network.

    Args:
        file: that they come from
        wanted: the network's tensors, by name
        names: of the file's tensors, by what they are called after renaming
        rename: prefixes of the file's names, and what was put in their place
        automatic: the last of them was found, not given
    """

    file: WeightsFile
    wanted: Tensors
    names: dict[str, str]
    rename: dict[str, str]
    automatic: bool

    def __post_init__(self) -> None:
        given = {name: self.file.tensors[source] for name, source in self.names.items()}
        self.loaded = {name: given[name] for name in self.wanted if name in given and fits(given[name], self.wanted[name])}
        self.other_shape = {name: given[name] for name in self.wanted if name in given and name not in self.loaded}
        filled = {id(self.wanted[name]) for name in self.loaded}  # of tied tensors a file may hold one
        self.missing = [name for name in self.wanted if name not in given and id(self.wanted[name]) not in filled]
        self.unused = [name for name in given if name not in self.wanted]

    @property
    def outside(self) -> list[str]:
        """The names of unused tensors beside the prefix that was taken off, as a task has them beside its network."""
        prefixes = tuple(old for old, new in self.rename.items() if old and not new)
        return [name for name in self.unused if prefixes and not self.names[name].startswith(prefixes)]

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of the network was found, and every one of the file used but those :attr:`outside`."""
        return not (self.missing or self.other_shape or len(self.unused) > len(self.outside))

    @property
    def suggestion(self) -> str:
        """The option with a rename by which more would fit; empty if there is none."""
        left = {name: self.file.tensors[self.names[name]] for name in self.unused}
        found = find_renames(left, {name: self.wanted[name] for name in self.missing})
        new_ones = [(old, new) for old, new in found[:2] if old not in self.rename and _NAME.fullmatch(old)]
        options = [json.dumps({**self.rename, old: new}) for old, new in new_ones]
        return " or ".join(shlex.join(["--weights.rename", option]) for option in options)

    @torch.no_grad()
    def load(self) -> None:
        """Copy the tensors into the network's own, which keep their device, type, memory format and ties."""
        for name, tensor in self.loaded.items():
            self.wanted[name].copy_(tensor)


def fits(given: Tensor, wanted: Tensor) -> bool:
    """Return whether a tensor can take another's place: shapes agree, and both are real, complex, whole or quantised numbers."""
    kinds = [(tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized) for tensor in (given, wanted)]
    return given.shape == wanted.shape and kinds[0] == kinds[1]


def match(file: WeightsFile, network: nn.Module, rename: Mapping[str, str] | None = None) -> Match:
    """Match a file's tensors to a network's by name.

    Args:
        file: the weights
        network: that is to take them
        rename: prefixes of the file's names and what to put in their place, one after the other. If no name of the file is
            one of the network's then, and one prefix taken off or put before brings most of them together, that is done

    Raises:
        UserError: if a rename matches nothing, or makes one name of two
    """
    wanted = {name: value for name, value in network.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    steps, names = dict(rename or {}), {name: name for name in file.tensors}
    for old, new in steps.items():
        names = _renamed(names, old, new, file)
    automatic = None
    if not names.keys() & wanted.keys():
        found = find_renames({name: file.tensors[source] for name, source in names.items()}, wanted, by_shape=False)
        one_sided = [(old, new) for old, new in found if not (old and new) and old not in steps]
        automatic = one_sided[0] if len(one_sided) == len(found) == 1 else None
    if automatic:
        names, steps = _renamed(names, *automatic, file), steps | dict([automatic])
    return Match(file, wanted, names, steps, automatic is not None)


def _renamed(names: dict[str, str], old: str, new: str, file: WeightsFile) -> dict[str, str]:
    if not any(name.startswith(old) for name in names):
        prefixes = sorted({prefix for name in names for prefix, _ in _splits(name) if prefix})
        first = sorted({name.partition(".")[0] + "." for name in names if "." in name})
        raise UserError(
            f"weights.rename: no tensor of {file.path} begins with '{old}'{did_you_mean(old, prefixes)}\n"
            f"they begin with {name_list(first or names)}"
        )
    made = [(new + name.removeprefix(old) if name.startswith(old) else name, source) for name, source in names.items()]
    twice = [name for name, count in Counter(name for name, _ in made).items() if count > 1]
    if twice:
        raise UserError(f"weights.rename: '{old}' to '{new}' makes one name of two in {file.path}: {name_list(twice)}")
    return dict(made)


def find_renames(given: Tensors, wanted: Tensors, *, by_shape: bool = True) -> list[tuple[str, str]]:
    """Return the prefix and its substitute by which most names agree; several if they do equally well.

    Args:
        given: tensors of a file
        wanted: those of a network; a prefix that serves less than half of the smaller side is left out
        by_shape: whether the shapes have to agree, too
    """
    ends: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in wanted.items():
        for new, end in _splits(name):
            ends.setdefault(end, []).append((new, tensor))
    votes: Counter[tuple[str, str]] = Counter()
    for name, tensor in given.items():
        for old, end in _splits(name):
            votes.update(
                (old, new) for new, other in ends.get(end, ()) if old != new and not (by_shape and not fits(tensor, other))
            )
    most = max(votes.values(), default=0)
    if not most or 2 * most < min(len(given), len(wanted)):
        return []
    best = [pair for pair, count in votes.items() if count == most]
    # `a.b.` to `c.b.` says no more than `a.` to `c.`
    return [(old, new) for old, new in best if not any(_is_longer((old, new), other) for other in best)]


def _is_longer(pair: tuple[str, str], other: tuple[str, str]) -> bool:
    (old, new), (short_old, short_new) = pair, other
    return pair != other and old.startswith(short_old) and new == short_new + old.removeprefix(short_old)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield a dotted name as prefix and end, cut before each of its parts; the first prefix is empty."""
    yield "", name
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()], name[dot.end() :]
