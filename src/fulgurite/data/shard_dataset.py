"""Read any sample of a set of shards, in LitData's file layout; LitData's own random access reads a whole shard for each."""

from __future__ import annotations

import mmap
import struct
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fulgurite.data.encoded import EncodedDataset
from fulgurite.data.samples import Split
from fulgurite.data.shard_store import ShardStore
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError

_LABEL_BYTES = 8  # LitData writes a number as int64
_OPEN_SHARDS = 64  # per process; each holds a file open


class ShardDataset(EncodedDataset):
    """Read any sample of a split's shards.

    Args:
        store: where the shards lie
        split: sub-folder of the store
        index: LitData's index of the split
        spec: gives the images' channels and size
        options: those of :class:`EncodedDataset`
    """

    def __init__(self, store: ShardStore, split: Split, index: dict[str, Any], spec: DataSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self.store = store
        self.sizes = tuple(int(chunk["chunk_size"]) for chunk in index["chunks"])
        self._files = [(f"{split}/{chunk['filename']}", int(chunk["chunk_bytes"])) for chunk in index["chunks"]]
        self._ends = np.array(list(accumulate(self.sizes)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        """Say which sample of which shard it is."""
        return f"sample {index} of {self._files[self._shard_of(index)][0]} in {self.store.root}"

    def read(self, index: int) -> tuple[bytes, Tensor]:
        """Return the bytes of the image file, and the label.

        Raises:
            IndexError: if the index is not in 0..N-1
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        try:
            return self._read(index)
        except (ValueError, struct.error) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.name(index)}: the shard is damaged ({error})") from error

    def _read(self, index: int) -> tuple[bytes, Tensor]:
        shard = self._shard_of(index)
        name, size = self._files[shard]
        content, offsets = _open_shard(self.store.fetch(name), size)
        place = index - (int(self._ends[shard]) - self.sizes[shard])
        begin, end = int(offsets[place]), int(offsets[place + 1])
        length, _ = struct.unpack_from("<II", content, begin)
        image, label = content[begin + 8 : begin + 8 + length], content[begin + 8 + length : end]
        if len(label) != (self.spec.num_classes if self.spec.multi_label else _LABEL_BYTES):
            raise ValueError(f"a label of {len(label)} bytes")
        if self.spec.multi_label:
            return image, torch.frombuffer(bytearray(label), dtype=torch.uint8)
        return image, torch.tensor(int.from_bytes(label, "little", signed=True))

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))


@lru_cache(_OPEN_SHARDS)
def _open_shard(path: Path, size: int) -> tuple[mmap.mmap, NDArray[np.uint32]]:
    """Map a shard into memory: its bytes and its offsets, one more than it has samples."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if found != size:
        raise UserError(f"{path} has {found:,} bytes, and its index says {size:,}: damaged, or not wholly copied")
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (number,) = struct.unpack_from("<I", content)
    return content, np.frombuffer(content, np.uint32, number + 1, offset=4)
