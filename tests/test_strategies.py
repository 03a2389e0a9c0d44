from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from fulgurite import load
from fulgurite.callbacks.ema import EMA
from fulgurite.checkpoint import read_checkpoint
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.models.blocks import blocks
from fulgurite.tasks import ClassificationTask
from tests.classification import quiet
from tests.commands import refused
from tests.conftest import SMALL
from tests.jobs import run_job

ON_CPU = ["--trainer.accelerator", "cpu"]


# Who was started


def test_several_hosts_need_who_starts_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "fit", *SMALL, *ON_CPU, "--trainer.num_nodes", "2", "--trainer.devices", "3")
    assert "trainer.num_nodes is 2, and this host was started alone: it would wait for the others for ever" in text
    assert "torchrun --nnodes 2 --nproc-per-node 3 --node-rank N --master-addr FIRST_HOST -m fulgurite ..." in text
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ([], "--trainer.devices 2 --trainer.strategy ddp"),
        (["--trainer.devices", "3"], "--trainer.devices 2"),
        (["--trainer.num_nodes", "2", "--trainer.devices", "2"], "--trainer.num_nodes 1 --trainer.devices 2"),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "test"])
def test_other_processes_than_the_trainer_expects_are_refused(
    verb: str, options: list[str], flags: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")  # as torchrun does
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    checkpoint = ["--ckpt_path", "none"] if verb == "test" else []
    text = refused(capsys, verb, *SMALL, *ON_CPU, *checkpoint, *options)
    assert "2 processes were started, and the trainer is set to " in text
    assert text.endswith(f": {flags}")


def test_two_hosts_of_two_processes_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"set to 2: --trainer.num_nodes 2 --trainer.devices 2$"):
        quiet(accelerator="cpu", devices=2, strategy="ddp")


def test_sync_batchnorm_is_refused_on_cpus() -> None:
    with pytest.raises(UserError, match=r"SyncBatchNorm needs GPUs, .* --trainer.sync_batchnorm false"):
        quiet(accelerator="cpu", devices=2, sync_batchnorm=True)
    quiet(accelerator="cpu", devices=1, sync_batchnorm=True)  # there is nothing to synchronise


# Several processes


