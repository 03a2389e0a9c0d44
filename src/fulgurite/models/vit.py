"""Classify images with a vision transformer, written out to be read and changed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulgurite.errors import UserError, did_you_mean
from fulgurite.models.drop_path import DropPath
from fulgurite.models.initialize import Init, initialize

_TEMPERATURE = 10_000.0  # the longest wave, in patches, over 2 pi


def grid_positions(height: int, width: int, channels: int, device: torch.device | None = None) -> Tensor:
    """Return what tells each place of a grid apart, (height * width, channels) float32: sines and cosines of x, then of y.

    Beyer et al. 2022, https://arxiv.org/abs/2205.01580. Nothing is learned, so any size will do.

    Args:
        height: of the grid, in patches
        width: of the grid, in patches
        channels: a multiple of 4
        device: that it is computed on
    """
    steps = torch.arange(channels // 4, device=device, dtype=torch.float32) / max(channels // 4 - 1, 1)
    rates = _TEMPERATURE**-steps
    y = torch.arange(height, device=device)[:, None] * rates
    x = torch.arange(width, device=device)[:, None] * rates
    y, x = y.repeat_interleave(width, dim=0), x.repeat(height, 1)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


class Attention(nn.Module):
    """Let each token look at all others: multi-head self-attention.

    Args:
        width: channels of a token
        heads: that look at ``width / heads`` channels each
        dropout: probability to drop an attention weight, and a channel of the result
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, N, width) to the same shape."""
        query, key, value = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, N, C / heads)
        looked_at = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.out_dropout(self.out(looked_at.transpose(1, 2).flatten(2)))
        return out


class Block(nn.Module):
    """Add to each token what it gathers from the others, then what it makes of itself; the norms come first.

    Args:
        width: channels of a token
        heads: of the attention
        mlp_ratio: hidden channels of the second branch, in widths
        dropout: in both branches
        drop_path: probability to skip a branch
    """

    def __init__(self, width: int, heads: int, *, mlp_ratio: float, dropout: float, drop_path: float) -> None:
        super().__init__()
        hidden = round(width * mlp_ratio)
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, N, width) to the same shape."""
        tokens = tokens + self.drop_path(self.attention(self.norm1(tokens)))
        out: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return out


class ViT(nn.Module):
    """Map images to logits through a transformer over their patches.

    Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, with the fixed positions of https://arxiv.org/abs/2205.01580, so
    that one network takes images of any size. The defaults are ViT-Tiny; ViT-Small is 384 wide with 6 heads, ViT-Base 768 and 12.

    Args:
        num_classes: number of logits K
        in_channels: of the images
        patch_size: side of a patch in pixels, by which the images' sides are divided
        width: channels of a token, a multiple of 4
        depth: number of blocks
        heads: of each attention; they share the channels equally
        mlp_ratio: hidden channels of a block, in widths
        pooling: what the logits are made of: the "mean" over the tokens, or a class "token" of its own
        dropout: probability to drop a value in every branch, and of what enters the first block
        drop_path: probability to skip the last block's branches; earlier blocks have it in proportion to their depth
        init: how the weights are drawn

    Raises:
        UserError: if a value is not allowed
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        *,
        patch_size: int = 16,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        mlp_ratio: float = 4.0,
        pooling: Literal["mean", "token"] = "mean",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        init: Init = "truncated_normal",
    ) -> None:
        super().__init__()
        numbers = {"num_classes": num_classes, "in_channels": in_channels, "patch_size": patch_size, "width": width}
        for name, value in (numbers | {"depth": depth, "heads": heads, "mlp_ratio * width": round(mlp_ratio * width)}).items():
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if width % 4 or width % heads:
            raise UserError(f"width is {width}; it must be a multiple of 4, for the positions, and of heads, {heads}")
        for name, rate in (("dropout", dropout), ("drop_path", drop_path)):
            if not 0.0 <= rate < 1.0:
                raise UserError(f"{name} is {rate}; it must be at least 0 and below 1")
        if pooling not in ("mean", "token"):
            raise UserError(f"pooling is '{pooling}'{did_you_mean(pooling, ['mean', 'token'])}; allowed: mean, token")

        self.num_features = width
        self.patch_size = patch_size
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if pooling == "token" else None
        self.dropout = nn.Dropout(dropout)
        rates = [drop_path * (index + 1) / depth for index in range(depth)]
        self.blocks = nn.Sequential(
            *[Block(width, heads, mlp_ratio=mlp_ratio, dropout=dropout, drop_path=rate) for rate in rates]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        initialize(self, init)
        if self.token is not None:
            nn.init.trunc_normal_(self.token, std=0.02)
        self._positions = torch.empty(0), (0, 0)  # the last grid's; no buffer, as nothing of it is to be saved or averaged

    def positions(self, height: int, width: int, device: torch.device) -> Tensor:
        """Return :func:`grid_positions` of a grid, computed once for each size that comes."""
        if torch.compiler.is_compiling():  # which folds them into the program; what is kept would only make it compile again
            return grid_positions(height, width, self.num_features, device)
        known, size = self._positions
        if size != (height, width) or known.device != device:
            with torch.inference_mode(False):  # training goes on with what a validation has computed
                known = grid_positions(height, width, self.num_features, device)
            self._positions = known, (height, width)
        return known

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features).

        Raises:
            UserError: if the patches do not divide the images
        """
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise UserError(f"patch_size is {self.patch_size}; it must divide both sides of the images, {height} x {width}")
        grid: Tensor = self.patches(images)
        tokens = grid.flatten(2).transpose(1, 2) + self.positions(grid.shape[2], grid.shape[3], grid.device).to(grid.dtype)
        if self.token is not None:
            tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        tokens = self.norm(self.blocks(self.dropout(tokens)))
        features: Tensor = tokens.mean(dim=1) if self.token is None else tokens[:, 0]
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits
