"""A run is a folder: ``runs/<experiment>/<version>/``, never shared and never reused."""

from __future__ import annotations

import re
from pathlib import Path

from fulgurite.errors import UserError


def create_run(runs_dir: Path, experiment: str) -> Path:
    """Make and return the folder of a new run; two processes never get the same one.

    Raises:
        UserError: if the experiment's name is not a plain folder name, or the folder cannot be made
    """
    if not re.fullmatch(r"\w[\w.+ -]*", experiment):
        raise UserError(f"experiment is '{experiment}'; it names a folder: letters, digits, space and _ . + - only")
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
