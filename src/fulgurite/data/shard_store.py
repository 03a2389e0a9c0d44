"""Where shards lie: a local folder, read in place, or an object store, copied shard by shard to a local cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from fulgurite.data.shards import MANIFEST, require_litdata
from fulgurite.errors import UserError, did_you_mean

# What LitData's client of a store needs that LitData does not install.
_PACKAGES = {"s3": "boto3", "gs": "google-cloud-storage", "azure": "azure-storage-blob", "r2": "boto3"}


class ShardStore:
    """Read files of one folder, wherever it is; holds plain values only, so that workers can be given it.

    Args:
        root: a local folder, or s3://, gs://, azure:// or r2:// and a path, or local: and a folder to copy from
        cache_dir: where copies are kept; None is ~/.cache/fulgurite/shards
        storage_options: for LitData's client of the object store

    Raises:
        UserError: if the scheme of the root is unknown
    """

    def __init__(self, root: str, cache_dir: Path | None = None, storage_options: dict[str, Any] | None = None) -> None:
        self.root = root.rstrip("/") or root
        self.scheme, colon, _ = self.root.partition("://")
        self.storage_options = storage_options or {}
        self.is_remote = bool(colon) or self.root.startswith("local:")
        if colon and self.scheme not in _PACKAGES:
            allowed = ", ".join(f"{name}://" for name in _PACKAGES)
            raise UserError(
                f"root is '{root}'; allowed: a local folder, {allowed}{did_you_mean(self.scheme, _PACKAGES, cutoff=0.5)}"
            )
        self.cache_dir = cache_dir or Path.home() / ".cache" / "fulgurite" / "shards"
        self.version = ""  # of the shards, so that new ones at the same address are not taken for those in the cache

    @property
    def folder(self) -> Path:
        """Where this machine reads the shards."""
        if not self.is_remote:
            return Path(self.root)
        return self.cache_dir / hashlib.sha256(f"{self.root} {self.version}".encode()).hexdigest()[:16]

    def read(self, name: str) -> bytes:
        """Return a small file, always from where it lies.

        Raises:
            UserError: if it cannot be read, with what is wrong
        """
        content = BytesIO()
        self._copy(name, content)
        return content.getvalue()

    def fetch(self, name: str) -> Path:
        """Return the path of a shard on this machine, copied there first if need be.

        Raises:
            UserError: if it cannot be read
        """
        path = self.folder / name
        if not self.is_remote or path.exists():
            return path
        require_litdata(f"copying {self.root}")
        from filelock import FileLock  # comes with LitData

        with self._kept():
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._kept(), FileLock(f"{path}.lock"):  # all workers of a node want the same shards
            if not path.exists():
                partial = path.with_name(f"{path.name}.partial")
                with partial.open("wb") as file:
                    self._copy(name, file)
                partial.replace(path)
        return path

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Name the cache in what goes wrong with it."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot keep the shards of {self.root} in {self.cache_dir}: {error.strerror or error}\n"
                "cache_dir names another folder"
            ) from error

    def _copy(self, name: str, file: IO[bytes]) -> None:
        if self.is_remote and not self.root.startswith("local:"):
            # Not LitData's download_file: it uses obstore, which is not safe to fork and there refuses http://, and it returns
            # without the file while another process is copying it.
            client = _client(self.root, tuple(self.storage_options.items()), os.getpid())
            try:
                client.download_fileobj(f"{self.root}/{name}", file)
            except Exception as error:  # each store's client has its own
                raise UserError(f"cannot read {self.root}/{name}: {error}") from error
            return
        folder = Path(self.root.removeprefix("local:"))
        try:
            source = (folder / name).open("rb")
        except OSError as error:
            raise UserError(_why_not(folder, name, error)) from error
        with source:
            shutil.copyfileobj(source, file)

    def check_space(self, needed: int) -> None:
        """Refuse to begin what will not fit into the cache.

        Args:
            needed: bytes to come, at most

        Raises:
            UserError: if the disk has less
        """
        with self._kept():
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"the shards of {self.root} still to copy take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free for "
                f"{self.cache_dir}\nset cache_dir to a folder on a larger disk, or use more nodes"
            )


@lru_cache(maxsize=8)
def _client(root: str, storage_options: tuple[tuple[str, Any], ...], process: int) -> Any:
    """Return LitData's client of a store: one for each process, since connections do not survive a fork."""
    require_litdata(f"reading {root}")
    from litdata.streaming.downloader import get_downloader

    try:
        return get_downloader(root, "", [], dict(storage_options))
    except ImportError as error:
        package = _PACKAGES[root.partition("://")[0]]
        raise UserError(f"reading {root} needs {package}: pip install {package}") from error


def _why_not(folder: Path, name: str, error: OSError) -> str:
    if not folder.exists():
        siblings = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        return f"the folder {folder} does not exist{did_you_mean(folder.name, siblings)}"
    if name == MANIFEST and not (folder / name).exists():
        return f"{folder} has no {MANIFEST}: these are no shards of fulgurite make-shards, or writing them was not finished"
    return f"cannot read {folder / name}: {error.strerror}"
