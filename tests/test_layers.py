from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fulgurite.callbacks.sections import SECTIONS
from fulgurite.layers import checkpoint_layer
from tests.commands import printed_config, refused
from tests.conftest import DIGITS


def copied(trained_run: Path, path: Path, **sections: Any) -> Path:
    """Copy a checkpoint with other sections in its configuration."""
    checkpoint = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)
    checkpoint["fulgurite"]["config"] = yaml.safe_dump(yaml.safe_load(checkpoint["fulgurite"]["config"]) | sections)
    torch.save(checkpoint, path)
    return path


def test_files_go_over_the_checkpoint_and_flags_over_files(
    trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "one.yaml").write_text("trainer: {max_epochs: 11, gradient_clip_val: 1}\nmodel: {init_args: {top_k: 3}}\n")
    (here / "two.yaml").write_text("trainer: {max_epochs: 12}\n")
    argv = ["--trainer.gradient_clip_val", "2", "--ckpt_path", str(trained_run), "-c", "one.yaml", "-c", "two.yaml"]
    config = printed_config(capsys, "fit", *argv)
    assert config["model"]["init_args"]["network"]["init_args"]["width"] == 4  # the checkpoint's
    assert config["trainer"]["limit_train_batches"] == 4
    assert config["model"]["init_args"]["top_k"] == 3  # a file's
    assert config["trainer"]["max_epochs"] == 12  # the later file's
    assert config["trainer"]["gradient_clip_val"] == 2  # a flag's, wherever it stands


def test_evaluation_takes_model_and_data_and_not_how_it_was_trained(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = printed_config(capsys, "test", "--ckpt_path", str(trained_run))
    assert config["model"]["init_args"]["network"]["init_args"]["width"] == 4
    assert config["data"]["class_path"] == "fulgurite.data.DigitsDataModule"
    assert (config["trainer"]["limit_train_batches"], config["trainer"]["experiment"]) == (None, "default")


def test_prediction_takes_the_spec_and_leaves_the_data(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(capsys, "predict", "--ckpt_path", str(trained_run), "--images", "x", "-c", str(DIGITS))
    assert config["model"]["init_args"]["spec"]["class_names"] == [str(digit) for digit in range(10)]
    assert "data" not in config


def test_a_run_takes_no_place_and_no_object_from_a_checkpoint(trained_run: Path, tmp_path: Path) -> None:
    crafted = {
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.LambdaCallback"}],
        "callbacks+": "lightning.pytorch.callbacks.LambdaCallback",
        "logger": "WandbLogger",
        "plugins": "x",
        "plugins+": "x",
        "profiler": "advanced",
        "default_root_dir": "/elsewhere",
        "runs_dir": "/elsewhere",
        "runs_dir+": "/elsewhere",
        "model_registry": "someone/else",
        "strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"},
        "accelerator": ["x"],
    }
    kept = {"max_time": {"minutes": 5}, "devices": [0], "precision": "bf16-true", "gradient_clip_val": 0.5}
    path = copied(trained_run, tmp_path / "crafted.ckpt", trainer=crafted | kept)
    assert checkpoint_layer(path, "fit", [])["trainer"] == kept


def test_a_resumed_run_goes_by_the_same_metric(trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(trained_run, here / "a.ckpt", checkpoint={"monitor": "val/loss", "mode": "min", "every_n_steps": None})
    assert printed_config(capsys, "fit", "--ckpt_path", "a.ckpt")["checkpoint"]["monitor"] == "val/loss"


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_only_fit_takes_trainer_settings(verb: str, trained_run: Path) -> None:
    assert "trainer" not in checkpoint_layer(trained_run / "checkpoints" / "best.ckpt", verb, [])


@pytest.mark.parametrize("section", ["model", "data", "trainer", "checkpoint"])
@pytest.mark.parametrize("value", ["text", ["list"], 3])
def test_sections_without_keys_are_refused(
    section: str, value: Any, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(trained_run, here / "a.ckpt", **{section: value})
    text = refused(capsys, "fit", "--ckpt_path", "a.ckpt")
    assert text == f"a.ckpt: there are no keys under {section} in its configuration"


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_arguments_that_are_no_keys_are_refused(
    verb: str, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(trained_run, here / "a.ckpt", model={"class_path": "fulgurite.tasks.ClassificationTask", "init_args": ["x"]})
    text = refused(capsys, verb, "--ckpt_path", "a.ckpt")
    assert text == "a.ckpt: there are no keys under model in its configuration"


def test_best_is_looked_for_where_a_file_or_flag_says(trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.yaml").write_text(f"trainer: {{runs_dir: {trained_run.parent.parent}}}\n")
    for argv in (["-c", "mine.yaml"], ["--trainer.runs_dir", str(trained_run.parent.parent)]):
        for name in ("best", "last"):
            config = printed_config(capsys, "test", "--ckpt_path", name, *argv)
            assert config["ckpt_path"] == str(trained_run / "checkpoints" / f"{name}.ckpt")


def test_a_checkpoint_may_be_named_by_a_file(trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.yaml").write_text(f"ckpt_path: {trained_run}\n")
    assert printed_config(capsys, "test", "-c", "mine.yaml")["ckpt_path"] == str(trained_run / "checkpoints" / "best.ckpt")
    assert printed_config(capsys, "fit", "-c", "mine.yaml")["ckpt_path"] == str(trained_run / "checkpoints" / "last.ckpt")
    text = refused(capsys, "test", "-c", "mine.yaml", "--ckpt_path", "none")
    assert text.startswith("test has no model and no data: give an experiment, such as -c configs/experiment/digits.yaml")


def test_keys_of_another_verb_are_no_mistake_in_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "other.yaml").write_text("images: x\noutput: y.csv\ntop_k: 3\nbatch_size: 7\nnum_workers: 0\nckpt_path: null\n")
    expected = printed_config(capsys, "fit", "-c", str(DIGITS))
    assert printed_config(capsys, "fit", "-c", str(DIGITS), "-c", "other.yaml") == expected


@pytest.mark.parametrize("key", ["imges", "config", "print_config", "datamodule", "weights_only", "self"])
def test_keys_of_no_verb_are_a_mistake_in_a_file(key: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "other.yaml").write_text(f"{key}: x\n")
    assert f"other.yaml: {key} is not a key" in refused(capsys, "fit", "-c", str(DIGITS), "-c", "other.yaml")


def test_a_missing_checkpoint_is_told_with_all_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, "test", "--ckpt_path", "nowhere", "-c", "none.yaml", "--bogus", "1").splitlines()
    keys = ", ".join(sorted(["ckpt_path", "data", "model", "seed_everything", "trainer", *SECTIONS]))
    assert lines == [
        "3 mistakes in the configuration",
        "no configuration file none.yaml",
        "no checkpoint at nowhere",
        "allowed: a .ckpt file, a run folder, or best or last for those of the latest run",
        f"the command line: bogus is not a key; allowed: {keys}",
    ]
