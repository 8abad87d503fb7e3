"""Operations of self-speculative decoding, one name per op. Knows torch, numba (CPU) and triton (GPU) only.

`ops` and `accept` say which implementation of an op runs: `cpu` holds the compiled ones, `packed_linear` and what ends
in `_kernel` those for GPUs, `reference` and `accept_reference` the PyTorch oracles.
"""

from selfspec_kernels import cpu
from selfspec_kernels.accept import (
    Accepted,
    accept_greedy,
    accept_matching,
    accept_ratio,
    accept_shared,
    draw,
    draw_with_gumbel,
)
from selfspec_kernels.ops import (
    Mode,
    Norm,
    add_rms_norm,
    compact,
    compiled,
    exit_head,
    exit_loss,
    few_row_linear,
    has_compiled_attention,
    has_packed_product,
    ragged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
)
from selfspec_kernels.reference import BLOCK, block_attention, visibility_bias
from selfspec_kernels.weights import GROUP, GROUPS, LayerWeights, PackedWeight, pack, packed_bytes

__all__ = [
    "BLOCK",
    "GROUP",
    "GROUPS",
    "Accepted",
    "LayerWeights",
    "Mode",
    "Norm",
    "PackedWeight",
    "accept_greedy",
    "accept_matching",
    "accept_ratio",
    "accept_shared",
    "add_rms_norm",
    "block_attention",
    "compact",
    "compiled",
    "cpu",
    "draw",
    "draw_with_gumbel",
    "exit_head",
    "exit_loss",
    "few_row_linear",
    "has_compiled_attention",
    "has_packed_product",
    "pack",
    "packed_bytes",
    "ragged_attention",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "visibility_bias",
]
