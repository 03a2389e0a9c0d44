from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from fulgurite.data.base import ArrayDataset
from fulgurite.data.loader import EpochSampler, ResumableLoader
from fulgurite.errors import UserError

module_generator = np.random.default_rng(0)


class Noisy(Dataset[Any]):
    """Draw from each of the generators that augmentations use, a sample at a time."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = [torch.rand(()).item(), random.random(), np.random.rand(), module_generator.random()]
        return torch.tensor(draws, dtype=torch.float64), index


def add_noise(images: Tensor) -> Tensor:
    return images + torch.randint(0, 100, images.shape).to(torch.uint8)


def noisy_arrays() -> ArrayDataset:
    return ArrayDataset(torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10), add_noise)


DATASETS = pytest.mark.parametrize("dataset", [Noisy(), noisy_arrays()], ids=["per_sample", "batch_fetched"])


def make(dataset: Any, *, seed: int = 0, batch_size: int = 3, workers: int = 0, world_size: int = 1) -> ResumableLoader:
    sampler = EpochSampler(len(dataset), shuffle=True, seed=seed, rank=0, world_size=world_size, equal_shares=True)
    return ResumableLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def epoch(loader: ResumableLoader, number: int) -> list[tuple[list[Any], list[int], float]]:
    """Return of each batch of an epoch: the values, the indices, and what the network would draw."""
    loader.order.set_epoch(number)
    return [(values.tolist(), indices.tolist(), torch.rand(()).item()) for values, indices in loader]


def indices(batches: list[tuple[list[Any], list[int], float]]) -> list[int]:
    return [index for _, part, _ in batches for index in part]


@DATASETS
def test_number_of_workers_does_not_change_a_bit(dataset: Any) -> None:
    loaders = [make(dataset, workers=workers) for workers in (0, 1, 2)]
    for number in (0, 1):
        expected, *others = [epoch(loader, number) for loader in loaders]
        assert others == [expected, expected]


@DATASETS
def test_epochs_and_seeds_differ_in_order_augmentation_and_draws(dataset: Any) -> None:
    batches = [epoch(make(dataset, seed=seed), number) for seed, number in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(indices(one)) == list(range(10)) for one in batches)
    assert len({str(indices(one)) for one in batches}) == 3
    assert len({str([values for values, _, _ in one]) for one in batches}) == 3
    assert len({draws for one in batches for _, _, draws in one}) == 3 * 4


def test_augmentation_belongs_to_the_sample_and_the_epoch_not_to_its_place() -> None:
    def by_index(batch_size: int, number: int = 0) -> dict[int, list[float]]:
        batches = epoch(make(Noisy(), batch_size=batch_size), number)
        return {index: value for values, part, _ in batches for index, value in zip(part, values, strict=True)}

    assert by_index(3) == by_index(4)
    assert all(by_index(3)[index] != by_index(3, 1)[index] for index in range(10))
    draws = list(by_index(3).values())
    assert len({str(draw) for draw in draws}) == 10
    assert all(len(set(draw)) == 4 for draw in draws)


@DATASETS
@pytest.mark.parametrize("done", [1, 3])
def test_resume_in_the_middle_of_an_epoch_with_another_number_of_workers(dataset: Any, done: int) -> None:
    whole = epoch(make(dataset), 1)
    first = make(dataset)
    first.order.set_epoch(1)
    batches = iter(first)
    for _ in range(done):
        next(batches)
    resumed = make(dataset, workers=2)
    resumed.load_state_dict(first.state_dict())
    assert epoch(resumed, 1) == whole[done:]
    assert epoch(resumed, 2) == epoch(make(dataset), 2)


def test_batch_that_was_not_finished_is_done_again() -> None:
    loader = make(Noisy())
    loader.batches_done = lambda: 1
    batches = iter(loader)
    next(batches)
    next(batches)
    assert loader.state_dict()["batches"] == 1


def test_resume_at_an_epochs_end_starts_the_next_one_whole() -> None:
    first = make(Noisy())
    epoch(first, 0)
    resumed = make(Noisy(), batch_size=4, seed=5)  # what would be refused in the middle of an epoch
    resumed.load_state_dict(first.state_dict())
    assert epoch(resumed, 1) == epoch(make(Noisy(), batch_size=4, seed=5), 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"batch_size": 4}, "batch_size was 3 and is 4"),
        ({"seed": 7}, "seed was 0 and is 7"),
        ({"world_size": 2, "batch_size": 2}, "batch_size was 3 and is 2, number of processes was 1 and is 2"),
        ({"dataset": Subset(Noisy(), range(9))}, "number of samples was 10 and is 9"),
    ],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(changed: dict[str, Any], text: str) -> None:
    first = make(Noisy())
    next(iter(first))
    resumed = make(**{"dataset": Noisy(), **changed})
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(UserError) as error:
        next(iter(resumed))
    assert str(error.value) == (
        f"the checkpoint was taken in the middle of epoch 0, and {text}\n"
        "keep these until the epoch is done, or continue from a checkpoint of an epoch's end"
    )


def test_nothing_is_read_before_the_first_batch_is_asked_for() -> None:
    # Lightning makes the iterator of a resumed run before it says which epoch it is for.
    loader = make(Noisy(), workers=1)
    batches = iter(loader)
    loader.order.set_epoch(3)
    assert next(batches)[1].tolist() == epoch(make(Noisy()), 3)[0][1]


def test_iteration_that_was_left_early_does_not_leak_into_the_next() -> None:
    loader = make(Noisy(), workers=2)
    next(iter(loader))
    assert epoch(loader, 1) == epoch(make(Noisy()), 1)


def test_samples_of_a_subset_are_collated() -> None:
    # PyTorch's Subset fetches a list of samples, not a whole batch.
    values, labels = next(iter(make(Subset(Noisy(), range(5)))))
    assert values.shape == (3, 4)
    assert labels.shape == (3,)


def shares(length: int, world_size: int, *, equal: bool) -> list[list[int]]:
    samplers = [
        EpochSampler(length, shuffle=equal, seed=0, rank=rank, world_size=world_size, equal_shares=equal)
        for rank in range(world_size)
    ]
    found = [[index for index, _ in sampler] for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in found]
    return found


@pytest.mark.parametrize(("length", "world_size"), [(5, 2), (7, 3), (8, 4), (3, 1), (4, 4)])
def test_evaluation_counts_each_sample_once(length: int, world_size: int) -> None:
    assert sorted(index for share in shares(length, world_size, equal=False) for index in share) == list(range(length))


@pytest.mark.parametrize(("length", "world_size"), [(5, 2), (7, 3), (8, 4), (3, 1)])
def test_training_gives_processes_equal_shares_without_repeats(length: int, world_size: int) -> None:
    found = shares(length, world_size, equal=True)
    assert {len(share) for share in found} == {length // world_size}
    together = [index for share in found for index in share]
    assert len(set(together)) == len(together) == length - length % world_size


def test_order_without_shuffling_is_that_of_the_data() -> None:
    sampler = EpochSampler(4, shuffle=False, seed=0, rank=0, world_size=1, equal_shares=False)
    sampler.set_epoch(2)
    assert list(sampler) == [(0, 2), (1, 2), (2, 2), (3, 2)]
