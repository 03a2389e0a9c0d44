from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from fulgurite.processes import of_each_process


def test_one_process_is_alone() -> None:
    assert of_each_process({"a": 1}) == [{"a": 1}]


def test_a_group_of_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert of_each_process([3]) == [[3]]
    finally:
        dist.destroy_process_group()
