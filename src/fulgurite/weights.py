"""Find a file of weights and read it without trust."""

from __future__ import annotations

import argparse
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fulgurite.checkpoint import damage, require_safe_reading
from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.plain_data import NotPlainError, check_pickle
from fulgurite.runs import find_checkpoint

Tensors = dict[str, Tensor]

_ENDINGS = (".ckpt", ".pth", ".pt", ".bin", ".safetensors")
# What PyTorch raises where the bytes of a file make no sense.
_DAMAGED = (
    RuntimeError,
    EOFError,
    LookupError,
    AttributeError,
    ValueError,
    TypeError,
    ArithmeticError,
    AssertionError,
    struct.error,
)
# Under which training programs keep the network, the commonest first.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights", "params")
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save's magic number, pickled, before it wrote zip files (PyTorch 1.6)
_LEGACY_PICKLES = 5  # a magic number, two of versions, the state dict, the order of what follows


@dataclass(frozen=True)
class WeightsFile:
    """What a file of weights holds.

    Args:
        path: of the file
        tensors: by name
        ignored: what else is in it that could be taken for weights: values that are no tensors, other state dicts
    """

    path: Path
    tensors: Tensors
    ignored: list[str]


def find_weights(given: str | Path, runs_dir: Path) -> Path:
    """Resolve what a user may call a file of weights: a file, a run folder, or best or last for those of the latest run.

    Raises:
        UserError: if it is not there, or is not on this machine
    """
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if str(given) in ("best", "last"):
        return find_checkpoint(given, runs_dir)
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.suffix in _ENDINGS)
        if files and not (path / "checkpoints").is_dir() and path.name != "checkpoints":
            raise UserError(f"weights.path is {path}, a folder: name the file in it that is meant: {name_list(files)}")
        return find_checkpoint(path, runs_dir)
    if url := re.fullmatch(r"([\w-]{2,}:)/*(.*)", str(given)):  # a Path has made one slash of two
        place = f"{url[1]}//{url[2]}"
        fetch = f"curl -LO {place}" if place.startswith("http") else "copy it here"
        raise UserError(f"weights.path is {place}, and only files on this machine are read\nfetch it first: {fetch}")
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)) and path.suffix not in _ENDINGS and not path.parent.exists()
    raise UserError(
        f"no weights at {path}{did_you_mean(path.name, siblings)}\n"
        f"allowed: a {', '.join(_ENDINGS)} file, a run folder, or best or last for those of the latest run"
        + (f"\na Hugging Face model is fetched first: hf download {given} model.safetensors --local-dir ." if on_hub else "")
    )


def read_weights(path: Path) -> WeightsFile:
    """Read the weights in a file onto the CPU; nothing in it can run. Its first bytes decide what it is, not its name.

    Args:
        path: safetensors, or what torch.save wrote, today or before PyTorch 1.6: a state dict, plain or within a checkpoint

    Raises:
        UserError: if it is missing or damaged, holds code or no tensors, or the environment weakens the reading
    """
    require_safe_reading("file of weights")
    if not path.is_file():
        raise UserError(f"no file of weights at {path}")
    try:
        with path.open("rb") as file:
            head = file.read(32)
        content: Any = load_file(path) if head[8:9] == b"{" else _unpickle(path, head)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        state, ignored = _unwrap(content, path)
    except RecursionError as error:
        raise UserError(f"{path} holds no weights: it holds itself") from error
    tensors = {name: value for name, value in state.items() if isinstance(name, str) and _is_plain(value)}
    if not tensors:
        raise UserError(f"{path} holds no weights: there is no tensor in it")
    return WeightsFile(path, tensors, [str(name) for name in state if name not in tensors] + ignored)


def _unpickle(path: Path, head: bytes) -> Any:
    problem = damage(path) if head.startswith(b"PK") or not head else None
    if problem and "/code/" in problem:  # its code is compressed, which PyTorch's own parts never are
        problem = "it is a TorchScript program: save its state_dict() instead"
    if not problem and not head.startswith(b"PK") and _LEGACY not in head:
        problem = f"it is no file of weights; it begins with {head.decode('latin-1')!a}"
    if problem:
        raise UserError(f"{path} cannot be read: {problem}")
    try:
        _look_through(path, is_zip=head.startswith(b"PK"))
    except NotPlainError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (ValueError, LookupError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read: it is damaged (its pickle breaks off)") from error
    try:
        # Many published files keep their options beside the weights, in a Namespace, which can do nothing.
        # A file, not its path: torch.load takes what is named .safetensors for that.
        with torch.serialization.safe_globals([argparse.Namespace]), path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *_DAMAGED) as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path} cannot be read: it names {named[1]}, and code that a file names is never run\n"
                "ask its author for the state_dict alone, or for a .safetensors file"
            ) from error
        reason = re.search(r"WeightsUnpickler error: (.*)|^(?!Weights only)(.+)", str(error))
        detail = (reason[1] or reason[2]) if reason else type(error).__name__
        raise UserError(f"{path} cannot be read: it is damaged ({detail})") from error


def _look_through(path: Path, *, is_zip: bool) -> None:
    """Refuse pickles on which PyTorch would hang or crash."""
    with path.open("rb") as file:
        if is_zip:
            check_pickle(torch._C.PyTorchFileReader(file).get_record("data.pkl"), names_too=False)
            return
        for _ in range(_LEGACY_PICKLES):
            check_pickle(file, names_too=False)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _unwrap(content: Any, path: Path) -> tuple[Mapping[Any, Any], list[str]]:
    """Return the state dict in a file, and the names of other ones beside it."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds no weights: it is a {type(content).__name__}, not a state dict")
    holders = [key for key, value in content.items() if isinstance(value, Mapping) and any(map(_is_plain, value.values()))]
    for key in _WRAPPERS:
        if key in holders:
            return content[key], [str(other) for other in holders if other != key]
    if any(map(_is_plain, content.values())):
        return content, []
    nested = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
    if nested is not None:
        return _unwrap(nested, path)
    if len(holders) == 1:
        return content[holders[0]], []
    raise UserError(f"{path} holds no state dict that is known as one; its keys are {name_list(map(str, content)) or 'none'}")
