"""A DataLoader whose batches are a pure function of (seed, epoch, position), so that a run can resume exactly.

No random state is stored. Order comes from (seed, epoch), the augmentation of a sample from (seed, epoch, index), what
the network draws on a batch (dropout, mixup) from (seed, rank, epoch, batch). Any number of workers gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler, default_collate

from fulgurite.data.broken import Incomplete, Skipped
from fulgurite.data.seeding import mix_seed, own_generators, seed_generators, seed_one
from fulgurite.data.shard_order import ShardLayout
from fulgurite.data.worker_signals import outlive_signals
from fulgurite.errors import UserError

# One stream of seeds per use: shuffling must not share its draws with augmentation.
_ORDER, _SAMPLE, _BATCH = 1, 2, 3

# (index, epoch, repeat, item): workers live over several epochs and must be told which one this is; the repeat counts how often
# the sample has come in it before; the item, unless it is None, is what the data set's list has on this sample, so that no
# worker looks into a list that may be long.
Key = tuple[int, int, int, Any]


class EpochSampler(SequentialSampler):
    """Give this process its ``(index, epoch, repeat, item)`` keys in an order that depends on (seed, epoch) alone.

    A SequentialSampler in name, so that Lightning's ``overfit_batches`` does not rebuild the loader around another one.

    Args:
        length: number of samples of the whole data set
        shuffle: draw a new order each epoch
        seed: of the job
        rank: of this process
        world_size: number of processes
        equal_shares: leave out the last ``length % world_size`` samples, so that all processes take as many steps
        weights: (N,) how often each sample comes, as a share; an epoch then draws N samples, some of them more than once
    """

    def __init__(
        self,
        length: int,
        *,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
        equal_shares: bool,
        weights: Tensor | None = None,
    ) -> None:
        super().__init__(range(length))
        self.weights = weights
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.usable = length - length % world_size if equal_shares else length
        self.layout: ShardLayout | None = None  # set where the samples lie in shards, which are best read one after another
        self.item: Callable[[int], Any] | None = None
        self.epoch = 0
        self.skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; Lightning calls this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self.usable, self.world_size))

    def __iter__(self) -> Iterator[Key]:  # type: ignore[override]  # keys, where the base class gives indices
        epoch = self.epoch
        share = self._share(epoch)
        repeats = _repeats(share) if self.weights is not None else torch.zeros_like(share)
        indices = share[self.skip :].tolist()
        items = itertools.repeat(None) if self.item is None else map(self.item, indices)
        yield from zip(indices, itertools.repeat(epoch), repeats[self.skip :].tolist(), items, strict=False)

    def _share(self, epoch: int) -> Tensor:
        if self.layout:
            seed = mix_seed(self.seed, _ORDER) if self.shuffle else None
            return self.layout.share(self.rank, self.world_size, seed=seed, epoch=epoch)[: len(self)]
        length = len(self.data_source)
        if self.shuffle:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, _ORDER, epoch))
            order = torch.randperm(length, generator=generator) if self.weights is None else _draw(self.weights, generator)
        else:
            order = torch.arange(length)
        return order[self.rank : self.usable : self.world_size]


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw N of N samples with replacement; torch.multinomial takes no more than 2^24."""
    bounds = weights.double().cumsum(0)
    places = torch.rand(len(weights), generator=generator, dtype=torch.float64) * bounds[-1]
    return torch.searchsorted(bounds, places, right=True).clamp(max=len(weights) - 1)


def _repeats(indices: Tensor) -> Tensor:
    """Return for each index how often it has come before."""
    order = indices.argsort(stable=True)
    ordered = indices[order]
    first = torch.searchsorted(ordered, ordered)  # where the run of equal ones begins
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)) - first)


class SeededDataset(Dataset[Any]):
    """Seed the generators for each sample (or each batch fetched whole) before the data set draws from them."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._own: list[Any] | None = None  # of this process: found in each worker anew

    def _seed(self, key: Key) -> None:
        index, epoch, repeat, _ = key
        seed = mix_seed(self.seed, _SAMPLE, epoch, index, *([repeat] if repeat else []))
        seed_generators(seed)
        if self._own is None:
            self._own = own_generators(self.dataset)
        for number, generator in enumerate(self._own):
            seed_one(generator, mix_seed(seed, number))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": None}  # a copy's are others

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Fetch a batch: at once if the data set can, else sample by sample."""
        if hasattr(self.dataset, "__getitems__"):
            self._seed(keys[0])
            return self.dataset.__getitems__([key[0] for key in keys])
        return [self[key] for key in keys]

    def __getitem__(self, key: Key) -> Any:
        self._seed(key)
        index, _, _, item = key
        return self.dataset[index] if item is None else self.dataset.load(index, item)


