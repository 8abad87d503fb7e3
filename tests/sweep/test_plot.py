"""The plots are there in both themes, nothing is cut at their edges, and they show the figures they should."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
import pytest
from PIL import Image
from sweep.example import example_result

from selfspec_tune.sweep import plot
from selfspec_tune.sweep.plot import THEMES, Plot

# Broken mathematics, were it read as such; and longer than an axis has room for.
HOSTILE = "$\\frac{1}$ <script>alert(1)</script> and a name that does not come to an end at all, [bold]\x1b[31m"
NAMES = ["alpha", "heat-textbook", "heat-predicted", "costs", "context", "domains", "drafters"]


@pytest.fixture(scope="module")
def plots() -> dict[str, Plot]:
    return {one.name: one for one in plot.draw_plots(example_result(domain=HOSTILE))}


def test_every_plot_is_drawn(plots: dict[str, Plot]) -> None:
    assert list(plots) == NAMES
    assert all(one.alt and set(one.png) == set(THEMES) for one in plots.values())


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_neither_blank_nor_cut(plots: dict[str, Plot], name: str, theme: str) -> None:
    image = Image.open(io.BytesIO(plots[name].png[theme]))
    image.load()
    assert image.format == "PNG" and min(image.size) > 300
    picture = image.convert("RGB")
    ground = tuple(int(THEMES[theme].ground[at : at + 2], 16) for at in (1, 3, 5))
    colours = {colour: count for count, colour in picture.getcolors(maxcolors=1 << 24)}  # type: ignore[union-attr]
    drawn = 1 - colours[ground] / (picture.width * picture.height)
    assert len(colours) > 50 and drawn > 0.02
    edge = 3
    for box in (
        (0, 0, picture.width, edge),
        (0, picture.height - edge, picture.width, picture.height),
        (0, 0, edge, picture.height),
        (picture.width - edge, 0, picture.width, picture.height),
    ):
        assert picture.crop(box).getcolors() == [((box[2] - box[0]) * (box[3] - box[1]), ground)], box


def test_what_has_no_data_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "render", lambda *_: b"")  # what is drawn is looked at above
    result = example_result() | {"by_domain": [], "by_context": []}
    assert [one.name for one in plot.draw_plots(result)] == [n for n in NAMES if n not in ("context", "domains")]


def contrast(one: Any, other: Any) -> float:
    """Return the ratio of luminances after WCAG 2, 1 to 21."""

    def luminance(colour: Any) -> float:
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(colour)
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_heat_maps_share_a_scale_around_one_and_can_be_read(theme: str) -> None:
    result = example_result()
    for score in plot.SCORES:
        axes = plot.heat_map(result, THEMES[theme], score, 0.5).axes[0]
        image = axes.images[0]
        assert image.get_clim() == (0.5, 1.5)
        shown = {text.get_position(): text for text in axes.texts}
        assert len(shown) == len(result["cells"])
        for cell in result["cells"]:
            text = shown[(cell["num_draft_tokens"] - 1, cell["exit_layer"] - 1)]
            assert text.get_text() == f"{cell[score]:.2f}"
            assert contrast(text.get_color(), image.cmap(image.norm(cell[score]))) >= 4.5
        (frame,) = axes.patches
        inside = [cell for cell in result["cells"] if 9 <= cell["exit_layer"] <= 24]
        best = max(inside, key=lambda cell: cell[score])
        assert frame.get_xy() == (best["num_draft_tokens"] - 1.5, best["exit_layer"] - 1.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_lines_and_text_stand_out_from_the_ground(theme: plot.Theme) -> None:
    assert contrast(theme.ink, theme.ground) >= 7
    for colour in (*theme.lines[:4], theme.slower, theme.faster):
        assert contrast(colour, theme.ground) >= 2.5


def test_acceptance_is_drawn_with_interval_window_and_what_is_needed() -> None:
    result = example_result()
    axes = plot.alpha_by_depth(result, THEMES["light"]).axes[0]
    there, needed = axes.lines
    assert list(there.get_ydata()) == list(result["alpha_by_exit"].values())
    assert list(needed.get_ydata()) == [row["needed"] for row in result["alpha_needed"] if row["needed"] is not None]
    assert 0 < len(needed.get_ydata()) < 29
    (window,) = axes.patches
    assert (window.get_x(), window.get_x() + window.get_width()) == (8.5, 24.5)  # type: ignore[attr-defined]
    low, high = result["alpha_intervals"]["10"]
    points = {tuple(point) for point in axes.collections[0].get_paths()[0].vertices.tolist()}  # type: ignore[union-attr]
    assert {(10.0, low), (10.0, high)} <= points


def test_costs_have_a_line_for_each_context_and_batch() -> None:
    result = example_result()
    panels = plot.cost_curves(result, THEMES["dark"]).axes
    assert [panel.get_title(loc="left") or panel.get_title() for panel in panels] == [
        "c, to draft a token",
        "v, to check k = 1",
        "v, to check k = 3",
        "v, to check k = 8",
    ]
    drawn = [list(line.get_ydata()) for line in panels[3].lines[:-1]]
    assert drawn == [[values[7] for values in row["verify_ratio"].values()] for row in result["costs"]]
    assert len(panels[0].lines) == len(result["costs"]) + 1
    ratios = {"cost_ratio": {"1": 0.3, "2": 0.4}, "verify_ratio": {"1": [1.1], "2": [1.2]}}
    one = result | {"costs": [result["costs"][0] | ratios]}
    one["cells"] = [cell for cell in one["cells"] if cell["num_draft_tokens"] == 1]
    assert [panel.get_visible() for panel in plot.cost_curves(one, THEMES["dark"]).axes] == [True, True, False, False]
