"""Pictures as SVG: they are well-formed, and have what is to be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from stat import S_IXUSR
from xml.etree import ElementTree

import pytest

import autopar
from autopar.errors import PlanError
from autopar.planner.document import Plan
from autopar.show.compare import plan_row
from autopar.show.drawing import ticks
from autopar.show.pictures import memory_svg, rows_svg, timeline_svg
from tests.show.plans import small_plan
from tests.show.test_timeline import WAYS, planned

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def boxes(picture: str) -> list[tuple[float, float]]:
    """(left, right) of every box within the page."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [(float(b.get("x", 0)), float(b.get("x", 0)) + float(b.get("width", 0))) for b in found if b.get("x")]


@pytest.mark.parametrize("name", WAYS)
def test_a_timeline_has_its_ranks_and_actions_and_stays_on_the_page(name: str) -> None:
    plan = planned(name)
    picture = timeline_svg(plan)
    shown = texts(picture)
    ranks = [text for text in shown if text.startswith("pipeline rank ")]
    assert ranks == ([f"pipeline rank {i}" for i in range(plan.pipeline.degree)] if plan.pipeline.degree > 1 else [])
    assert any("F0" in text or "I0" in text for text in shown)  # of those for whose names there is room
    width = float(ElementTree.fromstring(picture).get("width", 0))
    assert all(0 <= left <= right <= width + 1 for left, right in boxes(picture))


def test_memory_has_a_panel_for_each_rank() -> None:
    shown = texts(memory_svg(planned("1f1b")))
    assert shown.count("pipeline rank 0") == shown.count("pipeline rank 1") == 1
    assert {"parameters", "activations"} <= {*shown}


def test_names_cannot_break_out_of_a_picture() -> None:
    plan = replace(planned("plain"), model="<b>&", machine='"x"<')
    assert any(text.startswith("<b>& on") for text in texts(timeline_svg(plan)))
    assert texts(memory_svg(plan))


def test_views(tmp_path: Path) -> None:
    plan = planned("plain")
    plan.to_svg(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == timeline_svg(plan)
    plan.to_svg(tmp_path / "a.svg", view="memory")
    assert (tmp_path / "a.svg").read_text() == memory_svg(plan)
    with pytest.raises(PlanError, match="view 'cluster' is none of timeline, memory, graph"):
        plan.to_svg(tmp_path / "a.svg", view="cluster")
    with pytest.raises(PlanError, match=r"a\.png would hold SVG"):
        plan.to_svg(tmp_path / "a.png")


def test_the_graph_is_drawn_by_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, dot = Plan.of(small_plan(1)), tmp_path / "dot"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlanError, match="`dot` of Graphviz, which is not installed"):
        plan.to_svg(tmp_path / "g.svg", view="graph")
    dot.write_text("#!/bin/sh\nwhile read -r line; do echo \"$1 $line\"; done\n")
    dot.chmod(dot.stat().st_mode | S_IXUSR)
    plan.to_svg(tmp_path / "g.svg", view="graph")
    assert (tmp_path / "g.svg").read_text().startswith("-Tsvg digraph plan {")
    dot.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    with pytest.raises(PlanError, match="exit status 3: no memory"):
        plan.to_svg(tmp_path / "g.svg", view="graph")


def test_a_comparison_as_a_picture(tmp_path: Path) -> None:
    rows = [plan_row("auto", planned("plain")), plan_row("zero3", planned("zero3"))]
    autopar.draw(rows, tmp_path / "rows.svg")
    assert (tmp_path / "rows.svg").read_text() == rows_svg(rows)
    assert {"auto", "zero3"} <= {*texts(rows_svg(rows))}
    autopar.draw(rows, tmp_path / "rows.SVG")
    assert (tmp_path / "rows.SVG").read_text() == rows_svg(rows)
    with pytest.raises(PlanError, match=r"r\.png would hold a page as HTML, or a picture as SVG; give it a name that ends in \.html"):
        autopar.draw(rows, tmp_path / "r.png")
    assert not (tmp_path / "r.png").exists()


def test_ticks_are_round() -> None:
    assert [*ticks(0.45)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert [*ticks(5 * 2**30, 5, base=2.0)] == [i * 2**30 for i in range(6)]
    assert [*ticks(0.0)] == []
