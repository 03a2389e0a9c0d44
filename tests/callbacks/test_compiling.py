from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from fulgurite import Trainer, load
from fulgurite.callbacks.checkpoints import Checkpoints
from fulgurite.callbacks.compiling import Compilation, Compile, Mode
from fulgurite.callbacks.ema import EMA
from fulgurite.cli import main
from fulgurite.data import DigitsDataModule
from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks import ClassificationTask
from tests.classification import data, make, quiet
from tests.conftest import SMALL

pytestmark = pytest.mark.filterwarnings(
    # Dynamo of PyTorch 2.14 looks at .grad of what a graph break hands on
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


Set = Callable[[Any], None]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Choose what compiles instead of Inductor, which takes seconds."""

    def choose(name: Any) -> None:
        def compile_network(network: nn.Module, mode: Mode, device: torch.device) -> None:
            network.compile(backend=name)

        monkeypatch.setattr("fulgurite.callbacks.compiling._compile", compile_network)

    choose("eager")
    return choose


def loader(number: int, *, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(data(number), batch_size=4, collate_fn=lambda batch: batch, drop_last=drop_last)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was said of compiling; the seconds are taken for 0."""
    lines = re.sub(r", \d+ s$", ", 0 s", capsys.readouterr().out, flags=re.MULTILINE).splitlines()
    return [line.removeprefix("compile").strip() for line in lines if line.startswith(("compile", "   "))]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Graphs(Callback):
    """Note how many graphs there are after each epoch; freeze the body in every second one."""

    def __init__(self, freeze: bool = False) -> None:
        self.freeze = freeze
        self.counts: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.start = Compilation.so_far().graphs - 1  # training's is there

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.freeze:
            pl_module.network.stages.requires_grad_(trainer.current_epoch % 2 == 0)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.counts.append(Compilation.so_far().graphs - self.start)


@pytest.mark.parametrize("options", [{}, {"mixup": 0.2, "cutmix": 0.2}], ids=["plain", "mixing"])
def test_nothing_is_compiled_after_the_first_epoch(
    here: Path, backend: Set, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    graphs = Graphs()
    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, callbacks=[Compile(mode="default"), EMA(decay=0.5), graphs])
    trainer.fit(make(**options), loader(18), loader(11))
    assert graphs.counts == [2, 2, 2]
    assert said(capsys) == [
        "default: 1 graph, 0 graph breaks, 0 s",
        "a training batch of 2 runs uncompiled: it is compiled for 4; drop_last=True of its loader leaves a short last one out",
        "a validation batch of 3 runs uncompiled: it is compiled for 4",
        "epoch 0 (counted from 0): 1 graph, 0 graph breaks, 0 s",
    ]


def test_freezing_is_compiled_once(here: Path, backend: Set) -> None:
    graphs = Graphs(freeze=True)
    quiet(max_epochs=5, callbacks=[Compile(mode="default"), graphs]).fit(make(), loader(8), loader(8))
    assert graphs.counts[1:] == [graphs.counts[1]] * 4
    assert graphs.counts[1] > graphs.counts[0]


@pytest.mark.parametrize("sanity", [0, 2])
def test_warming_up_leaves_no_trace(here: Path, backend: Set, sanity: int) -> None:
    backend("aot_eager")
    ends = []
    for compiled in ([], [Compile(mode="default")]):
        task = make(network=partial(SmallCNN, width=2, depth=1, dropout=0.5))
        average = EMA(decay=0.5)
        trainer = quiet(max_epochs=2, num_sanity_val_steps=sanity, callbacks=[average, *compiled])
        torch.manual_seed(3)
        trainer.fit(task, loader(10), loader(6))
        trainer.save_checkpoint("now.ckpt")
        checkpoint = torch.load("now.ckpt", weights_only=True)
        ends.append((checkpoint["state_dict"], checkpoint["ema"]["trained"], torch.rand(1)))
    assert same(ends[0][0], ends[1][0])
    assert same(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])


def test_split_smaller_than_a_batch_is_compiled(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=2, callbacks=[Compile(mode="default")]).fit(make(), loader(3), loader(3))
    assert said(capsys) == ["default: 2 graphs, 0 graph breaks, 0 s"]


