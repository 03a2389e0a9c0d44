from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.classification import linear, loader, make, quiet


class Gradients(Callback):
    """Keep the gradient that each optimizer step uses, and what it should be: the mean over the window's batches."""

    def __init__(self) -> None:
        self.used: list[Tensor] = []
        self.expected: list[Tensor] = []
        self._window: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        weight = next(pl_module.network.parameters())
        with torch.enable_grad():
            loss = pl_module.train_loss(pl_module(batch[0]), batch[1])
        self._window.append(torch.autograd.grad(loss, weight)[0])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(self.expected):
            self.expected.append(torch.stack(self._window).mean(0))
            self._window = []
            weight = next(pl_module.network.parameters())
            self.used.append(weight.grad.clone())


@pytest.mark.parametrize(("batches", "window"), [(5, 4), (5, 2), (6, 3), (2, 4), (3, 1)])
def test_each_step_uses_the_mean_over_its_batches(here: Path, batches: int, window: int) -> None:
    seen = Gradients()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=window, num_sanity_val_steps=0, callbacks=[seen])
    trainer.fit(make(network=linear), loader(4 * batches), loader(4))
    assert len(seen.used) == 2 * -(-batches // window)
    for used, expected in zip(seen.used, seen.expected, strict=True):
        torch.testing.assert_close(used, expected)


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.05), ("value", 0.01)])
@pytest.mark.parametrize(("batches", "window"), [(5, 4), (2, 4), (6, 3)])
def test_gradients_are_clipped_after_a_short_window_has_its_weight(
    here: Path, batches: int, window: int, algorithm: str, limit: float
) -> None:
    seen = Gradients()
    trainer = quiet(
        max_epochs=2,
        accumulate_grad_batches=window,
        num_sanity_val_steps=0,
        callbacks=[seen],
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )
    # Without a bias the one weight is all that the norm is taken over.
    network = lambda classes, channels: nn.Sequential(nn.Flatten(), nn.Linear(16, classes, bias=False))  # noqa: E731
    trainer.fit(make(network=network), loader(4 * batches), loader(4))
    assert len(seen.used) == 2 * -(-batches // window)
    for used, mean in zip(seen.used, seen.expected, strict=True):
        assert mean.norm() > limit and mean.abs().max() > limit  # noqa: PT018  # or nothing would be clipped
        clipped = mean * (limit / mean.norm()) if algorithm == "norm" else mean.clamp(-limit, limit)
        torch.testing.assert_close(used, clipped, rtol=1e-4, atol=1e-6)
