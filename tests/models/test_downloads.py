from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.errors import UserError
from fulgurite.models import downloads
from fulgurite.models.downloads import fetch, fetch_repository


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(here: Path) -> Iterator[str]:
    """Serve the folder ``served``."""
    (here / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory="served")) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what is downloaded in the folder of this test."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(here / "hub"))
    monkeypatch.setattr(downloads, "_PATIENCE", 2.0)
    return here / "hub" / "checkpoints"


def test_a_file_is_downloaded_once(server: str, hub: Path) -> None:
    content = b"weights"
    name = f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    Path("served", name).write_bytes(content)
    assert fetch(f"{server}/{name}") == hub / name
    assert (hub / name).read_bytes() == content
    Path("served", name).unlink()
    assert fetch(f"{server}/{name}") == hub / name
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    ("name", "reason"), [("net-01234567.pth", "invalid hash value"), ("gone-01234567.pth", "HTTP Error 404: File not found")]
)
def test_what_is_not_the_file_is_refused(server: str, hub: Path, name: str, reason: str) -> None:
    Path("served", "net-01234567.pth").write_bytes(b"weights")
    with pytest.raises(UserError) as error:
        fetch(f"{server}/{name}")
    assert str(error.value).startswith(f"{name} is not in {hub}, and cannot be downloaded: {reason}")
    assert not (hub / name).exists()


def test_without_a_network_it_says_how_to_get_the_file(hub: Path) -> None:
    url = "http://127.0.0.1:1/models/net-01234567.pth"
    with pytest.raises(UserError) as error:
        fetch(url)
    assert str(error.value) == (
        f"net-01234567.pth is not in {hub}, and cannot be downloaded: Connection refused\n"
        f"fetch it where there is a network, curl -LO {url}, and put it there, or anywhere and set weights to its path"
    )


def test_a_network_that_says_nothing_is_given_up_on(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UserError, match="cannot be downloaded: timed out"):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/net.pth")


@pytest.fixture
def repository(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Hugging Face's shape with one file of a/b."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="it comes with the extras `timm` and `hf`")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    folder = here / "cache" / "models--a--b" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (here / "cache" / "models--a--b" / "refs").mkdir()
    (here / "cache" / "models--a--b" / "refs" / "main").write_text("0123")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_repository_in_the_cache_is_not_asked_for(repository: Path) -> None:
    assert fetch_repository("a/b", ["config.json"]) == repository


@pytest.mark.parametrize("name", ["a/b", "a/other"])
def test_a_repository_that_cannot_be_had(repository: Path, name: str) -> None:
    advice = f"\nfetch it where there is a network, hf download {name} --local-dir FOLDER, and set weights to that folder"
    for network, reason in ((True, "Connection refused"), (False, "the network is not asked")):
        with pytest.raises(UserError) as error:
            fetch_repository(name, ["*.safetensors"], network=network)
        assert str(error.value) == (
            f"*.safetensors of {name} is not in the cache of Hugging Face, and cannot be had: {reason}{advice}"
        )


@pytest.mark.parametrize("name", ["/etc", "../x", "a/b/c", ""])
def test_a_name_that_is_none(repository: Path, name: str) -> None:
    with pytest.raises(UserError, match="is neither a folder nor the name of a Hugging Face model, such as google/vit-base"):
        fetch_repository(name, ["config.json"])
