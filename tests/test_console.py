from __future__ import annotations

import logging
import os
import signal
import warnings

import pytest

from fulgurite.console import ctrl_c, is_rank_zero, note, printable, quiet_lightning

RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


def test_note_is_a_topic_and_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    note("device", "1 x cpu")
    note("", "more")
    assert capsys.readouterr().out == "device      1 x cpu\n            more\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Größe: 3 x 4\nnext line", None), ("a\x1b[2Jb", "a\\x1b[2Jb"), ("x\ry\tz", "x\\ry\\tz"), ("a\u202eb", "a\\u202eb")],
)
def test_nothing_in_a_text_steers_the_terminal(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


@pytest.mark.parametrize("name", RANKS)
def test_other_processes_say_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    monkeypatch.setenv(name, "0")
    assert is_rank_zero()
    monkeypatch.setenv(name, "1")
    assert not is_rank_zero()
    note("device", "1 x cpu")
    assert capsys.readouterr().out == ""


def test_ctrl_c_is_what_it_was_and_works_again() -> None:
    def run_like_lightning() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise SystemExit(1)  # noqa: B904

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), ctrl_c():
        run_like_lightning()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_exits_are_left_alone() -> None:
    with pytest.raises(SystemExit), ctrl_c():
        raise SystemExit(3)


def test_lightning_is_quiet_about_what_is_said_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    quiet_lightning()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.info("GPU available: False")
    logger.warning("something else")
    assert caplog.messages == ["something else"]
    warnings.warn("The 'val_dataloader' does not have many workers which may be a bottleneck.", stacklevel=1)
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", stacklevel=1)
