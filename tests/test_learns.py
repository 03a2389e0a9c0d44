"""The shipped experiments learn: a broken pipeline stays below the bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulgurite import Trainer, load
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from tests.conftest import DIGITS


def test_digits(here: Path) -> None:
    # A quarter of the epochs on a network of half the width: 0.978 to 0.993 over 4 seeds; chance is 0.1.
    small = ["--model.network.width", "16", "--trainer.max_epochs", "5", "--trainer.enable_progress_bar", "false"]
    assert main(["fit", "-c", str(DIGITS), *small]) == 0
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (metrics,) = trainer.test(load("best"), datamodule=DigitsDataModule())
    assert metrics["test/acc"] > 0.96
    assert metrics["test/acc_macro"] == pytest.approx(metrics["test/acc"], abs=0.02)
