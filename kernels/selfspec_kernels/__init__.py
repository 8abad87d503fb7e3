"""Operations of self-speculative decoding, one name per op. Knows torch (and, on GPUs, triton) only.

Every op runs its PyTorch reference today; a Triton version of an op joins under the same name and signature.
"""

from selfspec_kernels.reference import BLOCK, ragged_attention, visibility_bias

__all__ = ["BLOCK", "ragged_attention", "visibility_bias"]
