from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import convnext_tiny, swin_t, vit_b_16

from fulgurite.errors import UserError
from fulgurite.models import ResNet, SmallCNN
from fulgurite.tasks.parameter_groups import layer_depths, parameter_groups, undecayed


def names(network: nn.Module, **options: Any) -> dict[str, list[str]]:
    """Return the names of the parameters in each group."""
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    return {group["name"]: [known[id(one)] for one in group["params"]] for group in parameter_groups(network, **options)}


def test_norms_and_biases_are_apart() -> None:
    found = names(SmallCNN(3, 1, width=2, depth=1))
    assert found == {
        "decay": ["stages.0.weight", "stages.3.weight", "head.weight"],
        "no_decay": ["stages.1.weight", "stages.1.bias", "stages.4.weight", "stages.4.bias", "head.bias"],
    }


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("network", [SmallCNN(3, 1), ResNet(3, 1), convnext_tiny()], ids=["cnn", "resnet", "convnext"])
def test_each_parameter_is_in_one_group_frozen_or_not(network: nn.Module, layer_decay: float) -> None:
    before = names(network, layer_decay=layer_decay)
    assert Counter(name for group in before.values() for name in group) == Counter(dict(network.named_parameters()).keys())
    for parameter in list(network.parameters())[::2]:
        parameter.requires_grad = False
    assert names(network, layer_decay=layer_decay) == before


def test_position_embeddings_and_class_tokens_are_not_decayed() -> None:
    assert {"class_token", "encoder.pos_embedding"} <= undecayed(vit_b_16())
    assert "features.1.0.attn.relative_position_bias_table" in undecayed(swin_t())
    assert not {"conv_proj.weight", "heads.head.weight"} & undecayed(vit_b_16())


class Own(nn.Module):
    """Say which parameters are not to be decayed, as timm's networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))
        self.layer = nn.Linear(2, 2)

    def no_weight_decay(self) -> set[str]:
        return {"scale"}


def test_network_says_what_is_not_decayed() -> None:
    assert undecayed(Own()) == {"scale", "layer.bias"}
    assert undecayed(nn.Sequential(Own(), nn.Linear(2, 2))) == {"0.scale", "0.layer.bias", "1.bias"}  # inside an adapter, too


class Blocks(nn.Module):
    """Have something before, between and after the blocks, and a block without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 2))
        self.stem = nn.Linear(2, 2)
        self.first = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.between = nn.Linear(2, 2)
        self.second = nn.ModuleList([nn.Linear(2, 2)])
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2)


def test_depth_counts_the_blocks() -> None:
    depths = layer_depths(Blocks())
    assert {name: depth for name, depth in depths.items() if not name.endswith("bias")} == {
        "token": 0,
        "stem.weight": 0,
        "first.0.weight": 1,
        "first.2.weight": 2,
        "between.weight": 3,
        "second.0.weight": 3,
        "norm.weight": 4,
        "head.weight": 4,
    }


def test_depths_of_a_transformer() -> None:
    depths = layer_depths(vit_b_16())
    assert depths["conv_proj.weight"] == depths["encoder.pos_embedding"] == depths["class_token"] == 0
    assert depths["encoder.layers.encoder_layer_11.mlp.0.weight"] == 12
    assert depths["encoder.ln.weight"] == depths["heads.head.weight"] == 13


def test_rate_falls_from_the_head_to_the_input() -> None:
    groups = parameter_groups(Blocks(), layer_decay=0.5)
    assert [(group["name"], group["share"]) for group in groups] == [
        ("layer_0_decay", 1 / 16),
        ("layer_0_no_decay", 1 / 16),
        ("layer_1_decay", 1 / 8),
        ("layer_1_no_decay", 1 / 8),
        ("layer_2_decay", 1 / 4),
        ("layer_2_no_decay", 1 / 4),
        ("layer_3_decay", 1 / 2),
        ("layer_3_no_decay", 1 / 2),
        ("head_decay", 1.0),
        ("head_no_decay", 1.0),
    ]
    assert {group["share"] for group in parameter_groups(Blocks())} == {1.0}


def test_a_network_that_does_not_tell_its_layers_apart_is_refused() -> None:
    with pytest.raises(UserError, match=r"^layer_decay is 0.5, and Linear holds its layers in no nn.Sequential or nn.ModuleList"):
        parameter_groups(nn.Linear(2, 2), layer_decay=0.5)
