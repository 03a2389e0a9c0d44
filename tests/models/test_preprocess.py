from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

from fulgurite.models.preprocess import Preprocess


def test_values_are_scaled_and_normalised_per_channel() -> None:
    preprocess = Preprocess(mean=(0.5, 0.0, 0.2), std=(0.5, 1.0, 0.1))
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(1, 1, 1, 3).repeat(2, 3, 1, 1)
    result = preprocess(images)
    assert (result.shape, result.dtype) == ((2, 3, 1, 3), torch.float32)
    expected = torch.tensor([[-1.0, 1.0, -0.6], [0.0, 1.0, 0.2], [-2.0, 8.0, 0.0]])
    torch.testing.assert_close(result[:, :, 0], expected.repeat(2, 1, 1))


def test_numbers_are_not_kept_twice() -> None:
    assert Preprocess((0.5,), (0.5,)).state_dict() == {}


def test_floats_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected uint8 images of 0..255, got torch.float32"):
        Preprocess((0.5,), (0.5,))(torch.rand(1, 1, 2, 2))


def test_what_leaves_is_contiguous() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    preprocess = Preprocess((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    last = preprocess(images.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous()
    assert torch.equal(last, preprocess(images))


def test_what_leaves_lies_as_it_is_set() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    preprocess = Preprocess((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    contiguous = preprocess(images)
    preprocess.memory_format = torch.channels_last
    assert preprocess(images).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(preprocess(images), contiguous)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_takes_the_type_of_the_network(dtype: torch.dtype) -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    expected = Preprocess((0.3,), (0.7,))(images)
    result = Preprocess((0.3,), (0.7,)).to(dtype)(images)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=0.01, atol=0.01)


def test_can_be_copied_and_exported() -> None:
    preprocess = pickle.loads(pickle.dumps(deepcopy(Preprocess((0.5,), (0.5,)))))
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    assert torch.equal(torch.export.export(preprocess, (images,)).module()(images), preprocess(images))
