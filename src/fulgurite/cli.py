"""The command line: ``fulgurite VERB``. What needs no PyTorch is answered before anything large is imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from fulgurite import __version__
from fulgurite.console import is_rank_zero, printable
from fulgurite.errors import RunStopped, UserError, did_you_mean

DEBUG = "FULGURITE_DEBUG"
VERBS = {
    "fit": "train, in a new folder under runs/",
    "validate": "measure a checkpoint on the validation split",
    "test": "measure a checkpoint on the test split",
    "predict": "classify image files into a table",
    "plan": "show what a training would do, and draw its learning rate",
    "check_data": "look for what is wrong with images, labels and splits",
    "find_workers": "measure how many loader processes pay",
    "make_shards": "pack a data set for streaming",
    "doctor": "show what this machine offers, and what is wrong with it",
}
HELP = """usage: fulgurite VERB [-c FILE]... [--KEY VALUE]...

{verbs}

  fulgurite fit -c configs/experiment/digits.yaml    train on the built-in digits
  fulgurite test --ckpt_path best                    measure the best checkpoint of the latest run
  fulgurite VERB --help                              all options of a verb

options:
  -c FILE           a configuration; later files go on top of earlier ones, flags on top of all
  --KEY VALUE       any key of the configuration, such as --trainer.max_epochs 3
  --KEY+ VALUE      add to a list, such as --trainer.callbacks+ RichModelSummary
  --print_config    print the resulting configuration and stop
  --trust PACKAGE   let a checkpoint name classes of this package of yours
  --debug           show tracebacks (or set {debug}=1)
  --version         print the version
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0 if all is done, 2 after a mistake the user can mend, 75 if a run was stopped and can go on, 1 if a check has found
    something, 128 + its number if a signal stopped what cannot go on.

    Args:
        args: as on the command line, without the program's name; None takes the program's own
    """
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv or os.environ.get(DEBUG, "") not in ("", "0")
    argv = [argument for argument in argv if argument != "--debug"]
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except RunStopped as stopped:
        # All processes of a job stop at once; if another were to fail, whoever started it would kill the first.
        if not is_rank_zero():
            return 0
        print(f"{stopped.prefix}: {printable(str(stopped))}", file=sys.stderr)
        return stopped.exit_status
    except UserError as error:
        if debug and error.exit_status == UserError.exit_status:
            traceback.print_exc()
        print(f"{error.prefix}: {printable(str(error))}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("stopped: by Ctrl-C", file=sys.stderr)
        return 130
    except SystemExit as stop:  # the way argparse leaves after --help
        return int(stop.code or 0)
    except BrokenPipeError:  # `fulgurite fit --help | head`: the reader has seen enough; the status is that of SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    given, *rest = argv or ["--help"]
    if given in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {verb.replace('_', '-'):<{width}}  {summary}" for verb, summary in VERBS.items())
        print(HELP.format(verbs=verbs, debug=DEBUG))
        return 0
    if given == "--version":
        print(f"fulgurite {__version__}")
        return 0
    verb = given.replace("-", "_")
    if given.startswith("-"):
        raise UserError(f"the verb comes before '{given}': fulgurite VERB {given} ...; allowed: {_verbs()}")
    if verb not in VERBS:
        raise UserError(f"unknown verb '{given}'{did_you_mean(verb, VERBS)}; allowed: {_verbs()}")
    if verb == "doctor":
        return _doctor(rest)
    # PyTorch's threads spin while they wait for each other. On cores that are also wanted elsewhere, by a second run say,
    # that made small steps ten times slower; letting them sleep costs an idle machine some time on tiny networks (9 s for 6).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # as `python -m fulgurite` has it: classes beside the configuration are found
    return _import_command()(verb, rest)


def _verbs() -> str:
    return ", ".join(verb.replace("_", "-") for verb in VERBS)


def _import_command() -> Callable[[str, list[str]], int]:
    """Import Lightning, which takes seconds; there is nothing to save yet, so Ctrl-C ends the process at once."""
    if "fulgurite.command" in sys.modules or threading.current_thread() is not threading.main_thread():
        from fulgurite.command import run_command

        return run_command
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from fulgurite.command import run_command
    finally:
        signal.signal(signal.SIGINT, handler)
    return run_command


def _doctor(rest: list[str]) -> int:
    if rest in (["-h"], ["--help"]):
        print(f"usage: fulgurite doctor\n\n{VERBS['doctor']}")
        return 0
    if rest:
        raise UserError(f"doctor takes no arguments, and '{rest[0]}' was given")
    from fulgurite.verbs.doctor import doctor

    return doctor()
