from __future__ import annotations

import argparse
import errno
import os
import resource
import shutil
import zipfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from fulgurite import checkpoint as module
from fulgurite.checkpoint import AtomicCheckpointIO, Description, damage, describe, provenance, read_checkpoint
from fulgurite.cli import main
from fulgurite.errors import UserError

STATE = {"state_dict": {"weight": torch.arange(1000.0)}, "epoch": 1}


def save(path: Path, state: Any = None) -> Path:
    AtomicCheckpointIO().save_checkpoint(STATE if state is None else state, path)
    return path


# Writing


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def torch_save(state: Any, file: Any) -> None:
        file.write(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", torch_save)


def test_write_makes_its_folder_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "last.ckpt")
    assert torch.equal(read_checkpoint(path)["state_dict"]["weight"], torch.arange(1000.0))
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_leaves_the_old_file_whole(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = save(tmp_path / "last.ckpt")
    before = path.read_bytes()
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="No space left on device"):
        save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_recognised_behind_pytorchs_own_error(tmp_path: Path) -> None:
    # A file of a limited size makes PyTorch's writer fail in earnest; a small one would fail in Python's buffer.
    state = {"state_dict": {"weight": torch.zeros(1_000_000)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            save(tmp_path / "last.ckpt", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flush(number: int) -> None:
        done.append("flush")
        fsync(number)

    def rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    save(tmp_path / "last.ckpt")
    assert done == ["flush", "rename", "flush"]


# Reading


def break_file(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "empty":
        data.clear()
    elif how == "truncated":
        del data[len(data) // 2 :]
    elif how == "garbage":
        data[:] = b"no checkpoint at all"
    elif how == "flipped byte of a tensor":
        data[data.index(torch.arange(1000.0).numpy().tobytes()) + 2000] ^= 1
    elif how == "directory flag":  # PyTorch 2.14 reads such a part as uninitialised memory
        data[data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0")) + 38] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("empty", "it is empty"),
        ("truncated", "it is cut short"),
        ("garbage", "it is not a checkpoint"),
        ("flipped byte of a tensor", "its part last/data/0 is damaged"),
        ("directory flag", "its part last/data/0 is damaged"),
    ],
)
def test_damage_is_named_with_the_newest_intact_neighbour(tmp_path: Path, how: str, text: str) -> None:
    path = save(tmp_path / "last.ckpt")
    text = text.replace("last/", "archive/") if b"archive/" in path.read_bytes() else text
    break_file(path, how)
    with pytest.raises(UserError) as error:
        read_checkpoint(path)
    assert str(error.value) == f"{path} cannot be read: {text}"
    for name, when in (("old.ckpt", 1), ("best.ckpt", 2), ("broken.ckpt", 3)):
        save(tmp_path / name)
        os.utime(tmp_path / name, (when, when))
    (tmp_path / "broken.ckpt").write_bytes(b"PK")
    with pytest.raises(UserError) as error:
        read_checkpoint(path)
    assert str(error.value).endswith(f"{text}\nthe newest intact checkpoint beside it: {tmp_path / 'best.ckpt'}")


@pytest.mark.parametrize("how", ["empty", "truncated", "garbage", "flipped byte of a tensor"])
@pytest.mark.parametrize("verb", ["fit", "test"])
def test_each_verb_refuses_a_damaged_checkpoint(
    here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str], verb: str, how: str
) -> None:
    shutil.copytree(trained_run / "checkpoints", "k")
    last = Path("k/last.ckpt")
    if how.startswith("flipped"):
        data = bytearray(last.read_bytes())
        with ZipFile(last) as archive:  # between the parts there is padding
            tensor = max((archive.read(name) for name in archive.namelist() if "/data/" in name), key=len)
        data[data.index(tensor) + len(tensor) // 2] ^= 1
        last.write_bytes(data)
    else:
        break_file(last, how)
    assert main([verb, "--ckpt_path", "k/last.ckpt"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: k/last.ckpt cannot be read: it")
    assert error.endswith("\nthe newest intact checkpoint beside it: k/best.ckpt\n")
    assert not Path("runs/digits").exists()


def test_no_flipped_bit_is_read_in_silence(tmp_path: Path) -> None:
    path = save(tmp_path / "last.ckpt", {"state_dict": {"a": torch.arange(3.0)}})
    intact = path.read_bytes()
    harmless = 0
    for position in range(0, len(intact), 3):
        broken = bytearray(intact)
        broken[position] ^= 1 << position % 8
        path.write_bytes(broken)
        try:
            state = read_checkpoint(path)
        except UserError:
            continue
        harmless += 1  # in padding, dates and the like
        assert state["state_dict"]["a"].tolist() == [0.0, 1.0, 2.0]
    assert harmless < len(intact) / 3


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_nothing_in_a_checkpoint_can_run(here: Path) -> None:
    torch.save({"state_dict": {}, "x": Payload()}, "bad.ckpt")
    with pytest.raises(UserError, match=r"^bad\.ckpt cannot be read: it holds more than plain data \(it names posix\.system\)$"):
        read_checkpoint(Path("bad.ckpt"))
    assert not Path("ran").exists()


def test_environment_that_lets_code_run_is_refused(
    here: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert main(["test", "--ckpt_path", str(trained_run)]) == 2
    assert capsys.readouterr().err == (
        "error: TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set, which lets a checkpoint run code: unset it\n"
    )
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
    assert main(["test", "--ckpt_path", str(trained_run)]) == 0


@pytest.mark.parametrize("state", [[1], {"weights": 1}])
def test_other_files_of_pytorch_are_told_apart(tmp_path: Path, state: Any) -> None:
    with pytest.raises(UserError, match=r"last\.ckpt is not a training checkpoint: it has no state_dict$"):
        read_checkpoint(save(tmp_path / "last.ckpt", state))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no checkpoint file at \S+none\.ckpt$"):
        read_checkpoint(tmp_path / "none.ckpt")


def test_checkpoint_of_another_program_is_told_apart() -> None:
    for stored in ({}, {"fulgurite": {"config": ""}}):
        with pytest.raises(UserError, match=r"^x\.ckpt does not say how it was made: it was not written by fulgurite$"):
            describe(stored, Path("x.ckpt"))


def test_description_is_plain_and_its_config_is_read_without_trust() -> None:
    description = Description("a: {b: 1}", {"channels": 1}, {"seed": 0})
    assert description.to_dict() == {"config": "a: {b: 1}", "spec": {"channels": 1}, "provenance": {"seed": 0}}
    assert describe({"fulgurite": description.to_dict()}, Path("x")) == description
    assert description.sections == {"a": {"b": 1}}
    assert Description("", {}, {}).sections == {}
    with pytest.raises(UserError, match="the checkpoint's configuration is not plain YAML"):
        _ = Description("a: !!python/object/apply:os.system ['touch ran']", {}, {}).sections
    with pytest.raises(UserError, match=r"^the checkpoint's configuration is not a mapping$"):
        _ = Description("[1]", {}, {}).sections


def test_provenance_says_when_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    origin = provenance(seed=None, data_fingerprint="")
    assert (origin["git_commit"], origin["git_dirty"], origin["seed"]) == (None, None, None)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("state_dict", [1]),
        ("state_dict", {1: 2}),
        ("loops", []),
        ("callbacks", {"Checkpoints": 3}),
        ("optimizer_states", {}),
        ("optimizer_states", [3]),
        ("lr_schedulers", [None]),
        ("global_step", "1"),
        ("ema", []),
    ],
)
def test_parts_of_another_kind_are_named(tmp_path: Path, part: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        read_checkpoint(save(tmp_path / "last.ckpt", STATE | {part: value}))
    assert str(error.value) == (
        f"{tmp_path / 'last.ckpt'} is not a training checkpoint: of another kind than it should be are {part}"
    )


def test_what_is_allowed_elsewhere_in_the_process_is_not_allowed_here(tmp_path: Path) -> None:
    path = save(tmp_path / "last.ckpt", STATE | {"options": argparse.Namespace()})
    with torch.serialization.safe_globals([argparse.Namespace]):
        torch.load(path, weights_only=True)
        with pytest.raises(UserError, match=r"it holds more than plain data \(it names argparse\.Namespace\)$"):
            read_checkpoint(path)


def test_name_in_a_file_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("\x1b[2J" + "x" * 1000, b"x")
    text = damage(path)
    assert text is not None
    assert "\x1b" not in text
    assert len(text) < 300


def test_file_by_a_name_of_another_format_is_read_as_a_checkpoint(tmp_path: Path) -> None:
    assert read_checkpoint(save(tmp_path / "x.safetensors"))["epoch"] == 1  # torch.load would go by the name


@pytest.mark.parametrize("config", ["a: &x [*x]", "a: &x 1", "[" * 60 + "]" * 60, "a: !x 1", "a: \x00", "a: " + "1" * 5000])
def test_configuration_that_is_not_plain_is_refused(config: str) -> None:
    with pytest.raises(UserError, match=r"^the checkpoint's configuration is not plain YAML: "):
        _ = Description(config, {}, {}).sections


def test_intact_file_has_no_damage(tmp_path: Path) -> None:
    assert damage(save(tmp_path / "last.ckpt")) is None
    assert module.KEY == "fulgurite"
