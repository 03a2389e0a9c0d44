"""Set how the device computes: the order of a tensor's numbers in memory, and the bits of a matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from fulgurite.console import note
from fulgurite.errors import UserError
from fulgurite.models.preprocess import Preprocess

MemoryFormat = Literal["contiguous", "channels_last"]
MatmulPrecision = Literal["highest", "high", "medium"]

_ONEDNN_BLOCK = 16  # channels: of AVX-512; 8 of AVX2


class Compute(Callback):
    """Apply the trainer's ``memory_format`` and ``matmul_precision``; tell where a run goes on in another precision.

    Channels last is a matter of the fit, not of the network: what is saved, and what the module has afterwards, is contiguous.

    Args:
        memory_format: of images and of the weights of two-dimensional convolutions
        matmul_precision: of float32 matrix products; None leaves PyTorch's

    Raises:
        UserError: if there is no such format or precision
    """

    def __init__(self, memory_format: MemoryFormat = "contiguous", matmul_precision: MatmulPrecision | None = None) -> None:
        for name, value, allowed in (
            ("memory_format", memory_format, ("contiguous", "channels_last")),
            ("matmul_precision", matmul_precision, ("highest", "high", "medium", None)),
        ):
            if value not in allowed:
                raise UserError(f"trainer.{name} is '{value}'; allowed: {', '.join(str(one or 'null') for one in allowed)}")
        self.memory_format = memory_format
        self.matmul_precision = matmul_precision
        self._precision = ""
        self._precision_of_checkpoint = ""
        self._is_channels_last = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Set the precision of matrix products in this process; lay out the weights before the optimizer sees them.

        Raises:
            UserError: if the strategy splits the weights, which has to find them contiguous
        """
        self._precision, self._precision_of_checkpoint = trainer.precision, ""
        if self.matmul_precision is not None:
            # Not the newer torch.backends.*.fp32_precision: once that is set, PyTorch's own code fails to read this one.
            torch.set_float32_matmul_precision(self.matmul_precision)
            note("matmul", f"float32 products in precision '{self.matmul_precision}'")
        if self.memory_format != "channels_last":
            return
        if stage == "fit" and trainer.strategy.restore_checkpoint_after_setup:
            raise UserError(
                f"trainer.memory_format is channels_last, and {type(trainer.strategy).__name__} takes contiguous weights only\n"
                "use trainer.strategy ddp, or leave out memory_format"
            )
        if trainer.strategy.root_device.type == "cpu" and (name := next(_overflowing(pl_module), None)):
            note("memory", f"contiguous: on a CPU, channels last would corrupt it in the gradient of {name} (oneDNN issue 6035)")
            return
        self._is_channels_last = True
        _lay_out(pl_module, torch.channels_last)
        note("memory", "channels last, as configured")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Lay out what an optimizer has loaded as its weights are; say that the precision is not the checkpoint's."""
        if self._precision_of_checkpoint not in ("", self._precision):
            note("differs", f"the precision is {self._precision}; the checkpoint was trained in {self._precision_of_checkpoint}")
        for optimizer in trainer.optimizers:
            for weight, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                        state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the weights contiguous: other readers, such as safetensors, want nothing else."""
        if self._is_channels_last:
            checkpoint["state_dict"] = {name: _contiguous(value) for name, value in checkpoint["state_dict"].items()}

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        if self._is_channels_last:
            self._is_channels_last = False
            _lay_out(pl_module, torch.contiguous_format)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was; Lightning tears nothing down after an exception."""
        self.teardown(trainer, pl_module, "")

    def state_dict(self) -> dict[str, Any]:
        """Return the precision in use, which ``auto`` in a configuration does not tell."""
        return {"precision": self._precision}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the precision of the run that the checkpoint comes from."""
        self._precision_of_checkpoint = str(state_dict["precision"])


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _lay_out(module: nn.Module, memory_format: torch.memory_format) -> None:
    # Not Module.to(memory_format=...), which fails on the weights of three-dimensional convolutions.
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    for part in module.modules():
        if isinstance(part, Preprocess):
            part.memory_format = memory_format


def _overflowing(module: nn.Module) -> Iterator[str]:
    """Name the 1x1 convolutions with a stride and few channels: oneDNN writes their gradient past its buffer.

    https://github.com/uxlfoundation/oneDNN/issues/6035. Seen here with 2 to 7 input channels on AVX2, PyTorch 2.11 and 2.14.
    A 1x1 weight of a module that tells no stride counts, too.
    """
    for name, part in module.named_modules():
        strides = getattr(part, "stride", 2)
        strided = max(strides if isinstance(strides, tuple) else (strides,)) > 1
        for parameter in part.parameters(recurse=False):
            if parameter.dim() == 4 and parameter.shape[2:] == (1, 1) and 1 < parameter.shape[1] < _ONEDNN_BLOCK and strided:
                yield name
