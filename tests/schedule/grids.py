"""Schedules of small pipelines, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.schedule.actions import Schedule
from autopar.schedule.tables import SCHEDULES, forward_only, make_schedule


@st.composite
def schedules(draw: st.DrawFn, *, degrees: int = 6, microbatches: int = 20) -> Schedule:
    """Any schedule of up to so many ranks with up to 4 stages each and so many micro-batches, computation only."""
    name = draw(st.sampled_from([*SCHEDULES, "forward"]))
    degree = draw(st.integers(1, degrees))
    per_rank = 1 if name in ("1f1b", "zb-h1") else draw(st.integers(2 if name == "interleaved" else 1, 4))
    count = draw(st.integers(1, microbatches))
    if name == "forward":
        return forward_only(degree, degree * per_rank, count)
    return make_schedule(name, degree=degree, stages=degree * per_rank, microbatches=count)
