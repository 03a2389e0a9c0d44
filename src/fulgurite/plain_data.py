"""Make sure that a checkpoint's pickle makes nothing but plain data, and no more of it than the file has room for."""

from __future__ import annotations

import pickletools
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

_MOST_VALUES = 20_000_000  # of a large checkpoint with its optimizer a million; 2 s to look through so many
_MOST_LEVELS = 100
_UNFOLDED = 10  # times the file's size: views may share their memory
_SLACK = 100_000_000  # bytes
# Fewer than PyTorch allows, whatever else in this process has told it to allow.
_NAMES = {
    *("collections OrderedDict", "collections Counter", "_codecs encode"),
    *("__builtin__ set", "builtins set", "__builtin__ complex", "builtins complex"),
    *("torch device", "torch Size", "torch.storage UntypedStorage", "torch.serialization _get_layout"),
    *(f"torch._utils _rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "sparse_tensor")),
}
# What torch.save writes for these.
_OPERATIONS = re.compile(
    "PROTO|STOP|MARK|GLOBAL|REDUCE|BUILD|BINPERSID|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|NONE|NEW(TRUE|FALSE)|"
    "BININT[12]?|LONG1|BINFLOAT|BINUNICODE|(LONG_)?BIN(GET|PUT)"
)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set, torch.Size)
_LEAVES = {type(None), bool, int, float, complex, str, bytes, Tensor, torch.nn.Parameter, torch.dtype, torch.device}


_TOO_MANY = f"it unfolds to more than {_MOST_VALUES:,} values"
_TOO_DEEP = f"it is nested deeper than {_MOST_LEVELS} levels, or holds itself"


class NotPlainError(Exception):
    """A file holds what no checkpoint needs; the text says what."""


@dataclass
class _Value:
    """What the pickle machine would have on its stack: how many values, how deep, and the text or the parts that make it."""

    size: int = 1
    height: int = 0
    text: str = ""
    parts: list[_Value] = field(default_factory=list)


def check_pickle(pickled: bytes | IO[bytes], *, names_too: bool = True) -> None:
    """Look through a pickle without making anything of it; of a file, the next one.

    Values are counted as often as they are referred to: of tuples that each hold the next one twice, 40 are a million
    million values. As the key of a dictionary they would make PyTorch hang, and 200,000 nested tuples make Python crash.

    Args:
        pickled: the pickle
        names_too: refuse other functions and classes than those of plain data; else that is left to PyTorch

    Raises:
        NotPlainError: if it names such, or has too many values
        ValueError: if it is no pickle
    """
    stack: list[_Value] = []
    marks: list[list[_Value]] = []
    memo: dict[Any, _Value] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        if names_too and not _OPERATIONS.fullmatch(name):
            raise NotPlainError(f"its pickle has the operation {name}")
        if name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "GLOBAL":
            stack.append(_Value(text=_plain_name(str(argument)) if names_too else str(argument)))
        elif operation.stack_before and operation.stack_before[-1] is pickletools.stackslice:
            parts, stack = stack, marks.pop()
            if operation.stack_before[0] is pickletools.markobject:
                stack.append(_Value())
            _put_into(stack[-1], parts)
        else:
            count = len(operation.stack_before)
            parts = [stack.pop() for _ in range(count)][::-1]
            if name == "REDUCE" and parts[0].text == "_codecs encode":
                _require_latin1(parts[1])
            made = (
                parts[0] if name in ("APPEND", "SETITEM", "BUILD") else _Value(text=argument if isinstance(argument, str) else "")
            )
            _put_into(made, [part for part in parts if part is not made])
            stack += [made] * len(operation.stack_after)


def _put_into(value: _Value, parts: list[_Value]) -> None:
    value.parts = parts
    value.size += sum(part.size for part in parts)
    value.height = max([value.height, *(1 + part.height for part in parts)])
    if value.size > _MOST_VALUES:
        raise NotPlainError(_TOO_MANY)
    if value.height > _MOST_LEVELS:
        raise NotPlainError(_TOO_DEEP)


def _plain_name(name: str) -> str:
    module, _, attribute = name.partition(" ")
    of_tensors = module == "torch" and (attribute.endswith("Storage") or isinstance(getattr(torch, attribute, None), torch.dtype))
    if name not in _NAMES and not of_tensors:
        raise NotPlainError(f"it names {module}.{attribute}")
    return name


def _require_latin1(arguments: _Value) -> None:
    # How pickle writes bytes; other codecs take hours for a long text.
    if len(arguments.parts) != 2 or arguments.parts[1].text != "latin1":
        raise NotPlainError("it names _codecs.encode with other arguments than those for bytes")


def check_values(value: Any, file_size: int) -> None:
    """Look through what a checkpoint's pickle has made.

    Args:
        value: what was read
        file_size: in bytes

    Raises:
        NotPlainError: if a value is of no plain type or holds itself, or there are too many, too deep or too large ones
    """
    known: dict[int, tuple[int, int]] = {}
    bytes_left = _UNFOLDED * file_size + _SLACK

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Return the number of values, and of levels below this one."""
        nonlocal bytes_left
        if type(value) in _LEAVES:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                bytes_left -= value.numel() * value.element_size()
                if bytes_left < 0:
                    raise NotPlainError(f"its tensors unfold to more than {_UNFOLDED} times its size")
            return 1, 0
        if type(value) not in _CONTAINERS:
            raise NotPlainError(f"it holds a {type(value).__name__}")
        if id(value) in known:
            size, height = known[id(value)]
        elif depth > _MOST_LEVELS:
            raise NotPlainError(_TOO_DEEP)
        else:
            if getattr(value, "__dict__", {}).keys() - {"_metadata"}:  # that of a module's state dict
                raise NotPlainError("it holds a dictionary with attributes")
            inside = [*value, *value.values(), getattr(value, "_metadata", None)] if isinstance(value, dict) else value
            parts = [measure(part, depth + 1) for part in inside]
            size, height = 1 + sum(size for size, _ in parts), 1 + max((height for _, height in parts), default=0)
            known[id(value)] = size, height
        if size > _MOST_VALUES:
            raise NotPlainError(_TOO_MANY)
        if depth + height > _MOST_LEVELS:
            raise NotPlainError(_TOO_DEEP)
        return size, height

    measure(value, 0)
