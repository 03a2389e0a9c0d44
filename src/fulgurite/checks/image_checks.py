"""Look for what is wrong with images: broken files, odd formats and sizes, normalisation, copies and leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulgurite.checks import duplicates
from fulgurite.checks.findings import Findings
from fulgurite.checks.image_records import SplitRecords
from fulgurite.data.spec import DataSpec

_FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg"), ("JPEG", "MPO")),
    **dict.fromkeys((".tif", ".tiff"), ("TIFF",)),
    **dict.fromkeys((".pbm", ".pgm", ".ppm"), ("PPM",)),
    **{ending: (ending[1:].upper(),) for ending in (".bmp", ".gif", ".png", ".webp")},
}
_MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey with transparency",
    "P": "palette",
    "PA": "palette with transparency",
    "I": "16-bit grey",
    "CMYK": "CMYK",
}
_LONG = 4  # times longer than what evaluation cuts out of it
_OFF = 0.5  # standard deviations between a configured mean and the real one
_RATIO = 2  # between a configured standard deviation and the real one

Chosen = list[tuple[SplitRecords, int]]


def check_broken(findings: Findings, splits: Sequence[SplitRecords]) -> None:
    """List the images that cannot be read."""
    items = [split.item(index) | {"reason": why} for split in splits for index, why in sorted(split.broken.items())]
    findings.facts["broken"] = len(items)
    if items:
        findings.add("fault", "broken", f"{len(items):,} images cannot be read", items)


def check_formats(findings: Findings, splits: Sequence[SplitRecords], spec: DataSpec) -> None:
    """Count how files hold their images, what that is converted to, and wrong endings."""
    records = _joined(splits)
    files = records[records["format"] != ""]
    if not len(files):
        return
    formats, modes = Counter(files["format"].tolist()), Counter(map(_mode, files["mode"].tolist()))
    findings.facts["formats"], findings.facts["modes"] = dict(formats), dict(modes)
    findings.rows.append(("formats", _counted(formats)))
    findings.rows.append(("colours", _counted(modes)))
    deep = np.char.startswith(files["mode"], "I")
    grey = np.isin(files["mode"], ("1", "L", "LA")) | deep
    conversions: dict[str, Any] = {
        "16-bit grey scaled to 8 bits": deep,
        "grey repeated in three channels": grey & (spec.channels == 3),
        "colours turned to grey": ~grey & (spec.channels == 1),
        "CMYK turned to RGB": files["mode"] == "CMYK",
        f"transparency laid on background {list(spec.background)}": files["transparent"],
        "turned upright by EXIF": files["turned"],
        "first frame of several": files["animated"],
    }
    numbers = {what: int(which.sum()) for what, which in conversions.items() if which.any()}
    findings.facts["converted"] = numbers
    if numbers:
        findings.rows.append(("converted", "; ".join(f"{what}: {number:,}" for what, number in numbers.items())))
    items = [
        split.item(index) | {"reason": f"{split.name(index)}: of format {split.records[index]['format']}"}
        for split, index in _where(splits, _has_wrong_ending)
    ]
    if items:
        findings.add("warning", "endings", f"{len(items):,} files are of another format than their ending says", items)


def check_sizes(findings: Findings, splits: Sequence[SplitRecords], spec: DataSpec) -> None:
    """Compare sizes with what the network sees, and look for images that show nothing."""
    records = _joined(splits)
    if not len(records):
        return
    height, width = records["height"], records["width"]
    ratios = width / height
    small = (height < spec.height) | (width < spec.width)
    findings.facts["sizes"] = {
        "height": _spread(height),
        "width": _spread(width),
        "width_by_height": _spread(ratios),
        "smaller_than_input": int(small.sum()),
    }
    for name, values in (("height", height), ("width", width)):
        findings.rows.append((name, "{min:,.0f} to {max:,.0f}, median {median:,.0f}".format(**_spread(values))))
    findings.rows.append(("proportions", "width : height from {min:.2f} to {max:.2f}".format(**_spread(ratios))))
    if small.any():
        seen = f"{spec.height} x {spec.width}"
        findings.rows.append(("enlarged", f"{small.sum():,} images that are smaller than the {seen} that the network sees"))
    _list_where(findings, splits, "long", _is_long, "images are so long that evaluation sees less than a quarter of them")
    _list_where(findings, splits, "blank", _is_blank, "images show one colour only")


def check_normalisation(findings: Findings, splits: Sequence[SplitRecords], spec: DataSpec) -> None:
    """Measure mean and standard deviation of the training images as evaluation sees them."""
    records = _joined([split for split in splits if split.split == "train"])
    if not len(records):
        return
    number = len(records) * spec.height * spec.width
    mean = records["sum"].sum(0) / number / 255
    # Exact until here: the sums are whole numbers.
    std = np.sqrt(np.maximum(records["squares"].sum(0) / number / 255**2 - mean**2, 0))
    findings.facts |= {"mean": mean.tolist(), "std": std.tolist()}
    lines = [f"{name}: [{', '.join(f'{value:.4f}' for value in values)}]" for name, values in (("mean", mean), ("std", std))]
    findings.rows += [("normalise", lines[0]), ("", lines[1])]
    configured = np.array(spec.mean), np.array(spec.std)
    ratio = np.maximum(std, 1e-3) / configured[1]
    if (abs(mean - configured[0]) > _OFF * np.maximum(std, 1e-3)).any() or (np.maximum(ratio, 1 / ratio) > _RATIO).any():
        given = f"mean: {list(spec.mean)}, std: {list(spec.std)}"
        findings.rows.append(("", f"far from what is configured ({given}), which suits only a network that was trained with it"))


def check_copies(findings: Findings, splits: Sequence[SplitRecords], *, near: int) -> None:
    """Look for images that occur more than once, within a split, in two splits, or with two labels."""
    places = _where(splits, lambda split: split.records["readable"])
    pixels, thumbnails = (
        np.concatenate([split.records[field][split.records["readable"]] for split in splits]) for field in ("pixels", "thumbnail")
    )
    exact = duplicates.same(pixels)
    _judge(findings, [[places[index] for index in one] for one in exact], "are the same", "duplicates")
    if near:
        similar = duplicates.alike(pixels, thumbnails, near)
        _judge(findings, [[places[index] for index in one] for one in similar], "look alike", "near_duplicates")


def _judge(findings: Findings, sets: Sequence[Chosen], what: str, topic: str) -> None:
    """Sort sets of copies: a leak and a contradiction are faults, also both at once; the rest is worth a look."""
    findings.facts[topic] = len(sets)
    leaks = [one for one in sets if len({split.split for split, _ in one}) > 1]
    split_labels = [one for one in sets if len({split.labels[index].tobytes() for split, index in one}) > 1]
    rest = [one for one in sets if not any(one is other for other in (*leaks, *split_labels))]
    for severity, kind, chosen, text in (
        ("warning", "within", rest, "{} sets of images of one split {}"),
        ("fault", "leak", leaks, "{} sets of images {} and are in several splits: what is measured there is too good"),
        ("fault", "labels", split_labels, "{} sets of images {} and have different labels"),
    ):
        if chosen:
            items = [{"images": [split.item(index) for split, index in one]} for one in chosen]
            findings.add(severity, f"{topic}_{kind}", text.format(f"{len(chosen):,}", what), items)  # type: ignore[arg-type]


def _joined(splits: Sequence[SplitRecords]) -> NDArray[Any]:
    """Return the records of all images that could be read."""
    return np.concatenate([split.records[split.records["readable"]] for split in splits]) if splits else np.zeros(0)


def _where(splits: Sequence[SplitRecords], fits: Callable[[SplitRecords], NDArray[np.bool_]]) -> Chosen:
    return [(split, int(index)) for split in splits for index in np.flatnonzero(fits(split) & split.records["readable"])]


def _list_where(
    findings: Findings,
    splits: Sequence[SplitRecords],
    topic: str,
    fits: Callable[[SplitRecords], NDArray[np.bool_]],
    text: str,
) -> None:
    items = [split.item(index) for split, index in _where(splits, fits)]
    if items:
        findings.add("warning", topic, f"{len(items):,} {text}", items)


def _has_wrong_ending(split: SplitRecords) -> NDArray[np.bool_]:
    formats = split.records["format"]
    wrong = (
        bool(found) and found not in _FORMATS.get(Path(split.name(index)).suffix.lower(), (found,))
        for index, found in enumerate(formats.tolist())
    )
    return np.fromiter(wrong, np.bool_, len(split))


def _is_long(split: SplitRecords) -> NDArray[np.bool_]:
    tall, wide = split.records["height"] * split.spec.width, split.records["width"] * split.spec.height
    return np.asarray(np.maximum(tall, wide) > _LONG * np.minimum(tall, wide))


def _is_blank(split: SplitRecords) -> NDArray[np.bool_]:
    number = split.spec.height * split.spec.width
    varies = number * split.records["squares"] != split.records["sum"] ** 2  # exact, in whole numbers
    return np.asarray(~varies.any(1) & (number > 1))


def _mode(mode: str) -> str:
    return _MODES.get("I" if mode.startswith("I") else mode, mode)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.most_common())


def _spread(values: NDArray[Any]) -> dict[str, float]:
    return {"min": float(values.min()), "median": float(np.median(values)), "max": float(values.max())}
