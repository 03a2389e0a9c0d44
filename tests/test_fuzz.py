"""Everything read from a checkpoint is a stranger's: broken and hostile files, none of which gets anywhere."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from PIL import Image

from fulgurite import load
from fulgurite.checkpoint import describe, read_checkpoint
from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.layers import checkpoint_layer
from tests.mutant_files import changed_archives, changed_bytes
from tests.mutant_pickles import CANARY, hostile_pickles
from tests.mutant_states import changed_states

LONGEST = 20  # seconds for one file
MOST_MEMORY = 1_000_000  # KiB above what the process had before
# What only a file that runs, writes or sends something would do.
TELLTALE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "os.remove", "os.rename")
Mutants = Callable[[bytes, random.Random, int], Iterator[tuple[str, bytes]]]
KINDS: dict[str, Mutants] = {
    "bytes": changed_bytes,
    "archives": changed_archives,
    "pickles": hostile_pickles,
    "states": changed_states,
}


class Watch:
    """An audit hook, which Python cannot take off again, so it is switched."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in TELLTALE or (event == "import" and CANARY in str(arguments[0])):
            self.seen.append(f"{event} {arguments[:2]}")


@pytest.fixture(scope="session")
def watch() -> Watch:
    return Watch()


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def use(path: Path) -> list[str]:
    """Do all that can be done with a checkpoint short of a Trainer; return what was refused."""
    steps: list[Callable[[], Any]] = [lambda: describe(read_checkpoint(path), path).sections]
    steps += [partial(checkpoint_layer, path, verb, []) for verb in ("fit", "test", "predict")]
    steps.append(partial(load, path))
    refusals = []
    for step in steps:
        try:
            step()
        except UserError as error:
            refusals.append(str(error))
            if "cannot be read" in str(error):
                break
    return refusals


def survive(mutants: Iterator[tuple[str, bytes]], watch: Watch, path: Path) -> tuple[int, int]:
    """Use each mutant; return how many there were, and how many were refused."""
    memory, count, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0
    for what, content in mutants:
        path.write_bytes(content)
        try:
            with limited(LONGEST):
                watch.on = True
                refusals = use(path)
        except BaseException as error:
            raise AssertionError(f"{what[:300]}: {type(error).__name__}: {str(error)[:300]}") from error
        finally:
            watch.on = False
        assert not watch.seen, (what, watch.seen)
        assert all(text and len(text.splitlines()) <= 12 and len(text) < 3000 for text in refusals), (what, refusals)
        count, refused = count + 1, refused + bool(refusals)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + MOST_MEMORY, what
    return count, refused


@pytest.fixture
def intact(trained_run: Path) -> bytes:
    return (trained_run / "checkpoints" / "last.ckpt").read_bytes()


@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore:Detected pickle protocol", "ignore:Validating sparse")
@pytest.mark.parametrize(("kind", "count"), [("bytes", 60), ("archives", 12), ("pickles", 60), ("states", 12)])
def test_no_file_gets_anywhere(kind: str, count: int, intact: bytes, watch: Watch, here: Path) -> None:
    done, refused = survive(KINDS[kind](intact, random.Random(1), count), watch, here / "mutant.ckpt")
    assert done >= count
    assert 0 < refused
    assert refused < done or kind == "pickles"  # or nothing past the first check was tried


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore:Detected pickle protocol", "ignore:Validating sparse")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_file_of_thousands_gets_anywhere(kind: str, seed: int, intact: bytes, watch: Watch, here: Path) -> None:
    done, _ = survive(KINDS[kind](intact, random.Random(100 + seed), 400), watch, here / "mutant.ckpt")
    assert done >= 400


QUICK = [
    *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1", "--trainer.strategy", "auto"),
    *("--trainer.enable_progress_bar", "false", "--trainer.logger", "csv"),
]
FIT = ["--trainer.max_epochs", "3", "--trainer.max_steps", "20", "--trainer.limit_train_batches", "4", *QUICK]
COMMANDS = {
    "fit": ["fit", "--ckpt_path", "mutant.ckpt", *FIT],
    "resume": ["fit", "--resume", "run", *FIT],
    "test": ["test", "--ckpt_path", "mutant.ckpt", "--trainer.limit_test_batches", "1", *QUICK],
    "validate": ["validate", "--ckpt_path", "mutant.ckpt", "--trainer.limit_val_batches", "1", *QUICK],
    "predict": ["predict", "--ckpt_path", "mutant.ckpt", "--images", "images", *QUICK],
}


def command_survives(name: str, count: int, seed: int, intact: bytes, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    Image.new("L", (8, 8)).save("images/a.png")
    for what, content in changed_states(intact, random.Random(seed), count):
        Path("mutant.ckpt").write_bytes(content)
        if name == "resume":
            shutil.rmtree("run", ignore_errors=True)
            shutil.copytree(run, "run")
            Path("run/checkpoints/last.ckpt").write_bytes(content)
        capsys.readouterr()
        try:
            with limited(LONGEST):
                status = main(COMMANDS[name])
        except BaseException as error:
            raise AssertionError(f"{what[:300]}: {type(error).__name__}: {str(error)[:300]}") from error
        error_text = capsys.readouterr().err
        assert status in (0, 2), (what, error_text)
        assert "Traceback" not in error_text, what
        assert (status == 0) or error_text.count("\n") < 30, what


@pytest.mark.filterwarnings("ignore")  # what Lightning says of a state that it takes is another matter
@pytest.mark.parametrize("name", list(COMMANDS))
def test_no_command_fails_on_a_strangers_state(
    name: str, intact: bytes, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_survives(name, 3, 5, intact, trained_run, capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(COMMANDS))
def test_no_command_fails_on_any_of_hundreds(
    name: str, intact: bytes, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_survives(name, 100, 7, intact, trained_run, capsys)
