from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from fulgurite.data.paths import Paths


def test_paths_come_back_as_they_were() -> None:
    given = [Path("a/b c.png"), Path("ä/日本.jpg"), Path("new\nline'\".png"), Path("a\udcff.png")]  # the last is not UTF-8
    paths = Paths(given)
    assert list(paths) == given
    assert paths[1:3] == given[1:3]
    assert len(paths) == 4
    assert len(Paths([])) == 0
    assert Paths(["a.png"])[0] == Path("a.png")


@pytest.mark.parametrize("index", [2, -1])
def test_index_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} of 2"):
        Paths(["a", "b"])[index]


def test_what_a_worker_gets_does_not_grow_with_the_number_of_paths() -> None:
    few, many = (Paths([f"folder/{number}.png" for number in range(count)]) for count in (10, 10_000))
    # Between processes tensors are passed as handles of shared memory; a list or bytes would be copied.
    assert len(ForkingPickler.dumps(many)) < len(ForkingPickler.dumps(few)) + 100
