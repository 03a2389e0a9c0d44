"""Read an image, whatever its format, truthfully into the shape that a DataSpec asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError

MAX_PIXELS = 178_956_970  # 512 MiB as RGB; PIL, too, refuses from there on

# What the files of the common formats start with: tells a damaged image from a file that never was one.
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")

# EXIF orientation -> what turns the stored pixels upright
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_PIL_LIMIT = Lock()


def decode_image(source: Path | str | bytes, spec: DataSpec) -> Tensor:
    """Read an image file, upright, and fit it to the spec: scaled to cover height x width, then cropped at the centre.

    16-bit grey is scaled to 8 bits, transparency is laid on white, of several frames the first is read.

    Args:
        source: path of the file, or its bytes
        spec: gives the channels and the size in pixels

    Returns:
        (C, H, W) uint8; the very pixels of the file where it has that size already

    Raises:
        UserError: naming the file, if it is missing, empty, damaged, no image, or of more than ``MAX_PIXELS``
    """
    if isinstance(source, bytes):
        name, data = "the image", source
    else:
        name, data = str(source), _read(Path(source))
    return _fit(_decode(data, name), spec, name)


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
        image = _from_array(image)
    return _fit(image, spec, "the image")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _decode(data: bytes, name: str) -> Image.Image:
    """Decode the first frame into memory; ``name`` is for errors."""
    if not data:
        raise UserError(f"{name}: an empty file (0 bytes)")
    try:
        with _without_pil_limit():
            image = Image.open(BytesIO(data))
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise UserError(
                f"{name}: too large: {width} x {height} = {width * height:,} pixels; the limit is {MAX_PIXELS:,} "
                "(MAX_PIXELS in fulgurite.data.decode)"
            )
        image.load()
    except (UserError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        if data.startswith(_SIGNATURES):
            raise UserError(f"{name}: a truncated or damaged image (its header cannot be read)") from error
        raise UserError(f"{name}: not an image, or of a format that PIL does not read") from error
    # Damaged files make PIL's readers raise OSError, SyntaxError, ValueError, RuntimeError, struct.error and more.
    except Exception as error:
        raise UserError(f"{name}: a truncated or damaged image ({error})") from error
    return image


@contextmanager
def _without_pil_limit() -> Iterator[None]:
    """Switch off PIL's own limit, which warns at half of ours and cannot name the file; locked, as it is global."""
    with _PIL_LIMIT:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _fit(image: Image.Image, spec: DataSpec, name: str) -> Tensor:
    """Return (C, H, W) uint8 as the spec says."""
    if 0 in image.size:
        raise UserError(f"{name}: has no pixels (width x height is {image.width} x {image.height})")
    # Not ImageOps.exif_transpose: it also writes the EXIF block anew, which fails on tags that real cameras write.
    turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if turn is not None:
        image = image.transpose(turn)
    image = _convert(image, "L" if spec.channels == 1 else "RGB", name)
    size = (spec.width, spec.height)
    if image.size != size:
        image = ImageOps.fit(image, size, Image.Resampling.BILINEAR)  # PIL's bilinear is antialiased
    pixels = torch.from_numpy(np.array(image)).reshape(spec.height, spec.width, spec.channels)
    return pixels.permute(2, 0, 1).contiguous()


def _convert(image: Image.Image, mode: str, name: str) -> Image.Image:
    """Convert any of PIL's modes to "L" or "RGB"."""
    if image.mode in ("F", "LAB", "La"):
        raise UserError(
            f"{name}: pixels of PIL's mode {image.mode} have no fixed meaning in 8 bits; convert it to grey or RGB first"
        )
    if image.mode.startswith("I"):
        image = _sixteen_to_eight_bits(image, name)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(mode)


def _sixteen_to_eight_bits(image: Image.Image, name: str) -> Image.Image:
    # PIL's own conversion of these modes clips: all from 255 up turns white.
    values = np.asarray(image.convert("I"))
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:  # only mode "I", of 32 bits, can hold such
        raise UserError(f"{name}: grey values from {low} to {high}; allowed: 8 bits (0..255) or 16 bits (0..65535)")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 65535 = 257 * 255; to the nearest


def _from_array(image: Any) -> Image.Image:
    """Make a PIL image of a tensor (C, H, W) or a NumPy array (H, W) or (H, W, C)."""
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.ascontiguousarray(image[..., None] if image.ndim == 2 else image)).movedim(-1, 0)
    if not isinstance(image, Tensor):
        raise UserError(f"cannot read an image from {type(image).__name__}; allowed: a path, bytes, a PIL image, a uint8 array")
    if image.dtype != torch.uint8 or image.ndim != 3 or not 1 <= image.shape[0] <= 4 or 0 in image.shape:
        raise UserError(
            f"an image array is {image.dtype} of (C, H, W) = {tuple(image.shape)}; "
            "allowed: uint8 with 1 to 4 channels, a tensor as (C, H, W), a NumPy array as (H, W) or (H, W, C)"
        )
    return Image.fromarray(image.movedim(0, -1).squeeze(-1).cpu().contiguous().numpy())
