"""Pins: what they fix, and what they say when they cannot."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost.machine import Cluster
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.session import make_plan
from autopar.solve.pins import Restriction, keep_parameters, pin
from tests.solve.problems import session

C_FC = "transformer.h.*.mlp.c_fc.weight"


def planned(*pins: Restriction, layers: int = 2) -> Plan:
    plan, _ = make_plan(
        session("gpt2", layers),
        [Mesh.parse("dp=2,tp=2")],
        lambda m: Cluster(1, 4).with_mesh(m).profile,
        memory_limit_bytes=np.inf,
        restrictions=pins,
        optimizer="adamw",
        training=True,
    )
    return plan


@pytest.mark.parametrize(
    "word, held",
    [("column", "S1"), ("row", "S0"), ("replicated", "R"), ("zero1", "Z1"), ("zero3", "Z3"), ("S0", "S0")],
)
def test_words(word: str, held: str) -> None:
    plan = planned(pin(C_FC, tp=word), layers=1)
    assert plan.parameter("transformer.h.0.mlp.c_fc.weight").held[1] == held


def test_fused_weight_is_pinned_on_its_heads() -> None:
    plan = planned(pin("*.c_attn.weight", tp="S1.1"), layers=1)
    assert plan.parameter("transformer.h.0.attn.c_attn.weight").held[1] == "S1.1"


def test_several_axes_and_one_block_only() -> None:
    plan = planned(pin("transformer.h.1.mlp.c_fc.weight", dp="zero3", tp="column"))
    assert plan.parameter("transformer.h.1.mlp.c_fc.weight").held == ("Z3", "S1")
    assert plan.parameter("transformer.h.0.mlp.c_fc.weight").held != ("Z3", "S1")


def test_alias_names_a_tied_parameter() -> None:
    plan = planned(pin("lm_head.weight", tp="S0"), layers=1)
    assert plan.parameter("transformer.wte.weight").held[1] == "S0"


def test_op_is_pinned_by_its_node() -> None:
    free = planned(layers=1)
    name = next(op.name for op in free.ops if op.op == "aten.gelu" or op.op == "aten.tanh")
    rows = {op.name: op for op in planned(pin(name, dp="R", tp="R"), layers=1).ops}
    assert rows[name].choices == ("R", "R")


def test_unknown_name_is_told_with_examples() -> None:
    with pytest.raises(PlanError, match=r"'transfomer\.\*' matches no parameter and no op.*transformer\.wte\.weight"):
        planned(pin("transfomer.*", tp="column"), layers=1)


def test_impossible_pin_says_what_is_possible() -> None:
    with pytest.raises(PlanError) as caught:
        planned(pin("*.c_attn.weight", tp="S1"), layers=1)  # 3 of q, k, v
    text = str(caught.value)
    assert "factors (96) x (3)(4)(24)" in text
    assert "axis 'tp' of size 2" in text
    for legal in ("R", "S0", "S1.1", "Z1", "Z2", "Z3"):
        assert legal in text.rsplit(":", 1)[1]


def test_unknown_axis() -> None:
    with pytest.raises(MeshError, match="has no axis 'pp'"):
        planned(pin(C_FC, pp="column"), layers=1)


def test_pin_of_nothing() -> None:
    with pytest.raises(PlanError, match="fixes nothing"):
        pin(C_FC)


def test_pins_of_two_kinds_on_one_parameter_are_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot be 'row' on axis 'tp'.*what it can be there: S1"):
        planned(pin(C_FC, tp="column"), pin(C_FC, tp="row"), layers=1)


def test_parameters_are_kept_for_another_plan() -> None:
    first = planned(pin(C_FC, dp="zero3", tp="column"), layers=1)
    again = planned(keep_parameters(first), layers=1)
    assert {p.name: p.held for p in again.parameters} == {p.name: p.held for p in first.parameters}
