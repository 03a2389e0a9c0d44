from __future__ import annotations

import time

import numpy as np
import torch
from torch.nn import functional as F

from fulgurite.checks.duplicates import alike, difference_hashes, same


def smooth(number: int, seed: int = 0) -> np.ndarray:
    """Return thumbnails (N, 3, 16, 18) of large soft shapes."""
    shapes = torch.rand(number, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 255
    return F.interpolate(shapes, (16, 18), mode="bicubic").clamp(0, 255).byte().numpy()


def found(thumbnails: np.ndarray, near: int = 4, pixels: list[int] | None = None) -> list[list[int]]:
    keys = np.array(pixels if pixels else range(len(thumbnails)), dtype=np.uint64)
    return [one.tolist() for one in alike(keys, thumbnails, near)]


def test_same_keys() -> None:
    assert [one.tolist() for one in same(np.array([5, 2, 5, 1, 2, 5]))] == [[1, 4], [0, 2, 5]]
    assert same(np.zeros(0)) == []


def test_a_difference_hash_says_where_it_gets_brighter() -> None:
    ramp = np.tile(np.arange(18, dtype=np.float32) * 10, (1, 16, 1))

    assert difference_hashes(ramp).tolist() == [2**64 - 1]
    assert difference_hashes(ramp[:, :, ::-1]).tolist() == [0]
    assert difference_hashes(ramp / np.float32(20)).tolist() == [0]  # steps of one grey level may be noise
    ramp[0, :2] = 0
    assert difference_hashes(ramp).tolist() == [2**56 - 1]  # the first row is the highest byte


def test_noise_and_light_change_nothing() -> None:
    thumbnails = smooth(50)
    noise = np.random.default_rng(0).integers(-2, 3, thumbnails[:1].shape)
    noisy = np.clip(thumbnails[:1] + noise, 0, 255).astype(np.uint8)
    dark = (thumbnails[1:2] * 0.7 + 10).astype(np.uint8)

    assert sorted(found(np.concatenate([thumbnails, noisy, dark]))) == [[0, 50], [1, 51]]


def test_other_colours_are_another_image() -> None:
    grey = smooth(1)[:, :1] // 2 + 60
    red, blue = (np.concatenate([grey + r, grey, grey + b], axis=1).astype(np.uint8) for r, b in ((60, 0), (0, 60)))

    assert found(np.concatenate([red, red // 2 + 40])) == [[0, 1]]
    assert found(np.concatenate([red, blue]), near=10) == []


def test_copies_belong_to_what_they_look_like_but_make_no_set_alone() -> None:
    one, other = smooth(2)
    like = np.clip(one.astype(int) + 3, 0, 255).astype(np.uint8)

    assert found(np.stack([one, one, other, other, like]), pixels=[7, 7, 8, 8, 9]) == [[0, 1, 4]]


def test_plain_images_are_not_compared() -> None:
    plain = np.full((5, 3, 16, 18), 100, np.uint8) + np.arange(5, dtype=np.uint8)[:, None, None, None]

    assert found(plain) == []
    assert found(plain[:0]) == []


def test_a_hash_may_differ_in_so_many_bits() -> None:
    one = np.full((16, 18), 100, np.uint8)
    one[:8] += (np.arange(18, dtype=np.uint8) * 8)[None]
    other = one.copy()
    for row in (8, 10, 12, 14):  # a small step in each, which makes one bit
        other[row : row + 2, 2:4] += 3
    thumbnails = np.stack([one, other])[:, None]
    hashes = difference_hashes(thumbnails[:, 0].astype(np.float32))
    assert np.bitwise_count(hashes[0] ^ hashes[1]) == 4

    assert found(thumbnails, near=4) == [[0, 1]]
    assert found(thumbnails, near=3) == []


def test_the_time_does_not_grow_with_the_square() -> None:
    thumbnails = smooth(20_000)
    thumbnails[-100:] = np.clip(thumbnails[:100].astype(int) + 2, 0, 255)

    began = time.monotonic()
    sets = found(thumbnails)

    assert len(sets) >= 95  # of the 100; an image that gets brighter may lose a pixel's detail at white
    assert time.monotonic() - began < 10  # comparing all with all takes minutes


def test_many_images_that_look_alike_are_one_set() -> None:
    thumbnails = np.repeat(smooth(1), 5000, axis=0)
    thumbnails[:, :, 0, 0] = np.arange(5000)[:, None] % 5

    assert [len(one) for one in found(thumbnails)] == [5000]
