from __future__ import annotations

import typing
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from fulgurite.callbacks.sections import SECTIONS
from fulgurite.config_check import _words
from fulgurite.errors import name_list
from tests.commands import printed_config, refused
from tests.conftest import DIGITS, ROOT

FLAGS = "the command line: "
NETWORK = "model.init_args.network"
OPTIMIZER = "model.init_args.optimizer"
CALLBACK = "the class_path of a Callback"

OTHERS = ["ckpt_path", "data", "model", "resume", "resume_inexact", "seed_everything", "test", "trainer"]
KEYS = name_list(sorted([*OTHERS, *SECTIONS]), 12)


def fit(*flags: str) -> list[str]:
    return ["fit", "-c", str(DIGITS), *flags]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # misspelt keys, at every depth
        (["--modle", "X"], "modle is not a key (did you mean 'model'?)"),
        (["--trainer.max_epoch", "3"], "trainer.max_epoch is not a key (did you mean 'max_epochs'?)"),
        (["--trainer.m", "3"], "trainer.m is not a key; allowed: accelerator, accumulate_grad_batches, barebones"),
        (["--model.networ", "X"], f"{NETWORK[:-1]} is not a key (did you mean 'network'?)"),
        (["--model.network.widht", "3"], f"{NETWORK}.init_args.widht is not a key (did you mean 'width'?)"),
        (["--model.scheduler.x", "3"], "model.init_args.scheduler.init_args.x is not a key; allowed: final, warmup"),
        (["--checkpoint.mod", "min"], "checkpoint.mod is not a key (did you mean 'mode'?)"),
        (["--trainer.callbak+", "X"], "trainer.callbak is not a key (did you mean 'callbacks'?)"),
        (
            ["--config.x", "3"],
            f"config is not a key; allowed: {KEYS}",
        ),
        (["--images", "x"], "images is not a key; allowed: activation_checkpointing"),
        (["--print_config=skip_null"], "print_config is not a key; allowed: activation_checkpointing"),
        # what a class does not take, since the task or the data fills it in
        (
            ["--model.network.num_classes", "3"],
            f"{NETWORK}.init_args.num_classes is not a key; allowed: depth, dropout, init, width",
        ),
        (["--model.optimizer.params", "3"], f"{OPTIMIZER}.init_args.params is not a key; allowed: amsgrad"),
        (["--model.spec", "{channels: 1}"], "model.init_args.spec is filled in from data; take it out"),
        # values of the wrong type
        (["--trainer.max_epochs", "three"], "trainer.max_epochs is 'three'; it takes a whole number or null"),
        (["--trainer.max_epochs", "1.5"], "trainer.max_epochs is '1.5'; it takes a whole number or null"),
        (["--trainer.max_steps", "null"], "trainer.max_steps is null; it takes a whole number"),
        (["--trainer.max_epochs"], "trainer.max_epochs is 'true'; it takes a whole number or null"),
        (["--trainer.max_epochs", ""], "trainer.max_epochs is ''; it takes a whole number or null"),
        (["--trainer.detect_anomaly", "3"], "trainer.detect_anomaly is '3'; it takes true or false"),
        (["--trainer.experiment", "[a]"], "trainer.experiment is ['a']; it takes text"),
        (["--trainer.runs_dir", "[a]"], "trainer.runs_dir is ['a']; it takes a path"),
        (["--trainer.max_time", "[1]"], "trainer.max_time is [1]; it takes text, a duration, keys with values or null"),
        (["--checkpoint.mode", "maxx"], "checkpoint.mode is 'maxx' (did you mean 'max'?); it takes min, max or null"),
        (["--trainer.precision", "16-mixd"], "trainer.precision is '16-mixd' (did you mean '16-mixed'?); it takes 64, 32, 16, "),
        (
            ["--trainer.devices", "[a]"],
            "trainer.devices is ['a']; it takes a list (each item a whole number), text or a whole number",
        ),
        (["--model.optimizer.lr", "x"], f"{OPTIMIZER}.init_args.lr is 'x'; it takes a number or the class_path of a Tensor"),
        (["--model.optimizer.betas", "[0.9]"], f"{OPTIMIZER}.init_args.betas is [0.9]; it takes a list (each item a number or "),
        (["--model.network.width", "null"], f"{NETWORK}.init_args.width is null; it takes a whole number"),
        (["--model.optimizer", "null"], f"{OPTIMIZER} is null; it takes the class_path of an Optimizer"),
        (["--model.optimizer", "3"], f"{OPTIMIZER} is '3'; it takes the class_path of an Optimizer"),
        (["--trainer", "3"], "trainer is '3'; it is a section with keys such as accelerator"),
        (["--checkpoint", "[1]"], "checkpoint is [1]; it is a section with keys such as every_n_minutes"),
        (["--data", "[1]"], "data is [1]; it takes the class_path of a LightningDataModule or null"),
        (["--model.network.init_args", "3"], f"{NETWORK}.init_args is '3'; it takes keys with values"),
        (["--model.network.dict_kwargs", "[1]"], f"{NETWORK}.dict_kwargs is [1]; it takes keys with values"),
        (["--trainer.logger+", "csv"], "trainer.logger is true by default, which is no list to add to; give the list"),
        # classes that are none, or of another kind
        (["--model.optimizer", "Adan"], f"{OPTIMIZER} names Adan, which does not exist (did you mean 'Adam'?)"),
        (["--model.optimizer", "sgd"], f"{OPTIMIZER} names sgd, which does not exist (did you mean 'SGD'?)"),
        (["--model.optimizer", "torch.optm.SGD"], f"{OPTIMIZER} names torch.optm.SGD, which does not exist: there is no module "),
        (["--model.optimizer", "torch.nn.Linear"], f"{OPTIMIZER} is torch.nn.Linear; it takes the class_path of an Optimizer"),
        (
            ["--model.network", "torchvision.models.resnet18"],
            f"{NETWORK} is torchvision.models.resnet18, which does not take the 2 arguments that it is called with",
        ),
        (
            ["--model.network", "torch.nn.functional.relu"],
            f"{NETWORK} is torch.nn.functional.relu, a function; it takes the class",
        ),
        (["--model.optimizer", "os.system"], f"{OPTIMIZER} is os.system, a function; it takes the class_path of an Optimizer"),
        (["--model.network", "ReLU"], f"{NETWORK} is torch.nn.ReLU, which does not take the 2 arguments that it is called with"),
        (["--model.network", "net.yaml"], f"{NETWORK} names net.yaml, which is not a class: a configuration file goes behind -c"),
        (["--model.network.class_path", "3"], f"{NETWORK} names 3, which is not a dotted name, such as torch.optim.SGD"),
        (["--data", "ImageDataModule"], "data is fulgurite.data.ImageDataModule, an abstract class; it takes the class_path of"),
        (
            ["--trainer.callbacks", "EarlyStoping"],
            "trainer.callbacks names EarlyStoping, which does not exist (did you mean 'EarlyS",
        ),
        (["--trainer.callbacks+", "EarlyStopping"], "trainer.callbacks.0 lacks monitor, which EarlyStopping needs"),
        (["--trainer.callbacks+", "{init_args: {a: 1}}"], "trainer.callbacks.0 has init_args and no class_path"),
        (
            ["--trainer.callbacks+", "Timer", "--trainer.callbacks.x", "1"],
            "trainer.callbacks.0.init_args.x is not a key; allowed: d",
        ),
        (
            ["--model", "ClassificationTask", "--data", "3"],
            "data is '3'; it takes the class_path of a LightningDataModule or null",
        ),
    ],
)
def test_one_mistake_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *fit(*flags, "--print_config"))
    assert text.startswith(FLAGS + message)
    assert "\n" not in text
    assert len(text) < 330


