"""Refuse what a checkpoint has no business naming, before anything is imported or opened."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import isroutine
from pathlib import Path
from typing import Any

from fulgurite.console import note
from fulgurite.errors import UserError, shown
from fulgurite.plain_yaml import read_yaml, structure_in

# Not `torch.` as a whole: torch.hub and torch.utils.cpp_extension download and build code.
TRUSTED = (
    "fulgurite.data",
    "fulgurite.models",
    "fulgurite.tasks",
    "torch.nn",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms",
)
# What of a checkpoint's trainer section decides where this run writes, or could make it send things away.
_PLACES = ("runs_dir", "default_root_dir", "num_nodes")
_OBJECTS = ("callbacks", "plugins", "profiler", "model_registry")
_LOGGERS = ("csv", "tensorboard")
# The same of its data section: what is written where, and which server is asked with this user's keys.
_LEVELS = ("init_args", "dict_kwargs")
_DATA_PLACES = ("cache_dir", "download", "storage_options")
_DATA_ENDINGS = ("csv", "json", "jsonl", "npy", "npz", "parquet", "tsv", "txt", "yaml", "yml")


class NoFiles:
    """Mix into a jsonargparse parser, which would open any value that happens to be the name of a file, or a URL."""

    def _add_signature_parameter(self, *args: Any, **options: Any) -> None:
        super()._add_signature_parameter(*args, **options | {"sub_configs": False})  # type: ignore[misc]  # the parser's


def check_trusted(config: Any, trusted: Sequence[str] = (), *, source: str = "the checkpoint") -> None:
    """Check each class path anywhere in a checkpoint's configuration.

    Args:
        config: nested values
        trusted: packages the user trusts besides PyTorch's and this project's
        source: names the checkpoint in an error

    Raises:
        UserError: if a path leaves the trusted packages, or names anything but a class that is defined in one
    """
    for package in trusted:
        if not _is_dotted(f"{package}.x"):
            raise UserError(f"--trust takes the name of a package, such as my_project, not '{package}'")
    allowed = (*TRUSTED, *trusted)
    for key, path, is_class_path in _code_paths(config, ""):
        what = f"{source}: {shown(key)} names {shown(repr(path))}"
        if not isinstance(path, str) or not _is_dotted(path):
            raise UserError(f"{what}, which is not the dotted name of a class")
        module, _, name = path.rpartition(".")
        if not _within(module, allowed):
            raise UserError(
                f"{what}, which is not in a trusted package; nothing was imported\ntrusted: {', '.join(allowed)}{_advice(module)}"
            )
        # A trusted module may have `os` among its names: only what lives in trusted code may be used.
        found = _find(module, name, what)
        if found is None and not is_class_path:
            continue  # a file's name, after all
        home = getattr(found, "__module__", "")
        # A function of PyTorch's may do anything, such as download; those of a package that the user trusts are theirs.
        if not isinstance(found, type) and not (isroutine(found) and _within(home, trusted)):
            raise UserError(f"{what}, which is not a class")
        if not _within(home, allowed):
            raise UserError(f"{what}, which comes from {home}{_advice(home)}")


def trust_flags(config: str | None, sections: Sequence[str] = ()) -> list[str]:
    """Return the flags with which the checkpoints of a run with this configuration (YAML text) can be used.

    Args:
        config: the configuration
        sections: those that the command needs; empty for all
    """
    tree = read_yaml(config or "")
    if sections and isinstance(tree, dict):
        tree = {name: tree[name] for name in sections if name in tree}
    paths = (path for _, path, is_class_path in _code_paths(tree, "") if is_class_path)
    own = {str(path).partition(".")[0] for path in paths if not _within(str(path).rpartition(".")[0], TRUSTED)}
    return [flag for package in sorted(own - {"lightning"}) for flag in ("--trust", package)]


def split_settings(section: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """Part a checkpoint's settings: those that a run may take over, and the names of the objects that it may not."""
    kept = {name: value for name, value in section.items() if name not in (*_PLACES, *_OBJECTS) and _is_setting(name, value)}
    return kept, [str(name) for name, value in section.items() if value and name not in kept and name not in _PLACES]


