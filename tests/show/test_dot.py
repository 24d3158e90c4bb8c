from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autopar.plan import Pipeline
from autopar.planner.document import Plan
from autopar.show.dot import block_of, plan_dot
from tests.show.plans import small_plan


def test_the_picture(golden: Callable[[str, str], None]) -> None:
    golden("show/plan_dot", plan_dot(small_plan(2)))


def test_the_title_has_the_grid_of_all_ranks() -> None:
    staged = replace(small_plan(2), pipeline=Pipeline(degree=2, stages=2, microbatches=4))
    assert "TinyGPT on mesh pp=2,dp=2,tp=4: " in plan_dot(staged)


def test_names_are_written_as_they_are(tmp_path: Path) -> None:
    """Graphviz reads UTF-8, and knows no escapes of JSON."""
    plan = replace(Plan.of(small_plan(1)), model="\u65e5\u672c\u8a9e")
    assert '"\u65e5\u672c\u8a9e on mesh ' in plan.to_dot(tmp_path / "plan.dot")
    assert "\u65e5\u672c\u8a9e".encode() in (tmp_path / "plan.dot").read_bytes()


def test_blocks() -> None:
    assert block_of("transformer.h.3.attn.c_attn") == "transformer.h.3"
    assert block_of("transformer.wte") == "transformer"
    assert block_of("") == ""


def test_every_edge_joins_two_nodes() -> None:
    text = plan_dot(small_plan(3))
    nodes = set(re.findall(r'^ *"([^"]+)" \[', text, re.MULTILINE))
    edges = re.findall(r'^ *"([^"]+)" -> "([^"]+)";', text, re.MULTILINE)
    assert len(edges) == 2 + 3 * 3
    assert {end for edge in edges for end in edge} <= nodes


def test_quotes_and_braces_of_source_lines_are_escaped() -> None:
    plan = small_plan(1)
    op = replace(plan.ops[0], line='model.py:3 x = f"{a}\\n"')
    text = plan_dot(replace(plan, ops=(op,)))
    assert r'x = f\"{a}\\n\"' in text
    assert text.count("{") - 1 == text.count("}") - 1
