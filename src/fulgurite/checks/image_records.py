"""Read and decode every image of a split once, and keep a few hundred bytes of what was seen."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fulgurite.console import is_rank_zero
from fulgurite.data.base import ArrayDataset
from fulgurite.data.broken import Broken
from fulgurite.data.decode import decode_image, scale_window
from fulgurite.data.encoded import EncodedDataset
from fulgurite.data.labelled import LabelledDataModule
from fulgurite.data.samples import Split
from fulgurite.data.spec import DataSpec
from fulgurite.data.windows import centre, whole
from fulgurite.errors import UserError

THUMBNAIL = (16, 18)  # height and width, twice those of the 8 x 9 grid that a difference hash compares
_CHUNK = 16  # images that a worker handles at once


def record_type(spec: DataSpec) -> np.dtype[Any]:
    """Return the type of what is kept of an image."""
    return np.dtype(
        [
            ("readable", "?"),
            ("label", "u1", (spec.num_classes,)) if spec.multi_label else ("label", "i8"),
            ("file", "u8"),  # hash of the file's bytes
            ("pixels", "u8"),  # hash of the upright, decoded image at its own size
            ("height", "i4"),  # upright
            ("width", "i4"),
            ("format", "U8"),  # PIL's name; empty for what is no file
            ("mode", "U8"),  # PIL's name of how the file holds colours
            ("transparent", "?"),
            ("turned", "?"),  # by its EXIF orientation
            ("animated", "?"),
            ("sum", "i8", (spec.channels,)),  # of the pixels that evaluation sees
            ("squares", "i8", (spec.channels,)),  # the sum of their squares
            ("thumbnail", "u1", (spec.channels, *THUMBNAIL)),
        ]
    )


@dataclass(frozen=True)
class SplitRecords:
    """What was seen of a split of N images.

    Args:
        split: its name
        dataset: where the images are from
        spec: of the data
        records: (N,) of :func:`record_type`
        labels: (N,) int64, or (N, K) uint8 where an image has any number of labels
        groups: (N,) int64, what must not be on two sides of a split, if that is known
        broken: why images could not be read, by index
    """

    split: Split
    dataset: Any
    spec: DataSpec
    records: NDArray[Any]
    labels: NDArray[Any]
    groups: NDArray[np.int64] | None = None
    broken: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    def name(self, index: int) -> str:
        """Return an image's path, or which one it is."""
        return _name(self.dataset, index, self.split)

    def seen(self, index: int) -> Tensor:
        """Return an image (C, H, W) uint8 as evaluation sees it.

        Raises:
            UserError: if it cannot be read
        """
        encoded, _ = _sample(self.dataset, index)
        if isinstance(encoded, Tensor):
            tall, wide = encoded.shape[1:]
            return scale_window(encoded, centre(tall, wide, out_height=self.spec.height, out_width=self.spec.width))
        return decode_image(encoded, self.spec, name=self.name(index))

    def item(self, index: int) -> dict[str, Any]:
        """Return what a finding says of an image; its label is a name, or a list of names where it has any number."""
        names, label = self.spec.class_names, self.labels[index]
        said: Any
        if label.ndim:
            said = [names[each] for each in np.flatnonzero(label)]
        else:
            said = names[label] if 0 <= label < len(names) else f"label {label}"
        return {"split": self.split, "path": self.name(index), "label": said}


def read_split(datamodule: Any, split: Split, *, workers: int, progress: bool) -> SplitRecords:
    """Decode all images of a split, in worker processes unless ``workers`` is 0."""
    dataset, spec = datamodule.dataset(split), datamodule.spec
    count = len(dataset)
    chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    loader: Any = DataLoader(
        chunks,  # type: ignore[arg-type]  # a list is as good as a Dataset
        batch_size=None,
        collate_fn=partial(_records, dataset=dataset, spec=spec, split=split),  # called in the workers
        num_workers=min(workers, len(chunks)),
        generator=torch.Generator(),
    )
    shown = progress and sys.stdout.isatty() and is_rank_zero()
    records, broken = np.zeros(count, record_type(spec)), dict[int, str]()
    for start, found, reasons in track(loader, f"{split}: decoding", len(chunks), transient=True, disable=not shown):
        records[start : start + len(found)] = found
        broken |= reasons
    # Where labels are listed, those of broken images are known too.
    labels = dataset.labels.numpy() if hasattr(dataset, "labels") else records["label"]
    groups = datamodule.samples(split).groups if isinstance(datamodule, LabelledDataModule) else None
    return SplitRecords(split, dataset, spec, records, labels, None if groups is None else groups.numpy(), broken)


