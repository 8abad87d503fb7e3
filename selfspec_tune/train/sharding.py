"""FSDP2 through accelerate: which modules are sharded, in which precision, and what must be done around that.

Units are the decoder layers and then the module that accelerate wraps, with nothing between: that one reads embeddings,
norm and LM head itself, so they must be whole while its `forward` runs. A layer that is dropped is not gathered.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError


def shard_on_cpu(accelerator: Any) -> None:
    """Make accelerate shard on CPUs too where its launcher was told --use_fsdp: by itself it does on cards only.

    Nothing in its code for FSDP2 is for cards; it only never gets there, and would train with DDP, saying nothing.
    """
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        for state in (PartialState(), accelerator.state):  # the second is brought up to date from the first
            state.distributed_type = DistributedType.FSDP


def check_sharding(accelerator: Any, config: TrainConfig) -> None:
    """Raise a UserError for FSDP 1, and for a head, of which there is nothing to shard."""
    if accelerator.distributed_type.value != "FSDP":
        return
    if not accelerator.is_fsdp2:
        raise UserError(
            "sharded training needs version 2 of FSDP", got="version 1", command="accelerate launch --fsdp_version 2"
        )
    if config.method == "exit-head":
        raise UserError(
            "a head is one layer: there is nothing to shard",
            got="--use_fsdp",
            allowed="a copy of the model on every card",
            command="accelerate launch --multi_gpu ...",
        )


def prepare(accelerator: Any, module: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return module and optimizer as accelerate wraps them, in the same arithmetic however that is.

    Args:
        accelerator: of the run.
        module: an `EarlyExitModule` or an `ExitHeadModule`.
        optimizer: AdamW on its trainable parameters.
    """
    if accelerator.is_fsdp2:
        _choose_units(accelerator, module.model.model.layers)
        _autocast(accelerator, module)
    module, optimizer = accelerator.prepare(module, optimizer)
    _start_moments(optimizer)
    return module, optimizer


def reshard(module: nn.Module) -> None:
    """Put the shards back in the place of whole parameters, which a forward pass without a backward pass leaves."""
    from torch.distributed.fsdp import FSDPModule

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _choose_units(accelerator: Any, layers: nn.ModuleList) -> None:
    """Set the units of sharding, whatever the launcher was told; weights are gathered in their own dtype.

    accelerate's own choice under bf16 rounds the weights, the gradients' sums and the outputs, counts of tokens
    included. Autocast rounds what one card would round.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = [type(layers[0]).__name__]
    plugin.cpu_ram_efficient_loading = False
    plugin.mixed_precision_policy = MixedPrecisionPolicy()


def _autocast(accelerator: Any, module: nn.Module) -> None:
    """Run the module's forward under autocast, which accelerate leaves out with FSDP2."""
    plain = module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        with accelerator.autocast():
            return plain(*arguments, **named)

    module.forward = forward


def _start_moments(optimizer: Any) -> None:
    """Give every parameter the AdamW state it would get at its first gradient.

    A layer that was always dropped has none yet. Sharded states are read back by name, and a name that one side lacks
    is an error; torch fills the gap with a step that counts.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
