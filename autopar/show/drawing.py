"""A picture as SVG, for papers: boxes, lines and words, in colours that colour-blind readers tell apart (Okabe and Ito, 2008)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

PALETTE = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#d55e00")
INK, MUTED, GRID, BUBBLE, PAGE = "#1b2430", "#5d6877", "#e6e9ee", "#e3e6ea", "#ffffff"
LETTER = 0.52
"""Width of a letter, at most in the mean, over the size of its font."""
TOLD = 3.0
"""Width of a box from which on it has a tip."""
_HATCH = (
    '<defs><pattern id="waits" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="4" height="4" fill="#ffffff"/><rect width="1.2" height="4" fill="#b33c00"/></pattern></defs>'
)
WAITS = "url(#waits)"


class Drawing:
    """Things are drawn one over the other; lengths are in pixels, from the upper left corner."""

    def __init__(self, width: float, title: str) -> None:
        self.width, self.height = width, 0.0
        self._title = title
        self._body: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1.0, tip: str = "") -> None:
        shade = f' fill-opacity="{opacity:.2g}"' if opacity < 1 else ""
        end = f"><title>{escape(tip)}</title></rect>" if tip and width > TOLD else "/>"
        self._body.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:g}" fill="{fill}"{shade}{end}')
        self.height = max(self.height, y + height)

    def line(self, points: Sequence[tuple[float, float]], *, stroke: str = GRID, width: float = 1.0, dash: str = "") -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._body.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}/>')

    def area(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self._body.append(f'<polygon points="{" ".join(f"{x:.2f},{y:.2f}" for x, y in points)}" fill="{fill}"/>')

    def dot(self, x: float, y: float, fill: str, *, tip: str = "", stroke: str = "none") -> None:
        ring = f'fill="{fill}" stroke="{stroke}" stroke-width="2"'
        self._body.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="5" {ring}><title>{escape(tip)}</title></circle>')

    def text(self, x: float, y: float, text: str, *, size: float = 11, fill: str = INK, anchor: str = "start", bold: bool = False) -> None:
        """``y`` is the base line."""
        weight = ' font-weight="600"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._body.append(f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" fill="{fill}"{place}{weight}>{escape(text)}</text>')
        self.height = max(self.height, y + size / 3)

    def keys(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """A legend of (colour, words), in as many lines as it takes."""
        start = x
        for fill, words in entries:
            length = 18 + LETTER * 11 * len(words) + 12
            if x + length > self.width and x > start:
                x, y = start, y + 18
            self.box(x, y, 11, 11, fill)
            self.text(x + 16, y + 10, words, fill=MUTED)
            x += length

    def __str__(self) -> str:
        size = f'width="{self.width:g}" height="{self.height + 8:g}" viewBox="0 0 {self.width:g} {self.height + 8:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" role="img">'
        page = f'<rect width="100%" height="100%" fill="{PAGE}"/>'
        return "\n".join([head, f"<title>{escape(self._title)}</title>", _HATCH, page, *self._body, "</svg>"]) + "\n"


def ticks(end: float, count: int = 6, base: float = 10.0) -> Iterator[float]:
    """Round numbers from 0 to ``end``, about as many; of ``base`` 2 powers of two apart."""
    rough = end / count
    if rough <= 0:
        return
    if base == 2.0:
        step = 2.0 ** ceil(log10(rough) / log10(2.0))
    else:
        power = 10.0 ** floor(log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    at = 0
    while at * step <= end * (1 + 1e-9):
        yield at * step
        at += 1
