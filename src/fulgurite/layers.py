"""Put together what one command runs with: a checkpoint's configuration, then files, then flags."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fulgurite.callbacks.sections import SECTIONS
from fulgurite.checkpoint import describe, read_checkpoint
from fulgurite.config import Config, Tree, read_file
from fulgurite.console import note
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError, shown
from fulgurite.request import Request
from fulgurite.runs import find_checkpoint, find_run, resumable
from fulgurite.trainer import Trainer
from fulgurite.trust import check_trusted, split_settings, without_places

# Arguments of the trainer's methods for use from Python.
PYTHON_ONLY = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "weights_only"}
# Verbs that look at data alone.
DATA_VERBS = ("check_data", "find_workers", "make_shards")
# What a verb takes over from a checkpoint: `predict` has no data, and only `fit` goes on as before.
_FOR_EVALUATION = ("seed_everything", "model", "data")
_TAKEN = {"fit": (*_FOR_EVALUATION, "trainer", *SECTIONS), "predict": ("seed_everything", "model")}


class Layers:
    """The configuration that a request asks for, and what kept a part of it from being read.

    Args:
        request: names files, flags and checkpoint
        keys: that the verb knows
    """

    def __init__(self, request: Request, keys: set[str]) -> None:
        self.request = request
        self.problems: list[str] = []
        self.checkpoint: str | None = None  # the file that a layer comes from
        self._files: list[tuple[str, Tree]] = []
        # A run's config.yaml serves every verb: keys that only another verb knows are no mistake.
        foreign = _keys_of_verbs() - keys
        for name in request.files:
            with self._collected():
                self._files.append((name, {key: value for key, value in read_file(name).items() if key not in foreign}))
        self.config = self._stacked_on(Config())
        given, resume = self.config.tree.get("ckpt_path"), str(self.config.tree.get("resume", "none")).lower()
        with self._collected():
            if resume not in ("none", "false", "auto"):  # what auto means, the configuration says
                self.config = self._with_run(None if resume == "true" else str(self.config.tree["resume"]))
            elif given not in (None, "none"):
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

    def _trainer(self, key: str, default: Any) -> Any:
        """Return what files and flags say of the trainer."""
        trainer = self.config.tree.get("trainer")
        return trainer.get(key, default) if isinstance(trainer, dict) else default

    def _with_checkpoint(self, given: str) -> Config:
        runs_dir = Path(str(self._trainer("runs_dir", "runs")))
        path = find_checkpoint(given, runs_dir, prefer="last" if self.request.verb == "fit" else "best")
        config = self._stacked_on_checkpoint(path)
        config.tree["ckpt_path"] = str(path)
        return config

    def _with_run(self, given: str | None) -> Config:
        if self.config.tree.get("ckpt_path") is not None:
            raise UserError("--resume goes on in a run's folder, --ckpt_path begins a new run: give one of them")
        where = Path(str(self._trainer("runs_dir", "runs"))).expanduser()
        run = find_run(where / str(self._trainer("experiment", "")) if given is None else given)
        path = resumable(run)
        settings = describe(read_checkpoint(path), path).sections.get("trainer")
        objects = split_settings(settings)[1] if isinstance(settings, dict) else []
        if missing := [shown(name) for name in objects if self._trainer(name, self) is self]:
            raise UserError(
                f"{run} was trained with trainer.{', trainer.'.join(missing)}: code that a checkpoint does not bring along, "
                f"as it may come from a stranger\nif the run is yours: fulgurite fit -c {run / 'config.yaml'} --resume {run}"
            )
        config = self._stacked_on_checkpoint(path)
        config.tree["resume"] = str(run)
        if self._trainer("runs_dir", None) is None and isinstance(settings, dict):
            # As the run has it, if it lies there still; nothing is written there but in the run's own folder.
            there = Path(str(settings.get("runs_dir"))) / run.parent.name / run.name
            place = settings["runs_dir"] if there.is_dir() and there.samefile(run) else str(run.parent.parent)
            config.set("trainer.runs_dir", str(place), str(path))
        return config

    def _stacked_on_checkpoint(self, path: Path) -> Config:
        self.checkpoint = str(path)
        checkpoint = Config()
        checkpoint.add_layer(checkpoint_layer(path, self.request.verb, self.request.trust), str(path))
        return self._stacked_on(checkpoint)


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
    for name in layer.keys() & {"trainer", "checkpoint", "ema", "compile", "activation_checkpointing"}:  # of plain settings
        layer[name], _ = split_settings(layer[name])
    check_trusted(layer, trusted, source=str(path))
    data = layer.get("data")
    if data:
        layer["data"] = data = without_places(data, source=str(path))
    if data and "class_names" in (data.get("init_args") or {}) and isinstance(description.spec, dict):
        # The numbers of the classes are the checkpoint's, also on data that lacks some of them.
        layer["data"] = data | {"init_args": data["init_args"] | {"class_names": description.spec.get("class_names")}}
    if verb == "predict" and "model" in layer and isinstance(description.spec, dict) and description.spec:
        spec = DataSpec.from_dict(description.spec).to_dict()  # not as it is: it has not been checked for class paths
        layer["model"] = layer["model"] | {"init_args": (layer["model"].get("init_args") or {}) | {"spec": spec}}
    return layer


def complete(given: Config, typed: Tree) -> bool:
    """Fill in what the network's class knows: its architecture in full, and how its weights want their images.

    It goes below all that the user gave: only what a data module takes and nobody set is filled in.

    Args:
        given: by the user; changed in place
        typed: the same with every default, as the parser read it

    Returns:
        whether anything was filled in
    """
    network, data = network_settings(typed), typed.get("data") or {}
    if not network.get("class_path"):
        return False
    kind, init_args = resolve_name(network["class_path"]), network.get("init_args") or {}
    taken, mine = data.get("init_args") or {}, given.tree.get("data")
    mine = (mine.get("init_args") or {}) if isinstance(mine, dict) else {}
    settled = kind.settled(**init_args) if hasattr(kind, "settled") else {}
    new = {f"model.network.{key}": value for key, value in settled.items() if value != init_args.get(key)}
    wanted = {}
    if hasattr(kind, "preprocessing"):
        wanted = kind.preprocessing(in_channels=taken.get("channels") or 3, **init_args)
        wanted = {key: value for key, value in wanted.items() if key in taken and key not in mine}
    if wanted:
        values = ", ".join(f"{key} {value}" for key, value in wanted.items())
        note("data", f"{values}: as the network's weights were trained; --data.{next(iter(wanted))} and the like override it")
    new |= {f"data.{key}": value for key, value in wanted.items()}
    for key, value in new.items():
        given.set(key, json.dumps(value), "the network's weights")
    return bool(new)


def network_settings(tree: Tree) -> Tree:
    """Return the class and the arguments of the network that a task is given; empty if there is none."""
    network = ((tree.get("model") or {}).get("init_args") or {}).get("network")
    return network if isinstance(network, dict) else {}


def _keys_of_verbs() -> set[str]:
    """Return the keys that some verb has and another does without."""
    verbs = [getattr(Trainer, name) for name in vars(Trainer) if not name.startswith("_")]
    verbs = [verb for verb in verbs if inspect.isfunction(verb)]
    arguments = {key for verb in verbs for key in inspect.signature(verb).parameters} - {"self", *PYTHON_ONLY}
    return {"data", "model", "trainer", *SECTIONS, *arguments}
