"""How the weights of a network are drawn before anything is learned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fulgurite.errors import UserError, did_you_mean

Init = Literal["default", "kaiming", "truncated_normal", "xavier", "orthogonal"]

# The gain is ReLU's whatever the activation: the norms make up for the difference.
_KAIMING = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "truncated_normal": partial(nn.init.trunc_normal_, std=0.02),
    "xavier": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
}


def initialize(network: nn.Module, scheme: Init) -> None:
    """Draw the weights of a network's layers anew, by their kind; norms, embeddings and tokens keep what they have.

    - default: PyTorch's own, so that nothing is done
    - kaiming: convolutions as in He et al., https://arxiv.org/abs/1502.01852, by their outputs; linear layers are left alone
    - truncated_normal: standard deviation 0.02, as vision transformers do, https://arxiv.org/abs/2106.08254
    - xavier: uniform, by inputs and outputs, https://proceedings.mlr.press/v9/glorot10a.html
    - orthogonal: https://arxiv.org/abs/1312.6120

    The last three are for convolutions and linear layers, whose biases they set to zero.

    Args:
        network: changed in place; draws from torch's global generator, layer by layer in the order of registration
        scheme: one of these names

    Raises:
        UserError: if it is none
    """
    if scheme not in get_args(Init):
        raise UserError(f"init is '{scheme}'{did_you_mean(scheme, get_args(Init))}; allowed: {', '.join(get_args(Init))}")
    for module in network.modules():
        if scheme == "kaiming" and isinstance(module, _ConvNd):
            _KAIMING(module.weight)
        elif scheme in _DRAWS and isinstance(module, _ConvNd | nn.Linear):
            _DRAWS[scheme](module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
