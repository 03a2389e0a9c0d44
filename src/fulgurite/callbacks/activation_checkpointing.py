"""Keep less for the backward pass: blocks of the network are computed once more in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from fulgurite.console import note
from fulgurite.errors import UserError
from fulgurite.models.blocks import blocks
from fulgurite.recorded import Recorded


class ActivationCheckpointing(Recorded, Callback):
    """Trade time for memory: of the blocks it recomputes, training keeps the input alone until the backward pass.

    Chen et al. 2016, arXiv:1604.06174. The network's blocks are what its ``nn.Sequential``s and ``nn.ModuleList``s hold.
    Gradients are the same to the bit: random numbers are drawn again as they were, and statistics such as BatchNorm's count a
    batch once. Evaluation costs nothing more.

    Args:
        every: recompute each so-manieth block: 1 for all, which saves most, 2 for every second. null is off

    Raises:
        UserError: if it is below 1
    """

    def __init__(self, *, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise UserError(
                f"activation_checkpointing.every is {every}; allowed: 1 for each block, 2 for every second, ..., or null"
            )
        self.every = every
        self._wrapped: list[nn.Module] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Wrap the blocks' forward in place, so that the weights keep their names.

        Raises:
            UserError: if the network has no blocks
        """
        if stage != "fit" or self.every is None:
            return
        network: nn.Module = getattr(pl_module, "network", pl_module)
        # A single layer's input is what its backward needs anyway.
        worthwhile = [block for block in blocks(network).values() if next(block.children(), None) is not None]
        if not worthwhile:
            raise UserError(
                f"activation_checkpointing.every is {self.every}, and {type(network).__name__} has nothing to recompute: "
                "it has no blocks of several layers in an nn.Sequential or nn.ModuleList\nset it to null"
            )
        self._wrapped = worthwhile[:: self.every]
        for block in self._wrapped:
            block.forward = partial(_checkpointed, block, block.forward)
        number = f"{len(self._wrapped)} of {len(worthwhile)} blocks"
        note("activations", f"{number} are computed again in the backward pass: less memory, more time")

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Leave the network as it was."""
        for block in self._wrapped:
            del block.forward  # the class's own is behind it
        self._wrapped = []

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Do the same when a run is stopped."""
        self.teardown(trainer, pl_module, "fit")


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    if torch.compiler.is_compiling():  # the compiler separates what is recomputed from what is updated by itself
        return checkpoint(forward, *args, use_reentrant=False, **options)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, block), **options)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the first computation and the second."""
    return nullcontext(), _spare_buffers(block)


@contextmanager
def _spare_buffers(block: nn.Module) -> Iterator[None]:
    """Give a block copies of its buffers: the first computation has updated BatchNorm's statistics already."""
    buffers = [(module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
