"""Stages of a decision: of the cuts that may be the fastest, that which is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.solve import stager
from autopar.solve.cuts import cuts
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from autopar.solve.staged import Staged
from tests.solve.problems import machine, session

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]


@cache
def search(link_bandwidth: float, sharing: float = 1.0) -> Search:
    """For a model of six equal blocks."""
    normal, alone = session("llama", 6).normal, machine(1, link_bandwidth=link_bandwidth)
    profile = replace(alone, device=replace(alone.device, sharing=sharing))
    return Search(lambda _: normal, lambda grid: replace(profile, links=profile.links * len(grid.sizes)), float("inf"))


def staged_by_cut(found: Search, shape: Shape, levels: Sequence[str]) -> list[Staged]:
    """All cuts of `cuts`, played."""
    made = found._stager(shape, found.free(shape), levels)
    return [made.staged(stage_of) for stage_of in cuts(made._costs, shape, made.places)]


@pytest.mark.parametrize("level", ["none", "full"])
def test_the_cut_of_the_shortest_step_is_taken(level: str) -> None:
    """Where messages are slow that is not the most even one."""
    found, gained = search(1e8), []
    for schedule, chunks in SCHEDULES:
        shape, levels = Shape(Mesh.of(1), Pipeline(2, 2 * chunks, 4, schedule)), (level,) * 2 * chunks
        every = staged_by_cut(found, shape, levels)
        fastest = found._stage(shape, found.free(shape), levels)
        assert fastest.step_time_s == min(other.step_time_s for other in every)
        gained.append(every[0].step_time_s / fastest.step_time_s)
    assert max(gained) > 1.005


@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
def test_ranks_that_share_cores_take_the_fastest_of_cuts_that_are_even_enough(schedule: str, chunks: int) -> None:
    found, shape, levels = search(1e8, 2.0), Shape(Mesh.of(1), Pipeline(2, 2 * chunks, 4, schedule)), ("none",) * 2 * chunks
    every = staged_by_cut(found, shape, levels)
    longest_s = [max(sum(price.forward_s + price.backward_s for price in cut.prices[rank::2]) for rank in range(2)) for cut in every]
    even = [cut.step_time_s for cut, taken_s in zip(every, longest_s, strict=True) if taken_s <= 1.1 * min(longest_s)]
    assert len(even) < len(every)
    assert found._stage(shape, found.free(shape), levels).step_time_s == min(even)


@pytest.mark.parametrize("sharing, gain, is_taken", [(1.0, 0.01, True), (2.0, 0.05, False), (2.0, 0.15, True)])
def test_ranks_that_share_cores_take_others_that_are_much_faster(
    monkeypatch: pytest.MonkeyPatch, sharing: float, gain: float, is_taken: bool
) -> None:
    shape = Shape(Mesh.of(1), Pipeline(2, 2, 4, "1f1b"))
    made = search(1e8, sharing)._stager(shape, search(1e8, sharing).free(shape), ("none", "none"))
    even, *_, uneven = cuts(made._costs, shape, made.places)
    monkeypatch.setattr(stager, "step_times_s", lambda *args: [1.0, 1 - gain])
    scores_s = made._scores_s([even, uneven])
    assert (scores_s[1] < scores_s[0]) == is_taken


@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
@pytest.mark.parametrize("link_bandwidth", [1e7, 1e8, 1e9])
def test_no_cut_between_blocks_is_faster(schedule: str, chunks: int, link_bandwidth: float) -> None:
    """Hardly any where ranks have several stages: these need not be even, if the ranks are, and cuts that are even come first."""
    found = search(link_bandwidth)
    shape = Shape(Mesh.of(1), Pipeline(2, 2 * chunks, 4, schedule))
    fastest = found.decide(shape)
    places = combinations([f"model.layers.{i}" for i in range(1, 6)], 2 * chunks - 1)
    by_hand = [found.decide(replace(shape, cuts=names)) for names in places]
    assert fastest.step_time_s <= min(other.step_time_s for other in by_hand) * (1 + (1e-9 if chunks == 1 else 0.02))


def test_stages_that_compute_more_again_begin_where_they_did() -> None:
    """So that what is let off of it is of stages that stay."""
    shape = Shape(Mesh.of(1), Pipeline(2, 2, 4, "1f1b"))
    free = search(1e8).unlimited(shape)
    found = replace(search(1e8), memory_limit_bytes=0.9 * max(free.rank_bytes))
    saved = found._saving(free, found.limit(shape))
    assert saved is not None
    assert set(saved.levels) != {"none"}
    assert saved.stage_of == free.stage_of


def test_stages_that_do_not_fit_begin_where_they_do() -> None:
    """The first of them keeps three micro-batches, the last of them one."""
    shape = Shape(Mesh.of(1), Pipeline(3, 3, 4, "1f1b"), recompute="none")
    free = search(1e9).unlimited(shape)
    found = replace(search(1e9), memory_limit_bytes=0.95 * max(free.rank_bytes))
    fitting = found.decide(shape)
    assert fitting.fits(found.limit(shape))
    assert fitting.stage_of != free.stage_of
    assert fitting.step_time_s > free.step_time_s


def test_of_stages_that_are_even_enough_those_are_leanest_that_are_least_over_the_limit() -> None:
    shape = Shape(Mesh.of(1), Pipeline(3, 3, 4, "1f1b"))
    free = search(1e9).unlimited(shape)
    found = replace(search(1e9), memory_limit_bytes=0.9 * max(free.rank_bytes))
    made = found._stager(shape, free.decision, ("none",) * 3)
    every = [made.staged(stage_of) for stage_of in cuts(made._costs, shape, made.places)]
    longest_s = [made._longest_s(cut.prices) for cut in every]
    limit = found.limit(shape).most
    over = [sum(max(0.0, num_bytes - limit) for num_bytes in cut.rank_bytes) for cut in every]
    even = [num_bytes for num_bytes, taken_s in zip(over, longest_s, strict=True) if taken_s <= 1.1 * min(longest_s)]
    assert sum(max(0.0, num_bytes - limit) for num_bytes in made.leanest().rank_bytes) == min(even) < max(even)
    assert found.decide(shape).step_time_s <= found._saving(made.leanest(), found.limit(shape)).step_time_s  # type: ignore[union-attr]


def test_an_estimate_of_memory_that_is_too_low_is_raised() -> None:
    """A tenth below what the ops take; where it is far above that, no cut is left."""
    shape = Shape(Mesh.of(1), Pipeline(3, 3, 4, "1f1b"))
    free = search(1e9).unlimited(shape)
    found = replace(search(1e9), memory_limit_bytes=0.95 * max(free.rank_bytes))
    made, limit = found._stager(shape, free.decision, ("none",) * 3), found.limit(shape)
    taken = [0.9 * part for part in free.taken(limit, keeps=True)]
    assert not made.fastest(taken).fits(limit)
    assert (fitting := made.within(taken)) is not None
    assert fitting.fits(limit)
    assert made.within([4 * part for part in free.taken(limit, keeps=True)]) is None


def test_a_cut_that_was_solved_for_is_kept_where_the_fastest_does_not_fit() -> None:
    """The larger a limit, the more plans fit."""
    normal, profile = session("gpt2", 4).normal, machine(1, link_bandwidth=1e8)
    shape = Shape(Mesh.of(2), Pipeline(3, 3, 4, "1f1b"))
    found = Search(lambda _: normal, lambda grid: replace(profile, links=profile.links * len(grid.sizes)), 1_539_932)
    staged = found.decide(shape)
    assert staged.fits(found.limit(shape))
