from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulgurite.cli import main
from fulgurite.data.loader import ResumableLoader
from fulgurite.data.shards import MANIFEST
from fulgurite.data.streaming import StreamingDataModule
from fulgurite.errors import UserError
from tests.conftest import DIGITS, ROOT
from tests.pictures import PictureDataModule, batches, flat, small_shards
from tests.training import at_batch

pytest.importorskip("litdata", reason="litdata is not installed: pip install 'fulgurite[stream]'")
# More workers are asked for than there are cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NAME = "fulgurite.data.streaming.StreamingDataModule"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 50 + 11 + 3 pictures in 9 + 2 + 1 shards, the last ones short; tests leave them as they are."""
    return small_shards(tmp_path_factory.mktemp("shards"))


def module(root: Path | str, *, rank: int = 0, world_size: int = 1, num_nodes: int = 1, **options: Any) -> StreamingDataModule:
    """Make a data module as process ``rank`` of a job has it."""
    data = StreamingDataModule(root=str(root), **{"batch_size": 4, "num_workers": 0, "shuffle_window": 2} | options)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = {"world_size": world_size, "num_nodes": num_nodes, "global_rank": rank, "overfit_batches": 0.0}
    data.trainer = SimpleNamespace(**trainer, strategy=strategy)  # type: ignore[assignment]
    return data


def epoch_of(loader: ResumableLoader, epoch: int) -> list[tuple[list[int], list[Any]]]:
    loader.order.set_epoch(epoch)
    return batches(loader)


def test_each_sample_comes_once_with_its_label_in_another_order_each_epoch(shards: Path) -> None:
    loader = module(shards, batch_size=5).train_dataloader()
    first, second = epoch_of(loader, 0), epoch_of(loader, 1)
    for found in (first, second):
        assert sorted(flat(found)) == list(range(50))
        assert all(labels == [number % 3 for number in numbers] for numbers, labels in found)
    assert first != second
    assert epoch_of(loader, 0) == first


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same_batches(shards: Path, workers: int) -> None:
    alone, several = (module(shards, num_workers=number).train_dataloader() for number in (0, workers))
    assert epoch_of(alone, 3) == epoch_of(several, 3)


def test_more_workers_than_samples(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulgurite.data.base.usable_cores", lambda: SimpleNamespace(number=5, reason="pretended"))
    loader = module(shards, num_workers=5, batch_size=1).test_dataloader()
    assert loader.num_workers == 5
    assert flat(batches(loader)) == [0, 1, 2]


def test_evaluation_is_whole_and_in_order(shards: Path) -> None:
    assert flat(batches(module(shards).val_dataloader())) == list(range(11))


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_processes_share_the_samples(shards: Path, num_nodes: int) -> None:
    data = [module(shards, rank=rank, world_size=4, num_nodes=num_nodes) for rank in range(4)]
    evaluated = [flat(batches(one.val_dataloader())) for one in data]
    assert sorted(chain(*evaluated)) == list(range(11))
    assert [len(share) for share in evaluated] == [3, 3, 3, 2]
    loaders = [one.train_dataloader() for one in data]
    assert {len(loader) for loader in loaders} == {3}
    shares = [[index for index, *_ in loader.order] for loader in loaders]
    assert [len(share) for share in shares] == [12] * 4
    assert len(set(chain(*shares))) == 48


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_in_the_middle_of_an_epoch_with_other_workers(shards: Path, workers: int) -> None:
    loader = module(shards, num_workers=2 - workers).train_dataloader()
    whole = epoch_of(loader, 1)
    other = module(shards, num_workers=workers).train_dataloader()
    other.load_state_dict(loader.state_dict() | {"epoch": 1, "batches": 5})
    assert epoch_of(other, 1) == whole[5:]
    assert epoch_of(other, 2) == epoch_of(loader, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shuffle_window": 3}, "shuffle_window was 2 and is 3"),
        ({"num_nodes": 2, "world_size": 2}, "number of processes was 1 and is 2, number of nodes was 1 and is 2"),
    ],
)
def test_other_order_in_the_middle_of_an_epoch_is_refused(shards: Path, options: dict[str, Any], text: str) -> None:
    state = module(shards).train_dataloader().state_dict() | {"batches": 5}
    other = module(shards, **options).train_dataloader()
    other.load_state_dict(state)
    with pytest.raises(UserError, match=text):
        next(iter(other))


