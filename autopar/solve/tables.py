"""What follows from the table of a pipeline alone, worked out once for all decisions that are played by it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from autopar.plan import Pipeline
from autopar.schedule.actions import Schedule
from autopar.schedule.held import RankMoments, moments_of
from autopar.schedule.lower import lower
from autopar.solve.shapes import plan_schedule

MAX_TABLES = 32
"""How many are kept. A table of 64 stages and 512 micro-batches takes 40 MB, most take a thousandth of that."""


def table_of(pipeline: Pipeline, training: bool) -> Schedule:
    """The actions of its ranks, with communication; errors are those of `make_schedule`."""
    return _table(_apart_from_mesh(pipeline), training)


def held_by(pipeline: Pipeline, training: bool) -> tuple[RankMoments, ...]:
    """What each of its ranks holds when."""
    return _held(_apart_from_mesh(pipeline), training)


def _apart_from_mesh(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, axis="pp", position=0, is_average=False)


@lru_cache(MAX_TABLES)
def _table(pipeline: Pipeline, training: bool) -> Schedule:
    return lower(plan_schedule(pipeline, training=training))


@lru_cache(MAX_TABLES)
def _held(pipeline: Pipeline, training: bool) -> tuple[RankMoments, ...]:
    return moments_of(_table(pipeline, training))
