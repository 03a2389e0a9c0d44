"""Choose the number format that the device is fast in, and refuse those that it cannot train with."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.accelerators import Accelerator

from fulgurite.console import note
from fulgurite.errors import UserError, did_you_mean

# Lightning's names, its older ones in front, and `auto`; "transformer-engine" is left to its own plugin.
Precision = Literal[
    64, 32, 16, "64", "32", "16", "bf16", "auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"
]
_NAMES = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
_OLDER = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

# What torch.cpu.get_capabilities() calls the instructions that multiply bfloat16.
_BF16_INSTRUCTIONS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}


def settle_precision(given: Precision | str | None, accelerator: str | Accelerator) -> Any:
    """Return the precision for Lightning's Trainer: ``auto`` chooses by the device, and says so.

    Args:
        given: to the trainer; None keeps Lightning's, 32-true
        accelerator: as given to the trainer

    Raises:
        UserError: if there is no such precision, or the device cannot train with it
    """
    if given is None:
        return None
    name = _OLDER.get(str(given), str(given))
    if name not in _NAMES:
        raise UserError(f"trainer.precision is '{given}'{did_you_mean(name, _NAMES)}; allowed: {', '.join(_NAMES)}")
    device = _device(accelerator)
    if name == "auto":
        if device == "none":  # Lightning is about to say so
            return None
        name, reason = _fastest(device)
        note("precision", f"{name}, as {reason}")
    elif device == "cpu" and name in ("16-mixed", "16-true"):
        raise UserError(
            f"trainer.precision is {given}, and float16 is for GPUs; on the CPU take bf16-mixed or 32-true\n"
            "--trainer.precision auto chooses what the device is fast in"
        )
    elif device == "mps" and name == "64-true":
        raise UserError(f"trainer.precision is {given}, and Apple's GPUs have no float64: take 32-true")
    elif name.startswith("bf16") and (slow := _emulates_bfloat16(device)):
        note("precision", f"{slow}, so {name} is slower here than 32-true")
    return name


def _device(accelerator: str | Accelerator) -> str:
    """Return the kind of device that Lightning will take; "none" where it finds no such device."""
    if isinstance(accelerator, Accelerator):
        accelerator = type(accelerator).__name__.removesuffix("Accelerator").lower()
    found = [kind for kind, module in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if module.is_available()]
    if accelerator in ("auto", "gpu"):
        return [*found, "cpu" if accelerator == "auto" else "none"][0]
    return accelerator if accelerator == "cpu" or accelerator in found else "none"


def _fastest(device: str) -> tuple[str, str]:
    """Return a precision and the reason for it."""
    if device == "cuda":
        return _fastest_on_gpus()
    if device == "cpu":
        instructions = _bf16_instructions()
        return ("bf16-mixed", f"the processor has {instructions}") if instructions else ("32-true", _emulates_bfloat16("cpu"))
    return "32-true", "mixed precision was never tried on Apple's GPUs"


def _fastest_on_gpus() -> tuple[str, str]:
    # Of all that are visible: a job on different ones has one precision.
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    oldest = min(range(len(names)), key=torch.cuda.get_device_capability)
    major, minor = torch.cuda.get_device_capability(oldest)
    with torch.cuda.device(oldest):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed", f"{names[oldest]} has bfloat16"
    if major >= 7:
        return "16-mixed", f"{names[oldest]} has fast float16 and no bfloat16 (compute capability {major}.{minor})"
    return "32-true", f"{names[oldest]} is not faster in 16 bits (compute capability {major}.{minor})"


def _emulates_bfloat16(device: str) -> str:
    """Return in words that the device has no bfloat16 of its own; empty if it has, or nobody knows."""
    if device == "cpu" and not _bf16_instructions():
        return f"the processor has neither {' nor '.join(_BF16_INSTRUCTIONS.values())}"
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name()} has no bfloat16"
    return ""


def _bf16_instructions() -> str:
    found = torch.cpu.get_capabilities()
    return next((name for key, name in _BF16_INSTRUCTIONS.items() if found.get(key)), "")
