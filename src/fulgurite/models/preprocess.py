"""The one implementation of what happens to an image between the loader and the network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Preprocess(nn.Module):
    """Turn uint8 images into normalised float32 ones, on the device they are on.

    Args:
        mean: per channel, of images scaled to 0..1
        std: per channel, of images scaled to 0..1
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not persistent: a checkpoint has these numbers in its DataSpec already, and nowhere twice.
        self.register_buffer("scale", 1 / (255 * torch.tensor(std).reshape(-1, 1, 1)), persistent=False)
        self.register_buffer("offset", (torch.tensor(mean) / torch.tensor(std)).reshape(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) uint8 to (B, C, H, W) float32.

        Raises:
            TypeError: if the images are not uint8; floats would be scaled twice in silence
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"expected uint8 images of 0..255, got {images.dtype}")
        # Decoders give channels last. PyTorch 2.14.1 corrupts memory on a CPU in the backward pass of narrow convolutions over
        # such images, so what leaves here is contiguous. In place: uint8 as one operand of two takes a slow path.
        floats = images.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.mul_(self.scale).sub_(self.offset)
