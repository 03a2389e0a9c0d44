from __future__ import annotations

import errno
import fcntl
import multiprocessing as mp
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fulgurite.errors import UserError
from fulgurite.run_lock import RunLock


def hold(run: Path, taken: Any) -> None:
    lock = RunLock()
    lock.take(run)
    taken.set()
    signal.pause()


@pytest.fixture
def lock() -> Iterator[RunLock]:
    lock = RunLock()
    yield lock
    lock.release()


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    context = mp.get_context("fork")
    taken = context.Event()
    process = context.Process(target=hold, args=(tmp_path, taken))
    process.start()
    assert taken.wait(10)
    yield process
    process.kill()
    process.join()


def test_run_that_is_in_use_is_refused(tmp_path: Path, holder: Any) -> None:
    with pytest.raises(UserError) as error:
        RunLock().take(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} is in use by process {holder.pid} on {platform.node()}\nit can be resumed when that has ended"
    )


def test_lock_of_a_killed_process_is_stale(tmp_path: Path, holder: Any, lock: RunLock) -> None:
    holder.kill()
    holder.join()
    assert (tmp_path / "run.lock").exists()
    lock.take(tmp_path)


def test_child_that_outlives_the_holder_does_not_hold(tmp_path: Path, lock: RunLock) -> None:
    # A loader worker lives on for seconds when its parent is killed.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        lock.take(tmp_path)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(writer, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    worker = int(os.read(reader, 20))
    try:
        lock.take(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_released_lock_leaves_nothing(tmp_path: Path, lock: RunLock) -> None:
    lock.take(tmp_path)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_file_that_its_holder_removes_meanwhile_is_made_anew(
    tmp_path: Path, lock: RunLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockf, calls = fcntl.lockf, iter(range(9))

    def remove_first(file: Any, how: int) -> None:
        lockf(file, how)
        if next(calls) == 0:
            (tmp_path / "run.lock").unlink()  # as release() does between this process's open() and its lock

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    lock.take(tmp_path)
    assert "process" in (tmp_path / "run.lock").read_text()


def test_file_system_without_locks_is_said(
    tmp_path: Path, lock: RunLock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lockf(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock.take(tmp_path)
    assert capsys.readouterr().out == (
        f"warning     {tmp_path} cannot be locked on this file system: nothing keeps a second process out of it\n"
    )
