"""Find image files in folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

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
    require(folder)
    if not folder.is_dir():
        return [folder]
    images = find_images(folder)
    if not images:
        raise UserError(f"no images in {folder} and the folders below it; looked for files ending in {', '.join(IMAGE_ENDINGS)}")
    return list(map(Path, images))


def find_images(folder: Path) -> list[str]:
    """Return what :func:`list_images` does, as text, which is fast for a million; none is no error."""
    images: list[str] = []
    for here, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name) and not leads_back(Path(here), name)]
        # Text, as a Path takes ten times as long to make.
        images += [f"{here}{os.sep}{name}" for name in files if name.lower().endswith(IMAGE_ENDINGS) and not is_hidden(name)]
    return sorted(images, key=lambda path: path.replace(os.sep, "\0"))  # part by part


def list_folders(parent: Path) -> list[Path]:
    """Return the folders right in a folder, by name; hidden ones are skipped, and links that lead back."""
    try:
        found = [entry for entry in parent.iterdir() if entry.is_dir() and not is_hidden(entry.name)]
    except OSError as error:
        _refuse(error)
    # Path's own order ignores case on Windows.
    return sorted((folder for folder in found if not leads_back(parent, folder.name)), key=lambda folder: folder.name)


def require(path: Path) -> None:
    """Refuse a path that does not exist.

    Raises:
        UserError: naming the first part that is missing, and its nearest sibling
    """
    if path.exists():
        return
    first = next(part for part in (*reversed(path.parents), path) if not part.exists())
    siblings = [sibling.name for sibling in first.parent.iterdir()] if first.parent.is_dir() else []
    which = "" if first == path else f": there is no {first}"
    raise UserError(f"{path} does not exist{which}{did_you_mean(first.name, siblings)}")


def leads_back(here: Path, name: str) -> bool:
    """Return whether a folder is a link to what holds a folder that we came through: following it would never end."""
    if not (here / name).is_symlink():
        return False
    target = (here / name).resolve()
    return any(folder.resolve().is_relative_to(target) for folder in (here, *here.parents))


def _refuse(error: OSError) -> NoReturn:
    # os.walk skips a folder that it cannot read, and says nothing.
    raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
