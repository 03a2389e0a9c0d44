from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fulgurite.errors import UserError
from fulgurite.weights import find_weights, read_weights

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2, dtype=torch.float16)}


def save(path: Path, content: Any = STATE, *, legacy: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as error:
        act()
    return str(error.value)


class Shell:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it_ran",)


# Reading


def test_each_format_gives_the_same_tensors_whatever_the_file_is_called(here: Path) -> None:
    save_file(STATE, "model.pth")
    for path in (save(Path("new.safetensors")), save(Path("old.bin"), legacy=True), Path("model.pth")):
        assert same(read_weights(path).tensors), path


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": STATE, "epoch": 3, "optimizer_states": [{"state": {0: {"step": torch.ones(1)}}}]},
        {"model": STATE, "best_acc": torch.ones(1), "args": argparse.Namespace(lr=0.1)},
        {"model_state_dict": STATE, "optimizer": {"state": {}, "param_groups": []}},
        {"module": STATE},
        {"model": {"state_dict": STATE}, "epoch": 3},
        {"my_own_name": STATE, "step": 1},
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_state_dict_is_found_in_what_is_wrapped_around_it(here: Path, content: Any, legacy: bool) -> None:
    assert same(read_weights(save(Path("k.pth"), content, legacy=legacy)).tensors)


def test_other_state_dicts_and_what_is_no_tensor_are_named(here: Path) -> None:
    file = read_weights(save(Path("k.pth"), {"state_dict": {**STATE, "version": 3}, "state_dict_ema": STATE}))
    assert same(file.tensors)
    assert file.ignored == ["version", "state_dict_ema"]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("content", [{"a": Shell()}, {"state_dict": STATE, "hyper_parameters": Shell()}, Shell()])
def test_file_from_a_stranger_runs_nothing(here: Path, content: Any, legacy: bool) -> None:
    path = save(Path("k.pth"), content, legacy=legacy)
    assert refused(lambda: read_weights(path)) == (
        "k.pth cannot be read: it names posix.system, and code that a file names is never run\n"
        "ask its author for the state_dict alone, or for a .safetensors file"
    )
    assert not Path("it_ran").exists()


def test_whole_module_is_refused_for_its_class(here: Path) -> None:
    text = refused(lambda: read_weights(save(Path("k.pth"), torch.nn.Linear(2, 2))))
    assert text.startswith("k.pth cannot be read: it names torch.nn.modules.linear.Linear,")


def test_environment_that_would_let_code_run_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(Path("k.pth"), {"a": Shell()})
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert refused(lambda: read_weights(path)) == (
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set, which lets a file of weights run code: unset it"
    )
    assert not Path("it_ran").exists()


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("how", ["empty", "truncated", "halved", "garbage"])
def test_damaged_file_is_named(here: Path, kind: str, how: str) -> None:
    path = Path("k.pth")
    save_file(STATE, path) if kind == "safetensors" else save(path, legacy=kind == "legacy")
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": data[:-3], "halved": data[: len(data) // 2], "garbage": b"<html>no"}[how])
    text = refused(lambda: read_weights(path))
    assert text.startswith("k.pth cannot be read: ")
    if how == "empty":
        assert text.endswith("it is empty")
    elif how == "garbage":
        assert text.endswith("it is no file of weights; it begins with '<html>no'")
    assert "weights_only" not in text  # PyTorch's advice to read the file unsafely


def test_flipped_byte_of_a_zip_file_is_found(here: Path) -> None:
    path = save(Path("k.pth"))
    data = bytearray(path.read_bytes())
    data[data.index(STATE["a.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert refused(lambda: read_weights(path)) == "k.pth cannot be read: its part k/data/0 is damaged"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_torchscript_program_is_told_from_damage(here: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save("k.pt")
    expected = "k.pt cannot be read: it is a TorchScript program: save its state_dict() instead"
    assert refused(lambda: read_weights(Path("k.pt"))) == expected


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"lr": 0.1}, "k.pth holds no state dict that is known as one; its keys are lr"),
        ({"a": STATE, "b": STATE}, "k.pth holds no state dict that is known as one; its keys are a, b"),
        ({}, "k.pth holds no state dict that is known as one; its keys are none"),
        ([torch.ones(1)], "k.pth holds no weights: it is a list, not a state dict"),
        ({1: torch.ones(1)}, "k.pth holds no weights: there is no tensor in it"),
    ],
)
def test_file_without_weights_is_refused(here: Path, content: Any, text: str) -> None:
    assert refused(lambda: read_weights(save(Path("k.pth"), content))) == text


# Finding


def test_file_and_run_folder_are_found(here: Path, trained_run: Path) -> None:
    path = save(Path("k.pth"))
    assert find_weights("k.pth", Path("runs")) == path
    assert find_weights(trained_run, Path("runs")) == trained_run / "checkpoints" / "best.ckpt"
    assert find_weights("last", trained_run.parent.parent) == trained_run / "checkpoints" / "last.ckpt"


def test_what_is_not_here_is_told_with_how_to_get_it(here: Path) -> None:
    save(Path("resnet18.pth"))
    Path("vit").mkdir()
    save(Path("vit/model.safetensors"))
    allowed = "allowed: a .ckpt, .pth, .pt, .bin, .safetensors file, a run folder, or best or last for those of the latest run"
    url, far = "https://example.org/a/resnet18.pth", "and only files on this machine are read\nfetch it first:"
    hub = "google/vit-base-patch16-224"
    expected: dict[str | Path, str] = {
        "resnet81.pth": f"no weights at resnet81.pth (did you mean 'resnet18.pth'?)\n{allowed}",
        "vit": "weights.path is vit, a folder: name the file in it that is meant: model.safetensors",
        url: f"weights.path is {url}, {far} curl -LO {url}",
        Path(url): f"weights.path is {url}, {far} curl -LO {url}",
        "s3://bucket/k.pth": f"weights.path is s3://bucket/k.pth, {far} copy it here",
        hub: f"no weights at {hub}\n{allowed}\na Hugging Face model is fetched first: "
        f"hf download {hub} model.safetensors --local-dir .",
    }
    for given, text in expected.items():
        assert refused(lambda given=given: find_weights(given, Path("runs"))) == text  # type: ignore[misc]


def twice(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels):
        value = (value, value)
    return value


@pytest.mark.parametrize("is_zip", [True, False])
def test_file_on_which_pytorch_would_hang_is_refused(tmp_path: Path, is_zip: bool) -> None:
    # The pickle holds 40 small tuples; as the key of a dictionary they would be hashed for ever.
    path = tmp_path / "w.pth"
    torch.save({"weight": torch.zeros(1), "k": twice(40)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UserError, match=r"cannot be read: it unfolds to more than 20,000,000 values"):
        read_weights(path)