class NoSpec(ClassificationTask):
    """Say nothing of the shape of a batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spec = cast(Any, None)


def test_task_without_spec_is_compiled_in_its_first_step(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    task = NoSpec(**{name: value for name, value in make().init_args.items() if name != "self"})
    quiet(max_epochs=1, limit_val_batches=0, callbacks=[Compile(mode="default")]).fit(task, loader(8), loader(4))
    assert said(capsys) == ["default: 1 graph, 0 graph breaks, 0 s"]


class Talks(nn.Module):
    """Cannot be one graph."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16 * in_channels, 8), nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        torch._dynamo.graph_break()
        logits: Tensor = self.last(hidden)
        return logits


def test_graph_breaks_are_told_with_their_reason(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=1, limit_val_batches=0, callbacks=[Compile(mode="default")]).fit(make(network=Talks), loader(8), loader(4))
    assert said(capsys) == [
        "default: 2 graphs, 1 graph break, 0 s",
        "graph break: User-inserted graph break. Message: None",
        "TORCH_LOGS=graph_breaks tells where",
    ]


class Counts(Talks):
    """Is another function in each step."""

    steps = 0

    def forward(self, images: Tensor) -> Tensor:
        self.steps += 1
        logits: Tensor = self.last(self.first(images.flatten(1))) * self.steps
        return logits


def test_limit_of_recompilations_is_told(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(max_epochs=2, limit_val_batches=0, callbacks=[Compile(mode="default")])
    trainer.fit(make(network=Counts), loader(40), loader(4))
    lines = said(capsys)
    assert lines[0] == "default: 1 graph, 0 graph breaks, 0 s"
    assert lines[-2] == "compiled 8 times, which is the limit: other cases run uncompiled; TORCH_LOGS=recompiles tells why"


def fails(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such luck\nand more")


def fails_backward(graph: Any, inputs: Any) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("no such luck\nand more")

    return lambda *args: [Function.apply(value) for value in graph(*args)]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (fails, "BackendCompilerFailed: backend='fails' raised:"),
        (fails_backward, "RuntimeError: no such luck"),
    ],
    ids=["forward", "backward"],
)
def test_failure_is_told_and_training_goes_on(
    here: Path, backend: Set, capsys: pytest.CaptureFixture[str], compiler: Any, reason: str
) -> None:
    ends = []
    for callbacks in ([], [Compile(mode="default")]):
        backend(compiler)
        task = make()
        quiet(max_epochs=1, limit_val_batches=0, callbacks=callbacks).fit(task, loader(8), loader(4))
        ends.append(weights(task))
    assert same(*ends)
    assert said(capsys)[0].startswith(f"failed, so the network runs uncompiled: {reason}")


@pytest.mark.slow
def test_machine_without_a_compiler_trains_uncompiled(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(here / "cache"))
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        quiet(max_epochs=1, limit_val_batches=0, callbacks=[Compile(mode="default")]).fit(make(), loader(8), loader(4))
    (line,) = said(capsys)
    assert line.startswith("failed, so the network runs uncompiled: ")
    assert "No working C++ compiler found" in line


