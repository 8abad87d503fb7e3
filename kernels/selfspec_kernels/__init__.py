"""Operations of self-speculative decoding, one name per op. Knows torch, numba (CPU) and triton (GPU) only.

`ops` says which implementation of an op runs: `cpu` holds the compiled ones, `packed_linear` and the modules named
`…_kernel` those for GPUs, `reference` the PyTorch oracles.
"""

from selfspec_kernels import cpu
from selfspec_kernels.ops import (
    Mode,
    Norm,
    compact,
    compiled,
    exit_loss,
    few_row_linear,
    has_compiled_attention,
    has_packed_product,
    ragged_attention,
    rope_kv_write,
)
from selfspec_kernels.reference import BLOCK, block_attention, visibility_bias
from selfspec_kernels.weights import GROUP, GROUPS, LayerWeights, PackedWeight, pack, packed_bytes

__all__ = [
    "BLOCK",
    "GROUP",
    "GROUPS",
    "LayerWeights",
    "Mode",
    "Norm",
    "PackedWeight",
    "block_attention",
    "compact",
    "compiled",
    "cpu",
    "exit_loss",
    "few_row_linear",
    "has_compiled_attention",
    "has_packed_product",
    "pack",
    "packed_bytes",
    "ragged_attention",
    "rope_kv_write",
    "visibility_bias",
]
