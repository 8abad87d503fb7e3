"""How far an op may be from what it is held against, and why. One table for all kernel tests; no time is in it."""

from __future__ import annotations

import torch

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16

FEW_ROW_LINEAR = {FLOAT32: 2e-6, BFLOAT16: 2e-2}
"""Relative to the largest result: fp32 sums in another order; in bf16 the reference rounds up to three times."""

ROUNDED_INPUTS = 1e-4
"""Relative to the largest result: products with packed weights on CPUs round inputs by 1.5e-5 of a block's largest."""

PACKED_LINEAR = 2e-6
"""Relative to the largest result: fp32 sums of up to 2100 products in another order than that of fp64."""

EXIT_LOSS = 2e-6
"""Relative and absolute: fp32 sums over up to 200 terms in another order, of logits of up to 20."""

RAGGED_ATTENTION = 2e-5
"""Absolute, results of size 1: fp32 sums of a few hundred terms in another order; inputs of 16 bits are the same."""

ROPE_KV_WRITE = {FLOAT32: 1e-5, BFLOAT16: 4e-2}
"""Absolute, numbers of size 4: products and sums of two terms; caches of 16 bits hold values rounded once."""

ROUNDED = {FLOAT32: 0.0, BFLOAT16: 2.0**-7, FLOAT16: 2.0**-10}
"""Relative to each result, which is rounded once: a unit in the last place. (To bf16 the interpreter cuts digits off.)
"""

SMALLEST = {FLOAT32: 1e-30, BFLOAT16: 1e-30, FLOAT16: 2.0**-24}
"""Absolute: below it a dtype has fewer digits than elsewhere, or none."""

RMS_NORM = 2e-6
"""Relative to each result: its scale is an fp32 sum of up to 600 squares, which are all positive."""

SILU_MUL = 2e-5
"""Relative to each result: the exponential of a number up to 90, whose own rounding counts that many times."""

EXIT_HEAD = 4e-6
"""Relative to a row's largest logit: fp32 sums of up to 600 products of both signs."""
