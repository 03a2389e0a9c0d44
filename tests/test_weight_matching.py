from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite.errors import UserError
from fulgurite.models import SmallCNN
from fulgurite.weight_matching import Match, match
from fulgurite.weights import WeightsFile

Tensors = dict[str, Tensor]


def network(classes: int = 3, width: int = 2) -> SmallCNN:
    return SmallCNN(classes, 1, width=width, depth=2)


def source(classes: int = 3, width: int = 2) -> Tensors:
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in network(classes, width).state_dict().items()}
    return {name: value + 5 if "num_batches" in name else value for name, value in state.items()}


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: value for name, value in tensors.items()}


def found(tensors: Tensors, target: nn.Module, rename: dict[str, str] | None = None) -> Match:
    return match(WeightsFile(Path("k.pth"), tensors, []), target, rename)


def holds(target: nn.Module, tensors: Tensors) -> bool:
    return all(torch.equal(value, tensors[name]) for name, value in target.state_dict().items())


def test_all_tensors_land_in_place_with_the_counters_of_batchnorm() -> None:
    target, tensors = network(), source()
    before = {name: value.data_ptr() for name, value in target.state_dict().items()}
    result = found(tensors, target)
    assert not holds(target, tensors)
    result.load()
    assert holds(target, tensors)
    assert result.is_complete
    assert before == {name: value.data_ptr() for name, value in target.state_dict().items()}
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in target.parameters())


@pytest.mark.parametrize("prefix", ["module.", "model.", "net.", "network.", "_orig_mod.", "module.network._orig_mod."])
def test_one_prefix_is_taken_off_by_itself(prefix: str) -> None:
    target = network()
    result = found(under(prefix, source()), target)
    result.load()
    assert (result.rename, result.automatic, result.is_complete) == ({prefix: ""}, True, True)
    assert holds(target, source())


def test_one_prefix_is_put_before_by_itself() -> None:
    target = nn.ModuleDict({"model": network()})
    result = found(source(), target)
    result.load()
    assert (result.rename, result.automatic, result.is_complete) == ({"": "model."}, True, True)
    assert holds(target["model"], source())


def test_what_a_task_has_beside_its_network_is_named_and_no_fault() -> None:
    result = found({**under("network.", source()), "criterion.weight": torch.ones(3), "n_averaged": torch.ones(())}, network())
    assert result.outside == ["criterion.weight", "n_averaged"]
    assert result.is_complete


def test_what_an_average_of_the_weights_saves_is_taken() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(network())
    assert found(dict(averaged.state_dict()), network()).is_complete


def test_name_that_fits_as_it_is_keeps_the_rest_from_being_renamed() -> None:
    result = found({**under("model.", source()), "head.bias": torch.zeros(3)}, network())
    assert list(result.loaded) == ["head.bias"]
    assert result.suggestion == """--weights.rename '{"model.": ""}'"""


def test_of_two_prefixes_that_serve_as_well_none_is_chosen() -> None:
    result = found({**under("student.", source()), **under("teacher.", source())}, network())
    assert (result.loaded, result.automatic) == ({}, False)
    assert result.suggestion == """--weights.rename '{"student.": ""}' or --weights.rename '{"teacher.": ""}'"""


def test_prefix_of_a_network_of_another_width_is_understood() -> None:
    result = found(under("network.", source(width=4)), network())
    assert result.rename == {"network.": ""}
    assert "stages.0.weight" in result.other_shape
    assert (result.missing, result.unused) == ([], [])


@pytest.mark.parametrize(("old", "new"), [("vit.encoder.", "backbone."), ("encoder.", "backbone.body.")])
def test_prefix_that_stands_for_another_is_suggested_not_done(old: str, new: str) -> None:
    # As in a Hugging Face file, whose head has another name, too.
    target: nn.Module = nn.ModuleDict({"fc": nn.Linear(2, 2)})
    place = target
    for part in new.rstrip(".").split("."):
        place.add_module(part, network() if new.endswith(f"{part}.") else nn.ModuleDict())
        place = place.get_submodule(part)
    tensors = {**under(old, source()), "classifier.weight": torch.ones(7, 2)}
    assert (result := found(tensors, target)).loaded == {}
    assert result.suggestion == f"""--weights.rename '{{"{old}": "{new}"}}'"""
    assert len(found(tensors, target, {old: new}).loaded) == len(source())


def test_renames_are_done_in_order() -> None:
    tensors = {name.replace("head.", "fc."): value for name, value in source().items()}
    result = found(under("module.", tensors), network(), {"module.": "", "fc.": "head."})
    assert (result.is_complete, result.automatic) == (True, False)


def test_rename_that_matches_nothing_or_too_much_is_refused() -> None:
    with pytest.raises(UserError) as error:
        found(under("backbone.", source()), network(), {"backbon.": ""})
    assert str(error.value) == (
        "weights.rename: no tensor of k.pth begins with 'backbon.' (did you mean 'backbone.'?)\nthey begin with backbone."
    )
    with pytest.raises(UserError) as error:
        found({"a.x": torch.ones(1), "b.x": torch.ones(1)}, network(), {"a.": "b."})
    assert str(error.value) == "weights.rename: 'a.' to 'b.' makes one name of two in k.pth: b.x"


def test_another_number_of_classes_leaves_the_head_alone() -> None:
    target = network(classes=5)
    before = target.head.weight.clone()
    result = found(source(classes=3), target)
    result.load()
    assert list(result.other_shape) == ["head.weight", "head.bias"]
    assert not result.is_complete
    assert torch.equal(target.head.weight, before)
    assert torch.equal(target.state_dict()["stages.0.weight"], source()["stages.0.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precision_becomes_the_networks(dtype: torch.dtype) -> None:
    target = network()
    found({name: value.to(dtype) if value.is_floating_point() else value for name, value in source().items()}, target).load()
    assert target.head.weight.dtype == torch.float32
    assert torch.equal(target.head.weight, source()["head.weight"].to(dtype).float())


def test_quantised_weights_are_not_taken_for_real_ones() -> None:
    result = found({**source(), "head.weight": torch.ones(3, 4, dtype=torch.int8)}, network())
    assert list(result.other_shape) == ["head.weight"]


def test_tied_tensors_need_to_be_in_the_file_once() -> None:
    target = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "out": nn.Linear(2, 2, bias=False)})
    out: Any = target["out"]
    out.weight = target["embed"].weight
    result = found({"embed.weight": torch.eye(2)}, target)
    result.load()
    assert result.is_complete
    assert torch.equal(out.weight, torch.eye(2))
    assert out.weight is target["embed"].weight


def test_name_that_would_run_in_a_shell_is_not_recommended() -> None:
    odd = "x'; echo evil; echo '."
    tensors = {name if number == 0 else odd + name: value for number, (name, value) in enumerate(source().items())}
    assert "echo" not in found(tensors, network()).suggestion
