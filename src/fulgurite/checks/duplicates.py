"""Find images that occur more than once: the same pixels, or nearly the same look."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

MAX_NEAR = 10
_BITS = 64
_MARGIN = 2.0  # grey levels that one cell must be brighter than the next: noise on a plain background makes no bits
_NEIGHBOURS = 32  # in the order of a part of the hash; bounds the time where very many images look alike
_TOLERANCE = 0.06  # between the lightness of two thumbnails of contrast 1; the most alike of two digits have 0.09
_COLOUR_TOLERANCE = 0.12  # between their colours, as a share of the contrast: JPEG keeps these less exactly
_FLAT = 2.0  # contrast in grey levels below which a thumbnail shows nothing that could be compared
_AT_ONCE = 16384  # thumbnails compared at once: 54 MiB as float32 in RGB
_LUMA = {1: (1.0,), 3: (0.299, 0.587, 0.114)}  # ITU-R BT.601, as in JPEG


def same(keys: NDArray[Any]) -> list[Indices]:
    """Return the sets of two or more indices whose keys (M,) are equal."""
    order = np.argsort(keys, kind="stable")
    sets = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
    return [one for one in sets if len(one) > 1]


def alike(pixels: NDArray[np.uint64], thumbnails: NDArray[np.uint8], near: int) -> list[Indices]:
    """Return the sets of images that look alike without being the same; what is like one of a set belongs to it.

    Args:
        pixels: (M,) hash of each image's pixels
        thumbnails: (M, C, 16, 18)
        near: bits of the 64 of the difference hash in which two images may differ
    """
    _, first, image_of = np.unique(pixels, return_index=True, return_inverse=True)
    roots = _components(thumbnails[first], near)
    several = np.bincount(roots, minlength=len(first)) > 1  # a set of copies of one image is no matter of looks
    chosen = np.flatnonzero(several[roots[image_of]])
    return [chosen[one] for one in same(roots[image_of][chosen])]


def difference_hashes(lightness: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return (M,) hashes of 64 bits: whether each cell of an 8 x 9 grid is brighter than the one to its left.

    Args:
        lightness: (M, 16, 18)
    """
    cells = _block_means(lightness, 8, 9)
    return _packed((cells[:, :, 1:] > cells[:, :, :-1] + _MARGIN).reshape(len(cells), _BITS))


def _components(thumbnails: NDArray[np.uint8], near: int) -> Indices:
    """Return (M,) one image of those that each image is alike to, directly or through others; the same for all of them."""
    hashes, contrast = np.zeros(0, np.uint64), np.zeros(0, np.float32)
    coarse = np.zeros((0, 1 + thumbnails.shape[1], 4, 3), np.float32)
    for part in _parts(thumbnails):
        lightness = _lightness(part)
        hashes = np.append(hashes, difference_hashes(lightness))
        contrast = np.append(contrast, lightness.std((1, 2)))
        coarse = np.append(coarse, _block_means(_levelled(part), 4, 3), axis=0)
    shown = np.flatnonzero(contrast > _FLAT)
    parent = np.arange(len(thumbnails))
    for pairs in _candidates(hashes[shown], near):
        parent = _flattened(parent)
        pairs = shown[pairs]
        for some in _parts(pairs[parent[pairs[:, 0]] != parent[pairs[:, 1]]]):
            # Means of blocks never differ more than what they are of, and are a twenty-fourth of it.
            maybe = some[_are_alike(coarse[some[:, 0]], coarse[some[:, 1]])]
            sure = _are_alike(_levelled(thumbnails[maybe[:, 0]]), _levelled(thumbnails[maybe[:, 1]]))
            for left, right in maybe[sure].tolist():
                parent[_root(parent, left)] = _root(parent, right)
    return _flattened(parent)


def _are_alike(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Compare (P, 1 + C, h, w), which :func:`_levelled` made, one by one."""
    squares = ((left - right) ** 2).mean((2, 3))
    return np.asarray((squares[:, 0] <= _TOLERANCE**2) & (squares[:, 1:].mean(1) <= _COLOUR_TOLERANCE**2))


def _candidates(hashes: NDArray[np.uint64], near: int) -> Iterator[Indices]:
    """Yield pairs (P, 2) whose hashes differ in at most ``near`` bits, a pair perhaps several times.

    Of ``near`` + 2 bands of bits at least two are then equal: for each two, the hashes are sorted by these, and neighbours in
    that order compared. That takes N log N, where comparing all with all takes N squared.
    """
    bits = np.unpackbits(hashes.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1)
    bands = np.array_split(np.arange(_BITS), near + 2)
    for one, other in combinations(range(near + 2), 2):
        top = np.concatenate([bands[one], bands[other]])
        order = np.concatenate([top, np.setdiff1d(np.arange(_BITS), top)])
        turned = _packed(bits[:, order])
        by_key = np.argsort(turned, kind="stable")
        keys = turned[by_key] >> np.uint64(_BITS - len(top))
        for step in range(1, min(_NEIGHBOURS, len(keys) - 1) + 1):
            equal = keys[step:] == keys[:-step]
            if not equal.any():
                break
            left, right = by_key[:-step][equal], by_key[step:][equal]
            close = np.bitwise_count(hashes[left] ^ hashes[right]) <= near
            yield np.stack([left[close], right[close]], axis=1)


def _lightness(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return (M, 16, 18) of thumbnails (M, C, 16, 18)."""
    weights = np.array(_LUMA[thumbnails.shape[1]], dtype=np.float32)
    return np.asarray(np.einsum("mchw,c->mhw", thumbnails.astype(np.float32), weights))


def _levelled(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return (M, 1 + C, 16, 18): the lightness, of mean 0 and contrast 1, and by how much each colour is off it."""
    lightness = _lightness(thumbnails)[:, None]
    contrast = np.maximum(lightness.std((2, 3), keepdims=True), 1e-6)
    mean = lightness.mean((2, 3), keepdims=True)
    return np.asarray(np.concatenate([lightness - mean, thumbnails - lightness], axis=1) / contrast)


def _block_means(images: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """Return (..., rows, columns), what blocks of (..., h, w) are on average."""
    *rest, height, width = images.shape
    return np.asarray(images.reshape(*rest, rows, height // rows, columns, width // columns).mean((-3, -1)))


def _packed(bits: NDArray[Any]) -> NDArray[np.uint64]:
    """Return (M, 64) bits as (M,) numbers, the first bit the highest."""
    return np.ascontiguousarray(np.packbits(bits, axis=1)).view(">u8")[:, 0].astype(np.uint64)


def _flattened(parent: Indices) -> Indices:
    """Let each point to the root right away."""
    while (parent[parent] != parent).any():
        parent = parent[parent]
    return parent


def _parts(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (array[start : start + _AT_ONCE] for start in range(0, len(array), _AT_ONCE))


def _root(parent: Indices, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]  # halves the way for the next who asks
        node = int(parent[node])
    return node
