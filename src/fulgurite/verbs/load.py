"""Turn a checkpoint back into a task, without a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule

from fulgurite.checkpoint import describe, read_checkpoint
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from fulgurite.explain import build_errors, user_errors
from fulgurite.models.pretrained import without_initial_weights
from fulgurite.runs import find_checkpoint
from fulgurite.trust import NoFiles, check_trusted


class _Parser(NoFiles, ArgumentParser):
    pass


def load(
    path: str | Path, *, device: str | torch.device = "cpu", runs_dir: str | Path = "runs", trust: Sequence[str] = ()
) -> Any:
    """Load a trained task, ready for ``task(images)`` and ``task.predict_images([...])``.

    Args:
        path: a checkpoint, a run folder, or best or last for those of the latest run
        device: where the task is put
        runs_dir: where best and last are looked for
        trust: packages of your own that the checkpoint may name classes from

    Returns:
        the task, in evaluation mode

    Raises:
        UserError: if there is no such checkpoint, it is damaged, or it names code that is not trusted
    """
    file = find_checkpoint(path, Path(runs_dir))
    checkpoint = read_checkpoint(file)
    description = describe(checkpoint, file)
    model = description.sections.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("init_args", {}), dict):
        raise UserError(f"{file} does not name its model: it was trained from Python with a part that has no name")
    check_trusted({"model": model}, trust, source=str(file))
    spec = DataSpec.from_dict(description.spec).to_dict()  # not as it is: it has not been checked for class paths
    model = model | {"init_args": model.get("init_args", {}) | {"spec": spec}}
    parser = _Parser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model", fail_untyped=False)
    with build_errors(str(file)), user_errors():
        config = parser.parse_object({"model": model})
        check_trusted(config.as_dict(), trust, source=str(file))  # a bare name has become the path of any class by that name
        with without_initial_weights():
            task = parser.instantiate(config).model
        task.load_state_dict(checkpoint["state_dict"])
    return task.eval().to(device)
