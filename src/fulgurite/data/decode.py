"""Read an image, whatever its format, truthfully into the shape that a DataSpec asks for.

What PIL makes of a file is the truth. Ordinary JPEGs, most of what people have, take a shorter way to the same pixels: their
bytes become a tensor, and a large one is decoded at half, a quarter or an eighth of its size where the window allows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from simplejpeg import decode_jpeg, decode_jpeg_header
from torch import Tensor
from torch.nn import functional as F

from fulgurite.data.colours import eight_bits, from_array
from fulgurite.data.spec import DataSpec
from fulgurite.data.windows import Choice, Window, centre
from fulgurite.errors import UserError

# What the files of the common formats start with: tells a damaged image from a file that never was one.
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")
_JPEG = b"\xff\xd8\xff"
_LONGEST_SIGNATURE = max(map(len, _SIGNATURES))

_TURNED = range(5, 9)  # the EXIF orientations that swap height and width

_PIL_LIMIT = Lock()


def decode_image(source: Path | str | bytes, spec: DataSpec, choose: Choice | None = None, *, name: str = "the image") -> Tensor:
    """Read an image file, upright, and scale a window of it; unless told otherwise the centre that covers height x width.

    16-bit grey is scaled to 8 bits, transparency is laid on the spec's background, of several frames the first is read.

    Args:
        source: path of the file, or its bytes
        spec: gives the channels, the size in pixels, the background, and the most pixels that are decoded
        choose: chooses the window from the upright image's height and width
        name: of an image that is given by its bytes, for errors; a path is its own name

    Returns:
        (C, H, W) uint8, channels last in memory; the very pixels of the file where nothing is scaled

    Raises:
        UserError: naming the file, if it is missing, empty, damaged, no image, or of too many pixels
    """
    if isinstance(source, bytes):
        data = source
    else:
        name, data = str(source), _read(Path(source))
    choose = choose or _centre_of(spec)
    if data.startswith(_JPEG):
        return _from_jpeg(data, spec, choose, name)
    return _from_pil(_open(data, name, spec), spec, choose, name)


def to_spec(image: Path | str | bytes | Image.Image | Tensor | NDArray[np.uint8], spec: DataSpec) -> Tensor:
    """Fit an image from anywhere to the spec, exactly as :func:`decode_image` does.

    Args:
        image: a path, a file's bytes, a PIL image, a tensor (C, H, W) uint8, or a NumPy array (H, W) or (H, W, C) uint8;
            1 channel is grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
        spec: gives the channels and the size in pixels

    Returns:
        (C, H, W) uint8

    Raises:
        UserError: if the image cannot be read, or is none of these
    """
    if isinstance(image, Path | str | bytes):
        return decode_image(image, spec)
    if not isinstance(image, Image.Image):
        image = from_array(image)
    return _from_pil(image, spec, _centre_of(spec), "the image")


def image_size(path: Path, spec: DataSpec) -> tuple[int, int]:
    """Return the upright height and width in pixels; reads no more than the file's header.

    Raises:
        UserError: as :func:`decode_image`, but for damage behind the header
    """
    try:
        with path.open("rb") as file:
            start = file.read(_LONGEST_SIGNATURE)
            if not start:
                raise UserError(f"{path}: an empty file (0 bytes)")
            file.seek(0)
            with _readable(str(path), start), _without_pil_limit():
                image = Image.open(file)
                size = _upright_size(image)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    _check_size(*size, spec, str(path))
    return size


def scale_window(pixels: Tensor, window: Window) -> Tensor:
    """Cut a window out of an image and scale it, antialiased where it shrinks.

    Args:
        pixels: (C, h, w) uint8
        window: within it

    Returns:
        (C, H, W) uint8, a copy with channels last in memory, as decoders give them and PyTorch scales them fastest
    """
    top, left, height, width, *size = window
    part = pixels[None, :, top : top + height, left : left + width].clone(memory_format=torch.channels_last)
    return part[0] if [height, width] == size else F.interpolate(part, size, mode="bilinear", antialias=True)[0]


def _centre_of(spec: DataSpec) -> Choice:
    return partial(centre, out_height=spec.height, out_width=spec.width)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _check_size(height: int, width: int, spec: DataSpec, name: str) -> None:
    if width * height > spec.max_pixels:
        raise UserError(
            f"{name}: too large: {height} x {width} = {width * height:,} pixels; the limit is {spec.max_pixels:,} (max_pixels)"
        )


def _open(data: bytes, name: str, spec: DataSpec) -> Image.Image:
    """Read the header; ``name`` is for errors."""
    if not data:
        raise UserError(f"{name}: an empty file (0 bytes)")
    with _readable(name, data), _without_pil_limit():
        image = Image.open(BytesIO(data))
    _check_size(image.height, image.width, spec, name)
    return image


@contextmanager
def _readable(name: str, data: bytes) -> Iterator[None]:
    """Name the file in what PIL raises; ``data`` is how it starts."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        if data.startswith(_SIGNATURES):
            raise UserError(f"{name}: a truncated or damaged image (its header cannot be read)") from error
        raise UserError(f"{name}: not an image, or of a format that PIL does not read") from error
    # Damaged files make PIL's readers raise OSError, SyntaxError, ValueError, RuntimeError, struct.error and more.
    except Exception as error:
        raise UserError(f"{name}: a truncated or damaged image ({error})") from error


