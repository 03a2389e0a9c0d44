"""What may happen to a training image, side by side; evaluation has none of it.

Geometry is drawn before an image file is decoded, the rest works on uint8 tensors, erasing on the batch on its device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

from fulgurite.errors import UserError

Preset = Literal["none", "light", "standard", "strong"]


@dataclass(frozen=True)
class Augmentation:
    """Describe what may happen to a training image; the defaults change nothing.

    Args:
        area: least share of an image file's area that a random crop keeps; None keeps the centre, as evaluation does
        shift: largest shift of an image in memory, as a share of its sides
        flip: mirror half of the images left to right
        policy: changes one uint8 image (C, H, W) at a time
        whole: whether the policy gets the whole image, whatever its size; what it returns is fitted as in evaluation
        erase: share of the images in which a rectangle is erased (arXiv:1708.04896)
    """

    area: float | None = None
    shift: float = 0.0
    flip: bool = False
    policy: nn.Module | None = None
    whole: bool = False
    erase: float = 0.0


PRESETS: dict[Preset, Augmentation] = {
    "none": Augmentation(),
    "light": Augmentation(area=0.5, shift=1 / 16, flip=True),
    "standard": Augmentation(area=0.25, shift=1 / 8, flip=True, erase=0.1),
    # TrivialAugment (arXiv:2103.10158): as good as tuned policies, and nothing to tune
    "strong": Augmentation(area=0.08, shift=1 / 8, flip=True, policy=v2.TrivialAugmentWide(), erase=0.25),
}


def augmentation(wanted: Preset | Sequence[nn.Module | Callable[[], nn.Module]], *, flip: bool) -> Augmentation:
    """Return a preset, or one that passes the whole image through transforms of the user's; ``flip=False`` mirrors nothing.

    Transforms may be given as classes or partials of them, which a checkpoint of a run from Python can name.
    """
    if isinstance(wanted, str):
        chosen = PRESETS[wanted]
        return replace(chosen, flip=chosen.flip and flip)
    made = [one if isinstance(one, nn.Module) else one() for one in wanted]
    return Augmentation(policy=v2.Compose(made), whole=True) if made else Augmentation()


class BatchAugment:
    """Shift and mirror each image of a batch by itself; the policy, if there is one, takes them one by one.

    Args:
        chosen: what may happen
    """

    def __init__(self, chosen: Augmentation) -> None:
        self.chosen = chosen

    def __call__(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) uint8 to the same."""
        height, width = images.shape[2:]
        pixels = round(self.chosen.shift * min(height, width))
        images = random_shift(images, pixels, flip=self.chosen.flip)
        if self.chosen.policy is not None:
            images = torch.stack([check_policy(self.chosen.policy(image), images.shape[1:]) for image in images])
        return images


def check_policy(image: Any, shape: Sequence[int | None]) -> Tensor:
    """Return what a transform made of an image, if it is one.

    Args:
        image: what it returned
        shape: (C, H, W) that is wanted; None for a size that may be any

    Raises:
        UserError: if it is no uint8 tensor of this shape
    """
    wanted = tuple(shape)
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3 and _matches(image.shape, wanted):
        return image
    got = f"{image.dtype} of {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
    sizes = " x ".join("any" if size is None else str(size) for size in wanted)
    raise UserError(
        f"the transforms under augment returned {got}; they get and return uint8 images (C, H, W) of {sizes}\n"
        "leave out conversion to float and normalisation: they come later, on the device"
    )


def _matches(given: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return all(size in (None, one) for size, one in zip(wanted, given, strict=True))


def random_shift(images: Tensor, pixels: int, *, flip: bool = False) -> Tensor:
    """Move each image by up to ``pixels`` in both directions; the border is filled with zeros.

    Args:
        images: (B, C, H, W), any dtype
        pixels: largest shift, in pixels
        flip: mirror half of the images left to right

    Returns:
        (B, C, H, W), same dtype
    """
    if pixels:
        padded = F.pad(images, (pixels, pixels, pixels, pixels))
        places = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)  # a view, (B, C, top, left, H, W)
        top, left = torch.randint(0, 2 * pixels + 1, (2, len(images)))
        images = places[torch.arange(len(images)), :, top, left]  # the one copy
    if flip:
        mirrored = torch.rand(len(images)) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    return images


def random_flip(image: Tensor) -> Tensor:
    """Mirror (C, H, W) left to right, every second time."""
    return image.flip(-1) if random.random() < 0.5 else image


def random_erase(images: Tensor, share: float, fill: Sequence[float]) -> Tensor:
    """Erase a rectangle in some images of a batch, on the device they are on.

    Args:
        images: (B, C, H, W) uint8
        share: of the images in which one is erased, on average
        fill: colour of what is erased, per channel, 0..1; the mean of the data is what a network sees as nothing

    Returns:
        (B, C, H, W) uint8, a copy
    """
    batch, channels, height, width = images.shape
    device = images.device
    # Drawn on the CPU, whose generator exact resume seeds; a rectangle of 2 to 33% of the area, three times as long at most.
    area, aspect, top, left, chance = torch.rand(5, batch)
    area, aspect = 0.02 + 0.31 * area, (1 / 3) * 9**aspect
    tall, wide = (area * aspect).sqrt().clamp(max=1) * height, (area / aspect).sqrt().clamp(max=1) * width
    top, left = top * (height - tall), left * (width - wide)
    bounds = torch.stack([top, top + tall, left, left + wide]) * (chance < share)
    first_row, last_row, first_column, last_column = bounds.to(device, non_blocking=True)[:, :, None]
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    inside_rows = (first_row <= rows) & (rows < last_row)  # (B, H)
    inside_columns = (first_column <= columns) & (columns < last_column)  # (B, W)
    inside = (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]  # (B, 1, H, W)
    colour = torch.tensor([round(255 * value) for value in fill], dtype=torch.uint8).to(device, non_blocking=True)
    return torch.where(inside, colour.reshape(1, channels, 1, 1), images)
