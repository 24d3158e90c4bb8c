"""What files with pictures are called, so that a wrong name is told before the work and not after it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from autopar.errors import PlanError

FIGURES = (".svg", ".png", ".pdf")
PAGES = (".html", ".htm", ".svg")


def check_ending(path: str | Path, endings: Sequence[str], what: str) -> None:
    """
    Raises:
        PlanError: the file has another kind's name.
    """
    if Path(path).suffix.lower() not in endings:
        named = " or ".join(ending for ending in endings if ending)
        raise PlanError(f"{path} would hold {what}; give it a name that ends in {named}")


def check_figure(path: str | Path) -> None:
    """
    Raises:
        PlanError: matplotlib, which draws it, is not installed, or has no such kind of file.
    """
    if find_spec("matplotlib") is None:
        raise PlanError("drawing needs matplotlib, which is not installed: pip install 'autopar[plot]'")
    check_ending(path, FIGURES, "a figure as SVG, PNG or PDF")


def check_page(path: str | Path) -> None:
    """
    Raises:
        PlanError: the file has another kind's name.
    """
    check_ending(path, ("", *PAGES), "a page as HTML, or a picture as SVG")
