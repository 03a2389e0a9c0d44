from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import fulgurite
from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.trust import TRUSTED, check_trusted, split_settings, trust_flags, without_places
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


# What a run takes over


def test_settings_are_taken_over_and_objects_are_not() -> None:
    plain: dict[str, Any] = {
        "max_epochs": 3,
        "precision": "16-mixed",
        "devices": [0, 1],
        "limit_val_batches": 0.5,
        "deterministic": True,
        "max_time": {"hours": 1, "minutes": 30},
        "max_steps": None,
        "logger": ["csv", "tensorboard"],
    }
    assert split_settings(plain) == (plain, [])
    objects = {
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.Timer"}],
        "plugins": "x",
        "profiler": "simple",
        "model_registry": "user/model",
        "strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"},
        "logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"},
        "devices": [],
        "accelerator": ["cpu"],
        "callbacks+": ["x"],
        "max_time": {"hours": "1"},
    }
    kept, dropped = split_settings(objects)
    assert kept == {}
    assert dropped == [name for name in objects if name != "devices"]  # what is empty is not missed


@pytest.mark.parametrize("name", ["runs_dir", "default_root_dir"])
def test_where_a_run_writes_is_its_own_affair(name: str) -> None:
    assert split_settings({name: "/somewhere/else"}) == ({}, [])


@pytest.mark.parametrize(
    "logger", ["wandb", "neptune", ["csv", "mlflow"], 5, 1.5, {"csv": 1}, [["csv"]], ["csv", {"class_path": "x.Y"}]]
)
def test_a_logger_that_sends_things_away_is_not_taken_over(logger: Any) -> None:
    assert split_settings({"logger": logger}) == ({}, ["logger"])


@pytest.mark.parametrize("logger", [None, True, False, "csv", "tensorboard", ["csv"]])
def test_a_logger_that_writes_into_the_run_is_taken_over(logger: Any) -> None:
    assert split_settings({"logger": logger}) == ({"logger": logger}, [])


def test_names_that_are_no_text_are_told_as_text() -> None:
    assert split_settings({3: "x"}) == ({}, ["3"])


def test_data_comes_without_places(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"class_path": "a.B", "init_args": {"root": "photos", "cache_dir": "/etc", "cache_dir+": "/etc", "size": 8}}
    assert without_places(data, source="x.ckpt") == {"class_path": "a.B", "init_args": {"root": "photos", "size": 8}}
    assert capsys.readouterr().out == ""
    arguments = {"root": "s3://bucket", "download": True, "storage_options": {"endpoint_url": "http://other"}}
    assert without_places(data | {"init_args": arguments}, source="x")["init_args"] == {"root": "s3://bucket"}
    assert "data.download and data.storage_options are not taken over, as it may come from a stranger" in capsys.readouterr().out
    assert without_places({"class_path": "a.B"}, source="x") == {"class_path": "a.B"}


@pytest.mark.parametrize(
    "data",
    [
        {"dict_kwargs": {"cache_dir": "/x"}},
        {"init_args.cache_dir": "/x"},
        {"init_args": {"inner": {"class_path": "a.B", "init_args": {"cache_dir": "/x"}}}},
        {"init_args": {"inner": [{"dict_kwargs.cache_dir+": ["/x"]}]}},
    ],
)
def test_places_are_left_out_wherever_they_are(data: dict[str, Any]) -> None:
    assert "cache_dir" not in str(without_places(data, source="x"))


def test_places_in_a_text_are_refused() -> None:
    with pytest.raises(UserError, match=r"^x: data.inner has cache_dir in the text "):
        without_places({"init_args": {"inner": "{class_path: a.B, init_args: {cache_dir: /x}}"}}, source="x")


@pytest.mark.parametrize("name", ["runs_dir", "num_nodes", "logger.class_path", "callbacks+", "logger.init_args.save_dir"])
def test_settings_that_lead_elsewhere_are_not_taken_over(name: str) -> None:
    assert split_settings({name: "x", "max_epochs": 3})[0] == {"max_epochs": 3}


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_data_that_never_ends_is_refused(name: str, here: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(UserError) as caught:
        without_places({"init_args": {"root": name}}, source="x.ckpt")
    assert str(caught.value) == f"x.ckpt: data.root is {name}, which is neither a file nor a folder"
    for text in ("x" * 100_000, "\x00", "~no_such_user/x", "no such file"):
        without_places({"init_args": {"root": text}}, source="x.ckpt")


# Texts that are more than they seem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: [*a, *a]", "anchors and aliases are refused"),
        ("[" * 5000, "it is nested deeper than 50 levels"),
        ('{x: "{y: evil.Net}"}', "'evil.Net', which is not in a trusted package"),
    ],
)
def test_text_in_a_configuration_is_looked_through(text: str, message: str, evil: None) -> None:
    with pytest.raises(UserError) as caught:
        check_trusted({"a": text})
    assert message in str(caught.value)
    assert "evil" not in sys.modules


