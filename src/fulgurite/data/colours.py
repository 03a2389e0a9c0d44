"""Turn whatever PIL read, or somebody made, into grey or RGB of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError


def eight_bits(image: Image.Image, spec: DataSpec, name: str) -> Image.Image:
    """Convert any of PIL's modes to grey or RGB."""
    if image.mode in ("F", "LAB", "La"):
        raise UserError(
            f"{name}: pixels of PIL's mode {image.mode} have no fixed meaning in 8 bits; convert it to grey or RGB first"
        )
    if image.mode.startswith("I"):
        image = _sixteen_to_eight_bits(image, name)
    if image.has_transparency_data:
        behind = Image.new("RGBA", image.size, (*spec.background, 255))
        image = Image.alpha_composite(behind, image.convert("RGBA"))
    return image.convert("L" if spec.channels == 1 else "RGB")


def _sixteen_to_eight_bits(image: Image.Image, name: str) -> Image.Image:
    # PIL's own conversion of these modes clips: all from 255 up turns white.
    values = np.asarray(image.convert("I"))
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:  # only mode "I", of 32 bits, can hold such
        raise UserError(f"{name}: grey values from {low} to {high}; allowed: 8 bits (0..255) or 16 bits (0..65535)")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 65535 = 257 * 255; to the nearest


def from_array(image: Any) -> Image.Image:
    """Make a PIL image of a tensor (C, H, W) or a NumPy array (H, W) or (H, W, C)."""
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.ascontiguousarray(image[..., None] if image.ndim == 2 else image)).movedim(-1, 0)
    if not isinstance(image, Tensor):
        raise UserError(f"cannot read an image from {type(image).__name__}; allowed: a path, bytes, a PIL image, a uint8 array")
    if image.dtype != torch.uint8 or image.ndim != 3 or not 1 <= image.shape[0] <= 4 or 0 in image.shape:
        raise UserError(
            f"an image array is {image.dtype} of (C, H, W) = {tuple(image.shape)}; "
            "allowed: uint8 with 1 to 4 channels, a tensor as (C, H, W), a NumPy array as (H, W) or (H, W, C)"
        )
    return Image.fromarray(image.movedim(0, -1).squeeze(-1).cpu().contiguous().numpy())
