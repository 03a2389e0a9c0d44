from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from fulgurite.data import DataSpec, DigitsDataModule
from fulgurite.errors import UserError

VALUES: dict[str, Any] = {
    "class_names": ("cat", "dog"),
    "channels": 3,
    "height": 4,
    "width": 6,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
}


def test_plain_values_and_back() -> None:
    spec = DataSpec(**VALUES)
    plain = spec.to_dict()
    assert plain["class_names"] == ["cat", "dog"]
    again = DataSpec.from_dict(yaml.safe_load(yaml.safe_dump(plain)))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.num_classes == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"channels": 2}, "channels is 2; allowed: 1 (grey), 3 (RGB)"),
        ({"height": 0}, "the image size is 0 x 6; both must be at least 1 pixel, and 16,384 at most"),
        ({"mean": (0.5,)}, "mean has 1 and std 3 values; 3 channels need 3 of each"),
        ({"mean": (0.5, math.nan, 0.5)}, "mean is (0.5, nan, 0.5); every value must be a finite number"),
        ({"std": (1, 0, 1)}, "std is (1.0, 0.0, 1.0); every value must be above 0, and finite"),
        ({"std": (1, math.inf, 1)}, "std is (1.0, inf, 1.0); every value must be above 0, and finite"),
        ({"class_names": ()}, "class_names is empty; there must be at least one class"),
        ({"class_names": "cat"}, "class_names is 'cat'; it is a list of names"),
        ({"class_names": ("a", "b", "a")}, "class names must differ; given more than once: a"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        DataSpec(**VALUES | changes)
    assert str(error.value) == text


def test_values_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(UserError, match="a data spec holds values of the wrong kind: 'int' object is not iterable"):
        DataSpec.from_dict(DigitsDataModule().spec.to_dict() | {"class_names": 5})
    with pytest.raises(UserError, match="the image size is 1000000 x 8"):
        DataSpec.from_dict(DigitsDataModule().spec.to_dict() | {"height": 10**6})


def test_unknown_and_missing_keys_are_named() -> None:
    with pytest.raises(
        UserError, match=r"unknown key 'chanels' in a data spec \(did you mean 'channels'\?\); allowed: class_names"
    ):
        DataSpec.from_dict({**VALUES, "chanels": 3})
    with pytest.raises(UserError, match=r"^a data spec lacks channels, height, width, mean, std$"):
        DataSpec.from_dict({"class_names": ["a"]})
