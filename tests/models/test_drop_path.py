from __future__ import annotations

import pytest
import torch

from fulgurite.models.drop_path import DropPath


def test_drop_path_is_the_identity_in_eval_and_at_rate_zero() -> None:
    branch = torch.rand(8, 2, 3, 3)
    assert DropPath(0.9).eval()(branch) is branch
    assert DropPath(0.0).train()(branch) is branch


@pytest.mark.parametrize("shape", [(2, 3, 3), (5, 2), (1,)])
def test_drop_path_drops_whole_samples_and_keeps_the_mean(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(4096, *shape))
    assert torch.equal(dropped, dropped.flatten(1)[:, 0].reshape(-1, *[1] * len(shape)).expand_as(dropped))
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))
    # The mean over 4096 samples has a standard deviation of 0.009.
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.03)


def test_drop_path_follows_the_global_seed() -> None:
    drop_path, branch = DropPath(0.5), torch.ones(64, 1, 1, 1)
    torch.manual_seed(1)
    first, second = drop_path(branch), drop_path(branch)
    torch.manual_seed(1)
    assert torch.equal(drop_path(branch), first)
    assert not torch.equal(first, second)
