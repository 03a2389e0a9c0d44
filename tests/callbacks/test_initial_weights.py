from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from safetensors.torch import save_file
from torch import Tensor, nn

from fulgurite import Trainer
from fulgurite.callbacks.initial_weights import InitialWeights, group
from fulgurite.errors import UserError
from tests.classification import linear, loader, make, quiet


class Start(Callback):
    """Keep the network's tensors as the first training batch finds them."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.state = {name: value.clone() for name, value in pl_module.network.state_dict().items()}
            self.in_optimizer = {id(one) for group in pl_module.optimizers().param_groups for one in group["params"]}


def start(task: Any, *callbacks: Callback, **options: Any) -> Start:
    """Return how a training of one step began."""
    begun = Start()
    quiet(callbacks=[*callbacks, begun], max_epochs=1, num_sanity_val_steps=0).fit(task, loader(4), loader(4), **options)
    assert begun.in_optimizer == {id(parameter) for parameter in task.network.parameters()}
    return begun


def other_network() -> Any:
    """Return a network of other weights than :func:`make` gives."""
    network = make().network
    with torch.no_grad():
        for value in network.state_dict().values():
            value.add_(1)
    return network


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refused(task: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        quiet(callbacks=[InitialWeights(**options)], max_epochs=1).fit(task, loader(4), loader(4))
    return str(error.value)


def test_training_begins_with_the_files_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = other_network().state_dict()
    torch.save(state, "k.pth", _use_new_zipfile_serialization=False)
    task = make()
    assert not equal(task.network.state_dict(), state)
    assert equal(start(task, InitialWeights(path="k.pth")).state, state)
    values = sum(value.numel() for value in state.values())
    assert f"weights     {len(state)} tensors, {values} values, from k.pth\n" in capsys.readouterr().out


def test_without_a_path_nothing_is_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert equal(start(make(), InitialWeights()).state, make().network.state_dict())
    assert "weights" not in capsys.readouterr().out


def test_first_validation_scores_what_the_source_scored(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make()
    trainer = Trainer(max_epochs=3, logger=False, enable_progress_bar=False)
    trainer.fit(source, loader(16), loader(8))
    (expected,) = trainer.validate(source, loader(8), ckpt_path="best")

    class First(Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: LightningModule) -> None:
            self.scores = {name: float(value) for name, value in trainer.callback_metrics.items()}

    first, run = First(), trainer.run_dir
    assert run is not None
    tuned = quiet(callbacks=[InitialWeights(path=run), first], max_epochs=1, num_sanity_val_steps=-1)
    tuned.fit(make(), loader(4), loader(8))
    assert first.scores["val/loss"] == expected["val/loss"]
    fresh = quiet().validate(make(), loader(8))[0]
    assert fresh["val/loss"] != expected["val/loss"]
    out = capsys.readouterr().out
    assert f"values, from {run}/checkpoints/best.ckpt\n            'network.' was taken off the file's names\n" in out


def test_average_that_a_callback_takes_begins_with_the_files_weights(here: Path) -> None:
    state = other_network().state_dict()
    torch.save(state, "k.pth")

    class Average(WeightAveraging):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            average: Any = self._average_model
            self.begun = {name: value.clone() for name, value in average.module.network.state_dict().items()}

    average = Average()
    quiet(callbacks=[InitialWeights(path="k.pth"), average], max_epochs=1, num_sanity_val_steps=0).fit(
        make(), loader(4), loader(4)
    )
    assert equal(average.begun, state)


def test_training_that_continues_leaves_the_file_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(other_network().state_dict(), "k.pth")
    trainer: Any = quiet(callbacks=[InitialWeights(path="k.pth")], max_epochs=1)
    task = make()
    trainer.fit(task, loader(4), loader(4))
    trainer.save_checkpoint("last.ckpt")
    trained = {name: value.clone() for name, value in task.network.state_dict().items()}
    Path("k.pth").unlink()
    capsys.readouterr()

    begun = Start()
    resumed: Any = quiet(callbacks=[InitialWeights(path="k.pth"), begun], max_epochs=2)
    resumed.resume_from = Path("last.ckpt")
    resumed.fit(make(), loader(4), loader(4), ckpt_path="last.ckpt")
    assert equal(begun.state, trained)
    assert "weights     k.pth is left alone: the training continues from last.ckpt\n" in capsys.readouterr().out


def test_second_fit_of_a_trainer_keeps_what_the_first_learned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(other_network().state_dict(), "k.pth")
    begun, task = Start(), make()
    trainer: Any = quiet(callbacks=[InitialWeights(path="k.pth"), begun], max_epochs=1)
    trainer.fit(task, loader(4), loader(4))
    trained = {name: value.clone() for name, value in task.network.state_dict().items()}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task, loader(4), loader(4))
    assert equal(begun.state, trained)
    assert "weights     k.pth is left alone: the training continues from step 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_never_needs_the_file(here: Path, verb: str) -> None:
    getattr(quiet(callbacks=[InitialWeights(path="gone.pth")]), verb)(make(), loader(4))


def test_strict_says_what_does_not_fit_and_what_would_help(here: Path) -> None:
    state = make(network=linear).network.state_dict()
    torch.save({"fc.weight": state["1.weight"], "1.bias": torch.ones(7), "more": torch.ones(1)}, "k.pth")
    assert refused(make(network=linear), path="k.pth") == (
        "k.pth does not fit the network: 0 of its 2 tensors were found\n"
        "missing in the file: 1.weight\n"
        "of other shape: 1.bias is (7,), wanted (3,)\n"
        "left over: fc.weight, more\n"
        """a rename that fits: --weights.rename '{"fc.": "1."}'"""
    )
    torch.save({**state, "more": torch.ones(1)}, "k.pth")
    assert refused(make(network=linear), path="k.pth") == (
        "k.pth does not fit the network: 2 of its 2 tensors were found\nleft over: more\n"
        "to load what fits: --weights.strict false"
    )


def test_what_fits_is_loaded_and_the_rest_listed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    state = {name: value.half() if value.is_floating_point() else value for name, value in other_network().state_dict().items()}
    state["head.weight"], state["\x1b[31mred"] = torch.ones(9, 2).half(), torch.ones(4)
    del state["head.bias"]
    save_file(state, "k.safetensors")
    task = make()
    head, bias = task.network.head.weight.clone(), task.network.head.bias.clone()
    begun = start(task, InitialWeights(path="k.safetensors", strict=False)).state
    assert torch.equal(begun["head.weight"], head)
    assert torch.equal(begun["head.bias"], bias)
    assert torch.equal(begun["stages.0.weight"], state["stages.0.weight"].float())
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out[out.index("weights ") :].splitlines()]
    loaded = sum(value.numel() for name, value in state.items() if name.startswith("stages."))
    assert lines[0] == f"weights     12 of 14 tensors, {loaded} values, from k.safetensors"
    assert lines[1] == "            10 tensors were made float32 of float16"
    assert lines[2].split() == ["weights", "tensors", "values", "names"]
    table = " ".join(" ".join(lines[3:]).split())
    for row in (
        f"loaded 12 {loaded} stages.0.weight, stages.1.* (5), stages.3.weight, stages.4.* (5)",
        "other shape, as initialised 1 6 head.weight is (9, 2), wanted (3, 2)",
        "missing, as initialised 1 3 head.bias",
        "not used 1 4 '\\x1b[31mred'",
    ):
        assert row in table, row
    assert max(map(len, lines)) <= 80


def test_nothing_that_fits_is_an_error_even_if_not_strict(here: Path) -> None:
    torch.save({"a": torch.ones(1)}, "k.pth")
    text = refused(make(network=linear), path="k.pth", strict=False)
    assert text == (
        "k.pth does not fit the network: 0 of its 2 tensors were found\nmissing in the file: 1.weight, 1.bias\nleft over: a"
    )


def test_task_without_a_network_takes_them_itself(here: Path) -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.begun = getattr(self, "begun", self.layer.weight.detach().clone())
            loss: Tensor = self.layer(batch).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.save({"module.layer.weight": torch.full((1, 2), 3.0), "module.layer.bias": torch.ones(1)}, "k.pth")
    task = Plain()
    batches: Any = torch.utils.data.DataLoader(torch.ones(2, 2))  # type: ignore[arg-type]  # a tensor is indexed like a data set
    quiet(callbacks=[InitialWeights(path="k.pth")], max_epochs=1).fit(task, batches)
    assert task.begun.tolist() == [[3.0, 3.0]]


def test_hostile_file_stops_the_run_and_runs_nothing(here: Path) -> None:
    class Shell:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch it_ran",)

    torch.save({"state_dict": {"a": torch.ones(1)}, "x": Shell()}, "k.ckpt")
    assert refused(make(), path="k.ckpt").startswith("k.ckpt cannot be read: it names posix.system, and code")
    assert not Path("it_ran").exists()


def test_weights_that_are_no_numbers_are_refused(here: Path) -> None:
    state = other_network().state_dict()
    name = next(iter(state))
    state[name].view(-1)[0] = torch.nan
    torch.save(state, "k.pth")
    said = refused(make(), path="k.pth")
    assert said == f"k.pth gives the network weights that are no numbers: network.{name} has NaN or infinity"


@pytest.mark.parametrize("options", [{"strict": False}, {"rename": {"a.": ""}}])
def test_options_without_a_path_are_refused(options: Any) -> None:
    with pytest.raises(UserError) as error:
        InitialWeights(**options)
    assert str(error.value) == "weights.path is null, so there is nothing to rename or to be less strict about: set it"


def test_names_are_grouped_where_they_are_many() -> None:
    layers = [f"layer{layer}.{block}.weight" for layer in (1, 2) for block in range(8)]
    assert group(["fc.bias", *layers]) == "fc.bias, layer1.* (8), layer2.* (8)"
    assert group([f"net.{name}" for name in layers]) == "net.layer1.* (8), net.layer2.* (8)"
    assert group(layers[:8]) == "layer1.* (8)"
    assert group(layers[:3]) == "layer1.0.weight, layer1.1.weight, layer1.2.weight"
