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
from fulgurite.tables import Columns, check_output, write_table
from fulgurite.tasks.prediction import MultiLabelPrediction, check_top_k, likeliest

Batch = tuple[Tensor, Tensor, Tensor]
"""Sample indices (B,) int64, and of the k likeliest classes probabilities (B, k) float32 and labels (B, k) int64."""


class PredictionWriter(BasePredictionWriter):
    """Write path, label and probability of each sample, in the order of the samples, when ``predict`` is through.

    ``predict_step`` has to return a dict of tensors: ``index`` (B,) int64 and ``probability`` (B, K) float32. The second
    to k-th likeliest classes become the columns label_2, probability_2, ... Where an image may have several labels, those of
    probability 0.5 and above are in the columns ``labels`` and ``probabilities``, the likeliest first and joined by ``|``,
    which are empty if there is none. The table is written by the first process.

    Args:
        output: a .csv, .jsonl or .parquet file; missing folders are made
        paths: of the samples, by their index
        class_names: by label
        top_k: how many classes to name for each sample
        multi_label: whether an image may have several labels; ``top_k`` then has to be 1

    Raises:
        UserError: before any work, if ``top_k`` is not allowed or the output cannot be written
    """

    def __init__(
        self, output: Path, paths: Sequence[str], class_names: Sequence[str], *, top_k: int = 1, multi_label: bool = False
    ) -> None:
        super().__init__(write_interval="batch")
        check_top_k(top_k, len(class_names), multi_label=multi_label)
        check_output(output)
        self.output = output
        self.paths = paths
        self.class_names = class_names
        self.top_k = top_k
        self.multi_label = multi_label
        self.unread: list[int] = []
        """Indices of the images that could not be read, told by a negative index in a batch: -1 minus theirs."""
        self._batches: list[Batch] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches.clear()  # of a prediction that was interrupted
        self.unread.clear()

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
        """Keep what the table needs of a batch."""
        index = prediction["index"]
        probability, label = likeliest(prediction["probability"], self.top_k, multi_label=self.multi_label)
        # Copies: a view would keep all K probabilities, or the loader's shared memory, alive to the end.
        self._batches.append((_copy(index), _copy(probability), _copy(label)))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = _gather(self._batches)
        self._batches.clear()
        self.unread = [-1 - index for indices, *_ in batches for index in indices.tolist() if index < 0]
        batches = [(index[index >= 0], probability[index >= 0], label[index >= 0]) for index, probability, label in batches]
        if trainer.is_global_zero:
            columns = self._several_labels(batches) if self.multi_label else self._one_label(batches)
            write_table(columns, self.output)
            note("predictions", f"{len(columns['path'])} of {len(self.paths)} images in {self.output}")

    def _one_label(self, batches: Sequence[Batch]) -> Columns:
        index, probability, label = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
        index, rows = np.unique(index, return_index=True)  # sorted; a sample that padded a process's share counts once
        columns: dict[str, Any] = {"path": [self.paths[i] for i in index]}
        for rank in range(self.top_k):
            suffix = f"_{rank + 1}" if rank else ""
            columns[f"label{suffix}"] = [self.class_names[k] for k in label[rows, rank]]
            columns[f"probability{suffix}"] = probability[rows, rank]
        return columns

    def _several_labels(self, batches: Sequence[Batch]) -> Columns:
        rows = {
            int(index): MultiLabelPrediction.from_top(probabilities, labels, self.class_names)
            for batch in batches
            for index, probabilities, labels in zip(*(part.numpy() for part in batch), strict=True)
        }
        order = sorted(rows)
        return {
            "path": [self.paths[index] for index in order],
            "labels": ["|".join(rows[index].labels) for index in order],
            # NumPy's str of a float32 is the shortest decimal, as in a column of numbers.
            "probabilities": ["|".join(map(str, rows[index].probabilities)) for index in order],
        }


def _copy(values: Tensor) -> Tensor:
    return values.to("cpu", copy=True)


def _gather(batches: list[Batch]) -> list[Batch]:
    """Return the batches of all processes on rank zero, and nothing on the others."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(batches)
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(batches, parts)
    return [batch for part in parts or [] for batch in part]
