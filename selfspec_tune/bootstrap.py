"""What a percentile bootstrap of a few units has to be widened by. Imports nothing of ours."""

from __future__ import annotations

import math

Z = 1.959964
"""Quantile of the normal distribution for 95 %, two sides."""


def widening(units: int) -> float:
    """Return by how much to widen a percentile interval from so many units (1 for a single one).

    Drawn again from n units, means spread by √((n − 1)/n) too little, and n units tell their spread badly: Student's
    quantile instead of the normal one, by its expansion (Abramowitz and Stegun 26.7.5).
    """
    if units < 2:
        return 1.0
    freedom = units - 1
    student = Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
    return student / Z * math.sqrt(units / freedom)
