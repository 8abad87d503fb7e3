"""Check a GPU: ops, exactness, and what plain and speculative decoding reach there, against targets. No download.

The model is synthetic (random weights of a 7B shape, α dialled, see `synthetic_model`). Parts run one after another,
each within a budget of seconds; what is left out is said and recorded. Without a GPU, or with --tiny, a tiny model is
measured, which shows that the check works and nothing else: targets are then shown but not judged.

One JSON file is written after every part, atomically, and one table printed at the end.

Exit code 0: every target judged is met. 1: one is not, or could not be measured. 2: a part failed, or bad options.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_parts.exactness import check_exactness, check_rows  # type: ignore[import-not-found]  # beside this script
from gpu_parts.ops import check_ops  # type: ignore[import-not-found]
from gpu_parts.part import Bench, Result, Target, make_model, run_part, say  # type: ignore[import-not-found]
from gpu_parts.plain import check_copy, check_plain  # type: ignore[import-not-found]
from gpu_parts.rounds import check_rounds, check_sizes, check_speedups  # type: ignore[import-not-found]
from gpu_parts.sizes import FULL, TINY  # type: ignore[import-not-found]

from selfspec_tune.decode.price import measured_on
from selfspec_tune.errors import UserError
from selfspec_tune.files import write_json
from selfspec_tune.model.load import resolve_device

EXAMPLES = """examples:
  scripts/gpu_check.sh                            all parts on the GPU, about 7 minutes
  scripts/gpu_check.sh --parts ops,rows,exact     what must hold on any card, about 2 minutes
  scripts/gpu_check.sh --tiny --output /tmp/a     all parts with a tiny model, on a machine without a GPU too"""


class Part(NamedTuple):
    """A part of the check: what it runs, its title, and the seconds it may take."""

    work: Callable[[Any, Any], None]
    title: str
    budget: float


PARTS = {
    "model": Part(make_model, "a synthetic model, and what is compiled for it", 60),
    "ops": Part(check_ops, "ops against their references", 60),
    "rows": Part(check_rows, "row counts with equal bits", 25),
    "exact": Part(check_exactness, "speculative against plain decoding, bit by bit", 105),
    "copy": Part(check_copy, "copy bandwidth", 10),
    "plain": Part(check_plain, "plain decoding against the roofline", 120),
    "rounds": Part(check_rounds, "rounds against their pieces", 75),
    "speedups": Part(check_speedups, "speed-ups against their prediction", 110),
    "sizes": Part(check_sizes, "batch sizes and contexts", 60),
}
"""In the order they run. On a GPU all of them end within `--seconds`, whatever their budgets sum to."""
UNHURRIED = 4
"""Times the seconds of every part that a tiny model may take, on a machine that is busy with something else."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, write the report after each, print the table, and return the exit code."""
    options = parse(arguments)
    device = resolve_device(options.device)
    tiny = options.tiny or device.type != "cuda"
    judged, sizes = not tiny, TINY if tiny else FULL
    names = options.parts.split(",") if options.parts else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise UserError("there is no such part", got=", ".join(unknown), allowed=", ".join(PARTS))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    label = f"{name}, {sizes.preset} model" + ("" if judged else ": no figure of a GPU at work")
    seconds = options.seconds if judged else UNHURRIED * options.seconds
    bench, begin = Bench(sizes, str(device)), time.perf_counter()
    results: list[Any] = []
    for name in [each for each in PARTS if each in names]:
        part = PARTS[name]
        left = seconds - (time.perf_counter() - begin)
        budget = part.budget if judged else UNHURRIED * part.budget
        result = Result(name, part.title, label, judged, round(min(budget, left), 1))
        results.append(result)
        if left > 0:
            run_part(part.work, bench, result)
        else:
            result.skip("all of it", f"the {seconds:.0f} s of the whole check are up")
        write_json(options.output, report(label, judged, bench, results))
    print_table(results)
    say(f"wrote {options.output} after {time.perf_counter() - begin:.0f} s")
    return exit_code(results)


def report(label: str, judged: bool, bench: Any, results: Sequence[Any]) -> dict[str, Any]:
    """Return the whole report as JSON."""
    sizes = bench.sizes
    about = {"preset": sizes.preset, "dtype": sizes.dtype, "python": platform.python_version()}
    try:
        about |= measured_on(bench.decoder)
    except Exception as error:  # a model that cannot be made fails in its parts, and the report shall say so
        about["error"] = f"{type(error).__name__}: {error}"
    return {"label": label, "judged": judged, "measured_on": about, "parts": [each.to_dict() for each in results]}


def exit_code(results: Sequence[Any]) -> int:
    """Return 2 where a part failed, 1 where a judged target is not met or a judged part was left out, else 0."""
    if any(result.status == "failed" for result in results):
        return 2
    missed = any(target.met is False for result in results for target in result.targets)
    short = any(result.judged and result.status != "done" for result in results)
    return 1 if missed or short else 0


def print_table(results: Sequence[Any]) -> None:
    """Print one line per target and one per part that has none or did not finish."""
    print(f"\n{results[0].label}\n")
    print(f"| part | s | figure | target | measured | |\n|{'---|' * 6}")
    for result in results:
        lines = [row(target) for target in result.targets] or [f"{headline(result.values)} | | |"]
        for line in lines:
            print(f"| {result.name} | {result.seconds:.0f} | {line} |")
        if result.status != "done":
            print(f"| {result.name} | {result.seconds:.0f} | {result.status.upper()} {result.error} | | | |")
    print("".join(f"\nskipped in {result.name}: {each}" for result in results for each in result.skipped))


def row(target: Target) -> str:
    """Return the last four cells of a target's line."""
    sign = "≥" if target.at_least else "≤"
    measured = "not measured" if target.measured is None else f"{target.measured:.4g}"
    verdict = {None: "not judged", True: "met", False: "NOT MET"}[target.met]
    return f"{target.name} | {sign} {target.bound:g} | {measured} | {verdict}"


def headline(values: dict[str, Any]) -> str:
    """Return a part's plain figures in a line."""
    numbers = [f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, int | float)]
    return ", ".join(numbers) or ", ".join(values)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON file [default: %(default)s]")
    parser.add_argument("--tiny", action="store_true", help="measure a tiny model; targets are not judged")
    parser.add_argument("--parts", help=f"parts to run, with commas, of {', '.join(PARTS)} [default: all]")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all parts [default: %(default)s]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [default: %(default)s]")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
