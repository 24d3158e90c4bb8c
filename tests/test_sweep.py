"""Configurations that are enumerated, and their prices against planning each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

import autopar
from autopar.cost.cluster import Cluster
from autopar.mesh import Mesh
from autopar.planner.request import regrouped
from autopar.solve.fold import fold
from autopar.solve.follow import sequence_size
from autopar.solve.outline import Outline
from autopar.solve.search import Search
from autopar.solve.state import StateBytes
from autopar.solve.sweep import LONG, Left, Point, Space, _point, configurations, least_bytes
from autopar.sweep import Sweep
from tests import models
from tests.marks import exhaustive, few
from tests.solve.problems import machine, session


def test_every_configuration_divides_the_ranks_and_the_batch() -> None:
    found = configurations(Space(8, 16, most_tp=4, most_stages=4))
    assert len(set(found)) == len(found)
    for config in found:
        assert config.dp * config.tp * config.pp == 8
        assert max(config.tp, config.pp) <= 4
        config.shape(16).schedule(training=True)  # the schedule takes these numbers
    assert {(c.dp, c.tp, c.pp) for c in found} == {
        (8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4)
    }  # fmt: skip
    assert {c.schedule for c in found if c.pp == 2} == {"1f1b", "zb-h1", "interleaved:2"}
    assert {c.zero for c in found if c.pp == 1 and c.dp > 1} == {1, 3}
    assert {c.micro_batch for c in found if c.dp == 8} == {1, 2}


def test_sequences_and_experts_are_shared_where_there_are_any() -> None:
    left = Counter[Left]()
    found = configurations(Space(16, 32, most_tp=4, most_stages=4, sequence=64, experts=8), left)
    assert len(set(found)) == len(found)
    assert {c.cp for c in found} == {1, 2, 4}  # within a node, as sequences are short
    assert {c.ep for c in found} == {1, 2, 4, 8}
    for config in found:
        assert config.dp * config.tp * config.pp * config.cp == 16
        assert config.cp == 1 or (config.micro_batch == 1 and config.ep == 1 and config.cp * config.tp <= 4)
        assert config.ep in (1, 8) or config.ep == config.dp or config.ep * config.tp <= 4
        config.shape(32)
    assert left[Left.SAMPLES] > left[Left.BOTH] > 0
    plain = configurations(Space(16, 32, most_tp=4, most_stages=4))
    assert [c for c in found if c.cp * c.ep == 1] == plain
    long = configurations(Space(16, 32, most_tp=4, most_stages=4, sequence=8 * LONG))
    assert {c.cp for c in long if c.tp == 4} == {1, 2, 4}
    assert {c.cp for c in configurations(Space(16, 32, most_tp=4, most_stages=4, sequence=6)) if c.tp == 1} == {1, 2}


def test_which_models_have_sequences() -> None:
    sizes = {name: sequence_size(session(name, 1).normal) for name in ("gpt2", "mixture", "mlp", "vit")}
    assert sizes == {"gpt2": 16, "mixture": 8, "mlp": 1, "vit": 1}


@pytest.mark.slow
def test_experts_are_in_the_sweep_of_a_model_that_has_them() -> None:
    """Of tiny shapes, where any of them may be the fastest."""
    model, batch = models.mixture(layers=1, batch=2)
    sweep = autopar.sweep(model, Cluster(1, 2, "h100"), batch, outputs="loss")
    assert {(p.config.cp, p.config.ep) for p in sweep.fitting} == {(1, 1), (2, 1), (1, 2)}
    assert sweep.best is not None
    assert sweep.auto.prediction.step_time_s <= sweep.best.step_time_s
    assert "left out: 1 choice of degrees and micro-batch with the sequences of several samples shared" in str(sweep)


def test_a_batch_that_must_be_whole_is_no_reason_to_compare_nothing() -> None:
    """Each rank has its share of it at once, of any size."""
    found = configurations(Space(4, 12, most_tp=2, most_stages=3, is_split=False))
    assert {(c.dp, c.tp, c.pp, c.micro_batch) for c in found} == {(4, 1, 1, 3), (2, 2, 1, 6)}


EXAMPLE = models.speaker(layers=2)
CLUSTER = Cluster(1, 4, "h100")


@cache
def swept(memory_limit: float | None = None) -> Sweep:
    return autopar.sweep(EXAMPLE.model, CLUSTER, EXAMPLE.batch, outputs="loss", memory_limit=memory_limit)


@pytest.mark.slow
@pytest.mark.xdist_group("sweep")
def test_prices_are_those_of_plans_and_none_beats_the_automatic_one() -> None:
    sweep = swept()
    assert sweep.best is not None
    assert sweep.auto.prediction.step_time_s <= sweep.best.step_time_s * 1.005
    for point in (sweep.fitting[0], sweep.fitting[-1]):
        plan = autopar.plan(EXAMPLE.model, CLUSTER, EXAMPLE.batch, plan=point.config, outputs="loss")
        assert point.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.01)
        assert point.peak_memory_bytes == max(plan.prediction.peak_memory_bytes)
    steps = [point.step_time_s for point in sweep.fitting]
    assert steps == sorted(steps)
    for one, other in zip(sweep.pareto, sweep.pareto[1:], strict=False):
        assert one.step_time_s <= other.step_time_s
        assert one.peak_memory_bytes > other.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("deep", few(1, [True, False]))
def test_what_may_be_the_fastest_gets_shards_that_fit(deep: bool) -> None:
    """Of a little less memory than the fastest layout takes, if that would be the fastest of all until then. Only the mesh is that of the
    configuration: by hand there is one layout."""
    normal, config = session("llama", 12 if deep else 4).normal, autopar.Manual(tp=2)
    folded = fold(normal)
    assert (folded is not None) is deep

    def priced(limit_bytes: float, best_s: float = math.inf) -> Point:
        search = Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), limit_bytes)
        return _point(config, search, Outline(folded, search) if folded else None, 4, best_s)

    free = priced(math.inf)
    limit = 0.97 * free.peak_memory_bytes
    within, tried = priced(limit), priced(limit, free.step_time_s)
    assert within.fits
    assert within.peak_memory_bytes <= limit
    assert within.step_time_s > free.step_time_s
    assert (tried.fits, tried.step_time_s) == (False, free.step_time_s)
    assert not priced(0.5 * limit).fits


@exhaustive
@pytest.mark.slow
def test_what_does_not_fit_says_what_it_needs() -> None:
    free = swept()
    limit = sorted(point.peak_memory_bytes for point in free.fitting)[len(free.fitting) // 4]
    sweep = swept(limit)
    assert 0 < len(sweep.fitting) < len(free.fitting)
    for point in sweep.points:
        assert point.fits == (not point.reason)
        if not point.fits and not math.isnan(point.step_time_s):
            assert point.peak_memory_bytes > limit
            assert "the limit is" in point.reason


@pytest.mark.slow
@pytest.mark.xdist_group("sweep")
def test_the_table_says_how_many_are_faster() -> None:
    sweep = swept()
    slow = replace(sweep.auto, prediction=replace(sweep.auto.prediction, step_time_s=1e3))
    assert f"{len(sweep.fitting)} of them are predicted to be faster" in str(replace(sweep, auto=slow))
    fast = replace(sweep.auto, prediction=replace(sweep.auto.prediction, step_time_s=1e-9))
    assert "none is faster" in str(replace(sweep, auto=fast))


def test_state_alone_rules_configurations_out() -> None:
    """Parameters and gradients shared by tensor and pipeline parallelism, the state of the optimizer by data parallelism too (ZeRO-1)."""
    state = StateBytes(parameters=80.0, gradients=80.0, optimizer=160.0)
    assert least_bytes(state, autopar.Manual(dp=4)) == 320
    assert least_bytes(state, autopar.Manual(dp=4, zero=1)) == 80 + 80 + 40
    assert least_bytes(state, autopar.Manual(dp=4, zero=2)) == 80 + 20 + 40
    assert least_bytes(state, autopar.Manual(dp=2, tp=2, pp=2, zero=3)) == 320 / 8
    assert least_bytes(state, autopar.Manual(dp=4, ep=2, zero=1)) == 40 + 40 + 40  # all may be experts


def test_a_deep_model_is_also_split_within_nodes() -> None:
    """Eight devices of a node, of which stages may have four or two; a mesh of the user's own is left as it is."""
    meshes = regrouped(Cluster(4, 8, "h100"))
    assert [mesh.sizes for mesh in meshes] == [(8, 4), (16, 2), (32,)]
    assert regrouped(Cluster(4, 8, "h100").with_mesh(Mesh(("a",), (32,)))) == []
    assert regrouped(8) == []
    model, batch = models.speaker(layers=10, hidden=64, batch=16, device="meta")
    with patch.object(Outline, "search_shapes", autospec=True, side_effect=Outline.search_shapes) as search:
        autopar.plan(model, Cluster(2, 4, "h100"), batch, outputs="loss")
    tried = {shape.mesh.sizes[-1] for shape in search.call_args_list[0].args[1] if shape.pipeline.degree > 1}
    assert {2, 4} <= tried
