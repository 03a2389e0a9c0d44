"""Find image files in folders, and read them by index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulgurite.data.decode import decode_image
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError, did_you_mean

IMAGE_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

# What operating systems and storage boxes put among the files, besides names with a leading dot.
_SYSTEM_NAMES = {"$RECYCLE.BIN", "@eaDir", "System Volume Information", "Thumbs.db", "__MACOSX", "desktop.ini", "lost+found"}


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name belongs to the system, not to the data."""
    return name.startswith(".") or name in _SYSTEM_NAMES


def list_images(folder: Path) -> list[Path]:
    """Return the images in a folder and all folders below it, in an order that no platform changes.

    Endings count in any case. Hidden and system files are skipped; links to folders are followed.

    Args:
        folder: to look in; an image file stands for itself, whatever its ending

    Returns:
        paths that start with ``folder`` as it was given

    Raises:
        UserError: if the folder does not exist, cannot be read, or holds no image
    """
    if not folder.exists():
        raise UserError(_missing(folder))
    if not folder.is_dir():
        return [folder]
    images: list[Path] = []
    for here, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name) and not _leads_back(Path(here), name)]
        images += [Path(here, name) for name in files if name.lower().endswith(IMAGE_ENDINGS) and not is_hidden(name)]
    if not images:
        raise UserError(f"no images in {folder} and the folders below it; looked for files ending in {', '.join(IMAGE_ENDINGS)}")
    return sorted(images, key=lambda path: path.parts)  # Path's own order ignores case on Windows


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Read image files: (image (C, H, W) uint8, index).

    Args:
        paths: of the files
        spec: gives the images' channels and size
    """

    def __init__(self, paths: Sequence[Path | str], spec: DataSpec) -> None:
        # Two tensors, not a list: counting references to a million strings would copy each into every worker.
        names = [os.fsencode(path) for path in paths]
        self._names = torch.from_numpy(np.frombuffer(b"".join(names), dtype=np.uint8).copy())
        self._starts = torch.tensor([0, *accumulate(map(len, names))])
        self.spec = spec

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decode_image(self.path(index), self.spec), index

    def path(self, index: int) -> Path:
        """Return the path of a sample.

        Raises:
            IndexError: if the index is not in 0..N-1
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} images")
        start, end = self._starts[index : index + 2].tolist()
        return Path(os.fsdecode(self._names[start:end].numpy().tobytes()))


def _missing(path: Path) -> str:
    """Name the first part of a path that does not exist, and its nearest sibling."""
    first = next(part for part in (*reversed(path.parents), path) if not part.exists())
    siblings = [sibling.name for sibling in first.parent.iterdir()] if first.parent.is_dir() else []
    which = "" if first == path else f": there is no {first}"
    return f"{path} does not exist{which}{did_you_mean(first.name, siblings)}"


def _leads_back(here: Path, name: str) -> bool:
    """Return whether a folder is a link to what holds a folder that we came through: following it would never end."""
    if not (here / name).is_symlink():
        return False
    target = (here / name).resolve()
    return any(folder.resolve().is_relative_to(target) for folder in (here, *here.parents))


def _refuse(error: OSError) -> None:
    # os.walk skips a folder that it cannot read, and says nothing.
    raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
