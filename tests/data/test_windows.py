from __future__ import annotations

import random
from functools import partial

import pytest

from fulgurite.data.windows import Window, centre, random_crop, whole


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((100, 100), (0, 0, 100, 100)),
        ((100, 300), (0, 100, 100, 100)),
        ((300, 100), (100, 0, 100, 100)),
        ((1, 5000), (0, 2499, 1, 1)),
    ],
)
def test_centre_is_the_largest_region_of_the_proportions(size: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert centre(*size, out_height=32, out_width=32) == (*expected, 32, 32)
    assert centre(60, 90, out_height=20, out_width=10) == Window(0, 30, 60, 30, 20, 10)


def test_whole_is_only_ever_made_smaller() -> None:
    assert whole(300, 400, shorter=150) == Window(0, 0, 300, 400, 150, 200)
    assert whole(30, 40, shorter=150) == whole(30, 40) == Window(0, 0, 30, 40, 30, 40)
    assert whole(1, 1000, shorter=1)[4:] == (1, 1000)
    assert whole(10_000, 3, shorter=1)[4:] == (3333, 1)


def test_random_crops_lie_inside_and_have_the_area_and_proportions_asked_for() -> None:
    random.seed(0)
    crops = [random_crop(300, 400, out_height=32, out_width=32, area=(0.25, 1.0)) for _ in range(2000)]
    shares = [crop.height * crop.width / 120_000 for crop in crops]
    assert all(0 <= crop.top <= 300 - crop.height and 0 <= crop.left <= 400 - crop.width for crop in crops)
    assert 0.24 < min(shares) < 0.27
    assert max(shares) > 0.9
    assert all(0.74 < crop.width / crop.height < 1.35 for crop in crops)
    assert len({crop.top for crop in crops}) > 100
    wide = [random_crop(300, 400, out_height=10, out_width=20, area=(0.1, 0.5)) for _ in range(200)]
    assert all(1.45 < crop.width / crop.height < 2.75 for crop in wide)


def test_a_thin_image_gives_its_centre() -> None:
    assert random_crop(2, 900, out_height=8, out_width=8, area=(0.9, 1.0)) == centre(2, 900, out_height=8, out_width=8)


def test_the_seed_decides() -> None:
    draw = partial(random_crop, 300, 400, out_height=32, out_width=32, area=(0.1, 1.0))
    random.seed(1)
    first = [draw() for _ in range(5)]
    random.seed(1)
    assert [draw() for _ in range(5)] == first


@pytest.mark.parametrize(
    ("size", "expected"), [((900, 900), 8), ((512, 900), 8), ((511, 900), 4), ((127, 900), 1), ((128, 128), 2), ((32, 32), 1)]
)
def test_two_pixels_stay_for_each_that_is_wanted(size: tuple[int, int], expected: int) -> None:
    assert whole(*size)._replace(out_height=32, out_width=32).reduction() == expected


def test_a_window_on_a_smaller_image() -> None:
    window = Window(101, 200, 320, 319, 16, 16)
    assert window.divided(1) is window
    assert window.divided(4) == Window(25, 50, 80, 80, 16, 16)
