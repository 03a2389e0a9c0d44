"""Compile the network for training with torch.compile, and say what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sized
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import calculate_time_spent, counters
from torch.nn.parallel import DistributedDataParallel

from fulgurite.console import note
from fulgurite.errors import UserError, shown
from fulgurite.recorded import Recorded

Mode = Literal["default", "reduce-overhead", "max-autotune"]

_MOST_REASONS = 3
_LIMIT = "Dynamo recompile limit exceeded"  # PyTorch's name for it


class Compilation(NamedTuple):
    """What torch.compile has done in this process so far, or since a moment before."""

    graphs: int
    seconds: float
    breaks: Counter[str]
    """Number of graph breaks for each reason."""
    limits: int
    """How often code was not compiled once more since it had been too often."""

    @classmethod
    def so_far(cls) -> Compilation:
        """Read PyTorch's counters; a reset of torch._dynamo leaves them alone, but not the seconds."""
        breaks: Counter[str] = Counter()
        for reason, number in counters["graph_break"].items():
            breaks[_sentence(reason)] += number
        limits = sum(number for reason, number in counters["unimplemented"].items() if reason.startswith(_LIMIT))
        return cls(counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"], breaks, limits)

    def since(self, before: Compilation) -> Compilation:
        """Return what was added."""
        seconds, limits = max(self.seconds - before.seconds, 0.0), self.limits - before.limits
        return Compilation(self.graphs - before.graphs, seconds, self.breaks - before.breaks, limits)


class Compile(Recorded, Callback):
    """Compile the network of the task for training and the validations in it; the first step then takes up to minutes.

    It is compiled in place, so that checkpoints have the same names in them with and without. Other verbs run it uncompiled:
    they end before compiling pays. It is compiled for one batch size each in training and in validation, and a batch of another,
    such as the last of a validation, runs uncompiled: to compile for it would take as long again. Where compiling fails, as
    without a C++ compiler on a CPU, the reason is printed and training goes on uncompiled.

    Args:
        mode: of torch.compile. reduce-overhead and max-autotune use CUDA graphs, which help small networks and small batches on
            a GPU; max-autotune also measures which kernels are the fastest, and compiles for longest. null is off
    """

    def __init__(self, *, mode: Mode | None = None) -> None:
        self.mode = mode
        self._call: _CompiledCall | None = None
        self._seen = Compilation.so_far()
        self._has_told = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Have the network compiled when it is first called: before DDP wraps the task, as compiled code may not contain DDP.

        Raises:
            UserError: if the task has no network, or gradients would be wrong
        """
        if self.mode is None:
            return
        if stage != "fit":
            note("compile", f"not for {trainer.state.fn.value}, which would end before it pays")
            return
        network = getattr(pl_module, "network", None)
        if not isinstance(network, nn.Module):
            raise UserError(f"compile.mode is {self.mode}, and {type(pl_module).__name__} has no `network` to compile")
        device = trainer.strategy.root_device
        if self.mode != "default" and device.type == "cuda" and trainer.accumulate_grad_batches > 1:
            raise UserError(  # https://github.com/pytorch/pytorch/issues/96693 and 169545
                f"compile.mode is {self.mode}, whose CUDA graphs overwrite the gradients that trainer.accumulate_grad_batches "
                f"{trainer.accumulate_grad_batches} adds up\nuse --compile.mode default, or no accumulation"
            )
        if self.mode == "reduce-overhead" and device.type == "cpu":
            note("compile", "reduce-overhead is the same as default here: CUDA graphs need a GPU")
        self._seen, self._has_told = Compilation.so_far(), False
        self._call = _CompiledCall(network, self.mode, device)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compile before the first batch where the shape of a batch is known, so that no clock counts it."""
        if self._call is None:
            return
        size = _batch_size(trainer.train_dataloader)
        if size is not None:
            self._call.sizes[True] = size  # not that of the first batch: a run may be resumed at a short last one
            if (spec := getattr(pl_module, "spec", None)) is not None:
                images = torch.zeros(size, spec.channels, spec.height, spec.width, dtype=torch.uint8, device=pl_module.device)
                _warm_up(trainer, pl_module, images, self._call)
        self._tell(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say what the first step came to where it could not be done before."""
        if batch_idx == 0 and self._call is not None:
            self._tell(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Say what was compiled later, which may take longer than it saves."""
        if self._call is not None:
            self._tell(trainer)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Leave the network as it was, and free what was compiled: the limit of recompilations counts all runs of a process."""
        if self._call is not None:
            self._call.undo()
            self._call = None
            torch._dynamo.reset()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Do the same when a run is stopped."""
        self.teardown(trainer, pl_module, "fit")

    def _tell(self, trainer: Any) -> None:
        now = Compilation.so_far()
        new, self._seen = now.since(self._seen), now
        if new.limits:
            most = torch._dynamo.config.recompile_limit
            note("compile", f"compiled {most} times, which is the limit: other cases run uncompiled; {_WHY}")
        if not new.graphs:
            return
        more = f"{self.mode}:" if not self._has_told else f"epoch {trainer.current_epoch} (counted from 0):"
        why = f"; {_WHY}" if self._has_told and trainer.current_epoch else ""
        note("compile", f"{more} {describe(new)}{why}")
        for reason in list(new.breaks)[:_MOST_REASONS]:
            note("", f"graph break: {reason}")
        if new.breaks:
            note("", "TORCH_LOGS=graph_breaks tells where")
        self._has_told = True


_WHY = "TORCH_LOGS=recompiles tells why"


def describe(done: Compilation) -> str:
    """Return ``2 graphs, 0 graph breaks, 33 s``."""
    breaks = done.breaks.total()
    graphs = f"{done.graphs} graph{'' if done.graphs == 1 else 's'}"
    return f"{graphs}, {breaks} graph break{'' if breaks == 1 else 's'}, {done.seconds:.0f} s"


def _sentence(reason: str) -> str:
    """Return what a reason of several lines comes to."""
    lines = [line.strip() for line in reason.splitlines()] or [""]
    return next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])


