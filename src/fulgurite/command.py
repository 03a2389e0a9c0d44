"""LightningCLI with configurations in layers, checkpoints that need no configuration, and errors in a few lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, cast

from jsonargparse import ArgumentError, DefaultHelpFormatter
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fulgurite.callbacks.sections import SECTIONS
from fulgurite.checks.findings import Findings
from fulgurite.config import Config, Tree, leaves, plain
from fulgurite.config_check import find_problems, listing
from fulgurite.console import note, quiet_lightning
from fulgurite.errors import FaultsFound, UserError, name_list
from fulgurite.explain import build_errors, require_accelerator, restore_errors, user_errors
from fulgurite.layers import DATA_VERBS, PYTHON_ONLY, Layers, complete, network_settings
from fulgurite.models.pretrained import without_initial_weights
from fulgurite.plain_yaml import write_yaml
from fulgurite.request import Request, read_request
from fulgurite.resuming import is_restarted, run_to_resume
from fulgurite.trainer import Trainer
from fulgurite.trust import NoFiles, check_trusted

# What a run's config.yaml holds: what every verb can use, and nothing that is of one command only.
_OF_A_RUN = ("seed_everything", "trainer", "model", "data", *SECTIONS)
_OWN = f"{__name__.partition('.')[0]}."


def run_command(verb: str, argv: list[str]) -> int:
    """Run a verb of the Trainer and return the exit status.

    Raises:
        UserError: if the user can mend what went wrong
    """
    quiet_lightning()  # the trainer does it too, but the seed is set before there is one
    request = read_request(verb, argv)
    with user_errors():
        Command(request)
    return 0


class _Help(DefaultHelpFormatter):
    def _get_help_string(self, action: Any) -> str:
        text, known, names = str(super()._get_help_string(action)).partition(", known subclasses: ")
        own_first = sorted(names.rstrip(")").split(", "), key=lambda name: not name.startswith(_OWN))
        return f"{text}{known}{name_list(own_first)})" if known else text


class Parser(NoFiles, LightningArgumentParser):
    """Lightning's parser with a help of readable length."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, formatter_class=_Help, **options)


