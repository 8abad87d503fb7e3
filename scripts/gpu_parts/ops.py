"""Part: every op on the device against its reference, on the same inputs.

`layer_cases` and `token_cases` are the whole list: a new op gets a case there (and its tolerance a line in
`TOLERANCES`). The op is called as the library calls it, so on a GPU it is Triton's where there is one; the reference
runs in fp64 where it can. Floating-point results are held against a tolerance, whole numbers must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import layer_cases, token_cases
from .case import Case
from .part import Bench, Result

TOLERANCES = {
    # fp32 sums of up to 4,096 products in another order than that of fp64.
    "sum": 4e-6,
    # The CPU's packed product rounds each input by up to 1.5e-5 of its block's largest.
    "packed on a CPU": 1e-4,
    # In low precision norm, gating and product are each rounded on the way.
    "sum in low precision": 2e-2,
    # A row's scale is an fp32 sum of up to 5,000 squares, which are all positive.
    "norm": 2e-6,
    # The exponential of a number of up to 90, whose own rounding counts that many times.
    "gating": 2e-5,
    # fp32 products and sums of two terms; angles are the same on both sides.
    "rotation": 1e-5,
    # fp32 sums of a few hundred terms in another order, exponentials of scores of a few units.
    "attention": 2e-5,
    # fp32 sums of 1,024 products of both signs in another order; tokens are whole numbers.
    "head": 4e-6,
    # Tokens and counts, and bits that are moved: equal, as no choice is nearly a tie.
    "whole numbers": 0.0,
    # exp of fp32 logarithms of up to 25, each known to 2e-6, and sums of 32,000 of them.
    "loss": 3e-5,
}
"""By what an op does: the largest error allowed, relative to the largest number of the result."""
ROUNDED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative to each number of a result: it is rounded once to its dtype, and the reference's may round the other way."""


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every op with its inputs."""
    yield from layer_cases.cases(device)
    yield from token_cases.cases(device)


def error_of(case: Case, device: torch.device) -> float:
    """Return the largest error relative to the largest number of each floating-point result, beyond one rounding.

    Raises:
        ValueError: a result of either is not finite, or of another shape, or whole numbers differ.
    """
    worst = 0.0
    for ours, wanted in zip(case.op(case.inputs(device)), case.reference(case.inputs(device)), strict=True):
        if ours.shape != wanted.shape or not bool(ours.isfinite().all() & wanted.isfinite().all()):
            raise ValueError(f"a result is not finite, or {list(ours.shape)} instead of {list(wanted.shape)}")
        if not wanted.is_floating_point():
            if not torch.equal(ours, wanted):
                raise ValueError(f"{int((ours != wanted).sum())} of {wanted.numel()} whole numbers differ")
            continue
        wide = wanted.double()
        error = (ours.double() - wide).abs() - ROUNDED[ours.dtype] * wide.abs()
        worst = max(worst, float(error.max() / wide.abs().max().clamp_min(1e-30)))
    return worst


@torch.inference_mode()
def check_ops(bench: Bench, result: Result) -> None:
    """Run every case and hold its error against its tolerance; one that does not run is beyond any."""
    result.values["cases"] = found = []
    for case in cases(bench.device):
        entry: dict[str, Any] = {"name": case.name, "tolerance": TOLERANCES[case.tolerance], "why": case.tolerance}
        try:
            entry["error"] = error_of(case, bench.device)
        except Exception as error:  # an op that does not run is a finding, and the next one is to be tried
            entry |= {"error": None, "failed": f"{type(error).__name__}: {error}"}
        found.append(entry)
    bad = [each["name"] for each in found if each["error"] is None or each["error"] > each["tolerance"]]
    result.values["beyond_tolerance"] = bad
    result.aim("ops beyond their tolerance", float(len(bad)))
