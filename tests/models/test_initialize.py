from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from fulgurite.errors import UserError
from fulgurite.models import ResNet, SmallCNN, ViT
from fulgurite.models.initialize import Init, initialize


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Linear(64, 256), nn.Embedding(4, 4))


def drawn(scheme: Init) -> Any:
    made = network()
    initialize(made, scheme)
    return made


def state(module: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in module.state_dict().values()]


def test_default_is_pytorchs_own_and_draws_nothing() -> None:
    made, after = network(), torch.get_rng_state()
    assert state(drawn("default")) == state(made)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("scheme", get_args(Init))
def test_what_has_no_kernel_is_left_alone(scheme: Init) -> None:
    for index in (1, 3):
        assert state(drawn(scheme)[index]) == state(network()[index])


def test_kaiming_is_for_convolutions_by_their_outputs() -> None:
    made = drawn("kaiming")
    assert made[0].weight.std().item() == pytest.approx((2 / (32 * 9)) ** 0.5, rel=0.03)
    assert torch.equal(made[2].weight, network()[2].weight)


@pytest.mark.parametrize(
    ("scheme", "convolution", "linear"),
    [("truncated_normal", 0.02, 0.02), ("xavier", (2 / (9 * 48)) ** 0.5, (2 / 320) ** 0.5)],
)
def test_spread_is_that_of_the_scheme(scheme: Init, convolution: float, linear: float) -> None:
    made = drawn(scheme)
    assert made[0].weight.std().item() == pytest.approx(convolution, rel=0.03)
    assert made[2].weight.std().item() == pytest.approx(linear, rel=0.03)
    assert not made[0].bias.any()
    assert not made[2].bias.any()


def test_orthogonal_columns() -> None:
    weight = drawn("orthogonal")[2].weight  # (256, 64)
    torch.testing.assert_close(weight.T @ weight, torch.eye(64), atol=1e-5, rtol=0)


def test_unknown_scheme_is_named() -> None:
    with pytest.raises(UserError) as error:
        initialize(network(), "xavir")  # type: ignore[arg-type]  # what a user may write
    assert str(error.value).startswith("init is 'xavir' (did you mean 'xavier'?); allowed: default, kaiming")


@pytest.mark.parametrize("kind", [SmallCNN, ResNet, ViT])
def test_every_network_takes_every_scheme(kind: type[nn.Module]) -> None:
    options = {"patch_size": 4, "width": 12, "depth": 1} if kind is ViT else {"width": 4}
    networks = {}
    for scheme in get_args(Init):
        torch.manual_seed(0)
        networks[scheme] = kind(3, 1, init=scheme, **options)
        assert networks[scheme](torch.rand(2, 1, 8, 8)).isfinite().all()
    first = {tuple(next(iter(network.parameters())).flatten().tolist()) for network in networks.values()}
    assert len(first) == len(networks)


@pytest.mark.parametrize(("kind", "scheme"), [(SmallCNN, "default"), (ResNet, "kaiming"), (ViT, "truncated_normal")])
def test_the_default_is_the_networks_custom(kind: type[nn.Module], scheme: Init) -> None:
    made = []
    for options in ({}, {"init": scheme}):
        torch.manual_seed(0)
        made.append(kind(3, 1, **options))
    assert state(made[0]) == state(made[1])


def test_a_resnet_draws_as_he_et_al_and_in_this_order() -> None:
    torch.manual_seed(0)
    expected = ResNet(10, 1, width=4, init="default", zero_init=False)
    for module in expected.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    torch.manual_seed(0)
    assert state(ResNet(10, 1, width=4, zero_init=False)) == state(expected)
