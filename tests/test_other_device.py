"""A checkpoint that was made on a GPU serves a machine without one, and the other way round."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.optim import AdamW

from fulgurite import load
from fulgurite.callbacks.overrides import _fit_to
from fulgurite.cli import main
from tests.callbacks.test_exact_resume import end
from tests.training import at_batch, fit

FUSED: dict[str, Any] = {"fused": True, "foreach": None}
FOREACH: dict[str, Any] = {"fused": None, "foreach": None}


def save_as_on_gpu(monkeypatch: pytest.MonkeyPatch, checkpoint: Any, path: Path) -> None:
    """Save as PyTorch does where all tensors are on a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(checkpoint, path)


def forge(monkeypatch: pytest.MonkeyPatch, run: Path, kernels: dict[str, Any]) -> None:
    """Make a run look as if it had been trained on a GPU, with an optimizer that computes with these kernels."""
    for path in (run / "checkpoints").iterdir():
        checkpoint = torch.load(path, weights_only=True)
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group.update(kernels)
        save_as_on_gpu(monkeypatch, checkpoint, path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU finds the tensors' device")
def test_what_is_forged_asks_for_a_gpu(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_on_gpu(monkeypatch, {"weight": torch.zeros(1)}, here / "file.pt")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(here / "file.pt", weights_only=True)


@pytest.mark.parametrize("optimizer", [[], ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.momentum", "0.9"]])
@pytest.mark.parametrize("kernels", [FUSED, FOREACH], ids=["fused", "foreach"])
def test_run_of_a_gpu_goes_on_on_a_cpu_in_the_same_bits(
    here: Path, monkeypatch: pytest.MonkeyPatch, optimizer: list[str], kernels: dict[str, Any]
) -> None:
    runs = {}
    for name in ("forged", "true"):
        assert fit(*optimizer, "--trainer.experiment", name) == 0
        runs[name] = here / "runs" / name / "v001"
    forge(monkeypatch, runs["forged"], kernels)
    for run in runs.values():
        assert main(["fit", "--resume", str(run), "--trainer.max_epochs", "3"]) == 0
    assert end(runs["forged"]) == end(runs["true"])


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_counts_its_steps_where_its_kernels_look(here: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    # As on a GPU: a fused step wants its count there, the others want it on the CPU. The meta device stands in for the GPU.
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    step = torch.tensor(7.0)
    saved = AdamW([torch.nn.Parameter(torch.zeros(2))], fused=not fused).state_dict()
    saved["state"] = {0: {"step": step, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}}
    optimizer = AdamW([parameter])
    optimizer.param_groups[0]["fused"] = fused
    _fit_to(saved["param_groups"], optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is fused
    assert optimizer.state[parameter]["step"].device.type == ("meta" if fused else "cpu")
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"


def test_checkpoint_of_a_gpu_is_evaluated_used_and_loaded_on_a_cpu(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / "gpu.ckpt"
    checkpoint = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)
    save_as_on_gpu(monkeypatch, checkpoint, file)
    quiet = ["--trainer.enable_progress_bar", "false"]
    said = []
    for path in (file, trained_run / "checkpoints" / "best.ckpt"):
        capsys.readouterr()
        assert main(["test", "--ckpt_path", str(path), *quiet]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("test ")])
    assert said[0] == said[1] != []
    Image.new("L", (8, 8), 99).save(here / "one.png")
    assert main(["predict", "--ckpt_path", str(file), "--images", "one.png", *quiet]) == 0
    assert next(load(file).network.parameters()).device.type == "cpu"


def test_other_kernels_are_no_other_settings(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        at_batch(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert fit("--model.optimizer.foreach", "true") == 75
    capsys.readouterr()
    assert main(["fit", "--resume", "--model.optimizer.foreach", "null"]) == 0
    out = capsys.readouterr().out
    assert "AdamW, fused" in out
    assert "played anew" not in out
