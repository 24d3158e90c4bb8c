"""Why nothing fits: the closest shape, the state of the model, and the pins that are to blame, checked by planning without each of them."""

from __future__ import annotations

import pytest

from autopar import api
from autopar.cost.updates import FOREACH_COPIES, UPDATE_COPIES
from autopar.errors import InfeasibleError
from autopar.planner.document import Plan
from autopar.solve import shortage
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, pin
from autopar.units import bytes_text
from tests import models
from tests.solve.problems import machine

pytestmark = pytest.mark.slow

KIB = 2**10
UP, DOWN = "blocks.0.1.weight", "blocks.0.3.weight"
MLP = models.mlp(layers=1, hidden=64, intermediate=256, batch=16)
"""Of each of its two weights a rank that has it whole holds 256 KiB, with gradient and state."""


@pytest.fixture(autouse=True)
def _no_copies_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two weights, what AdamW takes to update one would be most of the memory."""
    for copies in (UPDATE_COPIES, FOREACH_COPIES):
        monkeypatch.setitem(copies, "adamw", 0)



def plan(*pins: Pin, limit: float | None, by: Manual | None = None) -> Plan:
    return api.plan(MLP.model, "dp=2,tp=1", MLP.batch, constraints=pins, plan=by, memory_limit=limit, pipeline=False)


def whole(name: str) -> Pin:
    return pin(name, dp="replicated")


def shortage_of(*pins: Pin, limit: float, by: Manual | None = None) -> InfeasibleError:
    """The error, after a check that what is to blame does not fit, and does without any one of its members or without the limit."""
    with pytest.raises(InfeasibleError) as caught:
        plan(*pins, limit=limit, by=by)
    members = caught.value.members
    guilty = [p for p in pins if f"pin {p}" in members]
    manual = by if str(by) in members else None
    assert len(members) == len(guilty) + (manual is not None) > 0
    with pytest.raises(InfeasibleError):
        plan(*guilty, limit=limit, by=manual)
    for spared in guilty:
        assert max(plan(*(p for p in guilty if p is not spared), limit=limit, by=manual).prediction.peak_memory_bytes) <= 1.001 * limit
    if manual is not None:
        plan(*guilty, limit=limit)
    plan(*guilty, limit=None, by=manual)
    return caught.value


def test_one_pin_and_the_limit() -> None:
    error = shortage_of(whole("blocks.*.0.weight"), whole("blocks.*"), limit=500 * KIB)
    assert error.members == ("pin blocks.*:dp=replicated",)
    text = str(error)
    assert error.least_bytes is not None
    assert f"these cannot hold together: {error.members[0]}, memory limit 500 KiB; the least with them is " in text
    assert f"the least with them is {bytes_text(error.least_bytes)} per rank" in text
    assert f"without {error.members[0]} a plan of " in text
    assert "parameters, gradients and optimizer state alone need 260 KiB per rank, evenly over 2 ranks" in text


def test_two_pins_and_the_limit() -> None:
    """Either weight may be whole, but not both."""
    error = shortage_of(whole(UP), whole("blocks.0.0.weight"), whole(DOWN), limit=480 * KIB)
    assert error.members == (f"pin {UP}:dp=replicated", f"pin {DOWN}:dp=replicated")


def test_a_configuration_and_the_limit() -> None:
    error = shortage_of(whole(DOWN), limit=500 * KIB, by=Manual(dp=2))
    assert error.members == ("Manual(dp=2, tp=1, zero=0)",)


def test_pins_are_not_to_blame_for_what_never_fits() -> None:
    with pytest.raises(InfeasibleError, match=r"without pin .* nothing fits either; the least without them is 2\d\d KiB") as caught:
        plan(whole(UP), limit=262 * KIB)
    assert caught.value.members == ()
    with pytest.raises(InfeasibleError) as caught:  # the state alone is more
        plan(whole(UP), limit=200 * KIB)
    assert "without" not in str(caught.value)
    assert caught.value.state_bytes == pytest.approx(260 * KIB, rel=1e-2)
    assert caught.value.limit_bytes == 200 * KIB


def test_the_closest_shape_is_told_and_its_least_fits() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(limit=262 * KIB)
    least = caught.value.least_bytes
    assert least is not None
    assert f"needs {bytes_text(least)}" in str(caught.value)
    assert max(plan(limit=1.02 * least).prediction.peak_memory_bytes) <= 1.021 * least


def test_what_was_not_found_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "MAX_SEARCHES", 1)
    with pytest.raises(InfeasibleError, match="stopped after 1 sets of pins") as caught:
        plan(whole(UP), whole(DOWN), limit=480 * KIB)
    assert len(caught.value.members) == 2


def test_a_profile_of_the_grid_with_stages_prices_what_fits_without_them() -> None:
    """Without the configuration there is one axis less than the profile has links: the ranks are regrouped."""
    with pytest.raises(InfeasibleError, match=r"without Manual\(dp=2, .*a plan of .* per rank fits"):
        api.plan(MLP.model, 4, MLP.batch, plan=Manual(pp=2, dp=2), memory_limit="200KiB", profile=machine(3))


def test_stages_of_one_rank_say_that_they_share_its_limit() -> None:
    example = models.gpt2(layers=4, batch=8)
    config = Manual(pp=2, schedule="interleaved:2", microbatches=2)
    free = api.plan(example.model, 2, example.batch, plan=config)
    limit = 0.9 * max(free.prediction.peak_memory_bytes)
    with pytest.raises(InfeasibleError, match="each of the 2 stages of a rank has an even part of its limit") as caught:
        api.plan(example.model, 2, example.batch, plan=config, memory_limit=limit)
    assert caught.value.limit_bytes == limit
