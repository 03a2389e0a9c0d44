"""Every file under configs/ is read, trained with where this machine can, and compared with what was built from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from fulgurite.cli import main
from fulgurite.command import Command
from fulgurite.config import Config, Tree, leaves, read_file
from fulgurite.request import Request
from tests.conftest import DIGITS, ROOT, SMALL
from tests.images import save_mnist, save_splits, save_tree

CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
EXPERIMENTS = [path for path in FILES if path.parent.name == "experiment"]
OVERLAYS = [path for path in FILES if path not in EXPERIMENTS]
ON_GPU = [path for path in FILES if read_file(str(path)).get("trainer", {}).get("accelerator") == "gpu"]
ON_CPU = [path for path in FILES if path not in ON_GPU]
# One epoch of a few batches, in this process alone: tests/test_ddp.py starts several.
SHORT = [
    *("--trainer.max_epochs", "1"),
    *("--trainer.limit_train_batches", "4"),
    *("--trainer.limit_val_batches", "2"),
    *("--trainer.devices", "1", "--trainer.num_nodes", "1"),
    *("--trainer.enable_progress_bar", "false"),
]
FAKE = [
    *("--data.name", "FakeData", "--data.download", "false", "--data.batch_size", "16"),
    *("--data.arguments", "{size: 96, image_size: [3, 32, 32], num_classes: 10}", "--data.split.test_fraction", "0.2"),
]
# What stands in for data and weights that are fetched, and for networks that take long.
STAND_INS = {
    "cifar10_resnet18": [*FAKE, "--model.network.width", "4"],
    "cifar10_fast": [*FAKE, "--model.network.width", "4"],
    "imagenet_resnet50": ["--data.size", "32", "--data.batch_size", "4", "--model.network.width", "4"],
    "finetune_folder": ["--data.size", "32", "--data.batch_size", "4", "--model.network.weights", "null"],
    "vit_small": ["--model.network.width", "16", "--model.network.depth", "1"],
}


def name(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


each_file = partial(pytest.mark.parametrize, "path", ids=name)


def stack(path: Path) -> list[Path]:
    """Return the files that a run with this one reads."""
    return [path] if path in EXPERIMENTS else [DIGITS, path]


def arguments(files: list[Path]) -> list[str]:
    return [argument for path in files for argument in ("-c", str(path))]


def merged(files: list[Path]) -> Tree:
    config = Config()
    for path in files:
        config.add_layer(read_file(str(path)), str(path))
    return config.tree


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Command]]:
    """Collect the commands that main() runs, with the objects they built."""
    made: list[Command] = []

    class Watched(Command):
        def __init__(self, request: Request) -> None:
            made.append(self)
            super().__init__(request)

    monkeypatch.setattr("fulgurite.command.Command", Watched)
    # Inductor takes up to minutes; tests/callbacks/test_compiling.py uses it.
    monkeypatch.setattr("fulgurite.callbacks.compiling._compile", lambda network, *_: network.compile(backend="eager"))
    yield made
    if dist.is_initialized():  # `strategy: ddp` leaves its group behind
        dist.destroy_process_group()


def print_config(command: list[str], capsys: pytest.CaptureFixture[str]) -> Tree:
    assert main([*command, "--print_config"]) == 0
    tree: Tree = yaml.safe_load(capsys.readouterr().out)
    return tree


def check_built(tree: Tree, command: Command) -> None:
    """Compare the optimizer and the schedule of a run with those that the tree's class paths and values make."""
    task, trainer = command.model, command.trainer
    section = tree["model"]["init_args"]
    expected = make(section["optimizer"])(task.network.parameters())
    (built,) = trainer.optimizers
    assert type(built) is type(expected)
    for group in built.param_groups:
        rate = group.get("initial_lr", group["lr"])  # the schedule has changed lr meanwhile
        chosen = ["params", "initial_lr", "max_lr", "min_lr", "name", "fused"]
        if section.get("rate_scaling") or section.get("layer_decay"):
            chosen.append("lr")  # test_optimizers and test_rate_scaling look at it
        spared = {"weight_decay": 0.0} if group["name"].endswith("no_decay") else {}
        wanted = expected.param_groups[0] | spared
        assert _without(group | {"lr": rate}, chosen) == _without(wanted, chosen)
    if section.get("scheduler") is None:
        assert not trainer.lr_scheduler_configs
        return
    (schedule,) = (config.scheduler for config in trainer.lr_scheduler_configs)
    assert schedule.optimizer is built
    assert type(schedule) is make(section["scheduler"]).func
    assert rates(task.optimizer, task.scheduler) == rates(make(section["optimizer"]), make(section["scheduler"]))