def make(**options: Any) -> tuple[Any, ClassificationTask, DigitsDataModule]:
    torch.manual_seed(0)
    data = DigitsDataModule(batch_size=32)
    task = ClassificationTask(partial(SmallCNN, width=4, depth=1), partial(AdamW, lr=0.01), spec=data.spec)
    defaults = {"accelerator": "cpu", "devices": 2, "limit_train_batches": 6, "limit_val_batches": 2, "max_epochs": 1}
    defaults |= {"enable_checkpointing": True, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    return quiet(**defaults | options), task, data


def fit(resume: str | None = None, **options: Any) -> dict[str, float]:
    trainer, task, data = make(**options)
    trainer.fit(task, datamodule=data, resume=resume, test=True)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def state(run: str | Path) -> dict[str, Any]:
    return read_checkpoint(Path(run, "default", "v001", "checkpoints", "last.ckpt"))


def same(one: Any, other: Any) -> bool:
    leaves, others = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last checkpoint of a fit with two DDP processes."""
    folder = tmp_path_factory.mktemp("ddp")
    run_job(2, partial(fit, strategy="ddp", runs_dir=folder), folder)
    return state(folder)


def test_gradients_in_the_buckets_end_in_the_same_bits(here: Path, ddp: dict[str, Any]) -> None:
    run_job(2, partial(fit, strategy="ddp_gradient_as_bucket_view_true", runs_dir=Path("views")), here)
    views = state("views")
    assert ddp["global_step"] == views["global_step"] == 3
    assert all(same(ddp[part], views[part]) for part in ("state_dict", "optimizer_states"))


def test_fsdp2_trains_as_ddp_does_and_leaves_a_whole_checkpoint(here: Path, ddp: dict[str, Any]) -> None:
    (metrics, others) = run_job(2, partial(fit, strategy="fsdp2", runs_dir=Path("fsdp2")), here)
    assert metrics == others
    split = state("fsdp2")
    assert split.keys() == ddp.keys()
    assert list(split["state_dict"]) == list(ddp["state_dict"])
    for name, value in split["state_dict"].items():
        torch.testing.assert_close(value, ddp["state_dict"][name], rtol=1e-3, atol=1e-4)
    (mine,), (theirs,) = split["optimizer_states"], ddp["optimizer_states"]
    assert [group["params"] for group in mine["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert list(mine["state"]) == sorted(theirs["state"])
    for number, moments in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number]["exp_avg"], moments["exp_avg"], rtol=1e-2, atol=1e-4)
    assert not any(isinstance(leaf, DTensor) for leaf in torch.utils._pytree.tree_leaves(split))
    task = load(Path("fsdp2"))  # in this process, which is one
    data = DigitsDataModule(batch_size=64)
    (alone,) = quiet(accelerator="cpu", devices=1).test(task, datamodule=data)
    assert alone == pytest.approx({name: metrics[name] for name in alone}, abs=1e-6)


@pytest.mark.slow
def test_fsdp2_goes_on_exactly(here: Path) -> None:
    run_job(2, partial(fit, strategy="fsdp2", runs_dir=Path("whole"), max_epochs=2), here)
    run_job(2, partial(fit, strategy="fsdp2", runs_dir=Path("parts"), max_epochs=2, max_steps=4), here)  # within an epoch
    run_job(2, partial(fit, "parts/default/v001", strategy="fsdp2", runs_dir=Path("parts"), max_epochs=2), here)
    whole, parts = state("whole"), state("parts")
    assert whole["global_step"] == parts["global_step"] == 6
    assert all(same(whole[part], parts[part]) for part in ("state_dict", "optimizer_states"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_fsdp2_goes_on_with_a_run_of_ddp_and_the_other_way_round(before: str, after: str, here: Path) -> None:
    run_job(2, partial(fit, strategy="ddp", runs_dir=Path("whole"), max_epochs=2), here)
    run_job(2, partial(fit, strategy=before, runs_dir=Path("parts"), max_epochs=2, max_steps=4), here)
    run_job(2, partial(fit, "parts/default/v001", strategy=after, runs_dir=Path("parts"), max_epochs=2), here)
    whole, parts = state("whole"), state("parts")
    assert whole["global_step"] == parts["global_step"] == 6
    for number, moments in whole["optimizer_states"][0]["state"].items():
        found = parts["optimizer_states"][0]["state"][number]
        torch.testing.assert_close(found["exp_avg"], moments["exp_avg"], rtol=1e-2, atol=1e-3)


def look_at_shares() -> tuple[set[str], int, int]:
    trainer, task, data = make(strategy="fsdp2", enable_checkpointing=False)
    trainer.fit(task, datamodule=data)
    split = {name for name, block in blocks(task.network).items() if isinstance(block, FSDPModule)}
    # The optimizer's: in the network those of the head stay whole after a forward pass, since a backward pass begins with them.
    shares = [p.to_local().numel() for group in trainer.optimizers[0].param_groups for p in group["params"]]
    return split, sum(shares), len(shares)


def test_fsdp2_splits_each_block(here: Path) -> None:
    (split, mine, number), (_, theirs, _) = run_job(2, look_at_shares, here)
    network = SmallCNN(10, 1, width=4, depth=1)
    assert split == {name for name, block in blocks(network).items() if any(True for _ in block.parameters())}
    assert number == len(list(network.parameters()))
    assert mine + theirs == sum(p.numel() for p in network.parameters())
    assert 0.4 < mine / (mine + theirs) < 0.6


def refuse_fsdp2(**options: Any) -> None:
    trainer, task, data = make(strategy="fsdp2", enable_checkpointing=False, **options)
    trainer.fit(task, datamodule=data)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "64-true"}, "trainer.precision is 64-true; with fsdp2 allowed: 32-true, bf16-mixed, bf16-true, 16-true"),
        ({"callbacks": EMA(decay=0.9)}, "ema is on (decay 0.9), and FSDP2Strategy splits the weights between processes"),
    ],
)
def test_fsdp2_refuses_what_does_not_go_with_it(options: dict[str, Any], text: str, here: Path) -> None:
    for result in run_job(2, partial(refuse_fsdp2, **options), here):
        assert isinstance(result, UserError)
        assert str(result).startswith(text)


def fit_without_network() -> None:
    quiet(accelerator="cpu", devices=2, strategy="fsdp2", max_epochs=1).fit(BoringModel())


def test_fsdp2_refuses_a_task_without_a_network(here: Path) -> None:
    for result in run_job(2, fit_without_network, here):
        assert isinstance(result, UserError)
        assert str(result).startswith("fsdp2 splits a task's `network`, and BoringModel has none")
