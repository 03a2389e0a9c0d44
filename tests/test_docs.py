"""Run what docs/ tells people to run, and build what it shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from fulgurite.cli import main
from fulgurite.models import SmallCNN
from tests.conftest import ROOT
from tests.images import save_splits, save_tree
from tests.training import at_batch

DATA = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
# Put behind each `fit`, so that it is the same command on less.
LESS = [
    *("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"),
    *("--model.network.width", "4", "--data.size", "32", "--data.num_workers", "0", "--trainer.enable_progress_bar", "false"),
]


@pytest.fixture
def checkout(here: Path) -> Path:
    """A folder like a checkout, with the images that the text speaks of."""
    shutil.copytree(ROOT / "configs", here / "configs")
    save_splits(here / "flowers", ("daisy", "rose"), count=5)
    images = save_tree(here / "plants", count=8)
    rows = [f"plants/{path.relative_to(images).as_posix()},{path.parent.name}" for path in sorted(images.glob("*/*"))]
    (here / "plants.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
    return here


def test_commands_run(checkout: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", DATA, re.S)
    commands = [line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("fulgurite fit")]
    assert len(commands) == 2
    for command in commands:
        assert main([*shlex.split(command.replace("$fold", "3"))[1:], *LESS]) == 0, command


def test_python_runs(checkout: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DATA, re.S)
    names: dict[str, object] = {}
    exec(compile(code, "docs/data.md", "exec"), names)
    data: object = names["data"]
    assert data.spec.class_names == ("cat", "dog")  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", DATA, re.S))
def test_configurations_are_taken(checkout: Path, block: str) -> None:
    given = yaml.safe_load(block)
    split = given["data"]["init_args"].get("split", {})
    if "num_folds" in split:  # the text lists all keys; these two exclude each other
        del split["val_fraction"]
    (checkout / "more.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    shutil.rmtree(checkout / "flowers" / "test")
    shutil.rmtree(checkout / "flowers" / "val")
    images = ["-c", "configs/experiment/images.yaml", "-c", "more.yaml", "--data.root", "flowers"]
    assert main(["fit", *images, *LESS]) == 0


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for name in re.findall(r"`((?:configs|tests)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name


def commands_in(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("fulgurite ")]


def fit_digits(epochs: int) -> None:
    command = ["fit", "-c", "configs/experiment/digits.yaml", *LESS[2:8], "--trainer.max_epochs", str(epochs)]
    assert main([*command, "--trainer.enable_progress_bar", "false"]) == 0


@pytest.mark.parametrize("command", commands_in("resuming.md"))
def test_commands_of_resuming(checkout: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    with monkeypatch.context() as patched:
        at_batch(patched, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(AssertionError, match="75"):
            fit_digits(3)
    fewer = LESS[2:8] if "-c " in command else []
    last = ["--trainer.max_epochs", "3"] if "max_epochs" not in command else []
    assert main([*shlex.split(command)[1:], *fewer, *last]) == 0


@pytest.mark.parametrize("command", commands_in("finetuning.md"))
def test_commands_of_finetuning(checkout: Path, command: str) -> None:
    fit_digits(1)
    torch.save(SmallCNN(10, 1, width=4).state_dict(), "weights.pth")
    assert main([*shlex.split(command)[1:], *LESS[:8]]) == 0


def test_configuration_and_python_of_finetuning(checkout: Path) -> None:
    text = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    block, freezing = re.findall(r"```yaml\n(.*?)```", text, re.S)
    state = SmallCNN(10, 1, width=4).state_dict()
    torch.save({name.replace("stages.", "backbone."): value for name, value in state.items()}, "weights.pth")
    for part in (block, freezing):
        Path("more.yaml").write_text(part, encoding="utf-8")
        assert main(["fit", "-c", "configs/experiment/digits.yaml", "-c", "more.yaml", *LESS[:8]]) == 0
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(code, "docs/finetuning.md", "exec"), {})


@pytest.mark.parametrize("command", [*commands_in("training.md"), *commands_in("compile.md"), *commands_in("precision.md")])
def test_commands_of_training(checkout: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("fulgurite.callbacks.compiling._compile", lambda network, *_: network.compile(backend="eager"))
    assert main([*shlex.split(command)[1:], *LESS[:8]]) == 0


@pytest.mark.parametrize("page", ["training.md", "compile.md"])
def test_configuration_and_python_of_training(checkout: Path, page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    Path("more.yaml").write_text(block, encoding="utf-8")
    residual = ["--model.network", "ResNet", "--model.network.layers", "[1, 1]"]  # has blocks to recompute
    assert main(["fit", "-c", "configs/experiment/digits.yaml", *residual, "-c", "more.yaml", *LESS[:8]]) == 0
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, f"docs/{page}", "exec"), {})
