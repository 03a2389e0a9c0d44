"""YAML that holds nothing but plain values, read and written: no tags, and in a stranger's text no aliases either."""

from __future__ import annotations

from typing import Any

import yaml

from fulgurite.errors import UserError

_LONGEST = 2_000_000  # characters, which PyYAML reads in 7 s; a run's configuration has a few thousand
_DEEPEST = 50


class PlainLoader(yaml.SafeLoader):
    """YAML without tags or dates; a key given twice is an error, where PyYAML keeps the last in silence."""

    # `experiment: 2024-05-17` is a name
    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping.

        Raises:
            yaml.constructor.ConstructorError: if a key is there twice, or is no plain value
        """
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key_node.value}' is given twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _refuse_tag(loader: PlainLoader, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(None, None, f"tags such as {node.tag} are refused", node.start_mark)


PlainLoader.add_constructor(None, _refuse_tag)


class _Unfolded:
    """Mix into a loader that is to make each value once: text of a few lines can stand for more than any memory holds."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse what would be made more than once, or too deep."""
        event = self.peek_event()  # type: ignore[attr-defined]  # the loader's
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are refused", event.start_mark)
        if self._depth == _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"it is nested deeper than {_DEEPEST} levels", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)  # type: ignore[misc]  # the loader's
        self._depth -= 1
        return node


class _StrangersLoader(_Unfolded, PlainLoader):
    pass


class _TextLoader(_Unfolded, yaml.BaseLoader):
    """Make nothing but text, lists and mappings."""


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_yaml(text: str) -> Any:
    """Read a stranger's YAML as plain values.

    Raises:
        UserError: if it holds tags, anchors or aliases, or is too long or too deep
    """
    if len(text) > _LONGEST:
        raise UserError(f"it has {len(text):,} characters, more than the {_LONGEST:,} that are read")
    try:
        return yaml.load(text, _StrangersLoader)  # it is a SafeLoader
    except yaml.YAMLError as error:
        raise UserError(str(getattr(error, "problem", None) or error)) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, say
        raise UserError(str(error)) from error


def structure_in(text: str) -> dict[str, Any] | list[Any] | None:
    """Return the mapping or list that a text is in YAML, with all else in it left as text; None if it is neither.

    Raises:
        UserError: if it is one that cannot be looked through
    """
    if not any(sign in text for sign in "{[:-?"):  # no other text is one, and most are short names
        return None
    try:
        if len(text) > _LONGEST:
            raise RecursionError
        read = yaml.load(text, _TextLoader)
    except yaml.composer.ComposerError as error:
        raise UserError(f"{text[:40]!r} cannot be looked through: {error.problem}") from error
    except RecursionError as error:
        raise UserError(f"{text[:40]!r} cannot be looked through: it is too long or too deep") from error
    except (yaml.YAMLError, ValueError):
        return None
    return read if isinstance(read, dict | list) else None


def write_yaml(value: Any) -> str:
    """Return plain values as YAML that :func:`read_yaml` takes: what is there twice is written twice."""
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
