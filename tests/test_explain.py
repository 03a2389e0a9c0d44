from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.explain import shorten, user_errors
from tests.commands import refused
from tests.conftest import DIGITS, SMALL
from tests.training import at_batch


def explained(error: BaseException) -> str:
    with pytest.raises(UserError) as caught, user_errors():
        raise error
    return str(caught.value)


def test_what_lightning_says_of_a_setting_is_told_in_its_words() -> None:
    assert (
        explained(MisconfigurationException("`max_epochs` must be a number.\n\nAsk.")) == "`max_epochs` must be a number.\nAsk."
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_cannot_be_used_is_named(number: int) -> None:
    assert explained(OSError(number, os.strerror(number), "/data/x")) == f"cannot use /data/x: {os.strerror(number)}"
    assert explained(OSError(number, os.strerror(number))) == f"cannot use the disk: {os.strerror(number)}"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        TypeError("ours"),
        RuntimeError("ours"),
        KeyError("ours"),
        OSError(errno.EPIPE, "ours"),
        OSError("ours"),
    ],
)
def test_our_own_faults_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, user_errors():
        raise error
    assert caught.value is error


def test_a_call_that_breaks_inside_a_library_is_our_fault() -> None:
    with pytest.raises(TypeError, match="'<' not supported") as caught, user_errors():
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=None)  # type: ignore[arg-type]
    assert not isinstance(caught.value, UserError)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(TypeError, match="can only concatenate str"), user_errors():  # while it words another error
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, 3)  # type: ignore[arg-type]


def test_what_a_library_checks_and_refuses_is_the_users() -> None:
    with pytest.raises(UserError) as caught, user_errors():
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=-1.0)
    assert str(caught.value) == "Invalid learning rate: -1.0\nrefused by torch.optim; --debug shows where"
    with pytest.raises(UserError, match="refused by torch"), user_errors():
        nn.Dropout(2.0)


def test_a_users_error_inside_another_comes_out() -> None:
    mistake = UserError("width is 0")
    wrapped = ValueError("Does not validate against any of the Union subtypes")
    wrapped.__cause__ = mistake
    with pytest.raises(UserError) as caught, user_errors():
        raise wrapped
    assert caught.value is mistake


def test_long_messages_are_cut() -> None:
    text = "\n".join(["first", "", "Given value type: dict", "x" * 500, *(f"line {number}" for number in range(20))])
    lines = shorten(text).splitlines()
    assert lines[:2] == ["first", "x" * 196 + " ..."]
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.accelerator", "foo"], "You selected an invalid accelerator name: `accelerator='foo'`"),
        (["--trainer.strategy", "foo"], "You selected an invalid strategy name: `strategy='foo'`"),
        (["--trainer.devices", "abc"], "`devices` selected with `CPUAccelerator` should be an int > 0."),
        (["--trainer.max_epochs", "-5"], "`max_epochs` must be a non-negative integer or -1."),
        (["--trainer.profiler", "foo"], "When passing string value for the `profiler` parameter of `Trainer`"),
        (["--seed_everything", "-1"], "-1 is not in bounds"),
    ],
)
def test_settings_that_lightning_refuses(flags: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "fit", "-c", str(DIGITS), "--trainer.accelerator", "cpu", *flags)
    assert text.startswith(message)
    assert len(text.splitlines()) <= 3
    assert list(here.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told_with_what_to_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "fit", "-c", str(DIGITS), "--trainer.accelerator", "gpu") == (
        "the command line: trainer.accelerator is gpu, and PyTorch finds no GPU that it can use\n"
        "fulgurite doctor says why; --trainer.accelerator cpu does without"
    )


def test_a_network_that_does_not_fit_the_checkpoint(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "test", "--ckpt_path", str(trained_run), "--model.network.width", "8")
    first, *rest = text.splitlines()
    assert first == "the checkpoint's weights do not fit this network"
    assert rest[0].startswith("size mismatch for network.")
    assert len(rest) <= 7


