"""Which run a ``fit`` goes on with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fulgurite.checkpoint import read_checkpoint
from fulgurite.config import Tree, differences
from fulgurite.console import note
from fulgurite.errors import UserError, name_list
from fulgurite.plain_yaml import read_yaml
from fulgurite.runs import find_run, resumable, runs_in

# Set by torchrun --max-restarts and by a requeue of SLURM: this same command has run before, in this same job.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

Resume = bool | str | Path | None

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def is_restarted() -> bool:
    """Return whether the scheduler says that it has started this job before."""
    return any(os.environ.get(name, "0") != "0" for name in _RESTARTS)


def run_to_resume(resume: Resume, experiment: Path, config: Callable[[], str]) -> Path | None:
    """Return the folder of the run to go on with, or None to begin a new one.

    Args:
        resume: a run's folder; True for the latest of the experiment; "auto" for the latest that has the same
            configuration, if it is not complete; None is "auto" where the scheduler says that it restarts this job
        experiment: the folder of its runs
        config: gives this run's configuration as YAML text

    Raises:
        UserError: if there is no such run
    """
    if resume in (None, False) and is_restarted():
        note("resume", "auto, as this job has been restarted")
        resume = "auto"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(_OWN_STORE, "0") != "1":
            # The processes may find each other's addresses of the first start, and wait for ever: pytorch/pytorch#135712.
            note("warning", f"a restart by torchrun can hang unless {_OWN_STORE}=1 is set: set it next time")
    if resume in (None, False):
        return None
    if resume is True:
        return find_run(experiment)
    return find_run(str(resume)) if resume != "auto" else _unfinished(experiment, config)


def _unfinished(experiment: Path, config: Callable[[], str]) -> Path | None:
    try:
        wanted = _without_place(config())
    except TypeError as error:
        raise UserError(f"resume 'auto' looks for a run with the same configuration, which has none: {error}") from error
    newest_other = ""
    for run in runs_in(experiment):
        file = run / "config.yaml"
        if not file.is_file() or not any(run.glob("checkpoints/*.ckpt")):
            continue
        found = _without_place(file.read_text(encoding="utf-8", errors="replace"))
        if found == wanted:
            callbacks = read_checkpoint(resumable(run)).get("callbacks") or {}
            complete = callbacks.get("Checkpoints", {}).get("complete")
            if not complete or is_restarted():  # the job may have a test to do still
                return run
            newest_other = newest_other or f"{run} is complete"
            break
        paths = [path for path, *_ in differences(found, wanted)] or ["its configuration"]
        newest_other = newest_other or f"{run} differs in {name_list(paths, limit=2)}"
    note("resume", f"a new run begins: {newest_other or 'there is none yet'}")
    return None


def _without_place(config: str) -> Tree:
    """Return a run's configuration without where it lies, which its folder says."""
    try:
        tree = read_yaml(config)
    except UserError:
        return {}
    if isinstance(tree, dict) and isinstance(tree.get("trainer"), dict):
        tree["trainer"].pop("runs_dir", None)
    return tree if isinstance(tree, dict) else {}
