"""Classify images with a network of timm's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fulgurite.errors import MissingExtraError, UserError, did_you_mean, name_list, shown
from fulgurite.models.downloads import fetch, fetch_repository
from fulgurite.models.pretrained import (
    Weights,
    as_options,
    initial_weights_wanted,
    local_file,
    read_file,
    require_numbers,
    require_size,
    tell_head,
    tell_input,
    tell_weights,
)


class TimmNetwork(nn.Module):
    """Map images to logits through a network of timm's (https://huggingface.co/docs/timm), with a last layer for the classes.

    Args:
        num_classes: number of logits K
        in_channels: of the images
        name: of the architecture, such as resnet50 or vit_small_patch16_224; behind a dot may stand which weights are meant, as
            in resnet50.a1_in1k
        weights: true or default for the published ones, or the path of a file of this network's weights; null for none
        image_size: of networks for one size only, such as ViTs: in pixels; null is the network's own
        dropout: probability to drop a feature before the last layer; null is the network's own
        drop_path: probability to skip the last block's branch; null is the network's own

    Raises:
        MissingExtraError: if timm is not installed
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
        timm, published = _timm(), _published(name)
        given = {"img_size": image_size, "drop_rate": dropout, "drop_path_rate": drop_path}
        options: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels, **given}
        path = _file(name, weights, published) if weights and initial_weights_wanted() else None
        if path is not None:
            tensors = read_file(path).tensors
            # With the classes of the file, and others afterwards: timm checks nothing if it has to leave out the last layer.
            classes = _classes(tensors, published) or num_classes
            overlay = {"state_dict": tensors, "num_classes": classes}
            options |= {"num_classes": classes, "pretrained": True, "pretrained_cfg_overlay": overlay}
        try:
            self.model: Any = timm.create_model(name, **options)
        except (TypeError, RuntimeError, ValueError, AssertionError, KeyError, AttributeError) as error:
            # timm raises whatever its networks do; the text says which option or tensor it is about.
            what = f"{path} does not fit {name}" if path and isinstance(error, RuntimeError) else f"timm refuses {name}"
            raise UserError(f"{what}: {shown(' '.join(str(error).split()))}") from error
        if path is not None:
            self.model.pretrained_cfg.pop("state_dict", None)  # timm would keep them all
            tell_weights(tensors.values(), path)
            tell_input(published.input_size[0], in_channels)
            tell_head(classes, is_new=classes != num_classes)
            if classes != num_classes:
                self.model.reset_classifier(num_classes)
        self.num_features: int = getattr(self.model, "head_hidden_size", None) or self.model.num_features

    @classmethod
    def preprocessing(
        cls,
        *,
        in_channels: int = 3,
        name: str = "resnet18",
        weights: Weights = None,
        image_size: int | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Return the images' size, mean and std that timm's weights of this name were trained with; nothing without weights.

        Args:
            in_channels: of the images
            name: of the network
            weights: as the network is given them
            image_size: the same
            others: of the network's arguments, which do not matter here

        Returns:
            ``size``, ``mean`` and ``std``, as data modules take them
        """
        published = _published(name)
        if not weights:
            return {}
        size = [image_size] if image_size else published.input_size[1:]
        return as_options(size, published.mean, published.std, published.interpolation, in_channels)

    def features(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to one vector each, (B, num_features)."""
        self._require_size(images)
        features: Tensor = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (B, C, H, W) to logits (B, K).

        Raises:
            UserError: if the network is for images of another size
        """
        self._require_size(images)
        logits: Tensor = self.model(images)
        return logits

    def _require_size(self, images: Tensor) -> None:
        patches = getattr(self.model, "patch_embed", None)
        require_size(getattr(patches, "img_size", None) if getattr(patches, "strict_img_size", False) else None, images)


def _timm() -> Any:
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise MissingExtraError("timm", "timm", "TimmNetwork") from error
    return timm


def _published(name: str) -> Any:
    """Return what timm knows of a name's weights; those of a hub, which would be asked what the network is, have none."""
    timm = _timm()
    if ":" in name or not timm.is_model(name):
        known = timm.list_models()
        tip = "\nof a model on the hub give the architecture, and the path of its file as weights" if ":" in name else ""
        raise UserError(f"timm has no network '{name}'{did_you_mean(name.partition('.')[0], known)}{tip}")
    try:
        return timm.models.get_pretrained_cfg(name, allow_unregistered=True) or timm.models.PretrainedCfg()
    except RuntimeError as error:
        known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
        raise UserError(f"timm has no weights '{name}'{did_you_mean(name, known)}; it has {name_list(known)}") from error


def _file(name: str, weights: Weights, published: Any) -> Path:
    """Return the file of weights, fetched if need be."""
    if (path := local_file(weights)) is not None:
        return path
    if weights is not True and str(weights).lower() != "default":
        raise UserError(
            f"weights is '{weights}'; it takes true, default, null, or the path of a file; which ones, {name}.TAG says"
        )
    if published.hf_hub_id:
        file = published.hf_hub_filename or "model.safetensors"
        return fetch_repository(published.hf_hub_id, [file]) / file
    if published.url and not published.custom_load:
        return fetch(published.url)
    raise UserError(f"timm has no published weights for {name}")


def _classes(tensors: dict[str, Tensor], published: Any) -> int | None:
    """Return how many classes the last layer in a file is for."""
    names = published.classifier if isinstance(published.classifier, tuple | list) else [published.classifier]
    weight = tensors.get(f"{names[0]}.weight")
    return None if weight is None else len(weight) - (published.label_offset or 0)
