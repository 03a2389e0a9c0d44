from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim
from torch.optim import Optimizer

import fulgurite.models
from fulgurite.class_paths import find_class, in_full, looks_like_class

OPTIMIZER = Callable[[Any], Optimizer]
NETWORK = Callable[[int, int], nn.Module]


def test_a_dotted_path_finds_its_class() -> None:
    assert find_class("torch.optim.SGD", OPTIMIZER) is optim.SGD
    assert find_class("fulgurite.models.ResNet", NETWORK) is fulgurite.models.ResNet
    assert find_class("torch.nn.functional.relu", NETWORK) is nn.functional.relu


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("torch.optim.Adan", "does not exist (did you mean 'Adam'?)"),
        ("torch.optim.sgd.Sgd", "does not exist (did you mean 'SGD'?)"),
        ("torch.optm.SGD", "does not exist: there is no module torch.optm (did you mean 'optim'?)"),
        ("tortch.optim.SGD", "does not exist: there is no module tortch (did you mean 'torch'?)"),
        ("fulgurite.model.SmallCNN", "does not exist: there is no module fulgurite.model (did you mean 'models'?)"),
        ("fulgurite.models.no.such.Net", "does not exist: there is no module fulgurite.models.no"),
        ("torch.optim", "is not a class"),
        ("os.environ", "is not a class"),
        ("Adan", "does not exist (did you mean 'Adam'?)"),
        ("Linear", "does not exist"),
        ("net.yaml", "is not a class: a configuration file goes behind -c"),
        ("..x", "is not a dotted name, such as torch.optim.SGD"),
        ("", "is not a dotted name, such as torch.optim.SGD"),
        ("a b.c", "is not a dotted name, such as torch.optim.SGD"),
        (3, "is not a dotted name, such as torch.optim.SGD"),
        (None, "is not a dotted name, such as torch.optim.SGD"),
    ],
)
def test_what_is_no_class_says_why(path: Any, reason: str) -> None:
    assert find_class(path, OPTIMIZER) == reason


def test_a_module_that_lacks_something_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_done.py").write_text("import not_installed_at_all\n")
    (tmp_path / "half_named.py").write_text("from torch import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_class("half_done.Net", NETWORK) == "cannot be imported: No module named 'not_installed_at_all'"
    assert str(find_class("half_named.Net", NETWORK)).startswith("cannot be imported: cannot import name 'no_such_thing'")


def test_a_fault_in_a_users_module_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_by_its_author.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        find_class("broken_by_its_author.Net", NETWORK)


def test_bare_names_are_written_out() -> None:
    assert in_full("SGD", OPTIMIZER) == {"class_path": "torch.optim.SGD"}
    assert in_full({"class_path": "SGD", "init_args": {"lr": 1}}, OPTIMIZER) == {
        "class_path": "torch.optim.SGD",
        "init_args": {"lr": 1},
    }
    assert in_full(["SGD", "x"], OPTIMIZER) == [{"class_path": "torch.optim.SGD"}, "x"]


def test_of_two_classes_with_one_name_the_projects_own_is_meant() -> None:
    import torchvision.models

    assert torchvision.models.ResNet is not fulgurite.models.ResNet
    assert in_full("ResNet", NETWORK) == {"class_path": "fulgurite.models.ResNet"}


def test_of_two_classes_elsewhere_pytorchs_with_the_shorter_path_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.py").write_text("from torch import nn\nclass Linear(nn.Module): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept_alive = __import__("other")  # as timm has one
    assert in_full("Linear", NETWORK) == {"class_path": "torch.nn.Linear"}
    assert kept_alive.Linear


def test_a_name_that_could_be_either_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("twin_one", "twin_two"):
        (tmp_path / f"{module}.py").write_text("from torch import nn\nclass TwinNet(nn.Module): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    one, two = __import__("twin_one"), __import__("twin_two")  # kept alive, and so among nn.Module's subclasses
    assert in_full("TwinNet", NETWORK) == "TwinNet"
    assert find_class("TwinNet", NETWORK) == "could be twin_one.TwinNet or twin_two.TwinNet"
    assert one.TwinNet is not two.TwinNet


@pytest.mark.parametrize("value", ["sgd", "torch.optim.SGD", "Nothing", "Linear", 3, None, {"lr": 1}, {"class_path": 3}])
def test_all_else_is_left_alone(value: Any) -> None:
    assert in_full(value, OPTIMIZER) == value


def test_what_looks_like_a_class() -> None:
    assert [looks_like_class(text) for text in ("SGD", "torch.optim.SGD", "a.b")] == [True, True, True]
    assert [looks_like_class(text) for text in ("sgd", "", "1e-3", "16-mixed", "a b", "x/y.Z", "-1")] == [False] * 7