def test_a_class_without_what_it_needs_says_which(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "bare.yaml").write_text("model: {class_path: fulgurite.tasks.ClassificationTask}\ndata: DigitsDataModule\n")
    text = refused(capsys, "fit", "-c", "bare.yaml")
    assert text == "bare.yaml: model lacks network, optimizer, which ClassificationTask needs"


def test_all_mistakes_of_files_and_flags_are_told_at_once(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "bad.yaml").write_text(
        "trainr: {}\n"
        "trainer: {max_epoch: 3, devices: {a: 1}}\n"
        "model:\n"
        "  init_args:\n"
        "    label_smoothng: 0\n"
        "    network: {class_path: fulgurite.models.SmalCNN}\n"
        "    optimizer: {class_path: torch.optim.AdamW, lr: 3, init_args: {beta: 3, lr: foo}}\n"
    )
    (here / "broken.yaml").write_text("a: [1\n")
    argv = ["fit", "-c", str(DIGITS), "-c", "bad.yaml", "-c", "nowhere.yaml", "-c", "broken.yaml", "--bogus", "3"]
    first, *lines = refused(capsys, *argv).splitlines()
    assert first == "11 mistakes in the configuration"
    assert lines == [
        "no configuration file nowhere.yaml",
        "broken.yaml, line 2: expected ',' or ']', but got '<stream end>'",
        "bad.yaml: trainer.max_epoch is not a key (did you mean 'max_epochs'?)",
        "bad.yaml: trainer.devices is {'a': 1}; it takes a list (each item a whole number), text or a whole number",
        "bad.yaml: model.init_args.network names fulgurite.models.SmalCNN, which does not exist (did you mean 'SmallCNN'?)",
        "bad.yaml: model.init_args.optimizer.lr stands beside class_path; it belongs under init_args",
        "bad.yaml: model.init_args.optimizer.init_args.lr is 'foo'; it takes a number or the class_path of a Tensor",
        "bad.yaml: model.init_args.optimizer.init_args.beta is not a key (did you mean 'betas'?)",
        "bad.yaml: model.init_args.label_smoothng is not a key (did you mean 'label_smoothing'?)",
        "bad.yaml: trainr is not a key (did you mean 'trainer'?)",
        f"the command line: bogus is not a key; allowed: {KEYS}",
    ]


