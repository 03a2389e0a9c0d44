"""Run what the README tells people to run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from fulgurite.cli import main
from tests.conftest import ROOT
from tests.images import save_splits

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
COMMANDS = [line.partition(" #")[0].strip() for block in BLOCKS for line in block.splitlines()]
# Put behind each `fit`, so that it is the same command on less.
QUICK = ["--seconds", "0.05", "--workers", "[0, 1]", "--prefetch", "[2]"]
LESS = ["--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1", "--model.network.width", "4"]


@pytest.fixture
def checkout(here: Path) -> Path:
    """A folder like a checkout, with photos in it."""
    shutil.copytree(ROOT / "configs", here / "configs")
    (here / "photos").mkdir()
    Image.linear_gradient("L").save(here / "photos" / "digit.png")
    save_splits(here / "flowers", ("daisy", "rose"))
    return here


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    assert targets == ["train", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_commands_run(checkout: Path) -> None:
    commands = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("fulgurite ")]
    assert len(commands) == 17
    for number, command in enumerate(commands, 1):
        fits = command[0] in ("fit", "plan") and "--help" not in command
        epochs = ["--trainer.max_epochs", str(number)] if "--resume" in command else ["--trainer.max_epochs", "1"]
        needs_gpu = any("ddp_16mixed" in argument for argument in command)
        less = LESS + epochs if fits else QUICK if command[0] == "find-workers" else []
        assert main(command + less) == (2 if needs_gpu else 0), command
    assert (checkout / "predictions.csv").read_text(encoding="utf-8").startswith("path,label,probability,label_2")


def test_python_runs(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line and "import" not in line]) < 15
    exec(compile(code, "README.md", "exec"), {})
    assert "Prediction(label=" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
