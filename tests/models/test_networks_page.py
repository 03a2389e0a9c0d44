"""Build what docs/networks.md shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
import yaml

from tests.commands import printed_config
from tests.conftest import ROOT
from tests.images import save_splits

PAGE = (ROOT / "docs" / "networks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
def test_configurations_are_taken(block: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = yaml.safe_load(block)["model"]["init_args"]["network"]
    extra = {"TimmNetwork": "timm", "HuggingFaceNetwork": "transformers"}.get(given["class_path"].rpartition(".")[2])
    if extra:
        pytest.importorskip(extra, reason="needs the extras `timm` and `hf`")
    (here / "models" / "dinov2").mkdir(parents=True)
    config = {"model_type": "dinov2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (here / "models" / "dinov2" / "config.json").write_text(json.dumps(config))
    (here / "more.yaml").write_text(block, encoding="utf-8")
    images = str(ROOT / "configs" / "experiment" / "images.yaml")
    printed = printed_config(capsys, "fit", "-c", images, "-c", "more.yaml")["model"]["init_args"]["network"]
    assert printed["class_path"] == given["class_path"]
    assert printed["init_args"].items() >= given["init_args"].items()


def test_python_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_splits(here / "flowers")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(here))
    (here / "checkpoints").mkdir()
    torch.save(torchvision.models.resnet18().state_dict(), here / "checkpoints" / "resnet18-f37072fd.pth")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/networks.md", "exec"), names)
    assert names["task"](torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape == (1, 2)
    assert names["data"].spec.height == 224


def test_every_network_is_in_the_table() -> None:
    import fulgurite.models

    assert all(f"| `{name}` |" in PAGE for name in fulgurite.models.__all__)
