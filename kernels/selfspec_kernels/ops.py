"""Which implementation of an op runs: the compiled one where there is one for the tensors, else the reference."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from selfspec_kernels import cpu, reference
from selfspec_kernels.weights import PackedWeight

Mode = Literal["compiled", "reference", "wide"]
"""wide: the reference with products in fp32, for many rows of bf16 on CPUs that only emulate bf16."""

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate of an MLP."""

Norm = tuple[Tensor, float]
"""Weight and epsilon of an RMSNorm."""

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What Triton's kernels load."""


def compiled(tensor: Tensor) -> bool:
    """Whether compiled ops run for tensors of this device and dtype."""
    return cpu.runs(tensor)


@cache
def triton_available() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def on_gpu(tensor: Tensor) -> bool:
    """Whether Triton's kernels run for tensors like this."""
    return tensor.device.type == "cuda" and tensor.dtype in GPU_DTYPES and triton_available()


def attention_on_gpu(tensor: Tensor, head_size: int) -> bool:
    """Whether attention over a cache like this tensor, of heads of this size, is computed by Triton."""
    if not on_gpu(tensor):
        return False
    from selfspec_kernels import ragged_attention_kernel

    return head_size % ragged_attention_kernel.MULTIPLE == 0


def has_compiled_attention(tensor: Tensor, head_size: int) -> bool:
    """Whether attention over a cache like this tensor, of heads of this size, is compiled, and exact as it is."""
    # On a CPU it takes heads of whole vectors.
    return (compiled(tensor) and head_size % 8 == 0) or attention_on_gpu(tensor, head_size)


def has_packed_product(tensor: Tensor) -> bool:
    """Whether products of inputs like this with packed weights are fast: else weights are unpacked for each."""
    return compiled(tensor) or on_gpu(tensor)


def few_row_linear(
    inputs: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    mode: Mode = "compiled",
) -> Tensor:
    """A linear layer and what stands around it in a decoder, for the few rows of a decoding step.

    Args:
        inputs: [..., K]; with `gated` [..., 2 K], gate and up side by side, of which silu(gate) · up goes in.
        weight: [N, K], full precision or packed; the CPU's compiled product with a packed one rounds its inputs to 16
            bits by blocks, and a row with an infinity or NaN gives NaN. On GPUs see `packed_linear`.
        bias: [N].
        norm: RMSNorm of the inputs (arXiv 1910.07467).
        residual: [..., N] added to the product.
        out_dtype: of the result; default: that of the inputs.
        mode: which arithmetic; "compiled" is "reference" where nothing is compiled for such tensors and weights.

    Returns:
        [..., N].
    """
    out_dtype = out_dtype or inputs.dtype
    if mode == "compiled" and compiled(inputs):
        return cpu.few_row_linear(inputs, weight, bias, norm, gated, residual, out_dtype)
    if mode == "compiled" and on_gpu(inputs):
        return _few_row_linear_on_gpu(inputs, weight, bias, norm, gated, residual, out_dtype)
    return reference.few_row_linear(inputs, weight, bias, norm, gated, residual, out_dtype, widen=mode == "wide")


