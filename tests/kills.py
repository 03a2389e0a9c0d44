"""Fits that are killed by SIGKILL, resumed until they are complete, and compared with one that was left alone.

Each fit runs in a process of its own, forked from a server that has imported everything and trained nothing: a fork of a
process that has trained can hang, and a fresh process spends seconds on imports.
"""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir, suppress
from multiprocessing import forkserver, get_context, set_start_method
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  # what a fit imports late, the server imports once
import torch
import torch.utils.tensorboard
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import fulgurite.checkpoint
import fulgurite.command
from fulgurite.checkpoint import KEY, AtomicCheckpointIO, damage
from fulgurite.cli import main
from fulgurite.loggers import RunTensorBoardLogger, _MetricsFile
from fulgurite.tasks import ClassificationTask
from tests.conftest import ROOT
from tests.training import THROUGHPUT, logged

logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each restart that it reads of

# When a process dies: in the so-manieth call of a moment below, or after so many seconds; None is never.
Kill = tuple[str, int] | float | None
KILLED = -signal.SIGKILL


def _nothing(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    pass


def _all(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    call(*args, **options)


def _half_a_checkpoint(save: Callable[..., Any], checkpoint: Any, file: Any) -> None:
    whole = io.BytesIO()
    save(checkpoint, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()


def _some_of_a_save(save: Callable[..., Any], *args: Any, **options: Any) -> None:
    seconds = random.SystemRandom().uniform(0, 0.02)  # Python's own generator is seeded for each batch
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    save(*args, **options)


def _half_a_row(append: Callable[..., Any], rows: Any, path: Path) -> None:
    size = path.stat().st_size
    append(rows, path)
    os.truncate(path, (size + path.stat().st_size) // 2)


def _half_an_event(log: Callable[..., Any], logger: Any, *args: Any, **options: Any) -> None:
    log(logger, *args, **options)
    logger.save()
    path = max(Path(logger.log_dir).glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(path, path.stat().st_size - 5)


# What is called, and how much of the fatal call is still done.
MOMENTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "before the optimizer": (LightningModule, "on_after_backward", _nothing),
    "after the optimizer": (LightningModule, "on_train_batch_end", _nothing),
    "in validation": (ClassificationTask, "validation_step", _all),
    "at an epoch's start": (LightningModule, "on_train_epoch_start", _nothing),
    "at an epoch's end": (ClassificationTask, "on_train_epoch_end", _all),
    "in a save": (AtomicCheckpointIO, "save_checkpoint", _some_of_a_save),
    "half saved": (torch, "save", _half_a_checkpoint),
    "renamed": (fulgurite.checkpoint, "sync_folder", _nothing),  # last.ckpt, and best.ckpt not yet
    "linked": (os, "link", _all),  # best.ckpt, under a temporary name
    "before a rename": (Path, "replace", _nothing),  # of a checkpoint, or of the metrics
    "half a row": (_MetricsFile, "_append", _half_a_row),
    "half an event": (RunTensorBoardLogger, "log_metrics", _half_an_event),
}


def _arm(moment: str, number: int) -> None:
    owner, name, fatal = MOMENTS[moment]
    call, count = getattr(owner, name), iter(range(1, 1_000_000))

    def armed(*args: Any, **options: Any) -> Any:
        if next(count) == number:
            fatal(call, *args, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    setattr(owner, name, armed)


_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.kills"])


def fit(args: Sequence[str], kill: Kill = None) -> int:
    """Run ``fit`` in a process that may be killed at some moment; return its exit status, which is KILLED if it was."""
    with chdir(ROOT):  # where the server finds what it imports
        forkserver.ensure_running()
    process = _SERVER.Process(target=_fit, args=(list(args), None if isinstance(kill, float) else kill, dict(os.environ)))
    process.start()
    process.join(kill if isinstance(kill, float) else 120)
    hangs = process.exitcode is None and not isinstance(kill, float)
    if process.exitcode is None:
        process.kill()
        process.join()
    _end_workers(process)
    assert not hangs, f"fit {' '.join(args)} hangs"
    assert process.exitcode is not None
    return process.exitcode


_processes: list[ForkServerProcess] = []


def _end_workers(process: ForkServerProcess) -> None:
    """End what the process before this one may have left, so that orphans live beside the next fit, as they do elsewhere.

    Most end by themselves, after 5 s; one that was just starting when its parent was killed never does (PyTorch 2.14).
    """
    ended = [*_processes, *([process] if process.exitcode != KILLED else [])]
    _processes[:] = [process] if process.exitcode == KILLED else []
    for one in ended:
        assert one.pid, "0 would be the group of this process"
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)


def _fit(args: list[str], kill: tuple[str, int] | None, environment: Mapping[str, str]) -> None:
    os.setpgid(0, 0)  # with its workers a group of its own
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another now
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # of a loader's workers, as in any other process
    if kill:
        _arm(*kill)
    sys.exit(main(["fit", *args]))


def latest(runs: str = "runs") -> Path:
    """Return the folder of the latest run of the one experiment there is."""
    return max(Path(runs).glob("*/v*"))


def step_of_last() -> int:
    """Return the optimizer step of the latest run's last checkpoint, 0 if there is none."""
    last = latest() / "checkpoints" / "last.ckpt"
    return int(torch.load(last, weights_only=True)["global_step"]) if last.is_file() else 0


def whole_run(args: Sequence[str]) -> dict[str, Any]:
    """Return the outcome of a run that nobody kills."""
    assert fit([*args, "--trainer.runs_dir", "whole"]) == 0, Path("output.txt").read_text()[-3000:]
    return outcome(latest("whole"))


def fit_under_kills(args: Sequence[str], kills: Iterable[Kill], rng: random.Random) -> int:
    """Fit, and go on after each kill, with any number of workers, until the run is complete; return how many kills it took."""
    count, now, complete = 0, list(args), False
    for kill in [*kills, None]:
        status = fit([*now, "--data.num_workers", str(rng.randrange(3))], kill)
        if status != KILLED:
            # A run that was killed behind its last step has nothing to train.
            assert status == (2 if complete else 0), Path("output.txt").read_text()[-3000:]
            break
        count += 1
        files = list(Path("runs").glob("*/*/checkpoints/*.ckpt"))
        assert {path: problem for path in files if (problem := damage(path))} == {}
        now = rng.choice([["--resume"], ["--resume", str(latest())]]) if files else list(args)
        complete = any(path.name == "last.ckpt" and _is_complete(path) for path in files)
    return count


def _is_complete(last: Path) -> bool:
    return bool(torch.load(last, weights_only=True)["callbacks"]["Checkpoints"]["complete"])


def outcome(run: Path) -> dict[str, Any]:
    """Return by name all that has to be the same to the bit: both checkpoints, and the metrics as people see them."""
    found: dict[str, Any] = {}
    for name in ("last", "best"):
        checkpoint = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
        del checkpoint[KEY]  # tells which command it was
        for path, leaf in tree_flatten_with_path(checkpoint)[0]:
            found[name + keystr(path)] = repr(leaf.tolist() if isinstance(leaf, Tensor) else leaf)
    found["metrics.csv"] = logged(run)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    for tag in set(events.Tags()["scalars"]) - {THROUGHPUT}:
        found[f"tensorboard {tag}"] = [(event.step, event.value) for event in events.Scalars(tag)]
    # Lightning counts the batches of a validation that was done again twice; nothing reads that number.
    return {name: value for name, value in found.items() if "val_loop" not in name}


def differences(expected: dict[str, Any]) -> list[str]:
    """Name what is not as expected in the latest run."""
    found = outcome(latest())
    return [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
