"""Remember how an object was made, so that a checkpoint of a run started from Python can make it again."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from fulgurite.console import note
from fulgurite.plain_yaml import write_yaml


class Recorded:
    """Keep the constructor's arguments, defaults included, in ``init_args``."""

    init_args: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        for name, parameter in list(signature.parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
            elif parameter.kind is parameter.VAR_POSITIONAL and name in given:
                given[f"*{name}"] = given.pop(name)
        # nn.Module.__setattr__ wants its __init__ run first.
        object.__setattr__(self, "init_args", _defaults(cls) | dict(list(given.items())[1:]))
        return self


def _defaults(cls: type) -> dict[str, Any]:
    """Return the default arguments of a class; where it takes ``**options``, those of the parent that gets them too."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        if "__init__" in vars(owner):
            parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())
            found |= {one.name: one.default for one in parameters if one.default is not one.empty and one.name not in found}
            if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                break
    return found


def class_config(made: Recorded) -> dict[str, Any]:
    """Return ``{class_path, init_args}`` in plain values, as YAML would say it.

    Raises:
        TypeError: if an argument is a function or object that a configuration cannot name, such as a lambda
    """
    for name in made.init_args:
        if name.startswith("*"):
            raise TypeError(f"{type(made).__name__} was given {name} by position: pass them by name")
    return {"class_path": _path(type(made)), "init_args": {name: _plain(value) for name, value in made.init_args.items()}}


def _path(cls: type) -> str:
    """Return the shortest dotted path of a class, as jsonargparse writes it."""
    parts = cls.__module__.split(".")
    packages = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    package = next((name for name in packages if getattr(sys.modules.get(name), cls.__qualname__, None) is cls), None)
    if package in (None, "__main__"):
        raise TypeError(f"{cls.__module__}.{cls.__qualname__} cannot be found again by its name: move it to a module")
    return f"{package}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.name
    # Also NumPy's numbers and subclasses of str, which YAML would write as Python objects.
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return _plain_class(value, {})
    if isinstance(value, partial) and isinstance(value.func, type) and not value.args:
        return _plain_class(value.func, value.keywords)
    if isinstance(value, Recorded):
        return class_config(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    raise TypeError(f"{value!r} cannot be written to a configuration: use a class or functools.partial of a class")


def _plain_class(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    init_args: dict[str, Any] = {}
    # The first two parameters are the caller's: classes and channels, or optimizer and steps.
    open_ones = list(inspect.signature(cls).parameters)[:2]
    for name, value in _defaults(cls).items():
        with suppress(TypeError):  # a default that YAML cannot say is the class's own affair
            if name not in open_ones:
                init_args[name] = _plain(value)
    return {"class_path": _path(cls), "init_args": init_args | {name: _plain(value) for name, value in given.items()}}


def run_config(trainer: Recorded, task: Any, data: Any, callbacks: Mapping[str, Any]) -> str:
    """Return the YAML text that the command line would need to do what these objects do.

    Args:
        trainer: as made
        task: the same
        data: the same, or None
        callbacks: those with a section of their own, by its name

    Raises:
        TypeError: if the task or the data cannot be named
    """
    if not isinstance(task, Recorded):
        raise TypeError(f"{type(task).__name__} does not remember its arguments: derive it from fulgurite.recorded.Recorded")
    seed = os.environ.get("PL_GLOBAL_SEED")
    sections: dict[str, Any] = {"seed_everything": int(seed) if seed else False, "trainer": {}, "model": class_config(task)}
    for name, value in trainer.init_args.items():
        with suppress(TypeError):  # an object for the Trainer, such as a callback, does not change what the network is
            sections["trainer"][name] = _plain(value)
    for name, callback in callbacks.items():
        sections[name] = {key: _plain(value) for key, value in callback.init_args.items()}
    sections["model"]["init_args"].pop("spec", None)  # comes from the data, as in every configuration
    if isinstance(data, Recorded):
        try:
            sections["data"] = class_config(data)
        except TypeError as error:  # the network can be loaded all the same
            note("config", f"data is not recorded, so a checkpoint cannot bring it along: {error}")
    return write_yaml(sections)
