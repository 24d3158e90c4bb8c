"""The smallest set of pins that is to blame, on cases whose set is known; each is checked by planning without each of its members."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import api
from autopar.errors import ConflictError, PlanError
from autopar.planner.document import Plan
from autopar.solve import conflict
from autopar.solve.conflict import find_conflict
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, pin
from tests import models
from tests.passes.test_microbatch import Remembered, batch

pytestmark = pytest.mark.slow

UP, DOWN = "blocks.0.1.weight", "blocks.0.3.weight"
MLP = models.mlp(layers=1)


def plan(*pins: Pin, by: Manual | None = None) -> Plan:
    return api.plan(MLP.model, "dp=2,tp=2", MLP.batch, constraints=pins, plan=by, pipeline=False)


def conflict_of(*pins: Pin, by: Manual | None = None) -> tuple[tuple[str, ...], str]:
    """Members of the conflict, and its text, after a check that none of them can be spared."""
    with pytest.raises(ConflictError) as caught:
        plan(*pins, by=by)
    members = caught.value.members
    guilty = [p for p in pins if f"pin {p}" in members]
    manual = by if str(by) in members else None
    assert len(members) == len(guilty) + (manual is not None)
    with pytest.raises(ConflictError):
        plan(*guilty, by=manual)
    for spared in guilty:
        plan(*(p for p in guilty if p is not spared), by=manual)
    if manual is not None:
        plan(*guilty)
    return members, str(caught.value)


def test_two_pins_of_one_parameter() -> None:
    members, text = conflict_of(pin("blocks.*.1.weight", tp="column"), pin(UP, tp="row"))
    assert members == ("pin blocks.*.1.weight:tp=column", f"pin {UP}:tp=row")
    assert text.startswith(f"these cannot hold together on mesh (dp=2,tp=2): {members[0]}, {members[1]}; ")
    assert "cannot be 'row' on axis 'tp' of size 2; what it can be there: S0" in text


def test_of_three_pins_two_are_to_blame() -> None:
    members, _ = conflict_of(pin("blocks.*.1.weight", tp="column"), pin(DOWN, dp="zero3"), pin(UP, tp="row"))
    assert members == ("pin blocks.*.1.weight:tp=column", f"pin {UP}:tp=row")


def linear() -> str:
    """The node of the first linear, which reads `UP`."""
    return next(op.name for op in plan().ops if UP in op.inputs)


def test_pins_of_a_parameter_and_of_the_op_that_reads_it() -> None:
    """Each leaves something, but there is no way from one to the other."""
    op = linear()
    members, text = conflict_of(pin(DOWN, dp="replicated"), pin(op, tp="R"), pin(UP, tp="S0"))
    assert members == (f"pin {op}:tp=R", f"pin {UP}:tp=S0")
    assert f"no way from what is fixed by one to what another wants: {UP} has no way to aten.linear.default at " in text
    assert text.endswith(" on axis tp. Take one of them away")


def test_a_pin_and_a_configuration() -> None:
    members, text = conflict_of(pin(UP, dp="zero3"), pin(DOWN, tp="row"), by=Manual(dp=2, tp=2))
    assert members == (f"pin {UP}:dp=zero3", "Manual(dp=2, tp=2, zero=0)")
    assert f"leave no way for {UP}" in text


def test_a_configuration_alone_names_what_has_no_way() -> None:
    """A parameter that has a row for each sample cannot be stored in shards and be cut with the batch."""
    config = Manual(dp=2, zero=1)
    with pytest.raises(ConflictError) as caught:
        api.plan(Remembered(), 2, batch(), plan=config)
    assert caught.value.members == (str(config),)
    text = str(caught.value)
    assert text.startswith(f"this cannot hold on mesh (dp=2,tp=1): {config}; what it fixes for one op does not go with what it fixes")
    assert ": own has no way to aten.add.Tensor at test_microbatch.py:" in text
    assert text.endswith(" on axis dp. Change it")


def test_a_pin_that_is_impossible_by_itself_says_so() -> None:
    with pytest.raises(PlanError, match=r"cannot be 'S5' on axis 'tp' of size 2; what it can be there: R, S0, S1") as caught:
        plan(pin(UP, tp="column"), pin(UP, tp="S5"))
    assert not isinstance(caught.value, ConflictError)


def test_a_pin_of_nothing_among_others_says_so() -> None:
    with pytest.raises(PlanError, match=r"'bloks' matches no parameter and no op"):
        plan(pin(UP, tp="column"), pin(UP, tp="row"), pin("bloks", tp="row"))


def test_stopping_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflict, "MAX_TRIALS", 0)
    with pytest.raises(ConflictError, match="stopped after 0 trials: not all of them may be needed"):
        plan(pin(UP, tp="column"), pin(UP, tp="row"))


@given(st.sets(st.frozensets(st.integers(0, 6), min_size=1), min_size=1, max_size=4))
def test_filter_finds_an_irreducible_set(wrong: set[frozenset[int]]) -> None:
    """Whatever goes against each other, and however often."""

    def can_hold(some: Sequence[int]) -> bool:
        return not any(bad <= set(some) for bad in wrong)

    found = find_conflict(range(7), can_hold)
    assert found.is_proved
    assert frozenset(found.members) in wrong
    assert not any(bad < set(found.members) for bad in wrong)


def test_filter_keeps_what_is_not_found_out() -> None:
    found = find_conflict("abc", lambda some: None if "b" not in some else "a" not in some or "c" not in some)
    assert found.members == ("a", "b", "c")
    assert not found.is_proved
