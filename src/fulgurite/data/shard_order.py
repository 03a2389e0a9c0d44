"""The order in which the samples of shards are read: mixed well enough to train on, few shards at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.data.seeding import mix_seed


@dataclass(frozen=True)
class ShardLayout:
    """Say how the samples 0..N-1 lie in shards; give each process a run of whole shards, as far as its share allows.

    Args:
        sizes: number of samples of each shard
        window: about so many shards are read at a time, their samples mixed
        num_nodes: the shards are dealt to the nodes once and stay there, so that a node fetches its part only
    """

    sizes: tuple[int, ...]
    window: int = 16
    num_nodes: int = 1

    def share(self, rank: int, world_size: int, *, seed: int | None, epoch: int) -> Tensor:
        """Return the samples of one process, those of all processes being each sample once.

        Args:
            rank: of the process
            world_size: number of processes
            seed: of the order; None leaves the samples as they lie
            epoch: another epoch, another order

        Returns:
            (len(range(rank, N, world_size)),) int64
        """
        ends = torch.tensor(self.sizes).cumsum(0)
        total = int(ends[-1])
        begin, end = _begin(rank, world_size, total), _begin(rank + 1, world_size, total)
        if seed is None:
            return torch.arange(begin, end)
        shards = torch.stack([ends - torch.tensor(self.sizes), ends], dim=1)  # (S, 2): first sample and one past the last
        dealt = shards[torch.randperm(len(shards), generator=_generator(seed))]
        on_node = world_size // self.num_nodes
        first = rank - rank % on_node
        node_begin, node_end = _begin(first, world_size, total), _begin(first + on_node, world_size, total)
        of_node = _cut(dealt, node_begin, node_end)
        draw = _generator(mix_seed(seed, epoch))
        mixed = of_node[torch.randperm(len(of_node), generator=draw)]
        mine = _cut(mixed, begin - node_begin, end - node_begin)
        # The rank counts here, or two processes would mix their runs alike.
        return _mix(mine, self.window * total / len(shards), _generator(mix_seed(seed, epoch, rank)))

    def in_numbers(self) -> dict[str, int]:
        """Return what the order depends on, by name, for a checkpoint."""
        return {"number of shards": len(self.sizes), "shuffle_window": self.window, "number of nodes": self.num_nodes}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _begin(rank: int, world_size: int, total: int) -> int:
    """Return where the run of a process begins if the first ``total % world_size`` processes take one sample more."""
    each, more = divmod(total, world_size)
    return rank * each + min(rank, more)


def _cut(pieces: Tensor, begin: int, end: int) -> Tensor:
    """Return what lies from ``begin`` to ``end`` of pieces laid end to end.

    Args:
        pieces: (P, 2) int64, first sample and one past the last
        begin: position of the first sample to keep
        end: one past that of the last

    Returns:
        (Q, 2) int64
    """
    lengths = pieces[:, 1] - pieces[:, 0]
    ends = lengths.cumsum(0)
    before = (begin - (ends - lengths)).clamp(min=0)
    after = (ends - end).clamp(min=0)
    cut = torch.stack([pieces[:, 0] + before, pieces[:, 1] - after], dim=1)
    return cut[cut[:, 0] < cut[:, 1]]


def _mix(pieces: Tensor, reach: float, generator: torch.Generator) -> Tensor:
    """Return the samples of the pieces in a random order in which none comes much later than ``reach`` after its piece begins.

    The window slides: when one piece is used up, one new piece is begun, so that new shards are wanted one by one.
    """
    lengths = pieces[:, 1] - pieces[:, 0]
    total = int(lengths.sum())
    begins = lengths.cumsum(0) - lengths
    samples = torch.arange(total) + (pieces[:, 0] - begins).repeat_interleave(lengths)
    places = begins.repeat_interleave(lengths) + reach * torch.rand(total, generator=generator, dtype=torch.float64)
    return samples[places.argsort(stable=True)]
