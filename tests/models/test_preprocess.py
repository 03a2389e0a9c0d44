from __future__ import annotations

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
