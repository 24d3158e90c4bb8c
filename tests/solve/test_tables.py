"""Tables that are worked out once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan import Pipeline
from autopar.schedule.held import moments_of
from autopar.schedule.lower import lower
from autopar.solve.shapes import plan_schedule
from autopar.solve.tables import held_by, table_of

PIPELINES = [Pipeline(2, 2, 4), Pipeline(2, 2, 8), Pipeline(2, 4, 4, "interleaved"), Pipeline(4, 4, 4, "zb-h1"), Pipeline(microbatches=3)]


@pytest.mark.parametrize("training", [True, False])
def test_they_are_those_of_the_schedule_wherever_its_axis_is(training: bool) -> None:
    for pipeline in PIPELINES:
        made = lower(plan_schedule(pipeline, training=training))
        assert table_of(pipeline, training) == made
        assert made.has_backward == training
        elsewhere = replace(pipeline, axis="stages", position=1, is_average=True)
        assert table_of(elsewhere, training) is table_of(pipeline, training)
        assert held_by(elsewhere, training) is held_by(pipeline, training)
        for found, counted in zip(held_by(pipeline, training), moments_of(made), strict=True):
            assert found.stages == counted.stages
            assert (found.counts == counted.counts).all()
