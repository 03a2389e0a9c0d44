"""Make an optimizer of a network's parameters: groups, rates, and the kernels that it computes with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from fulgurite.console import is_rank_zero, note
from fulgurite.errors import UserError
from fulgurite.tasks.parameter_groups import parameter_groups

# On a CPU a fused step was measured to be the quickest by far (benchmarks/optimizer_step.py); for a GPU PyTorch's documentation
# says so, not measured here. Adagrad has one, too, but not on every device.
_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_CLASSES = (Adam, SGD)  # AdamW is an Adam
Factory = Callable[[Iterable[Any]], Optimizer]


def make_optimizer(
    factory: Factory, network: nn.Module, trainer: Any, *, scale: float = 1.0, layer_decay: float = 1.0, decay_all: bool = False
) -> Optimizer:
    """Make an optimizer, and tell its groups.

    Args:
        factory: class, or partial of one, that takes the parameters
        network: all its parameters get into the optimizer, frozen ones too: without a gradient a step leaves them alone
        trainer: decides on the device and the precision
        scale: what the rate is multiplied by
        layer_decay: what a layer's rate is multiplied by for each layer that follows it
        decay_all: whether weight decay is for norms, biases and embeddings, too

    Raises:
        UserError: if the rate is to be changed and the optimizer has none, or groups of its own; if it is set to fused where
            gradients could not be clipped
    """
    plain = factory(list(network.parameters()))
    values, changes_rate = plain.defaults, scale != 1 or layer_decay != 1
    own_groups, rate = len(plain.param_groups) > 1, values.get("lr")
    if changes_rate and (own_groups or rate is None):
        lacks = "makes groups of its own" if own_groups else "has no rate"
        raise UserError(f"{type(plain).__name__} {lacks}, so set layer_decay to 1 and rate_scaling to none")
    if own_groups:
        note("optimizer", f"{type(plain).__name__}, with {len(plain.param_groups)} parameter groups of its own")
        return plain
    fused, why = _fused(factory, plain, trainer)
    options: dict[str, Any] = {"fused": True} if fused else {}
    if not changes_rate and "weight_decay" not in values:
        groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    else:
        groups = [_settings(group, values, scale, decay_all) for group in parameter_groups(network, layer_decay=layer_decay)]
    made = factory(groups, **options)
    _tell(made, f"{type(made).__name__}{', fused' if fused else why}")
    return made


def _settings(group: dict[str, Any], values: dict[str, Any], scale: float, decay_all: bool) -> dict[str, Any]:
    share, decays = group.pop("share"), group.pop("decays")
    if scale * share != 1:
        group["lr"] = values["lr"] * scale * share
    if not (decays or decay_all) and "weight_decay" in values:
        group["weight_decay"] = 0.0
    return group


def _fused(factory: Factory, plain: Optimizer, trainer: Any) -> tuple[bool, str]:
    """Return whether to take the fused kernels, and the reason against them where they might have been expected."""
    values, device, precision = plain.defaults, torch.device(trainer.strategy.root_device).type, trainer.precision
    clips = bool(trainer.gradient_clip_val) and precision in ("16-mixed", "bf16-mixed")
    if clips and values.get("fused"):
        raise UserError(
            f"the optimizer is set to fused, and Lightning refuses to clip its gradients with trainer.precision {precision}: "
            "take out fused, or trainer.gradient_clip_val"
        )
    decided = values.get("fused", False) is not None or values.get("foreach") is not None or values.get("differentiable")
    parameters = [parameter for group in plain.param_groups for parameter in group["params"]]
    ordinary = all(type(one) is nn.Parameter and one.is_floating_point() for one in parameters)
    takes_it = isinstance(plain, _FUSED_CLASSES) and _can_be_called_with(factory, fused=True)
    if decided or device not in _FUSED_DEVICES or not (ordinary and takes_it):
        return False, ""
    if clips:
        return False, ", not fused: Lightning refuses to clip its gradients in mixed precision"
    # With 16-mixed a fused step takes off the loss scale by itself, where another waits for the device to tell of overflows.
    # So callbacks see scaled gradients; those of this project only drop or multiply them.
    return True, ""


def _can_be_called_with(factory: Factory, **options: Any) -> bool:
    try:
        inspect.signature(factory).bind([], **options)
    except TypeError:
        return False
    return True


def _tell(optimizer: Optimizer, what: str) -> None:
    groups = optimizer.param_groups
    if len(groups) <= 2:
        note("optimizer", f"{what}; {_decay_text(groups)}")
        return
    note("optimizer", f"{what}; {len(groups)} parameter groups")
    table = Table("group", "tensors", "values", "rate", "weight decay", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for group in groups:
        values = sum(parameter.numel() for parameter in group["params"])
        decay = f"{group['weight_decay']:.3g}" if "weight_decay" in group else ""
        table.add_row(group["name"], f"{len(group['params']):,}", f"{values:,}", f"{float(group['lr']):.3g}", decay)
    if is_rank_zero():
        Console().print(table)


def _decay_text(groups: list[dict[str, Any]]) -> str:
    spared = sum(len(group["params"]) for group in groups if not group.get("weight_decay"))
    total = sum(len(group["params"]) for group in groups)
    if spared == total:
        return "no weight decay"
    decay = max(float(group["weight_decay"]) for group in groups)
    rest = f"{total - spared} tensors, none on {spared} norms, biases and embeddings" if spared else f"all {total} tensors"
    return f"weight decay {decay:.3g} on {rest}"
