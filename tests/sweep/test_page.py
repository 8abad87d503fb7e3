"""The report's page holds every figure, needs nothing else, and lets no text of a prompt file become HTML."""

from __future__ import annotations

import base64
import json
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sweep.example import example_result
from typer.testing import CliRunner

from selfspec_tune.cli import app
from selfspec_tune.errors import UserError
from selfspec_tune.sweep import page
from selfspec_tune.sweep.plot import Plot

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)> & co'
VOID = {"meta", "img", "source", "br", "link"}


class Outline(HTMLParser):
    """Collects tags, text by innermost tag, and what is not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return example_result(domain=HOSTILE)


@pytest.fixture(scope="module")
def report(result: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report") / "new"
    page.check_report(directory)
    written = page.write_report(result, directory)
    assert sorted(written) == sorted(directory.iterdir())  # and no temporary file is left
    return directory


@pytest.fixture(scope="module")
def text(report: Path) -> str:
    return (report / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plots(report: Path) -> list[Plot]:
    names = [path.stem.removesuffix("-dark") for path in report.glob("*-dark.png")]
    themes = {"light": "", "dark": "-dark"}
    return [Plot(n, n, {t: (report / f"{n}{end}.png").read_bytes() for t, end in themes.items()}) for n in names]


def test_the_data_is_beside_the_page(report: Path, result: dict[str, Any]) -> None:
    assert json.loads((report / "sweep.json").read_text(encoding="utf-8")) == result
    assert len(list(report.glob("*.png"))) == 14


def test_tags_are_balanced_and_nothing_is_fetched(text: str) -> None:
    outline = Outline(text)
    assert outline.wrong == [] and outline.open == []
    assert re.findall(r"https?:|//\w+\.\w|@import|url\(", text) == []
    links = [attrs[name] for _, attrs in outline.tags for name in ("src", "srcset", "href") if name in attrs]
    assert [link for link in links if not str(link).startswith("data:image/png;base64,")] == ["sweep.json"]
    assert "script" not in {tag for tag, _ in outline.tags}


def test_every_plot_is_in_the_page_for_light_and_dark(text: str, report: Path) -> None:
    tags = [(tag, attrs) for tag, attrs in Outline(text).tags if tag in ("source", "img")]
    sources = {str(attrs["srcset"]) for tag, attrs in tags if tag == "source"}
    images = {str(attrs["src"]) for tag, attrs in tags if tag == "img"}
    assert all(attrs["media"] == "(prefers-color-scheme: dark)" for tag, attrs in tags if tag == "source")
    assert all(attrs["alt"] for tag, attrs in tags if tag == "img")
    for path in report.glob("*.png"):
        link = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        assert link in (sources if path.stem.endswith("-dark") else images)


def test_hostile_names_stay_text(text: str) -> None:
    assert HOSTILE in unescape(text) and HOSTILE not in text
    assert "<script" not in text and "<img src=x" not in text


def figures(result: dict[str, Any]) -> set[str]:
    """Return every figure of a result that a reader must find, as it is written."""
    found = {f"{cell[score]:.3f}" for cell in result["cells"] for score in ("speedup_model", "speedup_predicted")}
    for exit_layer, alpha in result["alpha_by_exit"].items():
        low, high = result["alpha_intervals"][exit_layer]
        found.add(f"{alpha:.3f} ({low:.3f}–{high:.3f})")
    for exit_layer in range(1, result["num_layers"]):
        cells = [cell for cell in result["cells"] if cell["exit_layer"] == exit_layer]
        best = max(cells, key=lambda cell: cell["speedup_predicted"])
        low, high = best["interval"]
        found.add(f"{best['speedup_predicted']:.2f} ({low:.2f}–{high:.2f})")
        found |= {f"{best[name]:.2f}" for name in ("cost_ratio", "verify_ratio", "tokens_per_round")}
    found |= {"never" if row["needed"] is None else f"{row['needed']:.3f}" for row in result["alpha_needed"]}
    for row in result["costs"]:
        found |= {f"{1000 * row['plain_seconds']:.1f} ms", f"{row['plain_spread']:.1%}", str(row["context_length"])}
        found |= {f"{row['overhead_ratio']:.3f}", f"{row['composed_over_measured']:.3f}"}
    for row in result["by_context"]:
        found |= {f"up to {row['max_context']}", f"{row['speedup_predicted']:.2f}"}
    for row in result["by_domain"]:
        found |= {row["domain"], str(row["num_tokens"]), f"{row['alpha']:.3f}", f"{row['tokens_per_round']:.2f}"}
        found |= {f"{row['speedup_best']:.2f}", f"{row['speedup_shared']:.2f}", f"{row['loss']:.1%}"}
        found.add(f"{row['best']}, k={row['num_draft_tokens']}")
    for row in result["candidates"]:
        found |= {row["label"], f"{row['tokens_per_step']:.2f}", f"{row['cost_per_step']:.2f}"}
        found |= {f"{row['speedup_predicted']:.2f}", f"{row['speedup_model']:.2f}"}
    for row in result["confirmed"]:
        found |= {f"×{row['speedup']:.2f} ±{row['spread'] / 2:.0%}", f"×{row['low']:.2f}", f"{row['spread']:.1%}"}
        found |= {f"{row['drafted_share']:.1%}", str(row["num_tokens"])}
    found |= {f"{label}: {reason}" for label, reason in result["skipped"].items()}
    on, of = result["artifact"]["measured_on"], result["artifact"]["eval_set"]
    found |= {str(value) for value in (*on.values(), *of.values()) if value is not None and value != 0.0}
    found |= {f"{result['plain_tokens_per_second']:.1f} tokens/s", result["model"], result["path"]}
    found |= {f"{result['profile_seconds']:.1f} s", f"{result['generate_seconds']:.1f} s", result["artifact"]["reason"]}
    return found | set(result["warnings"])


def test_every_figure_is_in_the_page(text: str, result: dict[str, Any], plots: list[Plot]) -> None:
    off = example_result(pays=False)
    for shown, of in ((text, result), (page.page(off, plots), off)):
        words = unescape(re.sub(r"<[^>]*>", "\n", shown))
        assert sorted(figure for figure in figures(of) if figure not in words) == []


def test_a_page_about_no_says_so_first(plots: list[Plot]) -> None:
    off = example_result(pays=False)
    shown = page.page(off, plots)
    assert '<p class="verdict no">No, ' in shown
    assert "selfspec train --model models/example-30" in shown
    # What it would take is not folded away where it does not pay.
    assert shown.index("The α you would need at each exit") < shown.index("<details>")
    assert page.page(example_result(), plots).index("<details>") < shown.index("The α you would need at each exit")


def test_approximate_figures_are_called_so(plots: list[Plot], text: str) -> None:
    shown = page.page(example_result() | {"approximate": True, "source": "reference"}, plots)
    assert "Approximate: " in shown and shown.count("(approximate)") >= 4
    assert "pproximate" not in text


def test_without_domains_there_is_no_such_section(plots: list[Plot]) -> None:
    shown = page.page(example_result() | {"by_domain": []}, plots)
    assert "By domain" not in shown and "By context" in shown


def test_missing_matplotlib_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = [
        "sweep-exit",
        "no-model",
        "--prompts",
        str(tmp_path / "none.jsonl"),
        "--report",
        str(tmp_path / "report"),
    ]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UserError)
    assert done.exception.command == "pip install 'selfspec[report]'"
    assert not (tmp_path / "report").exists()


def test_a_file_is_no_directory_for_a_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="no directory"):
            page.check_report(path)
