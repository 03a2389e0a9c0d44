from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite.errors import UserError
from fulgurite.models import SmallCNN


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 1, 1), (1, 8, 8), (3, 28, 28), (3, 33, 47), (4, 64, 64)])
def test_shapes(depth: int, channels: int, height: int, width: int) -> None:
    network = SmallCNN(7, channels, width=2, depth=depth).eval()
    images = noise(2, channels, height, width)
    assert network.num_features == 2 * 2 ** (depth - 1)
    assert network.features(images).shape == (2, network.num_features)
    assert network(images).shape == (2, 7)
    assert torch.equal(network(images), network.head(network.features(images)))


def test_each_stage_halves_the_sides_and_doubles_the_channels() -> None:
    network = SmallCNN(7, 1, width=4, depth=3).eval()
    assert network.stages(noise(2, 1, 32, 24)).shape == (2, 16, 8, 6)


def test_gradients_reach_all_parameters() -> None:
    torch.manual_seed(0)
    network = SmallCNN(5, 3, width=4)
    nn.functional.cross_entropy(network(noise(8, 3, 8, 8)), torch.arange(8) % 5).backward()
    without = [name for name, parameter in network.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert without == []


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    network = SmallCNN(5, 1, width=4, depth=1, dropout=0.5)
    images = noise(4, 1, 8, 8)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_export_for_any_batch_size() -> None:
    network = SmallCNN(3, 1, width=4, dropout=0.5).eval()
    program = torch.export.export(network, (noise(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    images = noise(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(images), network(images))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_classes": 0}, "num_classes is 0; it must be at least 1"),
        ({"in_channels": 0}, "in_channels is 0; it must be at least 1"),
        ({"width": -2}, "width is -2; it must be at least 1"),
        ({"depth": 0}, "depth is 0; it must be at least 1"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout": -0.1}, "dropout is -0.1; it must be at least 0 and below 1"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        SmallCNN(**{"num_classes": 2, "in_channels": 1, **options})
    assert str(error.value) == text
