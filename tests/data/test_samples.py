from __future__ import annotations

import pytest
import torch

from fulgurite.data.paths import Paths
from fulgurite.data.samples import Samples


@pytest.fixture
def samples() -> Samples:
    return Samples(
        labels=torch.tensor([5, 6, 7]),
        files=["a", "b", "c"],
        pixels=torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1, 1),
        groups=torch.tensor([1, 1, 2]),
    )


@pytest.mark.parametrize("chosen", [[2, 0], torch.tensor([2, 0])])
def test_some_in_another_order(samples: Samples, chosen: object) -> None:
    taken = samples.take(chosen)
    assert (taken.labels.tolist(), taken.files) == ([7, 5], ["c", "a"])
    assert taken.pixels is not None
    assert taken.groups is not None
    assert (taken.pixels.flatten().tolist(), taken.groups.tolist()) == ([2, 0], [2, 1])


def test_some_by_a_mask_and_none(samples: Samples) -> None:
    assert samples.take(torch.tensor([True, False, True])).files == ["a", "c"]
    assert len(samples.take([False, False, False])) == 0
    assert Samples(labels=torch.tensor([1, 2])).take([1]).files is None


def test_two_parts_are_joined(samples: Samples) -> None:
    both = samples.joined(samples.take([1]))
    assert (both.labels.tolist(), both.files) == ([5, 6, 7, 6], ["a", "b", "c", "b"])
    assert both.groups is not None
    assert both.groups.tolist() == [1, 1, 2, 1]


def test_strata_are_classes_or_combinations_of_labels(samples: Samples) -> None:
    assert samples.strata.tolist() == [5, 6, 7]
    several = Samples(labels=torch.tensor([[1, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.uint8))
    first, second, third, fourth = several.strata.tolist()
    assert first == third
    assert len({first, second, fourth}) == 3


def test_packed_paths_are_the_same(samples: Samples) -> None:
    packed = samples.packed()
    assert isinstance(packed.files, Paths)
    assert [path.name for path in packed.files] == ["a", "b", "c"]
    assert torch.equal(packed.labels, samples.labels)
