"""Fetch published weights: from the cache where they are, else from the network, which is given up on quickly."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from filelock import FileLock

from fulgurite.errors import UserError

_PATIENCE = 10.0  # seconds for an answer; the libraries themselves wait for ever, or try five times and more
_HASH = re.compile(r"-([0-9a-f]{8,})\.")  # the beginning of the SHA-256, as PyTorch has it in its files' names


def fetch(url: str) -> Path:
    """Return the file behind an address of PyTorch's, from ``torch.hub``'s cache if it is there.

    Raises:
        UserError: if it is not there, and cannot be downloaded
    """
    name = url.rpartition("/")[2]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path, expected = folder / name, _HASH.search(name)
    if path.is_file():
        return path
    try:
        _require_answer(url)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"), _limited_patience():  # one process of a job downloads, the others wait
            if not path.is_file():
                torch.hub.download_url_to_file(url, str(path), expected[1] if expected else None)
    except (OSError, RuntimeError) as error:  # of the second kind: another hash
        raise UserError(
            f"{name} is not in {folder}, and cannot be downloaded: {_reason(error)}\n"
            f"fetch it where there is a network, curl -LO {url}, and put it there, or anywhere and set weights to its path"
        ) from error
    return path


def fetch_repository(name: str, patterns: Sequence[str], *, network: bool = True) -> Path:
    """Return the folder with files of a Hugging Face repository, from the cache if the first of them is there.

    Args:
        name: such as ``facebook/dinov2-small``
        patterns: of the files; the first has to be there
        network: whether to ask for what is not in the cache

    Raises:
        UserError: if they are not there, and cannot be downloaded
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError

    try:
        folder = _cached(name, patterns)
        if folder is None and network and not HF_HUB_OFFLINE:
            _require_answer(f"{ENDPOINT}/{name}")
            folder = Path(snapshot_download(name, allow_patterns=list(patterns)))
        if folder is None:
            raise FileNotFoundError("the network is not asked")
        if not any(folder.glob(patterns[0])):
            raise FileNotFoundError(f"it has no {patterns[0]}")
    except HFValidationError as error:
        raise UserError(f"'{name}' is neither a folder nor the name of a Hugging Face model, such as google/vit-base") from error
    except OSError as error:  # the hub's errors are of this kind
        option = "name" if patterns[0] == "config.json" else "weights"
        raise UserError(
            f"{patterns[0]} of {name} is not in the cache of Hugging Face, and cannot be had: {_reason(error)}\n"
            f"fetch it where there is a network, hf download {name} --local-dir FOLDER, and set {option} to that folder"
        ) from error
    return folder


def _cached(name: str, patterns: Sequence[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob(patterns[0])) else None


def _require_answer(url: str) -> None:
    try:
        urlopen(Request(url, method="HEAD", headers={"User-Agent": "torch.hub"}), timeout=_PATIENCE).close()
    except HTTPError as error:
        error.close()
        if error.code in (401, 404):  # a hub says 401 of what it does not have, lest it say what is private
            raise


@contextmanager
def _limited_patience() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _reason(error: BaseException) -> str:
    reason = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    return str(getattr(reason, "strerror", None) or reason).partition("\n")[0]
