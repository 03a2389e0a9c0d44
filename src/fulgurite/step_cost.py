"""Leave out what Lightning 2.6 does at each training step for nothing: half of what a step costs beyond PyTorch's own work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler

_OWN = f"{__name__.partition('.')[0]}."
_NOTHING = nullcontext()
_HOOKS_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    *(f"on_{stage}_batch_{edge}" for stage in ("validation", "test", "predict") for edge in ("start", "end")),
)


class NoProfiler(PassThroughProfiler):
    """Measure nothing, with one empty context for all actions; Lightning's makes a generator for each, 30 a step."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]  # narrower there
        """Return an empty context."""
        return _NOTHING


class LeanModule(LightningModule):
    """Let Lightning note the hook that it calls, 50 times a step, without nn.Module's search for parameters."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


def look_up_hooks_once(trainer: Any) -> None:
    """Remember whether task or data module moves a batch to the device; Lightning looks through both for each batch."""
    selector = trainer._data_connector._datahook_selector
    selector.get_instance = cache(selector.get_instance)


def lighten(trainer: Any) -> None:
    """Give a trainer a profiler that does nothing if it has none, and take empty hooks off this project's callbacks."""
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = NoProfiler()
    own = [callback for callback in trainer.callbacks if type(callback).__module__.startswith(_OWN)]
    for callback in own:
        for name in _HOOKS_OF_A_STEP:
            if getattr(type(callback), name) is getattr(Callback, name):
                setattr(callback, name, None)  # Lightning passes over what is not callable
