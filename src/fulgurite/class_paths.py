"""Find the classes that a configuration names, by their dotted path or their bare name."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from jsonargparse._typehints import get_all_subclass_paths

# A configuration may call what is in these by its bare name.
import fulgurite.data
import fulgurite.models
import fulgurite.tasks.schedules  # noqa: F401  # see above
from fulgurite.errors import did_you_mean

_OWN = f"{__name__.partition('.')[0]}."


def find_class(path: Any, kind: Any) -> type | Callable[..., Any] | str:
    """Return the class, or the function that makes one, that a path stands for, or in words what is wrong with it.

    Args:
        path: as the user wrote it
        kind: type that the class is for; its subclasses are where the nearest name is looked for
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        return "is not a dotted name, such as torch.optim.SGD"
    if path.endswith((".yaml", ".yml")):
        return "is not a class: a configuration file goes behind -c"
    module, _, name = path.rpartition(".")
    if not module:
        if several := _paths_of(name, kind):
            return f"could be {' or '.join(several)}"
        return f"does not exist{did_you_mean(name, [path.rpartition('.')[2] for path in get_all_subclass_paths(kind)])}"
    try:
        holder = import_module(module)
    except ImportError as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing and f"{module}.".startswith(f"{missing}."):
            return f"does not exist: {_nearest_module(module)}"
        return f"cannot be imported: {error}"
    found = getattr(holder, name, None)
    if found is None:
        return f"does not exist{did_you_mean(name, [name for name, _ in inspect.getmembers(holder, inspect.isclass)])}"
    return found if inspect.isclass(found) or inspect.isroutine(found) else "is not a class"


def _nearest_module(path: str) -> str:
    parent, _, name = path.rpartition(".")
    try:
        package = import_module(parent) if parent else None
    except ImportError:
        return _nearest_module(parent)
    inside = [found.name for found in pkgutil.iter_modules(getattr(package, "__path__", None) if package else None)]
    return f"there is no module {path}{did_you_mean(name, inside)}"


def looks_like_class(text: str) -> bool:
    """Return whether a text is a dotted name, or a bare one with a capital."""
    parts = text.split(".")
    return all(part.isidentifier() for part in parts) and (len(parts) > 1 or text[0].isupper())


def in_full(value: Any, kind: Any) -> Any:
    """Write out bare class names, so that the project's own come first where another library has the same name."""
    if isinstance(value, list):
        return [in_full(item, kind) for item in value]
    name = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(name, str) or not looks_like_class(name) or "." in name:
        return value
    paths = _paths_of(name, kind)
    if len(paths) != 1:
        return value
    return {**value, "class_path": paths[0]} if isinstance(value, dict) else {"class_path": paths[0]}


def _paths_of(name: str, kind: Any) -> list[str]:
    """Return the paths that a bare name may mean: the project's own, or else PyTorch's, or else any; of these the shortest."""
    paths = get_all_subclass_paths(kind, include_abstract=True, closed_types=False)
    ranked = {
        path: (not path.startswith(_OWN), not path.startswith("torch."), path.count("."))
        for path in paths
        if path.rpartition(".")[2] == name
    }
    return [path for path, rank in ranked.items() if rank == min(ranked.values())]
