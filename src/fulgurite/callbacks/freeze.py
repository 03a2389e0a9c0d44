"""Train a part of the network, and more of it later."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fulgurite.console import note
from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.recorded import Recorded


class Freeze(Recorded, Callback):
    """Keep parts of the network as they are, for good or until an epoch.

    What is frozen gets no gradient and no weight decay, and its BatchNorms keep their statistics and use them. A name is that
    of a parameter or module of the network, which stands for all within it; ``*`` and ``?`` are wildcards.

    Args:
        names: what to freeze; ["*"] for all. Empty is off
        but: what of it to train nevertheless, such as ["head"]
        unfreeze: what to train later: {epoch: names}, epochs counted from 0

    Raises:
        UserError: if an epoch makes no sense; before the first batch, if a name fits nothing or all would stay frozen
    """

    def __init__(
        self, *, names: list[str] | None = None, but: list[str] | None = None, unfreeze: dict[int, list[str]] | None = None
    ) -> None:
        self.names, self.but = list(names or ()), list(but or ())
        self.unfreeze = {int(epoch): list(later) for epoch, later in sorted((unfreeze or {}).items())}
        if not self.names and (self.but or self.unfreeze):
            raise UserError('freeze.names is empty, so there is nothing to leave out or to unfreeze: set it, such as to ["*"]')
        if self.unfreeze and min(self.unfreeze) < 1:
            raise UserError(f"freeze.unfreeze has epoch {min(self.unfreeze)}; epochs count from 0, so it must be at least 1")
        # By name, as a strategy may put others in the place of modules (SyncBatchNorm) and of parameters (FSDP2).
        self._network = nn.Module()
        self._frozen: set[str] = set()
        self._norms: set[str] = set()
        self._in_ddp = False
        self._dropped: list[nn.Parameter] = []  # those whose gradients are computed, and dropped

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Freeze before the optimizer is made, which is given all parameters all the same.

        Raises:
            UserError: if a name fits nothing or all would stay frozen
        """
        if stage != "fit" or not self.names:
            return
        self._network = network = getattr(pl_module, "network", pl_module)
        # What the network itself does not train is left alone, now and when something is unfrozen.
        parameters = {name: value for name, value in network.named_parameters() if value.requires_grad}
        for name in (*self.names, *self.but, *(name for later in self.unfreeze.values() for name in later)):
            _require_match(name, parameters)
        self._frozen = {name for name in parameters if self._is_meant(name)}
        norms = {name for name, module in network.named_modules() if isinstance(module, _BatchNorm)}
        self._norms = {name for name in norms if self._is_meant(f"{name}.weight")}
        if len(self._frozen) == len(parameters) and not self.unfreeze:
            raise UserError('all of the network is frozen: name what to train, such as --freeze.but "[head]"')
        # DDP exchanges the gradients of what wants one when it wraps the module, and of nothing that is unfrozen later.
        self._in_ddp = trainer.world_size > 1 and bool(self.unfreeze)
        for name in self._frozen:
            parameters[name].requires_grad_(self._in_ddp)
        self._tell(sum(parameters[name].numel() for name in self._frozen), len(parameters))
        if 0 < (trainer.max_epochs or 0) <= max(self.unfreeze, default=0):
            note("", f"trainer.max_epochs is {trainer.max_epochs}, so epoch {max(self.unfreeze)} never comes")

    def _is_meant(self, name: str) -> bool:
        return _fits(name, self.names) and not _fits(name, self.but)

    def _tell(self, values: int, of: int) -> None:
        norms = f"; {len(self._norms)} BatchNorms keep their statistics" if self._norms else ""
        note("freeze", f"{len(self._frozen)} of {of} parameters are frozen, {values:,} values{norms}")
        for epoch, later in self.unfreeze.items():
            note("", f"from epoch {epoch} (counted from 0) also trained: {name_list(later)}")
        if self._in_ddp:
            note("", "their gradients are computed and dropped, as DDP would never exchange those of what is unfrozen later")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Unfreeze what is due, also in a run that goes on in the middle of an epoch."""
        if self._frozen:
            self._unfreeze(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Unfreeze what is due; leave the frozen norms in evaluation mode, whatever set the module to training."""
        if self._frozen:
            self._unfreeze(trainer.current_epoch)

    def _unfreeze(self, epoch: int) -> None:
        due = [name for first, later in self.unfreeze.items() if first <= epoch for name in later]
        for name, value in self._values():
            value.requires_grad_(self._in_ddp or _fits(name, due))
        self._dropped = [value for name, value in self._values() if not _fits(name, due)] if self._in_ddp else []
        for name in self._norms:
            self._network.get_submodule(name).train(_fits(f"{name}.weight", due))

    def _values(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, value) for name, value in self._network.named_parameters() if name in self._frozen]

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Drop the gradients of what is frozen, before they are clipped."""
        for value in self._dropped:
            value.grad = None

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a module that can be trained; Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Leave a module that can be trained."""
        for _, value in self._values():
            value.requires_grad_(True)
        for name in self._norms:
            self._network.get_submodule(name).train(pl_module.training)
        self._network, self._frozen, self._norms, self._dropped = nn.Module(), set(), set(), []


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def _require_match(pattern: str, names: Iterable[str]) -> None:
    names = list(names)
    if any(_fits(name, [pattern]) for name in names):
        return
    parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, 4)}
    top = list(dict.fromkeys(name.split(".")[0] for name in names))
    hint = did_you_mean(pattern, sorted(parents))
    raise UserError(f"freeze: nothing in the network is named '{pattern}'{hint}; it consists of {name_list(top)}")