def test_off_changes_nothing(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    before = Compilation.so_far()
    quiet(max_epochs=1, callbacks=[Compile()]).fit(make(), loader(8), loader(8))
    assert said(capsys) == []
    assert Compilation.so_far() == before


class Stop(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("stopped", [False, True])
def test_network_is_left_as_it_was(here: Path, backend: Set, stopped: bool) -> None:
    task = make()
    with suppress(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=[Compile(mode="default"), *([Stop()] if stopped else [])]).fit(task, loader(8), loader(4))
    assert task.network._compiled_call_impl is None
    before = Compilation.so_far()
    copy.deepcopy(task.network)(torch.zeros(2, 1, 4, 4))
    assert Compilation.so_far() == before


def test_other_verbs_run_uncompiled_and_score_the_same(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    digits = DigitsDataModule()
    task = ClassificationTask(partial(SmallCNN, width=4, depth=1), partial(AdamW, lr=0.01), spec=digits.spec)
    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4, "logger": False, "enable_progress_bar": False}
    trainer = Trainer(callbacks=[Compile(mode="default"), EMA(decay=0.5)], **options)
    trainer.fit(task, datamodule=digits)
    expected = {name: pytest.approx(float(value)) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    assert trainer.run_dir is not None
    last = trainer.run_dir / "checkpoints" / "last.ckpt"
    capsys.readouterr()
    assert trainer.validate(load(last), datamodule=digits) == [expected]
    assert said(capsys) == ["not for validate, which would end before it pays"]
    plain = Trainer(logger=False, enable_progress_bar=False)
    assert plain.validate(load(last), datamodule=digits) == [expected]


def test_checkpoints_go_both_ways(here: Path, backend: Set) -> None:
    """Train compiled and go on uncompiled, and the reverse: with this backend in the same bits."""
    ends = []
    for first, second in (([], []), ([Compile(mode="default")], []), ([], [Compile(mode="default")])):
        trainer = train(first, max_steps=5)
        run = trainer.run_dir
        ends.append(weights(train(second, ckpt_path=run).lightning_module))
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def train(callbacks: list[Any], ckpt_path: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    digits = DigitsDataModule(shift=1)
    task = ClassificationTask(partial(SmallCNN, width=4, depth=1, dropout=0.3), partial(SGD, lr=0.05), spec=digits.spec)
    settings: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2, "logger": False}
    callbacks = [Checkpoints(every_n_steps=1), EMA(decay=0.9), *callbacks]
    trainer = Trainer(**settings | {"enable_progress_bar": False, "callbacks": callbacks} | options)
    trainer.fit(task, datamodule=digits, ckpt_path=ckpt_path)
    return trainer


def test_command_line(here: Path, backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "more.yaml").write_text("compile: {mode: default}\n")
    assert main(["fit", *SMALL, "-c", "more.yaml", "--trainer.max_epochs", "1", "--model.network.depth", "1"]) == 0
    assert "default: 2 graphs, 0 graph breaks, 0 s" in said(capsys)
    assert main(["fit", *SMALL, "--compile.mode", "fast"]) == 2
    assert "reduce-overhead" in capsys.readouterr().err


def trainer_on(device: str, accumulate: int) -> Any:
    strategy = SimpleNamespace(root_device=torch.device(device))
    return cast(Any, SimpleNamespace(strategy=strategy, accumulate_grad_batches=accumulate))


def test_gradients_that_cuda_graphs_would_overwrite_are_refused(backend: Set, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        Compile(mode="reduce-overhead").setup(trainer_on("cuda", 2), make(), "fit")
    assert str(error.value) == (
        "compile.mode is reduce-overhead, whose CUDA graphs overwrite the gradients that trainer.accumulate_grad_batches "
        "2 adds up\nuse --compile.mode default, or no accumulation"
    )
    Compile(mode="reduce-overhead").setup(trainer_on("cpu", 2), make(), "fit")
    assert said(capsys) == ["reduce-overhead is the same as default here: CUDA graphs need a GPU"]


def test_task_without_network_is_refused() -> None:
    with pytest.raises(UserError, match=r"^compile.mode is default, and LightningModule has no `network` to compile$"):
        Compile(mode="default").setup(trainer_on("cpu", 1), LightningModule(), "fit")


@pytest.mark.slow
def test_inductor_resumes_in_the_same_bits(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(here / "cache"))
    whole = train([Compile(mode="default")])
    stopped = train([Compile(mode="default")], max_steps=6)
    resumed = train([Compile(mode="default")], ckpt_path=stopped.run_dir)
    assert "failed" not in capsys.readouterr().out
    assert same(weights(whole.lightning_module), weights(resumed.lightning_module))
    plain = train([])
    torch.testing.assert_close(weights(whole.lightning_module), weights(plain.lightning_module), rtol=1.0, atol=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_on_gpu(here: Path, capsys: pytest.CaptureFixture[str], mode: Mode, memory_format: Any) -> None:
    graphs = Graphs()
    digits = DigitsDataModule()
    task = ClassificationTask(partial(SmallCNN, width=8), partial(AdamW, lr=0.01), spec=digits.spec)
    options: dict[str, Any] = {"max_epochs": 3, "logger": False, "enable_progress_bar": False, "memory_format": memory_format}
    trainer = Trainer(accelerator="gpu", devices=1, precision="16-mixed", callbacks=[Compile(mode=mode), graphs], **options)
    trainer.fit(task, datamodule=digits)
    assert "failed" not in capsys.readouterr().out
    assert graphs.counts[1:] == [graphs.counts[0]] * 2
    assert float(trainer.callback_metrics["val/acc"]) > 0.5
