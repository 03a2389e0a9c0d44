"""Word what the user did wrong: what was given, what is allowed, the nearest name, the next command."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake the user can mend; shown without a traceback, with exit status 2."""

    exit_status = 2
    prefix = "error"


class RunStopped(UserError):
    """A signal stopped the run.

    The exit status is 75, "try again later", where it can go on from a checkpoint: a job script knows by it to put the job
    back into the queue. Otherwise it is 128 + the signal's number.
    """

    exit_status = 75  # os.EX_TEMPFAIL
    prefix = "stopped"


class FaultsFound(UserError):
    """A check is through and has found something; it has said what."""

    exit_status = 1
    prefix = "found"


class MissingExtraError(UserError):
    """An optional package is not installed; the text names the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f'{purpose} needs {package}: pip install "fulgurite[{extra}]"')


def did_you_mean(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest allowed name, or an empty string if none is as near as ``cutoff``."""
    by_lower_case = {other.lower(): other for other in allowed}
    near = get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=cutoff)
    return f" (did you mean '{by_lower_case[near[0]]}'?)" if near else ""


def name_list(names: Iterable[str], limit: int = 8) -> str:
    """Join at most ``limit`` names with commas and say how many more there are."""
    names = list(names)
    more = f", ... ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(map(shown, names[:limit])) + more


def shown(text: object, widest: int = 200) -> str:
    """Return a text that may be a stranger's as one line of bounded length, in which nothing steers the terminal."""
    line = str(text)[: widest + 1]
    line = line if line.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)
    return line if len(line) <= widest else f"{line[:widest]} ..."
