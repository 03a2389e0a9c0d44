from __future__ import annotations

from itertools import chain

import pytest
import torch

from fulgurite.data.shard_order import ShardLayout

SIZES = (10, 10, 10, 10, 10, 10, 10, 3)


def shares(layout: ShardLayout, world_size: int, seed: int | None = 0, epoch: int = 0) -> list[list[int]]:
    return [layout.share(rank, world_size, seed=seed, epoch=epoch).tolist() for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 4, 7, 73])
@pytest.mark.parametrize("seed", [None, 0])
def test_each_sample_is_in_one_share(world_size: int, seed: int | None) -> None:
    found = shares(ShardLayout(SIZES, window=2), world_size, seed)
    assert sorted(chain(*found)) == list(range(73))
    assert [len(share) for share in found] == [len(range(rank, 73, world_size)) for rank in range(world_size)]


def test_without_a_seed_samples_stay_as_they_lie() -> None:
    assert shares(ShardLayout((3, 2)), 2, seed=None) == [[0, 1, 2], [3, 4]]


def test_order_depends_on_seed_epoch_and_rank_alone() -> None:
    layout = ShardLayout(SIZES, window=2)
    assert shares(layout, 2) == shares(layout, 2)
    assert shares(layout, 2) != shares(layout, 2, epoch=1)
    assert shares(layout, 2) != shares(layout, 2, seed=1)
    one_shard = ShardLayout((20,))
    assert shares(one_shard, 1) != shares(one_shard, 1, epoch=1)


def test_each_process_reads_whole_shards_but_for_its_ends() -> None:
    found = shares(ShardLayout((10,) * 40), 4)
    # 10 shards for each process: none is read by two.
    assert sorted(len({sample // 10 for sample in share}) for share in found) == [10] * 4
    uneven = shares(ShardLayout((10,) * 41), 4)
    assert sum(len({sample // 10 for sample in share}) for share in uneven) <= 41 + 3


def test_a_node_keeps_its_shards_in_all_epochs() -> None:
    layout = ShardLayout((10,) * 40, num_nodes=2)
    nodes = [{sample for share in shares(layout, 4, epoch=epoch)[:2] for sample in share} for epoch in range(3)]
    assert nodes[0] == nodes[1] == nodes[2]
    process = [set(shares(layout, 4, epoch=epoch)[0]) for epoch in range(2)]
    assert process[0] != process[1]
    one_node = [set(chain(*shares(ShardLayout((10,) * 40), 4, epoch=epoch)[:2])) for epoch in range(2)]
    assert one_node[0] != one_node[1]


def test_few_shards_are_read_at_a_time_and_begun_one_by_one() -> None:
    size, window = 100, 4
    order = torch.tensor(shares(ShardLayout((size,) * 50, window=window), 1)[0]) // size
    begun = [int((order == shard).nonzero()[0]) for shard in range(50)]
    done = [int((order == shard).nonzero()[-1]) for shard in range(50)]
    open_at = [sum(first <= place <= last for first, last in zip(begun, done, strict=True)) for place in range(0, 5000, 50)]
    assert max(open_at) <= window + 2
    assert len(set(begun)) == 50
    gaps = torch.tensor(sorted(begun)).diff()
    assert gaps.max() < 2.5 * size  # not `window` shards at once and then none for a long time
    assert gaps[window:].float().mean() > 0.8 * size


def test_shards_are_mixed() -> None:
    order = torch.tensor(shares(ShardLayout((100,) * 50, window=8), 1)[0]) // 100
    neighbours = (order[1:] == order[:-1]).float().mean()
    assert neighbours < 0.2  # 1 in 8 by chance
