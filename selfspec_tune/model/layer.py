"""One decoder layer with its projections fused: what decoding runs. One forward for all supported families.

A transformers layer spends more time in Python and in small operations than in its products at batch 1. `FusedLayer`
takes over such a layer's own parameters: q, k, v and gate, up are moved into one tensor each and the module's weights
become views of it, so there is still one copy. The transformers module stays intact and usable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from selfspec_kernels import LayerWeights, Mode, Norm, PackedWeight, compiled, cpu, few_row_linear
from torch import Tensor, nn

from selfspec_tune.model.attention import Step
from selfspec_tune.model.families import Family

MANY_ROWS = 16
"""Rows per sequence from which a call is computed as a large matrix product: a prefill's."""


class FusedLayer:
    """Pre-norm grouped-query attention and gated SiLU MLP over a transformers decoder layer's parameters.

    Attributes:
        parts: what runs in place of `before_attention` and `after_attention` on few rows; None for these themselves.
    """

    parts: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None

    def __init__(self, layer: nn.Module, index: int, family: Family) -> None:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.index, self.window = index, family.windows[index]
        self.num_heads, self.num_kv_heads, self.head_size = family.num_heads, family.num_kv_heads, family.head_size
        self.scale = attention.scaling
        self.qkv: Tensor | PackedWeight
        self.qkv, self.qkv_bias = fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.gate_up_bias = fuse_linears([mlp.gate_proj, mlp.up_proj])
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.input_norm = rms_norm_of(layer.input_layernorm)
        self.mlp_norm = rms_norm_of(layer.post_attention_layernorm)
        self.head_norms: tuple[Norm, Norm] | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = rms_norm_of(attention.q_norm), rms_norm_of(attention.k_norm)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Run [B, T, d] hidden states through the layer, writing and reading its part of the cache."""
        few = hidden.shape[1] < MANY_ROWS
        before, after, mode = before_attention, after_attention, step.mode
        if self.parts is not None and few:
            before, after, mode = *self.parts, "reference"
        heads = before(hidden, self.qkv, self.qkv_bias, self.input_norm, mode)
        query = step.rotate_and_write(self.index, heads, self.num_heads, self.head_norms)
        mixed = step.attend(self.index, query, self.scale, self.window, hidden.dtype)
        return after(mixed, hidden, self.products()[1:], self.mlp_norm, mode)

    def with_weights(self, change: Callable[[Tensor], Tensor | PackedWeight]) -> FusedLayer:
        """Return a layer that shares norms, biases and its part of the cache, with other weights for its products.

        Args:
            change: returns what takes the place of a weight [N, K].
        """
        other = copy.copy(self)
        # Products of packed weights are kernels that torch.compile cannot look into.
        other.parts = None
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(other, name, change(getattr(self, name)))
        return other

    def weights(self) -> LayerWeights:
        """Return all that the layer computes with."""
        qkv, out, gate_up, down = self.products()
        norms = self.input_norm, self.mlp_norm, self.head_norms
        return LayerWeights(self.index, qkv, out, gate_up, down, *norms, self.scale, self.window)

    def products(self) -> list[tuple[Tensor | PackedWeight, Tensor | None]]:
        """Return (weight, bias) of the layer's four products."""
        return [
            (self.qkv, self.qkv_bias),
            (self.out, self.out_bias),
            (self.gate_up, self.gate_up_bias),
            (self.down, self.down_bias),
        ]


class LayerStack:
    """Layers that run one after another, in one call where they are compiled."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self.layers = list(layers)
        self._table: cpu.LayerTable | None = None

    def append(self, layer: FusedLayer) -> None:
        """Add a layer at the end."""
        self.layers.append(layer)
        self._table = None

    def compile(self) -> None:
        """Let torch.compile fuse what stands around the products, for few rows; without effect on the compiled call.

        One graph serves all layers, as weights are its arguments, and every number of rows has its own. They are cached
        on disk by torch.
        """
        # Row counts of prefills' ends, one sequence at a time, and of batches; torch allows 8 and refuses more.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * MANY_ROWS)
        before: Callable[..., Tensor] = torch.compile(before_attention, fullgraph=True, dynamic=False)
        after: Callable[..., Tensor] = torch.compile(after_attention, fullgraph=True, dynamic=False)
        for layer in self.layers:
            layer.parts = before, after

    def run(self, hidden: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run layers start..stop of the stack on [B, T, d] hidden states."""
        if step.mode == "compiled" and compiled(hidden) and start < stop:
            if self._table is None:
                self._table = cpu.LayerTable([layer.weights() for layer in self.layers])
            return step.run(self._table, hidden, start, stop, self.layers[0].num_heads)
        for layer in self.layers[start:stop]:
            hidden = layer(hidden, step)
        return hidden


Product = tuple[Tensor | PackedWeight, Tensor | None]
"""Weight and bias."""


def before_attention(
    hidden: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, norm: Norm, mode: Mode
) -> Tensor:
    """Norm and projections: [B, T, d] → queries, keys and values [B, T, (H + 2 Hkv) · D]."""
    return product(hidden, weight, bias, mode, norm=norm)


def after_attention(mixed: Tensor, hidden: Tensor, products: Sequence[Product], norm: Norm, mode: Mode) -> Tensor:
    """Output projection and MLP: [B, T, H · D] and the layer's input [B, T, d] → its output [B, T, d].

    Args:
        products: (weight, bias) of the output projection, of gate and up side by side, and of down.
    """
    out, gate_up, down = products
    hidden = product(mixed, *out, mode, residual=hidden)
    both = product(hidden, *gate_up, mode, norm=norm)
    return product(both, *down, mode, gated=True, residual=hidden)


def product(inputs: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, mode: Mode, **around: Any) -> Tensor:
    """`few_row_linear` in a pass of `mode`, with what stands `around` the product.

    Packed weights are a draft's, and no target arithmetic: theirs is the fastest product there is, in any pass.
    """
    return few_row_linear(inputs, weight, bias, mode="compiled" if isinstance(weight, PackedWeight) else mode, **around)


def widens(of: Any) -> bool:
    """Whether a tensor or model is bf16 on a CPU that only emulates bf16 products, so that fp32 is faster."""
    return of.device.type == "cpu" and of.dtype == torch.bfloat16 and not cpu_multiplies_bf16()


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU's library has bf16 products; without, they are several times slower than fp32 ones."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
