from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from fulgurite.data.decode import decode_image, image_size, scale_window, to_spec
from fulgurite.data.spec import DataSpec
from fulgurite.data.windows import Window
from fulgurite.errors import UserError


def make_spec(channels: int = 3, height: int = 16, width: int = 16) -> DataSpec:
    return DataSpec(("a", "b"), channels, height, width, (0.5,) * channels, (0.5,) * channels)


def noise(height: int = 16, width: int = 16, channels: int = 3) -> Any:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(color: Any, mode: str, channels: int = 3, kind: str = "PNG", **options: Any) -> list[int]:
    """Return what becomes of an image of one colour."""
    image = decode_image(encoded(Image.new(mode, (16, 16), color), kind, **options), make_spec(channels))
    assert image.shape == (channels, 16, 16)
    assert (image == image[:, :1, :1]).all()
    return [int(value) for value in image[:, 0, 0]]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_image_of_the_target_size_is_untouched(tmp_path: Path, channels: int, kind: str) -> None:
    array = noise(12, 20, channels)
    path = tmp_path / f"image.{kind.lower()}"
    path.write_bytes(encoded(Image.fromarray(array), kind))
    image = decode_image(path, make_spec(channels, 12, 20))
    assert image.dtype == torch.uint8
    assert torch.equal(image, torch.from_numpy(array).reshape(12, 20, channels).permute(2, 0, 1))
    assert torch.equal(decode_image(str(path), make_spec(channels, 12, 20)), image)


@pytest.mark.parametrize("size", [(40, 64), (64, 40), (48, 48), (11, 13)])
def test_resize_covers_the_target_and_crops_at_the_centre(size: tuple[int, int]) -> None:
    y, x = np.mgrid[: size[0], : size[1]] / max(size)
    array = np.stack([255 * x, 255 * y, 127 * (x + y)], axis=-1).astype(np.uint8)
    image = decode_image(encoded(Image.fromarray(array)), make_spec(height=16, width=24))
    scale = max(16 / size[0], 24 / size[1])
    resize = v2.Resize([round(size[0] * scale), round(size[1] * scale)], antialias=True)
    expected = v2.CenterCrop([16, 24])(resize(torch.from_numpy(array).permute(2, 0, 1)))
    assert image.shape == (3, 16, 24)
    torch.testing.assert_close(image.int(), expected.int(), atol=5, rtol=0)


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    image = decode_image(encoded(Image.fromarray(stripes)), make_spec(1, 8, 8))
    torch.testing.assert_close(image.float(), torch.full((1, 8, 8), 127.5), atol=6, rtol=0)


def test_long_thin_image_costs_no_more_memory_than_its_target() -> None:
    # Scaled whole, it would be 64 x 1,280,000 pixels.
    assert decode_image(encoded(Image.new("L", (1, 20_000), 9)), make_spec(1, 64, 64)).unique().tolist() == [9]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    image = decode_image(encoded(Image.fromarray(values), kind), make_spec(1))
    assert image.flatten().tolist() == list(range(256))


def test_sixteen_bit_grey_is_rounded_to_the_nearest() -> None:
    values = np.array([[0, 128, 129, 257, 65406, 65407, 65535, 32896]], np.uint16)
    assert decode_image(encoded(Image.fromarray(values)), make_spec(1, 1, 8)).flatten().tolist() == [
        0,
        0,
        1,
        1,
        254,
        255,
        255,
        128,
    ]


def test_big_endian_and_32_bit_tiff_of_16_bit_values() -> None:
    values = np.full((16, 16), 0x80FF)
    assert decode_image(encoded(Image.fromarray(values.astype(">u2")), "TIFF"), make_spec(1)).unique().tolist() == [128]
    assert decode_image(encoded(Image.fromarray(values.astype(np.int32)), "TIFF"), make_spec(1)).unique().tolist() == [128]


def test_values_without_a_known_range_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "depth.tif"
    path.write_bytes(encoded(Image.fromarray(np.full((16, 16), 70_000, np.int32)), "TIFF"))
    with pytest.raises(UserError, match=r"depth\.tif: grey values from 70000 to 70000; allowed: 8 bits .* or 16 bits"):
        decode_image(path, make_spec(1))
    path.write_bytes(encoded(Image.fromarray(np.full((16, 16), 0.5, np.float32)), "TIFF"))
    with pytest.raises(UserError, match=r"depth\.tif: pixels of PIL's mode F have no fixed meaning in 8 bits"):
        decode_image(path, make_spec(1))


