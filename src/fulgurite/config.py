"""Configuration in layers: a checkpoint's, then files, then flags; each value remembers where it came from.

jsonargparse types and instantiates the result. The merging is done here for two reasons: a value must not outlive the
class it was meant for, and an error must be able to name the file it came from.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from os import PathLike
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml
from jsonargparse import Namespace

from fulgurite.errors import UserError, did_you_mean, name_list
from fulgurite.plain_yaml import PlainLoader

Tree = dict[str, Any]
_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}


@dataclass
class Config:
    """Nested values, and for each dotted path the name of the layer that set it."""

    tree: Tree = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def add_layer(self, layer: Tree, origin: str) -> None:
        """Put ``layer`` on top; a section without a line in it says nothing."""
        _merge(self.tree, {key: value for key, value in layer.items() if value is not None or key not in self.tree})
        for path, _ in leaves(layer):
            self.origins[path.replace("+", "")] = origin

    def set(self, path: str, text: str, origin: str) -> None:
        """Set one dotted path, as a flag does; ``init_args`` may be left out of it."""
        value = _flag_value(text)
        if path.endswith(".class_path"):  # not beside what the old class was given
            path, value = path.removesuffix(".class_path"), {"class_path": value}
        *parents, last = path.split(".")
        node = self.tree
        trail: list[str] = []
        for name in parents:
            node = _child(_holder(node, name, trail), name)
            trail.append(name)
        node = _holder(node, last, trail)
        _merge(node, {last: value})
        self.origins[".".join([*trail, last]).replace("+", "")] = origin

    def origin(self, path: str) -> str:
        """Return the layer that set ``path`` or its class, or the nearest to it; empty if none did."""
        parents = [path.rsplit(".", number)[0] for number in range(1, path.count(".") + 1)]
        below = [name for name in self.origins if name.startswith(f"{path}.")]
        names = [path, f"{path}.class_path", *parents, *reversed(below)]
        return next((self.origins[name] for name in names if name in self.origins), "")

    def locate(self, text: str) -> str:
        """Put the layer and the whole key before a message such as ``batch_size is 0; ...``, where only one is meant."""
        name, verb, rest = text.partition(" is ")
        paths = [path for path, _ in leaves(self.tree) if path == name or path.endswith(f".{name}")]
        return f"{self.origin(paths[0])}: {paths[0]}{verb}{rest}" if verb and len(paths) == 1 else text


def _flag_value(text: str) -> Any:
    # Only what cannot be told from text later: each key's type decides whether 3 or true stays text.
    if text in ("null", "~") or text[:1] in ("[", "{"):
        with suppress(yaml.YAMLError):
            return yaml.load(text, PlainLoader)  # it is a SafeLoader
    return text


def _holder(node: Tree, name: str, trail: list[str]) -> Tree:
    """Return the mapping that holds ``name``: the arguments of a class, unless the name belongs beside its path."""
    if "class_path" not in node or name.rstrip("+") in _CLASS_KEYS:
        return node
    trail.append("init_args")
    return _child(node, "init_args")


def _child(node: Tree, name: str) -> Tree:
    """Return the mapping under ``name``, in a list that of its last item."""
    present = node.get(name)
    if present is None and f"{name}+" in node:
        name = f"{name}+"
        present = node[name]
    holder: Any = node
    key: Any = name
    if isinstance(present, list) and present:
        # `--trainer.callbacks+ EarlyStopping --trainer.callbacks.patience 5`
        holder, key, present = present, -1, present[-1]
    if not isinstance(present, dict):
        # `--model.network ResNet --model.network.width 8`: the class came first, as its bare name.
        present = holder[key] = {"class_path": present} if isinstance(present, str) else {}
    return present


def _merge(base: Tree, over: Tree) -> None:
    for key, value in over.items():
        if isinstance(key, str) and key.endswith("+"):
            _append(base, key, value)
            continue
        base.pop(f"{key}+", None)
        present = base.get(key)
        if isinstance(present, str) and isinstance(value, dict) and "init_args" in value:
            present = base[key] = {"class_path": present}
        if isinstance(present, dict) and isinstance(value, str) and _same_class(present.get("class_path"), value):
            continue
        if isinstance(present, dict) and isinstance(value, dict) and _fits(present, value):
            _merge(present, {k: v for k, v in value.items() if k != "class_path" or "class_path" not in present})
        else:
            base[key] = _fresh(value)


def _append(base: Tree, key: str, value: Any) -> None:
    # Without a list to append to the key keeps its +: the default it adds to is known to the parser, not here.
    name = key[:-1] if key[:-1] in base else key
    present = base.get(name)
    items = present if isinstance(present, list) else [] if present is None else [present]
    base[name] = [*items, *_fresh(value if isinstance(value, list) else [value])]


def _fits(present: Tree, over: Tree) -> bool:
    # Values of the old class must not reach the new one, not even where it has a parameter of the same name.
    return "class_path" not in present or "class_path" not in over or _same_class(present["class_path"], over["class_path"])


def _same_class(old: Any, new: Any) -> bool:
    if old == new or not isinstance(old, str) or not isinstance(new, str):
        return bool(old == new)
    if old.rpartition(".")[2] != new.rpartition(".")[2]:
        return False
    if "." not in old or "." not in new:
        return True  # a bare name means the class that is there
    try:
        return resolve_name(old) is resolve_name(new)  # torch.optim.SGD is torch.optim.sgd.SGD
    except (ImportError, AttributeError, ValueError):
        return False


def _fresh(value: Any) -> Any:
    if not isinstance(value, dict):
        return copy.deepcopy(value)
    fresh: Tree = {}
    _merge(fresh, value)
    return fresh


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted path and its value; an empty mapping is a value."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def differences(old: Tree, new: Tree) -> list[tuple[str, Any, Any]]:
    """Return ``(path, old, new)`` for each value of ``new`` that ``old`` has another value for, or none."""
    before = dict(leaves(old))
    return [(path, before.get(path), value) for path, value in leaves(new) if before.get(path) != value]


def plain(value: Any) -> Any:
    """Return what YAML would say for a parsed value.

    jsonargparse's own dump stops at some defaults and writes others as text that it cannot read back.
    """
    if isinstance(value, Namespace | dict):
        kept = {}
        for key, item in dict(vars(value) if isinstance(value, Namespace) else value).items():
            with suppress(TypeError):  # a default without a word for it, such as a torch.device, stays the default
                kept[key] = plain(item)
        return kept
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PathLike | timedelta):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"{type(value).__name__} cannot be written as YAML")


def read_file(path: str) -> Tree:
    """Read a YAML file into nested values.

    Raises:
        UserError: if it is missing or is not a YAML mapping; the text names the line
    """
    file = Path(path).expanduser()
    try:
        tree = copy.copy(yaml.load(file.read_text(encoding="utf-8"), PlainLoader))  # it is a SafeLoader
        list(leaves(tree))
    except FileNotFoundError:
        siblings = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UserError(f"no configuration file {path}{did_you_mean(file.name, siblings, cutoff=0.8)}") from None
    except IsADirectoryError:
        files = sorted(other.name for other in file.glob("*.yaml"))
        inside = f"; in it are {name_list(files)}" if files else ""
        raise UserError(f"{path} is a folder, not a configuration file{inside}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a configuration: it is not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: {getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise UserError(f"{path}: an alias stands inside the anchor it refers to") from None
    if not isinstance(tree, dict | None):
        raise UserError(f"{path} is not a configuration: it holds no keys with values, such as `trainer:`")
    for key in tree or {}:
        if isinstance(key, str) and "." in key:
            first, _, rest = key.partition(".")
            raise UserError(f"{path}: {key} has to be nested: {rest} in a line of its own, indented under {first}:")
    return tree or {}
