"""Which parameters an optimizer shrinks, and how fast it moves each: groups that depend on the network alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fulgurite.errors import UserError
from fulgurite.models.blocks import blocks

# Position embeddings and class tokens, as torchvision, timm and Hugging Face name them.
_EMBEDDINGS = (
    "token",
    "cls_token",
    "class_token",
    "dist_token",
    "mask_token",
    "pos_embed",
    "pos_embedding",
    "position_embedding",
    "position_embeddings",
    "relative_position_bias_table",
)


def parameter_groups(network: nn.Module, *, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Sort a network's parameters into groups of one decay and one rate.

    Which group a parameter is in does not depend on whether it is frozen, nor on any setting but whether ``layer_decay`` is 1,
    so that a run can go on with other settings.

    Args:
        network: its parameters must have their final shapes
        layer_decay: what the rate of a layer is multiplied by for each layer that follows it (BEiT, arXiv:2106.08254)

    Raises:
        UserError: if the rates are to differ and the network does not tell its layers apart

    Returns:
        for each group ``name``, ``params``, ``share`` of the rate, and whether it ``decays``
    """
    kept, depths = undecayed(network), layer_depths(network)
    head = max(depths.values(), default=0)
    if layer_decay != 1 and head == 0:
        raise UserError(
            f"layer_decay is {layer_decay}, and {type(network).__name__} holds its layers in no nn.Sequential or nn.ModuleList, "
            "so there is no order to go by: set it to 1"
        )
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        depth, decays = depths[name] if layer_decay != 1 else head, name not in kept
        if (depth, decays) not in groups:
            layer = "" if layer_decay == 1 else "head_" if depth == head else f"layer_{depth}_"
            group = {"name": f"{layer}{'decay' if decays else 'no_decay'}", "params": []}
            groups[depth, decays] = group | {"share": layer_decay ** (head - depth), "decays": decays}
        groups[depth, decays]["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], not key[1]))]


def undecayed(network: nn.Module) -> set[str]:
    """Return the names of parameters that weight decay would harm: norms, biases, position embeddings, class tokens.

    They are those of one dimension, those named in the ``no_weight_decay()`` of the network or a part of it, as timm's have,
    and those with a name that embeddings and tokens have in networks without it.
    """
    found = {name for name, parameter in network.named_parameters() if parameter.ndim <= 1 or name.split(".")[-1] in _EMBEDDINGS}
    for prefix, module in network.named_modules():
        if callable(own := getattr(module, "no_weight_decay", None)):
            found |= {f"{prefix}.{name}" if prefix else name for name in own()}
    return found


def layer_depths(network: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter: 0 before the first block, then the number of its block.

    Blocks without parameters are not counted. What stands between two blocks, or after the last, counts with what follows.
    """
    return dict(_depths(network))


def _depths(network: nn.Module) -> Iterator[tuple[str, int]]:
    block_of = {f"{block}.{name}": block for block, part in blocks(network).items() for name, _ in part.named_parameters()}
    depth, last = 0, None
    for name, _ in network.named_parameters():
        block = block_of.get(name)
        if block is not None and block != last:
            depth, last = depth + 1, block
        yield name, depth + (block is None and depth > 0)
