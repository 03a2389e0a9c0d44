"""Put together what one command runs with: a checkpoint's configuration, then files, then flags."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulgurite.checkpoint import describe, find_checkpoint, read_checkpoint
from fulgurite.config import Config, Tree, read_file
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError
from fulgurite.request import Request
from fulgurite.trainer import Trainer
from fulgurite.trust import check_trusted

# Arguments of the trainer's methods for use from Python.
PYTHON_ONLY = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "weights_only"}
# Verbs that look at data alone.
DATA_VERBS = ("check_data", "find_workers", "make_shards")
# What a verb takes over from a checkpoint: `predict` has no data, and only `fit` goes on as before.
_FOR_EVALUATION = ("seed_everything", "model", "data")
_TAKEN = {"fit": (*_FOR_EVALUATION, "trainer", "checkpoint"), "predict": ("seed_everything", "model")}
# What of a checkpoint's trainer section decides where this run writes, or could make it send things away.
_NOT_FROM_CHECKPOINT = ("runs_dir", "default_root_dir", "logger", "callbacks", "plugins", "profiler", "model_registry")


class Layers:
    """The configuration that a request asks for, and what kept a part of it from being read.

    Args:
        request: names files, flags and checkpoint
        keys: that the verb knows
    """

    def __init__(self, request: Request, keys: set[str]) -> None:
        self.request = request
        self.problems: list[str] = []
        self._files: list[tuple[str, Tree]] = []
        # A run's config.yaml serves every verb: keys that only another verb knows are no mistake.
        foreign = _keys_of_verbs() - keys
        for name in request.files:
            with self._collected():
                self._files.append((name, {key: value for key, value in read_file(name).items() if key not in foreign}))
        self.config = self._stacked_on(Config())
        given = self.config.tree.get("ckpt_path")
        if given not in (None, "none"):
            with self._collected():
                self.config = self._with_checkpoint(str(given))

    @contextmanager
    def _collected(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.problems.append(str(error))

    def _stacked_on(self, config: Config) -> Config:
        for name, tree in self._files:
            config.add_layer(tree, name)
        for key, text in self.request.flags:
            config.set(key, text, "the command line")
        return config

    def _with_checkpoint(self, given: str) -> Config:
        trainer = self.config.tree.get("trainer")
        runs_dir = trainer.get("runs_dir", "runs") if isinstance(trainer, dict) else "runs"
        path = find_checkpoint(given, Path(str(runs_dir)), prefer="last" if self.request.verb == "fit" else "best")
        checkpoint = Config()
        checkpoint.add_layer(checkpoint_layer(path, self.request.verb, self.request.trust), str(path))
        config = self._stacked_on(checkpoint)
        config.tree["ckpt_path"] = str(path)
        return config


def checkpoint_layer(path: Path, verb: str, trusted: list[str]) -> Tree:
    """Return what a verb takes over from a checkpoint, none of which can run code.

    Raises:
        UserError: if the checkpoint does not describe itself, or names code that is not trusted
    """
    description = describe(read_checkpoint(path), path)
    sections = description.sections
    layer = {name: sections[name] for name in _TAKEN.get(verb, _FOR_EVALUATION) if sections.get(name) is not None}
    for name in layer.keys() - {"seed_everything"}:
        if not isinstance(layer[name], dict) or not isinstance(layer[name].get("init_args") or {}, dict):
            raise UserError(f"{path}: there are no keys under {name} in its configuration")
    for name in layer.keys() & {"trainer", "checkpoint"}:
        layer[name] = _settings(layer[name])
    check_trusted(layer, trusted, source=str(path))
    data = layer.get("data")
    if data:
        layer["data"] = data = _without_places(data)
    if data and "class_names" in (data.get("init_args") or {}) and isinstance(description.spec, dict):
        # The numbers of the classes are the checkpoint's, also on data that lacks some of them.
        layer["data"] = data | {"init_args": data["init_args"] | {"class_names": description.spec.get("class_names")}}
    if verb == "predict" and "model" in layer and isinstance(description.spec, dict) and description.spec:
        spec = DataSpec.from_dict(description.spec).to_dict()  # not as it is: it has not been checked for class paths
        layer["model"] = layer["model"] | {"init_args": (layer["model"].get("init_args") or {}) | {"spec": spec}}
    return layer


def _without_places(data: Tree) -> Tree:
    """Return a data section that does not say where this run writes its decoded images."""
    return data | {"init_args": {name: value for name, value in (data.get("init_args") or {}).items() if name != "cache_dir"}}


def _settings(section: Tree) -> Tree:
    """Return what a run may take over from a checkpoint's settings; objects and places are not."""
    return {name: value for name, value in section.items() if name not in _NOT_FROM_CHECKPOINT and _is_setting(name, value)}


def _is_setting(name: Any, value: Any) -> bool:
    parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    of_numbers = bool(parts) and all(isinstance(part, int | float) for part in parts)
    return not str(name).endswith("+") and (of_numbers or isinstance(value, bool | int | float | str | None))


def _keys_of_verbs() -> set[str]:
    """Return the keys that some verb has and another does without."""
    verbs = [getattr(Trainer, name) for name in vars(Trainer) if not name.startswith("_")]
    verbs = [verb for verb in verbs if inspect.isfunction(verb)]
    arguments = {key for verb in verbs for key in inspect.signature(verb).parameters} - {"self", *PYTHON_ONLY}
    return {"data", "model", "trainer", "checkpoint", *arguments}
