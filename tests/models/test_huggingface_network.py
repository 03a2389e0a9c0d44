from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from fulgurite import load
from fulgurite.cli import main
from fulgurite.errors import MissingExtraError, UserError
from fulgurite.models import HuggingFaceNetwork, downloads
from fulgurite.models.pretrained import without_initial_weights
from tests.conftest import ROOT
from tests.images import save_splits

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fulgurite[hf]'")

VIT: dict[str, Any] = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}
RESNET: dict[str, Any] = {"model_type": "resnet", "hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
SWIN: dict[str, Any] = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": 64}
DINO: dict[str, Any] = VIT | {"model_type": "dinov2"}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def published(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The classifier whose folder is ``model``, as people download it."""
    torch.manual_seed(3)
    values = {key: value for key, value in VIT.items() if key != "model_type"}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**values)).eval()
    transformers.logging.disable_progress_bar()
    model.save_pretrained("model")
    transformers.logging.enable_progress_bar()
    preprocessor = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}
    Path("model/preprocessor_config.json").write_text(json.dumps(preprocessor | {"size": {"height": 32, "width": 32}}))
    return model


@pytest.mark.parametrize("config", [VIT, RESNET, SWIN, DINO], ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize("pooling", ["model", "token", "mean"])
def test_shapes_and_gradients(config: dict[str, Any], pooling: Any) -> None:
    torch.manual_seed(0)
    network = HuggingFaceNetwork(3, 1, config=config, pooling=pooling)
    assert network.training
    assert all(module.training for module in network.modules())
    images = noise(2, 1, *[config.get("image_size", 32)] * 2)
    assert network.features(images).shape == (2, network.num_features)
    network(images).square().sum().backward()
    # DDP would wait for them.
    idle = [name for name, parameter in network.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert idle == []


def test_hidden_states_are_those_of_every_block() -> None:
    states = HuggingFaceNetwork(3, 3, config=VIT).hidden_states(noise(2, 3, 32, 32))
    assert [tuple(state.shape) for state in states] == [(2, 17, 16)] * 3
    states = HuggingFaceNetwork(3, 3, config=RESNET).hidden_states(noise(2, 3, 32, 32))
    assert [state.shape[1] for state in states] == [8, 8, 16]


def test_weights_of_a_folder_compute_what_transformers_computes(published: Any, capsys: pytest.CaptureFixture[str]) -> None:
    images = noise(2, 3, 32, 32)
    expected = published(images, output_hidden_states=True).hidden_states[-1]
    for source in ({"name": "model", "weights": True}, {"config": VIT, "weights": "model/model.safetensors"}):
        network = HuggingFaceNetwork(3, 3, pooling="token", **source).eval()
        torch.testing.assert_close(network.hidden_states(images)[-1], expected)
        torch.testing.assert_close(published.classifier(network.features(images)), published(images).logits)
    assert "first layer" not in capsys.readouterr().out
    grey = HuggingFaceNetwork(3, 1, name="model", weights="default", pooling="token").eval()
    torch.testing.assert_close(grey.features(images[:, :1]), network.features(images[:, :1].expand(-1, 3, -1, -1)))
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "weights     38 tensors, 6,800 values, from model",
        "            not used: classifier.bias, classifier.weight",
        "            first layer: the weights for 3 channels are summed into 1",
    ]
    assert captured.err == ""


def test_a_pooling_layer_that_the_weights_lack_is_told(published: Any, capsys: pytest.CaptureFixture[str]) -> None:
    HuggingFaceNetwork(3, 3, name="model", weights=True)
    assert "without the layer that pools, which is as initialised; pooling: token does without it" in capsys.readouterr().out


def test_weights_of_another_network_are_refused(published: Any) -> None:
    with pytest.raises(UserError, match=r"^model does not fit resnet: embedder\.\S+, .* are missing in it$"):
        HuggingFaceNetwork(3, 3, config=RESNET, weights="model")


def test_other_sizes_are_refused(published: Any) -> None:
    with pytest.raises(UserError, match=r"^model does not fit vit: "):
        HuggingFaceNetwork(3, 3, config=VIT | {"hidden_size": 8}, weights="model")


def test_without_a_network_it_says_how_to_get_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(downloads, "_require_answer", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    cases = (
        ({"name": "some/model"}, "config.json", "name"),
        ({"config": VIT, "weights": "some/model"}, "*.safetensors", "weights"),
    )
    for options, file, option in cases:
        with pytest.raises(UserError) as error:
            HuggingFaceNetwork(3, 3, **options)
        assert str(error.value) == (
            f"{file} of some/model is not in the cache of Hugging Face, and cannot be had: no network here\n"
            f"fetch it where there is a network, hf download some/model --local-dir FOLDER, and set {option} to that folder"
        )


def test_a_network_that_a_checkpoint_fills_reads_nothing(published: Any, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setattr(downloads, "_require_answer", pytest.fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here))
    for weights in ("gone", "some/model", "/etc/passwd", "gone.safetensors", True):
        with without_initial_weights():
            network = HuggingFaceNetwork(3, 1, config=VIT, weights=weights)
        assert list(network.state_dict()) == list(HuggingFaceNetwork(3, 1, config=VIT).state_dict())
    for name in ("model", str(here / "model"), "some/model", "../model"):  # not even the folder that is there
        with without_initial_weights(), pytest.raises(UserError):
            HuggingFaceNetwork(3, 1, name=name)


def test_settled_writes_the_architecture_out(published: Any) -> None:
    settled = HuggingFaceNetwork.settled(name="model", weights=True, config={"hidden_dropout_prob": 0.5}, pooling="mean")
    assert {key: settled[key] for key in ("name", "weights", "pooling")} == {"name": "model", "weights": True, "pooling": "mean"}
    assert settled["config"].items() >= (VIT | {"hidden_dropout_prob": 0.5}).items()
    assert yaml.safe_load(yaml.safe_dump(settled)) == settled
    assert HuggingFaceNetwork.settled(**settled) == settled
    with without_initial_weights():
        assert HuggingFaceNetwork(3, 1, **settled).model.config.hidden_dropout_prob == 0.5


def test_preprocessing_is_that_of_the_weights(published: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = HuggingFaceNetwork.preprocessing(name="model", weights=True, pooling="mean")
    assert found == {"size": 32, "mean": [0.5] * 3, "std": [0.25] * 3}
    assert "scaled by bicubic interpolation; here it is bilinear" in capsys.readouterr().out
    assert HuggingFaceNetwork.preprocessing(name="model") == {}
    assert HuggingFaceNetwork.preprocessing(config=VIT, weights="model/model.safetensors") == {}
    file = Path("model/preprocessor_config.json")
    values = json.loads(file.read_text())
    crop = {"do_center_crop": True, "crop_size": {"height": 24, "width": 16}, "size": {"shortest_edge": 28}}
    for more, size in ((crop, [24, 16]), ({"size": {"shortest_edge": 28}}, 28), ({"size": 20}, 20)):
        file.write_text(json.dumps(values | more))
        assert HuggingFaceNetwork.preprocessing(name="model", weights=True)["size"] == size
    file.write_text(json.dumps({"size": 20}))
    assert HuggingFaceNetwork.preprocessing(name="model", weights=True) == {}
    assert "preprocessor_config.json does not say the images' size, mean and std" in capsys.readouterr().out
    file.unlink()
    assert HuggingFaceNetwork.preprocessing(name="model", weights=True) == {}
    assert "model does not say how its images were normalised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_classes": 0}, "num_classes is 0; it must be at least 1"),
        ({"config": None}, "name is null; give a model of the Hugging Face hub or a folder, or a config with a model_type"),
        ({"weights": True}, "weights is True, and there is no name: give the model that they are of"),
        ({"config": {"model_type": "vitt"}}, "model_type is 'vitt' (did you mean 'vit'?); of image models there are beit, bit, "),
        (
            {"config": {"model_type": "timm_wrapper", "architecture": "hf-hub:x/y"}},
            "model_type is 'timm_wrapper'; of image models",
        ),
        ({"config": VIT | {"hidden_size": "x"}}, "config does not suit vit: Validation error for field 'hidden_size'"),
        ({"pooling": "max"}, "pooling is 'max'; allowed: model, token, mean"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        HuggingFaceNetwork(**{"num_classes": 2, "in_channels": 3, "config": VIT, **options})
    assert str(error.value).startswith(text)


def test_a_config_names_no_code_and_nothing_to_fetch() -> None:
    strange = {
        "auto_map": {"AutoModel": "someone/else--evil.Model"},
        "attn_implementation": "someone/kernel",
        "_attn_implementation": "someone/kernel",
        "quantization_config": {"quant_method": "x"},
        "torch_dtype": "float16",
        "dtype": "float16",
        "architectures": ["Evil"],
        "_name_or_path": "someone/else",
    }
    network = HuggingFaceNetwork(3, 3, config=VIT | strange)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert type(network.model).__module__ == "transformers.models.vit.modeling_vit"
    assert network.model.config._attn_implementation in ("sdpa", "eager")
    assert not strange.keys() & HuggingFaceNetwork.settled(config=VIT | strange)["config"].keys()


def test_where_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError) as error:
        HuggingFaceNetwork(2, 3, config=VIT)
    assert str(error.value) == 'HuggingFaceNetwork needs transformers: pip install "fulgurite[hf]"'


def test_a_run_needs_the_folder_of_its_weights_only_to_begin(
    published: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_splits(here / "flowers")
    text = (ROOT / "configs" / "experiment" / "images.yaml").read_text(encoding="utf-8")
    Path("bare.yaml").write_text(text.replace("    size: 224\n", ""), encoding="utf-8")
    less = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false", "--data.num_workers", "0"]
    network = ["--model.network", "HuggingFaceNetwork", "--model.network.name", "model", "--model.network.weights", "true"]
    assert main(["fit", "-c", "bare.yaml", "--data.root", "flowers", *network, "--data.batch_size", "4", *less]) == 0
    assert "data        size 32, mean [0.5, 0.5, 0.5], std [0.25, 0.25, 0.25]: as the network's" in capsys.readouterr().out
    config = yaml.safe_load(Path("runs/images/v001/config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["network"]["init_args"]["config"]["model_type"] == "vit"
    assert config["data"]["init_args"]["size"] == 32
    Path("model").rename("elsewhere")
    task = load("runs/images/v001")
    assert isinstance(task.network, nn.Module)
    assert task(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, 2)