def without_places(data: dict[str, Any], *, source: str) -> dict[str, Any]:
    """Return a checkpoint's data section without what decides where this run writes, and what it asks whom.

    Args:
        data: the section
        source: names the checkpoint in an error

    Raises:
        UserError: if something that never ends, such as a device, is to be read
    """
    asked: list[str] = []
    kept = _without(data, _DATA_PLACES, asked, f"{source}: data")
    if told := sorted({name for name in asked if name != "cache_dir"}):
        note("checkpoint", f"data.{' and data.'.join(told)} are not taken over, as it may come from a stranger")
    return dict(kept)


def _without(value: Any, names: Sequence[str], dropped: list[str], place: str) -> Any:
    """Return a value without these names at any depth, also as ``init_args.name`` or ``name+``."""
    if isinstance(value, list):
        return [_without(item, names, dropped, place) for item in value]
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            name = str(key).rpartition(".")[2].rstrip("+")
            if name not in names:
                kept[key] = _without(item, names, dropped, place if name in _LEVELS else f"{place}.{shown(name)}")
            elif item:
                dropped.append(name)
        return kept
    if isinstance(value, str):
        if _is_endless(value):
            raise UserError(f"{place} is {shown(value)}, which is neither a file nor a folder")
        found: list[str] = []
        if (structure := structure_in(value)) is not None:
            _without(structure, names, found, place)
        if found:
            raise UserError(f"{place} has {found[0]} in the text {shown(value)!r}")
    return value


def _is_endless(path: str) -> bool:
    try:
        place = Path(path).expanduser()
        return place.exists() and not place.is_file() and not place.is_dir()
    except (OSError, ValueError, RuntimeError):  # no path at all
        return False


def _is_setting(name: Any, value: Any) -> bool:
    if name == "logger":
        names = value if isinstance(value, list) else [value]
        return value is None or isinstance(value, bool) or all(one in _LOGGERS for one in names)
    parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    of_numbers = bool(parts) and all(isinstance(part, int | float) for part in parts)
    return str(name).isidentifier() and (of_numbers or isinstance(value, bool | int | float | str | None))


def _advice(module: str) -> str:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or not module:
        return ""  # it has nothing that a network is made of
    shared = any(package.startswith(f"{top}.") for package in TRUSTED)  # torch as a whole is too much
    return f"\nif you trust whoever wrote it: --trust {module if shared else top}"


def _code_paths(value: Any, key: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield the key, the path and whether it is a class path, of all that could make jsonargparse import something."""
    if isinstance(value, dict):
        for name, item in value.items():
            place = f"{key}.{name}" if key else str(name)
            if name == "class_path":
                yield place, item, True
            else:
                yield from _code_paths(item, place)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _code_paths(item, f"{key}.{number}")
    elif isinstance(value, str):
        if _names_code(value):
            yield key, value, False
        else:
            yield from _code_paths(structure_in(value), key)  # jsonargparse reads text as YAML where a type asks for more


def _names_code(text: str) -> bool:
    # A parameter that takes a callable also takes its dotted name as a bare string; `photos.csv` must stay a file name.
    if not _is_dotted(text):
        return False
    top, _, rest = text.partition(".")
    if top in (*sys.stdlib_module_names, "test") and rest in _DATA_ENDINGS:  # `test.csv`: Python has a module `test`
        return False
    return _can_import(top, rest)


def _can_import(top: str, rest: str) -> bool:
    """Return whether a module that runs code is found on the way; looking it up runs none."""
    try:
        spec = find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return True
    if spec is None:
        return False
    if spec.origin is not None:
        return True
    following, _, rest = rest.partition(".")  # a folder without __init__.py: importing it runs nothing yet
    return bool(following) and _can_import(f"{top}.{following}", rest)


def _is_dotted(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))


def _within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _find(module: str, name: str, what: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError as error:
        raise UserError(f"{what}, which cannot be imported: {error}") from error
