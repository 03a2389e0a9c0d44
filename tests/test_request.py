from __future__ import annotations

import pytest

from fulgurite.errors import UserError
from fulgurite.request import Request, read_request


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--x", "3"], ("x", "3")),
        (["--x=3"], ("x", "3")),
        (["--x", "-1"], ("x", "-1")),
        (["--x=-1"], ("x", "-1")),
        (["--x", "1e-3"], ("x", "1e-3")),
        (["--x", ""], ("x", "")),
        (["--x="], ("x", "")),
        (["--x", "a b"], ("x", "a b")),
        (["--x=a=b"], ("x", "a=b")),
        (["--x=--y"], ("x", "--y")),
        (["--x", "null"], ("x", "null")),
        (["--x", "[1, 2]"], ("x", "[1, 2]")),
        (["--x", "{a: 1}"], ("x", "{a: 1}")),
        (["--x"], ("x", "true")),
        (["--trainer.max-epochs", "3"], ("trainer.max_epochs", "3")),
        (["--trainer.callbacks+", "Timer"], ("trainer.callbacks+", "Timer")),
        (["--trainer.callbacks+=Timer"], ("trainer.callbacks+", "Timer")),
    ],
)
def test_a_flag_keeps_its_value_as_it_was_typed(argv: list[str], flag: tuple[str, str]) -> None:
    assert read_request("fit", argv).flags == [flag]


def test_a_flag_without_a_value_means_true_before_another_argument() -> None:
    assert read_request("fit", ["--a", "--b", "-c", "x.yaml", "--c"]) == Request(
        "fit", files=["x.yaml"], flags=[("a", "true"), ("b", "true"), ("c", "true")]
    )


def test_files_and_flags_keep_their_order() -> None:
    argv = ["--x", "1", "-c", "a.yaml", "--config", "b.yaml", "-c=c.yaml", "--config=d.yaml", "--x", "2"]
    request = read_request("fit", argv)
    assert request.files == ["a.yaml", "b.yaml", "c.yaml", "d.yaml"]
    assert request.flags == [("x", "1"), ("x", "2")]


def test_what_is_not_of_the_configuration_is_kept_apart() -> None:
    request = read_request("test", ["--trust", "mine", "--print-config", "--trust=yours", "--ckpt_path", "best"])
    assert (request.trust, request.print_config, request.flags) == (["mine", "yours"], True, [("ckpt_path", "best")])


@pytest.mark.parametrize("option", ["-h", "--help", "--model.help", "--model.network.help=ResNet"])
def test_help_takes_what_comes_after_it(option: str) -> None:
    assert read_request("fit", ["-c", "a.yaml", option, "ResNet"]).help == [option, "ResNet"]


@pytest.mark.parametrize("argument", ["x.yaml", "-x", "--", "--=3", "-1", "", "-", "--.", "-c3"])
def test_what_is_no_flag_is_refused(argument: str) -> None:
    with pytest.raises(UserError) as caught:
        read_request("fit", [argument])
    assert str(caught.value) == f"unexpected argument '{argument}'\nfiles go behind -c, values behind --KEY"


@pytest.mark.parametrize("option", ["-c", "--config", "--trust", "--ckpt_path"])
@pytest.mark.parametrize("after", [[], ["--x", "3"], [""]])
def test_some_flags_need_a_value(option: str, after: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_request("fit", [option, *after])
    assert str(caught.value) == f"{option} needs a value"


@pytest.mark.parametrize("option", ["-c=", "--ckpt_path="])
def test_an_empty_value_is_none(option: str) -> None:
    with pytest.raises(UserError, match=f"^{option[:-1]} needs a value$"):
        read_request("fit", [option])
