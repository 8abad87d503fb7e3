"""One decoder layer with its projections fused: what decoding runs. One forward for all supported families.

A transformers layer spends more time in Python and in small operations than in its products at batch 1. `FusedLayer`
takes over such a layer's own parameters: q, k, v and gate, up are moved into one tensor each and the module's weights
become views of it, so there is still one copy. The transformers module stays intact and usable.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec_tune.model.attention import Step
from selfspec_tune.model.families import Family


class FusedLayer:
    """Pre-norm grouped-query attention and gated SiLU MLP over a transformers decoder layer's parameters."""

    def __init__(self, layer: nn.Module, index: int, family: Family) -> None:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.index, self.window = index, family.windows[index]
        self.num_heads, self.num_kv_heads, self.head_size = family.num_heads, family.num_kv_heads, family.head_size
        self.scale = attention.scaling
        self.qkv, self.qkv_bias = fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.gate_up_bias = fuse_linears([mlp.gate_proj, mlp.up_proj])
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.input_norm = rms_norm_of(layer.input_layernorm)
        self.mlp_norm = rms_norm_of(layer.post_attention_layernorm)
        self.query_norm = rms_norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = rms_norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Run [B, T, d] hidden states through the layer, writing and reading its part of the cache."""
        product = widened_product if step.many_rows and widens(hidden) else F.linear
        heads = product(rms_norm(hidden, self.input_norm), self.qkv, self.qkv_bias)
        heads = heads.view(*hidden.shape[:2], -1, self.head_size)
        first_value = self.num_heads + self.num_kv_heads
        rotated = step.rotate(self._normed(heads[:, :, :first_value]).float())
        step.write(self.index, rotated[:, :, self.num_heads :], heads[:, :, first_value:])
        mixed = step.attend(self.index, rotated[:, :, : self.num_heads], self.scale, self.window, hidden.dtype)
        hidden = hidden + product(mixed, self.out, self.out_bias)

        gate, up = product(rms_norm(hidden, self.mlp_norm), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return hidden + product(F.silu(gate).mul_(up), self.down, self.down_bias)

    def products(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return (weight, bias) of the layer's four products."""
        return [
            (self.qkv, self.qkv_bias),
            (self.out, self.out_bias),
            (self.gate_up, self.gate_up_bias),
            (self.down, self.down_bias),
        ]

    def _normed(self, query_key: Tensor) -> Tensor:
        if self.query_norm is None or self.key_norm is None:
            return query_key
        query, key = query_key[:, :, : self.num_heads], query_key[:, :, self.num_heads :]
        return torch.cat((rms_norm(query, self.query_norm), rms_norm(key, self.key_norm)), 2)


def widens(of: Any) -> bool:
    """Whether a tensor or model is bf16 on a CPU that only emulates bf16 products, so that fp32 is faster."""
    return of.device.type == "cpu" and of.dtype == torch.bfloat16 and not cpu_multiplies_bf16()


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU's library has bf16 products; without, they are several times slower than fp32 ones."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widened_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in fp32, rounded once; the widened weight lives for this call only."""
    wide_bias = None if bias is None else bias.float()
    return F.linear(inputs.float(), weight.float(), wide_bias).to(inputs.dtype)


def rms_norm_of(module: Any) -> tuple[Tensor, float]:
    """Return (weight, eps) of a transformers RMSNorm module."""
    return module.weight, module.variance_epsilon


def rms_norm(hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension; `norm` is (weight, eps)."""
    weight, eps = norm
    return F.rms_norm(hidden, weight.shape, weight, eps)


def fuse_linears(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Move the weights (and biases) of `linears` into one tensor of which they become views; returns (weight, bias)."""
    weight = _fuse([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    return weight, _fuse(biases) if all(bias is not None for bias in biases) else None


def _fuse(parameters: list[nn.Parameter]) -> Tensor:
    sizes = [parameter.shape[0] for parameter in parameters]
    fused = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, fused.split(sizes), strict=True):
        parameter.data = part
    return fused