def _few_row_linear_on_gpu(
    inputs: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `few_row_linear`; norm, gating and products with packed weights are Triton's, all else the reference's."""
    if norm is not None:
        inputs = rms_norm(inputs, norm)
    if gated:
        inputs = silu_mul(inputs)
    if isinstance(weight, Tensor):
        return reference.few_row_linear(inputs, weight, bias, None, False, residual, out_dtype)
    from selfspec_kernels.packed_linear import packed_linear

    product = packed_linear(inputs, weight, out_dtype)
    if bias is not None:
        product = product + bias
    return (product if residual is None else residual + product).to(out_dtype)


def rms_norm(inputs: Tensor, norm: Norm) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of rows [..., K], rounded to their dtype."""
    if on_gpu(inputs):
        from selfspec_kernels import rms_norm_kernel

        return rms_norm_kernel.rms_norm(inputs, norm)
    return reference.rms_norm(inputs, norm)


def add_rms_norm(inputs: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the sum of two [..., K], rounded to their dtype, and the RMSNorm of that rounded sum."""
    if on_gpu(inputs):
        from selfspec_kernels import rms_norm_kernel

        return rms_norm_kernel.add_rms_norm(inputs, residual, norm)
    return reference.add_rms_norm(inputs, residual, norm)


def silu_mul(both: Tensor, activation: Activation = "silu") -> Tensor:
    """Gate and up side by side [..., 2 K] → activation(gate) · up [..., K]; GELU is its tanh form (arXiv 1606.08415).

    The reference rounds the activated gate to the dtype of `both` first; the kernel rounds the product only.
    """
    if on_gpu(both):
        from selfspec_kernels import silu_mul_kernel

        return silu_mul_kernel.silu_mul(both, activation)
    return reference.silu_mul(both, activation)


def exit_head(
    hidden: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    token_ids: Tensor | None = None,
    gumbel: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The token that final norm and head choose for a few rows; on GPUs their logits are not written.

    Without noise it is that of the largest logit; with noise g it is drawn from the softmax of logits / temperature as
    the one of the largest logit / temperature + g. The first of equals is chosen. Whether the kernel is faster than
    norm, product and argmax one after another is measured, not assumed.

    Args:
        hidden: [..., K].
        norm: of the hidden states.
        weight: [N, K], the rows of the head for the N tokens there are to choose from.
        bias: [N].
        token_ids: [N], which tokens those are; None where they are 0..N - 1.
        gumbel: [..., N].
        temperature: above 0; only with noise.

    Returns:
        Tokens [...] and what they were chosen for [...], fp32.
    """
    if on_gpu(hidden):
        from selfspec_kernels import exit_head_kernel

        return exit_head_kernel.exit_head(hidden, norm, weight, bias, token_ids, gumbel, temperature)
    return reference.exit_head(hidden, norm, weight, bias, token_ids, gumbel, temperature)


def rope_kv_write(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    written: int,
    rotary: tuple[Tensor, Tensor],
    num_heads: int,
    norms: tuple[Norm, Norm] | None = None,
    *,
    mode: Mode = "compiled",
) -> Tensor:
    """Rotate queries and keys (arXiv 2104.09864, half-split layout) and write keys and values into the cache.

    Args:
        heads: [B, T, (H + 2 Hkv) · D]: queries, keys, values of every row.
        keys, values: [B, Hkv, S, D] views of one layer of the cache.
        positions: [B, T], rotary positions, which are also the slots written.
        written: the first so many of the T rows are written; the others are padding.
        rotary: (cos, sin) tables, fp32 [positions, D], sin negated in its first half.
        norms: RMSNorm of each query and key head, for families that have it.

    Returns:
        Rotated queries, fp32 [B, T, H, D].
    """
    arguments = (heads, keys, values, positions, written, rotary, num_heads, norms)
    if mode == "compiled" and on_gpu(heads):
        from selfspec_kernels import rope_kv_write_kernel

        return rope_kv_write_kernel.rope_kv_write(*arguments)
    implementation = cpu if mode == "compiled" and compiled(heads) else reference
    return implementation.rope_kv_write(*arguments)


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of a few rows per sequence over the cache; each sees the slots up to its own position, and its own.

    A row's bits depend on its query and on the slots that it sees: not on other rows, nor on the number of rows, blocks
    or sequences. Slots that no row of the sequence sees may hold anything, also NaN.

    Args:
        query: fp32 [B, T, H, D], rotated.
        keys, values: [B, Hkv, S, D] views of one layer of the cache, S in whole blocks of `BLOCK`; H is a multiple of
            Hkv.
        positions: [B, T].
        scale: factor on the scores.
        window: see only so many of the last slots, the row's own included.
        soft_cap: scores s become soft_cap · tanh(s / soft_cap) (arXiv 2408.00118).
        sinks: [H], scores of slots without a value: exp(sink) is added to the softmax's denominator (arXiv 2309.17453).
        out_dtype: of the result.

    Returns:
        [B, T, H, D].
    """
    if attention_on_gpu(keys, keys.shape[3]):
        from selfspec_kernels import ragged_attention_kernel

        return ragged_attention_kernel.ragged_attention(
            query, keys, values, positions, scale, window, soft_cap, sinks, out_dtype
        )
    if has_compiled_attention(keys, keys.shape[3]) and soft_cap is None and sinks is None:
        return cpu.ragged_attention(query, keys, values, positions, scale, window, out_dtype).view(query.shape)
    return reference.ragged_attention(query, keys, values, positions, scale, window, soft_cap, sinks, out_dtype)


def compact(storage: Tensor, rows: Tensor, committed: Tensor) -> None:
    """Move rows of the cache to its front, in place: row `rows[i]` becomes row i, and what was there is lost.

    Args:
        storage: [L, 2, Hkv, B, S, D], keys and values; contiguous, or the first rows of such.
        rows: int64 [n], rising.
        committed: [B] slots of each row that are worth moving; those beyond them hold anything afterwards.
    """
    if storage.device.type == "cuda" and triton_available():
        from selfspec_kernels import compact_kernel

        return compact_kernel.compact(storage, rows, committed)
    return reference.compact(storage, rows, committed)


def exit_loss(
    logits: Tensor, targets: Tensor, teacher: Tensor | None, parts: tuple[float, float, float] | None
) -> Tensor:
    """The losses of a layer against data and teacher, and their gradient in place of the logits.

    With q the softmax of a row of `logits` and p that of `teacher`: cross entropy −log q(target), KL(p || q) and total
    variation ½ Σ |p − q|. The gradient is that of the sum weighted with `parts`, row by row; of total variation it is
    ½ q (s − Σ q s) with s the sign of q − p, zero where the two are equal. All arithmetic in fp32 (fp64 for fp64).

    Args:
        logits: [n, V]; overwritten with the gradient unless `parts` is None.
        targets: [n], token ids.
        teacher: [n, V] logits, or None: then KL and total variation are 0.
        parts: weights of cross entropy, KL and total variation.

    Returns:
        [n, 3] cross entropy, KL and total variation of every row, in fp32 (fp64 for fp64).
    """
    if on_gpu(logits):
        from selfspec_kernels import exit_loss_kernel

        return exit_loss_kernel.exit_loss(logits, targets, teacher, parts)
    return reference.exit_loss(logits, targets, teacher, parts)
