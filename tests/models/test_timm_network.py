from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite.errors import MissingExtraError, UserError
from fulgurite.models import TimmNetwork, downloads
from fulgurite.models.pretrained import without_initial_weights

timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'fulgurite[timm]'")

ON_HUB = "of a model on the hub give the architecture, and the path of its file as weights"
SMALL: dict[str, Any] = {"name": "test_vit"}  # timm's own for tests: 160 pixels, 0.4 million weights


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def published(here: Path) -> Any:
    """The network whose weights lie in weights.pth."""
    torch.manual_seed(3)
    network: nn.Module = timm.create_model("test_vit")
    torch.save(network.state_dict(), "weights.pth")
    return network.eval()


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "test_efficientnet", "test_byobnet"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_shapes(name: str, channels: int) -> None:
    network = TimmNetwork(7, channels, name=name).eval()
    images = noise(1, channels, 160, 160)
    assert network.features(images).shape == (1, network.num_features)
    assert network(images).shape == (1, 7)


def test_options_reach_the_network() -> None:
    network = TimmNetwork(7, 3, **SMALL, image_size=32, dropout=0.25, drop_path=0.5)
    assert network(noise(1, 3, 32, 32)).shape == (1, 7)
    assert network.model.head_drop.p == 0.25
    assert network.model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.5)


def test_weights_of_a_file_compute_what_timm_computes(published: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    images = noise(2, 3, 160, 160)
    whole = TimmNetwork(1000, 3, **SMALL, weights="weights.pth").eval()
    torch.testing.assert_close(whole(images), published(images))
    assert capsys.readouterr().out == "weights     80 tensors, 371,240 values, from weights.pth\n"
    assert "state_dict" not in whole.model.pretrained_cfg
    grey = TimmNetwork(5, 1, **SMALL, weights="weights.pth").eval()
    torch.testing.assert_close(
        grey.features(images[:, :1]), whole.features(images[:, :1].expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-4
    )
    assert grey(images[:, :1]).shape == (2, 5)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "            first layer: the weights for 3 channels are summed into 1",
        "            last layer: new, as theirs is for 1000 classes",
    ]


def test_weights_fit_another_image_size(published: Any) -> None:
    network: Any = TimmNetwork(5, 3, **SMALL, weights="weights.pth", image_size=64).eval()
    assert network(noise(1, 3, 64, 64)).shape == (1, 5)
    assert torch.equal(network.model.cls_token, published.cls_token)


@pytest.mark.parametrize("classes", [5, 1000])
def test_weights_of_another_network_are_refused(published: nn.Module, classes: int) -> None:
    with pytest.raises(UserError, match=r"^weights.pth does not fit test_resnet: Error\(s\) in loading state_dict"):
        TimmNetwork(classes, 3, name="test_resnet", weights="weights.pth")


def test_published_weights_come_from_the_hub_or_its_cache(
    published: nn.Module, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    asked = []

    def repository(name: str, patterns: list[str]) -> Path:
        asked.append((name, patterns))
        return here

    save_file(published.state_dict(), "model.safetensors")
    monkeypatch.setattr("fulgurite.models.timm_network.fetch_repository", repository)
    images = noise(1, 3, 160, 160)
    for weights in (True, "default"):
        torch.testing.assert_close(TimmNetwork(1000, 3, **SMALL, weights=weights).eval()(images), published(images))
    assert asked == [("timm/test_vit.r160_in1k", ["model.safetensors"])] * 2


@pytest.mark.parametrize("weights", [True, "default", "gone.pth", "/etc/passwd"])
def test_a_network_that_a_checkpoint_fills_reads_nothing(monkeypatch: pytest.MonkeyPatch, weights: Any) -> None:
    monkeypatch.setattr(downloads, "_require_answer", pytest.fail)
    with without_initial_weights():
        network = TimmNetwork(2, 1, **SMALL, weights=weights)
    assert list(network.state_dict()) == list(TimmNetwork(2, 1, **SMALL).state_dict())


def test_preprocessing_is_that_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert TimmNetwork.preprocessing(**SMALL) == {}
    found = TimmNetwork.preprocessing(**SMALL, weights=True, dropout=0.5)
    assert found == {"size": 160, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert "scaled by bicubic interpolation; here it is bilinear" in capsys.readouterr().out
    assert TimmNetwork.preprocessing(**SMALL, weights="x.pth", image_size=64, in_channels=1)["size"] == 64


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"in_channels": 0}, "in_channels is 0; it must be at least 1"),
        ({"name": "resnet17"}, "timm has no network 'resnet17' (did you mean 'resnet18'?)"),
        (
            {"name": "test_vit.r161_in1k"},
            "timm has no weights 'test_vit.r161_in1k' (did you mean 'test_vit.r160_in1k'?); it has test_vit.r160_in1k",
        ),
        (
            {"name": "hf-hub:someone/model"},
            f"timm has no network 'hf-hub:someone/model'\n{ON_HUB}",
        ),
        (
            {"weights": "r160"},
            "weights is 'r160'; it takes true, default, null, or the path of a file; which ones, test_vit.TAG says",
        ),
        (
            {"name": "test_resnet", "image_size": 8},
            "timm refuses test_resnet: ResNet.__init__() got an unexpected keyword argument 'img_size'",
        ),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        TimmNetwork(**{"num_classes": 2, "in_channels": 3, **SMALL, **options})
    assert str(error.value) == text


def test_where_timm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *args: Any) -> None:
            if name == "timm":
                raise ModuleNotFoundError(name="timm")

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "timm")
    with pytest.raises(MissingExtraError) as error:
        TimmNetwork(2, 3)
    assert str(error.value) == 'TimmNetwork needs timm: pip install "fulgurite[timm]"'
