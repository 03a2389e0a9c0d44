"""The file that keeps decoded images: replaced whole or not at all, mapped into memory, never trusted unseen.

A header of 64 bytes (magic, key, and the length of each part in bytes), then places (N, 3) int64, the pixels, and why images
could not be read, as JSON.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from fulgurite.console import note

_MAGIC = b"fulgur01"
_HEADER = struct.Struct("<8s32s3Q")
_BYTES_PER_IMAGE = 24  # of places


class UnusableFileError(Exception):
    """The text says why."""


class Contents(NamedTuple):
    """Decoded images.

    ``places`` is (N, 3) int64: where an image starts in the pixels, its height and its width, 0 if it could not be read.
    ``pixels`` is flat, uint8, each image in the order (h, w, C). ``broken`` says why images could not be read.
    """

    places: Tensor
    pixels: Tensor
    broken: dict[int, str]


def read_file(path: Path, key: bytes) -> Contents:
    """Map a file into memory, which cannot be written to: PyTorch does not know, and crashes if it is tried.

    Args:
        path: of the file
        key: 32 bytes, of what should be in it

    Raises:
        UnusableFileError: if the file is damaged, or of something else
        OSError: if it cannot be read
    """
    with path.open("rb") as file:
        header, num_bytes = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise UnusableFileError("it is damaged")
    _, found, *lengths = _HEADER.unpack(header)
    if found != key:
        raise UnusableFileError("the image files, or the libraries that decode them, have changed since")
    if num_bytes != _HEADER.size + sum(lengths):
        raise UnusableFileError("it is damaged")
    with warnings.catch_warnings():
        # Writable memory would have to be private, and Linux refuses to map more of that than there is RAM.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        whole = torch.from_numpy(np.memmap(path, mode="r"))
    places, pixels, broken = whole[_HEADER.size :].split(lengths)
    try:
        table = places.view(torch.int64).view(-1, 3)
        reasons = {int(index): str(reason) for index, reason in json.loads(broken.numpy().tobytes())}
    except (ValueError, TypeError, RuntimeError) as error:
        raise UnusableFileError("it is damaged") from error
    if (table < 0).any() or (table > len(pixels)).any():
        raise UnusableFileError("it is damaged")
    return Contents(table, pixels, reasons)


class FileWriter:
    """Write the pixels as they come, and what belongs to them at the end.

    Args:
        file: open for writing
        key: 32 bytes, of what is in the file
        num_images: N
    """

    def __init__(self, file: BinaryIO, key: bytes, num_images: int) -> None:
        self.file = file
        self.key = key
        self._start = _HEADER.size + num_images * _BYTES_PER_IMAGE
        file.seek(self._start)

    def add(self, pixels: Tensor) -> None:
        """Write the next pixels, of any number of images."""
        self.file.write(pixels.numpy().data)

    def finish(self, places: Tensor, broken: Mapping[int, str]) -> None:
        """Write where the images are and why some are not."""
        num_pixels = self.file.tell() - self._start
        reasons = json.dumps(list(broken.items())).encode()  # the keys of a JSON object would come back as strings
        self.file.write(reasons)
        self.file.seek(0)
        self.file.write(_HEADER.pack(_MAGIC, self.key, self._start - _HEADER.size, num_pixels, len(reasons)))
        self.file.write(places.numpy().data)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when all went well, and is removed otherwise.

    One process at a time: what a killed one left behind has the same name, and is written over.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process that makes this file; the system unlocks it for a process that is killed."""
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        note("cache", f"waiting for the process that makes {path}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