@pytest.mark.slow
def test_workers_that_are_spawned_give_the_same_batches(shards: Path) -> None:
    forked = module(shards).train_dataloader()
    dataset = module(shards).dataset("train")
    dataset[0]  # a shard is open when the data set goes to the worker
    spawned = ResumableLoader(
        dataset, batch_size=4, sampler=forked.order, num_workers=2, drop_last=True, multiprocessing_context="spawn"
    )
    assert batches(spawned) == batches(forked)


def test_spec_is_that_of_the_shards_with_changes(shards: Path, tmp_path: Path) -> None:
    original = PictureDataModule(tmp_path).spec
    assert module(shards).spec == original
    changed = module(shards, size=[6, 8], channels=3, mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 1.0])
    assert (changed.spec.height, changed.spec.width, changed.spec.mean) == (6, 8, (0.1, 0.2, 0.3))
    assert changed.spec.class_counts == original.class_counts
    assert changed.dataset("val")[7][0].tolist() == torch.full((3, 6, 8), 7).tolist()
    assert changed.fingerprint() != module(shards).fingerprint()


def test_fingerprint_tells_other_bytes(shards: Path, tmp_path: Path) -> None:
    same, other = small_shards(tmp_path / "same"), tmp_path / "other"
    PictureDataModule(other / "pictures").dataset("val").path(0).write_bytes(
        PictureDataModule(other / "pictures").dataset("val").path(1).read_bytes()
    )
    assert module(same).fingerprint() == module(shards).fingerprint()
    assert module(small_shards(other)).fingerprint() != module(shards).fingerprint()


def copied(shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shards, tmp_path / "shards"))


def test_folder_that_is_no_whole_one_is_refused(shards: Path, tmp_path: Path) -> None:
    root = copied(shards, tmp_path)
    with pytest.raises(UserError, match=r"shard does not exist \(did you mean 'shards'\?\)"):
        module(tmp_path / "shard").spec  # noqa: B018
    (root / "val" / "index.json").unlink()
    with pytest.raises(UserError, match=f"cannot read {root}/val/index.json: No such file"):
        module(root).dataset("val")
    shutil.copy(root / "test" / "index.json", root / "val" / "index.json")
    with pytest.raises(UserError, match=r"counts 3 samples, and fulgurite.json 11: parts of two different folders\?"):
        module(root).dataset("val")
    (root / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"has no fulgurite\.json: these are no shards .*, or writing them was not finished"):
        module(root).spec  # noqa: B018


def test_split_that_there_is_not_is_named(shards: Path, tmp_path: Path) -> None:
    root = copied(shards, tmp_path)
    manifest = json.loads((root / MANIFEST).read_text())
    del manifest["splits"]["test"]
    (root / MANIFEST).write_text(json.dumps(manifest))
    data = module(root)
    assert data.splits == ("train", "val")
    with pytest.raises(UserError, match="has no split 'test'; it has train, val"):
        data.test_dataloader()


