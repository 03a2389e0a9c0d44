"""Run the real command line in this process, for tests of what a user sees."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fulgurite.cli import main


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a command says that must refuse, in a few lines and without a traceback; ``error: `` is left out."""
    capsys.readouterr()
    assert main(list(argv)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    return text.removeprefix("error: ").rstrip("\n")


def printed_config(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Return the configuration that ``--print_config`` prints."""
    capsys.readouterr()
    assert main([*argv, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)
