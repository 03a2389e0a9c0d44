from __future__ import annotations

import json
import multiprocessing as mp
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fulgurite.data.shard_store import ShardStore
from fulgurite.data.shards import MANIFEST
from fulgurite.errors import MissingExtraError, UserError

pytest.importorskip("litdata", reason="litdata is not installed: pip install 'fulgurite[stream]'")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "far" / "train").mkdir(parents=True)
    (tmp_path / "far" / MANIFEST).write_text("{}")
    (tmp_path / "far" / "train" / "chunk-0-0.bin").write_bytes(b"shard")
    return tmp_path / "far"


class Handler(BaseHTTPRequestHandler):
    """Answer as an object store does, for one bucket."""

    folder: Path
    asked: Counter[str]

    def do_HEAD(self) -> None:  # the base class's name
        self.do_GET()

    def do_GET(self) -> None:
        path = self.folder / self.path.removeprefix("/bucket/").split("?")[0]
        self.asked[f"{self.command} {path.name}"] += 1
        body = path.read_bytes() if path.is_file() else b""
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Serve the folder as s3://bucket on this machine."""
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    handler = type("OneFolder", (Handler,), {"folder": folder, "asked": Counter()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(options={"endpoint_url": f"http://127.0.0.1:{server.server_port}"}, asked=handler.asked)  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_local_folder_is_read_in_place(folder: Path, tmp_path: Path) -> None:
    store = ShardStore(str(folder), tmp_path / "cache")
    assert store.fetch("train/chunk-0-0.bin") == folder / "train" / "chunk-0-0.bin"
    assert store.read(MANIFEST) == b"{}"
    assert not (tmp_path / "cache").exists()


def test_remote_shard_is_copied_once(folder: Path, tmp_path: Path) -> None:
    store = ShardStore(f"local:{folder}", tmp_path / "cache")
    path = store.fetch("train/chunk-0-0.bin")
    assert path.is_relative_to(tmp_path / "cache")
    assert path.read_bytes() == b"shard"
    (folder / "train" / "chunk-0-0.bin").unlink()
    assert store.fetch("train/chunk-0-0.bin") == path
    with pytest.raises(UserError, match=f"cannot read {folder}/train/chunk-0-1.bin: No such file"):
        store.fetch("train/chunk-0-1.bin")


def test_new_shards_at_the_same_address_are_copied_anew(folder: Path, tmp_path: Path) -> None:
    store = ShardStore(f"local:{folder}", tmp_path / "cache")
    store.fetch("train/chunk-0-0.bin")
    (folder / "train" / "chunk-0-0.bin").write_bytes(b"other")
    store.version = "2"
    assert store.fetch("train/chunk-0-0.bin").read_bytes() == b"other"


def test_object_store_is_read(s3: SimpleNamespace, tmp_path: Path) -> None:
    store = ShardStore("s3://bucket/", tmp_path / "cache", s3.options)
    assert json.loads(store.read(MANIFEST)) == {}
    assert pickle.loads(pickle.dumps(store)).fetch("train/chunk-0-0.bin").read_bytes() == b"shard"
    with pytest.raises(UserError, match=r"cannot read s3://bucket/val/index.json: .*\(404\).*Not Found"):
        store.read("val/index.json")
    with pytest.raises(UserError, match=r"cannot read s3://bucket/train/chunk-0-1\.bin: "):
        store.fetch("train/chunk-0-1.bin")
    assert [path.name for path in tmp_path.glob("cache/*/train/*.bin")] == ["chunk-0-0.bin"]


def test_processes_that_want_a_shard_copy_it_once(s3: SimpleNamespace, tmp_path: Path) -> None:
    store = ShardStore("s3://bucket", tmp_path / "cache", s3.options)
    store.read(MANIFEST)  # as the main process does before it starts workers
    workers = [mp.get_context("fork").Process(target=store.fetch, args=("train/chunk-0-0.bin",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert s3.asked["GET chunk-0-0.bin"] == 1


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    store = ShardStore(f"local:{folder}", tmp_path / "cache")
    store.check_space(1)
    with pytest.raises(UserError, match=r"still to copy take 1000000000\.0 GB, and .* GB are free for .*cache\nset cache_dir"):
        store.check_space(10**18)


@pytest.mark.parametrize(("root", "package"), [("gs://b", "google-cloud-storage"), ("azure://b", "azure-storage-blob")])
def test_package_of_a_store_is_named(root: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for available in ("_GOOGLE_STORAGE_AVAILABLE", "_AZURE_STORAGE_AVAILABLE"):
        monkeypatch.setattr(f"litdata.streaming.downloader.{available}", "")
    with pytest.raises(UserError, match=f"^reading {root} needs {package}: pip install {package}$"):
        ShardStore(root).read(MANIFEST)


def test_missing_litdata_is_named_only_where_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    assert ShardStore(str(folder)).read(MANIFEST) == b"{}"
    with pytest.raises(MissingExtraError, match=r'reading s3://x needs litdata: pip install "fulgurite\[stream\]"'):
        ShardStore("s3://x").read(MANIFEST)
