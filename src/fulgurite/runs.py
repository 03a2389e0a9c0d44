"""A run is a folder: ``runs/<experiment>/<version>/``, never shared and never reused; and what can be found in one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fulgurite.checkpoint import damage
from fulgurite.console import note
from fulgurite.errors import UserError, did_you_mean, shown

_TRAIN_FIRST = "train one first: fulgurite fit -c configs/experiment/digits.yaml"


def create_run(runs_dir: Path, experiment: str) -> Path:
    """Make and return the folder of a new run; two processes never get the same one.

    Raises:
        UserError: if the experiment's name is not a plain folder name, or the folder cannot be made
    """
    if not re.fullmatch(r"\w[\w.+ -]*", experiment):
        raise UserError(f"experiment is '{shown(experiment)}'; it names a folder: letters, digits, space and _ . + - only")
    folder = runs_dir / experiment
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdecimal()), default=0)
        while True:
            run = folder / f"v{number:03d}"
            try:
                run.mkdir()  # atomic: of two processes that try the same name, one fails and takes the next
                return run
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(
            f"cannot make a run folder in {folder.absolute()}: {error.strerror}\n"
            "choose another place with --trainer.runs_dir FOLDER"
        ) from error


def given_checkpoint(given: str | Path | None, run: Path | None, runs_dir: Path, *, prefer: str) -> Path | None:
    """Return the checkpoint that a verb was given, and say which it is; None for none.

    Args:
        given: a file, a run folder, ``best``, ``last`` or ``none``
        run: the folder of the run that was just trained; ``best`` and ``last`` are of it, also when others have started since
        runs_dir: where experiments are kept
        prefer: of a folder, ``best`` or ``last``
    """
    if given is None or str(given) == "none":
        return None
    if run and given in ("best", "last"):
        path = find_checkpoint(run, runs_dir, prefer=str(given))
    else:
        path = find_checkpoint(given, runs_dir, prefer=prefer)
    note("checkpoint", str(path))
    return path


def find_checkpoint(given: str | Path, runs_dir: Path, *, prefer: str = "best") -> Path:
    """Resolve what a user may call a checkpoint: a file, a run folder, the folder of several, ``best`` or ``last``.

    Args:
        given: as the user wrote it
        runs_dir: where runs are kept; ``best`` and ``last`` mean those of the latest run in it
        prefer: which checkpoint of a run folder is meant when only the folder is named

    Raises:
        UserError: if there is none, saying where it was looked for
    """
    _require_local(str(given))
    if str(given) in ("best", "last"):
        return _of_latest_run(runs_dir.expanduser(), str(given))
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        siblings += ["best", "last"] if path.parent == Path() else []
        raise UserError(
            f"no checkpoint at {path}{did_you_mean(path.name, siblings)}\n"
            "allowed: a .ckpt file, a run folder, or best or last for those of the latest run"
        )
    if _is_run(path):
        run = path.parent if path.name == "checkpoints" else path
        return _of_run(run, prefer) or _none_in(run)
    return _of_latest_run(path, prefer)


def find_run(given: str | Path) -> Path:
    """Resolve what a user may call a run that can be resumed: its folder, or a folder of runs for the latest in it.

    Raises:
        UserError: if there is none
    """
    _require_local(str(given))
    path = Path(given).expanduser()
    if path.is_file():
        raise UserError(
            f"a run is resumed by its folder, and {path} is a file\nto begin a new run from that state: --ckpt_path {path}"
        )
    if not path.is_dir():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        alone = "--resume alone means the latest run" if str(given) in ("best", "last") else _TRAIN_FIRST
        raise UserError(f"no run at {path.absolute()}{did_you_mean(path.name, siblings)}\n{alone}")
    if _is_run(path):
        return path.parent if path.name == "checkpoints" else path
    for run in runs_in(path):
        if any(run.glob("checkpoints/*.ckpt")):
            return run
        note("resume", f"{run} is passed over: it has no checkpoint")
    return _none_in(path)


def resumable(run: Path) -> Path:
    """Return the checkpoint that a run goes on from: the last one, or where that is damaged the newest intact one.

    Raises:
        UserError: if the run has none, or would be written to through a link
    """
    for path in [*run.glob("*"), *run.glob("checkpoints/*")]:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a link or a device: a run that goes on writes into its own files only")
    last = run / "checkpoints" / "last.ckpt"
    others = sorted(last.parent.glob("best*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    problems: list[str] = []
    for path in [last, *others]:
        problem = damage(path) if path.is_file() else "it is missing"
        if problem is None:
            for text in problems:
                note("checkpoint", f"{text}; the newest intact one is taken")
            return path
        problems.append(f"{path}: {problem}")
    if not others and not last.is_file():
        raise UserError(_nothing_in(run))
    raise UserError("\n".join([f"no checkpoint of {run} can be read", *problems]))


def runs_in(where: Path) -> Iterator[Path]:
    """Yield the runs in an experiment's folder, or in one of experiments, the one begun or resumed last first."""
    found = {run for pattern in ("*", "*/*") for run in where.glob(pattern) if run.name != "checkpoints" and _is_run(run)}
    yield from sorted(found, key=lambda run: (_begun(run), run), reverse=True)


def _begun(run: Path) -> int:
    # Each fit writes its configuration; where somebody has removed it, the checkpoints are as good.
    config = run / "config.yaml"
    return (config if config.is_file() else run / "checkpoints").stat().st_mtime_ns


def _require_local(given: str) -> None:
    if "://" in given:
        raise UserError(f"{given} is an address, which is not fetched: give a file or folder on this machine")


def _is_run(path: Path) -> bool:
    run = path.parent if path.name == "checkpoints" else path
    return (run / "config.yaml").is_file() or (run / "checkpoints").is_dir()


def _of_run(run: Path, name: str) -> Path | None:
    # Without validation no checkpoint is best, and the last one stands for it.
    names = ("last",) if name == "last" else ("best", "last")
    return next((path for n in names if (path := run / "checkpoints" / f"{n}.ckpt").is_file()), None)


def _of_latest_run(where: Path, name: str) -> Path:
    found = (_of_run(run, name) for run in runs_in(where))
    return next((path for path in found if path), None) or _none_in(where)


def _none_in(where: Path) -> Path:
    raise UserError(_nothing_in(where))


def _nothing_in(where: Path) -> str:
    return f"no checkpoint under {where.absolute()}\n{_TRAIN_FIRST}"
