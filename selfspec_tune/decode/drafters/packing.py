"""Packs weights for a draft where products with them are faster packed, which is measured and never guessed.

Fewer bytes are not always less time: on a GPU a small product costs its launch, and a library's full-precision product
may be the better kernel. What is timed here is one row on an idle device, product by product.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from selfspec_kernels import Mode, PackedWeight, few_row_linear
from torch import Tensor

from selfspec_tune.decode.graphs import synchronise

REPEATS, WARM_UP = 15, 2
"""Calls of each product that are timed, and before them those that are not: the first compiles the kernel."""
COLD_BYTES = 256 << 20
"""Written before every call: more than the caches hold, as in a draft step other weights pass through them."""


class PackWhereFaster:
    """Packs a weight unless its product turns out to be no faster than with the weight as it is.

    Args:
        pack: makes a weight [N, K] smaller.
        mode: arithmetic of products with the model's own weights.
    """

    def __init__(self, pack: Callable[[Tensor], PackedWeight], mode: Mode) -> None:
        self._pack, self._mode = pack, mode
        self._faster: dict[tuple[int, int], bool] = {}

    @property
    def kept(self) -> list[tuple[int, int]]:
        """Shapes of the weights that stay as they are."""
        return [shape for shape, faster in self._faster.items() if not faster]

    def __call__(self, weight: Tensor) -> Tensor | PackedWeight:
        """Return the weight, packed or as it is; each shape is timed once."""
        shape = (weight.shape[0], weight.shape[1])
        if not self._faster.get(shape, True):
            return weight
        packed = self._pack(weight)
        if shape not in self._faster:
            as_it_is, smaller = product_seconds(weight, packed, self._mode)
            self._faster[shape] = smaller < as_it_is
        return packed if self._faster[shape] else weight


def product_seconds(weight: Tensor, packed: PackedWeight, mode: Mode) -> tuple[float, float]:
    """Return median times of one row's product with a weight as it is and packed, called in turns.

    Every call is waited for: its launch counts too, which decoding pays for every product.
    """
    inputs = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    others = torch.empty(COLD_BYTES, dtype=torch.uint8, device=weight.device)
    ways: list[tuple[Tensor | PackedWeight, Mode, list[float]]] = [(weight, mode, []), (packed, "compiled", [])]
    for _ in range(WARM_UP + REPEATS):
        for operand, arithmetic, seconds in ways:
            others.zero_()
            synchronise(weight.device)
            start = perf_counter()
            few_row_linear(inputs, operand, mode=arithmetic)
            synchronise(weight.device)
            seconds.append(perf_counter() - start)
    as_it_is, smaller = (median(seconds[WARM_UP:]) for *_, seconds in ways)
    return as_it_is, smaller
