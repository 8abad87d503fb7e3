"""The report of `sweep-exit --report`: a page that needs nothing else, its plots as files, all figures as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec_tune.errors import UserError
from selfspec_tune.files import atomic_writer, write_bytes, write_json
from selfspec_tune.sweep import tables, words
from selfspec_tune.sweep.tables import GLOSSARY, Json, Table

if TYPE_CHECKING:
    from selfspec_tune.sweep.plot import Plot

PAGE_NAME, DATA_NAME = "index.html", "sweep.json"

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2128; --soft: #57606a; --line: #d0d7de; --panel: #f3f5f8;
  --yes: #08519c; --no: #a63603; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --ink: #e6edf3; --soft: #9aa6b2; --line: #3d4650;
  --panel: #1d232a; --yes: #6cb6ff; --no: #f5a04c; } }
body { background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0 auto;
  max-width: 62rem; padding: 1.2rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
.verdict { border-left: .4rem solid var(--no); background: var(--panel); padding: .8rem 1rem; font-size: 1.15rem; }
.verdict.yes { border-color: var(--yes); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1rem; } dd { margin: 0; min-width: 0; }
dt { font-weight: 600; } .warning { border-left: .4rem solid var(--no); padding: .1rem 1rem; margin: .6rem 0; }
pre { background: var(--panel); padding: .7rem 1rem; white-space: pre-wrap; } details { margin: 1rem 0; }
.scroll { overflow-x: auto; } .caption { color: var(--soft); font-size: .87rem; margin: .3rem 0 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7.5rem; }
tr.chosen td { font-weight: 700; background: var(--panel); }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: .6rem 0; }
.plots figure { flex: 1 1 22rem; } img { width: 100%; max-width: 46rem; height: auto; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
"""


def check_report(directory: Path) -> None:
    """Make the directory, and see that plots can be drawn, before any work.

    Raises:
        UserError: matplotlib is missing, or the directory is a file.
    """
    if find_spec("matplotlib") is None:
        raise UserError("--report needs the package matplotlib", command="pip install 'selfspec[report]'")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError("--report is no directory", got=directory) from None


def write_report(result: Json, directory: Path) -> list[Path]:
    """Write plots, data and page, each atomically and the page last, and return their paths.

    Args:
        result: the dict of `Sweep.to_dict()`.
    """
    from selfspec_tune.sweep.plot import draw_plots

    plots, written = draw_plots(result), []
    for plot in plots:
        for theme, png in plot.png.items():
            path = directory / (f"{plot.name}.png" if theme == "light" else f"{plot.name}-{theme}.png")
            write_bytes(path, png)
            written.append(path)
    write_json(directory / DATA_NAME, result)
    with atomic_writer(directory / PAGE_NAME) as handle:
        handle.write(page(result, plots))
    return [*written, directory / DATA_NAME, directory / PAGE_NAME]


def page(result: Json, plots: Iterable[Plot]) -> str:
    """Return the page: the answer first, then what it rests on. All text of the result is escaped."""
    drawn = {plot.name: _picture(plot) for plot in plots}
    title = escape(f"Does drafting pay for {result['model']}?")
    body = [f"<h1>{title}</h1>", *_answer(result), *_meanings(), *_sections(result, drawn), *_method(result)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _answer(result: Json) -> list[str]:
    artifact = result["artifact"]
    facts = {
        "How sure": words.how_sure(result),
        "On which machine": words.machine(result),
        "With which prompts": words.prompts(result),
        "In full": artifact["reason"],
        "Written to": result["path"] or "nothing: the model is no directory",
    }
    better = words.better_outside(result)
    if better:
        facts["Besides"] = better
    state = "yes" if artifact["enabled"] else "no"
    parts = [f'<p class="verdict {state}">{escape(words.verdict(result))}</p>']
    warnings = [words.approximate(result), *result["warnings"]]
    parts += [f'<p class="warning"><strong>Warning:</strong> {escape(text)}</p>' for text in warnings if text]
    parts += ["<dl>", *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()), "</dl>"]
    return [*parts, "<h3>What to type next</h3>", f"<pre><code>{escape(words.next_command(result))}</code></pre>"]


def _meanings() -> list[str]:
    lines = (f"<dt>{name}</dt><dd>{escape(meaning)}</dd>" for name, meaning in GLOSSARY.items())
    intro = (
        "<p>A cheap draft proposes the next few tokens; the model checks them all in one pass and keeps those it would "
        "have written itself. With layer skip the draft is the model's own first layers, up to an exit layer.</p>"
    )
    return ["<h2>What the figures mean</h2>", intro, "<dl>", *lines, "</dl>"]


def _sections(result: Json, drawn: dict[str, str]) -> list[str]:
    exits = list(range(1, result["num_layers"]))
    skipped = [f"{label}: {reason}" for label, reason in result["skipped"].items()]
    maps = f'<div class="plots">{drawn["heat-textbook"]}{drawn["heat-predicted"]}</div>'
    grids = [
        tables.scores_table(result, "speedup_model", "Textbook score"),
        tables.scores_table(result, "speedup_predicted", "Predicted speed-up"),
    ]
    sections = {
        "How often a draft is right": [
            drawn["alpha"],
            _table(tables.exits_table(result, exits)),
            *_folded(
                "Which α would make it ×1.2?", [tables.needed_table(result, exits)], result["artifact"]["enabled"]
            ),
        ],
        "Which exit layer, and how many tokens": [
            "<p>Blue is faster than plain decoding, orange slower. Between the broken lines lies the window the exit "
            "is chosen from; the frame marks its best.</p>",
            maps,
            *_folded("The same as tables", grids, True),
        ],
        "Which drafter": [
            drawn["drafters"],
            _table(tables.drafters_table(result)),
            *([_table(tables.confirmed_table(result))] if result["confirmed"] else []),
            *(f'<p class="caption">Not tried: {escape(text)}</p>' for text in skipped),
        ],
    }
    if result["by_context"]:
        sections["By context length"] = [drawn["context"], _table(tables.contexts_table(result))]
    if result["by_domain"]:
        sections["By domain"] = [drawn["domains"], _table(tables.domains_table(result))]
    sections["What it costs on this machine"] = [drawn["costs"], _table(tables.costs_table(result))]
    return [line for name, parts in sections.items() for line in (f"<h2>{name}</h2>", *parts)]


def _method(result: Json) -> list[str]:
    lines = (f"<li>{escape(text)}</li>" for text in words.how_measured(result))
    link = f'<p class="caption">All figures: <a href="{DATA_NAME}">{DATA_NAME}</a>, beside this page.</p>'
    return ["<h2>How it was measured</h2>", "<ul>", *lines, "</ul>", link]


def _picture(plot: Plot) -> str:
    """Return a figure that follows the reader's light or dark setting; its images are in the page itself."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(plot.png[theme]).decode()}" for theme in ("light", "dark"))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(plot.alt)}"></picture></figure>'
    )


def _folded(summary: str, shown: Iterable[Table], folded: bool) -> list[str]:
    """Return tables that unfold at a click if `folded`, else as they are."""
    drawn = [_table(table) for table in shown]
    return [f"<details><summary>{summary}</summary>", *drawn, "</details>"] if folded else drawn


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = []
    for number, row in enumerate(table.rows):
        chosen = number == table.marked
        cells = [f"★ {row[0]}" if chosen else row[0], *row[1:]]
        inner = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(('<tr class="chosen">' if chosen else "<tr>") + f"{inner}</tr>")
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<h3>{escape(table.title)}</h3>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{caption}"
    )
