"""The look of plots on light and on dark pages, and how a figure becomes a PNG. Needs matplotlib (extra `report`).

Colours differ in lightness too and stay apart for colour-blind readers: blue is faster than plain decoding, orange
slower.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page.

    Attributes:
        slower, even, faster: ends and middle of the scale around plain decoding.
        lines: told apart by lightness and by mark.
    """

    ground: str
    ink: str
    faint: str
    slower: str
    even: str
    faster: str
    lines: tuple[str, ...]


THEMES = {
    "light": Theme(
        ground="#ffffff",
        ink="#1c2128",
        faint="#c9d1d9",
        slower="#a63603",
        even="#f7f7f5",
        faster="#08519c",
        lines=("#0b3c6f", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00"),
    ),
    "dark": Theme(
        ground="#14181d",
        ink="#e6edf3",
        faint="#3d4650",
        slower="#f5a04c",
        even="#2a3038",
        faster="#6cb6ff",
        lines=("#6cb6ff", "#f5a04c", "#3ddba4", "#f0a3cd", "#d8e6f3", "#e3d05b"),
    ),
}


def render(draw: Callable[[Theme], Figure], theme: Theme) -> bytes:
    """Return the PNG of what `draw` makes of a theme's colours."""
    import matplotlib

    style: Any = {
        "figure.facecolor": theme.ground,
        "axes.facecolor": theme.ground,
        "axes.edgecolor": theme.faint,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.handlelength": 3.2,
        "figure.constrained_layout.w_pad": 0.12,
        "figure.constrained_layout.h_pad": 0.08,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "text.parse_math": False,
        **{f"{name}.color": theme.ink for name in ("text", "xtick", "ytick")},
        **{f"axes.{name}color": theme.ink for name in ("label", "title")},
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's tables have the name
        figure, image = draw(theme), io.BytesIO()
        figure.savefig(image, format="png", dpi=DPI, facecolor=theme.ground)
    return image.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, which makes room for its labels by itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ink_on(colour: Sequence[float]) -> str:
    """Return black or white, whichever stands out more from a colour of red, green and blue in 0..1 (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#ffffff"