def test_every_item_of_a_list_of_classes_is_looked_into(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "bad.yaml").write_text(
        "trainer:\n"
        "  callbacks:\n"
        "  - class_path: EarlyStoping\n"
        "  - {class_path: EarlyStopping, init_args: {monitor: a, patiense: 3}}\n"
        "  - {init_args: {a: 1}}\n"
        "  - Tmier\n"
        "  - {class_path: torch.nn.ReLU}\n"
    )
    lines = refused(capsys, "fit", "-c", str(DIGITS), "-c", "bad.yaml").splitlines()
    assert lines == [
        "5 mistakes in the configuration",
        "bad.yaml: trainer.callbacks.0 names EarlyStoping, which does not exist (did you mean 'EarlyStopping'?)",
        "bad.yaml: trainer.callbacks.1.init_args.patiense is not a key (did you mean 'patience'?)",
        "bad.yaml: trainer.callbacks.2 has init_args and no class_path",
        "bad.yaml: trainer.callbacks.3 names Tmier, which does not exist (did you mean 'Timer'?)",
        f"bad.yaml: trainer.callbacks.4 is torch.nn.ReLU; it takes {CALLBACK}, a list (each item {CALLBACK}) or null",
    ]


def test_a_long_list_of_mistakes_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, *fit(*(f"--wrong{number}" for number in range(30)))).splitlines()
    assert lines[0] == "30 mistakes in the configuration"
    assert lines[-1] == "... and 10 more"
    assert len(lines) == 22


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--trainer.max_epochs", "-1"], "trainer.max_epochs", -1),
        (["--trainer.max_epochs=-1"], "trainer.max_epochs", -1),
        (["--model.optimizer.lr", "1e-3"], f"{OPTIMIZER}.init_args.lr", 0.001),
        (["--model.init_args.optimizer.init_args.lr", ".5"], f"{OPTIMIZER}.init_args.lr", 0.5),
        (["--model.optimizer.betas", "[0.8, 0.9]"], f"{OPTIMIZER}.init_args.betas", [0.8, 0.9]),
        (["--model.optimizer.foreach", "true"], f"{OPTIMIZER}.init_args.foreach", True),
        (["--trainer.limit_train_batches", "1"], "trainer.limit_train_batches", 1),
        (["--trainer.limit_train_batches", "1.0"], "trainer.limit_train_batches", 1.0),
        (["--trainer.limit_train_batches", "null"], "trainer.limit_train_batches", None),
        (["--trainer.detect_anomaly"], "trainer.detect_anomaly", True),
        (["--trainer.detect_anomaly", "false"], "trainer.detect_anomaly", False),
        (["--trainer.experiment", "123"], "trainer.experiment", "123"),
        (["--trainer.experiment", "true"], "trainer.experiment", "true"),
        (["--trainer.experiment", "1e-3"], "trainer.experiment", "1e-3"),
        (["--trainer.experiment", "a b"], "trainer.experiment", "a b"),
        (["--trainer.experiment", ""], "trainer.experiment", ""),
        (["--trainer.max_time", "{minutes: 5}"], "trainer.max_time", {"minutes": 5}),
        (["--trainer.max_time", "00:01:00:00"], "trainer.max_time", "00:01:00:00"),
        (["--trainer.devices", "[0]"], "trainer.devices", [0]),
        (["--trainer.logger", "csv"], "trainer.logger", "csv"),
        (["--trainer.logger", "[csv]"], "trainer.logger", ["csv"]),
        (["--trainer.logger", "false"], "trainer.logger", False),
        (["--trainer.precision", "bf16-mixed"], "trainer.precision", "bf16-mixed"),
        (["--trainer.strategy", "ddp"], "trainer.strategy", "ddp"),
        (["--trainer.strategy", "DDPStrategy"], "trainer.strategy.class_path", "lightning.pytorch.strategies.DDPStrategy"),
        (["--trainer.strategy", "DDPStrategy"], "trainer.strategy.init_args.timeout", "0:30:00"),
        (["--trainer.strategy", "DDPStrategy", "--trainer.strategy", "ddp"], "trainer.strategy", "ddp"),
        (["--trainer.check_val_every_n_epoch", "null"], "trainer.check_val_every_n_epoch", None),
        (["--model.scheduler", "null"], "model.init_args.scheduler", None),
        (["--checkpoint.monitor", "null"], "checkpoint.monitor", None),
        (["--data.num_workers", "null"], "data.init_args.num_workers", None),
        (["--model.network", "ResNet", "--model.network.width", "8"], f"{NETWORK}.init_args.width", 8),
        (["--model.network", "{class_path: ResNet}"], f"{NETWORK}.class_path", "fulgurite.models.ResNet"),
        (
            ["--trainer.callbacks", "RichModelSummary"],
            "trainer.callbacks.class_path",
            "lightning.pytorch.callbacks.RichModelSummary",
        ),
        (["--trainer.max-epochs", "3"], "trainer.max_epochs", 3),
        (["--trainer.max_epochs", "3", "--trainer.max_epochs", "4"], "trainer.max_epochs", 4),
    ],
)
def test_what_is_right_arrives_as_what_it_is(flags: list[str], path: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed_config(capsys, *fit(*flags))
    for name in path.split("."):
        found = found[name]
    assert found == value
    assert type(found) is type(value)


def test_a_section_with_all_its_lines_commented_out_is_as_none(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "empty.yaml").write_text("trainer:\n  # max_epochs: 3\ncheckpoint:\nmodel:\n")
    expected = printed_config(capsys, *fit())
    assert printed_config(capsys, *fit("-c", "empty.yaml")) == expected
    assert printed_config(capsys, "fit", "-c", "empty.yaml", "-c", str(DIGITS)) == expected


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_false_alarm_over_the_files_of_this_repository(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed_config(capsys, *fit("-c", str(path)))


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_no_false_alarm_over_what_a_run_saved(verb: str, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--images", "x"] if verb == "predict" else []
    config = printed_config(capsys, verb, "-c", str(trained_run / "config.yaml"), "--ckpt_path", str(trained_run), *flags)
    assert config["trainer"] == yaml.safe_load((trained_run / "config.yaml").read_text())["trainer"]


def test_a_function_that_makes_the_object_will_do(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own_networks.py").write_text(
        "from torch import nn\n"
        "def linear(num_classes: int, in_channels: int) -> nn.Module:\n"
        "    return nn.Linear(in_channels, num_classes)\n"
    )
    monkeypatch.syspath_prepend(here)
    config = printed_config(capsys, *fit("--model.network", "own_networks.linear"))
    assert config["model"]["init_args"]["network"] == "own_networks.linear"


class Colour(Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number or null"),
        (bool | Literal["warn"], "true, false or warn"),
        (str | Path | timedelta, "text, a path or a duration"),
        (list[float], "a list (each item a number)"),
        (dict[str, int], "keys with values"),
        (dict, "keys with values"),
        (list, "a list"),
        (Any, "anything"),
        (typing.Sequence, "a list"),
        (Callable, "the dotted name of a function"),
        (typing.Callable, "the dotted name of a function"),
        (typing.Iterable[int] | None, "a list (each item a whole number) or null"),
        (Colour, "RED or BLUE"),
        (Literal["a", "b", None], "a, b or None"),
    ],
)
def test_types_are_told_in_words(kind: Any, words: str) -> None:
    assert _words(kind) == words
