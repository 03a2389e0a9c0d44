from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulgurite.data import DataSpec, ImageDataModule
from fulgurite.data.base import ArrayDataset
from fulgurite.data.samples import Split
from fulgurite.errors import UserError
from fulgurite.machine import Cores

# More cores are pretended than there are.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Tiny(ImageDataModule):
    """Serve splits of given sizes, each image filled with its index."""

    def __init__(self, sizes: tuple[int, int, int] = (10, 5, 3), in_memory: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.sizes: dict[Split, int] = dict(zip(("train", "val", "test"), sizes, strict=True))
        self.in_memory = in_memory

    @property
    def spec(self) -> DataSpec:
        return DataSpec(class_names=("a", "b"), channels=1, height=1, width=1, mean=(0.5,), std=(0.5,))

    def dataset(self, split: Split) -> Dataset[Any]:
        index = torch.arange(self.sizes[split])
        return ArrayDataset(index.to(torch.uint8).reshape(-1, 1, 1, 1), index)


def attach(data: Tiny, **options: Any) -> Tiny:
    trainer = {"world_size": 1, "num_nodes": 1, "global_rank": 0, "overfit_batches": 0.0}
    strategy = SimpleNamespace(root_device=torch.device(options.pop("device", "cpu")))
    data.trainer = SimpleNamespace(**trainer | options, strategy=strategy)  # type: ignore[assignment]
    return data


def labels(loader: Any) -> list[list[int]]:
    return [batch.tolist() for _, batch in loader]


def test_training_is_shuffled_and_drops_a_short_last_batch() -> None:
    batches = labels(Tiny(batch_size=4, num_workers=0).train_dataloader())
    assert [len(batch) for batch in batches] == [4, 4]
    assert batches != [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_split_smaller_than_a_batch_is_trained_on_as_it_is() -> None:
    assert [sorted(batch) for batch in labels(Tiny(batch_size=16, num_workers=0).train_dataloader())] == [list(range(10))]


def test_evaluation_is_in_order_and_whole() -> None:
    data = Tiny(batch_size=4, num_workers=0)
    assert labels(data.val_dataloader()) == [[0, 1, 2, 3], [4]]
    assert labels(data.test_dataloader()) == [[0, 1, 2]]


def test_seed_of_the_job_decides_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for seed in ("0", "1", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        orders.append(labels(Tiny(batch_size=5, num_workers=0).train_dataloader()))
    assert orders[0] != orders[1] == orders[2]


def test_processes_share_the_samples_out() -> None:
    shares = []
    for rank in range(2):
        data = attach(Tiny(batch_size=2, num_workers=0), world_size=2, global_rank=rank)
        shares.append((labels(data.train_dataloader()), labels(data.val_dataloader())))
    train = [label for share, _ in shares for batch in share for label in batch]
    assert len(set(train)) == len(train) == 8
    assert [val for _, val in shares] == [[[0, 2], [4]], [[1, 3]]]


def test_overfitting_trains_on_the_same_batches() -> None:
    loader = attach(Tiny(batch_size=4, num_workers=0), overfit_batches=1).train_dataloader()
    first = labels(loader)
    loader.order.set_epoch(1)
    assert labels(loader) == first == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("sizes", "processes", "text"),
    [((0, 5, 3), 1, "the train split of Tiny is empty"), ((1, 5, 3), 2, "the train split of Tiny has 1 samples for 2 processes")],
)
def test_split_without_a_sample_for_each_process_is_refused(sizes: tuple[int, int, int], processes: int, text: str) -> None:
    # A process without samples would leave the others waiting for it.
    data = attach(Tiny(sizes, num_workers=0), world_size=processes)
    with pytest.raises(UserError) as error:
        data.train_dataloader()
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("options", "workers", "reason"),
    [
        ({}, 4, "4 usable"),
        ({"num_workers": 3}, 3, "as configured"),
        ({"num_workers": 64}, 4, "not 64: 4 usable"),
        ({"num_workers": 0}, 0, "as configured"),
        ({"in_memory": True}, 0, "the images are in memory"),
    ],
)
def test_workers_are_chosen_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any], workers: int, reason: str
) -> None:
    monkeypatch.setattr("fulgurite.data.base.usable_cores", lambda: Cores(4, "4 usable"))
    loader = Tiny(**options).train_dataloader()
    assert (loader.num_workers, loader.persistent_workers) == (workers, workers > 0)
    out = capsys.readouterr().out
    ahead = ", 2 batches ahead each" if workers else ""
    assert out == f"workers     {workers} per process ({reason}){ahead}, batches not pinned (no GPU)\n"


def test_processes_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulgurite.data.base.usable_cores", lambda: Cores(8, "8 usable"))
    assert attach(Tiny((32, 32, 32)), world_size=8, num_nodes=2).val_dataloader().num_workers == 2
    assert attach(Tiny((32, 32, 32)), world_size=32).val_dataloader().num_workers == 1


@pytest.mark.parametrize(("asked", "device", "pinned"), [(None, "cpu", False), (None, "cuda", True), (False, "cuda", False)])
def test_memory_is_pinned_for_cuda(asked: bool | None, device: str, pinned: bool) -> None:
    assert attach(Tiny(pin_memory=asked, num_workers=0), device=device).val_dataloader().pin_memory is pinned


def test_fingerprint_tells_data_apart() -> None:
    same, other = Tiny().fingerprint(), Tiny((10, 5, 4)).fingerprint()
    assert Tiny(batch_size=2).fingerprint() == same != other


def test_augmentation_is_for_whole_batches() -> None:
    def brighten(images: Tensor) -> Tensor:
        return images + torch.arange(len(images), dtype=torch.uint8)[:, None, None, None]

    dataset = ArrayDataset(torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.arange(4), brighten)
    images, batch = dataset.__getitems__([3, 1])
    assert (images.flatten().tolist(), batch.tolist()) == ([0, 1], [3, 1])
    image, label = dataset[2]
    assert (image.shape, int(label)) == ((1, 1, 1), 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0; it must be at least 1"),
        ({"num_workers": -1}, "num_workers is -1; it must be 0 or more, or null to choose by itself"),
    ],
)
def test_bad_numbers_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        Tiny(**options)
    assert str(error.value) == text
