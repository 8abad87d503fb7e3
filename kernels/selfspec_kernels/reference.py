"""PyTorch oracles: what every kernel must compute, written to be read. They run where nothing is compiled.

The point of `block_attention` is not speed but that a row's bits depend on nothing but that row: not on the cache's
capacity, the live length of other rows, or how many rows the call has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec_kernels.weights import PackedWeight

BLOCK = 128
"""Cache slots reduced together. A power of two; changing it changes bits."""

ROW_MULTIPLE = 8
"""Query rows (G·T) of one product are padded to a multiple of this: libraries give small odd counts other bits."""

LOSS_BLOCK = 2**18
"""Logits of which `exit_loss` makes fp32 copies at a time."""


def few_row_linear(
    inputs: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gated: bool,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    *,
    widen: bool = False,
) -> Tensor:
    """See `selfspec_kernels.few_row_linear`; `widen` computes the product in fp32 and rounds it once."""
    dtype = inputs.dtype
    inputs = prepared(inputs, norm, gated)
    if isinstance(weight, PackedWeight):
        weight = weight.dequantised() if widen else weight.dequantised().to(dtype)
    if widen:
        # The widened weight lives for this call only.
        product = F.linear(inputs.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    else:
        product = F.linear(inputs, weight, bias)
    return (product if residual is None else residual + product).to(out_dtype)


def prepared(inputs: Tensor, norm: tuple[Tensor, float] | None, gated: bool) -> Tensor:
    """Return what a product multiplies its weight with: inputs after their norm and gating."""
    if norm is not None:
        inputs = rms_norm(inputs, norm)
    return silu_mul(inputs) if gated else inputs


def rms_norm(inputs: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """See `selfspec_kernels.rms_norm`."""
    return F.rms_norm(inputs, norm[0].shape, *norm)


def add_rms_norm(inputs: Tensor, residual: Tensor, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.add_rms_norm`."""
    total = inputs + residual
    return total, rms_norm(total, norm)


