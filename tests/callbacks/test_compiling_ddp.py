"""Compiled and recomputing networks on two CPU processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
from functools import partial
import torch
from fulgurite.callbacks import compiling
from fulgurite.callbacks.activation_checkpointing import ActivationCheckpointing
from fulgurite.callbacks.compiling import Compile
from fulgurite.data import DigitsDataModule
from fulgurite.models import ResNet
from fulgurite.tasks import ClassificationTask
from torch.optim import SGD
from fulgurite import Trainer
import sys
compiling._compile = lambda network, mode, device: network.compile(backend="aot_eager")
chosen = {"plain": [], "compile": [Compile(mode="default")], "recompute": [ActivationCheckpointing(every=1)]}
data = DigitsDataModule()
torch.manual_seed(0)
network = partial(ResNet, width=8, layers=(1, 1), drop_path=0.2)
task = ClassificationTask(network, partial(SGD, lr=0.05), spec=data.spec)
options = {"devices": 2, "accelerator": "cpu", "strategy": "ddp", "logger": False, "experiment": sys.argv[1]}
limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, "enable_progress_bar": False}
Trainer(callbacks=chosen[sys.argv[1]], **options, **limits).fit(task, datamodule=data)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile", "recompute"])
def test_two_processes(here: Path, name: str) -> None:
    Path("program.py").write_text(PROGRAM)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PL_GLOBAL_SEED": "0"}
    ends = []
    for kind in ("plain", name):
        done = subprocess.run(
            [sys.executable, "program.py", kind], env=environment, timeout=200, check=False, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        assert b"uncompiled" not in done.stdout
        ends.append(torch.load(f"runs/{kind}/v001/checkpoints/last.ckpt", weights_only=True)["state_dict"])
    assert ends[0].keys() == ends[1].keys()
    for key in ends[0]:
        torch.testing.assert_close(ends[0][key], ends[1][key], msg=key)
