from __future__ import annotations

import pytest

from fulgurite.errors import MissingExtraError, RunStopped, UserError, did_you_mean, name_list, shown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_epoch", " (did you mean 'max_epochs'?)"),
        ("adamw", " (did you mean 'AdamW'?)"),
        ("ADAM", " (did you mean 'Adam'?)"),
        ("width", ""),
        ("", ""),
    ],
)
def test_nearest_name_whatever_its_case(name: str, hint: str) -> None:
    assert did_you_mean(name, ["max_epochs", "AdamW", "Adam", "min_epochs"]) == hint


def test_names_with_one_ending_need_more_in_common() -> None:
    assert did_you_mean("nowhere.yaml", ["broken.yaml"]) == " (did you mean 'broken.yaml'?)"
    assert did_you_mean("nowhere.yaml", ["broken.yaml"], cutoff=0.8) == ""


def test_no_name_is_near_when_none_is_allowed() -> None:
    assert did_you_mean("anything", []) == ""


def test_long_lists_of_names_are_cut_and_counted() -> None:
    assert name_list(["a", "b"]) == "a, b"
    assert name_list("abcdefgh") == "a, b, c, d, e, f, g, h"
    assert name_list("abcdefghij", limit=8) == "a, b, c, d, e, f, g, h, ... (2 more)"


def test_missing_extra_names_the_command_that_installs_it() -> None:
    error = MissingExtraError("onnx", extra="onnx", purpose="export to ONNX")
    assert str(error) == 'export to ONNX needs onnx: pip install "fulgurite[onnx]"'
    assert error.exit_status == 2


def test_what_a_user_stopped_is_no_error() -> None:
    assert (RunStopped.exit_status, RunStopped.prefix) == (75, "stopped")
    assert (UserError.exit_status, UserError.prefix) == (2, "error")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("weiß", "weiß"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("x\nnext  rm -r", "x\\nnext  rm -r"),
        ("a" * 300, "a" * 200 + " ..."),
        (7, "7"),
    ],
)
def test_strangers_text_is_one_line_that_steers_nothing(text: object, seen: str) -> None:
    assert shown(text) == seen
    assert name_list([str(text)]) == seen
