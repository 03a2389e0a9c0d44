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
import yaml
from lightning.pytorch.plugins.io import TorchCheckpointIO

from fulgurite.errors import UserError, did_you_mean

KEY = "fulgurite"
_WEAKENING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


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
        """The configuration as nested values; YAML tags, which could construct objects, are refused."""
        try:
            sections = yaml.safe_load(self.config) or {}
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2001-99-99
            raise UserError(f"the checkpoint's configuration is not plain YAML: {error}") from error
        if not isinstance(sections, dict):
            raise UserError("the checkpoint's configuration is not a mapping")
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
        return read_checkpoint(Path(path))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a renamed file is still there after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_by_link(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source`` in one step; a later save replaces ``source`` and leaves it be."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # no hard links on this file system
        shutil.copyfile(source, temporary)
    temporary.replace(target)


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint file, or None. Reads it whole once (0.4 s for 200 MB)."""
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
        return f"it is damaged ({error})"
    return f"its part {broken} is damaged" if broken else None


def _is_plain(part: zipfile.ZipInfo) -> bool:
    """Return whether PyTorch can have written a part like this; a flipped bit may call it compressed, or a folder."""
    return part.compress_type == zipfile.ZIP_STORED and part.compress_size == part.file_size and part.external_attr == 0


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; nothing in it can run.

    Raises:
        UserError: if it is missing, damaged, holds more than plain data, or the environment weakens the reading
    """
    if os.environ.get(_WEAKENING, "0") not in ("", "0"):
        raise UserError(f"{_WEAKENING} is set, which lets a checkpoint run code: unset it")
    if not path.is_file():
        raise UserError(f"no checkpoint file at {path}")
    if problem := damage(path):
        raise UserError(f"{path} cannot be read: {problem}{_intact_beside(path)}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AttributeError, ValueError, TypeError) as error:
        what = "it holds more than plain data" if isinstance(error, pickle.UnpicklingError) else "it is damaged"
        reason = str(error).split("\n")[0]
        raise UserError(f"{path} cannot be read: {what} ({reason}){_intact_beside(path)}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UserError(f"{path} is not a training checkpoint: it has no state_dict")
    return checkpoint


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


def find_checkpoint(given: str | Path, runs_dir: Path, *, prefer: str = "best") -> Path:
    """Resolve what a user may call a checkpoint: a file, a run folder, the folder of several, ``best`` or ``last``.

    Args:
        given: as the user wrote it
        runs_dir: where runs are kept; ``best`` and ``last`` mean those of the latest run in it
        prefer: which checkpoint of a run folder is meant when only the folder is named

    Raises:
        UserError: if there is none, saying where it was looked for
    """
    if str(given) in ("best", "last"):
        return _of_latest_run(runs_dir.expanduser(), str(given))
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        siblings += ["best", "last"] if path.parent == Path() else []
        raise UserError(
            f"no checkpoint at {path}{did_you_mean(path.name, siblings)}\n"
            "allowed: a .ckpt file, a run folder, or best or last for those of the latest run"
        )
    run = path.parent if path.name == "checkpoints" else path
    if (run / "config.yaml").is_file() or (run / "checkpoints").is_dir():
        return _of_run(run, prefer) or _none_in(run)
    return _of_latest_run(path, prefer)


def _of_run(run: Path, name: str) -> Path | None:
    # Without validation no checkpoint is best, and the last one stands for it.
    names = ("last",) if name == "last" else ("best", "last")
    return next((path for n in names if (path := run / "checkpoints" / f"{n}.ckpt").is_file()), None)


def _of_latest_run(where: Path, name: str) -> Path:
    """Look in an experiment's folder, or in one of experiments."""
    configs = [*where.glob("*/config.yaml"), *where.glob("*/*/config.yaml")]
    newest_first = sorted(configs, key=lambda config: (config.stat().st_mtime_ns, config), reverse=True)
    found = (_of_run(config.parent, name) for config in newest_first)
    return next((path for path in found if path), None) or _none_in(where)


def _none_in(where: Path) -> Path:
    raise UserError(f"no checkpoint under {where.absolute()}\ntrain one first: fulgurite fit -c configs/experiment/digits.yaml")