def silu_mul(both: Tensor, activation: str = "silu") -> Tensor:
    """See `selfspec_kernels.silu_mul`."""
    gate, up = both.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def exit_head(
    hidden: Tensor,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor | None,
    gumbel: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.exit_head`; the logits are written, in fp32, from unrounded norms."""
    normed = rms_norm(hidden.float(), (norm[0].float(), norm[1]))
    scores = F.linear(normed, weight.float(), None if bias is None else bias.float())
    if gumbel is not None:
        scores = scores / temperature + gumbel.float()
    # Not `max`, which need not return the first of equals.
    best = scores.argmax(-1)
    return best if token_ids is None else token_ids[best], scores.gather(-1, best[..., None]).squeeze(-1)


def rope_kv_write(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    written: int,
    rotary: tuple[Tensor, Tensor],
    num_heads: int,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
) -> Tensor:
    """See `selfspec_kernels.rope_kv_write`."""
    batch, rows = positions.shape
    num_kv_heads, size = keys.shape[1], keys.shape[3]
    query, key, value = heads.view(batch, rows, -1, size).split((num_heads, num_kv_heads, num_kv_heads), 2)
    if norms is not None:
        query, key = (F.rms_norm(x, norm[0].shape, *norm) for x, norm in zip((query, key), norms, strict=True))
    # [B, T, 1, D], shared by all heads.
    cos, sin = (table[positions][:, :, None] for table in rotary)
    query, key = (torch.addcmul(x * cos, x.roll(size // 2, -1), sin) for x in (query.float(), key.float()))
    sequences, slots = torch.arange(batch, device=positions.device)[:, None], positions[:, :written]
    keys.transpose(1, 2)[sequences, slots] = key[:, :written].to(keys.dtype)
    values.transpose(1, 2)[sequences, slots] = value[:, :written].to(values.dtype)
    return query


def visibility_bias(positions: Tensor, num_blocks: int, group: int, window: int | None = None) -> Tensor:
    """Return 0 for the cache slots a query row may see and -inf for the others.

    Args:
        positions: [B, T] position of each row; it sees the slots 0..position.
        num_blocks: blocks of `BLOCK` slots read.
        group: query heads per key/value head, G.
        window: sliding window in slots, the row's own included; None for full attention.

    Returns:
        fp32 [B, 1, num_blocks, M, BLOCK] with M = G·T rounded up to `ROW_MULTIPLE`, as `block_attention` takes it.
    """
    batch, rows = positions.shape
    slots = torch.arange(num_blocks * BLOCK, device=positions.device)
    hidden = slots > positions[..., None]
    if window is not None:
        hidden |= slots <= positions[..., None] - window
    padded = -(-group * rows // ROW_MULTIPLE) * ROW_MULTIPLE
    bias = torch.zeros(batch, padded, num_blocks * BLOCK, device=positions.device)
    bias[:, : group * rows].masked_fill_(hidden.repeat(1, group, 1), float("-inf"))
    return bias.view(batch, 1, padded, num_blocks, BLOCK).transpose(2, 3).contiguous()


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `selfspec_kernels.ragged_attention`; the cache is of whole blocks."""
    group = query.shape[2] // keys.shape[1]
    bias = visibility_bias(positions, keys.shape[2] // BLOCK, group, window)
    # [B, 1, S, 1]; rows that only pad the product would see everything.
    hidden = bias[:, :, :, : group * query.shape[1]].amax(3).flatten(2)[..., None] == float("-inf")
    keys, values = (part.masked_fill(hidden, 0) for part in (keys, values))
    return block_attention(query, keys, values, bias, scale, soft_cap, sinks).to(out_dtype)


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T rows per sequence over fixed blocks of the cache, merged in block order.

    Every block is one product of a fixed shape, reduced in fp32; blocks are added one after another, so a block no row
    may see adds an exact zero. Slots hidden from *every* row must hold finite numbers (the cache zeroes them).

    Args:
        query: [B, T, H, D], rotated.
        keys, values: [B, Hkv, num_blocks * BLOCK, D]; H is a multiple of Hkv.
        bias: what `visibility_bias` returns for these rows.
        scale, soft_cap, sinks: see `selfspec_kernels.ragged_attention`.

    Returns:
        fp32 [B, T, H, D].
    """
    batch, rows, num_heads, head_size = query.shape
    num_kv_heads, num_blocks, padded = keys.shape[1], bias.shape[2], bias.shape[3]
    group = num_heads // num_kv_heads
    blocks = (batch, num_kv_heads, num_blocks, BLOCK, head_size)
    keys, values = keys.float().reshape(blocks), values.float().reshape(blocks)
    grouped = (query.float() * scale).view(batch, rows, num_kv_heads, group, head_size)
    grouped = grouped.permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, 1, group * rows, head_size)
    grouped = F.pad(grouped, (0, 0, 0, padded - group * rows))

    scores = torch.matmul(grouped, keys.transpose(-1, -2))
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores = scores.add_(bias)
    peaks = scores.amax((2, 4), keepdim=True)
    if sinks is not None:
        # [Hkv, 1, M, 1], a head's logit for each of its rows.
        sinks = sinks.float().view(num_kv_heads, group, 1).expand(-1, -1, rows).reshape(num_kv_heads, 1, -1, 1)
        sinks = F.pad(sinks, (0, 0, 0, padded - group * rows))
        peaks = torch.maximum(peaks, sinks)
    weights = scores.sub_(peaks).exp_()
    totals = weights.sum(-1)
    mixed = torch.matmul(weights, values)

    total, out = totals[:, :, 0], mixed[:, :, 0]
    for block in range(1, num_blocks):
        total = total + totals[:, :, block]
        out = out + mixed[:, :, block]
    if sinks is not None:
        total = total + (sinks - peaks).exp()[:, :, 0, :, 0]
    out = (out / total[..., None])[:, :, : group * rows]
    out = out.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, num_heads, head_size)


def compact(storage: Tensor, rows: Tensor, committed: Tensor) -> None:
    """See `selfspec_kernels.compact`."""
    for place, (row, end) in enumerate(zip(rows.tolist(), committed[rows].tolist(), strict=True)):
        if row != place:
            storage[:, :, :, place, :end] = storage[:, :, :, row, :end]


def exit_loss(
    logits: Tensor, targets: Tensor, teacher: Tensor | None, parts: tuple[float, float, float] | None
) -> Tensor:
    """See `selfspec_kernels.exit_loss`. A few rows at a time, so that its copies stay small."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.zeros(len(logits), 3, dtype=dtype, device=logits.device)
    size = max(1, LOSS_BLOCK // logits.shape[1])
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        log_q = logits[rows].to(dtype).log_softmax(-1)
        log_p = None if teacher is None else teacher[rows].to(dtype).log_softmax(-1)
        losses[rows], gradient = _losses_of_rows(log_q, targets[rows], log_p, parts)
        if gradient is not None:
            logits[rows] = gradient.to(logits.dtype)
    return losses


def _losses_of_rows(
    log_q: Tensor, targets: Tensor, log_p: Tensor | None, parts: tuple[float, float, float] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the losses [n, 3] and, given weights of its parts, the gradient [n, V] of their weighted sum."""
    rows = torch.arange(len(targets), device=targets.device)
    losses = log_q.new_zeros(len(targets), 3)
    losses[:, 0] = -log_q[rows, targets]
    q = log_q.exp()
    difference = torch.zeros_like(q[:, :1])
    if log_p is not None:
        p = log_p.exp()
        difference = q - p
        # A token that p excludes adds nothing, however improbable it is in q.
        losses[:, 1] = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)
        losses[:, 2] = difference.abs().sum(-1) / 2
    if parts is None:
        return losses, None
    cross_entropy, divergence, variation = parts
    gradient = cross_entropy * q + divergence * difference
    gradient[rows, targets] -= cross_entropy
    if variation:
        sign = difference.sign()
        gradient += variation / 2 * q * (sign - (q * sign).sum(-1, keepdim=True))
    return losses, gradient
