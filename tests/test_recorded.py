from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from fulgurite.data import ImageFolderDataModule
from fulgurite.data.splits import Holdout
from fulgurite.models import SmallCNN
from fulgurite.recorded import Recorded, class_config, run_config


class Colour(Enum):
    RED = "#f00"


class Word(str):
    pass


class Base(Recorded):
    def __init__(self, first: Any, second: Any = 2, *, third: Any = 3) -> None:
        self.first = first


class Child(Base):
    def __init__(self, own: Any = "own", **options: Any) -> None:
        super().__init__(**options)


class Heir(Base):
    pass


class Passing(Base):
    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)


class Module(Recorded, nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)


class Flexible(nn.Module):
    """Have defaults for what the task fills in."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 8, hook: Any = print) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (lambda: Base(1), {"first": 1, "second": 2, "third": 3}),
        (lambda: Base(1, 5, third=None), {"first": 1, "second": 5, "third": None}),
        (lambda: Base(second=7, first=0), {"first": 0, "second": 7, "third": 3}),
        (lambda: Heir(1), {"first": 1, "second": 2, "third": 3}),
        (lambda: Child("x", first=1, third=9), {"own": "x", "first": 1, "second": 2, "third": 9}),
        (lambda: Module(), {"width": 4}),
        (lambda: Passing(first=1), {"first": 1, "second": 2, "third": 3}),
    ],
)
def test_arguments_are_kept_however_they_are_given(made: Any, arguments: dict[str, Any]) -> None:
    thing = made()
    assert thing.init_args == arguments
    for twin in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
        assert twin.init_args == arguments
        assert type(twin) is type(thing)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (Word("w"), "w"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "RED"),
        ((1, [2.5, "x"]), [1, [2.5, "x"]]),
        (OrderedDict(a=Path("b")), {"a": "b"}),
        (
            SmallCNN,
            {
                "class_path": "fulgurite.models.SmallCNN",
                "init_args": {"width": 32, "depth": 3, "dropout": 0.0, "init": "default"},
            },
        ),
        (partial(CosineAnnealingLR, eta_min=0.5), {"eta_min": 0.5, "last_epoch": -1}),
        (Base(1), {"class_path": "tests.test_recorded.Base", "init_args": {"first": 1, "second": 2, "third": 3}}),
        # What the task fills in, and a default that YAML cannot say, are left to the class.
        (partial(Flexible, width=2), {"class_path": "tests.test_recorded.Flexible", "init_args": {"width": 2}}),
    ],
)
def test_values_are_written_as_yaml_would_say_them(value: Any, plain: Any) -> None:
    if isinstance(value, partial) and value.func is CosineAnnealingLR:
        plain = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": plain}
    written = class_config(Base(value))["init_args"]["first"]
    assert written == plain
    assert type(written) is type(plain)
    assert yaml.safe_load(yaml.safe_dump(written)) == plain


def test_defaults_of_a_class_are_written_down() -> None:
    written = class_config(Base(partial(AdamW, lr=0.5)))["init_args"]["first"]
    assert written["class_path"] == "torch.optim.AdamW"
    assert written["init_args"]["lr"] == 0.5
    assert written["init_args"]["betas"] == [0.9, 0.999]
    assert "params" not in written["init_args"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: Base(lambda: 1), "cannot be written to a configuration: use a class or functools.partial of a class"),
        (lambda: Base(partial(SmallCNN, 10, 1)), "cannot be written to a configuration"),
        (lambda: Base([nn.Linear(1, 1)]), "cannot be written to a configuration"),
        (lambda: Base(type("Local", (), {})), "Local cannot be found again by its name: move it to a module"),
        (lambda: Passing(1), "Passing was given *values by position: pass them by name"),
    ],
)
def test_what_has_no_name_is_refused(made: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        class_config(made())
    assert text in str(error.value)


def test_run_is_described_as_the_command_line_would_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer(Recorded):
        def __init__(self, max_epochs: int, callbacks: Any = None) -> None: ...

    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    text = run_config(Trainer(3, callbacks=[object()]), Base(1), Base(2), {"ema": Base(4)})
    assert yaml.safe_load(text) == {
        "seed_everything": 7,
        "trainer": {"max_epochs": 3},  # an object for the trainer is left out
        "model": {"class_path": "tests.test_recorded.Base", "init_args": {"first": 1, "second": 2, "third": 3}},
        "data": {"class_path": "tests.test_recorded.Base", "init_args": {"first": 2, "second": 2, "third": 3}},
        "ema": {"first": 4, "second": 2, "third": 3},
    }
    monkeypatch.delenv("PL_GLOBAL_SEED")
    without = yaml.safe_load(run_config(Trainer(3), Base(1), None, {}))
    assert without["seed_everything"] is False
    assert "data" not in without
    with pytest.raises(TypeError, match=r"^Module does not remember its arguments: derive it from fulgurite.recorded.Recorded$"):
        run_config(Trainer(3), nn.Module(), None, {})


def test_a_dataclass_is_its_values() -> None:
    data = ImageFolderDataModule(Path("images"), split=Holdout(num_folds=3))
    assert class_config(data)["init_args"]["split"] == {
        "val_fraction": None,
        "test_fraction": None,
        "split_seed": 0,
        "num_folds": 3,
        "fold": 0,
    }
