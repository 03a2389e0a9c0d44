from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision.models
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from fulgurite.errors import UserError
from fulgurite.models import ResNet
from fulgurite.models.resnet import BasicBlock, Bottleneck

BASIC: dict[str, Any] = {"layers": (1, 2), "width": 4}
BOTTLENECK: dict[str, Any] = {"block": "bottleneck", "layers": (1, 2), "width": 4}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def residual_blocks(network: ResNet) -> list[BasicBlock | Bottleneck]:
    return [module for module in network.modules() if isinstance(module, BasicBlock | Bottleneck)]


@pytest.mark.parametrize("options", [BASIC, BOTTLENECK])
@pytest.mark.parametrize(("stem", "factor"), [("small", 1), ("large", 4)])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 32, 32), (3, 33, 47), (5, 64, 16)])
def test_shapes(options: dict[str, Any], stem: Any, factor: int, channels: int, height: int, width: int) -> None:
    network = ResNet(7, channels, stem=stem, **options).eval()
    images = noise(2, channels, height, width)
    feature_map = network.stages(network.stem(images))
    assert feature_map.shape == (2, network.num_features, -(-height // factor // 2), -(-width // factor // 2))
    assert network.features(images).shape == (2, network.num_features)
    assert network(images).shape == (2, 7)
    assert torch.equal(network(images), network.head(network.features(images)))


def test_bottleneck_ends_in_four_times_the_channels() -> None:
    assert ResNet(2, 1, **BASIC).num_features == 8
    assert ResNet(2, 1, **BOTTLENECK).num_features == 32


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_works_on_its_own(block: type[BasicBlock | Bottleneck], stride: int) -> None:
    out_channels = 2 * block.expansion
    for in_channels in (3, out_channels):
        module = block(in_channels, 2, stride=stride, activation=nn.ReLU, drop_path=0.0)
        assert module(noise(2, in_channels, 8, 8)).shape == (2, out_channels, 8 // stride, 8 // stride)


@pytest.mark.parametrize(
    ("name", "block", "layers", "num_parameters"),
    [
        ("resnet18", "basic", (2, 2, 2, 2), 11_689_512),
        ("resnet34", "basic", (3, 4, 6, 3), 21_797_672),
        ("resnet50", "bottleneck", (3, 4, 6, 3), 25_557_032),
    ],
)
def test_computes_what_torchvision_computes(name: str, block: Any, layers: tuple[int, ...], num_parameters: int) -> None:
    reference: nn.Module = torchvision.models.get_model(name)
    network = ResNet(1000, 3, block=block, layers=layers, stem="large")
    assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters

    images = noise(2, 3, 64, 64)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    # One pass in training mode, so that the running means and variances are no longer 0 and 1.
    reference(images)

    source, target = reference.state_dict(), network.state_dict()
    assert [tensor.shape for tensor in source.values()] == [tensor.shape for tensor in target.values()]
    network.load_state_dict(dict(zip(target, source.values(), strict=True)))
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(images), reference.eval()(images), rtol=1e-5, atol=1e-5)


def test_drop_path_grows_linearly_with_depth() -> None:
    rates = [block.drop_path.rate for block in residual_blocks(ResNet(2, 1, layers=(1, 2, 1), width=2, drop_path=0.4))]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("options", [BASIC, BOTTLENECK])
def test_drop_path_reaches_the_blocks(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = residual_blocks(ResNet(2, 1, zero_init=False, drop_path=0.5, **options))[-1]
    x = noise(32, block.conv1.in_channels, 4, 4).relu()
    skipped = [torch.equal(out, sample) for out, sample in zip(block(x), x, strict=True)]
    assert 4 < sum(skipped) < 28


@pytest.mark.parametrize("options", [BASIC, BOTTLENECK])
def test_zero_init_makes_each_block_its_shortcut(options: dict[str, Any]) -> None:
    blocks = residual_blocks(ResNet(2, 1, **options))
    assert [isinstance(block.shortcut, nn.Identity) for block in blocks] == [options is BASIC, False, True]
    for block in blocks:
        x = noise(2, block.conv1.in_channels, 4, 4).relu()
        assert torch.equal(block(x), block.shortcut(x).relu())
    assert torch.equal(blocks[-1](x), x)


@pytest.mark.parametrize("options", [BASIC, BOTTLENECK])
def test_without_zero_init_a_block_changes_its_input(options: dict[str, Any]) -> None:
    block = residual_blocks(ResNet(2, 1, zero_init=False, **options))[-1]
    x = noise(2, block.conv1.in_channels, 4, 4).relu()
    assert (block(x) - x).abs().mean() > 0.1


def test_convolutions_start_with_the_variance_of_he() -> None:
    torch.manual_seed(0)
    weight = residual_blocks(ResNet(2, 1, layers=(1, 1)))[1].conv1.weight
    assert weight.shape == (128, 64, 3, 3)
    assert weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("stem", ["small", "large"])
@pytest.mark.parametrize("options", [BASIC, BOTTLENECK])
def test_gradients_reach_all_parameters(options: dict[str, Any], stem: Any) -> None:
    torch.manual_seed(0)
    network = ResNet(5, 3, stem=stem, zero_init=False, activation=nn.SiLU, **options)
    nn.functional.cross_entropy(network(noise(8, 3, 32, 32)), torch.arange(8) % 5).backward()
    without = [name for name, parameter in network.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert without == []


@pytest.mark.parametrize("stem", ["small", "large"])
@pytest.mark.parametrize(("options", "per_block"), [(BASIC, 2), (BOTTLENECK, 3)])
def test_activation_is_replaced_everywhere_and_never_shared(options: dict[str, Any], per_block: int, stem: Any) -> None:
    modules = list(ResNet(2, 1, stem=stem, activation=nn.PReLU, **options).modules())
    assert not any(isinstance(module, nn.ReLU) for module in modules)
    assert sum(isinstance(module, nn.PReLU) for module in modules) == 1 + 3 * per_block


def test_export_for_any_batch_size() -> None:
    network = ResNet(3, 1, drop_path=0.5, zero_init=False, **BOTTLENECK).eval()
    program = torch.export.export(network, (noise(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    images = noise(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(images), network(images))


@pytest.mark.parametrize(
    ("init_args", "activation"),
    [
        ({}, nn.ReLU),
        ({"activation": {"class_path": "torch.nn.SiLU"}}, nn.SiLU),
        ({"activation": {"class_path": "torch.nn.LeakyReLU", "init_args": {"negative_slope": 0.2}}}, nn.LeakyReLU),
    ],
)
def test_config_names_the_activation_and_survives_a_dump(init_args: dict[str, Any], activation: type[nn.Module]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=Callable[[int, int], nn.Module])
    config = parser.parse_object(
        {"network": {"class_path": "fulgurite.models.ResNet", "init_args": {"layers": [1], **init_args}}}
    )
    text = parser.dump(config)
    again = parser.parse_string(text)
    assert parser.dump(again) == text

    network = parser.instantiate(again).network(6, 2)
    assert network(noise(1, 2, 8, 8)).shape == (1, 6)
    activations = [network.stem[2], network.stages[0][0].act1, network.stages[0][0].act2]
    assert [type(module) for module in activations] == [activation] * 3
    assert getattr(activations[0], "negative_slope", 0.2) == 0.2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_classes": 0}, "num_classes is 0; it must be at least 1"),
        ({"in_channels": -1}, "in_channels is -1; it must be at least 1"),
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"layers": ()}, "layers is []; it needs at least one stage, and at least 1 block in each"),
        ({"layers": (2, 0)}, "layers is [2, 0]; it needs at least one stage, and at least 1 block in each"),
        ({"drop_path": 1.0}, "drop_path is 1.0; it must be at least 0 and below 1"),
        ({"drop_path": -0.1}, "drop_path is -0.1; it must be at least 0 and below 1"),
        ({"drop_path": float("nan")}, "drop_path is nan; it must be at least 0 and below 1"),
        ({"block": "basik"}, "block is 'basik' (did you mean 'basic'?); allowed: basic, bottleneck"),
        (
            {"init": "kaming"},
            "init is 'kaming' (did you mean 'kaiming'?); allowed: default, kaiming, truncated_normal, xavier, orthogonal",
        ),
        ({"stem": "huge"}, "stem is 'huge'; allowed: small, large"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        ResNet(**{"num_classes": 2, "in_channels": 1, **options})
    assert str(error.value) == text
