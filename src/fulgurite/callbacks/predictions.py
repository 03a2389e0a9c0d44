"""Write what the network says of each image into a table, one row an image, from any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from fulgurite.console import note
from fulgurite.errors import UserError
from fulgurite.tables import Columns, check_output, write_table

Batch = tuple[Tensor, Tensor, Tensor]
"""Sample indices (B,) int64, and of the k likeliest classes probabilities (B, k) float32 and labels (B, k) int64."""


class PredictionWriter(BasePredictionWriter):
    """Write path, label and probability of each sample, in the order of the samples, when ``predict`` is through.

    ``predict_step`` has to return a dict of tensors: ``index`` (B,) int64 and ``probability`` (B, K) float32. The second
    to k-th likeliest classes become the columns label_2, probability_2, ... The table is written by the first process.

    Args:
        output: a .csv, .jsonl or .parquet file; missing folders are made
        paths: of the samples, by their index
        class_names: by label
        top_k: how many classes to name for each sample

    Raises:
        UserError: before any work, if ``top_k`` is not in 1..K or the output cannot be written
    """

    def __init__(self, output: Path, paths: Sequence[str], class_names: Sequence[str], *, top_k: int = 1) -> None:
        super().__init__(write_interval="batch")
        if not 1 <= top_k <= len(class_names):
            raise UserError(f"top_k is {top_k}; allowed: 1 to {len(class_names)}, the number of classes")
        check_output(output)
        self.output = output
        self.paths = paths
        self.class_names = class_names
        self.top_k = top_k
        self._batches: list[Batch] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches.clear()  # of a prediction that was interrupted

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Tensor],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        # A stable sort, where topk may order equal probabilities in any way.
        probability, label = prediction["probability"].float().sort(dim=1, descending=True, stable=True)
        index, probability, label = prediction["index"], probability[:, : self.top_k], label[:, : self.top_k]
        # Copies: a view would keep all K probabilities, or the loader's shared memory, alive to the end.
        self._batches.append((_copy(index), _copy(probability), _copy(label)))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = _gather(self._batches)
        self._batches.clear()
        if trainer.is_global_zero:
            columns = self._columns(batches)
            write_table(columns, self.output)
            note("predictions", f"{len(columns['path'])} of {len(self.paths)} images in {self.output}")

    def _columns(self, batches: Sequence[Batch]) -> Columns:
        index, probability, label = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
        index, rows = np.unique(index, return_index=True)  # sorted; a sample that padded a process's share counts once
        columns: dict[str, Any] = {"path": [self.paths[i] for i in index]}
        for rank in range(self.top_k):
            suffix = f"_{rank + 1}" if rank else ""
            columns[f"label{suffix}"] = [self.class_names[k] for k in label[rows, rank]]
            columns[f"probability{suffix}"] = probability[rows, rank]
        return columns


def _copy(values: Tensor) -> Tensor:
    return values.to("cpu", copy=True)


def _gather(batches: list[Batch]) -> list[Batch]:
    """Return the batches of all processes on rank zero, and nothing on the others."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(batches)
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(batches, parts)
    return [batch for part in parts or [] for batch in part]
