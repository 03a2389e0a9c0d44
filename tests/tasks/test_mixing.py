from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.errors import UserError
from fulgurite.tasks.mixing import make_mixing

IMAGES = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 1, 8, 8)  # of the values 0, 1, 2
LABELS = torch.tensor([0, 1, 2])


def mix(mixup: float, cutmix: float, images: Tensor = IMAGES, labels: Tensor = LABELS, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    mixing = make_mixing(mixup, cutmix, 3)
    assert mixing is not None
    mixed: tuple[Tensor, Tensor] = mixing(images, labels)
    return mixed


def test_mixup_mixes_images_and_labels_by_the_same_share() -> None:
    images, targets = mix(1.0, 0.0)
    share = float(targets[0, 0])
    assert 0 < share < 1
    torch.testing.assert_close(targets, share * torch.eye(3) + (1 - share) * torch.eye(3)[[2, 0, 1]])
    torch.testing.assert_close(images, share * IMAGES + (1 - share) * IMAGES[[2, 0, 1]])


def test_cutmix_pastes_a_rectangle_and_counts_its_pixels() -> None:
    images, targets = mix(0.0, 1.0)
    pasted = (images[0, 0] == 2).float().mean()  # of the neighbour's value
    assert 0 < pasted < 1
    assert set(images.flatten().tolist()) == {0, 1, 2}
    torch.testing.assert_close(targets[0], torch.tensor([1 - float(pasted), 0, float(pasted)]))


def test_one_of_both_is_drawn_for_each_batch() -> None:
    pasted = [set(mix(1.0, 1.0, seed=seed)[0].flatten().tolist()) <= {0, 1, 2} for seed in range(20)]
    assert 5 < sum(pasted) < 15


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_draws_are_from_the_global_generator(mixup: float, cutmix: float) -> None:
    first, again, other = (mix(mixup, cutmix, seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0)])
def test_single_sample_is_mixed_with_itself(mixup: float, cutmix: float) -> None:
    images, targets = mix(mixup, cutmix, IMAGES[2:], LABELS[2:])
    torch.testing.assert_close(images, IMAGES[2:].contiguous())
    torch.testing.assert_close(targets, torch.tensor([[0.0, 0.0, 1.0]]))


def test_several_labels_are_mixed_too() -> None:
    hot = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.uint8)
    images, targets = mix(1.0, 0.0, labels=hot)
    share = float(images[1, 0, 0, 0])  # of the value 1, mixed with one of 0
    torch.testing.assert_close(targets, torch.tensor([[share, 0, 0], [1, share, 0], [1 - share, 1 - share, 0]]))


def test_nothing_is_made_of_zeros() -> None:
    assert make_mixing(0.0, 0.0, 3) is None


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
@pytest.mark.parametrize("alpha", [-0.1, float("inf"), float("nan")])
def test_alpha_that_makes_no_distribution_is_refused(name: str, alpha: float) -> None:
    with pytest.raises(UserError, match=rf"^{name} is {alpha}; it is the alpha of a Beta distribution: above 0, or 0 for none$"):
        make_mixing(**{"mixup": 0.0, "cutmix": 0.0, name: alpha, "num_classes": 3})  # type: ignore[arg-type]
