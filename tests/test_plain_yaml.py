from __future__ import annotations

import time
from itertools import pairwise

import pytest
import yaml

from fulgurite.errors import UserError
from fulgurite.plain_yaml import read_yaml, structure_in, write_yaml

BOMB = "a: &a [x, x]\n" + "\n".join(f"{b}: &{b} [*{a}, *{a}]" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))


def test_plain_values_are_read() -> None:
    text = "a: {b: [1, 2.5, x, null, true], c: 2024-05-17, d: '*.jpg', e: 'a & b'}"
    assert read_yaml(text) == {"a": {"b": [1, 2.5, "x", None, True], "c": "2024-05-17", "d": "*.jpg", "e": "a & b"}}
    assert read_yaml("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [x]", "tags such as tag:yaml.org,2002:python/object/apply:os.system are refused"),
        ("a: !x 1", "tags such as !x are refused"),
        ("a: &x 1", "anchors and aliases are refused"),
        ("a: &x [*x]", "anchors and aliases are refused"),
        (BOMB, "anchors and aliases are refused"),
        ("[" * 60 + "]" * 60, "it is nested deeper than 50 levels"),
        ("[" * 100_000, "it is nested deeper than 50 levels"),
        ("a: 1\na: 2", "'a' is given twice"),
        ("[x]: 1", "a key must be a plain word"),
        ("x" * 2_000_001, "it has 2,000,001 characters, more than the 2,000,000 that are read"),
        ("a: [", "expected the node content, but found '<stream end>'"),
        ("a: " + "1" * 5000, "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits"),
    ],
)
def test_what_is_not_plain_is_refused(text: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        read_yaml(text)
    assert str(caught.value).startswith(message)
    assert time.monotonic() - start < 5


def test_control_characters_are_refused() -> None:
    with pytest.raises(UserError, match="special characters are not allowed"):
        read_yaml("a: \x00")


def test_structure_in_a_text() -> None:
    assert structure_in("{a: [1, x]}") == {"a": ["1", "x"]}
    assert structure_in("- a") == ["a"]
    assert structure_in("? a") == {"a": ""}
    for text in ("", "a", "16-mixed", "*.jpg", "{", "x: 1: 2"):
        assert structure_in(text) is None


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "[" * 5000, "[" * 60 + "]" * 60, "a: " * 1_000_000])
def test_structure_that_cannot_be_looked_through_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="cannot be looked through"):
        structure_in(text)


def test_what_is_there_twice_is_written_twice() -> None:
    twice = [1, {"b": 2}]
    tree = {"p": twice, "q": twice, "name": "2024-05-17", "empty": {}, "text": "ä: b"}
    assert "&" in yaml.safe_dump(tree)
    assert "&" not in write_yaml(tree)
    assert read_yaml(write_yaml(tree)) == tree
    assert list(read_yaml(write_yaml(tree))) == list(tree)
