from torch import nn
from torchvision.models import convnext_tiny, mobilenet_v3_small, resnet18, vit_b_16

from fulgurite.models import ResNet, SmallCNN
from fulgurite.models.blocks import blocks


def test_a_residual_network_is_its_blocks_and_not_what_they_hold() -> None:
    names = list(blocks(ResNet(10, 3, layers=(2, 1))))
    assert names[-3:] == ["stages.0.0", "stages.0.1", "stages.1.0"]
    assert not any(name.startswith("stages.0.0.") for name in names)


def test_a_plain_network_is_its_layers() -> None:
    names = list(blocks(SmallCNN(10, 1, depth=1)))
    assert names == [f"stages.{index}" for index in range(6)]


def test_networks_of_torchvision() -> None:
    assert [name for name in blocks(resnet18()) if name.startswith("layer")] == [
        f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
    ]
    assert list(blocks(vit_b_16()))[:12] == [f"encoder.layers.encoder_layer_{index}" for index in range(12)]
    assert "features.0" in blocks(mobilenet_v3_small())  # a class derived from Sequential
    assert "features.1.2" in blocks(convnext_tiny())


def test_a_network_without_containers_has_none() -> None:
    assert blocks(nn.Linear(2, 2)) == {}
