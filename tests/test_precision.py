from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from fulgurite.cli import main
from fulgurite.errors import UserError
from fulgurite.precision import settle_precision
from tests.commands import printed_config, refused
from tests.conftest import SMALL
from tests.training import RUN, fit


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Return what this machine seems to have: no GPU, and a processor with these instructions."""
    found: dict[str, bool] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    return found


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Let this machine seem to have these GPUs."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capabilities[current[-1]][0] >= 8

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "get_device_name": lambda index=0: f"GPU {index}",
        "get_device_capability": lambda index: capabilities[index],
        "device": device,
        "is_bf16_supported": is_bf16_supported,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    ("instructions", "chosen", "reason"),
    [
        (["avx512_f", "avx512_bf16"], "bf16-mixed", "bf16-mixed, as the processor has AVX512-BF16"),
        (["amx_bf16"], "bf16-mixed", "bf16-mixed, as the processor has AMX"),
        (["avx2"], "32-true", "32-true, as the processor has neither AVX512-BF16 nor AMX"),
    ],
)
@pytest.mark.parametrize("accelerator", ["auto", "cpu", CPUAccelerator()])
def test_auto_asks_the_processor(
    processor: dict[str, bool],
    capsys: pytest.CaptureFixture[str],
    instructions: list[str],
    chosen: str,
    reason: str,
    accelerator: Any,
) -> None:
    processor.update(dict.fromkeys(instructions, True))
    assert settle_precision("auto", accelerator) == chosen
    assert capsys.readouterr().out == f"precision   {reason}\n"


@pytest.mark.parametrize(
    ("capabilities", "chosen", "reason"),
    [
        ([(9, 0)], "bf16-mixed", "GPU 0 has bfloat16"),
        ([(7, 5)], "16-mixed", "GPU 0 has fast float16 and no bfloat16 (compute capability 7.5)"),
        ([(6, 1)], "32-true", "GPU 0 is not faster in 16 bits (compute capability 6.1)"),
        ([(9, 0), (7, 0)], "16-mixed", "GPU 1 has fast float16 and no bfloat16 (compute capability 7.0)"),
    ],
)
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda"])
def test_auto_asks_the_oldest_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capabilities: list[tuple[int, int]],
    chosen: str,
    reason: str,
    accelerator: str,
) -> None:
    gpus(monkeypatch, *capabilities)
    assert settle_precision("auto", accelerator) == chosen
    assert capsys.readouterr().out == f"precision   {chosen}, as {reason}\n"


def test_auto_does_not_guess_for_apple(
    processor: dict[str, bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert settle_precision("auto", "auto") == "32-true"
    assert capsys.readouterr().out == "precision   32-true, as mixed precision was never tried on Apple's GPUs\n"
    with pytest.raises(UserError, match=r"trainer\.precision is 64, and Apple's GPUs have no float64: take 32-true"):
        settle_precision(64, "mps")


def test_this_torch_answers() -> None:
    assert isinstance(torch.cpu.get_capabilities()["architecture"], str)
    assert settle_precision("auto", "cpu") in ("bf16-mixed", "32-true")


@pytest.mark.parametrize(
    ("given", "name"), [(None, None), (32, "32-true"), ("64", "64-true"), ("bf16", "bf16-mixed"), ("bf16-true", "bf16-true")]
)
def test_lightnings_names_are_kept(processor: dict[str, bool], given: Any, name: str | None) -> None:
    processor["amx_bf16"] = True
    assert settle_precision(given, "cpu") == name


@pytest.mark.parametrize("given", [16, "16-mixed", "16-true"])
def test_float16_on_a_processor_is_refused(processor: dict[str, bool], given: Any) -> None:
    with pytest.raises(UserError) as caught:
        settle_precision(given, "auto")
    assert str(caught.value) == (
        f"trainer.precision is {given}, and float16 is for GPUs; on the CPU take bf16-mixed or 32-true\n"
        "--trainer.precision auto chooses what the device is fast in"
    )
    assert settle_precision(given, "gpu").startswith("16")  # there is none, which Lightning tells
    assert settle_precision("auto", "gpu") is None


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        settle_precision("bf16-mixd", "cpu")
    assert str(caught.value) == (
        "trainer.precision is 'bf16-mixd' (did you mean 'bf16-mixed'?); "
        "allowed: auto, 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, 64-true"
    )


def test_slow_bfloat16_is_told(
    processor: dict[str, bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settle_precision("bf16-mixed", "cpu") == "bf16-mixed"
    said = "precision   the processor has neither AVX512-BF16 nor AMX, so bf16-mixed is slower here than 32-true\n"
    assert capsys.readouterr().out == said
    gpus(monkeypatch, (7, 0))
    settle_precision("bf16-true", "gpu")
    assert capsys.readouterr().out == "precision   GPU 0 has no bfloat16, so bf16-true is slower here than 32-true\n"
    settle_precision("16-mixed", "gpu")
    assert capsys.readouterr().out == ""


def test_refusal_names_where_it_was_said(here: Path, processor: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "fit", *SMALL, "--trainer.precision", "16-mixed")
    assert said.splitlines()[0] == (
        "the command line: trainer.precision is 16-mixed, and float16 is for GPUs; on the CPU take bf16-mixed or 32-true"
    )
    assert "auto" in refused(capsys, "fit", *SMALL, "--trainer.precision", "transformer-engine")
    assert list(here.iterdir()) == []


def test_auto_stays_in_the_configuration_and_a_resumed_run_chooses_anew(
    here: Path, processor: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--trainer.precision", "auto", epochs=1) == 0
    assert "precision: auto" in (RUN / "config.yaml").read_text(encoding="utf-8")
    assert printed_config(capsys, "fit", "--resume")["trainer"]["precision"] == "auto"

    assert main(["fit", "--resume", "--trainer.max_epochs", "2"]) == 0
    assert "the precision is" not in capsys.readouterr().out

    processor["avx512_bf16"] = True  # on another machine
    assert main(["fit", "--resume", "--trainer.max_epochs", "3"]) == 0
    said = capsys.readouterr().out
    assert "precision   bf16-mixed, as the processor has AVX512-BF16\n" in said
    assert "differs     the precision is bf16-mixed; the checkpoint was trained in 32-true\n" in said