def test_transparency_is_laid_on_white() -> None:
    assert pixel((200, 0, 0, 128), "RGBA") == pytest.approx([227, 127, 127], abs=1)
    assert pixel((200, 0, 0, 0), "RGBA") == [255, 255, 255]
    assert pixel((200, 10, 3, 255), "RGBA") == [200, 10, 3]
    assert pixel((0, 128), "LA", channels=1) == pytest.approx([127], abs=1)
    assert pixel(7, "L", transparency=7) == [255, 255, 255]
    assert pixel((1, 2, 3), "RGB", transparency=(1, 2, 3)) == [255, 255, 255]


def palette_image(**options: Any) -> bytes:
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    return encoded(image, **options)


def test_palette_colours_are_looked_up() -> None:
    assert decode_image(palette_image(), make_spec())[:, 0, 0].tolist() == [10, 200, 30]
    assert decode_image(palette_image(kind="GIF"), make_spec())[:, 0, 0].tolist() == [10, 200, 30]
    assert decode_image(palette_image(transparency=1), make_spec())[:, 0, 0].tolist() == [255, 255, 255]
    grey = round(0.299 * 10 + 0.587 * 200 + 0.114 * 30)
    assert decode_image(palette_image(), make_spec(1))[:, 0, 0].tolist() == [grey]


def test_other_colour_modes() -> None:
    assert pixel((255, 0, 0, 0), "CMYK", kind="TIFF") == [0, 255, 255]
    assert pixel((0, 0, 0, 255), "CMYK", kind="JPEG") == [0, 0, 0]
    assert pixel((0, 0, 0, 0), "CMYK", kind="TIFF", channels=1) == [255]
    assert pixel(1, "1") == [255, 255, 255]
    assert pixel(0, "1", channels=1) == [0]
    assert pixel(77, "L") == [77, 77, 77]
    assert pixel((255, 0, 0), "RGB", channels=1) == [76]


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PNG", "WEBP"])
def test_first_of_several_frames(kind: str) -> None:
    red, blue = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "blue")
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(red, kind, save_all=True, append_images=[blue], **options)
    assert Image.open(BytesIO(data)).n_frames == 2  # type: ignore[attr-defined]  # of multi-frame formats only
    assert decode_image(data, make_spec())[:, 0, 0].tolist() == [255, 0, 0]


# What has to be done to the stored pixels, by orientation, in NumPy's terms (EXIF 2.3, section 4.6.4)
UPRIGHT: dict[int, Callable[[Any], Any]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a.swapaxes(0, 1), 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", sorted(UPRIGHT))
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_exif_orientation(orientation: int, kind: str) -> None:
    array, exif = noise(8, 12), Image.Exif()
    exif[0x0112] = orientation
    expected = UPRIGHT[orientation](array)
    image = decode_image(encoded(Image.fromarray(array), kind, exif=exif), make_spec(3, *expected.shape[:2]))
    assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


def test_exif_that_cannot_be_written_again_does_not_hinder_reading() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x0110] = "model"
    data = encoded(Image.new("RGB", (8, 12)), "JPEG", exif=exif).replace(
        b"\x01\x10\x00\x02", b"\x01\x00\x00\x02"
    )  # width is a text
    assert decode_image(data, make_spec(3, 8, 12)).shape == (3, 8, 12)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*no\.png: No such file"):
        decode_image(tmp_path / "no.png", make_spec())
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        decode_image(tmp_path, make_spec())


def test_empty_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"x\.jpg: an empty file \(0 bytes\)"):
        decode_image(path, make_spec())
    path.write_text("<html>404</html>")
    with pytest.raises(UserError, match=r"x\.jpg: not an image"):
        decode_image(path, make_spec())
    with pytest.raises(UserError, match=r"the image: not an image"):
        decode_image(b"some text", make_spec())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_file(tmp_path: Path, kind: str, share: float) -> None:
    data = encoded(Image.fromarray(noise(32, 32)), kind)
    path = tmp_path / "cut.image"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UserError, match=r"cut\.image: a truncated or damaged image"):
        decode_image(path, make_spec())


