from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from fulgurite import load
from fulgurite.cli import main
from fulgurite.data import ImageFolderDataModule
from fulgurite.errors import UserError
from fulgurite.models import TorchvisionNetwork, downloads
from fulgurite.models.pretrained import without_initial_weights
from tests.commands import printed_config, refused
from tests.conftest import ROOT
from tests.images import save_splits

SMALL: dict[str, Any] = {"name": "shufflenet_v2_x0_5"}
KNOWN = "DEFAULT, IMAGENET1K_V1; a file's path will do, too, and null for none"
# As torchvision names the file, so that it is known whose weights they are.
FILE = "shufflenetv2_x0.5-f707e7126e.pth"
FIT = [
    *("-c", str(ROOT / "configs" / "experiment" / "images.yaml"), "--data.root", "flowers", "--data.num_workers", "0"),
    *("--model.network", "TorchvisionNetwork", "--model.network.name", SMALL["name"], "--model.network.weights", FILE),
    *("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"),
    *("--trainer.enable_progress_bar", "false", "--data.augment", "none", "--data.batch_size", "2"),
]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def published(here: Path) -> nn.Module:
    """The network whose weights lie in FILE."""
    torch.manual_seed(3)
    network: nn.Module = torchvision.models.get_model(SMALL["name"])
    torch.save(network.state_dict(), FILE)
    return network.eval()


