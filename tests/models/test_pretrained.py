from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite.errors import UserError
from fulgurite.models import TorchvisionNetwork
from fulgurite.models.pretrained import (
    adapt_input,
    adapt_weight,
    as_options,
    fill,
    initial_weights_wanted,
    local_file,
    read_file,
    require_size,
    without_initial_weights,
)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def small(classes: int = 4, channels: int = 3) -> Any:
    torch.manual_seed(classes)
    return nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(72, classes))


def test_one_channel_gives_what_grey_as_rgb_gave() -> None:
    weight, grey = noise(2, 3, 3, 3), noise(1, 1, 8, 8)
    rgb = nn.functional.conv2d(grey.expand(-1, 3, -1, -1), weight)
    torch.testing.assert_close(nn.functional.conv2d(grey, adapt_weight(weight, 1)), rgb, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("channels", [2, 4, 6, 13])
def test_other_numbers_repeat_what_there_is_at_the_same_scale(channels: int) -> None:
    weight = noise(2, 3, 3, 3)
    adapted = adapt_weight(weight, channels)
    assert adapted.shape == (2, channels, 3, 3)
    for place in range(channels):
        torch.testing.assert_close(adapted[:, place], weight[:, place % 3] * 3 / channels)
    if channels % 3 == 0:
        constant = torch.ones(1, 1, 8, 8)
        given = nn.functional.conv2d(constant.expand(-1, 3, -1, -1), weight)
        torch.testing.assert_close(nn.functional.conv2d(constant.expand(-1, channels, -1, -1), adapted), given)


def test_the_first_convolution_is_adapted_in_place() -> None:
    network = small()
    layer = network[0]
    adapt_input(network, 1)
    assert network[0] is layer
    assert (layer.in_channels, layer.weight.shape) == (1, (2, 1, 3, 3))
    assert layer.weight.requires_grad
    weight = layer.weight
    adapt_input(network, 1)
    assert layer.weight is weight


def test_weights_of_as_many_classes_are_all_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(small().state_dict(), "k.pth")
    network = small()
    nn.init.zeros_(network[2].weight)
    fill(network, read_file(Path("k.pth")), head="2", what="it")
    assert all(torch.equal(value, small().state_dict()[name]) for name, value in network.state_dict().items())
    assert capsys.readouterr().out == "weights     4 tensors, 348 values, from k.pth\n"


def test_head_and_channels_that_differ_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {f"module.{name}": value for name, value in small().state_dict().items()}}, "k.pth")
    network = small(7, 1)
    head = network[2].weight.clone()
    fill(network, read_file(Path("k.pth")), head="2", what="it")
    torch.testing.assert_close(network[0].weight, small()[0].weight.sum(1, keepdim=True))
    assert torch.equal(network[2].weight, head)
    assert capsys.readouterr().out == (
        "weights     2 tensors, 20 values, from k.pth\n"
        "            first layer: the weights for 3 channels are summed into 1\n"
        "            last layer: new, as theirs is for 4 classes\n"
    )


def test_weights_without_a_head_will_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({name: value for name, value in small().state_dict().items() if name[0] == "0"}, "k.pth")
    fill(small(), read_file(Path("k.pth")), head="2", what="it")
    assert "last layer: new\n" in capsys.readouterr().out


def test_what_does_not_fit_is_named(here: Path) -> None:
    torch.save({"0.weight": torch.ones(2, 3, 5, 5), "2.weight": torch.ones(4, 72), "more": torch.ones(1)}, "k.pth")
    with pytest.raises(UserError) as error:
        fill(small(), read_file(Path("k.pth")), head="2", what="the network")
    assert str(error.value) == (
        "k.pth does not fit the network: 1 of its 4 tensors were found\n"
        "missing in the file: 0.bias\nof other shape: 0.weight\nleft over: more"
    )


def test_paths_and_names_are_told_apart(here: Path) -> None:
    Path("k.pth").touch()
    Path("IMAGENET1K_V1").mkdir()
    assert local_file("k.pth") == Path("k.pth")
    for name in (True, False, None, "DEFAULT", "IMAGENET1K_V1", "facebook/dinov2-small"):
        assert local_file(name) is None
    for path in ("none.pth", "x/none.safetensors", "./none", "~/none", "/none"):
        with pytest.raises(UserError) as error:
            local_file(path)
        assert str(error.value) == (
            f"weights is {path}; there is no such file\nallowed: a .ckpt, .pth, .pt, .bin, .safetensors file, or a name"
        )


def test_weights_are_wanted_unless_a_checkpoint_has_them() -> None:
    assert initial_weights_wanted()
    with without_initial_weights():
        assert not initial_weights_wanted()
    assert initial_weights_wanted()
    with pytest.raises(UserError), without_initial_weights():
        local_file("none.pth")
    assert initial_weights_wanted()


def test_options_for_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_options([8, 8], (0.1, 0.2, 0.3), (0.5, 0.5, 0.8), "bilinear", 3) == {
        "size": 8,
        "mean": [0.1, 0.2, 0.3],
        "std": [0.5, 0.5, 0.8],
    }
    assert capsys.readouterr().out == ""
    grey = as_options([8, 16], (0.1, 0.2, 0.3), (0.5, 0.5, 0.8), "bicubic", 1)
    assert grey["size"] == [8, 16]
    assert grey["mean"] == pytest.approx([0.2])
    assert grey["std"] == pytest.approx([0.6])
    assert capsys.readouterr().out == (
        "data        the weights were trained on images scaled by bicubic interpolation; here it is bilinear\n"
    )


def test_images_of_another_size_than_a_network_is_for() -> None:
    images = torch.zeros(1, 3, 8, 6)
    for size in (None, (8, 6), [8, 6]):
        require_size(size, images)
    with pytest.raises(UserError, match=r"^the network is for images of 8x8 pixels, and these have 8x6"):
        require_size(8, images)
    with pytest.raises(UserError, match="224x224 pixels, and these have 8x6"):
        TorchvisionNetwork(2, 3, name="vit_b_32")(images)