def test_shards_of_another_make_are_refused(shards: Path, tmp_path: Path) -> None:
    root = copied(shards, tmp_path)
    index = json.loads((root / "val" / "index.json").read_text())
    index["config"]["data_format"] = ["jpeg", "int"]
    (root / "val" / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"samples of \['jpeg', 'int'\]; allowed: \['bytes', 'int'\]"):
        module(root).dataset("val")
    (root / MANIFEST).write_text(json.dumps({"format": 2}))
    with pytest.raises(UserError, match=r"fulgurite.json is of format 2; this version reads 1"):
        module(root).spec  # noqa: B018


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shuffle_window": 0}, "shuffle_window is 0; it must be at least 1"),
        ({"size": [1, 2, 3]}, r"size is \[1, 2, 3\]; it is one number of pixels, or two"),
        ({"root": "s4://bucket"}, r"root is 's4://bucket'; allowed: a local folder, s3://.*\(did you mean 's3'\?\)"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        StreamingDataModule(**{"root": "shards"} | options)


def test_shards_made_anew_are_copied_anew(tmp_path: Path) -> None:
    folder = small_shards(tmp_path)
    assert len(batches(module(f"local:{folder}", cache_dir=tmp_path / "cache").val_dataloader())) == 3
    shutil.rmtree(folder)
    small_shards(tmp_path, sizes=(50, 7, 3))
    again = module(f"local:{folder}", cache_dir=tmp_path / "cache")
    assert flat(batches(again.val_dataloader())) == list(range(7))


def test_disk_too_small_for_the_copies_is_refused(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(path.stat().st_size for path in (shards / "train").glob("*.bin"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=size - 1))
    data = module(f"local:{shards}", cache_dir=tmp_path / "cache")
    data.val_dataloader()
    with pytest.raises(UserError, match=r"GB are free for .*cache\nset cache_dir to a folder on a larger disk"):
        data.train_dataloader()
    module(f"local:{shards}", cache_dir=tmp_path / "cache", num_nodes=2, world_size=2).train_dataloader()


def test_copied_shards_are_announced(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = module(f"local:{shards}", cache_dir=tmp_path / "cache")
    assert flat(batches(data.val_dataloader())) == list(range(11))
    assert f"val: 2 shards, 0.0 GB, copied to {data.store.folder} as they are needed" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("cache/*/val/*.bin")) == ["chunk-0-0.bin", "chunk-0-1.bin"]
    assert not list(tmp_path.glob("cache/*/train"))


def fit(shards: Path, *args: str) -> int:
    quiet = ["--trainer.enable_progress_bar", "false", "--model.network.width", "2", "--model.network.depth", "1"]
    data = ["--data", NAME, "--data.root", str(shards), "--data.batch_size", "7", "--data.shuffle_window", "2"]
    return main(["fit", "-c", str(DIGITS), *data, *quiet, "--trainer.max_epochs", "2", *args])


def _fit_and_die(shards: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_batch(patch, 10, lambda: os.kill(os.getpid(), signal.SIGKILL))
        fit(shards, "--data.num_workers", "0", "--checkpoint.every_n_steps", "1")


def test_killed_run_ends_in_the_same_bits(shards: Path, here: Path) -> None:
    assert fit(shards, "--data.num_workers", "0", "--trainer.experiment", "whole", "--test") == 0
    process = mp.get_context("fork").Process(target=_fit_and_die, args=(shards,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert main(["fit", "--ckpt_path", "last", "--data.num_workers", "2"]) == 0
    runs = ("whole/v001", "digits/v002")
    whole, resumed = (torch.load(Path("runs", run, "checkpoints", "last.ckpt"), weights_only=True) for run in runs)
    assert whole["global_step"] == resumed["global_step"] == 14
    assert whole["state_dict"].keys() == resumed["state_dict"].keys()
    assert all(value.equal(resumed["state_dict"][name]) for name, value in whole["state_dict"].items())


# One of two processes of a job, with two workers: two epochs of training, the second from its middle, and validation.
PROGRAM = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.data.test_streaming import batches, epoch_of, flat, module
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
data = module(sys.argv[1], rank=rank, world_size=world_size, num_workers=2, cache_dir=Path(sys.argv[2]))
loader = data.train_dataloader()
first = flat(epoch_of(loader, 0))
second = epoch_of(loader, 1)
loader.load_state_dict(loader.state_dict() | {"epoch": 1, "batches": 3})
assert epoch_of(loader, 1) == second[3:]
everything = [None] * world_size
dist.all_gather_object(everything, (first, flat(second), flat(batches(data.val_dataloader()))))
for number, most in ((0, 48), (1, 48), (2, 11)):
    seen = sum((one[number] for one in everything), [])
    assert len(seen) == len(set(seen)) == most, seen
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("root", ["{}", "local:{}"])
def test_two_processes_with_two_workers_each(shards: Path, tmp_path: Path, root: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *how, str(tmp_path / "program.py"), root.format(shards), str(tmp_path / "cache")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_command_line_with_two_processes_tests_each_sample_once(
    shards: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ["-c", str(ROOT / "configs" / "trainer" / "ddp_cpu.yaml")]
    assert fit(shards, "--data.num_workers", "0") == 0
    measured = []
    for options in ([], two):
        capsys.readouterr()
        command = [sys.executable, "-m", "fulgurite", "test", "--ckpt_path", "runs/digits/v001", *options]
        done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        measured += [line for line in done.stdout.splitlines() if line.startswith("test ")]
    assert len(measured) == 2
    assert measured[0] == measured[1]
