"""Classify images with a network of Hugging Face's transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fulgurite.console import note
from fulgurite.errors import MissingExtraError, UserError, did_you_mean, name_list
from fulgurite.models.downloads import fetch_repository
from fulgurite.models.pretrained import (
    Weights,
    adapt_input,
    as_options,
    initial_weights_wanted,
    local_file,
    read_file,
    require_numbers,
    tell_input,
    tell_weights,
)

# Beside those with which transformers classifies images.
_MORE_TYPES = {"clip_vision_model", "dinov3_convnext", "dinov3_vit", "siglip_vision_model"}
# Of those: not for images alone, or of other libraries; timm_wrapper would ask a hub, also for a stranger's checkpoint.
_NOT = {"clip", "dinat", "donut-swin", "hgnet_v2", "imagegpt", "metaclip_2", "perceiver", "siglip", "siglip2", "timm_wrapper"}
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # of PIL
_WEIGHTS = ["*.safetensors", "*.json"]  # one file or several; config.json, preprocessor_config.json


class HuggingFaceNetwork(nn.Module):
    """Map images to logits through an image model of transformers and a linear layer.

    Args:
        num_classes: number of logits K
        in_channels: of the images
        name: of a model on the Hugging Face hub, or the folder of one, which says the architecture
        config: values of a config.json that go over it; one that says a model_type needs no name. A run from the command line
            writes it out, so that its checkpoints need neither the hub nor the folder
        weights: true or default for those of ``name``, another name or folder, or the path of a file; null for none
        pooling: what the logits are made of: what the "model" offers for it, its first "token", or the "mean" over all places

    Raises:
        MissingExtraError: if transformers is not installed
        UserError: if the name is unknown or no image model, or what is needed cannot be had or does not fit
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        *,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        weights: Weights = None,
        pooling: Literal["model", "token", "mean"] = "model",
    ) -> None:
        super().__init__()
        require_numbers(num_classes=num_classes, in_channels=in_channels)
        if pooling not in ("model", "token", "mean"):
            raise UserError(f"pooling is '{pooling}'; allowed: model, token, mean")
        settings, self.pooling = _config(name, config), pooling
        channels = getattr(settings, "num_channels", 3)
        if weights and initial_weights_wanted():
            self.model: Any = _with_weights(settings, _source(name, weights), pooling)
            tell_input(channels, in_channels)
        else:
            self.model = _transformers().AutoModel.from_config(settings, dtype=torch.float32, trust_remote_code=False)
        adapt_input(self.model, in_channels)
        for module in self.model.modules():
            if getattr(module, "num_channels", None) == channels:
                module.num_channels = in_channels  # which many check their images against
        self.model.config.num_channels = in_channels
        self.num_features = self._measure(in_channels)
        self.head = nn.Linear(self.num_features, num_classes)

    @torch.enable_grad()
    def _measure(self, in_channels: int) -> int:
        """Return the number of features; freeze what they do not depend on, such as mask tokens: DDP would wait for it."""
        size = getattr(self.model.config, "image_size", None) or 224
        sides = [size, size] if isinstance(size, int) else list(size)
        self.model.eval()
        features = self.features(torch.zeros(1, in_channels, *sides))
        self.model.train()
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(features.sum(), parameters, allow_unused=True), strict=True
        ):
            parameter.requires_grad_(gradient is not None)
        return features.shape[1]

    @classmethod
    def settled(cls, **init_args: Any) -> dict[str, Any]:
        """Return the network's arguments with the architecture written out, so that a checkpoint needs no hub for it."""
        config = _config(init_args.get("name"), init_args.get("config"))
        return init_args | {"config": {"model_type": config.model_type} | _own_values(config.to_diff_dict(), config.model_type)}

    @classmethod
    def preprocessing(
        cls, *, in_channels: int = 3, name: str | None = None, weights: Weights = None, **others: Any
    ) -> dict[str, Any]:
        """Return the images' size, mean and std that the weights were trained with; nothing where none or no such file is there.

        Args:
            in_channels: of the images
            name: of the network
            weights: as the network is given them
            others: of the network's arguments, which do not matter here

        Returns:
            ``size``, ``mean`` and ``std``, as data modules take them
        """
        source = _source(name, weights) if weights else ""
        if not source or local_file(source):
            return {}
        file = _folder(source, _WEIGHTS) / "preprocessor_config.json"
        if not file.is_file():
            note("data", f"{source} does not say how its images were normalised: there is no {file.name}")
            return {}
        values = _read_json(file)
        size = values.get("crop_size") if values.get("do_center_crop") else values.get("size")
        size = size if isinstance(size, dict) else {"shortest_edge": size}
        sides: list[Any] = [size[key] for key in ("height", "width") if key in size] or [size.get("shortest_edge")]
        mean, std, mode = values.get("image_mean"), values.get("image_std"), _FILTERS.get(values.get("resample", 2), "another")
        if mean and std and all(isinstance(side, int) for side in sides):
            return as_options(sides, mean, std, mode, in_channels)
        note("data", f"{file} does not say the images' size, mean and std")
        return {}

    def hidden_states(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map float images (B, C, H, W) to what enters the first block and leaves each: (B, N, C), or (B, C, h, w)."""
        states: tuple[Tensor, ...] = self.model(pixel_values=images, output_hidden_states=True, return_dict=True).hidden_states
        return states

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features)."""
        output = self.model(pixel_values=images, return_dict=True)
        pooled, last = getattr(output, "pooler_output", None), output.last_hidden_state
        if self.pooling == "model" and pooled is not None:
            features: Tensor = pooled.flatten(1)  # (B, C, 1, 1) of convolutional ones
        elif last.ndim == 4:
            features = last.mean(dim=(2, 3))
        else:
            features = last.mean(dim=1) if self.pooling == "mean" else last[:, 0]
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("transformers", "hf", "HuggingFaceNetwork") from error
    return transformers


def _folder(source: str, patterns: list[str]) -> Path:
    """Return the folder of a model; without initial weights only the cache of the hub is looked into, whatever the name."""
    folder, wanted = Path(source).expanduser(), initial_weights_wanted()
    return folder if wanted and folder.is_dir() else fetch_repository(source, patterns, network=wanted)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _config(name: str | None, given: dict[str, Any] | None) -> Any:
    """Return the configuration that a name and what goes over it come to."""
    transformers, values = _transformers(), dict(given or {})
    if "model_type" not in values:
        if name is None:
            raise UserError("name is null; give a model of the Hugging Face hub or a folder, or a config with a model_type")
        values = _read_json(_folder(name, ["config.json"]) / "config.json") | values
    kind = values.pop("model_type", None)
    if kind not in (allowed := _types()):
        raise UserError(
            f"model_type is '{kind}'{did_you_mean(str(kind), allowed)}; of image models there are {name_list(allowed, 50)}"
        )
    from huggingface_hub.errors import StrictDataclassError

    try:
        return transformers.AutoConfig.for_model(kind, **_own_values(values, kind))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"config does not suit {kind}: {' '.join(str(error).split())[:200]}") from error


