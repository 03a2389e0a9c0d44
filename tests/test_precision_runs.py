"""Train, evaluate and predict in each precision."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fulgurite import load
from fulgurite.cli import main
from fulgurite.tasks.loss import ClassificationLoss
from tests.classification import SEVERAL, make, quiet, several
from tests.classification import data as labelled
from tests.conftest import ROOT, SMALL
from tests.images import save_tree
from tests.training import RUN, fit


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")


@pytest.mark.parametrize("precision", [*PRECISIONS[:3], pytest.param("64-true", marks=pytest.mark.slow)])
def test_whole_run(here: Path, precision: str) -> None:
    save_tree(here / "images", count=1)
    assert fit("--trainer.precision", precision, "--ema.decay", "0.5", "--model.mixup", "0.2", "--test") == 0
    state = torch.load(RUN / "checkpoints" / "last.ckpt", weights_only=True)
    # EMA's are float32 at least.
    wide = torch.float64 if precision == "64-true" else torch.float32
    assert {value.dtype for value in state["state_dict"].values() if value.is_floating_point()} == {wide}
    losses = [float(row["test/loss"]) for row in table(RUN / "metrics.csv") if row.get("test/loss")]
    assert all(0 < loss < 3 for loss in losses)
    assert losses
    assert main(["predict", "--ckpt_path", str(RUN), "--images", "images", "--trainer.precision", precision]) == 0
    rows = table(here / "predictions.csv")
    assert rows
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)
    assert next(load(RUN).parameters()).dtype == torch.float32


def test_evaluation_is_in_float32_unless_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit("--trainer.precision", "bf16-mixed", epochs=1) == 0
    seen: set[torch.dtype] = set()
    measure = ClassificationLoss.forward

    def forward(self: ClassificationLoss, logits: Tensor, targets: Tensor) -> Tensor:
        seen.add(logits.dtype)
        return measure(self, logits, targets)

    monkeypatch.setattr(ClassificationLoss, "forward", forward)
    for given, wanted in {None: torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}.items():
        seen.clear()
        flags = ["--trainer.precision", given] if given else []
        assert main(["test", "--ckpt_path", str(RUN), "--trainer.enable_progress_bar", "false", *flags]) == 0
        assert seen == {wanted}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_labels_and_weights(here: Path, precision: Any) -> None:
    data = DataLoader(several(32), batch_size=8, collate_fn=lambda batch: batch)
    task = make(spec=SEVERAL, class_weights=[1.0, 2.0, 3.0], label_smoothing=0.1)
    trainer = quiet(accelerator="cpu", precision=precision, max_epochs=2)
    trainer.fit(task, data, data)
    assert 0 < float(trainer.callback_metrics["val/loss"]) < 5
    assert 0 < float(trainer.callback_metrics["val/map"]) <= 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_agree(here: Path, precision: Any) -> None:
    images = labelled(8).images
    task = make().eval()
    expected = task.probabilities(images)
    loader = DataLoader(TensorDataset(images, torch.arange(8)), batch_size=8)
    trainer = quiet(accelerator="cpu", precision=precision)
    found: Any
    (found,) = pl.Trainer.predict(trainer, task, loader) or []
    assert found["probability"].dtype == torch.float32
    torch.testing.assert_close(found["probability"], expected, rtol=0.05, atol=0.01)


def test_commands_of_the_documentation_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    monkeypatch.chdir(ROOT)
    for command in commands:
        assert main([*shlex.split(command)[1:], *SMALL[2:], "--trainer.max_epochs", "1", "--trainer.runs_dir", str(here)]) == 0
    assert len(commands) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "auto"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_on_gpu(here: Path, precision: str, memory_format: str) -> None:
    args = ["--trainer.accelerator", "gpu", "--trainer.precision", precision, "--trainer.memory_format", memory_format]
    assert fit(*args, "--ema.decay", "0.5", "--test") == 0
    assert main(["fit", "--resume", "--trainer.max_epochs", "3"]) == 0
