"""Find every mistake of a configuration at once, each in a line that names the file, the key and what is allowed.

jsonargparse stops at the first one and prints the whole model with it; it stays the judge of each single value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from enum import Enum
from functools import partial
from os import PathLike
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from jsonargparse._actions import ActionConfigFile, _ActionPrintConfig
from jsonargparse._typehints import get_class_types

from fulgurite.class_paths import find_class, in_full, looks_like_class
from fulgurite.config import Config, Tree
from fulgurite.errors import did_you_mean, name_list

_MOST_MISTAKES = 20
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    PathLike: "a path",
    timedelta: "a duration",
    dict: "keys with values",
    list: "a list",
    Any: "anything",
}


def find_problems(parser: ArgumentParser, config: Config) -> list[str]:
    """Return one line for each mistake, or nothing; write out class names and lists that a layer gave in short."""
    return list(_Check(parser, config).section(parser, config.tree, dest="", path=""))


class _Check:
    def __init__(self, parser: ArgumentParser, config: Config) -> None:
        self.config = config
        links = getattr(parser, "_links_group", None)
        self.linked = {link.target[0]: link.source[0][0] for link in (links._group_actions if links else [])}

    def problem(self, path: str, text: str) -> str:
        origin = self.config.origin(path)
        return f"{origin}: {path} {text}" if origin else f"{path} {text}"

    def section(self, parser: ArgumentParser, values: Tree, dest: str, path: str) -> Iterator[str]:
        """Check the keys of one parser, or of one of its sections."""
        actions = {action.dest: action for action in parser._actions if _is_key(action)}
        prefix = f"{dest}." if dest else ""
        allowed = sorted({name[len(prefix) :].partition(".")[0] for name in actions if name.startswith(prefix)})
        for key, value in list(values.items()):
            name = str(key).removesuffix("+")
            here, place = f"{prefix}{name}", f"{path}.{name}" if path else name
            inside = sorted(other[len(here) + 1 :].partition(".")[0] for other in actions if other.startswith(f"{here}."))
            if name not in allowed:
                text = f"is not a key{did_you_mean(name, allowed)}"
                yield self.problem(place, text if "did you mean" in text else f"{text}; allowed: {name_list(allowed, 12)}")
            elif place in self.linked:
                yield self.problem(place, f"is filled in from {self.linked[place]}; take it out")
            elif not inside:
                if name != key:  # `callbacks+`, and no list so far
                    default = actions[here].default
                    if not isinstance(default, list | None):
                        yield self.problem(place, f"is {_short(default)} by default, which is no list to add to; give the list")
                        continue
                    values[name] = [*(default or []), *values.pop(key)]
                yield from self.value(parser, actions[here], values, name, place)
            elif isinstance(value, dict):
                yield from self.section(parser, value, here, place)
            elif value is None:
                values[name] = {}  # `trainer:` with every line below it commented out
            else:
                yield self.problem(place, f"is {_short(value)}; it is a section with keys such as {inside[0]}")

    def value(self, parser: ArgumentParser, action: Any, values: Tree, key: str, path: str) -> Iterator[str]:
        """Check one value; a class is looked into."""
        kind = getattr(action, "_typehint", None) or action.type
        value = values[key] = in_full(values[key], kind)
        problems: list[str] = []
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            place = f"{path}.{number}" if isinstance(value, list) else path
            if isinstance(item, dict) and "class_path" in item:
                problems += self.class_(item, kind, place, partial(_takes, parser, action, item))
            elif isinstance(item, dict) and "init_args" in item:
                problems.append(self.problem(place, "has init_args and no class_path"))
            elif isinstance(item, str) and _must_be_class(item, kind):
                problems += self.class_({"class_path": item}, kind, place, partial(_takes, parser, action, item))
        if not problems and not _takes(parser, action, value):
            hint = did_you_mean(value, _choices(kind)) if isinstance(value, str) else ""
            problems = [self.problem(path, f"is {_short(value)}{hint}; it takes {_words(kind)}")]
        yield from problems

    def class_(self, value: Tree, kind: Any, path: str, is_taken: Callable[[], bool]) -> Iterator[str]:
        """Check a class path, or that of a function that makes the object, and the arguments for it."""
        named, arguments = value["class_path"], _left_open(kind)
        found = find_class(named, kind)
        if isinstance(found, str):
            yield self.problem(path, f"names {named}, which {found}")
        elif inspect.isabstract(found):
            yield self.problem(path, f"is {named}, an abstract class; it takes {_words(kind)}")
        elif isinstance(found, type) and not _is_of(found, kind):
            yield self.problem(path, f"is {named}; it takes {_words(kind)}")
        elif not _can_be_called_with(found, arguments):
            yield self.problem(path, f"is {named}, which does not take the {arguments} arguments that it is called with")
        elif isinstance(found, type):
            yield from self.arguments(found, value, kind, path)
        elif not is_taken():
            yield self.problem(path, f"is {named}, a function; it takes {_words(kind)}")

    def arguments(self, found: type, value: Tree, kind: Any, path: str) -> Iterator[str]:
        """Check what a class is given."""
        for key in value.keys() - {"class_path", "init_args", "dict_kwargs"}:
            yield self.problem(f"{path}.{key}", "stands beside class_path; it belongs under init_args")
        for key in value.keys() & {"init_args", "dict_kwargs"}:
            if value[key] is None:
                value[key] = {}
            if not isinstance(value[key], dict):
                yield self.problem(f"{path}.{key}", f"is {_short(value[key])}; it takes keys with values")
                return
        init_args = value.get("init_args", {})
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(found, fail_untyped=False, skip={_left_open(kind)} - {0})
        yield from self.section(parser, init_args, dest="", path=f"{path}.init_args")
        given = init_args | value.get("dict_kwargs", {})
        required = [action.dest for action in parser._actions if action.required and not _holds(given, action.dest)]
        if missing := [name for name in required if f"{path}.init_args.{name}" not in self.linked]:
            yield self.problem(path, f"lacks {name_list(missing)}, which {found.__name__} needs")


def _is_of(found: type, kind: Any) -> bool:
    bases = get_class_types(kind)
    return not bases or any(getattr(base, "_is_protocol", False) for base in bases) or issubclass(found, bases)


def _is_key(action: Any) -> bool:
    is_help = any(option == "--help" or option.endswith(".help") for option in action.option_strings)
    return not (is_help or isinstance(action, ActionConfigFile | _ActionPrintConfig))


def _holds(values: Any, dest: str) -> bool:
    for part in dest.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _takes(parser: ArgumentParser, action: Any, value: Any) -> bool:
    if value is None:  # jsonargparse takes it for "not given"
        kind = getattr(action, "_typehint", None) or action.type
        return (action.default is None and not action.required) or bool({"null", "anything"} & {*_alternatives(kind)})
    single = Namespace()  # type: ignore[no-untyped-call]
    single[action.dest] = value
    try:
        parser.validate(single, skip_required=True)
    except (TypeError, ValueError, KeyError):
        return False
    return True


def _must_be_class(text: str, kind: Any) -> bool:
    others = [words for words in _alternatives(kind) if words != "null" and "class_path" not in words]
    return (
        bool(get_class_types(kind)) and "text" not in others and (looks_like_class(text) or (not others and text.isidentifier()))
    )


def _left_open(kind: Any) -> int:
    """Return how many of a class's first parameters the code fills in: two for ``Callable[[int, int], Module]``."""
    if get_origin(kind) is Callable and get_args(kind):
        return len(kind.__args__) - 1
    return max((_left_open(part) for part in get_args(kind)), default=0)


