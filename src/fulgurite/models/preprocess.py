"""The one implementation of what happens to an image between the loader and the network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Preprocess(nn.Module):
    """Turn uint8 images into normalised floats of the network's type, on the device they are on.

    Args:
        mean: per channel, of images scaled to 0..1
        std: per channel, of images scaled to 0..1
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.memory_format = torch.contiguous_format
        """How the result lies in memory, whatever the loader gives; :class:`fulgurite.callbacks.compute.Compute` sets it."""
        # Not persistent: a checkpoint has these numbers in its DataSpec already, and nowhere twice.
        self.register_buffer("scale", 1 / (255 * torch.tensor(std).reshape(-1, 1, 1)), persistent=False)
        self.register_buffer("offset", (torch.tensor(mean) / torch.tensor(std)).reshape(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) uint8 to (B, C, H, W) float32, or the type that the task has been cast to.

        Raises:
            TypeError: if the images are not uint8; floats would be scaled twice in silence
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"expected uint8 images of 0..255, got {images.dtype}")
        # Computed in float32 at least. In place: uint8 as one operand of two takes a slow path.
        wide = torch.float64 if self.scale.dtype == torch.float64 else torch.float32
        floats = images.to(wide, memory_format=self.memory_format)
        return floats.mul_(self.scale).sub_(self.offset).to(self.scale.dtype)