class _CompiledCall:
    """What a network's call becomes: compiled for one batch size in each of the two modes, as ever where that is not possible."""

    def __init__(self, network: nn.Module, mode: Mode, device: torch.device) -> None:
        self.network = network
        self.sizes: dict[bool, int | None] = {}  # by network.training
        self._told: set[bool] = set()
        _compile(network, mode, device)
        self.compiled: Any = network._compiled_call_impl
        network._compiled_call_impl = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        training = self.network.training
        size = len(args[0]) if args and isinstance(args[0], Tensor) and args[0].ndim else None
        if size != self.sizes.setdefault(training, size):
            self._tell_other_size(size)
            return self.network._call_impl(*args, **options)
        try:
            return self.compiled(*args, **options)
        except TorchDynamoException as error:
            self.give_up(error)
            return self.network._call_impl(*args, **options)

    def give_up(self, error: Exception) -> None:
        """Run uncompiled from here on."""
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        note("compile", f"failed, so the network runs uncompiled: {type(error).__name__}: {shown(lines[0])}")
        self.undo()

    def undo(self) -> None:
        """Give the network its own call back."""
        self.network._compiled_call_impl = None

    def _tell_other_size(self, size: int | None) -> None:
        training = self.network.training
        if training not in self._told:
            self._told.add(training)
            remedy = "; drop_last=True of its loader leaves a short last one out" if training else ""
            kind = "training" if training else "validation"
            note("compile", f"a {kind} batch of {size} runs uncompiled: it is compiled for {self.sizes[training]}{remedy}")


def _compile(network: nn.Module, mode: Mode, device: torch.device) -> None:
    options = dict(torch._inductor.list_mode_options(mode))
    if device.type == "cpu":
        # PyTorch 2.14.1 corrupts memory on a CPU in the backward pass of strided 1x1 convolutions over fewer than 8 channels
        # when these are last in memory, which is where this optimization puts them.
        options["layout_optimization"] = False
    network.compile(options=options)


def _warm_up(trainer: Any, pl_module: LightningModule, images: Tensor, call: _CompiledCall) -> None:
    """Take a step on made-up images that leaves no trace: gradients, buffers and random numbers are as before."""
    network = call.network
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    with _unchanged(network, images.device), _inside_ddp(trainer.strategy.model):
        try:
            with trainer.precision_plugin.train_step_context():
                logits = pl_module(images)
            # Not backward(), which would have DDP exchange gradients.
            torch.autograd.grad(logits, weights, torch.ones_like(logits), allow_unused=True)
        except Exception as error:  # whatever is not the compiler's fault, the first step will tell
            call.give_up(error)


@contextmanager
def _unchanged(network: nn.Module, device: torch.device) -> Iterator[None]:
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])


def _inside_ddp(model: Any) -> Any:
    """Let the compiler know of DDP, which cuts the graph so that gradients travel while others are computed."""
    return model._inside_ddp_forward() if isinstance(model, DistributedDataParallel) else nullcontext()


def _batch_size(loader: Any) -> int | None:
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if not isinstance(size, int):
        return None
    return min(size, len(sampler)) if isinstance(sampler, Sized) else size
