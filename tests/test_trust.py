from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import fulgurite
from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.trust import TRUSTED, check_trusted, trust_flags
from tests.commands import refused

# A module that tells when it is imported; evil_folder is a package without __init__.py.
PROBE = """
from os import system
from torch import nn
class Net(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, width: int = 4) -> None: super().__init__()
def make(*args, **kwargs): ...
made = Net(1, 1)
"""
MODULES = ("evil", "evil_folder.mod", "test_evil")
EVIL = {"class_path": "evil.Net"}
NETWORK = "model.init_args.network"


@pytest.fixture
def evil(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put modules on the path that nothing may import."""
    (here / "evil_folder").mkdir()
    for module in MODULES:
        (here / f"{module.replace('.', '/')}.py").write_text(PROBE)
    (here / "evil.yaml").write_text(yaml.safe_dump(EVIL))
    monkeypatch.syspath_prepend(here)
    yield
    for module in (*MODULES, "evil_folder"):
        sys.modules.pop(module, None)


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.fixture
def crafted(evil: None, here: Path, trained_run: Path) -> Callable[[Change], str]:
    """Return what makes a checkpoint that differs from a good one by a change to (its configuration, itself)."""

    def craft(change: Change) -> str:
        checkpoint = torch.load(trained_run / "checkpoints" / "best.ckpt", weights_only=True)
        sections = yaml.safe_load(checkpoint["fulgurite"]["config"])
        change(sections, checkpoint)
        checkpoint["fulgurite"]["config"] = yaml.safe_dump(sections)
        torch.save(checkpoint, here / "evil.ckpt")
        return "evil.ckpt"

    return craft


def network(value: Any) -> Change:
    return lambda sections, checkpoint: sections["model"]["init_args"].update(network=value)


UNTRUSTED: list[tuple[Any, str]] = [
    (EVIL, f"{NETWORK}.class_path names 'evil.Net', which is not in a trusted package; nothing was imported"),
    ({"class_path": "os.system", "init_args": {"command": "true"}}, f"{NETWORK}.class_path names 'os.system', which is not in a"),
    ({"class_path": "builtins.eval"}, f"{NETWORK}.class_path names 'builtins.eval', which is not in a trusted package"),
    ({"class_path": "torch.hub.load"}, f"{NETWORK}.class_path names 'torch.hub.load', which is not in a trusted package"),
    ({"class_path": "fulgurite.cli.os.system"}, f"{NETWORK}.class_path names 'fulgurite.cli.os.system', which is not in a"),
    (
        {"class_path": "torch.nn.functional.torch.load"},
        f"{NETWORK}.class_path names 'torch.nn.functional.torch.load', which cannot",
    ),
    ({"class_path": "torch.nn.functional.relu"}, f"{NETWORK}.class_path names 'torch.nn.functional.relu', which is not a class"),
    ({"class_path": "torch.nn.functional"}, f"{NETWORK}.class_path names 'torch.nn.functional', which is not a class"),
    ({"class_path": "fulgurite.data.base.os"}, f"{NETWORK}.class_path names 'fulgurite.data.base.os', which is not a class"),
    ({"class_path": "fulgurite.data.base.ABC"}, f"{NETWORK}.class_path names 'fulgurite.data.base.ABC', which comes from abc"),
    ({"class_path": "eval"}, f"{NETWORK}.class_path names 'eval', which is not the dotted name of a class"),
    ({"class_path": "SmallCNN"}, f"{NETWORK}.class_path names 'SmallCNN', which is not the dotted name of a class"),
    ({"class_path": ["evil.Net"]}, f"{NETWORK}.class_path names ['evil.Net'], which is not the dotted name of a class"),
    (
        {"class_path": {"x": "evil.Net"}},
        f"{NETWORK}.class_path names {{'x': 'evil.Net'}}, which is not the dotted name of a class",
    ),
    ({"class_path": 3}, f"{NETWORK}.class_path names 3, which is not the dotted name of a class"),
    ({"class_path": None}, f"{NETWORK}.class_path names None, which is not the dotted name of a class"),
    (
        {"class_path": "fulgurite.models.SmallCNN", "dict_kwargs": {"x": "evil.make"}},
        f"{NETWORK}.dict_kwargs.x names 'evil.make'",
    ),
    ("evil.Net", f"{NETWORK} names 'evil.Net', which is not in a trusted package"),
    ("evil_folder.mod.Net", f"{NETWORK} names 'evil_folder.mod.Net', which is not in a trusted package"),
    ("__main__.Net", f"{NETWORK} names '__main__.Net', which is not in a trusted package"),
    ("posix.system", f"{NETWORK} names 'posix.system', which is not in a trusted package"),
    ('{"class_path": "evil.Net"}', f"{NETWORK}.class_path names 'evil.Net', which is not in a trusted package"),
    ("class_path: evil.Net", f"{NETWORK}.class_path names 'evil.Net', which is not in a trusted package"),
    (
        '{"class\\u005fpath": "evil.Net", x: 2001-99-99}',
        f"{NETWORK}.class_path names 'evil.Net', which is not in a trusted package",
    ),
    ("['{class_path: evil.Net}']", f"{NETWORK}.0.class_path names 'evil.Net', which is not in a trusted package"),
    ([{"x": ["evil.make"]}], f"{NETWORK}.0.x.0 names 'evil.make', which is not in a trusted package"),
]


@pytest.mark.parametrize(("value", "message"), UNTRUSTED, ids=[str(value) for value, _ in UNTRUSTED])
def test_a_checkpoint_that_names_code_is_refused_before_it_is_imported(
    value: Any, message: str, crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = crafted(network(value))
    text = refused(capsys, "test", "--ckpt_path", path)
    assert text.startswith(f"evil.ckpt: {message}")
    assert len(text.splitlines()) <= 3
    with pytest.raises(UserError) as caught:
        fulgurite.load(path)
    assert message.removeprefix("model.") in str(caught.value)
    assert not {*MODULES} & sys.modules.keys()


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_every_command_that_reads_a_checkpoint_refuses(
    verb: str, crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--images", "x"] if verb == "predict" else []
    text = refused(capsys, verb, "--ckpt_path", crafted(network(EVIL)), *flags)
    assert text == (
        "evil.ckpt: model.init_args.network.class_path names 'evil.Net', which is not in a trusted package; "
        f"nothing was imported\ntrusted: {', '.join(TRUSTED)}\nif you trust whoever wrote it: --trust evil"
    )
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("seed_everything", EVIL),
        ("seed_everything", '{"class_path": "evil.Net"}'),
        ("trainer", {"strategy": '{"class_path": "evil.Net"}'}),
        ("trainer", {"accelerator": "evil.Net"}),
        ("checkpoint", {"monitor": "class_path: evil.Net"}),
    ],
)
def test_every_section_that_is_taken_over_is_looked_into(
    section: str, values: Any, crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = crafted(lambda sections, _: sections.update({section: values}))
    assert "names 'evil.Net', which is not in a trusted package" in refused(capsys, "fit", "--ckpt_path", path)
    assert "evil" not in sys.modules


def test_flags_and_files_do_not_hide_what_a_checkpoint_names(
    crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = crafted(network(EVIL))
    assert "names 'evil.Net'" in refused(capsys, "fit", "--ckpt_path", path, "--model.network", "fulgurite.models.SmallCNN")
    assert "evil" not in sys.modules


@pytest.mark.parametrize("name", ["evil.yaml", "{here}/evil.yaml"])
def test_a_file_beside_the_checkpoint_is_not_read_in_place_of_a_class(
    name: str, crafted: Callable[[Change], str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name.format(here=here)
    for change in (
        network(name),
        lambda sections, _: sections.update(model=name),
        lambda sections, _: sections.update(data=name),
        lambda sections, _: sections["model"].update(init_args=name),
        lambda sections, _: sections["trainer"].update(strategy=name),
        lambda sections, _: sections["trainer"].update(accelerator=name),
    ):
        refused(capsys, "fit", "--ckpt_path", crafted(change))
        assert "evil" not in sys.modules


def add_hyper_parameters(values: dict[str, Any], sections: dict[str, Any], checkpoint: dict[str, Any]) -> None:
    checkpoint["hyper_parameters"] = values


def test_lightnings_own_hyper_parameters_are_left_alone(crafted: Callable[[Change], str], here: Path) -> None:
    stored: list[dict[str, Any]] = [{"_class_path": "evil.Net"}, {"network": EVIL}]
    for values in stored:
        path = crafted(partial(add_hyper_parameters, values))
        assert main(["test", "--ckpt_path", path, "--trainer.enable_progress_bar", "false"]) == 0
        assert "evil" not in sys.modules


def test_the_data_spec_of_a_checkpoint_names_no_class(
    crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = crafted(lambda _, checkpoint: checkpoint["fulgurite"]["spec"].update(EVIL))
    assert "unknown key 'class_path' in a data spec" in refused(capsys, "predict", "--ckpt_path", path, "--images", "x")
    assert "evil" not in sys.modules


def test_a_trusted_package_may_be_named(crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]) -> None:
    path = crafted(network(EVIL))
    argv = ["test", "--ckpt_path", path, "--trust", "evil"]
    assert "the checkpoint's weights do not fit this network" in refused(capsys, *argv)  # so it was built
    assert "evil" in sys.modules


def test_a_module_without_a_spec_counts_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "specless", ModuleType("specless"))  # as __main__ is, outside of pytest
    with pytest.raises(UserError, match=r"a names 'specless\.Net', which is not in a trusted package"):
        check_trusted({"a": "specless.Net"})


def test_functions_are_trusted_only_where_the_user_says_so(evil: None) -> None:
    check_trusted({"a": "evil.make"}, ["evil"])
    for path in ("evil.nn", "evil.system", "evil.made", "torch.nn.functional.relu"):
        with pytest.raises(UserError, match="which is not a class"):
            check_trusted({"a": path}, ["evil"])


@pytest.mark.parametrize("package", ["", "a b", "a/b", "1", "a,b", "-x"])
def test_trust_takes_a_package(package: str) -> None:
    with pytest.raises(UserError) as caught:
        check_trusted({}, [package])
    assert str(caught.value) == f"--trust takes the name of a package, such as my_project, not '{package}'"


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("evil.Net", "\nif you trust whoever wrote it: --trust evil"),
        ("evil.deep.er.Net", "\nif you trust whoever wrote it: --trust evil"),
        ("torch.utils.data.DataLoader", "\nif you trust whoever wrote it: --trust torch.utils.data"),  # not all of torch
        ("os.path.join", ""),
        ("builtins.eval", ""),
    ],
)
def test_the_advice_trusts_no_more_than_is_needed(path: str, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        check_trusted({"a": {"class_path": path}})
    assert str(caught.value) == (
        f"the checkpoint: a.class_path names '{path}', which is not in a trusted package; nothing was imported\n"
        f"trusted: {', '.join(TRUSTED)}{advice}"
    )


def test_plain_values_raise_no_alarm(evil: None, here: Path) -> None:
    (here / "photos").mkdir()
    texts = [
        "photos.csv",
        "test.csv",
        "v1.0",
        "no_such_module.Net",
        "a: b",
        "[x",
        "data/cifar",
        "16-mixed",
        "",
        "timm/vit.x",
        "1e-3",
    ]
    check_trusted({"texts": texts, "numbers": [1, 2.5, None, True], "class_names": ["Cat", "Dog"]})


def test_a_files_name_that_could_be_code_is_let_through_by_trust(evil: None) -> None:
    with pytest.raises(UserError, match=r"a names 'test_evil\.csv'"):
        check_trusted({"a": "test_evil.csv"})
    check_trusted({"a": "test_evil.csv"}, ["test_evil"])


def test_what_this_project_makes_is_trusted() -> None:
    for path in (
        "fulgurite.models.SmallCNN",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.StepLR",
        "torchvision.models.ResNet",
    ):
        check_trusted({"a": [{"class_path": path, "init_args": {}}]})


def test_flags_for_classes_of_ones_own() -> None:
    config = "model: {class_path: fulgurite.tasks.ClassificationTask, init_args: {network: {class_path: mine.net.Net}}}"
    assert trust_flags(config) == ["--trust", "mine"]
    assert trust_flags("model: {class_path: torch.nn.Linear}") == trust_flags("") == trust_flags(None) == []
