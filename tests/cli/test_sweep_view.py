"""What `sweep-exit` prints: whole at any width, readable without colour and in light and dark terminals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style
from sweep.example import example_result

from selfspec_tune.cli import console, sweep_view
from selfspec_tune.sweep import tables

Show = Callable[..., str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function (result, columns) → what is printed into a pipe; columns None: as many as the command takes."""

    def run(result: dict[str, Any], columns: int | None) -> str:
        for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        sweep_view.show(result)
        return capsys.readouterr().out

    return run


def cells_of(text: str) -> list[str]:
    """Return the text of all table cells."""
    return [cell.strip() for line in text.splitlines() if "│" in line for cell in line.split("│")]


def numbers(result: dict[str, Any]) -> list[str]:
    """Return every number the terminal must show, as it is written."""
    found = []
    shown = tables.shown_exits(30, sweep_view.TABLE_ROWS - 2, tables.notable_exits(result))
    for exit_layer in {1, 29, *tables.notable_exits(result)} & set(shown):
        cells = [cell for cell in result["cells"] if cell["exit_layer"] == exit_layer]
        best = max(cells, key=lambda cell: cell["speedup_predicted"])
        (low, high), (least, most) = best["interval"], result["alpha_intervals"][str(exit_layer)]
        found.append(f"{best['speedup_predicted']:.2f} ({low:.2f}–{high:.2f})")
        found.append(f"{best['alpha']:.3f} ({least:.3f}–{most:.3f})")
        found += [f"{best[n]:.2f}" for n in ("cost_ratio", "verify_ratio", "tokens_per_round", "speedup_model")]
    for row in result["candidates"]:
        names = ("cost_ratio", "verify_ratio", "tokens_per_step", "cost_per_step", "speedup_model", "speedup_predicted")
        found += [f"{row[name]:.2f}" for name in names]
    found += [f"×{row['speedup']:.2f} ±{row['spread'] / 2:.0%}" for row in result["confirmed"]]
    for row in result["by_domain"]:
        found += [str(row["num_prompts"]), str(row["num_tokens"]), f"{row['alpha']:.3f}", f"{row['loss']:.1%}"]
        found += [f"{row[name]:.2f}" for name in ("tokens_per_round", "speedup_best", "speedup_shared")]
        found.append(f"{row['best']}, k={row['num_draft_tokens']}")
    for row in result["costs"]:
        found += [str(row["context_length"]), f"{1000 * row['plain_seconds']:.1f} ms", f"{row['plain_spread']:.1%}"]
        found.append(f"{row['composed_over_measured']:.3f}")
    found += [f"{row['speedup_predicted']:.2f}" for row in result["by_context"]]
    return found


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("pays", [True, False])
def test_nothing_is_cut_or_split_at_any_width(show: Show, pays: bool, columns: int) -> None:
    result = example_result(pays=pays)
    text = show(result, columns)
    assert [line for line in text.splitlines() if cell_len(line) > columns and "next: " not in line] == []
    assert "…" not in text
    assert sorted(set(numbers(result)) - set(cells_of(text))) == []
    for cell in result["cells"]:
        assert re.search(rf"{cell['speedup_predicted']:.2f}[ +*]", text)


def test_a_pipe_is_wide_and_keeps_sentences_on_one_line(show: Show) -> None:
    result = example_result()
    text = show(result, None)
    assert "continued" not in text
    assert max(cell_len(line) for line in text.splitlines() if "│" in line) <= console.PIPED_WIDTH
    assert f"speculation on: {result['artifact']['reason']}\n" in text
    assert text.splitlines()[-1] == f"written: {result['path']}"


def test_wide_terminals_show_both_scores_beside_each_other(show: Show) -> None:
    assert re.search(r"Textbook score {2,}Predicted speed-up", show(example_result(), 200))
    assert not re.search(r"Textbook score {2,}Predicted speed-up", show(example_result(), 120))