def _collate(batch: Any) -> Any:
    # A list holds samples, as PyTorch's own `__getitems__` (of Subset) gives it; anything else was fetched as a whole batch.
    return default_collate(batch) if isinstance(batch, list) else batch


class ResumableLoader(DataLoader[Any]):
    """Load batches that depend on nothing but the seed and the position; remember the position for a checkpoint.

    A data set whose ``__getitems__`` returns a whole batch, such as a tuple of tensors, is taken by its word: that batch is
    not collated again. One with ``skipped`` has the samples that it could not read counted there. One with ``item(index)`` is
    asked in this process, and its ``load(index, item)`` called in a worker.

    Args:
        dataset: map-style data set; it may draw from the global generators or from its own
        batch_size: per process
        sampler: order and share of this process
        options: passed to :class:`torch.utils.data.DataLoader`
    """

    def __init__(self, dataset: Any, *, batch_size: int, sampler: EpochSampler, **options: Any) -> None:
        options.setdefault("collate_fn", getattr(dataset, "collate", _collate))
        options.setdefault("worker_init_fn", outlive_signals)
        super().__init__(SeededDataset(dataset, sampler.seed), batch_size=batch_size, sampler=sampler, **options)
        sampler.item = getattr(dataset, "item", None)
        self.order = sampler
        self.skipped: Skipped | None = getattr(dataset, "skipped", None)
        self.position = (0, 0)  # (epoch, batches handed out)
        self._epochs_begun = 0
        self.batches_done: Callable[[], int] | None = None  # set by ExactResume: batches the trainer is through with
        self._resume_from: dict[str, int] = {}

    def __iter__(self) -> Any:
        # A generator on purpose: Lightning 2.6 calls iter() before set_epoch() when it resumes, so nothing may be read
        # (or prefetched) before the first next().
        epoch, start = self.order.epoch, self._take_resume_point()
        self.order.skip = start * int(self.batch_size or 1)
        self.position = (epoch, start)
        self._epochs_begun += 1
        is_empty = start == 0
        for number, batch in enumerate(super().__iter__(), start):
            self.position = (epoch, number + 1)
            if self.skipped is not None and isinstance(batch, Incomplete):
                # Of what this process has looked at; over several epochs its shares come to the whole.
                seen = min(len(self.order) * self._epochs_begun, len(self.order.data_source))
                self.skipped.add(batch.broken, seen, is_share=self.order.world_size > 1)
                batch = batch.batch
                if batch is None:  # nothing of it could be read, in training nothing at all
                    continue
            is_empty = False
            seed_generators(mix_seed(self.order.seed, _BATCH, self.order.rank, epoch, number))
            yield batch
        if self.skipped is not None and is_empty:  # the other processes would wait for this one
            self.skipped.refuse(len(self.order))

    def _take_resume_point(self) -> int:
        """Return how many batches of this epoch were done before, once."""
        saved, self._resume_from = self._resume_from, {}
        if saved.get("epoch") != self.order.epoch or not 0 < saved["batches"] < len(self):
            return 0
        # The rest of an epoch can only be found again if its order is the same.
        now = self._order_of()
        changed = [f"{name} was {saved.get(name, 0)} and is {now[name]}" for name in now if saved.get(name, 0) != now[name]]
        if changed:
            raise UserError(
                f"the checkpoint was taken in the middle of epoch {saved['epoch']}, and {', '.join(changed)}\n"
                "keep these until the epoch is done, or continue from a checkpoint of an epoch's end"
            )
        return saved["batches"]

    def _order_of(self) -> dict[str, int]:
        order = self.order
        return {
            "batch_size": int(self.batch_size or 1),
            "number of samples": len(order.data_source),
            "number of processes": order.world_size,
            "seed": order.seed,
            "number of shards": 0,
        } | (order.layout.in_numbers() if order.layout else {})

    def state_dict(self) -> dict[str, int]:
        """Return the position in plain numbers; a batch handed out but not finished is to be done again."""
        epoch, batches = self.position
        if self.batches_done is not None:
            batches = min(batches, self.batches_done())
        return {"epoch": epoch, "batches": batches} | self._order_of()

    def begin_anew(self) -> None:
        """Forget the position that was loaded."""
        self._resume_from = {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next iteration where ``state`` was taken.

        A change of the batch size or of another part of the order in the middle of an epoch is refused at that iteration.
        """
        self._resume_from = state
        self.position = (state["epoch"], state["batches"])