class Command(LightningCLI):
    """One verb, from its request to its end."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.given = Config()
        self._checkpoint: str | None = None
        super().__init__(
            trainer_class=Trainer,
            save_config_callback=None,  # the run record does it, also for runs from Python
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=Parser,
            parser_kwargs={"exit_on_error": False, "prog": "fulgurite"},
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in Lightning
        """Build the one parser that is needed."""
        return {self.request.verb: PYTHON_ONLY}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the sections; only ``predict`` has no data but image files, and takes the spec from the checkpoint."""
        if self.request.verb not in DATA_VERBS:
            parser.add_lightning_class_args(Trainer, "trainer")
            for name, kind in SECTIONS.items():
                parser.add_lightning_class_args(kind, name)
            parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        if self.request.verb != "predict":
            parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
        if self.request.verb not in (*DATA_VERBS, "predict"):
            parser.link_arguments("data", "model.init_args.spec", compute_fn=_spec_of, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Put the layers together, check all of them at once, and hand the result to the parser."""
        verb = self.request.verb
        own = self._subcommand_parsers[verb]
        layers = Layers(self.request, {action.dest for action in own._actions})
        self.given, self._checkpoint = layers.config, layers.checkpoint
        if self.request.help:
            self._show_help(parser)
        problems = layers.problems + find_problems(own, self.given)
        if not layers.problems:
            problems += self._missing(self.given.tree)
        if problems:
            raise UserError(listing(problems))
        self.config = parser.parse_object({"subcommand": verb, verb: self.given.tree})
        with redirect_stdout(sys.stderr) if self.request.print_config else nullcontext():  # what is printed is a file of YAML
            is_more = not self._checkpoint and complete(self.given, plain(self.config[verb]))
        if is_more:
            self.config = parser.parse_object({"subcommand": verb, verb: self.given.tree})
        self._check_classes()
        if self.request.print_config:
            print(self._text(), end="")
            raise SystemExit(0)

    def _check_classes(self) -> None:
        """Check what the parser made of a checkpoint's names once more: it finds a bare one among all loaded classes."""
        for path, value in leaves(plain(self.config[self.request.verb])):
            if self._checkpoint and path.endswith(".class_path") and self.given.origin(path) == self._checkpoint:
                named = {path.removesuffix(".class_path"): {"class_path": value}}
                check_trusted(named, self.request.trust, source=self._checkpoint)

    def _show_help(self, parser: LightningArgumentParser) -> None:
        option, *rest = self.request.help
        # `--model.network.help ResNet` asks about a key that only the configured model has.
        sections = {name: self.given.tree.get(name) for name in ("model", "data")}
        named = {name: value.get("class_path") if isinstance(value, dict) else value for name, value in sections.items()}
        if not rest and (path := named.get(option.removeprefix("--").removesuffix(".help"))):
            rest = [path]
        classes = [f"--{name}={path}" for name, path in named.items() if path]
        try:
            parser.parse_args([self.request.verb, *classes, option, *rest])  # prints it and exits
        except ArgumentError as error:
            raise UserError(
                f"no help for '{' '.join(self.request.help)}': name a class, such as --model.help ClassificationTask\n"
                f"what a class inside another takes is known with a configuration: -c FILE --model.network.help ResNet"
            ) from error

    def _parse_ckpt_path(self) -> None:
        """Leave alone the hyper-parameters in a checkpoint, which Lightning would put over the flags, unchecked."""

    def _missing(self, tree: Tree) -> Iterator[str]:
        verb = self.request.verb
        if verb in DATA_VERBS:
            if not tree.get("data"):
                yield f"{verb} has no data: give an experiment, such as -c configs/experiment/digits.yaml, or a data module"
            return
        if verb == "predict" and tree.get("ckpt_path") in (None, "none"):  # the checkpoint knows the classes
            yield f"{verb} needs a checkpoint: --ckpt_path best for the latest run's, or a .ckpt file or run folder"
        elif verb not in ("fit", "plan") and tree.get("ckpt_path") is None:
            yield (
                f"{verb} needs a checkpoint: --ckpt_path best for the latest run's, or a .ckpt file or run folder\n"
                "--ckpt_path none means the initial weights"
            )
        elif missing := [name for name in ("model", "data") if not tree.get(name) and (name, verb) != ("data", "predict")]:
            if tree.get("ckpt_path") not in (None, "none"):
                yield (
                    f"{tree['ckpt_path']} does not say what its {' and '.join(missing)} is: "
                    "it was trained from Python with a part that has no name\nsay it with -c FILE, or with flags"
                )
                return
            experiments = sorted(Path("configs/experiment").glob("*.yaml")) or [Path("configs/experiment/digits.yaml")]
            yield f"{verb} has no {' and no '.join(missing)}: give an experiment, such as -c {experiments[0]}" + (
                f"\nthere are {len(experiments)} in configs/experiment" if len(experiments) > 1 else ""
            )
        if verb == "predict" and not tree.get("images"):
            yield "predict needs images: --images FOLDER, or one image file"

    def _set_seed(self) -> None:
        # Lightning takes 0 where true asks it to draw one. A process of a larger job is told by the one that started it.
        config = self.config[self.request.verb]
        if config.seed_everything is True and not {"LOCAL_RANK", "PL_GLOBAL_SEED"} <= os.environ.keys():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UserError("seed_everything is true, and each process would draw its own seed: give a number")
            config.seed_everything = int.from_bytes(os.urandom(4))
            note("seed", f"{config.seed_everything}, drawn at random")
        super()._set_seed()

    @contextmanager
    def _located(self) -> Iterator[None]:
        try:
            with user_errors():
                yield
        except UserError as error:
            error.args = (self.given.locate(str(error)),)
            raise

    def instantiate_classes(self) -> None:
        """Build data, task and trainer; what a class refuses is told with its file and key."""
        with build_errors(self._checkpoint), self._located():
            if self.request.verb not in DATA_VERBS:
                require_accelerator(self.given.tree.get("trainer"))  # before data is looked for, or downloaded
            continues = self._checkpoint is not None or self._goes_on_by_itself()
            with without_initial_weights() if continues else nullcontext():
                super().instantiate_classes()

    def _goes_on_by_itself(self) -> bool:
        """Return whether ``resume: auto`` finds a run, where the network would otherwise look for weights that may be gone."""
        config = self.config[self.request.verb]
        resume = config.get("resume", "none")
        weights = (network_settings(plain(config)).get("init_args") or {}).get("weights")
        if not weights or (resume != "auto" and not (resume in (None, False) and is_restarted())):
            return False
        run = run_to_resume("auto", Path(config.trainer.runs_dir) / config.trainer.experiment, lambda: self._text(_OF_A_RUN))
        config.resume = None if run is None else str(run)
        return run is not None

    def _run_subcommand(self, subcommand: str) -> None:
        with restore_errors(self.trainer), self._located():
            result = getattr(self.trainer, subcommand)(**self._prepare_subcommand_kwargs(subcommand))
            if isinstance(result, Findings) and result.faults:
                raise FaultsFound(f"faults in the data: {len(result.faults)}, listed above")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand in DATA_VERBS:
            del arguments["model"]
        return arguments

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer and tell it the configuration that its checkpoints will carry."""
        if self.request.verb in DATA_VERBS:  # whatever the experiment trains on, its data is looked at here
            return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        trainer: Any = super().instantiate_trainer(**kwargs)
        trainer.config = self._text(_OF_A_RUN)
        return cast(Trainer, trainer)

    def _text(self, names: tuple[str, ...] | None = None) -> str:
        sections = plain(self.config[self.request.verb])
        sections.pop("config", None)
        if "model" in sections and self.request.verb != "predict":
            sections["model"].get("init_args", {}).pop("spec", None)  # filled in from the data
        kept = {name: value for name, value in sections.items() if names is None or name in names}
        return write_yaml(kept)


def _spec_of(data: Any) -> Any:
    if not hasattr(data, "spec"):
        raise UserError(f"data is {type(data).__name__}, which offers no spec: it has to say what its images and classes are")
    return data.spec
