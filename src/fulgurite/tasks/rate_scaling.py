"""How many samples make an optimizer step, over all processes and accumulated batches, and the rate that suits them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from fulgurite.errors import UserError, did_you_mean

Rule = Literal["none", "linear", "sqrt"]
_RULES = ("none", "linear", "sqrt")


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step.

    Args:
        batch_size: per process; None where nobody knows
        processes: of the whole job
        accumulate: batches of each process that are summed up
    """

    batch_size: int | None
    processes: int
    accumulate: int

    @classmethod
    def of(cls, trainer: Any) -> GlobalBatch:
        """Ask the trainer, and its data module or else its loaders, which are made."""
        size = getattr(trainer.datamodule, "batch_size", None)
        if size is None:
            trainer.fit_loop.setup_data()
        if size is None and trainer.fit_loop._combined_loader is not None:
            sizes = {getattr(loader, "batch_size", None) for loader in trainer.fit_loop._combined_loader.flattened}
            size = sizes.pop() if len(sizes) == 1 else None
        return cls(size, trainer.world_size, trainer.accumulate_grad_batches)

    @property
    def samples(self) -> int | None:
        """Samples of an optimizer step, of all processes together."""
        return self.batch_size and self.batch_size * self.processes * self.accumulate

    def __str__(self) -> str:
        parts = [f"{self.processes} processes"] * (self.processes > 1) + [f"{self.accumulate} batches"] * (self.accumulate > 1)
        if self.batch_size is None:
            return " x ".join(["batches of unknown size", *parts])
        return f"{self.samples:,} samples a step" + (f" ({' x '.join([f'{self.batch_size:,}', *parts])})" if parts else "")


@dataclass(frozen=True)
class RateScaling:
    """A rule by which a rate that suits one batch is made to suit another.

    Args:
        rule: "linear" for SGD (arXiv:1706.02677), "sqrt" for Adam and the like (arXiv:2205.10287), or "none"
        reference: samples of an optimizer step that the rate was found with

    Raises:
        UserError: if there is no such rule, or no reference for it
    """

    rule: Rule
    reference: int | None

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise UserError(f"rate_scaling is '{self.rule}'{did_you_mean(self.rule, _RULES)}; allowed: {', '.join(_RULES)}")
        if self.rule != "none" and self.reference is None:
            raise UserError(f"rate_scaling is {self.rule}: set reference_batch, the samples of a step that the rate suits")
        if self.reference is not None and self.reference < 1:
            raise UserError(f"reference_batch is {self.reference}; it must be at least 1")

    def factor(self, batch: GlobalBatch) -> float:
        """Return what the rate is to be multiplied by.

        Raises:
            UserError: if it is to be scaled and nobody knows the batch size
        """
        if self.rule == "none" or self.reference is None:
            return 1.0
        if batch.samples is None:
            raise UserError(
                f"rate_scaling is {self.rule}, and the data has no batch_size to scale by: "
                "take a data module that has one, or set rate_scaling to none"
            )
        share = batch.samples / self.reference
        return math.sqrt(share) if self.rule == "sqrt" else share

    def describe(self, rate: float, batch: GlobalBatch) -> str:
        """Say what a scaled rate is and where it comes from."""
        if self.rule == "none":
            return f"rate {rate:.3g}"
        how = "linearly" if self.rule == "linear" else "by the square root"
        return f"rate {rate:.3g} ({rate / self.factor(batch):.3g} scaled {how} from {self.reference:,})"
