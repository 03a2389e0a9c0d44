from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping, RichModelSummary

from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.exact_resume import ExactResume
from fulgurite.cli import main
from fulgurite.command import Command, run_command
from fulgurite.errors import UserError
from fulgurite.request import read_request
from tests.commands import printed_config, refused
from tests.conftest import DIGITS, SMALL

ONE_EPOCH = [*SMALL, "--trainer.max_epochs", "1"]
QUIET = ["--trainer.enable_progress_bar", "false"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return state


def built(*argv: str) -> Command:
    """Return a command that has run."""
    return Command(read_request("fit", argv))


# Verbs and checkpoints


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_without_a_checkpoint_is_refused(verb: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["-c", str(DIGITS)], ["-c", str(DIGITS), "--ckpt_path", "null"]):
        assert refused(capsys, verb, *argv) == (
            f"{verb} needs a checkpoint: --ckpt_path best for the latest run's, or a .ckpt file or run folder\n"
            "--ckpt_path none means the initial weights"
        )


@pytest.mark.parametrize("flags", [[], ["--ckpt_path", "none"]])
def test_prediction_without_a_checkpoint_is_refused(flags: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "predict", "-c", str(DIGITS), "--images", "x", *flags) == (
        "predict needs a checkpoint: --ckpt_path best for the latest run's, or a .ckpt file or run folder"
    )


def test_prediction_needs_images(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "predict", "--ckpt_path", str(trained_run))
    assert text == "predict needs images: --images FOLDER, or one image file"


def test_none_means_the_initial_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-c", str(DIGITS), "--ckpt_path", "none", *QUIET, "--trainer.limit_test_batches", "1"]) == 0
    assert "test/acc" in capsys.readouterr().out


def test_best_and_last_without_a_run_say_where_they_were_looked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("best", "last"):
        assert refused(capsys, "test", "--ckpt_path", name) == (
            f"no checkpoint under {here / 'runs'}\ntrain one first: fulgurite fit -c configs/experiment/digits.yaml"
        )


def test_fit_without_an_experiment_names_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "fit has no model and no data: give an experiment, such as -c configs/experiment/"
    assert refused(capsys, "fit") == f"{message}digits.yaml"
    for name in ("one.yaml", "two.yaml"):
        (here / "configs" / "experiment" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "configs" / "experiment" / name).touch()
    assert refused(capsys, "fit") == f"{message}one.yaml\nthere are 2 in configs/experiment"
    assert refused(capsys, "fit", "--data", "DigitsDataModule").startswith("fit has no model: give an experiment")


def test_the_checkpoint_alone_is_enough_from_another_folder(
    trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(trained_run / "checkpoints" / "best.ckpt", here / "moved.ckpt")
    scores = []
    for argv in (["validate", "--ckpt_path", "moved.ckpt"], ["validate", "--ckpt_path", str(trained_run)]):
        assert main([*argv, *QUIET]) == 0
        scores.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("validate ")))
    assert scores[0] == scores[1]


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_a_runs_own_configuration_serves_every_verb(
    verb: str, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.new("L", (8, 8)).save(here / "a.png")
    flags = {"fit": ["--trainer.runs_dir", "again"], "predict": ["--images", "a.png"]}.get(verb, [])
    checkpoint = [] if verb == "fit" else ["--ckpt_path", str(trained_run)]
    assert main([verb, "-c", str(trained_run / "config.yaml"), *checkpoint, *flags]) == 0
    if verb == "fit":
        again = weights(here / "again" / "digits" / "v001")
        assert all(torch.equal(value, again[name]) for name, value in weights(trained_run).items())


# Printing


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model.optimizer", "SGD", "--model.scheduler", "null", "--test"],
        ["--trainer.check_val_every_n_epoch", "null", "--trainer.val_check_interval", "3", "--seed_everything", "7"],
        ["--trainer.callbacks+", "Timer", "--trainer.callbacks.duration", "00:01:00:00", "--trainer.max_time", "{hours: 1}"],
        ["--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: val/loss}}, RichModelSummary]"],
        ["--trainer.callbacks+", "StochasticWeightAveraging", "--trainer.callbacks.swa_lrs", "0.1"],
        ["--trainer.strategy", "DDPStrategy", "--trainer.devices", "[0]", "--trainer.experiment", "2024-05-17"],
        ["--model.network", "ResNet", "--data.batch_size", "7", "--checkpoint.every_n_steps", "3"],
    ],
)
def test_what_is_printed_can_be_used_again(flags: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(capsys, "fit", "-c", str(DIGITS), *flags)
    (here / "printed.yaml").write_text(yaml.safe_dump(config))
    assert printed_config(capsys, "fit", "-c", "printed.yaml") == config
    assert list(here.glob("runs")) == []


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_what_is_printed_for_a_checkpoint_can_be_used_again(
    verb: str, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = ["--images", "x", "--top_k", "3"] if verb == "predict" else []
    config = printed_config(capsys, verb, "--ckpt_path", str(trained_run), *images)
    assert config["ckpt_path"].startswith(str(trained_run))
    (here / "printed.yaml").write_text(yaml.safe_dump(config))
    assert printed_config(capsys, verb, "-c", "printed.yaml") == config


def test_a_run_saves_null_where_it_replaces_a_default(here: Path) -> None:
    assert main(["fit", *ONE_EPOCH, "--trainer.check_val_every_n_epoch", "null", "--model.scheduler", "null"]) == 0
    saved = yaml.safe_load((here / "runs" / "digits" / "v001" / "config.yaml").read_text())
    assert saved["trainer"]["check_val_every_n_epoch"] is None
    assert saved["model"]["init_args"]["scheduler"] is None
    assert not {"ckpt_path", "test"} & saved.keys()


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["-c", str(DIGITS), "--help"], ["--help", "--bogus"]])
def test_help_of_a_verb(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *argv]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: fulgurite [options] fit [-c CONFIG]")
    assert "--trainer.max_epochs MAX_EPOCHS" in text
    assert len(text.splitlines()) < 600


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--model.help", "ClassificationTask"],
            "Learn the label of each image by cross-entropy, or where the spec says so its labels by binary cross-entropy:",
        ),
        (
            ["--model.help=fulgurite.tasks.ClassificationTask"],
            "Learn the label of each image by cross-entropy, or where the spec says so its labels by binary cross-entropy:",
        ),
        (
            ["-c", str(DIGITS), "--model.help"],
            "Learn the label of each image by cross-entropy, or where the spec says so its labels by binary cross-entropy:",
        ),
        (["--data.help", "DigitsDataModule"], "  --data.shift SHIFT    largest random shift of a training image, in pixels"),
        (["-c", str(DIGITS), "--model.network.help", "fulgurite.models.SmallCNN"], "  --network.width WIDTH"),
        (["--trainer.callbacks.help", "Timer"], "  --trainer.callbacks.duration DURATION"),
    ],
)
def test_help_of_a_class(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert line in lines
    assert len(lines) < 130  # stock help lists some 750 networks here


@pytest.mark.parametrize("argv", [["--model.help", "Nonsense"], ["--model.network.help", "SmallCNN"], ["--nothing.help"]])
def test_help_of_what_is_not_known(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "fit", *argv) == (
        f"no help for '{' '.join(argv)}': name a class, such as --model.help ClassificationTask\n"
        "what a class inside another takes is known with a configuration: -c FILE --model.network.help ResNet"
    )


# What a run is made of


def test_a_callback_that_a_file_and_a_flag_add_leaves_the_rest_in_place(here: Path) -> None:
    (here / "base.yaml").write_text("trainer: {callbacks: [{class_path: RichModelSummary}], enable_model_summary: true}\n")
    (here / "over.yaml").write_text("trainer: {callbacks+: {class_path: EarlyStopping, init_args: {monitor: val/loss}}}\n")
    flags = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/acc", "--trainer.callbacks.mode", "max"]
    trainer: Any = built(*ONE_EPOCH, "-c", "base.yaml", "-c", "over.yaml", *flags).trainer
    callbacks = trainer.callbacks
    assert [callback.monitor for callback in callbacks if isinstance(callback, EarlyStopping)] == ["val/loss", "val/acc"]
    for kind in (RichModelSummary, Checkpoints, ExactResume):
        assert sum(isinstance(callback, kind) for callback in callbacks) == 1
    run = here / "runs" / "digits" / "v001"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_another_optimizer_gets_no_value_of_the_old_one(here: Path) -> None:
    command = built(*ONE_EPOCH, "--model.optimizer", "SGD", "--model.optimizer.lr", "0.25", "--model.scheduler", "null")
    group = command.trainer.optimizers[0].param_groups[0]
    assert type(command.trainer.optimizers[0]) is torch.optim.SGD
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.25, 0, 0)  # the digits have weight_decay 0.01


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.batch_size", "0"], "the command line: data.init_args.batch_size is 0; it must be at least 1"),
        (["--model.network.width", "0"], "the command line: model.init_args.network.init_args.width is 0; it must be at"),
        (["--checkpoint.every_n_steps", "0"], "the command line: checkpoint.every_n_steps is 0; it must be at least 1"),
        (["--trainer.experiment", "a/b"], "the command line: trainer.experiment is 'a/b'; it names a folder"),
        (["--model.scheduler.warmup", "3"], "the command line: model.init_args.scheduler.init_args.warmup is 3.0; it is a share"),
        (["--model.optimizer.lr", "-1"], "Invalid learning rate: -1.0\nrefused by torch.optim; --debug shows where"),
        (
            ["--data", "lightning.pytorch.demos.boring_classes.BoringDataModule"],
            "the command line: data is BoringDataModule, which",
        ),
    ],
)
def test_what_a_class_refuses_is_told_with_its_key(
    flags: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, "fit", *ONE_EPOCH, *flags)
    assert text.startswith(message)
    assert len(text.splitlines()) <= 2
    assert [path for path in here.glob("runs/*/*") if path.is_dir()] == []


