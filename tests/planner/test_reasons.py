from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import autopar
from autopar.errors import PlanError
from autopar.planner.document import Plan
from autopar.planner.reasons import find_reasons
from tests import models
from tests.show.test_page import data_of


@cache
def planned() -> Plan:
    model, batch = models.gpt2(layers=2, hidden=64, heads=4, vocab=128, sequence=32, batch=16, device="meta")
    return autopar.plan(model, autopar.Cluster(1, 4, "a100-80gb"), batch, outputs="loss")


def test_every_parameter_and_op_has_a_reason_that_equal_blocks_share() -> None:
    plan = planned()
    assert plan.decision is not None
    found = find_reasons(plan.decision)
    assert {*found.of} >= {p.name for p in plan.parameters} | {op.name for op in plan.ops}
    assert found.of["transformer.h.1.attn.c_attn.weight"] == "transformer.h.0.attn.c_attn.weight"
    assert {*found.of.values()} == {*found.reasons}
    reason = found.reasons["transformer.h.0.attn.c_attn.weight"]
    assert "parameter" in reason.formula
    ratios = [ratio for _, ratio in reason.alternatives]
    assert ratios == sorted(ratios)
    assert reason.chosen not in [layout for layout, _ in reason.alternatives]


def test_with_all_else_as_it_is_no_alternative_is_better_than_with_all_solved_again() -> None:
    plan, name = planned(), "transformer.h.0.mlp.c_fc.weight"
    assert plan.decision is not None
    solved = {match[1].strip(): float(match[2]) for match in re.finditer(r"^  (.{32}).* ([\d.]+)x", plan.explain(name), re.MULTILINE)}
    alternatives = dict(find_reasons(plan.decision).reasons[name].alternatives)
    assert solved.keys() & alternatives.keys()
    for layout, ratio in alternatives.items():
        assert ratio >= solved.get(layout, 0.0) * (1 - 1e-2)


def test_the_page_of_a_plan_made_here_has_reasons_and_that_of_a_loaded_one_says_none(tmp_path: Path) -> None:
    planned().to_html(tmp_path / "plan.html", explain="transformer.wte.weight")
    shown = data_of((tmp_path / "plan.html").read_text())["plans"][0]
    assert set(shown["reasons"]["of"]) >= {op["name"] for op in shown["ops"]}
    assert "why" in next(p for p in shown["parameters"] if p["name"] == "transformer.wte.weight")
    Plan.from_json(planned().to_json()).to_html(tmp_path / "plan.html")
    assert data_of((tmp_path / "plan.html").read_text())["plans"][0]["reasons"] is None
    with pytest.raises(PlanError, match="no parameter or op 'nothing'"):
        planned().to_html(tmp_path / "plan.html", explain=["nothing"])


def test_all_are_explained_once_for_equal_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def explain(plan: Plan, name: str) -> str:
        asked.append(name)
        return f"because {name}"

    monkeypatch.setattr(Plan, "explain", explain)
    planned().to_html(tmp_path / "plan.html", explain="all")
    shown = data_of((tmp_path / "plan.html").read_text())["plans"][0]
    assert all("why" in entry for entry in (*shown["ops"], *shown["parameters"]))
    assert len(asked) == len(set(asked)) < len(shown["ops"])
    assert json.dumps(shown).count("because transformer.h.0.mlp.c_fc.weight") == 2
