"""Random changes to whole batches of uint8 images, for data that is fetched a batch at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Move each image by up to ``pixels`` in both directions; the border is filled with zeros.

    Args:
        images: (B, C, H, W), any dtype
        pixels: largest shift, in pixels

    Returns:
        (B, C, H, W), same dtype
    """
    if pixels == 0:
        return images
    batch, _, height, width = images.shape
    padded = F.pad(images, (pixels, pixels, pixels, pixels))
    top, left = torch.randint(0, 2 * pixels + 1, (2, batch, 1))
    rows = (top + torch.arange(height))[:, :, None]  # (B, H, 1)
    columns = (left + torch.arange(width))[:, None, :]  # (B, 1, W)
    which = torch.arange(batch)[:, None, None]
    # The channel axis goes last when it sits between index tensors; views only, the gather makes the one copy.
    return padded[which, :, rows, columns].permute(0, 3, 1, 2).contiguous()
