"""How processes work together: two strategies that Lightning has no name for, and whether those that are needed were started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fulgurite.errors import UserError
from fulgurite.models.blocks import blocks

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


def require_processes(trainer: Any) -> None:
    """Refuse a trainer that would wait for processes that nobody starts, or not work together with those that were started.

    Raises:
        UserError: with the command or the flags to use
    """
    nodes, devices = trainer.num_nodes, trainer.num_devices
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if nodes > 1 and isinstance(environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"trainer.num_nodes is {nodes}, and this host was started alone: it would wait for the others for ever\n"
            f"on each host, with N from 0 on the first to {nodes - 1}: torchrun --nnodes {nodes} --nproc-per-node {devices} "
            "--node-rank N --master-addr FIRST_HOST -m fulgurite ..."
        )
    started = int(os.environ.get("WORLD_SIZE", nodes * devices))
    if started != nodes * devices:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        flags = [f"--trainer.num_nodes {started // here}"] if started > here or nodes > 1 else []
        flags += [f"--trainer.devices {here}"]
        flags += [] if isinstance(trainer.strategy, ParallelStrategy) else ["--trainer.strategy ddp"]
        raise UserError(f"{started} processes were started, and the trainer is set to {nodes * devices}: {' '.join(flags)}")
    if trainer.init_args.get("sync_batchnorm") and nodes * devices > 1 and isinstance(trainer.accelerator, CPUAccelerator):
        raise UserError("PyTorch's SyncBatchNorm needs GPUs, and this is on CPUs: --trainer.sync_batchnorm false")


def shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Split the parameters of a network over the processes of a mesh, block by block; do nothing if they are already.

    A block's parameters are whole only while it is computed (ZeRO-3, arXiv:1910.02054; FSDP2, PyTorch's ``fully_shard``).
    """
    if isinstance(network, FSDPModule):  # by the fit that this test follows
        return
    for block in blocks(network).values():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


class FSDP2Strategy(ModelParallelStrategy):
    """Train a network that does not fit on one device: each process keeps a share of its weights, gradients and moments.

    The network is built on the CPU of each process before it is split. Buffers, such as the statistics of BatchNorm, are the
    first process's, as under DDP. A checkpoint is one whole file with the names of the network, which needs no processes.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Make all processes share the data, where Lightning would split each matrix over those of a host."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Split the task's network.

        Raises:
            UserError: if it has none, or the precision is one that needs whole gradients
        """
        task = self._task
        if not isinstance(getattr(task, "network", None), nn.Module):
            raise UserError(f"fsdp2 splits a task's `network`, and {type(task).__name__} has none: take trainer.strategy ddp")
        if self.precision_plugin.precision not in _PRECISIONS:
            allowed = ", ".join(_PRECISIONS)
            raise UserError(f"trainer.precision is {self.precision_plugin.precision}; with fsdp2 allowed: {allowed}")
        if self._layer_sync:
            self.model = self._layer_sync.apply(task)
        shard(task.network, self.device_mesh["data_parallel"])
        # Not ModelParallelStrategy's own, which wants the task to split itself.
        super(ModelParallelStrategy, self).setup(trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Give all processes the buffers of the first."""
        self._share_buffers()

    def on_validation_start(self) -> None:
        """Give all processes the buffers of the first, which are the checkpoint's."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        for buffers in _by_type(self._task.network.buffers()):
            flat = torch.cat([buffer.flatten() for buffer in buffers])  # one message, where each would wait for its own
            dist.broadcast(flat, src=0)
            parts = flat.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state on the first process, its parameters numbered as every optimizer numbers them: by its groups.

        ModelParallelStrategy numbers by the order of the module, which is another where norms and biases have a group.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: Any = get_optimizer_state_dict(self._task, getattr(optimizer, "_optimizer", optimizer), options=options)
        if not self.is_global_zero:
            return {}
        names = [name for group in state["param_groups"] for name in group["params"]]
        return _renamed(state, {name: number for number, name in enumerate(names)})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a whole checkpoint, as any other strategy does, and give each process its share."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        options = StateDictOptions(full_state_dict=True, strict=self._task.strict_loading)
        set_model_state_dict(self._task, checkpoint["state_dict"], options=options)
        names = {parameter: name for name, parameter in self._task.named_parameters()}
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            new = {number: names[parameter] for number, parameter in zip(numbers, parameters, strict=True)}
            set_optimizer_state_dict(self._task, optimizer, _renamed(state, new), options=options)
        return checkpoint

    @property
    def _task(self) -> Any:
        return self.lightning_module


def _by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with other names, or numbers, for its parameters."""
    groups = [group | {"params": [new[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {new[name]: value for name, value in state["state"].items()}, "param_groups": groups}


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over the blocks of the task's network")
# A name after Lightning's ddp_find_unused_parameters_true: a checkpoint brings a name along, but no object.
StrategyRegistry.register(
    "ddp_gradient_as_bucket_view_true",
    DDPStrategy,
    description="DDP without a second copy of the gradients",
    gradient_as_bucket_view=True,
)