class _Header(NamedTuple):
    format: str = ""
    mode: str = ""
    transparent: bool = False
    turned: bool = False
    animated: bool = False


def _records(chunk: range, *, dataset: Any, spec: DataSpec, split: Split) -> tuple[int, NDArray[Any], dict[int, str]]:
    """Return where the chunk starts, what was seen of its images, and why some cannot be read."""
    records, broken = np.zeros(len(chunk), record_type(spec)), dict[int, str]()
    for place, index in enumerate(chunk):
        try:
            _fill(records[place], dataset, index, spec, split)
        except UserError as error:
            broken[index] = str(error)
    return chunk.start, records, broken


def _fill(record: Any, dataset: Any, index: int, spec: DataSpec, split: Split) -> None:
    name = _name(dataset, index, split)
    encoded, label = _sample(dataset, index)
    record["label"] = label.numpy()
    if isinstance(encoded, Path):
        encoded = _bytes(encoded)
    if isinstance(encoded, bytes):
        pixels = decode_image(encoded, spec, whole, name=name)
        record["file"] = _hash(encoded)
        for key, value in _header(encoded)._asdict().items():
            record[key] = value
    else:
        pixels = encoded
    # Channels last in memory, as decoders give them: scaling is three times as fast so, and a hash needs one fixed order.
    pixels = pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    record["pixels"] = _hash(pixels.permute(1, 2, 0).numpy().data, pixels.shape)
    record["height"], record["width"] = height, width = pixels.shape[1:]
    record["thumbnail"] = F.interpolate(pixels[None], THUMBNAIL, mode="bilinear", antialias=True)[0].numpy()
    seen = scale_window(pixels, centre(height, width, out_height=spec.height, out_width=spec.width)).long().flatten(1)
    record["sum"], record["squares"] = seen.sum(1).numpy(), (seen * seen).sum(1).numpy()
    record["readable"] = True


def _sample(dataset: Any, index: int) -> tuple[Path | bytes | Tensor, Tensor]:
    """Return an image as it is, before any augmentation where the data set is one of ours, and its label."""
    if isinstance(dataset, EncodedDataset):
        return dataset.read(index)
    if isinstance(dataset, ArrayDataset):
        return dataset.images[index], dataset.labels[index]
    sample = dataset[index]
    if isinstance(sample, Broken):
        raise UserError(sample.reason)
    return sample[0], torch.as_tensor(sample[1])


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _name(dataset: Any, index: int, split: Split) -> str:
    if hasattr(dataset, "path"):
        return str(dataset.path(index))
    return str(dataset.name(index)) if isinstance(dataset, EncodedDataset) else f"{split} image {index}"


def _hash(data: bytes | memoryview, shape: Sequence[int] = ()) -> int:
    digest = hashlib.sha1(data, usedforsecurity=False)  # twice as fast as blake2b
    digest.update(repr(tuple(shape)).encode())
    return int.from_bytes(digest.digest()[:8])


def _header(data: bytes) -> _Header:
    """Return how the file of an image that can be decoded holds it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # decoding has its own limit
            image = Image.open(BytesIO(data))
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
        # MPO: a photograph with a preview behind it, as telephones write them.
        animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
        return _Header(image.format or "", image.mode, image.has_transparency_data, turned, animated)
    except Exception:  # what PIL's readers raise is of any kind, such as above its own limit on pixels; the pixels are known
        return _Header()
