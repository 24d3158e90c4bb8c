from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import autopar
from autopar.plan import CollectivePlan
from autopar.planner.document import Plan
from autopar.show.collectives import by_value
from autopar.show.compare import Row, plan_row
from autopar.show.page import TEMPLATE, compare_html, plan_html
from tests.show.plans import MIB, collectives, small_plan


def bound(blocks: int = 3) -> Plan:
    return Plan.of(small_plan(blocks))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/gzip\+base64" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


def test_the_page_holds_the_whole_plan() -> None:
    plan = bound()
    (shown,) = data_of(plan_html(plan))["plans"]
    assert [op["name"] for op in shown["ops"]] == [op.name for op in plan.ops]
    assert [p["held"] for p in shown["parameters"]] == [list(p.held) for p in plan.parameters]
    assert shown["timeline"]["events"][0] == [0, 0, "F", 0, 0, 0.0, 0.002]
    peak = max(sum(held) for _, *held in shown["timeline"]["memory"][0])
    assert abs(peak - plan.prediction.peak_memory_bytes[0]) < 5
    assert shown["gridText"] == "dp=2,tp=4 (8 ranks)"


def test_the_page_needs_no_network_and_nothing_of_a_plan_can_break_out_of_it() -> None:
    plan = bound()
    evil = replace(plan.ops[0], line="</script><script>alert(1)</script><!--")
    page = plan_html(Plan.of(replace(plan, model='<b>"x"</b>', ops=(evil, *plan.ops[1:]))))
    assert page.count("</script>") == TEMPLATE.read_text().count("</script>")
    assert "<title>&lt;b&gt;&quot;x&quot;&lt;/b&gt; on dp=2,tp=4</title>" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "%DATA%" not in page
    assert data_of(page)["plans"][0]["ops"][0]["line"] == evil.line


def test_the_licences_of_the_libraries_are_in_the_page() -> None:
    page = TEMPLATE.read_text()
    for name in ("preact", "htm", "@dagrejs/dagre", "@dagrejs/graphlib"):
        assert re.search(rf"^{name} [\d.]+ \((MIT|Apache-2.0)\)$", page, re.MULTILINE)


def test_collectives_of_equal_blocks_are_shared_out() -> None:
    plan = bound(3)
    own = by_value(plan)
    assert [c.count for c in own["h.2.attn.c_attn.weight"]] == [1, 1]
    assert sum(c.count for row in own.values() for c in row) == sum(c.count for c in plan.collectives)
    odd = CollectivePlan("all_gather", "dp", "forward", "h.0.ln.bias", "", MIB, 1e-5, 4)
    assert by_value(replace(plan, collectives=(*collectives(3), odd)))["h.0.ln.bias"] == [odd]


def test_what_is_explained_stands_with_its_op() -> None:
    shown = data_of(plan_html(bound(), {"mm_1": "because"}))["plans"][0]
    assert [op.get("why") for op in shown["ops"]] == [None, None, None, "because", None, None, None]


def test_rows_of_a_comparison_open_their_plans(tmp_path: Path) -> None:
    rows = [Row("none", False, "no rank is left", None, None, 0), plan_row("auto", bound()), plan_row("dp2", bound(1))]
    autopar.draw(rows, tmp_path / "rows.html")
    data = data_of((tmp_path / "rows.html").read_text())
    assert compare_html(rows) == (tmp_path / "rows.html").read_text()
    assert [row["plan"] for row in data["rows"]] == [None, 0, 1]
    assert [plan["name"] for plan in data["plans"]] == ["auto", "dp2"]
    assert data["rows"][0]["reason"] == "no rank is left"
    assert data["rows"][1]["step_time_s"] == rows[1].step_time_s


def test_a_notebook_shows_the_page() -> None:
    shown = bound()._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert '"' not in shown.split('srcdoc="', 1)[1].split('" style=', 1)[0]
