from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fulgurite.config import Config, differences, leaves, read_file
from fulgurite.errors import UserError

ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.5}}


def stack(*layers: dict[str, Any]) -> Any:
    config = Config()
    for number, layer in enumerate(layers):
        config.add_layer(layer, f"layer {number}")
    return config.tree


def with_flags(tree: dict[str, Any], *flags: tuple[str, str]) -> Any:
    config = Config()
    config.add_layer(tree, "file")
    for key, text in flags:
        config.set(key, text, "flags")
    return config.tree


def test_later_layers_win_and_leave_the_rest() -> None:
    assert stack({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}}, {"b": None}) == {"a": {"x": 1, "y": 4}, "b": 3}
    assert stack({"a": {"x": 1}}, {"a": {"x": None}}) == {"a": {"x": None}}


def test_a_section_without_a_line_in_it_says_nothing() -> None:
    assert stack({"trainer": {"max_epochs": 3}}, {"trainer": None}) == {"trainer": {"max_epochs": 3}}


def test_lists_are_replaced_unless_the_key_ends_in_plus() -> None:
    assert stack({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}
    assert stack({"a": [1, 2]}, {"a+": [3]}, {"a+": 4}) == {"a": [1, 2, 3, 4]}
    assert stack({"a": {"class_path": "X"}}, {"a+": "Y"}) == {"a": [{"class_path": "X"}, "Y"]}
    assert stack({"a": None}, {"a+": "Y"}) == {"a": ["Y"]}


def test_what_is_added_to_nothing_waits_for_the_default() -> None:
    assert stack({"a+": 1}, {"a+": 2}) == {"a+": [1, 2]}
    assert stack({"a+": 1}, {"a": 2}) == {"a": 2}


@pytest.mark.parametrize("new", ["torch.optim.SGD", "SGD", "mine.AdamW", "torch.nn.AdamW"])
def test_another_class_gets_no_value_of_the_old_one(new: str) -> None:
    over: list[Any] = [{"class_path": new}, {"class_path": new, "init_args": {}}]
    assert [stack({"o": ADAM}, {"o": value})["o"] for value in over] == over
    assert stack({"o": ADAM}, {"o": new})["o"] == new
    assert with_flags({"o": ADAM}, ("o", new)) == {"o": new}
    assert with_flags({"o": ADAM}, ("o.class_path", new)) == {"o": {"class_path": new}}
    assert with_flags({"o": ADAM}, ("o", new), ("o.lr", "3")) == {"o": {"class_path": new, "init_args": {"lr": "3"}}}


@pytest.mark.parametrize("same", ["torch.optim.AdamW", "AdamW", "torch.optim.adamw.AdamW"])
def test_the_same_class_keeps_its_values_however_it_is_called(same: str) -> None:
    expected = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 9, "weight_decay": 0.5}}
    assert stack({"o": ADAM}, {"o": {"class_path": same, "init_args": {"lr": 9}}})["o"] == expected
    assert stack({"o": ADAM}, {"o": same})["o"] == ADAM
    assert with_flags({"o": ADAM}, ("o.class_path", same))["o"] == ADAM


def test_a_bare_name_can_be_given_arguments_by_a_later_layer() -> None:
    expected = {"o": {"class_path": "SGD", "init_args": {"lr": 1}}}
    assert stack({"o": "SGD"}, {"o": {"init_args": {"lr": 1}}}) == expected


def test_flags_leave_init_args_out() -> None:
    tree = {"model": {"class_path": "M", "init_args": {"net": {"class_path": "N", "init_args": {"w": 1}}}}}
    assert with_flags(tree, ("model.net.w", "2"))["model"]["init_args"]["net"]["init_args"] == {"w": "2"}
    assert with_flags(tree, ("model.init_args.net.init_args.w", "2"))["model"]["init_args"]["net"]["init_args"] == {"w": "2"}
    assert with_flags({}, ("trainer.max_epochs", "3")) == {"trainer": {"max_epochs": "3"}}


def test_flags_after_an_added_class_are_for_it() -> None:
    flags = (("a+", "Timer"), ("a.duration", "5"))
    assert with_flags({"a": ["First"]}, *flags)["a"] == ["First", {"class_path": "Timer", "init_args": {"duration": "5"}}]
    assert with_flags({}, *flags)["a+"] == [{"class_path": "Timer", "init_args": {"duration": "5"}}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("~", None),
        ("[1, a]", [1, "a"]),
        ("{a: 1, b: [true]}", {"a": 1, "b": [True]}),
        ("[1", "[1"),
        ("{a: 1, a: 2}", "{a: 1, a: 2}"),
        ("!!python/name:os.system", "!!python/name:os.system"),
        ("[!!python/name:os.system x]", "[!!python/name:os.system x]"),
        ("3", "3"),
        ("true", "true"),
        ("", ""),
    ],
)
def test_only_what_cannot_be_told_from_text_later_is_read_at_once(text: str, value: Any) -> None:
    assert with_flags({}, ("a", text)) == {"a": value}


