"""Pins: what they fix, and what they say when they cannot."""

from __future__ import annotations

import re

import numpy as np
import pytest

import autopar
from autopar.cost.cluster import Cluster
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.planner.choose import make_plan
from autopar.solve.pins import Restriction, keep_parameters, pin, pins_of
from autopar.solve.shapes import Shape
from tests.solve.problems import session

UP = "blocks.*.1.weight"


def planned(*pins: Restriction, of: str = "mlp", layers: int = 1) -> Plan:
    plan, _ = make_plan(
        session(of, layers),
        [Shape(Mesh.parse("dp=2,tp=2"))],
        lambda m: Cluster(1, 4).with_mesh(m).profile,
        memory_limit_bytes=np.inf,
        restrictions=pins,
        optimizer="adamw",
        training=True,
    )
    return plan


@pytest.mark.parametrize(
    "word, held",
    [("column", "S0"), ("row", "S1"), ("replicated", "R"), ("zero1", "Z1"), ("zero3", "Z3"), ("S0", "S0")],
)
def test_words(word: str, held: str) -> None:
    plan = planned(pin(UP, tp=word))
    assert plan.parameter("blocks.0.1.weight").held[1] == held


def test_fused_weight_is_pinned_on_its_heads() -> None:
    plan = planned(pin("*.c_attn.weight", tp="S1.1"), of="gpt2")
    assert plan.parameter("transformer.h.0.attn.c_attn.weight").held[1] == "S1.1"


def test_several_axes_and_one_block_only() -> None:
    plan = planned(pin("blocks.1.1.weight", dp="zero3", tp="column"), layers=2)
    assert plan.parameter("blocks.1.1.weight").held == ("Z3", "S0")
    assert plan.parameter("blocks.0.1.weight").held != ("Z3", "S0")


def test_alias_names_a_tied_parameter() -> None:
    plan = planned(pin("lm_head.weight", tp="S0"), of="gpt2")
    assert plan.parameter("transformer.wte.weight").held[1] == "S0"


def test_op_is_pinned_by_its_node() -> None:
    free = planned()
    name = next(op.name for op in free.ops if op.op == "aten.layer_norm")
    rows = {op.name: op for op in planned(pin(name, dp="R", tp="R")).ops}
    assert rows[name].choices == ("R", "R")


def test_unknown_name_is_told_with_examples() -> None:
    with pytest.raises(PlanError, match=r"'bloks\.\*' matches no parameter and no op.*blocks\.0\.0\.weight"):
        planned(pin("bloks.*", tp="column"))


def test_impossible_pin_says_what_is_possible() -> None:
    with pytest.raises(PlanError) as caught:
        planned(pin("*.c_attn.weight", tp="S1"), of="gpt2")  # 3 of q, k, v
    text = str(caught.value)
    assert "factors (96) x (3)(4)(24)" in text
    assert "axis 'tp' of size 2" in text
    for legal in ("R", "S0", "S1.1", "Z1", "Z2", "Z3"):
        assert legal in text.rsplit(":", 1)[1]


def test_unknown_axis() -> None:
    with pytest.raises(MeshError, match="has no axis 'pp'"):
        planned(pin(UP, pp="column"))


def test_pin_of_nothing() -> None:
    with pytest.raises(PlanError, match="fixes nothing"):
        pin(UP)


@pytest.mark.parametrize("pattern, wanted", [(3, "column"), ("", "column"), (UP, None), (UP, ("column",))], ids=str)
def test_pin_of_what_is_no_text(pattern: object, wanted: object) -> None:
    with pytest.raises(PlanError, match=re.escape(f"pin({pattern!r}, tp={wanted!r}) takes text")):
        pin(pattern, tp=wanted)  # type: ignore[arg-type]


def test_pins_of_two_kinds_on_one_parameter_are_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot be 'row' on axis 'tp'.*what it can be there: S0"):
        planned(pin(UP, tp="column"), pin(UP, tp="row"))


def test_parameters_are_kept_for_another_plan() -> None:
    first = planned(pin(UP, dp="zero3", tp="column"))
    again = planned(keep_parameters(first))
    assert {p.name: p.held for p in again.parameters} == {p.name: p.held for p in first.parameters}


def test_constraints_are_pins() -> None:
    """One or several; what is a constraint of another kind says how it is given."""
    one = pin("*.weight", tp="column")
    assert pins_of(one) == pins_of([one]) == (one,)
    for wrong in (autopar.Manual(dp=2), [autopar.Manual(dp=2)], "tp=column"):
        with pytest.raises(PlanError, match=r"constraints are pins, such as .* is given as plan="):
            pins_of(wrong)  # type: ignore[arg-type]
