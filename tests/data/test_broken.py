from __future__ import annotations

import pytest

from fulgurite.data.broken import Broken, Skipped
from fulgurite.errors import UserError


def test_each_sample_is_counted_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = Skipped("train", 0.5)
    skipped.tell()
    skipped.add([Broken(3, "c.png: an empty file")], 10)
    skipped.add([Broken(3, "c.png: an empty file"), Broken(5, "e.png: not an image")], 10)
    skipped.tell()
    skipped.tell()
    assert capsys.readouterr().out == (
        "skipped     2 images of the train split cannot be read: c.png: an empty file, e.png: not an image\n"
    )


def test_too_many_are_refused() -> None:
    skipped = Skipped("val", 0.1)
    skipped.add([Broken(0, "a.png: x")], 10)
    with pytest.raises(UserError, match=r"2 of 10 images of the val split cannot be read; .* allows 10\.0%") as raised:
        skipped.add([Broken(1, "b.png: y")], 10)
    assert "a.png: x, b.png: y" in str(raised.value)


def test_a_share_may_hold_one_that_is_too_many_for_it() -> None:
    skipped = Skipped("val", 0.05)
    skipped.add([Broken(0, "a.png: x")], 10, is_share=True)
    with pytest.raises(UserError, match="2 of 10 images"):
        skipped.add([Broken(1, "b.png: y")], 10, is_share=True)