def test_layers_share_nothing() -> None:
    layer = {"a": [{"class_path": "X"}], "b": {"c": [1]}}
    config = Config()
    config.add_layer(layer, "file")
    config.set("a.y", "2", "flags")
    config.set("b.c+", "2", "flags")
    assert layer == {"a": [{"class_path": "X"}], "b": {"c": [1]}}


def test_each_value_knows_its_layer() -> None:
    config = Config()
    config.add_layer({"model": ADAM, "trainer": {"callbacks+": ["X"], "devices": {"a": 1}}}, "base.yaml")
    config.add_layer({"model": {"init_args": {"lr": 3}}}, "over.yaml")
    config.set("model.momentum", "2", "the command line")
    origins = {
        "model.init_args.lr": "over.yaml",
        "model.init_args.weight_decay": "base.yaml",
        "model.init_args.momentum": "the command line",
        "model": "base.yaml",  # of its class
        "model.init_args.lr.deeper": "over.yaml",
        "trainer.callbacks": "base.yaml",
        "trainer.callbacks.0.init_args.x": "base.yaml",
        "trainer.devices": "base.yaml",
        "data": "",
    }
    assert {path: config.origin(path) for path in origins} == origins


def test_a_message_gets_the_file_and_key_it_is_about() -> None:
    config = Config()
    config.add_layer({"data": {"init_args": {"size": 0, "x": 1}}, "model": {"x": 2}}, "a.yaml")
    assert config.locate("size is 0; it must be at least 1") == "a.yaml: data.init_args.size is 0; it must be at least 1"
    for unclear in ("x is 1", "depth is 0", "no such file", "size was 0"):
        assert config.locate(unclear) == unclear


def test_leaves_and_differences() -> None:
    old, new = {"a": {"b": 1, "c": {}}, "d": [1]}, {"a": {"b": 2, "c": {}}, "e": None, "f": 3}
    assert dict(leaves(old)) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert differences(old, new) == [("a.b", 1, 2), ("f", None, 3)]


def written(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("", {}),
        ("# only a comment\n", {}),
        ("a: 1\nb: [x, 2]\n", {"a": 1, "b": ["x", 2]}),
        ("a: 1\r\nb:\r\n  c: 2\r\n", {"a": 1, "b": {"c": 2}}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("experiment: 2024-05-17\n", {"experiment": "2024-05-17"}),
        ("experiment: 2024-99-99\n", {"experiment": "2024-99-99"}),
        ("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}\n", {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}),
        ("a: {b: 1}\nc: {b: 1}\n", {"a": {"b": 1}, "c": {"b": 1}}),
    ],
)
def test_files_are_read(tmp_path: Path, text: str, tree: Any) -> None:
    assert read_file(written(tmp_path / "a.yaml", text)) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n  b: 2\n", ", line 3: 'b' is given twice"),
        ("a: 1\nb: 2\na: 3\n", ", line 3: 'a' is given twice"),
        ("a: {b: 1, b: 2}\n", ", line 1: 'b' is given twice"),
        (
            "x: 1\na: !!python/object/apply:os.system ['x']\n",
            ", line 2: tags such as tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("a: !mine 3\n", ", line 1: tags such as !mine are refused"),
        ("a: [1\nb: 2\n", ", line 2: expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1\n", ", line 2: found character '\\t' that cannot start any token"),
        ("--- {a: 1}\n--- {b: 1}\n", ", line 2: but found another document"),
        ("? [1, 2]\n: 3\n", ", line 1: a key must be a plain word"),
        ("a\x00: 1\n", ": unacceptable character #x0000"),
        ("- 1\n- 2\n", " is not a configuration: it holds no keys with values, such as `trainer:`"),
        ("hello\n", " is not a configuration: it holds no keys with values, such as `trainer:`"),
        ("false\n", " is not a configuration: it holds no keys with values, such as `trainer:`"),
        ("name: grün\n".encode("latin-1"), " is not a configuration: it is not UTF-8 text"),
        ("a: 1\n".encode("utf-16"), " is not a configuration: it is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_the_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = written(tmp_path / "a.yaml", text)
    with pytest.raises(UserError) as caught:
        read_file(path)
    assert str(caught.value).startswith(path + message)


def test_a_missing_file_and_a_folder_name_what_is_there(tmp_path: Path) -> None:
    written(tmp_path / "digits.yaml", "a: 1")
    for path, message in (
        (tmp_path / "digit.yaml", f"no configuration file {tmp_path}/digit.yaml (did you mean 'digits.yaml'?)"),
        (tmp_path / "no" / "x.yaml", f"no configuration file {tmp_path}/no/x.yaml"),
        (tmp_path, f"{tmp_path} is a folder, not a configuration file; in it are digits.yaml"),
    ):
        with pytest.raises(UserError) as caught:
            read_file(str(path))
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainer.max_epochs: 1",
            "trainer.max_epochs has to be nested: max_epochs in a line of its own, indented under trainer:",
        ),
        ("trainer: &a {max_epochs: *a}", "an alias stands inside the anchor it refers to"),
    ],
)
def test_file_that_means_something_else(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_file(str(tmp_path / "x.yaml"))
