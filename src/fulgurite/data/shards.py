"""Write a data set as shards: a few large files, quick to read from a network disk or an object store."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fulgurite.console import note
from fulgurite.data.base import ImageDataModule
from fulgurite.data.broken import Broken
from fulgurite.data.decode import decode_image
from fulgurite.data.samples import Split
from fulgurite.data.seeding import mix_seed
from fulgurite.data.spec import DataSpec
from fulgurite.errors import MissingExtraError, UserError
from fulgurite.machine import usable_cores

MANIFEST = "fulgurite.json"
INDEX = "index.json"  # LitData's name
FORMAT = 1

_MIB = 1 << 20
_NO_LIMIT = 1 << 40  # what goes into a shard is planned before LitData's writer sees it
_NOTE_EVERY = 10.0  # seconds


class _Shard(NamedTuple):
    """What the index says of a shard."""

    entry: dict[str, Any]
    config: dict[str, Any]
    digest: str


def make_shards(datamodule: ImageDataModule, output: Path, chunk_mb: int = 64, num_workers: int | None = None) -> Path:
    """Write the splits of a data module as shards in LitData's format, for StreamingDataModule.

    The bytes of the image files are kept as they are; each is decoded once, to see that it can be read. Training images are
    written in a random order, always the same, since shards are read one after another; the other splits keep theirs. The bytes
    written do not depend on ``num_workers``.

    Args:
        datamodule: its data sets have ``path(index)`` and ``labels``, (N,) int64 or (N, K) uint8
        output: folder to make, or an empty one; upload it as a whole for use from an object store
        chunk_mb: size of a shard, in MiB
        num_workers: threads that read and write; None takes as many as there are usable cores

    Returns:
        the folder

    Raises:
        MissingExtraError: if LitData is not installed
        UserError: if the output folder is not empty, or the data is not made of image files that can be read
    """
    require_litdata("writing shards")
    if not 1 <= chunk_mb <= 1024:
        raise UserError(f"chunk_mb is {chunk_mb}; allowed: 1 to 1024")
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers is {num_workers}; it must be at least 1, or null to choose by itself")
    _check_empty(output)
    for split in datamodule.splits:
        _check_files(split, datamodule.dataset(split))
    threads = num_workers or usable_cores().number
    splits: dict[str, dict[str, int]] = {}
    digests: list[str] = []
    for split in datamodule.splits:
        dataset: Any = datamodule.dataset(split)
        with ThreadPoolExecutor(threads) as pool:
            readable = _readable(dataset, datamodule.spec, pool)
            shards = _write_split(split, dataset, readable, output / split, chunk_mb, pool)
        sizes = [shard.entry["chunk_bytes"] for shard in shards]
        splits[split] = {"samples": len(readable), "shards": len(shards), "bytes": sum(sizes)}
        digests += [shard.digest for shard in shards]
        note("shards", f"{split}: {len(readable):,} images in {len(shards)} shards of {sum(sizes) / _MIB:,.1f} MiB in all")
    fingerprint = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    manifest = {"format": FORMAT, "spec": datamodule.spec.to_dict(), "splits": splits, "fingerprint": fingerprint}
    _write_json(output / MANIFEST, manifest)  # last: a folder without it is not finished
    return output


def require_litdata(purpose: str) -> None:
    """Say which extra to install if LitData is missing.

    Raises:
        MissingExtraError: naming the extra
    """
    try:
        import litdata  # noqa: F401  # seconds of import that local shards do not need
    except ImportError as error:
        raise MissingExtraError("litdata", "stream", purpose) from error


def _check_empty(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; shards are written to a folder")
    if output.is_dir() and any(output.iterdir()):
        why = "" if (output / MANIFEST).exists() else f", and has no {MANIFEST}: was writing it stopped?"
        raise UserError(f"{output} is not empty{why}\nremove it, or choose another folder")


def _check_files(split: Split, dataset: Any) -> None:
    if not hasattr(dataset, "path"):
        raise UserError(f"the {split} split is not made of image files; shards are made of the files of a folder or a table")
    if len(dataset) == 0:
        raise UserError(f"the {split} split is empty")


def _readable(dataset: Any, spec: DataSpec, pool: ThreadPoolExecutor) -> list[int]:
    """Return the samples whose images can be read; what a shard holds cannot be mended later."""

    def fault(index: int) -> str | None:
        try:
            decode_image(dataset.path(index), spec)
        except UserError as error:
            return str(error)
        return None

    good, skipped = [], getattr(dataset, "skipped", None)
    for index, reason in enumerate(pool.map(fault, range(len(dataset)))):
        if reason is None:
            good.append(index)
        elif skipped is None:
            raise UserError(reason)
        else:
            skipped.add([Broken(index, reason)], len(dataset))
    if skipped is not None:
        skipped.tell()
    return good


def _write_split(
    split: Split, dataset: Any, order: list[int], folder: Path, chunk_mb: int, pool: ThreadPoolExecutor
) -> list[_Shard]:
    """Write the shards of a split and their index."""
    folder.mkdir(parents=True)
    if split == "train":
        generator = torch.Generator().manual_seed(mix_seed(len(order)))
        order = [order[place] for place in torch.randperm(len(order), generator=generator).tolist()]
    sizes = list(pool.map(lambda index: _file_size(dataset.path(index)), order))
    plan = list(_in_groups(order, sizes, chunk_mb * _MIB))
    shards = []
    noted = time.monotonic()
    for number, shard in enumerate(pool.map(partial(_write_shard, dataset, folder), range(len(plan)), plan), 1):
        shards.append(shard)
        if time.monotonic() - noted > _NOTE_EVERY:
            noted = time.monotonic()
            note("shards", f"{split}: {number} of {len(plan)} shards written")
    config = shards[0].config | {"chunk_bytes": chunk_mb * _MIB}
    _write_json(folder / INDEX, {"chunks": [shard.entry for shard in shards], "config": config})
    return shards


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _in_groups(order: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cut the order into groups of at most ``most`` bytes, or of one sample larger than that."""
    begin = 0
    ends = list(accumulate(sizes))
    for place, end in enumerate(ends):
        if place > begin and end - ends[begin] + sizes[begin] > most:
            yield list(order[begin:place])
            begin = place
    yield list(order[begin:])


def _write_shard(dataset: Any, folder: Path, number: int, indices: Sequence[int]) -> _Shard:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=_NO_LIMIT, chunk_index=number)
    for place, index in enumerate(indices):
        path, label = dataset.path(index), dataset.labels[index]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        writer.add_item(place, (data, label.numpy() if label.ndim else int(label)))
    file = Path(writer.write_chunk(on_done=True))
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    entry = {"chunk_bytes": file.stat().st_size, "chunk_size": len(indices), "dim": None, "filename": file.name}
    return _Shard(entry, writer.get_config(), digest)


def _write_json(path: Path, content: Any) -> None:
    # Renamed when whole: a file of this name is never half written.
    partial_file = path.with_name(path.name + ".partial")
    partial_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial_file.replace(path)
