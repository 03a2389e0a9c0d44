"""What networks that begin with published weights share: whether they are wanted, other channels, and another head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.console import note
from fulgurite.errors import UserError, name_list

Weights = bool | str | None
"""True or "default", a name or a path; False and None for none."""

_ENDINGS = (".ckpt", ".pth", ".pt", ".bin", ".safetensors")
_wanted: ContextVar[bool] = ContextVar("initial_weights", default=True)


@contextmanager
def without_initial_weights() -> Iterator[None]:
    """Build networks whose state comes from a checkpoint: nothing that their settings name is read or downloaded.

    It is not needed, may be gone, and in a stranger's checkpoint may be anything.
    """
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


def initial_weights_wanted() -> bool:
    """Return whether a network that is built now is to begin with the weights that its settings name."""
    return _wanted.get()


def require_numbers(**numbers: int) -> None:
    """Refuse numbers of classes and channels that are none.

    Raises:
        UserError: if one is below 1
    """
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")


def require_size(size: int | Sequence[int] | None, images: Tensor) -> None:
    """Refuse images (B, C, H, W) of another height and width than a network is for; None stands for any.

    Raises:
        UserError: with both sizes, and the options to set
    """
    wanted = (size, size) if isinstance(size, int) else size and tuple(size)
    if wanted and tuple(images.shape[-2:]) != wanted:
        height, width = images.shape[-2:]
        raise UserError(
            f"the network is for images of {wanted[0]}x{wanted[1]} pixels, and these have {height}x{width}\n"
            "set image_size of the network, or size of the data"
        )


def local_file(weights: Weights) -> Path | None:
    """Return the file that ``weights`` is the path of, or None if it is a name.

    Raises:
        UserError: if it is a path, and there is no such file
    """
    if not isinstance(weights, str):
        return None
    path = Path(weights).expanduser()
    if path.is_file() or path.is_dir():
        return path if path.is_file() else None
    if path.suffix in _ENDINGS or path.is_absolute() or weights.startswith((".", "~")):
        raise UserError(f"weights is {weights}; there is no such file\nallowed: a {', '.join(_ENDINGS)} file, or a name")
    return None


def read_file(path: Path) -> Any:
    """Read a file of weights without trust, as the section ``weights`` does."""
    from fulgurite.weights import read_weights  # imports Lightning, which a network does without otherwise

    return read_weights(path)


def adapt_weight(weight: Tensor, in_channels: int) -> Tensor:
    """Return the weight of a first convolution for another number of channels.

    One channel gets the sum over those there are, so that a grey image gives what it gave as RGB. More are filled by repeating
    them, scaled so that an image of one value everywhere gives what it gave (as Carreira & Zisserman 2017,
    https://arxiv.org/abs/1705.07750, do along time).

    Args:
        weight: (out, C, kH, kW)
        in_channels: wanted

    Returns:
        (out, in_channels, kH, kW)
    """
    channels = weight.shape[1]
    if in_channels == channels:
        return weight
    if in_channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight[:, torch.arange(in_channels) % channels] * (channels / in_channels)


def input_layer(network: nn.Module) -> tuple[str, nn.Conv2d]:
    """Return the first convolution, or patch projection, by name."""
    return next((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))


@torch.no_grad()
def adapt_input(network: nn.Module, in_channels: int) -> None:
    """Give the first convolution another number of channels, in place."""
    _, layer = input_layer(network)
    if layer.in_channels != in_channels:
        layer.weight = nn.Parameter(adapt_weight(layer.weight, in_channels))
        layer.in_channels = in_channels


def tell_input(channels: int, in_channels: int) -> None:
    """Say how a first convolution was adapted."""
    if channels != in_channels:
        how = "summed into 1" if in_channels == 1 else f"repeated for {in_channels}, times {channels} / {in_channels}"
        note("", f"first layer: the weights for {channels} channels are {how}")


@torch.no_grad()
def fill(network: nn.Module, file: Any, *, head: str = "", what: str) -> None:
    """Load a file's weights into a network: all but those of a head of another number of classes.

    Args:
        network: with the number of channels and classes that is wanted
        file: what :func:`read_file` gave
        head: name of its last layer
        what: names the network, for people

    Raises:
        UserError: if anything else is missing, left over, or of another shape
    """
    from fulgurite.weight_matching import match  # for the same reason as above

    found = match(file, network)
    name, layer = input_layer(network)
    given = found.other_shape.get(f"{name}.weight")
    if given is not None and given.ndim == 4:
        adapted = {found.names[f"{name}.weight"]: adapt_weight(given, layer.in_channels)}
        found = match(replace(file, tensors=file.tensors | adapted), network)
    of_head = {f"{head}.weight", f"{head}.bias"}
    wrong = {
        "missing in the file": [one for one in found.missing if one not in of_head],
        "of other shape": [one for one in found.other_shape if one not in of_head],
        "left over": [one for one in found.unused if one not in found.outside],
    }
    if any(wrong.values()) or not found.loaded:
        lines = [f"{text}: {name_list(names)}" for text, names in wrong.items() if names]
        total = f"{len(found.loaded)} of its {len(found.wanted)} tensors were found"
        raise UserError("\n".join([f"{file.path} does not fit {what}: {total}", *lines]))
    found.load()
    tell_weights(found.loaded.values(), file.path)
    if given is not None:
        tell_input(given.shape[1], layer.in_channels)
    other = found.other_shape.get(f"{head}.weight")
    tell_head(None if other is None else len(other), is_new=other is not None or f"{head}.weight" in found.missing)


def tell_weights(tensors: Iterable[Tensor], source: object) -> None:
    """Say what was loaded from where."""
    sizes = [tensor.numel() for tensor in tensors]
    note("weights", f"{len(sizes)} tensors, {sum(sizes):,} values, from {source}")


def tell_head(classes: int | None, *, is_new: bool) -> None:
    """Say that the last layer begins as it was initialised, and of how many classes that was which was left out."""
    if is_new:
        note("", "last layer: new" + (f", as theirs is for {classes} classes" if classes else ""))


def as_options(
    size: Sequence[int], mean: Sequence[float], std: Sequence[float], interpolation: str, in_channels: int
) -> dict[str, Any]:
    """Return how weights want their images as options of a data module, and say what it has no option for.

    Args:
        size: one number of pixels, or height and width
        mean: of each channel there was, of images scaled to 0..1
        std: the same
        interpolation: by which images were scaled
        in_channels: of the images now; one channel gets the averages
    """
    if interpolation != "bilinear":
        note("data", f"the weights were trained on images scaled by {interpolation} interpolation; here it is bilinear")
    if in_channels == 1:
        mean, std = [sum(mean) / len(mean)], [sum(std) / len(std)]
    sides = [int(side) for side in size]
    return {"size": sides[0] if len(set(sides)) == 1 else sides, "mean": [*map(float, mean)], "std": [*map(float, std)]}
