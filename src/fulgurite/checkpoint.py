"""What a checkpoint holds, how it is written so that it is never half there, and how it is read without trust."""

from __future__ import annotations

import os
import pickle
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils._pytree import tree_leaves

from fulgurite.config import leaves
from fulgurite.errors import UserError, shown
from fulgurite.plain_data import NotPlainError, check_pickle, check_values
from fulgurite.plain_yaml import read_yaml
from fulgurite.processes import of_first

KEY = "fulgurite"
_WEAKENING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
# What Lightning restores and this project adds; a part of another kind would break in the middle of a restore.
_KINDS: dict[str, type] = {
    "state_dict": dict,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "ema": dict,
    "metric_states": list,
}
_OF_DICTS = ("callbacks", "optimizer_states", "lr_schedulers")


@dataclass(frozen=True)
class Description:
    """What makes a checkpoint explain itself; plain values, kept under the key ``fulgurite``.

    Args:
        config: the whole resolved configuration as YAML text; empty if the run cannot be described
        spec: the data spec as :meth:`DataSpec.to_dict` gives it
        provenance: git commit, versions, seed, command, kind of host, data fingerprint
    """

    config: str
    spec: dict[str, Any]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def sections(self) -> dict[str, Any]:
        """The configuration as nested values; YAML tags and aliases are refused."""
        try:
            sections = read_yaml(self.config) or {}
        except UserError as error:
            raise UserError(f"the checkpoint's configuration is not plain YAML: {error}") from error
        if not isinstance(sections, dict):
            raise UserError("the checkpoint's configuration is not a mapping")
        if odd := next((key for key, _ in leaves(sections) if not key.isprintable()), None):
            raise UserError(f"the checkpoint's configuration has the key '{shown(odd)}'")
        return sections


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write next to the target, flush to the disk, then rename: a reader finds the old file or the new, never a part.

    Lightning's own way goes through TMPDIR, which is another file system in most containers; there a kill between
    copy and close destroys the checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``.

        Raises:
            OSError: if the disk is full or the folder cannot be written to; what was there before is untouched
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch.save hides the full disk behind an error of its own
            raise
        sync_folder(path.parent)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        """Read ``path`` as :func:`read_checkpoint` does, whatever the caller asks of ``weights_only``."""
        return of_first(lambda: read_checkpoint(Path(path)), needed=getattr(self, "first_reads", False))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a renamed file is still there after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_by_link(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source`` in one step; a later save replaces ``source`` and leaves it be."""
    if target.exists() and target.samefile(source):  # renaming one link of a file to another would do nothing
        return
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # no hard links on this file system
        shutil.copyfile(source, temporary)
    temporary.replace(target)


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint file, or None. Reads it whole once (0.06 s for 200 MB in memory)."""
    if path.stat().st_size == 0:
        return "it is empty"
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return "it is not a checkpoint"
    try:
        if not zipfile.is_zipfile(path):
            return "it is cut short"
        with zipfile.ZipFile(path) as archive:
            broken = next((part.filename for part in archive.infolist() if not _is_plain(part)), None) or archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, ValueError, struct.error) as error:
        return f"it is damaged ({_reason(error)})"
    return f"its part {shown(broken)} is damaged" if broken else None


def _is_plain(part: zipfile.ZipInfo) -> bool:
    """Return whether PyTorch can have written a part like this; a flipped bit may call it compressed, or a folder."""
    return part.compress_type == zipfile.ZIP_STORED and part.compress_size == part.file_size and part.external_attr == 0


def require_safe_reading(what: str) -> None:
    """Raise UserError where the environment lets a stranger's file run code."""
    if os.environ.get(_WEAKENING, "0") not in ("", "0"):
        raise UserError(f"{_WEAKENING} is set, which lets a {what} run code: unset it")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; nothing in it can run.

    Raises:
        UserError: if it is missing, damaged, holds more than plain data, or the environment weakens the reading
    """
    require_safe_reading("checkpoint")
    if not path.is_file():
        raise UserError(f"no checkpoint file at {path}")
    if problem := damage(path):
        raise UserError(f"{path} cannot be read: {problem}{_intact_beside(path)}")
    try:
        with path.open("rb") as file:  # one file throughout: another may be put in its place meanwhile
            check_pickle(torch._C.PyTorchFileReader(file).get_record("data.pkl"))
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        check_values(checkpoint, path.stat().st_size)
    except NotPlainError as error:
        raise UserError(f"{path} cannot be read: it holds more than plain data ({_reason(error)})") from error
    except pickle.UnpicklingError as error:  # its text recommends to let code run
        raise UserError(f"{path} cannot be read: it is damaged (its pickle breaks off){_intact_beside(path)}") from error
    except Exception as error:  # the bytes are a stranger's: there is no telling what PyTorch makes of them
        raise UserError(f"{path} cannot be read: it is damaged ({_reason(error)}){_intact_beside(path)}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UserError(f"{path} is not a training checkpoint: it has no state_dict")
    if wrong := [name for name, kind in _KINDS.items() if name in checkpoint and not _is_of(kind, name, checkpoint[name])]:
        raise UserError(f"{path} is not a training checkpoint: of another kind than it should be are {', '.join(wrong)}")
    return checkpoint


def _is_of(kind: type, name: str, value: Any) -> bool:
    if not isinstance(value, kind):
        return False
    parts: Any = value
    if name == "loops":
        return not any(isinstance(leaf, int | float) and leaf < -1 for leaf in tree_leaves(parts))  # counters
    if name == "state_dict":
        return all(isinstance(key, str) and key.isprintable() for key in parts)
    return name not in _OF_DICTS or all(isinstance(one, dict) for one in (parts.values() if kind is dict else parts))


def _reason(error: Exception) -> str:
    return shown(str(error).split("\n")[0] or type(error).__name__)


def _intact_beside(path: Path) -> str:
    others = sorted(path.parent.glob("*.ckpt"), key=lambda other: other.stat().st_mtime, reverse=True)
    intact = next((other for other in others if other != path and damage(other) is None), None)
    return f"\nthe newest intact checkpoint beside it: {intact}" if intact else ""


def describe(checkpoint: dict[str, Any], path: Path) -> Description:
    """Return the description kept in a checkpoint.

    Raises:
        UserError: if it has none, so that neither its network nor its data are known
    """
    stored = checkpoint.get(KEY)
    if not isinstance(stored, dict) or not {"config", "spec", "provenance"} <= stored.keys():
        raise UserError(f"{path} does not say how it was made: it was not written by fulgurite")
    kinds = {"config": str, "spec": dict, "provenance": dict}
    if wrong := [name for name, kind in kinds.items() if not isinstance(stored[name], kind)]:
        raise UserError(f"{path} does not say how it was made: its {', '.join(wrong)} cannot be read")
    return Description(config=stored["config"], spec=stored["spec"], provenance=stored["provenance"])


def provenance(*, seed: int | None, data_fingerprint: str) -> dict[str, Any]:
    """Collect where a run comes from, in plain values."""
    folder = Path(__file__).parent
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": _git(folder, "rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "versions": {name: version(name) for name in ("fulgurite", "torch", "torchvision", "lightning")},
        "python": platform.python_version(),
        "host": f"{platform.system()} {platform.machine()}",
        "command": shlex.join(sys.argv),
        "seed": seed,
        "data_fingerprint": data_fingerprint,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout, or no git: provenance says so by None
    return done.stdout.strip()
