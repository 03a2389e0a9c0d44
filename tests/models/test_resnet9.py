import pytest
import torch
from torch import nn

from fulgurite.errors import UserError
from fulgurite.models import ResNet9
from fulgurite.models.resnet9 import Residual


@pytest.mark.parametrize(("side", "channels"), [(32, 3), (28, 1), (7, 3), (1, 1)])
def test_shapes(side: int, channels: int) -> None:
    network = ResNet9(10, channels, width=2)
    images = torch.rand(3, channels, side, side)
    assert network(images).shape == (3, 10)
    assert network.features(images).shape == (3, network.num_features) == (3, 16)


def test_it_has_eight_convolutions_and_a_head_and_the_size_that_is_known() -> None:
    network = ResNet9(10, 3)
    assert sum(isinstance(module, nn.Conv2d) for module in network.modules()) == 8
    assert sum(parameter.numel() for parameter in network.parameters()) == 6_573_120  # that of the page, 6.57 million


def test_logits_are_scaled_and_residuals_add_their_input() -> None:
    network, images = ResNet9(10, 3, width=2).eval(), torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(network(images), 0.125 * network.head(network.features(images)))
    block = Residual(2)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(2, 2, 4, 4)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(
    ("options", "text"), [({"width": 0}, "width is 0; it must be at least 1"), ({"scale": 0}, "scale is 0; it must be above 0")]
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        ResNet9(10, 3, **options)
