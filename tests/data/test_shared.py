from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from fulgurite.data.shared import shared


@pytest.mark.parametrize(
    "tensor", [torch.arange(12).view(3, 4), torch.zeros(0, 2), torch.tensor([True, False]), torch.tensor(3.5)]
)
def test_a_copy_of_the_same_values(tensor: torch.Tensor) -> None:
    copy = shared(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
    if tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


def test_a_process_started_by_fork_sees_the_same_memory() -> None:
    tensor = shared(torch.zeros(3))
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=tensor.fill_, args=(7,))
    process.start()
    process.join()
    assert tensor.tolist() == [7, 7, 7]
