"""Classify images of 32x32 pixels in few and wide layers, which a GPU is quick at: the network of the fast CIFAR-10 recipes."""

from __future__ import annotations

from torch import Tensor, nn

from fulgurite.errors import UserError


def _layer(in_channels: int, out_channels: int) -> nn.Sequential:
    # No bias in the convolution: the norm that follows would subtract it again.
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.CELU(alpha=0.3))


class Residual(nn.Module):
    """Add two layers to their input.

    Args:
        channels: of the input and of both layers
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_layer(channels, channels), _layer(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to the same shape."""
        out: Tensor = x + self.layers(x)
        return out


class ResNet9(nn.Module):
    """Map images of about 32 pixels to logits through eight convolutions, two pairs of which are residual.

    Page 2018, "How to train your ResNet", https://myrtle.ai/learn/how-to-train-your-resnet/; CELU and the small scale of the
    logits are his, too.

    Args:
        num_classes: number of logits K
        in_channels: of the images
        width: channels of the first layer; the last have eight times as many
        scale: of the logits, which makes the first steps small

    Raises:
        UserError: if a number is out of range
    """

    def __init__(self, num_classes: int, in_channels: int, *, width: int = 64, scale: float = 0.125) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("in_channels", in_channels), ("width", width)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if not scale > 0:
            raise UserError(f"scale is {scale}; it must be above 0")
        self.scale = scale
        self.num_features = 8 * width
        # Rounding up keeps a side of one pixel at one pixel, so that any image will do.
        pool = nn.MaxPool2d(2, ceil_mode=True)
        self.stages = nn.Sequential(
            _layer(in_channels, width),
            nn.Sequential(_layer(width, 2 * width), pool, Residual(2 * width)),
            nn.Sequential(_layer(2 * width, 4 * width), pool),
            nn.Sequential(_layer(4 * width, 8 * width), pool, Residual(8 * width)),
        )
        self.head = nn.Linear(self.num_features, num_classes, bias=False)

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features)."""
        features: Tensor = self.stages(images).amax(dim=(2, 3))
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K)."""
        logits: Tensor = self.head(self.features(images)) * self.scale
        return logits