def _can_be_called_with(found: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(found).bind_partial(*[None] * number)
    except TypeError:
        return False
    except ValueError:  # written in C: nobody knows
        return True
    return True


def _choices(kind: Any) -> list[str]:
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return list(kind.__members__)
    if get_origin(kind) is Literal:
        return [choice for choice in get_args(kind) if isinstance(choice, str)]
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _words(kind: Any) -> str:
    """Say what a type takes as a person would."""
    *most, last = dict.fromkeys(_alternatives(kind))
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(kind: Any) -> list[str]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(choice) for choice in parts]
    if Callable in (kind, origin):
        return _alternatives(parts[-1]) if parts else ["the dotted name of a function"]
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return ["keys with values"]
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        return [f"a list (each item {_words(parts[0])})" if parts else "a list"]
    if parts:
        return [words for part in parts for words in _alternatives(part)]
    if kind is bool:
        return ["true", "false"]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return list(kind.__members__)
    for base, words in _WORDS.items():
        if kind is base or (inspect.isclass(kind) and inspect.isclass(base) and issubclass(kind, base)):
            return [words]
    name = getattr(kind, "__name__", str(kind))
    return [f"the class_path of {'an' if name[0] in 'AEIOU' else 'a'} {name}"]


def _short(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def listing(problems: list[str]) -> str:
    """Return one mistake as it is, and several as a list that says how many there are."""
    if len(problems) == 1:
        return problems[0]
    shown = problems[:_MOST_MISTAKES]
    more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    return "\n".join([f"{len(problems)} mistakes in the configuration", *shown, *more])
