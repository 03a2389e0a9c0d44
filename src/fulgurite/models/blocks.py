"""What a network is made of, one after the other: the parts that are frozen, decayed, recomputed or split one by one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated parts of a network by name, from the input to the output.

    They are what its ``nn.Sequential``s and ``nn.ModuleList``s hold, in nested ones what the innermost hold. A class derived from
    them is a block itself, as torchvision's convolutions with norm and activation are, and nothing is looked for in a block.
    What comes before the first block, or after the last, is in none.

    Args:
        network: its containers must be registered in the order of ``forward``, as they are in every network of note
    """
    return dict(_blocks(network, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    inside = _is_container(module)
    for name, child in module.named_children():
        if inside and not _is_container(child):
            yield f"{prefix}{name}", child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def _is_container(module: nn.Module) -> bool:
    # The very classes: what is derived from them has a meaning of its own.
    return type(module) in (nn.Sequential, nn.ModuleList)