def test_without_colour_the_best_cell_and_those_that_pay_are_marked(show: Show) -> None:
    result = example_result()
    text = show(result, 100)
    assert "\x1b" not in text
    predicted = text[text.index("Predicted speed-up") : text.index("Layer skip against")]
    rows = {
        cells[1]: cells[2:-1]
        for cells in ([c.strip() for c in line.split("│")] for line in predicted.splitlines())
        if len(cells) == 11
    }
    inside = [cell for cell in result["cells"] if 9 <= cell["exit_layer"] <= 24]
    best = max(inside, key=lambda cell: cell["speedup_predicted"])
    for cell in result["cells"]:
        shown = rows[f"E={tables.depth(cell['exit_layer'], 30)}"][cell["num_draft_tokens"] - 1]
        value = f"{cell['speedup_predicted']:.2f}"
        assert shown == value + ("*" if cell is best else "+" if float(value) > 1 else "")
    # Lines part the window from the rest: under the head, above exit 9, under exit 24.
    lines = predicted.splitlines()
    assert [lines[n + 1].split("│")[1].strip() for n, line in enumerate(lines) if line.startswith("├")] == [
        "E=9 (30%)",
        "E=25 (83%)",
    ]


def test_the_best_exit_and_the_chosen_drafter_are_starred(show: Show) -> None:
    cells = cells_of(show(example_result(), 120))
    assert {cell for cell in cells if cell.startswith("* ")} == {"* 10 (33%)", "* layer-skip E=10"}


def test_only_where_it_is_off_the_terminal_says_what_it_would_take(show: Show) -> None:
    off = example_result(pays=False)
    text = show(off, 80)
    assert "The α you would need at each exit for ×1.2" in text
    cells = cells_of(text)
    assert {"0.720", "0.684 short", "never"} <= set(cells)
    assert "speculation off: " in text and "next: selfspec train" in text
    assert "you would need" not in show(example_result(), 80)


@pytest.mark.parametrize(("name", "title"), [("by_domain", "By domain"), ("by_context", "by context length")])
def test_empty_tables_are_left_out(show: Show, name: str, title: str) -> None:
    assert title in show(example_result(), 120)
    assert title not in show(example_result() | {name: []}, 120)


def test_names_from_prompts_are_neither_markup_nor_commands_to_the_terminal(show: Show) -> None:
    text = show(example_result(domain="[bold]code[/bold] \x1b[31m"), 120)
    assert "[bold]code[/bold]" in text and "\x1b" not in text


def test_warnings_and_other_tokens_are_said(show: Show) -> None:
    result = example_result() | {"approximate": True, "path": None}
    result["confirmed"][1]["identical"] = False
    text = show(result, None)
    assert "warning: the machine was busy" in text and "warning: Approximate" in text
    assert "OTHER TOKENS than plain decoding with low-precision 4-bit group 64" in text
    assert "Predicted speed-up (approximate)" in text
    assert '"drafter": "layer-skip"' in text.splitlines()[-1]  # what was not written is printed


def test_of_a_deep_model_some_exits_are_shown_and_it_is_said(show: Show) -> None:
    result = example_result()
    result |= {"num_layers": 81, "window": [0.0, 1.0]}
    cell, interval = result["cells"][0], result["alpha_intervals"]["1"]
    result["cells"] = [cell | {"exit_layer": e, "speedup_predicted": 1 + e / 1000} for e in range(1, 81)]
    result["alpha_intervals"] = {str(e): interval for e in range(1, 81)}
    for row in result["costs"]:
        row["cost_ratio"] = {str(e): 0.5 for e in range(1, 81)}
        row["verify_ratio"] = {str(e): [1.1] for e in range(1, 81)}
    text = show(result, 120)
    said = " ".join(text.split())
    assert re.search(r"\d\d of 80 exits are shown", said) and re.search(r"Layer skip, \d\d of 80 exits", said)
    assert {"E=80 (99%)", "E=10 (12%)", "* 80 (99%)"} <= set(cells_of(text))


@pytest.mark.parametrize(("system", "least"), [("TRUECOLOR", 4.5), ("EIGHT_BIT", 4.5), ("STANDARD", 4.0)])
@pytest.mark.parametrize("step", [*console.BLUES, *console.ORANGES])
def test_ink_and_ground_are_fixed_and_stand_apart(step: str, system: str, least: float) -> None:
    style = Style.parse(step)
    # Names such as white are the theme's to choose: a light theme's white is grey.
    assert all(re.fullmatch("#[0-9a-f]{6}", word) for word in step.split(" on "))

    def luminance(colour: Any) -> float:
        triplet = colour.downgrade(ColorSystem[system]).get_truecolor()
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in triplet)
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(style.color), luminance(style.bgcolor)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= least
