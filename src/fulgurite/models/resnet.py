"""Classify images with a residual network, written out to be read and changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from fulgurite.errors import UserError, did_you_mean
from fulgurite.models.drop_path import DropPath
from fulgurite.models.initialize import Init, initialize


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    # No bias: the norm that follows each convolution would subtract it again.
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the identity where the shapes agree, else a projection ("option B" of the paper)."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Add a branch of two 3x3 convolutions to its input.

    Args:
        in_channels: of the input
        width: channels of both convolutions
        stride: of the first convolution; 2 halves the sides
        activation: makes the modules after the first norm and after the sum
        drop_path: probability to skip the branch
    """

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, *, stride: int, activation: Callable[[], nn.Module], drop_path: float
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.act1 = activation()
        self.conv2 = _conv(width, width, 3)
        self.norm2 = nn.BatchNorm2d(width)
        self.drop_path = DropPath(drop_path)
        self.shortcut = _shortcut(in_channels, width, stride)
        self.act2 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, width, H / stride, W / stride)."""
        branch = self.act1(self.norm1(self.conv1(x)))
        branch = self.norm2(self.conv2(branch))
        out: Tensor = self.act2(self.shortcut(x) + self.drop_path(branch))
        return out


class Bottleneck(nn.Module):
    """Add a branch of 1x1, 3x3 and 1x1 convolutions to its input; the last has four times the channels.

    The stride sits on the 3x3 convolution, not on the first 1x1 as in the paper: a strided 1x1 never looks at
    three quarters of its input.

    Args:
        in_channels: of the input
        width: channels of the first two convolutions
        stride: of the 3x3 convolution; 2 halves the sides
        activation: makes the modules after the first two norms and after the sum
        drop_path: probability to skip the branch
    """

    expansion = 4

    def __init__(
        self, in_channels: int, width: int, *, stride: int, activation: Callable[[], nn.Module], drop_path: float
    ) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = _conv(in_channels, width, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.act1 = activation()
        self.conv2 = _conv(width, width, 3, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.act2 = activation()
        self.conv3 = _conv(width, out_channels, 1)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.drop_path = DropPath(drop_path)
        self.shortcut = _shortcut(in_channels, out_channels, stride)
        self.act3 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, 4 * width, H / stride, W / stride)."""
        branch = self.act1(self.norm1(self.conv1(x)))
        branch = self.act2(self.norm2(self.conv2(branch)))
        branch = self.norm3(self.conv3(branch))
        out: Tensor = self.act3(self.shortcut(x) + self.drop_path(branch))
        return out


def _small_stem(in_channels: int, width: int, activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(_conv(in_channels, width, 3), nn.BatchNorm2d(width), activation())


def _large_stem(in_channels: int, width: int, activation: Callable[[], nn.Module]) -> nn.Sequential:
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(_conv(in_channels, width, 7, stride=2), nn.BatchNorm2d(width), activation(), pool)


def _stages(
    block: type[BasicBlock | Bottleneck],
    layers: Sequence[int],
    width: int,
    activation: Callable[[], nn.Module],
    drop_path: float,
) -> nn.Sequential:
    stages, channels, depth = nn.Sequential(), width, 0
    for stage, num_blocks in enumerate(layers):
        blocks = nn.Sequential()
        for index in range(num_blocks):
            depth += 1
            stride = 2 if stage > 0 and index == 0 else 1
            rate = drop_path * depth / sum(layers)
            blocks.append(block(channels, width * 2**stage, stride=stride, activation=activation, drop_path=rate))
            channels = width * 2**stage * block.expansion
        stages.append(blocks)
    return stages


class ResNet(nn.Module):
    """Map images to logits through stages of residual blocks.

    He et al. 2015, https://arxiv.org/abs/1512.03385. The networks of the paper, all with the large stem:

    - ResNet-18: basic, (2, 2, 2, 2)
    - ResNet-34: basic, (3, 4, 6, 3)
    - ResNet-50: bottleneck, (3, 4, 6, 3)

    Args:
        num_classes: number of logits K
        in_channels: of the images
        block: "basic" is two 3x3 convolutions; "bottleneck" is 1x1, 3x3, 1x1 and ends in four times the channels
        layers: blocks per stage; every stage but the first halves the sides and doubles the channels
        width: channels of the first stage, before a bottleneck's factor of four
        stem: "small" keeps the size, for images up to about 64 pixels; "large" divides the sides by 4
        activation: called with no arguments, once for each place
        zero_init: start every branch at zero, so that a block first passes on its shortcut
        drop_path: probability to skip the last block's branch; earlier blocks have it in proportion to their depth
        init: how the weights are drawn

    Raises:
        UserError: if a value is not allowed
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        *,
        block: Literal["basic", "bottleneck"] = "basic",
        layers: Sequence[int] = (2, 2, 2, 2),
        width: int = 64,
        stem: Literal["small", "large"] = "small",
        activation: Callable[[], nn.Module] = nn.ReLU,
        zero_init: bool = True,
        drop_path: float = 0.0,
        init: Init = "kaiming",
    ) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("in_channels", in_channels), ("width", width)):
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if not layers or min(layers) < 1:
            raise UserError(f"layers is {list(layers)}; it needs at least one stage, and at least 1 block in each")
        if not 0.0 <= drop_path < 1.0:
            raise UserError(f"drop_path is {drop_path}; it must be at least 0 and below 1")
        blocks: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
        stems = {"small": _small_stem, "large": _large_stem}
        for name, choice, allowed in (("block", block, list(blocks)), ("stem", stem, list(stems))):
            if choice not in allowed:
                raise UserError(f"{name} is '{choice}'{did_you_mean(choice, allowed)}; allowed: {', '.join(allowed)}")

        self.num_features = width * 2 ** (len(layers) - 1) * blocks[block].expansion
        self.stem = stems[stem](in_channels, width, activation)
        self.stages = _stages(blocks[block], layers, width, activation, drop_path)
        self.head = nn.Linear(self.num_features, num_classes)
        initialize(self, init)
        if zero_init:
            self._zero_branches()

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features)."""
        features: Tensor = self.stages(self.stem(images)).mean(dim=(2, 3))
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def _zero_branches(self) -> None:
        """Start branches at zero as in Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1."""
        for module in self.modules():
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.norm2.weight)
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)