def test_a_file_named_like_a_value_is_not_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = printed_config(capsys, "fit", "-c", str(DIGITS), "--trainer.strategy", "ddp")
    for name in ("auto", "ddp", "fulgurite.models.SmallCNN"):
        (here / name).write_text("class_path: lightning.pytorch.strategies.DDPStrategy\n")
    assert printed_config(capsys, "fit", "-c", str(DIGITS), "--trainer.strategy", "ddp") == expected


def test_a_task_without_a_spec_can_be_configured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(capsys, "fit", "-c", str(DIGITS), "--model", "lightning.pytorch.demos.boring_classes.BoringModel")
    assert config["model"] == {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}


# Seeds


def test_lightning_does_not_announce_the_seed(here: Path) -> None:
    argv = [sys.executable, "-m", "fulgurite", "fit", *SMALL, "--trainer.fast_dev_run"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert "Seed set" not in done.stdout + done.stderr


def seed_of(*flags: str) -> int:
    os.environ.pop("PL_GLOBAL_SEED", None)
    seed = built(*SMALL, "--trainer.fast_dev_run", *flags).config["fit"]["seed_everything"]
    assert os.environ["PL_GLOBAL_SEED"] == str(seed)
    return int(seed)


def test_true_draws_a_seed_and_says_which(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert seed_of() == 0
    assert seed_of("--seed_everything", "7") == 7
    capsys.readouterr()
    drawn = {seed_of("--seed_everything", "true") for _ in range(2)}
    assert len(drawn) == 2
    out = capsys.readouterr().out
    assert all(f"seed        {seed}, drawn at random\n" in out for seed in drawn)


def test_processes_of_one_job_share_a_drawn_seed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*SMALL, "--trainer.fast_dev_run", "--seed_everything", "true"]
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")  # as the process that starts the others hands it on
    command: Any = built(*argv)
    assert command.config["fit"]["seed_everything"] == 5
    monkeypatch.delenv("PL_GLOBAL_SEED")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="seed_everything is true, and each process would draw its own seed: give a number"):
        run_command("fit", argv)
