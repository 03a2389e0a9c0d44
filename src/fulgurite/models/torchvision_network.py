"""Classify images with a network of torchvision's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torchvision.models
from torch import Tensor, nn

from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.models.downloads import fetch
from fulgurite.models.pretrained import (
    Weights,
    adapt_input,
    as_options,
    fill,
    initial_weights_wanted,
    local_file,
    read_file,
    require_numbers,
    require_size,
)

# They give more than logits in training, or do not end in a linear layer.
_UNSUITED = ("googlenet", "inception_v3", "squeezenet1_0", "squeezenet1_1")
# In the files of DenseNets, which are older than its present code: norm.1 is norm1.
_OLD_NAMES = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.")


class TorchvisionNetwork(nn.Module):
    """Map images to logits through a network of ``torchvision.models``, with a last layer for the classes at hand.

    Args:
        num_classes: number of logits K
        in_channels: of the images
        name: of a classification network, such as resnet50, convnext_tiny or vit_b_16
        weights: true or DEFAULT for the best published ones, their name, such as IMAGENET1K_V1, or the path of a file of this
            network's weights; null for none
        image_size: of networks for one size only, such as ViTs: in pixels; null takes that of the weights, or 224
        dropout: probability to drop a feature before the last layer; null is the network's own
        drop_path: probability to skip the last block's branch; null is the network's own

    Raises:
        UserError: if a name is unknown, the network does not take an option, or the weights cannot be had or do not fit
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        *,
        name: str = "resnet18",
        weights: Weights = None,
        image_size: int | None = None,
        dropout: float | None = None,
        drop_path: float | None = None,
    ) -> None:
        super().__init__()
        require_numbers(num_classes=num_classes, in_channels=in_channels)
        published = _published(name, weights)
        if image_size is None and published is not None and name.startswith("vit_"):
            image_size = published.meta["min_size"][0]
        given = {"image_size": image_size, "dropout": dropout, "stochastic_depth_prob": drop_path}
        self.model = _build(name, num_classes, {key: value for key, value in given.items() if value is not None})
        adapt_input(self.model, in_channels)
        head_name, head = _head(self.model)
        if initial_weights_wanted() and weights:
            file = read_file(local_file(weights) or fetch(published.url))
            tensors = {_OLD_NAMES.sub(r"\1\2.", key): value for key, value in file.tensors.items()}
            fill(self.model, replace(file, tensors=tensors), head=head_name, what=name)
        self.num_features = head.in_features
        # Apart from the rest, so that there are features.
        self.model.set_submodule(head_name, nn.Identity())
        self.head = head

    @classmethod
    def preprocessing(
        cls, *, in_channels: int = 3, name: str = "resnet18", weights: Weights = None, **others: Any
    ) -> dict[str, Any]:
        """Return the images' size, mean and std that published weights were trained with; nothing for others.

        Args:
            in_channels: of the images
            name: of the network
            weights: as the network is given them
            others: of the network's arguments, which do not matter here

        Returns:
            ``size``, ``mean`` and ``std``, as data modules take them
        """
        published = _published(name, weights)
        if published is None:
            return {}
        transforms = published.transforms()
        return as_options(transforms.crop_size, transforms.mean, transforms.std, transforms.interpolation.value, in_channels)

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features).

        Raises:
            UserError: if the network is for images of another size
        """
        require_size(getattr(self.model, "image_size", None), images)
        features: Tensor = self.model(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits


def _published(name: str, weights: Weights) -> Any:
    """Return the entry of published weights, also of their file by its name, or None for another file or none."""
    known = [one for one in torchvision.models.list_models(module=torchvision.models) if one not in _UNSUITED]
    if name in _UNSUITED:
        raise UserError(f"{name} of torchvision is not supported, as it does not end in one linear layer: see TimmNetwork")
    if name not in known:
        raise UserError(f"torchvision.models has no classification network '{name}'{did_you_mean(name, known)}")
    if not weights:
        return None
    entries = torchvision.models.get_model_weights(name)
    names = ["DEFAULT", *(entry.name for entry in entries)]
    wanted = "DEFAULT" if weights is True else str(weights)
    if wanted.upper() in names:
        return entries[wanted.upper()]
    # By its name: whether the file is there still must not change what the network is.
    found = next((entry for entry in entries if entry.url.endswith(f"/{Path(wanted).name}")), None)
    if found is None and initial_weights_wanted() and local_file(wanted) is None:
        raise UserError(
            f"weights is '{wanted}'{did_you_mean(wanted, names)}; {name} has {name_list(names)}; a file's path will do, too, "
            "and null for none"
        )
    return found


def _build(name: str, num_classes: int, options: dict[str, Any]) -> nn.Module:
    try:
        network: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    except (TypeError, ValueError) as error:
        given = {"drop_path" if key == "stochastic_depth_prob" else key: value for key, value in options.items()}
        raise UserError(f"{name} does not take {name_list(f'{key} {value}' for key, value in given.items())}") from error
    return network


def _head(network: nn.Module) -> tuple[str, nn.Linear]:
    return [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]
