"""What tests share: a folder of their own, one small trained run, and no state left over from another test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fulgurite.cli import main

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "configs" / "experiment" / "digits.yaml"
# The digits experiment, small enough for a test: 4 steps an epoch.
SMALL = [
    *("-c", str(DIGITS)),
    *("--model.network.width", "4"),
    *("--trainer.limit_train_batches", "4"),
    *("--trainer.limit_val_batches", "2"),
    *("--trainer.enable_progress_bar", "false"),
]


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Undo what a run leaves in the process: the seed that Lightning hands on, and PyTorch's random state."""
    environment, state = dict(os.environ), torch.get_rng_state()
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_rng_state(state)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder of this test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two short epochs on the digits; tests read it and leave it as it is."""
    runs = tmp_path_factory.mktemp("trained")
    assert main(["fit", *SMALL, "--trainer.max_epochs", "2", "--trainer.runs_dir", str(runs)]) == 0
    return runs / "digits" / "v001"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


torch.set_num_threads(1)  # tests run beside their own child processes on two cores
