from __future__ import annotations

import argparse
import io
import pickle
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from fulgurite.plain_data import NotPlainError, check_pickle, check_values


def pickled(value: Any) -> bytes:
    """Return the pickle in what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return bytes(torch._C.PyTorchFileReader(buffer).get_record("data.pkl"))


def refusal(value: Any) -> str:
    with pytest.raises(NotPlainError) as caught:
        check_values(value, 1000)
    return str(caught.value)


PLAIN = {
    "numbers": [1, -1, 10**30, 2.5, True, None, 1j, 70_000],
    "texts": ("a", b"\xff", "", b""[:0] or b"x"),
    "more": [OrderedDict(a=1), Counter("aab"), {1}, torch.Size([1, 2]), torch.float32, torch.device("cpu")],
    "tensors": [
        torch.zeros(2, dtype=kind) for kind in (torch.float32, torch.int64, torch.bfloat16, torch.uint16, torch.complex64)
    ],
    "layouts": [
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
        nn.Parameter(torch.zeros(2)),
        torch.zeros(2)[::2],
    ],
    "module": nn.BatchNorm1d(2).state_dict(),
}


def test_plain_data_passes() -> None:
    check_pickle(pickled(PLAIN))
    check_values(PLAIN, 1000)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (argparse.Namespace(), "argparse.Namespace"),
        (bytearray(b"x"), "__builtin__.bytearray"),
        (frozenset([1]), "__builtin__.frozenset"),
        (print, "__builtin__.print"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
    ],
)
def test_other_names_are_refused_also_where_the_process_allows_them(value: Any, name: str) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]), pytest.raises(NotPlainError) as caught:
        check_pickle(pickled(value))
    assert str(caught.value) == f"it names {name}"


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_operations_that_pytorch_does_not_write_are_refused(protocol: int) -> None:
    with pytest.raises(NotPlainError, match="its pickle has the operation"):
        check_pickle(pickle.dumps({"a": b"x"}, protocol))


def test_a_codec_that_takes_hours_is_refused() -> None:
    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    with pytest.raises(NotPlainError, match=r"it names _codecs\.encode with other arguments than those for bytes"):
        check_pickle(b"\x80\x02c_codecs\nencode\n" + text("x") + text("punycode") + b"\x86R.")


def test_values_that_unfold_are_counted() -> None:
    doubled: Any = ()
    for _ in range(40):
        doubled = (doubled, doubled)
    with pytest.raises(NotPlainError, match="it unfolds to more than 20,000,000 values"):
        check_pickle(pickled(doubled))
    lists: Any = []
    for _ in range(40):
        lists = [lists, lists]
    assert refusal(lists) == "it unfolds to more than 20,000,000 values"


def test_depth_is_limited() -> None:
    # Python crashes when it hashes 200,000 nested tuples, as it would for a dictionary's key.
    with pytest.raises(NotPlainError, match="it is nested deeper than 100 levels"):
        check_pickle(b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.")
    inner: Any = []
    for _ in range(60):
        inner = [inner]
    outer = inner
    for _ in range(60):
        outer = [outer]
    assert "nested deeper" in refusal([inner, outer])  # the inner one is known by then
    check_values([inner], 1000)


def test_what_holds_itself_is_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert "or holds itself" in refusal(itself)


def test_other_types_and_attributes_are_refused() -> None:
    assert refusal({"x": [object()]}) == "it holds a object"
    hidden = OrderedDict(a=1)
    hidden.items = 3  # type: ignore[method-assign, assignment]
    assert refusal([hidden]) == "it holds a dictionary with attributes"
    named = OrderedDict(a=1)
    named._metadata = {"x": object()}  # type: ignore[attr-defined]
    assert refusal(named) == "it holds a object"


def test_tensors_may_share_memory_but_not_fill_it() -> None:
    check_values([torch.zeros(1).expand(1000)] * 10, 1000)
    assert refusal(torch.zeros(1).expand(10**9)) == "its tensors unfold to more than 10 times its size"
