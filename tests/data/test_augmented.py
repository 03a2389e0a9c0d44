from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.data import ImageFolderDataModule
from fulgurite.errors import UserError
from tests.images import save_splits


def module(root: Path, **options: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(root, **{"size": 16, "num_workers": 0} | options)


def test_erasing_is_for_training_alone(tmp_path: Path) -> None:
    data = module(save_splits(tmp_path), augment="strong")
    batch = torch.full((50, 3, 16, 16), 7, dtype=torch.uint8), torch.zeros(50)
    stages = []
    for training in (True, False):
        data.trainer = type("Stage", (), {"training": training})()
        stages.append((data.on_after_batch_transfer(batch, 0)[0] != 7).any().item())
    assert stages == [True, False]


def test_a_data_set_is_made_once(tmp_path: Path) -> None:
    data = module(save_splits(tmp_path))
    assert data.dataset("val") is data.dataset("val")
    assert data.dataset("train").augmentation is not None
    assert data.dataset("val").augmentation is None


def test_a_share_that_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_broken is 1\.5; it is a share, from 0 to 1"):
        module(tmp_path, max_broken=1.5)


def test_what_was_skipped_is_listed_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = save_splits(tmp_path)
    (root / "val" / "cat" / "0.png").write_bytes(b"")
    data = module(root, on_error="skip", max_broken=0.5)
    assert [len(labels) for _, labels in data.val_dataloader()] == [7]
    capsys.readouterr()
    data.teardown("fit")
    assert capsys.readouterr().out.startswith("skipped     1 images of the val split cannot be read: ")
