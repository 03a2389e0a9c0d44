from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from fulgurite.errors import UserError
from tests.classification import loader, make, quiet
from tests.jobs import run_job

NAMES = "2 parameters take no part in the loss: network.aux.weight, network.aux.bias"


class WithAux(nn.Module):
    """A linear network with a part that only some processes use, and a frozen one."""

    def __init__(self, num_classes: int, in_channels: int, users: str = "") -> None:
        super().__init__()
        self.users = users
        self.head = nn.Linear(16 * in_channels, num_classes)
        self.aux = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        used = os.environ.get("LOCAL_RANK", "0") in self.users
        return logits + self.aux(images.new_zeros(2)).sum() if used else logits


def fit(users: str = "", **options: Any) -> int:
    trainer = quiet(**{"max_epochs": 1, "num_sanity_val_steps": 0, "accelerator": "cpu"} | options)
    trainer.fit(make(network=partial(WithAux, users=users)), loader(32), loader(4))
    return trainer.global_step


def fit_two(folder: Path, users: str = "", **options: Any) -> list[Any]:
    return run_job(2, partial(fit, users, **{"devices": 2, "strategy": "ddp"} | options), folder)


def is_refused(result: Any) -> bool:
    ways = ("DDP waits for the gradient of each", "--trainer.strategy ddp_find_unused_parameters_true")
    return isinstance(result, UserError) and str(result).startswith(NAMES) and all(way in str(result) for way in ways)


def test_one_process_does_without_and_says_so_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit() == 8
    assert capsys.readouterr().out.count(f"unused      {NAMES}\n") == 1


def test_frozen_parameters_are_no_fault(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(users="0") == 8
    assert "unused" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"strategy": "ddp_gradient_as_bucket_view_true"}])
def test_ddp_names_them_at_the_first_step(here: Path, options: dict[str, Any]) -> None:
    assert all(map(is_refused, fit_two(here, **options)))


@pytest.mark.parametrize(
    "options", [{"strategy": "ddp_find_unused_parameters_true"}, {"strategy": DDPStrategy(static_graph=True)}]
)
def test_ddp_that_looks_for_them_goes_on(here: Path, options: dict[str, Any]) -> None:
    assert fit_two(here, **options) == [8, 8]


@pytest.mark.parametrize("user", [0, 1])
def test_where_one_process_has_them_both_end(here: Path, user: int) -> None:
    results = fit_two(here, users=str(user))
    assert is_refused(results[1 - user])
    assert "Connection closed by peer" in str(results[user])  # for which the command line has words