def test_file_cut_in_its_header_is_still_called_truncated() -> None:
    data = encoded(Image.fromarray(noise()), "JPEG")
    for length in (4, 10, 20, 40):
        with pytest.raises(UserError, match=r"^the image: a truncated or damaged image \((?!.*BytesIO)"):
            decode_image(data[:length], make_spec())


@pytest.mark.parametrize("position", [4, 10, 20, 50, 80])  # in the signature, chunk headers and data
def test_one_changed_byte(tmp_path: Path, position: int) -> None:
    data = bytearray(encoded(Image.fromarray(noise(4, 4))))
    data[position] ^= 0xFF
    path = tmp_path / "bits.png"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"bits\.png: a truncated or damaged image"):
        decode_image(path, make_spec())


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_too_many_pixels_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"big.{kind}"
    Image.new("L", (64, 32)).save(path)
    for refuse in (decode_image, image_size):
        with pytest.raises(UserError, match=rf"^\S*big\.{kind}: too large: 32 x 64 = 2,048 pixels; the limit is 2,047"):
            refuse(path, replace(make_spec(), max_pixels=64 * 32 - 1))
    assert decode_image(path, replace(make_spec(), max_pixels=64 * 32)).shape == (3, 16, 16)


@pytest.mark.parametrize("limit", [1000, 2000])  # PIL would refuse, and warn
@pytest.mark.filterwarnings("error")
def test_pil_neither_warns_nor_refuses_below_our_limit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    data = encoded(Image.new("1", (64, 32)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    assert decode_image(data, make_spec()).shape == (3, 16, 16)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_every_kind_of_input_gives_the_same(tmp_path: Path) -> None:
    array, spec = noise(24, 40), make_spec()
    path = tmp_path / "image.png"
    Image.fromarray(array).save(path)
    expected = decode_image(path, spec)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    for image in (path, str(path), path.read_bytes(), Image.open(path), array, array[:, ::-1].copy()[:, ::-1], tensor):
        assert torch.equal(to_spec(image, spec), expected)


def test_arrays_of_one_two_and_four_channels() -> None:
    grey, spec = noise(channels=1), make_spec(1)
    for image in (grey, grey[..., None], torch.from_numpy(grey)[None]):
        assert np.array_equal(to_spec(image, spec)[0].numpy(), grey)
    assert to_spec(torch.zeros(4, 16, 16, dtype=torch.uint8), spec).unique().tolist() == [255]
    assert to_spec(np.zeros((16, 16, 2), np.uint8), spec).unique().tolist() == [255]


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (torch.zeros(3, 8, 8), r"torch\.float32 of \(C, H, W\) = \(3, 8, 8\); allowed: uint8 with 1 to 4 channels"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"\(2, 3, 8, 8\)"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), r"\(8, 8, 3\)"),
        (np.zeros((8, 0, 3), np.uint8), r"\(3, 8, 0\)"),
        (np.zeros((8, 8), np.uint16), r"torch\.uint16"),
        ([[1, 2]], r"cannot read an image from list; allowed: a path, bytes, a PIL image, a uint8 array"),
        (Image.new("RGB", (0, 3)), r"has no pixels \(width x height is 0 x 3\)"),
    ],
)
def test_arrays_that_are_no_image_are_refused(image: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        to_spec(image, make_spec())


def photo(height: int, width: int) -> Image.Image:
    """Return an image with soft edges, as JPEG is made for."""
    small = np.random.default_rng(1).integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("channels", [1, 3])
def test_large_jpeg_is_decoded_smaller_and_looks_the_same(orientation: int, channels: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image, spec = photo(600, 800), make_spec(channels, 32, 40)
    from_jpeg = decode_image(encoded(image, "JPEG", exif=exif, quality=95), spec).float()
    from_png = decode_image(encoded(image, "PNG", exif=exif), spec).float()
    assert (from_jpeg - from_png).abs().mean() < 2
    assert (from_jpeg - from_png).abs().max() < 16


def test_a_window_of_a_large_jpeg_is_where_it_should_be() -> None:
    data = encoded(photo(600, 800), "JPEG", quality=95)
    for window in (Window(100, 200, 320, 320, 16, 16), Window(37, 411, 163, 215, 32, 32), Window(0, 0, 600, 800, 60, 80)):
        small = decode_image(data, make_spec(), lambda height, width, window=window: window).float()  # type: ignore[misc]
        full = decode_image(data, make_spec(), lambda height, width: Window(0, 0, 600, 800, 600, 800))
        expected = scale_window(full, window).float()
        assert (small - expected).abs().mean() < 9  # a window in another place differs by 60


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"exif": 6}), ("JPEG", {"xmp": 6}), ("PNG", {}), ("JPEG", {})])
def test_the_size_is_that_of_the_upright_image(tmp_path: Path, kind: str, options: dict[str, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = options.get("exif", 1)
    xmp = f'<x:xmpmeta xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{options.get("xmp", 1)}"/>'.encode()
    path = tmp_path / f"x.{kind.lower()}"
    extra: dict[str, Any] = {"exif": exif} if "exif" in options else {"xmp": xmp} if "xmp" in options else {}
    Image.new("RGB", (60, 40)).save(path, kind, **extra)
    expected = (60, 40) if options else (40, 60)
    assert image_size(path, make_spec()) == expected
    seen: list[tuple[int, ...]] = []
    decode_image(path, make_spec(), lambda *size: seen.append(size) or Window(0, 0, 1, 1, 1, 1))  # type: ignore[func-returns-value]
    assert seen == [expected]


def test_sizes_of_what_is_no_image(tmp_path: Path) -> None:
    for name, content, text in (("a", b"", "an empty file"), ("b", b"text", "not an image"), ("c", b"\xff\xd8\xff", "damaged")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=text):
            image_size(tmp_path / name, make_spec())
    with pytest.raises(UserError, match="cannot read"):
        image_size(tmp_path / "none", make_spec())


def test_a_jpeg_that_is_only_out_of_order_is_read() -> None:
    data = encoded(photo(64, 64), "JPEG")
    extra = data[:-2] + b"\x00\x00\x00" + data[-2:]  # libjpeg warns of bytes before the end marker
    assert torch.equal(decode_image(extra, make_spec()), decode_image(data, make_spec()))


@pytest.mark.parametrize("marker", [0xE2, 0xFE, 0xED])  # a colour profile, a comment, Photoshop's block
def test_exif_behind_a_long_block_is_found(marker: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo(64, 96), "JPEG", exif=exif)
    block = bytes([0xFF, marker]) + (3002).to_bytes(2, "big") + bytes(3000)
    assert decode_image(data[:2] + block + data[2:], make_spec(3, 48, 32)).equal(decode_image(data, make_spec(3, 48, 32)))


@pytest.mark.parametrize("kind", [1, 2, 7, 11])  # bytes, text, undefined, float, where a short belongs
def test_an_orientation_of_another_type_is_none(kind: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo(48, 64), "JPEG", exif=exif).replace(b"\x01\x12\x00\x03", bytes([1, 0x12, 0, kind]))
    assert torch.equal(decode_image(data, make_spec()), decode_image(encoded(photo(48, 64), "JPEG"), make_spec()))


@pytest.mark.parametrize("value", [0, 9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_orientation_that_does_not_exist_is_none(value: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    image = photo(48, 64)
    odd, plain = (decode_image(encoded(image, kind, **options), make_spec()) for options in ({"exif": exif}, {}))
    assert torch.equal(odd, plain)


@pytest.mark.parametrize("orientation", [1, 5, 8])
def test_the_size_of_a_turned_tiff(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (60, 40)).save(tmp_path / "x.tif", exif=exif)
    seen: list[tuple[int, ...]] = []
    decode_image(tmp_path / "x.tif", make_spec(), lambda *size: seen.append(size) or Window(0, 0, 1, 1, 1, 1))  # type: ignore[func-returns-value]
    assert seen == [image_size(tmp_path / "x.tif", make_spec())]


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_side_that_does_not_divide_is_not_shifted(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image, spec = photo(929, 1201), make_spec(3, 48, 48)
    from_jpeg = decode_image(encoded(image, "JPEG", exif=exif, quality=95), spec).float()
    from_png = decode_image(encoded(image, "PNG", exif=exif), spec).float()
    assert (from_jpeg - from_png).abs().mean() < 2
