from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import fulgurite.command
from fulgurite import __version__, cli
from fulgurite.cli import main
from fulgurite.errors import RunStopped, UserError
from tests.commands import refused

ALLOWED = "allowed: fit, validate, test, predict, plan, check-data, find-workers, make-shards, doctor"


def test_what_needs_no_pytorch_imports_none() -> None:
    code = (
        "import sys\n"
        "from fulgurite.cli import main\n"
        "for argv in (['--version'], ['--help'], ['help'], [], ['-h'], ['doctor', '--help'], ['nonsense']):\n"
        "    print(main(argv))\n"
        "import fulgurite.verbs.doctor\n"  # it imports torch when all that is known without is printed
        "print('imported:', sorted({'torch', 'lightning', 'jsonargparse', 'yaml', 'numpy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "imported: []"
    assert [line for line in done.stdout.splitlines() if line in ("0", "1", "2")] == ["0"] * 6 + ["2"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fulgurite {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_help_names_every_verb(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: fulgurite VERB [-c FILE]... [--KEY VALUE]..."
    for verb, summary in cli.VERBS.items():
        assert f"  {verb.replace('_', '-'):<12}  {summary}" in lines
    assert "  --debug           show tracebacks (or set FULGURITE_DEBUG=1)" in lines
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tset", f"unknown verb 'tset' (did you mean 'test'?); {ALLOWED}"),
        ("FIT", f"unknown verb 'FIT' (did you mean 'fit'?); {ALLOWED}"),
        ("", f"unknown verb ''; {ALLOWED}"),
        ("frobnicate", f"unknown verb 'frobnicate'; {ALLOWED}"),
        ("-c", f"the verb comes before '-c': fulgurite VERB -c ...; {ALLOWED}"),
        (
            "--trainer.max_epochs",
            f"the verb comes before '--trainer.max_epochs': fulgurite VERB --trainer.max_epochs ...; {ALLOWED}",
        ),
    ],
)
def test_an_unknown_verb(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, given, "x.yaml") == message


def test_doctor_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert capsys.readouterr().out == f"usage: fulgurite doctor\n\n{cli.VERBS['doctor']}\n"
    assert refused(capsys, "doctor", "--json") == "doctor takes no arguments, and '--json' was given"


def test_a_verb_may_be_written_with_hyphens(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(verb: str, argv: list[str]) -> int:
        ran.append((verb, argv))
        return 0

    monkeypatch.setitem(cli.VERBS, "find_lr", "")
    monkeypatch.setattr(fulgurite.command, "run_command", run)
    assert main(["find-lr", "--a-b", "1"]) == 0
    assert main(["find_lr"]) == 0
    assert ran == [("find_lr", ["--a-b", "1"]), ("find_lr", [])]


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(verb: str, argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(fulgurite.command, "run_command", fail)


def test_a_users_mistake_has_status_2_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, UserError("one\ntwo"))
    assert main(["fit"]) == 2
    assert capsys.readouterr().err == "error: one\ntwo\n"


@pytest.mark.parametrize(("argv", "value"), [(["fit", "--debug"], None), (["fit"], "1"), (["--debug", "fit"], "0")])
def test_debug_shows_the_traceback_too(
    argv: list[str], value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, UserError("one"))
    if value is not None:
        monkeypatch.setenv("FULGURITE_DEBUG", value)
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("\nerror: one\n")


@pytest.mark.parametrize("value", ["", "0"])
def test_debug_can_be_off(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, UserError("one"))
    monkeypatch.setenv("FULGURITE_DEBUG", value)
    assert main(["fit"]) == 2
    assert capsys.readouterr().err == "error: one\n"


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        main(["fit"])


def test_a_stopped_run_is_no_error_even_with_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, RunStopped("at step 5"))
    assert main(["fit", "--debug"]) == 75
    assert capsys.readouterr().err == "stopped: at step 5\n"


def test_ctrl_c_before_there_is_anything_to_save(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["fit"]) == 130
    assert capsys.readouterr().err == "stopped: by Ctrl-C\n"


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3), (143, 143)])
def test_what_wants_to_exit_gives_its_status(code: int | None, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, SystemExit(code))
    assert main(["fit"]) == status


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    command = f"{sys.executable} -m fulgurite --help 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 141)


def test_the_module_runs_as_the_program_does() -> None:
    done = subprocess.run([sys.executable, "-m", "fulgurite", "tset"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: unknown verb 'tset' (did you mean 'test'?); {ALLOWED}\n"
