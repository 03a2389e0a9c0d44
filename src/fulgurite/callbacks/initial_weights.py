"""Start a training from weights that exist already, and say which of them were taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fulgurite.callbacks.finite import not_finite
from fulgurite.console import is_rank_zero, note
from fulgurite.errors import UserError, name_list, shown
from fulgurite.recorded import Recorded
from fulgurite.weight_matching import Match, match
from fulgurite.weights import find_weights, read_weights


class InitialWeights(Recorded, Callback):
    """Start from weights that exist: those of a run, a .pth, a .safetensors.

    They are in the network before anything is made of it: averages, optimizers, DDP's copies. Only a training that begins
    gets them: one that continues has its weights from its checkpoint, and the file need not be there any more.

    Args:
        path: a file of weights (.ckpt, .pth, .pt, .bin, .safetensors), a run folder for its best checkpoint, or best or last
            for those of the latest run; null for none
        rename: prefixes of the file's names and what to put in their place, in this order
        strict: every tensor of the network must be found, and every one of the file used; else load what fits, and list the rest

    Raises:
        UserError: if the other options are given without a path
    """

    def __init__(self, *, path: str | Path | None = None, rename: dict[str, str] | None = None, strict: bool = True) -> None:
        if path is None and (rename or not strict):
            raise UserError("weights.path is null, so there is nothing to rename or to be less strict about: set it")
        self.path = path
        self.rename = rename
        self.strict = strict

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Load the weights.

        Raises:
            UserError: if they cannot be read, or do not fit
        """
        if stage != "fit" or self.path is None:
            return
        # Lightning sets trainer.ckpt_path later; until then it may name what an earlier test was of.
        resume_from = getattr(trainer, "resume_from", None)
        if resume_from or trainer.global_step:
            whence = resume_from or f"step {trainer.global_step:,}"
            note("weights", f"{self.path} is left alone: the training continues from {whence}")
            return
        file = read_weights(find_weights(self.path, getattr(trainer, "runs_dir", Path("runs"))))
        found = match(file, getattr(pl_module, "network", pl_module), self.rename)
        if not found.loaded or (self.strict and not found.is_complete):
            raise UserError(_misfit(found, strict=self.strict))
        found.load()
        if name := not_finite(pl_module):
            raise UserError(f"{file.path} gives the network weights that are no numbers: {shown(name)} has NaN or infinity")
        _tell(found)


def _tell(found: Match) -> None:
    path, loaded = found.file.path, found.loaded
    part = "" if found.is_complete else f" of {len(found.wanted)}"
    note("weights", f"{len(loaded)}{part} tensors, {_values(loaded.values()):,} values, from {path}")
    if found.automatic:
        old, new = list(found.rename.items())[-1]
        note("", f"'{old}' was taken off the file's names" if old else f"'{new}' was put before the file's names")
    kinds = Counter((tensor.dtype, found.wanted[name].dtype) for name, tensor in loaded.items())
    for (given, wanted), number in kinds.items():
        if given != wanted:
            note("", f"{number} tensors were made {_plain(wanted)} of {_plain(given)}")
    if not found.is_complete:
        if is_rank_zero():
            Console().print(_table(found))
        if found.suggestion:
            note("", f"more fits with {found.suggestion}")
    elif found.outside or found.file.ignored:
        note("", f"not used: {group([*found.outside, *found.file.ignored])}")


def _table(found: Match) -> Table:
    table = Table("weights", "tensors", "values", "names", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:3]:
        column.justify = "right"
    not_used = {found.names[name]: found.file.tensors[found.names[name]] for name in found.unused}
    rows: list[tuple[str, dict[str, Tensor], str]] = [
        ("loaded", found.loaded, group(found.loaded)),
        ("other shape, as initialised", {name: found.wanted[name] for name in found.other_shape}, _shapes(found)),
        ("missing, as initialised", {name: found.wanted[name] for name in found.missing}, group(found.missing)),
        ("not used", not_used, group([*not_used, *found.file.ignored])),
    ]
    for what, tensors, names in rows:
        if names:
            table.add_row(what, str(len(tensors)), f"{_values(tensors.values()):,}", Text(names, overflow="fold"))
    return table


def _misfit(found: Match, *, strict: bool) -> str:
    left = [found.names[name] for name in found.unused if name not in found.outside]
    lines = [
        f"{found.file.path} does not fit the network: {len(found.loaded)} of its {len(found.wanted)} tensors were found",
        f"missing in the file: {group(found.missing)}" if found.missing else "",
        f"of other shape: {_shapes(found)}" if found.other_shape else "",
        f"left over: {group(left)}" if left else "",
        f"a rename that fits: {found.suggestion}" if found.suggestion else "",
        "to load what fits: --weights.strict false" if strict and found.loaded else "",
    ]
    return "\n".join(line for line in lines if line)


def _shapes(found: Match) -> str:
    """Return names with their shapes, given and wanted, or types where those are at fault; of many one for an example."""
    texts = []
    for name, given in found.other_shape.items():
        wanted = found.wanted[name]
        given_as, wanted_as = (
            (tuple(given.shape), tuple(wanted.shape)) if given.shape != wanted.shape else (given.dtype, wanted.dtype)
        )
        texts.append(f"{_printable(name)} is {_plain(given_as)}, wanted {_plain(wanted_as)}")
    return ", ".join(texts) if len(texts) <= 4 else f"{group(found.other_shape)}, such as {texts[0]}"


def group(names: Iterable[str], most: int = 6) -> str:
    """Join names in a line; where they are many, those of one module into one entry such as ``layer1.* (24)``."""
    parts = [_printable(name).split(".") for name in names]
    if len(parts) <= 4:
        return ", ".join(map(".".join, parts))
    shared = len(list(takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))))
    groups = _modules(parts, shared + 1)
    if len(groups) > most and shared:
        groups = _modules(parts, shared)
    return name_list((f"{module}.* ({len(ends)})" if len(ends) > 1 else ends[0] for module, ends in groups.items()), limit=most)


def _modules(parts: list[list[str]], depth: int) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in parts:
        groups.setdefault(".".join(name[:depth]), []).append(".".join(name))
    return groups


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)  # a stranger's file must not steer the terminal


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _values(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
