from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fulgurite.cli import main
from fulgurite.resuming import run_to_resume
from tests.commands import refused
from tests.conftest import SMALL
from tests.training import RUN, Killed, at_batch, fit, steps, stop

OTHER = Path("runs/digits/v002")


def stopped_fit(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    """Train until an error in the second epoch, with the state of the first in last.ckpt."""
    with monkeypatch.context() as patched:
        at_batch(patched, 6, stop)
        with pytest.raises(Killed):
            fit(*args)


def rows(run: Path) -> list[str]:
    return (run / "metrics.csv").read_text().splitlines()


def test_resume_goes_on_in_the_folder_of_the_latest_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit() == 0
    stopped_fit(monkeypatch)
    assert main(["fit", "--resume"]) == 0
    assert [run.name for run in sorted(Path("runs/digits").iterdir())] == ["v001", "v002"]
    assert steps(OTHER)["last"] == 8
    assert rows(OTHER) == rows(RUN)
    assert not (OTHER / "run.lock").exists()


def test_latest_run_is_that_of_the_experiment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_fit(monkeypatch)
    stopped_fit(monkeypatch, "--trainer.experiment", "other")
    assert main(["fit", *SMALL, "--trainer.max_epochs", "2", "--resume"]) == 0
    assert steps(RUN)["last"] == 8
    said = refused(capsys, "fit", *SMALL, "--trainer.experiment", "third", "--resume")
    assert said.startswith(f"no run at {here}/runs/third (did you mean 'other'?)\ntrain one first: ")


@pytest.mark.parametrize("given", ["runs/digits/v001", "runs/digits/v001/checkpoints", "runs/digits", "runs"])
def test_run_is_named_by_its_folder(here: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    stopped_fit(monkeypatch)
    assert main(["fit", "--resume", given]) == 0
    assert steps(RUN)["last"] == 8


def test_run_that_was_moved_goes_on_where_it_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_fit(monkeypatch)
    shutil.move("runs/digits/v001", "elsewhere")
    assert main(["fit", "--resume", "elsewhere"]) == 0
    assert steps(Path("elsewhere"))["last"] == 8
    assert list(Path("runs/digits").iterdir()) == []


def test_finished_run_says_how_to_go_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit() == 0
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    assert refused(capsys, "fit", "--resume") == (
        "nothing to train: 2 epochs and 8 steps are done, trainer.max_epochs is 2 and trainer.max_steps -1\n"
        "for more: --trainer.max_epochs 3"
    )
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == before


def test_checkpoint_and_run_exclude_each_other(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = trained_run / "checkpoints" / "last.ckpt"
    assert refused(capsys, "fit", "--resume", str(trained_run), "--ckpt_path", str(last)) == (
        "--resume goes on in a run's folder, --ckpt_path begins a new run: give one of them"
    )
    assert refused(capsys, "fit", "--resume", str(last)) == (
        f"a run is resumed by its folder, and {last} is a file\nto begin a new run from that state: --ckpt_path {last}"
    )


def test_second_resume_at_once_is_refused(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained_run, "mine")
    program = "import sys; from pathlib import Path; from fulgurite.run_lock import RunLock; lock = RunLock(); "
    program += "lock.take(Path('mine')); print('taken', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        said = refused(capsys, "fit", "--resume", "mine", "--trainer.max_epochs", "3")
        assert said.startswith(f"mine is in use by process {holder.pid} on ")
        holder.communicate()
    assert main(["fit", "--resume", "mine", "--trainer.max_epochs", "3"]) == 0


def test_damaged_last_checkpoint_is_replaced_by_the_newest_intact_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit() == 0
    whole = rows(RUN)
    stopped_fit(monkeypatch)
    last = OTHER / "checkpoints" / "last.ckpt"
    last.unlink()  # best.ckpt is the same file
    last.write_bytes(b"")
    capsys.readouterr()
    assert main(["fit", "--resume", str(OTHER)]) == 0
    assert f"checkpoint  {last}: it is empty; the newest intact one is taken\n" in capsys.readouterr().out
    assert rows(OTHER) == whole


def test_run_without_its_configuration_file_or_last_checkpoint_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_fit(monkeypatch)
    (RUN / "config.yaml").unlink()
    assert main(["fit", "--resume"]) == 0
    assert steps(RUN)["last"] == 8
    (RUN / "checkpoints" / "last.ckpt").unlink()
    assert main(["fit", "--resume", "--trainer.max_epochs", "3"]) == 0
    assert steps(RUN)["last"] == 12


def test_run_without_an_intact_checkpoint_is_refused(here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained_run, "mine")
    for name in ("best", "last"):
        Path(f"mine/checkpoints/{name}.ckpt").write_bytes(b"not one")
    assert refused(capsys, "fit", "--resume", "mine") == (
        "no checkpoint of mine can be read\n"
        "mine/checkpoints/last.ckpt: it is not a checkpoint\n"
        "mine/checkpoints/best.ckpt: it is not a checkpoint"
    )


@pytest.mark.parametrize("name", ["run.lock", "config.yaml", "metrics.csv", "metrics.tmp", "checkpoints/.last.ckpt.tmp"])
def test_run_with_a_link_in_it_is_not_written_to(
    here: Path, trained_run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    # Unpacked from a stranger's archive, say.
    shutil.copytree(trained_run, "mine")
    Path("precious").write_text("mine")
    Path("mine", name).unlink(missing_ok=True)
    Path("mine", name).symlink_to(here / "precious")
    said = refused(capsys, "fit", "--resume", "mine", "--trainer.max_epochs", "3")
    assert said == f"mine/{name} is a link or a device: a run that goes on writes into its own files only"
    assert Path("precious").read_text() == "mine"


# Code that a checkpoint does not bring along

WITH_CALLBACK = ["--trainer.callbacks+", "lightning.pytorch.callbacks.RichModelSummary"]


def test_callbacks_come_from_the_run_s_file_not_from_its_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_fit(monkeypatch, *WITH_CALLBACK)
    said = refused(capsys, "fit", "--resume")
    command = "fulgurite fit -c runs/digits/v001/config.yaml --resume runs/digits/v001"
    assert said == (
        "runs/digits/v001 was trained with trainer.callbacks: code that a checkpoint does not bring along, "
        f"as it may come from a stranger\nif the run is yours: {command}"
    )
    assert main(command.split()[1:]) == 0
    assert steps(RUN)["last"] == 8


def test_resume_without_them_is_possible_if_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_fit(monkeypatch, *WITH_CALLBACK)
    assert main(["fit", "--resume", "--trainer.callbacks", "null"]) == 0


def test_named_loggers_come_along(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_fit(monkeypatch, "--trainer.logger", "csv")
    assert main(["fit", "--resume"]) == 0
    assert not list(RUN.glob("events*"))
    assert len(rows(RUN)) == 5


# The configuration of a run


def test_configuration_of_each_part_of_a_run_is_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_fit(monkeypatch)
    before = (RUN / "config.yaml").read_text()
    assert main(["fit", "--resume"]) == 0
    assert (RUN / "config.yaml").read_text() == before
    assert main(["fit", "--resume", "--trainer.max_epochs", "3"]) == 0
    assert (RUN / "config-1.yaml").read_text() == before
    assert yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["max_epochs"] == 3


def test_refused_resume_leaves_the_run_as_it_was(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_fit(monkeypatch)
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    assert refused(capsys, "fit", "--resume", "--data.batch_size", "32") == (
        "the run cannot go on exactly:\nbatch_size is 32; the checkpoint has 64\nto go on all the same: --resume_inexact"
    )
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == before


# auto


def test_auto_goes_on_with_the_same_configuration_only(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--resume", "auto") == 0  # there is none yet
    assert fit("--resume", "auto") == 0  # that one is complete
    assert steps(OTHER)["last"] == 8
    stopped_fit(monkeypatch)
    stopped_fit(monkeypatch, "--model.optimizer.lr", "0.5")
    assert fit("--resume", "auto") == 0
    names = ["v001", "v002", "v003", "v004"]
    assert sorted(run.name for run in Path("runs/digits").iterdir()) == names
    assert [steps(Path("runs/digits") / name)["last"] for name in names] == [8, 8, 8, 4]


def test_auto_says_why_it_begins_anew(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--resume", "auto") == 0
    assert "resume      a new run begins: there is none yet\n" in capsys.readouterr().out
    assert fit("--resume", "auto") == 0
    assert "resume      a new run begins: runs/digits/v001 is complete\n" in capsys.readouterr().out
    assert fit("--resume", "auto", "--model.optimizer.lr", "0.5") == 0
    text = "resume      a new run begins: runs/digits/v002 differs in model.init_args.optimizer.init_args.lr\n"
    assert text in capsys.readouterr().out


def test_auto_knows_a_run_that_was_resumed_by_its_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ["--trainer.runs_dir", str(here / "elsewhere")]
    stopped_fit(monkeypatch, *elsewhere)
    run = here / "elsewhere" / "digits" / "v001"
    with monkeypatch.context() as patched:
        at_batch(patched, 1, stop)
        with pytest.raises(Killed):
            main(["fit", "--resume", str(run)])
    assert [path.name for path in run.glob("config*.yaml")] == ["config.yaml"]
    assert fit("--resume", "auto", *elsewhere) == 0
    assert steps(run)["last"] == 8


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restarted_job_goes_on_by_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    stopped_fit(monkeypatch)
    monkeypatch.setenv(name, "0")
    stopped_fit(monkeypatch)
    monkeypatch.setenv(name, "1")
    capsys.readouterr()
    assert fit() == 0
    assert "resume      auto, as this job has been restarted\n" in capsys.readouterr().out
    assert [steps(run)["last"] for run in (RUN, OTHER)] == [4, 8]


def test_restarted_job_whose_run_is_complete_goes_on_to_its_test(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    capsys.readouterr()
    assert fit("--test") == 0
    assert "test        test/acc" in capsys.readouterr().out
    assert [run.name for run in Path("runs/digits").iterdir()] == ["v001"]


def test_complete_run_is_resumed_for_its_test(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit() == 0
    assert main(["fit", "--resume", "--test"]) == 0
    assert "test        test/acc" in capsys.readouterr().out


def test_newer_run_without_a_checkpoint_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_fit(monkeypatch)
    OTHER.mkdir()
    (OTHER / "config.yaml").write_text("")
    assert main(["fit", "--resume"]) == 0
    assert "resume      runs/digits/v002 is passed over: it has no checkpoint\n" in capsys.readouterr().out
    assert steps(RUN)["last"] == 8


def test_restart_by_torchrun_that_may_hang_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("TORCHELASTIC_RESTART_COUNT", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    assert run_to_resume(None, here, lambda: "") is None
    text = "warning     a restart by torchrun can hang unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set: set it next time\n"
    assert text in capsys.readouterr().out
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert run_to_resume(None, here, lambda: "") is None
    assert "warning" not in capsys.readouterr().out


def test_complete_is_kept_in_the_last_checkpoint(trained_run: Path) -> None:
    last = torch.load(trained_run / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["callbacks"]["Checkpoints"]["complete"] is True


def test_longer_run_keeps_the_test_of_the_shorter_one(here: Path) -> None:
    assert fit("--test") == 0
    before = rows(RUN)
    assert main(["fit", "--resume", "--trainer.max_epochs", "3"]) == 0
    assert rows(RUN)[: len(before)] == before
    assert len(rows(RUN)) == len(before) + 2