@pytest.fixture
def no_network(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse downloads, and list what was asked for."""
    asked: list[str] = []

    def refuse(url: str) -> None:
        asked.append(url)
        raise OSError("no network here")

    monkeypatch.setattr(downloads, "_require_answer", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(here / "hub"))
    return asked


def test_every_network_ends_in_a_linear_layer_and_takes_any_channels() -> None:
    for name in ("alexnet", "densenet121", "mobilenet_v3_small", "regnet_y_400mf", "shufflenet_v2_x0_5", "swin_t"):
        network = TorchvisionNetwork(7, 1, name=name).eval()
        images = noise(1, 1, 64, 64)
        assert network.features(images).shape == (1, network.num_features), name
        assert network(images).shape == (1, 7), name
        assert isinstance(network.head, nn.Linear), name


def test_options_reach_the_network() -> None:
    network = TorchvisionNetwork(7, 3, name="vit_b_16", image_size=32, dropout=0.25)
    assert network(noise(1, 3, 32, 32)).shape == (1, 7)
    assert next(module.p for module in network.modules() if isinstance(module, nn.Dropout)) == 0.25
    stochastic = TorchvisionNetwork(7, 3, name="convnext_tiny", drop_path=0.5)
    assert any(getattr(module, "p", 0) == 0.5 for module in stochastic.modules())


def test_weights_of_a_file_compute_what_torchvision_computes(published: nn.Module) -> None:
    images = noise(2, 3, 64, 64)
    whole = TorchvisionNetwork(1000, 3, **SMALL, weights=FILE).eval()
    torch.testing.assert_close(whole(images), published(images))
    grey = TorchvisionNetwork(5, 1, **SMALL, weights=FILE).eval()
    torch.testing.assert_close(
        grey.features(images[:, :1]), whole.features(images[:, :1].expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-4
    )
    assert grey.head.out_features == 5


def test_old_names_of_densenets_are_understood(here: Path) -> None:
    torch.manual_seed(1)
    network: nn.Module = torchvision.models.get_model("densenet121").eval()
    state = {
        name.replace("norm1", "norm.1")
        .replace("norm2", "norm.2")
        .replace("conv1.", "conv.1.")
        .replace("conv2.", "conv.2."): value
        for name, value in network.state_dict().items()
    }
    assert state.keys() != network.state_dict().keys()
    torch.save(state, "k.pth")
    images = noise(1, 3, 64, 64)
    torch.testing.assert_close(TorchvisionNetwork(1000, 3, name="densenet121", weights="k.pth").eval()(images), network(images))


@pytest.mark.parametrize("weights", [True, "default", "IMAGENET1K_V1", "imagenet1k_v1"])
def test_published_weights_come_from_the_cache_of_pytorch(
    published: nn.Module, no_network: list[str], here: Path, weights: Any
) -> None:
    (here / "hub" / "checkpoints").mkdir(parents=True)
    Path(FILE).rename(here / "hub" / "checkpoints" / FILE)
    network = TorchvisionNetwork(1000, 3, **SMALL, weights=weights).eval()
    images = noise(1, 3, 64, 64)
    torch.testing.assert_close(network(images), published(images))
    assert no_network == []


def test_without_a_network_it_says_how_to_get_them(no_network: list[str], here: Path) -> None:
    with pytest.raises(UserError) as error:
        TorchvisionNetwork(2, 3, **SMALL, weights=True)
    url = f"https://download.pytorch.org/models/{FILE}"
    assert no_network == [url]
    assert str(error.value) == (
        f"{FILE} is not in {here}/hub/checkpoints, and cannot be downloaded: no network here\n"
        f"fetch it where there is a network, curl -LO {url}, and put it there, or anywhere and set weights to its path"
    )


@pytest.mark.parametrize("weights", [True, "DEFAULT", "gone.pth", "/etc/passwd", "NO_SUCH", FILE])
def test_a_network_that_a_checkpoint_fills_reads_nothing(no_network: list[str], weights: Any) -> None:
    with without_initial_weights():
        network = TorchvisionNetwork(2, 1, **SMALL, weights=weights)
    assert list(network.state_dict()) == list(TorchvisionNetwork(2, 1, **SMALL).state_dict())
    assert no_network == []


def test_what_a_network_is_does_not_depend_on_whether_its_file_is_there(here: Path) -> None:
    # These weights are for 384 pixels, and so is the network.
    with without_initial_weights():
        network: Any = TorchvisionNetwork(2, 3, name="vit_b_16", weights="gone/vit_b_16_swag-9ac1b537.pth")
    assert network.model.image_size == 384


def test_preprocessing_is_that_of_the_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    assert TorchvisionNetwork.preprocessing(weights="DEFAULT") == {"size": 224, "mean": mean, "std": std}
    Path("other.pth").touch()
    for weights in (None, "other.pth"):
        assert TorchvisionNetwork.preprocessing(weights=weights, dropout=0.1) == {}
    large = TorchvisionNetwork.preprocessing(in_channels=1, name="vit_b_16", weights="IMAGENET1K_SWAG_E2E_V1")
    assert (large["size"], len(large["mean"])) == (384, 1)
    assert "scaled by bicubic interpolation; here it is bilinear" in capsys.readouterr().out
    save_splits(here / "flowers")
    spec = ImageFolderDataModule(here / "flowers", channels=1, **large).spec
    assert (spec.height, spec.channels) == (384, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_classes": 0}, "num_classes is 0; it must be at least 1"),
        ({"name": "resnet17"}, "torchvision.models has no classification network 'resnet17' (did you mean 'resnet18'?)"),
        (
            {"name": "googlenet"},
            "googlenet of torchvision is not supported, as it does not end in one linear layer: see TimmNetwork",
        ),
        ({"name": "resnet18", "drop_path": 0.1}, "resnet18 does not take drop_path 0.1"),
        (
            {"weights": "IMAGENET1K_V7"},
            f"weights is 'IMAGENET1K_V7' (did you mean 'IMAGENET1K_V1'?); shufflenet_v2_x0_5 has {KNOWN}",
        ),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str, here: Path) -> None:
    with pytest.raises(UserError) as error:
        TorchvisionNetwork(**{"num_classes": 2, "in_channels": 3, **SMALL, **options})
    assert str(error.value) == text


def test_weights_of_another_network_are_refused(published: nn.Module) -> None:
    with pytest.raises(UserError) as error:
        TorchvisionNetwork(2, 3, name="resnet18", weights=FILE)
    assert str(error.value).startswith(
        f"{FILE} does not fit resnet18: 0 of its 122 tensors were found\nmissing in the file: conv1"
    )


def test_a_configuration_names_it(published: nn.Module) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=Callable[[int, int], nn.Module])
    config = parser.parse_object(
        {"network": {"class_path": "fulgurite.models.TorchvisionNetwork", "init_args": SMALL | {"weights": FILE}}}
    )
    assert parser.instantiate(config).network(6, 1)(noise(2, 1, 32, 32)).shape == (2, 6)


# Runs of the command line


def test_the_weights_say_how_the_images_are_prepared(
    published: nn.Module, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_splits(here / "flowers")
    (here / "mine.yaml").write_text("data: {init_args: {std: [1, 1, 1]}}\n")
    text = (ROOT / "configs" / "experiment" / "images.yaml").read_text(encoding="utf-8")
    Path("bare.yaml").write_text(text.replace("    size: 224\n", ""), encoding="utf-8")
    fit = ["fit", "-c", "bare.yaml", *FIT[2:], "-c", "mine.yaml"]
    name = "--model.network.name", "vit_b_16", "--model.network.weights", "IMAGENET1K_SWAG_E2E_V1"
    out = printed_config(capsys, *fit, *name, "--data.background", "[0, 0, 0]")["data"]["init_args"]
    assert (out["size"], out["mean"], out["std"]) == (384, [0.485, 0.456, 0.406], [1, 1, 1])
    grey = printed_config(capsys, *fit, *name, "--data.channels", "1", "--data.std", "[2]")["data"]["init_args"]
    assert grey["mean"] == pytest.approx([0.449])
    untouched = printed_config(capsys, *fit, "--model.network.weights", "null")["data"]["init_args"]
    assert (untouched["size"], untouched["mean"]) == (224, None)


def test_a_run_needs_the_file_of_its_weights_only_to_begin(
    published: nn.Module, here: Path, no_network: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    save_splits(here / "flowers")
    assert main(["fit", *FIT, "--data.size", "32"]) == 0
    out = capsys.readouterr().out
    assert f"values, from {FILE}\n            last layer: new, as theirs is for 1000 classes\n" in out
    assert (
        "data        mean [0.485, 0.456, 0.406], std [0.229, 0.224, 0.225]: as the network's weights were trained; "
        "--data.mean and the like override it\n"
    ) in out
    run = Path("runs/images/v001")
    saved = run.joinpath("config.yaml").read_text(encoding="utf-8")
    assert f"weights: {FILE}" in saved
    Path(FILE).unlink()
    quiet = ["--trainer.enable_progress_bar", "false"]
    assert main(["test", "--ckpt_path", str(run), *quiet]) == 0
    assert load(run).network.head.out_features == 2
    assert main(["fit", "--resume", str(run), "--trainer.max_epochs", "2", *quiet]) == 0
    assert "\nweights " not in capsys.readouterr().out
    assert no_network == []
    text = refused(capsys, "fit", *FIT, "--data.size", "32")
    assert "weights is shufflenetv2_x0.5-f707e7126e.pth; there is no such file" in text


def test_a_restarted_job_goes_on_without_the_file(
    published: nn.Module, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_splits(here / "flowers")
    fit = ["fit", *FIT, "--data.size", "32"]
    assert main([*fit, "--resume", "auto"]) == 0
    Path(FILE).rename("elsewhere")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(fit) == 0
    assert not Path("runs/images/v002").exists()