@contextmanager
def _without_pil_limit() -> Iterator[None]:
    """Switch off PIL's own limit, which warns at half of ours and cannot name the file; locked, as it is global."""
    with _PIL_LIMIT:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _orientation(image: Image.Image) -> int:
    """Return 1 to 8; 1 where a file says nothing or something odd."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # PIL's reader raises many kinds for a damaged block, behind which the pixels may be whole
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Return height and width, of an image that is not loaded yet."""
    # PIL gives the size of a TIFF as it will be, and turns it when it loads it.
    is_turned = image.format != "TIFF" and _orientation(image) in _TURNED
    return image.size if is_turned else (image.height, image.width)


def _from_jpeg(data: bytes, spec: DataSpec, choose: Choice, name: str) -> Tensor:
    """Return (C, H, W) uint8; what is out of the ordinary is left to PIL."""
    try:
        height, width, colours, _ = decode_jpeg_header(data)
    except ValueError:
        colours = "unreadable"
    if colours not in ("Gray", "YCbCr", "RGB"):
        return _from_pil(_open(data, name, spec), spec, choose, name)
    _check_size(height, width, spec, name)
    tagged = b"Exif\0" in data or b"tiff:Orientation" in data  # the second is XMP; 5 us for 100 kB
    orientation = _orientation(_open(data, name, spec)) if tagged else 1
    window = choose(width, height) if orientation in _TURNED else choose(height, width)
    factor = window.reduction()
    while factor > 1 and orientation != 1 and (height % factor or width % factor):
        factor //= 2  # the last row and column of the smaller image are padded, and would be turned to where the first are
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor)} if factor > 1 else {}
    try:
        array = decode_jpeg(data, "GRAY" if spec.channels == 1 else "RGB", **least)
    except ValueError:  # damaged, or only out of order in a place that does not matter
        return _from_pil(_open(data, name, spec), spec, lambda *size: window, name)
    pixels = _turned(torch.from_numpy(array), orientation).permute(2, 0, 1)
    return scale_window(pixels, window.divided(factor))


def _turned(pixels: Tensor, orientation: int) -> Tensor:
    """Return a view of (H, W, C) that stands upright."""
    if orientation in _TURNED:
        pixels = pixels.transpose(0, 1)
    flipped = [axis for axis, orientations in ((0, (3, 4, 7, 8)), (1, (2, 3, 6, 7))) if orientation in orientations]
    return pixels.flip(flipped) if flipped else pixels


def _from_pil(image: Image.Image, spec: DataSpec, choose: Choice, name: str) -> Tensor:
    """Return (C, H, W) uint8 as the spec says."""
    if 0 in image.size:
        raise UserError(f"{name}: has no pixels (width x height is {image.width} x {image.height})")
    with _readable(name, b""):
        image.load()
        orientation = _orientation(image)
    image = eight_bits(image, spec, name)
    pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, spec.channels)
    # Not PIL's exif_transpose: it also writes the EXIF block anew, which fails on tags that real cameras write.
    pixels = _turned(pixels, orientation).permute(2, 0, 1)
    return scale_window(pixels, choose(*pixels.shape[1:]))