def _types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as KNOWN

    return sorted((({*CLASSIFIERS} | _MORE_TYPES) - _NOT) & {*KNOWN})


def _own_values(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the values that this kind alone has: the others do not matter, or name code, precisions and kernels to fetch."""
    transformers = _transformers()
    known = {*transformers.AutoConfig.for_model(kind).to_dict()} - {*transformers.PretrainedConfig().to_dict()}
    return {key: value for key, value in values.items() if key in known and not key.startswith("_") and key != "model_type"}


def _source(name: str | None, weights: Weights) -> str:
    source = name if weights is True or weights == "default" else weights
    if not isinstance(source, str):
        raise UserError(f"weights is {weights}, and there is no name: give the model that they are of")
    return source


def _with_weights(settings: Any, source: str, pooling: str) -> Any:
    """Return the model with the weights of a file, a folder or the hub: read without trust, then renamed by transformers."""
    if (path := local_file(source)) is not None:
        files = [path]
    else:
        folder = _folder(source, _WEIGHTS)
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    tensors = {key: tensor for file in files for key, tensor in read_file(file).tensors.items()}
    transformers = _transformers()
    kind, quiet = transformers.MODEL_MAPPING[type(settings)], transformers.logging
    before = quiet.get_verbosity()
    quiet.set_verbosity_error()  # its table of what was left out is told below in a line
    quiet.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            None, config=settings, state_dict=tensors, dtype=torch.float32, output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{source} does not fit {settings.model_type}: {' '.join(str(error).split())[:300]}") from error
    finally:
        quiet.set_verbosity(before)
    missing = sorted(name for name in report["missing_keys"] if not name.endswith("mask_token"))
    if lacking := [name for name in missing if not name.startswith("pooler.")]:
        raise UserError(f"{source} does not fit {settings.model_type}: {name_list(lacking)} are missing in it")
    tell_weights([tensor for key, tensor in tensors.items() if key not in report["unexpected_keys"]], source)
    if report["unexpected_keys"]:
        note("", f"not used: {name_list(sorted(report['unexpected_keys']))}")
    if pooling == "model" and missing:
        note("", "without the layer that pools, which is as initialised; pooling: token does without it")
    return model