def test_what_a_loading_worker_raised_is_told_as_the_worker_said_it() -> None:
    text = "Caught UserError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  ...\n"
    with pytest.raises(UserError, match=r"^a.png: not an image$"), user_errors():
        raise UserError(f"{text}fulgurite.errors.UserError: a.png: not an image\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Early stopping conditioned on metric `val/lo` which is not available"), "conditioned on metric `val/lo`"),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"), "another process of this job ended"),
        (RuntimeError("[gloo] Read error: Connection reset by peer"), "another process of this job ended"),
        (MisconfigurationException("You restored a checkpoint with current_epoch=5, but"), "take a larger trainer.max_epochs"),
        (KeyError("Trying to restore optimizer state but checkpoint contains only the model"), "holds weights alone"),
    ],
)
def test_mendable_errors_of_the_libraries(error: Exception, message: str) -> None:
    with pytest.raises(UserError, match=message), user_errors():
        raise error


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pytorch-lightning_version", "x"),
        ("pytorch-lightning_version", None),
        ("loops", {"fit_loop": 3}),
        ("optimizer_states", [{}]),
    ],
)
def test_a_state_that_cannot_be_restored(
    part: str, value: object, trained_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(trained_run / "checkpoints" / "last.ckpt", weights_only=True)
    checkpoint[part] = value
    if value is None:
        del checkpoint[part]
    torch.save(checkpoint, "changed.ckpt")
    text = refused(
        capsys, "fit", "--ckpt_path", "changed.ckpt", "--trainer.max_epochs", "3", "--trainer.enable_progress_bar", "false"
    )
    assert re.fullmatch(r"the checkpoint cannot be restored: \w+: .+\n--debug shows where", text)
    assert not list(here.glob("runs/*/*"))


def test_an_error_elsewhere_is_not_laid_on_the_checkpoint() -> None:
    for error in (AttributeError("ours"), IndexError("ours"), ZeroDivisionError("ours")):
        with pytest.raises(type(error)), user_errors():
            raise error


# A checkpoint's state


@pytest.fixture
def with_broken_state(here: Path, trained_run: Path) -> Path:
    """Return a run whose optimizer has moments of another shape."""
    shutil.copytree(trained_run, "mine")
    last = Path("mine/checkpoints/last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3, 5)
    torch.save(checkpoint, last)
    return Path("mine")


def test_state_that_breaks_in_the_first_step_is_the_checkpoints(
    with_broken_state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "fit", "--resume", str(with_broken_state), "--trainer.max_epochs", "3")
    assert said.startswith(
        "the checkpoint cannot be restored: exp_avg of the optimizer's tensor 0 has the shape (3, 5); it must be ("
    )


def test_state_that_breaks_in_an_optimizer_that_is_not_fused(
    here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["--model.optimizer.fused", "false"]
    assert main(["fit", *SMALL, *plain, "--trainer.max_epochs", "1"]) == 0
    last = Path("runs/digits/v001/checkpoints/last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3, 5)
    torch.save(checkpoint, last)
    capsys.readouterr()
    said = refused(capsys, "fit", "--resume", "runs/digits/v001", "--trainer.max_epochs", "3")
    assert said.startswith("cannot go on from runs/digits/v001/checkpoints/last.ckpt: RuntimeError: ")
    assert said.endswith("\n--debug shows where")


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_fault_in_a_step_of_a_resumed_run_keeps_its_traceback(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    def fail() -> None:
        raise OSError("a disk broke")

    at_batch(monkeypatch, batch, fail)
    with pytest.raises(OSError, match="a disk broke"):
        main(["fit", "--ckpt_path", str(trained_run), "--trainer.max_epochs", "4"])


def test_weights_alone_are_no_state_to_go_on_from(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = torch.load(trained_run / "checkpoints" / "last.ckpt", weights_only=True)
    for part in ("loops", "callbacks", "optimizer_states", "lr_schedulers"):
        del checkpoint[part]
    torch.save(checkpoint, "weights.ckpt")
    said = refused(capsys, "fit", "--ckpt_path", "weights.ckpt", "--trainer.max_epochs", "3")
    assert said == "the checkpoint holds weights alone, so that no training can go on from it"
