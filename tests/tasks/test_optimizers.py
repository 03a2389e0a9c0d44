from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Rprop

from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.tasks.optimizers import make_optimizer
from tests.training import fit

NETWORK = partial(SmallCNN, 3, 1, width=2, depth=1)


def make(factory: Any, network: nn.Module | None = None, device: str = "cpu", **options: Any) -> Any:
    trainer = {"precision": options.pop("precision", "32-true"), "gradient_clip_val": options.pop("clip", None)}
    trainer["strategy"] = SimpleNamespace(root_device=torch.device(device))
    return make_optimizer(factory, network or NETWORK(), SimpleNamespace(**trainer), **options)


def table(optimizer: Any) -> dict[str, tuple[float, float]]:
    return {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}


def test_weight_decay_spares_norms_and_biases_unless_it_is_told_not_to() -> None:
    factory = partial(AdamW, lr=0.5, weight_decay=0.25)
    assert table(make(factory)) == {"decay": (0.5, 0.25), "no_decay": (0.5, 0.0)}
    assert table(make(factory, decay_all=True)) == {"decay": (0.5, 0.25), "no_decay": (0.5, 0.25)}
    assert table(make(partial(SGD, lr=0.5))) == {
        "decay": (0.5, 0.0),
        "no_decay": (0.5, 0.0),
    }  # the same groups: it can be resumed


def test_rates_are_scaled_and_fall_towards_the_input() -> None:
    made = make(partial(AdamW, lr=0.5, weight_decay=0.25), scale=2.0, layer_decay=0.5)
    assert table(made) == {
        "layer_1_decay": (0.0625, 0.25),
        "layer_2_no_decay": (0.125, 0.0),
        "layer_3_decay": (0.25, 0.25),
        "layer_4_no_decay": (0.5, 0.0),
        "head_decay": (1.0, 0.25),
        "head_no_decay": (1.0, 0.0),
    }


@pytest.mark.parametrize("factory", [partial(LBFGS, lr=0.5), partial(Rprop, lr=0.5)])
def test_optimizer_without_weight_decay_gets_one_group(factory: Any) -> None:
    (group,) = make(factory).param_groups
    assert (group["lr"], len(group["params"])) == (0.5, 8)


def test_optimizer_that_makes_groups_itself_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    def factory(parameters: Any) -> SGD:
        parameters = list(parameters)
        return SGD([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.25)

    assert [group["lr"] for group in make(factory).param_groups] == [0.5, 0.25]
    assert capsys.readouterr().out == "optimizer   SGD, with 2 parameter groups of its own\n"
    with pytest.raises(UserError, match=r"^SGD makes groups of its own, so set layer_decay to 1 and rate_scaling to none$"):
        make(factory, scale=2.0)


def test_frozen_parameters_are_in_the_groups_and_stay_as_they_are() -> None:
    network = NETWORK()
    frozen = next(network.parameters()).requires_grad_(False)
    before = frozen.detach().clone()
    optimizer = make(partial(AdamW, lr=0.5, weight_decay=0.25), network)
    for training in (False, True):
        frozen.requires_grad_(training)
        network(torch.rand(4, 1, 4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(frozen, before) is not training


@pytest.mark.parametrize(
    ("factory", "options", "fused"),
    [
        (AdamW, {}, True),
        (partial(AdamW, fused=None), {}, True),  # as a configuration says it that leaves it out
        (lambda parameters, **options: SGD(parameters, 0.1, **options), {}, True),
        (lambda parameters: SGD(parameters, 0.1), {}, None),
        (partial(AdamW, fused=False), {}, False),
        (partial(AdamW, foreach=True), {}, None),
        (partial(SGD, lr=0.1, differentiable=True), {}, None),
        (Adagrad, {}, None),
        (AdamW, {"device": "mps"}, None),
        (AdamW, {"device": "cuda"}, True),
        (AdamW, {"precision": "16-mixed"}, True),
        (AdamW, {"precision": "16-mixed", "clip": 1.0}, None),
        (AdamW, {"precision": "bf16-mixed"}, True),
        (AdamW, {"precision": "bf16-mixed", "clip": 1.0}, None),
        (AdamW, {"clip": 1.0}, True),
    ],
)
def test_fused_kernels_are_taken_where_nothing_speaks_against_them(factory: Any, options: Any, fused: bool | None) -> None:
    made = make(factory, **options)
    assert {group["fused"] for group in made.param_groups} == {fused}


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_fused_that_could_not_be_clipped_is_refused(precision: str) -> None:
    with pytest.raises(UserError) as error:
        make(partial(AdamW, fused=True), precision=precision, clip=1.0)
    assert str(error.value) == (
        f"the optimizer is set to fused, and Lightning refuses to clip its gradients with trainer.precision {precision}: "
        "take out fused, or trainer.gradient_clip_val"
    )
    assert make(partial(AdamW, fused=True), precision=precision).param_groups[0]["fused"] is True


@pytest.mark.parametrize("clip", [[], ["--trainer.gradient_clip_val", "0.5"]])
def test_mixed_precision_trains_with_what_was_chosen(here: Path, clip: list[str]) -> None:
    assert fit("--trainer.precision", "bf16-mixed", *clip, epochs=1) == 0


def test_network_of_complex_numbers_is_not_fused() -> None:
    network = nn.Linear(2, 2, dtype=torch.complex64)
    assert make(AdamW, network).param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "AdamW, fused; weight decay 0.01 on 3 tensors, none on 5 norms, biases and embeddings"),
        ({"decay_all": True}, "AdamW, fused; weight decay 0.01 on all 8 tensors"),
        (
            {"precision": "16-mixed", "decay": 0.0},
            "AdamW, fused; no weight decay",
        ),
        (
            {"precision": "bf16-mixed", "clip": 0.5, "decay_all": True},
            "AdamW, not fused: Lightning refuses to clip its gradients in mixed precision; weight decay 0.01 on all 8 tensors",
        ),
    ],
)
def test_two_groups_are_told_in_a_line(capsys: pytest.CaptureFixture[str], options: Any, said: str) -> None:
    make(partial(AdamW, weight_decay=options.pop("decay", 0.01)), **options)
    assert capsys.readouterr().out == f"optimizer   {said}\n"


def test_more_groups_are_told_in_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make(partial(SGD, lr=0.1), layer_decay=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "optimizer   SGD, fused; 6 parameter groups"
    assert lines[1].split() == ["group", "tensors", "values", "rate", "weight", "decay"]
    assert lines[-1].split() == ["head_no_decay", "1", "3", "0.1", "0"]
    assert len(lines) == 8
    monkeypatch.setenv("RANK", "1")
    make(partial(SGD, lr=0.1), layer_decay=0.5)
    assert capsys.readouterr().out == ""
