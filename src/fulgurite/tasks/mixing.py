"""MixUp and CutMix on a batch, on its device."""

from __future__ import annotations

import math

from torchvision.transforms import v2

from fulgurite.errors import UserError


def make_mixing(mixup: float, cutmix: float, num_classes: int) -> v2.Transform | None:
    """Return what maps images (B, C, H, W) float and labels to mixed images and shares of classes (B, K) float32.

    Labels are (B,) int64 or multi-hot (B, K). Each sample is mixed with its neighbour in the batch. Random numbers come from
    PyTorch's global CPU generator, so that no step waits for a device and a resumed run draws the same.

    Args:
        mixup: alpha of the Beta distribution of the shares (arXiv:1710.09412); 0 leaves it out
        cutmix: the same for rectangles (arXiv:1905.04899); with both, one of the two is drawn for each batch
        num_classes: number of classes K

    Raises:
        UserError: if an alpha is negative or not finite
    """
    for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
        if not 0 <= alpha < math.inf:
            raise UserError(f"{name} is {alpha}; it is the alpha of a Beta distribution: above 0, or 0 for none")
    chosen: list[v2.Transform] = []
    if mixup:
        chosen.append(v2.MixUp(alpha=mixup, num_classes=num_classes))
    if cutmix:
        chosen.append(v2.CutMix(alpha=cutmix, num_classes=num_classes))
    if not chosen:
        return None
    return chosen[0] if len(chosen) == 1 else v2.RandomChoice(chosen)
