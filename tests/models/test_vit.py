from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite.errors import UserError
from fulgurite.models import ViT
from fulgurite.models.blocks import blocks
from fulgurite.models.vit import Attention, grid_positions

SMALL: dict[str, Any] = {"patch_size": 4, "width": 16, "depth": 2, "heads": 2}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pooling", ["mean", "token"])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 32, 16), (5, 4, 4)])
def test_shapes(pooling: Any, channels: int, height: int, width: int) -> None:
    network = ViT(7, channels, pooling=pooling, **SMALL).eval()
    images = noise(2, channels, height, width)
    assert network.features(images).shape == (2, network.num_features)
    assert network(images).shape == (2, 7)
    assert torch.equal(network(images), network.head(network.features(images)))


def test_defaults_are_vit_tiny() -> None:
    # The published network has 5,717,416: 1000 classes, a learned token and 197 learned positions of 192 channels.
    number = sum(parameter.numel() for parameter in ViT(1000, 3, pooling="token").parameters())
    assert number == 5_717_416 - 197 * 192


def test_attention_is_that_of_pytorch() -> None:
    attention, reference = Attention(16, 2, 0.0), nn.MultiheadAttention(16, 2, batch_first=True)
    nn.init.normal_(attention.qkv.bias)
    reference.load_state_dict(
        {
            "in_proj_weight": attention.qkv.weight,
            "in_proj_bias": attention.qkv.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    tokens = noise(2, 5, 16)
    torch.testing.assert_close(attention(tokens), reference(tokens, tokens, tokens)[0], atol=1e-6, rtol=1e-5)


def test_positions_tell_all_places_apart_and_do_not_depend_on_the_size() -> None:
    positions = grid_positions(3, 5, 16)
    assert positions.shape == (15, 16)
    assert len(positions.unique(dim=0)) == 15
    larger = grid_positions(7, 9, 16).reshape(7, 9, 16)
    assert torch.equal(larger[:3, :5], positions.reshape(3, 5, 16))
    column, row = positions.reshape(3, 5, 16)[:, 2], positions.reshape(3, 5, 16)[1]
    assert torch.equal(column[:, :8], column[:1, :8].expand(3, 8))  # x first
    assert torch.equal(row[:, 8:], row[:1, 8:].expand(5, 8))


def test_where_a_patch_lies_matters() -> None:
    network, images = ViT(3, 1, **SMALL).eval(), noise(1, 1, 8, 8)
    assert not torch.allclose(network(images), network(images.flip(3).unfold(3, 4, 4).flip(4).flatten(3)), atol=1e-6)


def test_sizes_may_change_and_nothing_of_them_is_saved() -> None:
    network = ViT(3, 1, **SMALL).eval()
    names, first = list(network.state_dict()), network(noise(2, 1, 8, 8))
    assert network(noise(2, 1, 16, 12)).shape == (2, 3)
    assert torch.equal(network(noise(2, 1, 8, 8)), first)
    assert list(network.state_dict()) == names
    assert torch.equal(copy.deepcopy(network)(noise(2, 1, 8, 8)), first)


def test_positions_are_computed_once_for_a_size() -> None:
    network = ViT(3, 1, **SMALL)
    network(noise(2, 1, 8, 8))
    kept = network.positions(2, 2, torch.device("cpu"))
    network(noise(3, 1, 8, 8))
    assert network.positions(2, 2, torch.device("cpu")) is kept


def test_training_goes_on_with_what_a_validation_computed() -> None:
    network = ViT(3, 1, **SMALL)
    with torch.inference_mode():
        network(noise(2, 1, 8, 8))
    assert not network.positions(2, 2, torch.device("cpu")).is_inference()
    network(noise(2, 1, 8, 8)).sum().backward()


@pytest.mark.parametrize("pooling", ["mean", "token"])
def test_gradients_reach_all_parameters(pooling: Any) -> None:
    torch.manual_seed(0)
    network = ViT(5, 3, pooling=pooling, **SMALL)
    nn.functional.cross_entropy(network(noise(8, 3, 8, 8)), torch.arange(8) % 5).backward()
    without = [name for name, parameter in network.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert without == []


@pytest.mark.parametrize("option", ["dropout", "drop_path"])
def test_dropping_acts_in_training_only(option: str) -> None:
    torch.manual_seed(0)
    network = ViT(5, 1, **SMALL | {option: 0.5})
    images = noise(8, 1, 8, 8)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))


def test_drop_path_grows_linearly_with_depth() -> None:
    network = ViT(2, 1, **SMALL | {"depth": 4}, drop_path=0.4)
    assert [getattr(block.drop_path, "rate", None) for block in blocks(network).values()] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_it_is_its_blocks() -> None:
    assert list(blocks(ViT(2, 1, **SMALL))) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("pooling", ["mean", "token"])
def test_export_for_any_batch_size(pooling: Any) -> None:
    network = ViT(3, 1, pooling=pooling, drop_path=0.5, **SMALL).eval()
    program = torch.export.export(network, (noise(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    images = noise(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(images), network(images))


def test_one_graph_for_one_size() -> None:
    network, graphs = ViT(3, 1, **SMALL), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled: Any = torch.compile(network, backend=count, fullgraph=True)
    expected = network(noise(2, 1, 8, 8))
    for _ in range(3):
        torch.testing.assert_close(compiled(noise(2, 1, 8, 8)), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_classes": 0}, "num_classes is 0; it must be at least 1"),
        ({"in_channels": 0}, "in_channels is 0; it must be at least 1"),
        ({"patch_size": 0}, "patch_size is 0; it must be at least 1"),
        ({"depth": 0}, "depth is 0; it must be at least 1"),
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"mlp_ratio": 0.0}, "mlp_ratio * width is 0; it must be at least 1"),
        ({"width": 18}, "width is 18; it must be a multiple of 4, for the positions, and of heads, 2"),
        ({"heads": 3}, "width is 16; it must be a multiple of 4, for the positions, and of heads, 3"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"drop_path": -0.1}, "drop_path is -0.1; it must be at least 0 and below 1"),
        ({"pooling": "tokn"}, "pooling is 'tokn' (did you mean 'token'?); allowed: mean, token"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        ViT(**{"num_classes": 2, "in_channels": 1, **SMALL, **options})
    assert str(error.value) == text


def test_patches_that_do_not_divide_the_images_are_refused() -> None:
    with pytest.raises(UserError) as error:
        ViT(2, 1, **SMALL)(noise(1, 1, 8, 10))
    assert str(error.value) == "patch_size is 4; it must divide both sides of the images, 8 x 10"
