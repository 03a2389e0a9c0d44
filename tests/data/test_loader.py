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
    found = [[index for index, *_ in sampler] for sampler in samplers]
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
    assert list(sampler) == [(index, 2, 0, None) for index in range(4)]


def test_weights_say_how_often_each_sample_comes() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0])
    options: dict[str, Any] = {"shuffle": True, "rank": 0, "world_size": 1, "equal_shares": True}
    sampler = EpochSampler(3, seed=0, weights=weights, **options)
    drawn = []
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        drawn += [index for index, *_ in sampler]
    counts = torch.tensor(drawn).bincount(minlength=3) / 6000
    assert counts.tolist() == pytest.approx([0.0, 0.25, 0.75], abs=0.02)
    again = EpochSampler(3, seed=0, weights=weights, **options)
    again.set_epoch(1999)
    assert [index for index, *_ in again] == drawn[-3:]
    two = [EpochSampler(100, seed=0, weights=torch.ones(100), **options | {"rank": rank, "world_size": 2}) for rank in (0, 1)]
    assert [len(list(one)) for one in two] == [50, 50]


class Listed(Dataset[Any]):
    """Has a list that only the process of the loader looks into."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 6

    def item(self, index: int) -> str:
        self.asked.append(index)
        return f"item {index}"

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the item is known")

    def load(self, index: int, item: str) -> tuple[int, str, int]:
        return index, item, len(self.asked)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_list_of_samples_is_looked_into_by_the_loader_alone(workers: int) -> None:
    dataset = Listed()
    sampler = EpochSampler(6, shuffle=False, seed=0, rank=0, world_size=1, equal_shares=False)
    batches = list(ResumableLoader(dataset, batch_size=3, sampler=sampler, num_workers=workers))
    assert [list(items) for _, items, _ in batches] == [[f"item {index}" for index in part] for part in ((0, 1, 2), (3, 4, 5))]
    assert dataset.asked == list(range(6))
    assert workers == 0 or all((asked == 0).all() for *_, asked in batches)  # a worker's copy was never asked


def test_a_sample_that_comes_again_is_drawn_anew() -> None:
    images = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)

    class Noise(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return images[index] + torch.randint(0, 256, (1, 4, 4), dtype=torch.uint8), index

    weights = torch.tensor([1.0, 0.0, 0.0, 0.0])
    options: dict[str, Any] = {"shuffle": True, "seed": 0, "rank": 0, "world_size": 1, "equal_shares": True}

    def batches(skip: int = 0) -> Any:
        loader = ResumableLoader(Noise(), batch_size=1, sampler=EpochSampler(4, weights=weights, **options))
        if skip:
            loader.order.set_epoch(1)
            loader.load_state_dict({"epoch": 1, "batches": skip} | loader._order_of())
        else:
            loader.order.set_epoch(1)
        return [batch[0] for batch in loader]

    whole = batches()
    assert len({tuple(image.flatten().tolist()) for image in whole}) == 4
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], batches(2), strict=True))
