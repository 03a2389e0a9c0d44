"""Classify small images with a plain convolutional network that trains in seconds on a CPU."""

from __future__ import annotations

from torch import Tensor, nn

from fulgurite.errors import UserError
from fulgurite.models.initialize import Init, initialize


def _stage(in_channels: int, out_channels: int) -> list[nn.Module]:
    # No bias in the convolutions: the norm that follows would subtract it again.
    return [
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]


class SmallCNN(nn.Module):
    """Map images of about 8 to 64 pixels to logits: stages of two 3x3 convolutions, max-pooling in between.

    Args:
        num_classes: number of logits K
        in_channels: of the images
        width: channels of the first stage; each further stage has twice as many
        depth: number of stages; each but the first sees sides half as long
        dropout: probability to drop a feature before the last layer
        init: how the weights are drawn

    Raises:
        UserError: if a number is out of range
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        *,
        width: int = 32,
        depth: int = 3,
        dropout: float = 0.0,
        init: Init = "default",
    ) -> None:
        super().__init__()
        least_one = {"num_classes": num_classes, "in_channels": in_channels, "width": width, "depth": depth}
        for name, value in least_one.items():
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if not 0.0 <= dropout < 1.0:
            raise UserError(f"dropout is {dropout}; it must be at least 0 and below 1")

        self.stages = nn.Sequential(*_stage(in_channels, width))
        for stage in range(1, depth):
            # Rounding up keeps a side of one pixel at one pixel, so that any image suits any depth.
            self.stages.append(nn.MaxPool2d(2, ceil_mode=True))
            self.stages.extend(_stage(width * 2 ** (stage - 1), width * 2**stage))
        self.num_features = width * 2 ** (depth - 1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(self.num_features, num_classes)
        initialize(self, init)

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features)."""
        features: Tensor = self.stages(images).mean(dim=(2, 3))
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K)."""
        logits: Tensor = self.head(self.dropout(self.features(images)))
        return logits
