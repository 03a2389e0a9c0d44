"""Train one set of weights; validate, save and hand out its moving average."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fulgurite.console import note
from fulgurite.errors import UserError
from fulgurite.recorded import Recorded

_KEY = "ema"


class EMA(Recorded, Callback):
    """Average the weights over the last optimizer steps: it often scores better than the weights of any one step.

    The average is taken over the parameters and floating-point buffers, such as the statistics of BatchNorm, of the
    task's state dict (Polyak and Juditsky, https://doi.org/10.1137/0330046; for networks arXiv:1703.01780). The n-th
    update keeps ``min(decay, (1 + n) / (10 + n))`` of it, n from 0, so that a short run's average forgets its start.

    It is in the module while validation runs and after the fit, and in ``state_dict`` of each checkpoint, so that what
    reads one need not know of it. The trained weights are beside it, for a resumed run. A checkpoint of weights alone,
    ``trainer.save_checkpoint(..., weights_only=True)``, asks no callback and holds what is in the module.

    Args:
        decay: share of the average that a step keeps; 0.999 spans about a thousand steps. None is off
        uniform: in place of a decay, let all steps count the same (stochastic weight averaging, arXiv:1803.05407); begin it
            late, at a rate that is not yet zero
        start_step: optimizer steps before the average begins, with the weights of that moment

    Raises:
        UserError: if a number makes no sense
    """

    def __init__(self, *, decay: float | None = None, uniform: bool = False, start_step: int = 0) -> None:
        if decay is not None and not 0 < decay < 1:
            raise UserError(f"ema.decay is {decay}; allowed: above 0 and below 1, such as 0.999, or null for no average")
        if start_step < 0:
            raise UserError(f"ema.start_step is {start_step}; it must be at least 0")
        if decay is not None and uniform:
            raise UserError(f"ema.decay is {decay}, and ema.uniform lets all steps count the same: set one of them")
        if decay is None and not uniform and start_step:
            raise UserError(f"ema.start_step is {start_step}, and ema.decay is null, so there is no average: set it")
        self.decay = decay
        self.uniform = uniform
        self.start_step = start_step
        self._average: dict[str, Tensor] = {}  # empty before it begins; at least float32, as bfloat16 drops small changes
        self._trained: dict[str, Tensor] = {}  # what the module had before the average was put into it
        self._updates = 0
        self._step = 0  # the last optimizer step that was looked at

    @property
    def _is_on(self) -> bool:
        return self.decay is not None or self.uniform

    @property
    def _kind(self) -> str:
        return "uniform" if self.uniform else f"decay {self.decay}"

    def _share_kept(self) -> float:
        if self.decay is None:
            return (1 + self._updates) / (2 + self._updates)  # the weights that it began with count as one step
        return min(self.decay, (1 + self._updates) / (10 + self._updates))

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run's average: whatever the module has from here on is meant.

        Raises:
            UserError: if the strategy leaves no process with the whole weights
        """
        self._average, self._trained, self._updates = {}, {}, 0
        if stage == "fit" and self._is_on and trainer.strategy.restore_checkpoint_after_setup:
            raise UserError(
                f"ema is on ({self._kind}), and {type(trainer.strategy).__name__} splits the weights between processes\n"
                "use trainer.strategy ddp, or set ema.decay to null and ema.uniform to false"
            )

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the trained weights back into a module that goes on training, and keep the average."""
        if trainer.state.fn != "fit":
            return
        wanted = self._is_on and checkpoint["global_step"] >= self.start_step
        if saved := checkpoint.get(_KEY):
            pl_module.load_state_dict(saved["trained"], strict=False)  # a part of the state that was loaded already
            if wanted:
                self._average = {name: checkpoint["state_dict"][name] for name in saved["trained"]}
                self._updates = saved["updates"]
            else:
                reason = f"start_step is {self.start_step:,}" if self._is_on else "decay is null"
                note("ema", f"{reason}: the checkpoint's average is left out, and its trained weights are trained on")
        elif wanted:
            note("ema", "the checkpoint has no average: a new one begins with its weights")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the average, or bring the checkpoint's to the device, if its time has come."""
        self._step = trainer.global_step
        if not self._is_on:
            return
        begins = f"from step {self.start_step:,} " if self._step < self.start_step else ""
        note("ema", f"{begins}an average of the weights, {self._kind}, is what is validated and saved")
        if self._step >= self.start_step:
            self._begin(pl_module)

    def _begin(self, pl_module: LightningModule) -> None:
        saved, self._average = self._average, {}
        for name, value in _floating(pl_module).items():
            average = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
            self._average[name] = average.copy_(saved[name]) if name in saved else average

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the average after an optimizer step, which with accumulation is not each batch."""
        if not self._is_on or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._average:
            kept = self._share_kept()
            average, now = _aligned(self._average, _floating(pl_module))
            torch._foreach_lerp_(average, [new.to(old.dtype) for old, new in zip(average, now, strict=True)], 1 - kept)
            self._updates += 1
        elif self._step >= self.start_step:
            self._begin(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Validate the average."""
        self._swap_in(pl_module)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Train on with the trained weights."""
        self._swap_out(pl_module)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the trained weights in the module when validation is interrupted."""
        if trainer.state.fn == "fit":
            self._swap_out(pl_module)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leave the average in the module, which is what was validated."""
        if self._average:
            self._swap_in(pl_module)
        elif self._is_on:
            note("ema", f"no average: it begins at step {self.start_step:,}, and the run ended at {trainer.global_step:,}")

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Free the device as Lightning does; the weights stay for a checkpoint that is saved by hand."""
        self._average, self._trained = _on_cpu(self._average), _on_cpu(self._trained)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the average as the weights, and the trained ones beside it, whichever of them the module has now."""
        if self._average:
            state = checkpoint["state_dict"]
            trained = self._trained or {name: state[name] for name in self._average}
            checkpoint["state_dict"] = {**state, **self._average}
            checkpoint[_KEY] = {"trained": trained, "updates": self._updates}

    def _swap_in(self, pl_module: LightningModule) -> None:
        if not self._average:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # Parameters are the same everywhere. Buffers, such as BatchNorm's, saw other samples, and rank 0's are saved.
            parameters = dict(pl_module.named_parameters())
            for name, value in self._average.items():
                if name not in parameters:
                    dist.broadcast(value, src=0)
        self._trained = {name: value.clone() for name, value in _floating(pl_module).items()}
        _copy(self._average, pl_module)

    def _swap_out(self, pl_module: LightningModule) -> None:
        if self._trained:
            _copy(self._trained, pl_module)
        self._trained = {}


def _floating(pl_module: LightningModule) -> dict[str, Tensor]:
    """Return the floating-point entries of the state dict, which share their memory with the module.

    They are looked up each time (2 us an entry), since a module may assign a new tensor to its buffer at each step.
    """
    state = pl_module.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_floating_point()}


def _aligned(values: dict[str, Tensor], others: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return list(values.values()), [others[name] for name in values]


def _copy(values: dict[str, Tensor], pl_module: LightningModule) -> None:
    # In place: the optimizer, DDP and compiled code hold on to these very tensors.
    source, target = _aligned(values, _floating(pl_module))
    torch._foreach_copy_(target, source)


def _on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}
