from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

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