def test_what_a_stranger_wrote_neither_fills_nor_steers_the_terminal() -> None:
    with pytest.raises(UserError) as caught:
        check_trusted({"\x1b[2J": {"class_path": ["x" * 10_000]}})
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400


class UntrustedNetwork(nn.Module):
    """Stand for a class that some library in this process has, and that tells when it is made."""

    made = 0

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        UntrustedNetwork.made += 1


def test_a_bare_name_is_not_a_way_round(crafted: Callable[[Change], str]) -> None:
    path = crafted(network("UntrustedNetwork"))
    with pytest.raises(UserError, match=r"names '\S+\.UntrustedNetwork', which is not in a trusted package"):
        fulgurite.load(path)
    assert UntrustedNetwork.made == 0


def test_a_bare_name_is_not_a_way_round_on_the_command_line(
    crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "which is not in a trusted package" in refused(capsys, "test", "--ckpt_path", crafted(network("UntrustedNetwork")))
    assert UntrustedNetwork.made == 0


@pytest.mark.parametrize(
    "url", ["http://localhost:1/a.ckpt", "https://localhost:1/a.ckpt", "s3://bucket/a.ckpt", "ftp://localhost/a"]
)
def test_an_address_is_not_fetched(
    url: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*args: Any) -> None:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for verb in ("fit", "test", "predict"):
        assert refused(capsys, verb, "--ckpt_path", url) == (
            f"{url} is an address, which is not fetched: give a file or folder on this machine"
        )
    with pytest.raises(UserError, match="is an address, which is not fetched"):
        fulgurite.load(url)


HERE = {"fulgurite.models.TorchvisionNetwork": "shufflenet_v2_x0_5", "fulgurite.models.TimmNetwork": "test_resnet"}
VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16}


@pytest.mark.parametrize("weights", ["default", "/etc/passwd", "someone/model"])
@pytest.mark.parametrize("path", [*HERE, "fulgurite.models.HuggingFaceNetwork"])
def test_a_network_reads_and_fetches_no_weights_that_a_checkpoint_names(
    path: str,
    weights: Any,
    crafted: Callable[[Change], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in {"Timm": ["timm"], "Hugg": ["transformers"]}.get(path.rpartition(".")[2][:4], []):
        pytest.importorskip(package, reason="needs the extras `timm` and `hf`")

    def touched(*args: Any, **options: Any) -> None:
        raise AssertionError("something was read or asked for")

    for name in ("socket.socket.connect", "fulgurite.weights.read_weights", "torch.hub.download_url_to_file"):
        monkeypatch.setattr(name, touched)
    options = {"name": HERE[path]} if path in HERE else {"config": VIT, "name": "someone/model"}
    file = crafted(network({"class_path": path, "init_args": {**options, "weights": weights}}))
    built = "the checkpoint's weights do not fit this network"
    for verb in ("test", "fit"):
        assert refused(capsys, verb, "--ckpt_path", file, "--trainer.enable_progress_bar", "false").startswith(built)
    with pytest.raises(UserError, match=built):
        fulgurite.load(file)


def test_the_architecture_that_a_checkpoint_names_is_not_fetched(
    crafted: Callable[[Change], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    pytest.importorskip("transformers", reason="needs the extra `hf`")
    monkeypatch.setattr(socket.socket, "connect", pytest.fail)
    (here / "folder").mkdir()
    (here / "folder" / "config.json").write_text('{"model_type": "vit"}')
    for name in ("someone/model", "folder", str(here / "folder")):
        file = crafted(network({"class_path": "fulgurite.models.HuggingFaceNetwork", "init_args": {"name": name}}))
        text = refused(capsys, "test", "--ckpt_path", file)
        assert "the network is not asked" in text or "is neither a folder nor the name of a Hugging Face model" in text
