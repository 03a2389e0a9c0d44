from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch.optim import SGD

from fulgurite import Trainer, load
from fulgurite.callbacks.run_record import RunRecord
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from tests.conftest import ROOT, SMALL

RUN = Path("runs/digits/v001")


def checkpoint(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return found


def test_config_of_a_run_makes_the_run_again(here: Path, trained_run: Path) -> None:
    assert main(["fit", "-c", str(trained_run / "config.yaml"), "--trainer.runs_dir", "runs"]) == 0
    first, again = checkpoint(trained_run)["state_dict"], checkpoint(RUN)["state_dict"]
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_config_of_a_run_serves_each_verb(here: Path, trained_run: Path, verb: str) -> None:
    # Class names and normalisation are not in it: they come from the data, or from the checkpoint.
    Image.new("L", (8, 8)).save("one.png")
    images = ["--images", "one.png"] if verb == "predict" else []
    assert main([verb, "-c", str(trained_run / "config.yaml"), "--ckpt_path", str(trained_run), *images]) == 0


def test_run_can_be_moved_and_used_from_anywhere(here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained_run, here / "elsewhere" / "mine")
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert main(["test", "--ckpt_path", "../elsewhere/mine"]) == 0
    assert main(["fit", "--ckpt_path", "../elsewhere/mine", "--trainer.max_epochs", "3"]) == 0
    assert (here / "empty" / RUN / "checkpoints" / "best.ckpt").is_file()


def test_checkpoint_holds_where_it_comes_from(trained_run: Path) -> None:
    description = checkpoint(trained_run)["fulgurite"]
    assert description["config"] == (trained_run / "config.yaml").read_text()
    assert yaml.safe_load(description["config"])["data"]["class_path"] == "fulgurite.data.DigitsDataModule"
    assert description["spec"] == DigitsDataModule().spec.to_dict()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    origin = description["provenance"]
    assert origin["git_commit"] == (commit or None)
    assert origin["git_dirty"] in ((True, False) if commit else (None,))
    assert origin["versions"] == {name: version(name) for name in ("fulgurite", "torch", "torchvision", "lightning")}
    assert origin["python"] == platform.python_version()
    assert origin["host"] == f"{platform.system()} {platform.machine()}"
    assert origin["command"].startswith(sys.argv[0])
    assert origin["seed"] == 0
    assert origin["data_fingerprint"] == DigitsDataModule().fingerprint()


def test_run_says_what_it_starts_with_and_what_it_came_to(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--trainer.max_epochs", "1"]) == 0
    said = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith(("device", "workers", "optimizer", "plan"))
    ]
    network = SmallCNN(10, 1, width=4)
    assert said[:2] == [
        f"run         {RUN}",
        f"network     SmallCNN, {sum(parameter.numel() for parameter in network.parameters()):,} parameters",
    ]
    assert said[2].startswith("trained     best val/acc 0.")
    assert " in epoch 1, 1 epochs, 4 steps, " in said[2]


def test_run_whose_batches_were_trained_in_another_process_is_kept(tmp_path: Path) -> None:
    record = RunRecord()
    for name in ("metrics.csv", "checkpoints/last.ckpt"):
        run = tmp_path / name.replace("/", "-")
        trainer = SimpleNamespace(run_dir=run)
        (run / name).parent.mkdir(parents=True)
        (run / name).touch()
        record.require_trained(trainer)
        record.drop_untrained(trainer)
        assert (run / name).exists()


def test_network_without_a_name_is_trained_and_the_note_says_what_is_lost(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = DigitsDataModule()
    task = ClassificationTask(
        lambda classes, channels: SmallCNN(classes, channels, width=4), partial(SGD, lr=0.1), spec=data.spec
    )
    trainer = Trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, enable_progress_bar=False)
    trainer.fit(task, datamodule=data)
    out = capsys.readouterr().out
    assert out.count("config      not recorded, so the checkpoints need code to be loaded: <function") == 1
    assert "cannot be written to a configuration: use a class or functools.partial of a class\n" in out
    run = Path("runs/default/v001")
    assert (run / "config.yaml").read_text() == ""
    (metrics,) = trainer.test(task, datamodule=data, ckpt_path="best")
    assert 0 <= metrics["test/acc"] <= 1
    with pytest.raises(ValueError, match=r"last\.ckpt does not name its model: it was trained from Python with a part"):
        load(run / "checkpoints" / "last.ckpt")
