"""Train on shards that lie on a disk or in an object store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fulgurite.console import note
from fulgurite.data.augmented import AugmentedDataModule
from fulgurite.data.loader import ResumableLoader
from fulgurite.data.samples import Split
from fulgurite.data.shard_dataset import ShardDataset
from fulgurite.data.shard_order import ShardLayout
from fulgurite.data.shard_store import ShardStore
from fulgurite.data.shards import FORMAT, INDEX, MANIFEST
from fulgurite.data.spec import DataSpec, height_and_width
from fulgurite.errors import UserError

# What make_shards writes. LitData's formats: the image file's bytes, then the label as int64 or as a row of uint8.
_SINGLE_LABEL, _MULTI_LABEL = ["bytes", "int"], ["bytes", "no_header_numpy:4"]


class StreamingDataModule(AugmentedDataModule):
    """Serve shards that ``fulgurite.data.shards.make_shards`` wrote, in LitData's format.

    In a configuration::

        data:
          class_path: fulgurite.data.StreamingDataModule
          init_args:
            root: s3://bucket/flowers
            size: 224
            batch_size: 128

    Each sample comes once an epoch, with any number of workers and processes, and a run resumes in the middle of an epoch.
    Each process reads shard after shard, mixing the samples of ``shuffle_window`` of them at a time.

    Args:
        root: a local folder, read in place; or s3://, gs://, azure:// or r2:// and a path; or local: and a folder, whose
            shards are copied to the cache, which helps if it is on a slow network disk
        cache_dir: where the shards of a remote root are kept for the next epoch and the next run; None is
            ~/.cache/fulgurite/shards. Nothing is ever deleted there: the part of one node must fit
        size: of the images the network sees, one number, or height and width; None is what the shards say
        channels: 1 (grey) or 3 (RGB); None is what the shards say
        mean: per channel, of images scaled to 0..1; None is what the shards say
        std: per channel, of images scaled to 0..1; None is what the shards say
        shuffle_window: about so many shards are read at a time in training
        storage_options: for LitData's client of the object store, such as endpoint_url
        options: those of :class:`fulgurite.data.augmented.AugmentedDataModule`; ``balanced`` is not among them

    Raises:
        UserError: if a number makes no sense
    """

    def __init__(
        self,
        *,
        root: str,
        cache_dir: Path | None = None,
        size: int | list[int] | None = None,
        channels: Literal[1, 3] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        shuffle_window: int = 16,
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.balanced:
            raise UserError("balanced is true; shards are read one after another, so class_weights of the task have to do it")
        if shuffle_window < 1:
            raise UserError(f"shuffle_window is {shuffle_window}; it must be at least 1")
        height, width = (None, None) if size is None else height_and_width(size)
        changes = {"height": height, "width": width, "channels": channels, "mean": mean, "std": std}
        self.shuffle_window = shuffle_window
        self.store = ShardStore(str(root), cache_dir, storage_options)
        self._changes: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}

    @cached_property
    def spec(self) -> DataSpec:
        """What the shards' manifest says, with the changes that were asked for."""
        return replace(DataSpec.from_dict(self._manifest["spec"]), **self._changes)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that there are."""
        return tuple(self._manifest["splits"])

    def fingerprint(self) -> str:
        """Return a short hash of every byte of the shards and of the spec."""
        return hashlib.sha256(repr((self.spec, self._manifest["fingerprint"])).encode()).hexdigest()[:16]

    def make_dataset(self, split: Split) -> ShardDataset:
        """Make the data set of a split; its shards are fetched when they are read.

        Raises:
            UserError: if there is no such split, or its index does not fit the manifest
        """
        augment = self.augmentation if split == "train" else None
        return ShardDataset(self.store, split, self._index(split), self.spec, augmentation=augment, skipped=self.skipped(split))

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.store.read(MANIFEST))
        if manifest.get("format") != FORMAT:
            raise UserError(f"{self.store.root}/{MANIFEST} is of format {manifest.get('format')}; this version reads {FORMAT}")
        self.store.version = manifest["fingerprint"]
        return manifest

    def _index(self, split: Split) -> dict[str, Any]:
        splits = self._manifest["splits"]
        if split not in splits:
            raise UserError(f"{self.store.root} has no split '{split}'; it has {', '.join(splits)}")
        if split not in self._indices:
            index: dict[str, Any] = json.loads(self.store.read(f"{split}/{INDEX}"))
            _check_index(index, splits[split], self.spec.multi_label, f"{self.store.root}/{split}/{INDEX}")
            self._indices[split] = index
        return self._indices[split]

    @cached_property
    def _indices(self) -> dict[Split, dict[str, Any]]:
        return {}

    def _loader(self, split: Split) -> ResumableLoader:
        loader = super()._loader(split)
        sizes = self.dataset(split).sizes
        loader.order.layout = ShardLayout(sizes, self.shuffle_window, self.trainer.num_nodes if self.trainer else 1)
        self._announce(split)
        return loader

    def _announce(self, split: Split) -> None:
        store, sizes = self.store, [int(chunk["chunk_bytes"]) for chunk in self._index(split)["chunks"]]
        if not store.is_remote:
            return
        nodes = self.trainer.num_nodes if self.trainer else 1
        here = sum(path.stat().st_size for path in (store.folder / split).glob("*.bin"))
        store.check_space((sum(sizes) - here) // nodes)
        note("shards", f"{split}: {len(sizes)} shards, {sum(sizes) / 1e9:.1f} GB, copied to {store.folder} as they are needed")


def _check_index(index: dict[str, Any], expected: dict[str, int], multi_label: bool, name: str) -> None:
    """Refuse an index that make_shards did not write."""
    config, form = index["config"], _MULTI_LABEL if multi_label else _SINGLE_LABEL
    if config["data_format"] != form or config.get("compression") or config.get("encryption"):
        raise UserError(f"{name}: samples of {config['data_format']}; allowed: {form}, not compressed, not encrypted")
    number = sum(chunk["chunk_size"] for chunk in index["chunks"])
    if number != expected["samples"]:
        raise UserError(f"{name} counts {number} samples, and {MANIFEST} {expected['samples']}: parts of two different folders?")
