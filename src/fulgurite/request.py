"""What a user asked for on the command line, before any of it is looked up or checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fulgurite.errors import UserError

_NEED_VALUE = ("config", "trust", "ckpt_path")


@dataclass
class Request:
    """A verb, its configuration files and its flags, in the order given."""

    verb: str
    files: list[str] = field(default_factory=list)
    flags: list[tuple[str, str]] = field(default_factory=list)
    trust: list[str] = field(default_factory=list)
    print_config: bool = False
    help: list[str] = field(default_factory=list)


def read_request(verb: str, argv: Sequence[str]) -> Request:
    """Sort the arguments after the verb; a flag without a value means true.

    Raises:
        UserError: if an argument is not a flag, or a flag lacks what it needs
    """
    request = Request(verb)
    waiting = list(argv)
    while waiting:
        argument = waiting.pop(0)
        if argument in ("-h", "--help") or argument.partition("=")[0].endswith(".help"):
            request.help = [argument, *waiting]
            break
        name, equals, value = argument.partition("=")
        key = "config" if name == "-c" else name.removeprefix("--").replace("-", "_")
        if name != "-c" and not (name.startswith("--") and key.strip("_.+")):
            raise UserError(f"unexpected argument '{argument}'\nfiles go behind -c, values behind --KEY")
        if key == "print_config" and not equals:
            request.print_config = True
            continue
        if not equals:
            if waiting and not waiting[0].startswith("--") and waiting[0] != "-c":
                value = waiting.pop(0)
            elif key not in _NEED_VALUE:
                value = "true"
        if not value and key in _NEED_VALUE:
            raise UserError(f"{name} needs a value")
        if key == "config":
            request.files.append(value)
        elif key == "trust":
            request.trust.append(value)
        else:
            request.flags.append((key, value))
    return request