def _without(group: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def make(section: Tree) -> Any:
    module, _, class_name = section["class_path"].rpartition(".")
    return partial(getattr(import_module(module), class_name), **section.get("init_args", {}))


def rates(optimizer: Any, scheduler: Any) -> list[float]:
    """Return the rate of each step of a run of 100."""
    made = optimizer([torch.nn.Parameter(torch.zeros(1))])
    schedule = scheduler(made, 100)
    found = []
    for _ in range(100):
        found.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    return found


@each_file(FILES)
def test_says_what_it_sets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for files in (stack(path), stack(path)[::-1]):  # an overlay in front of an experiment is read too
        said = dict(leaves(merged(files)))
        printed = dict(leaves(print_config(["fit", *arguments(files)], capsys)))
        assert {key: printed.get(key) for key in said} == said


@each_file(OVERLAYS)
def test_head_gives_the_command(path: Path) -> None:
    head = [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    (command,) = [line for line in head if line.startswith("fulgurite")]
    if path.parent.name == "data":  # to be stacked on what is made for people's own images
        assert command.startswith(f"fulgurite fit -c configs/experiment/images.yaml -c configs/{name(path)} --data.")
    else:
        assert command == f"fulgurite fit -c configs/experiment/digits.yaml -c configs/{name(path)}"
    assert len(head) > 1  # what it is for


def save_data(folder: Path) -> None:
    """Write small stand-ins for the data that configurations name."""
    save_splits(folder / "images")
    for split in ("train", "val"):
        save_tree(folder / "imagenet" / split, count=20)
    save_tree(folder / "table", count=8)
    images = sorted(path.relative_to(folder) for path in folder.glob("table/*/*"))
    rows = [f"{path.as_posix()},{path.parent.name}" for path in images]
    (folder / "table.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
    save_mnist(folder, "FashionMNIST")


@each_file(ON_CPU)
def test_trains(path: Path, here: Path, commands: list[Command]) -> None:
    save_data(here / "data")
    if path.stem == "streaming":
        pytest.importorskip("litdata", reason="needs the extra `stream`")
        data = ["--data", "ImageFolderDataModule", "--data.root", "data/images"]
        assert main(["make-shards", *data, "--output", "data/shards"]) == 0
        commands.clear()
    small = SMALL if path in OVERLAYS else []
    size = ["--data.size", "28"] if path.parent.name == "data" else STAND_INS.get(path.stem, [])
    assert main(["fit", *small, *arguments([path]), *SHORT, *size]) == 0
    (command,) = commands
    assert command.trainer.global_step > 0
    check_built(merged(stack(path)), command)


def test_a_new_optimizer_takes_no_value_of_the_old(here: Path, commands: list[Command]) -> None:
    overlay = here / "sgd.yaml"
    overlay.write_text(
        "model:\n"
        "  init_args:\n"
        "    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9}}\n"
        "    scheduler: {class_path: torch.optim.lr_scheduler.PolynomialLR, init_args: {power: 2}}\n"
    )
    assert main(["fit", *SMALL, "-c", str(overlay), *SHORT]) == 0
    group = commands[0].trainer.optimizers[0].param_groups[0]
    assert (group["initial_lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 0)  # AdamW has a decay
    check_built(merged([DIGITS, overlay]), commands[0])
    with pytest.raises(AssertionError):
        check_built(merged([DIGITS]), commands[0])


def test_one_batch_leaves_nothing(here: Path, commands: list[Command]) -> None:
    assert main(["fit", *SMALL, "-c", str(CONFIGS / "debug" / "one_batch.yaml")]) == 0
    assert commands[0].trainer.global_step == 1
    assert list(here.iterdir()) == []


def test_overfit_repeats_two_batches(here: Path) -> None:
    still = ["--model.optimizer.lr", "0", "--data.shift", "0", "--trainer.max_epochs", "3"]
    assert main(["fit", *SMALL, "-c", str(CONFIGS / "debug" / "overfit.yaml"), *still]) == 0
    (metrics,) = here.glob("runs/*/v001/metrics.csv")
    losses = column(metrics, "train/loss_step")
    assert len(set(losses)) == 2  # nothing is learnt or augmented, so each batch has its own loss, epoch after epoch
    assert losses == losses[:2] * 3


def test_limit_does_what_a_real_run_does(here: Path) -> None:
    overlay = ["-c", str(CONFIGS / "debug" / "limit.yaml")]
    assert main(["fit", "-c", str(DIGITS), *overlay, "--trainer.enable_progress_bar", "false", "--test"]) == 0
    (run,) = here.glob("runs/*/v001")
    lengths = {key: len(column(run / "metrics.csv", key)) for key in ("train/loss_step", "train/loss", "val/loss", "test/loss")}
    assert lengths == {"train/loss_step": 8, "train/loss": 2, "val/loss": 2, "test/loss": 1}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def column(metrics: Path, key: str) -> list[float]:
    header, *rows = (line.split(",") for line in metrics.read_text(encoding="utf-8").splitlines())
    return [float(row[header.index(key)]) for row in rows if row[header.index(key)]]


@pytest.mark.parametrize(
    ("logger", "kept", "left_out"), [("csv", "metrics.csv", "events.*"), ("tensorboard", "events.*", "metrics.csv")]
)
def test_one_logger(logger: str, kept: str, left_out: str, here: Path) -> None:
    assert main(["fit", *SMALL, "-c", str(CONFIGS / "logger" / f"{logger}.yaml"), *SHORT]) == 0
    assert list(here.glob(f"runs/*/v001/{kept}"))
    assert not list(here.glob(f"runs/*/v001/{left_out}"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@each_file(ON_GPU)
def test_without_gpu_is_told_in_a_few_lines(path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_data(here / "data")
    small = SMALL if path in OVERLAYS else []
    assert main(["fit", *small, "-c", str(path), *STAND_INS.get(path.stem, [])]) == 2
    error = capsys.readouterr().err
    assert "no GPU" in error
    assert "--trainer.accelerator cpu" in error  # what to do
    assert len(error.splitlines()) <= 3
    assert [path.name for path in here.iterdir()] == ["data"]


@each_file([path for path in ON_GPU if path in EXPERIMENTS])
def test_experiment_for_gpus_trains_on_a_cpu_where_told_to(path: Path, here: Path, commands: list[Command]) -> None:
    save_data(here / "data")
    cpu = ["--trainer.accelerator", "cpu", "--trainer.strategy", "auto", "--trainer.precision", "32-true"]
    one = ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
    assert main(["fit", "-c", str(path), *cpu, *SHORT, *one, *STAND_INS[path.stem]]) == 0
    (command,) = commands
    assert command.trainer.global_step == 1
    check_built(merged([path]), command)


@pytest.mark.gpu
@each_file(ON_GPU)
def test_trains_on_gpu(path: Path, here: Path, commands: list[Command]) -> None:
    save_data(here / "data")
    small = SMALL if path in OVERLAYS else []
    assert main(["fit", *small, "-c", str(path), *SHORT, *STAND_INS.get(path.stem, [])]) == 0
    (command,) = commands
    assert command.trainer.strategy.root_device.type == "cuda"
    precision = read_file(str(path))["trainer"].get("precision", "32-true")
    assert command.trainer.precision == precision or precision == "auto"
    check_built(merged(stack(path)), command)


def test_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.M)) == {path.parent.name for path in FILES}
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(commands) == 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        program, *rest = shlex.split(command)
        assert program == "fulgurite"
        assert print_config(rest, capsys)["trainer"]["experiment"] in ("digits", "debug")
