"""Keep decoded images, so that only the first epoch reads image files."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
import simplejpeg
import torch
from torch import Tensor

from fulgurite.console import note
from fulgurite.data.cache_file import Contents, FileWriter, UnusableFileError, locked, read_file, replaced
from fulgurite.data.decode import decode_image
from fulgurite.data.decode_split import SplitDecoder
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from fulgurite.machine import available_memory

CacheKind = Literal["none", "ram", "disk"]

_USABLE = {"memory": 0.8, "disk": 0.95}  # share of what is free; the batches, the network and the run's files need some too


class ImageCache:
    """Give the decoded image of an index: (C, h, w) uint8, channels last in memory, a view that must not be written to.

    Workers share the pixels. A spawned worker opens the file anew; memory it shares through /dev/shm, where it must fit.

    Args:
        contents: the decoded images
        channels: C
        file: where they are, with its key; None if that is no file
    """

    def __init__(self, contents: Contents, channels: int, file: tuple[Path, bytes] | None = None) -> None:
        self.places, self.pixels, self.broken = contents
        self.channels = channels
        self.file = file

    def __call__(self, index: int) -> Tensor:
        """Return an image.

        Raises:
            UserError: if it could not be read when the cache was made
        """
        if index in self.broken:
            raise UserError(self.broken[index])
        start, height, width = self.places[index].tolist()
        end = start + height * width * self.channels
        return self.pixels[start:end].view(height, width, self.channels).permute(2, 0, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is None:
            return ImageCache, (Contents(self.places, self.pixels, self.broken), self.channels)
        return _reopened, (*self.file, self.channels)


def build_cache(
    kind: Literal["ram", "disk"],
    paths: Paths,
    spec: DataSpec,
    *,
    split: str,
    shorter: int | None,
    folder: Path,
    workers: int,
    skip: bool,
    processes: int = 1,
) -> ImageCache:
    """Decode all images of a split, or open the file of an earlier run that did.

    Such a file is made anew if any image file's size or time of change differs; a change that leaves both as they were is
    not seen.

    Args:
        kind: keep them in memory or in a file
        paths: of the N image files
        spec: gives the channels, the size and the background
        split: named in messages
        shorter: pixels; keep whole images, scaled until their shorter side is at most that. None keeps what
            :func:`decode_image` gives
        folder: where the file is kept
        workers: processes that decode; 0 decodes in this one
        skip: remember the images that cannot be read instead of stopping
        processes: of the job on this machine, each of which keeps its own copy in memory; a file they share

    Raises:
        UserError: if an image cannot be read, there is too little room, or the folder cannot be written to
    """
    decoder = SplitDecoder(paths, spec, split, shorter, workers, skip)
    return _in_memory(decoder, processes) if kind == "ram" else _in_file(decoder, folder)


def _in_memory(decoder: SplitDecoder, processes: int) -> ImageCache:
    num_bytes = decoder.measure()
    free = available_memory()
    _check_room(decoder, num_bytes, None if free is None else free // processes, "memory", "cache: disk keeps them in a file")
    _announce(decoder, num_bytes, "memory")
    pixels = torch.empty(num_bytes, dtype=torch.uint8)
    places, broken = decoder.decode(num_bytes, lambda start, part: pixels[start : start + len(part)].copy_(part))
    return ImageCache(Contents(places, pixels, broken), decoder.spec.channels)


def _in_file(decoder: SplitDecoder, folder: Path) -> ImageCache:
    path, key = _identity(decoder, folder)
    try:
        # Without the lock first: the folder of a finished file need not be writable.
        contents = _found(decoder, path, key, why_not=False)
        if contents is None:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(path):
                contents = _found(decoder, path, key, why_not=True) or _written(decoder, path, key)
    except (OSError, NotImplementedError) as error:  # the second one is filelock's, of file systems that have no locks
        raise UserError(
            f"cannot keep the decoded images of the {decoder.split} split in {path}: "
            f"{getattr(error, 'strerror', None) or error}; cache_dir names another folder"
        ) from error
    if contents.broken and not decoder.skip:
        raise UserError(contents.broken[min(contents.broken)])
    return ImageCache(contents, decoder.spec.channels, (path, key))


def _identity(decoder: SplitDecoder, folder: Path) -> tuple[Path, bytes]:
    """Return the file for these paths and settings, and the key of what must be in it."""
    spec = decoder.spec
    size = (spec.height, spec.width) if decoder.shorter is None else decoder.shorter
    # Relative paths mean other files in another folder.
    here = "" if not len(decoder.paths) or decoder.paths[0].is_absolute() else str(Path.cwd())
    settings = repr((here, spec.channels, spec.background, spec.max_pixels, size))
    source = hashlib.sha256(decoder.paths.digest() + settings.encode("utf-8", "surrogateescape"))
    path = folder / f"{decoder.split}-{source.hexdigest()[:16]}.images"
    source.update(repr((torch.__version__, PIL.__version__, simplejpeg.__version__)).encode())
    source.update(_state(decoder.paths))
    return path, source.digest()


def _found(decoder: SplitDecoder, path: Path, key: bytes, *, why_not: bool) -> Contents | None:
    try:
        contents = read_file(path, key)
    except FileNotFoundError:
        return None
    except UnusableFileError as error:
        if why_not:
            note("cache", f"{path} is made anew: {error}")
        return None
    if mended := [index for index in contents.broken if _is_readable(decoder, index)]:
        if why_not:
            note("cache", f"{path} is made anew: {len(mended)} images that could not be read can be now")
        return None
    note("cache", f"{len(decoder.paths):,} decoded images of the {decoder.split} split found in {path}")
    return contents


def _is_readable(decoder: SplitDecoder, index: int) -> bool:
    try:
        decode_image(decoder.paths[index], decoder.spec)
    except UserError:
        return False
    return True


def _written(decoder: SplitDecoder, path: Path, key: bytes) -> Contents:
    num_bytes = decoder.measure()
    _check_room(decoder, num_bytes, shutil.disk_usage(path.parent).free, "disk", "cache_dir names a folder elsewhere")
    _announce(decoder, num_bytes, str(path))
    with replaced(path) as file:
        writer = FileWriter(file, key, len(decoder.paths))
        writer.finish(*decoder.decode(num_bytes, lambda start, part: writer.add(part)))
    return read_file(path, key)


def _announce(decoder: SplitDecoder, num_bytes: int, where: str) -> None:
    note("cache", f"{_readable(num_bytes)} in {where} for {len(decoder.paths):,} images of the {decoder.split} split")


def _check_room(decoder: SplitDecoder, num_bytes: int, free: int | None, where: Literal["memory", "disk"], advice: str) -> None:
    if free is not None and num_bytes > _USABLE[where] * free:
        raise UserError(
            f"the decoded images of the {decoder.split} split take {_readable(num_bytes)}; of the {_readable(free)} of {where} "
            f"that are free {_USABLE[where]:.0%} may be used. {advice}, a smaller size makes them smaller, "
            "cache: none decodes them in each epoch"
        )


def _reopened(path: Path, key: bytes, channels: int) -> ImageCache:
    """Open in a worker what its parent has open."""
    try:
        return ImageCache(read_file(path, key), channels, (path, key))
    except (OSError, UnusableFileError) as error:
        raise UserError(f"cannot open the decoded images in {path} once more: {error}") from error


def _state(paths: Paths) -> bytes:
    """Return each file's size and time of change."""
    states = []
    for path in paths.encoded():
        try:
            state = os.stat(path)  # noqa: PTH116  # a Path for each of a million files takes four times as long
        except OSError:
            states += [-1, -1]  # the build says what is wrong
        else:
            states += [state.st_size, state.st_mtime_ns]
    return np.array(states, dtype=np.int64).tobytes()


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
