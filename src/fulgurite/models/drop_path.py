"""Skip residual branches at random: stochastic depth."""

from __future__ import annotations

from torch import Tensor, nn


class DropPath(nn.Module):
    """Zero whole samples of a residual branch in training and scale up the rest, so that the mean stays.

    Huang et al. 2016, "stochastic depth", https://arxiv.org/abs/1603.09382. Draws from torch's global generator.

    Args:
        rate: probability to drop a sample, at least 0 and below 1
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Map (B, ...), such as (B, C, H, W) or (B, N, C), to the same shape; the identity in eval mode."""
        if not self.training or self.rate == 0.0:
            return branch
        keep = 1.0 - self.rate
        mask = branch.new_empty(branch.shape[0], *[1] * (branch.ndim - 1)).bernoulli_(keep)
        return branch * (mask / keep)
