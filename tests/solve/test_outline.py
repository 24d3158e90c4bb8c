"""Sketches against the whole model, solved, cut and played."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import cast

import pytest

import autopar
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.simulate import StagePrice, simulate
from autopar.errors import InfeasibleError, PlanError
from autopar.graph import operands_of, value_spec
from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.planner.choose import _take_best, _try_deeply
from autopar.planner.question import answer, ask
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from autopar.schedule.check import peak_live_by_rank
from autopar.solve.bound import Bound
from autopar.solve.decide import Decision
from autopar.solve.fold import KEPT, fold
from autopar.solve.liveness import Staging
from autopar.solve.outline import Outline, _stage_of
from autopar.solve.parts import (
    TIMES,
    Amounts,
    Layout,
    PartBytes,
    Parts,
    Sketch,
    _even,
    _price,
    lay,
    least_shared_s,
    longest_rank_s,
    played,
)
from autopar.solve.places import USABLE_MEMORY, MemoryLimit
from autopar.solve.recompute import num_whole
from autopar.solve.search import Search
from autopar.solve.shapes import Shape, pipelined
from tests import models
from tests.marks import exhaustive, few
from tests.solve.problems import machine, session

pytestmark = pytest.mark.slow

LAYERS = 12


def machine_of(grid: Mesh) -> MachineProfile:
    return machine(len(grid.sizes))


def mixed(grid: Mesh) -> MachineProfile:
    """The first half of the ranks compute half as fast, and as fast as the others where anything is moved."""
    fast, half = machine_of(grid), grid.num_ranks // 2
    slow = replace(fast.device, name="slow", matmul=tuple(s._replace(flops_per_s=s.flops_per_s / 2) for s in fast.device.matmul))
    return MachineProfile.mixed([(half, replace(fast, device=slow)), (grid.num_ranks - half, fast)])


def searches(limit_bytes: float | None = float("inf"), prices: Callable[[Mesh], MachineProfile] = machine_of) -> tuple[Search, Outline]:
    normal = session("llama", LAYERS).normal
    search = Search(lambda _: normal, prices, limit_bytes)
    folded = fold(normal)
    assert folded is not None
    return search, Outline(folded, search)


SHAPES = [
    Shape(Mesh(("a",), (2,)), Pipeline(2, 2, 2, "1f1b")),
    Shape(Mesh(("a",), (2,)), Pipeline(3, 3, 4, "zb-h1")),
    Shape(Mesh(("a",), (2,)), Pipeline(2, 4, 4, "interleaved")),
    Shape(Mesh(("a",), (4,)), Pipeline(4, 4, 4, "1f1b")),
    Shape(Mesh(("a", "b"), (2, 2))),
]


@cache
def bound_of(shape: Shape) -> Sketch:
    _, outline = searches()
    return outline.play(outline.layout(shape))


@pytest.mark.parametrize("shape", few(1, SHAPES), ids=str)
def test_a_sketch_takes_what_the_whole_takes(shape: Shape) -> None:
    search, _ = searches()
    whole, sketch = search.decide(shape), bound_of(shape)
    assert sketch.step_time_s == pytest.approx(whole.step_time_s, rel=0.03)
    assert sketch.rank_bytes == pytest.approx(whole.rank_bytes, rel=0.15)  # the whole is also cut within blocks


@pytest.mark.parametrize("shape", few(1, [SHAPES[2], SHAPES[0]]), ids=str)
def test_both_know_what_it_takes_to_launch_a_step(shape: Shape) -> None:
    """Three ops for each of the model, for every micro-batch, and updates."""

    def slow_hosts(grid: Mesh) -> MachineProfile:
        return replace(machine_of(grid), device=replace(machine_of(grid).device, dispatch_s=1.0, update_dispatch_s=10.0))

    search, outline = searches(prices=slow_hosts)
    whole, sketch = search.decide(shape), outline.play(outline.layout(shape))
    stages = [[node for node, at in whole.stage_of.items() if at % 2 == rank] for rank in range(2)]
    read = [{value for node in nodes for value in operands_of(node) if value.node.op == "placeholder"} for nodes in stages]
    names = [[value for value in values if value_spec(value).requires_grad] for values in read]
    launched = [3 * shape.pipeline.microbatches * len(nodes) + 10 * len(held) for nodes, held in zip(stages, names, strict=True)]
    assert whole.step_time_s == max(launched)
    assert sketch.step_time_s == pytest.approx(whole.step_time_s, rel=0.03)


@pytest.mark.parametrize("level", few(1, ["full", "selective"]))
def test_a_sketch_knows_what_backwards_in_two_parts_hold(level: str) -> None:
    """Also of what is computed again: in the first stage all is left of it, which has nothing to do for a stage before."""
    shape = replace(SHAPES[1], recompute=level)
    search, outline = searches()
    whole, sketch = search.decide(shape), outline.play(outline.layout(shape))
    assert sketch.rank_bytes == pytest.approx(whole.rank_bytes, rel=0.03)


@pytest.mark.parametrize("shape", few(2, [SHAPES[2], SHAPES[4], SHAPES[0]]), ids=str)
def test_a_sketch_knows_stages_some_of_whose_blocks_are_computed_again(shape: Shape) -> None:
    """Half of the blocks of every rank, with two stages of three on it two and one; both ends of the model may have a part more."""
    shape = replace(shape, recompute="full:1/2")
    search, outline = searches()
    whole, sketch = search.decide(shape), outline.play(outline.layout(shape))
    assert sketch.step_time_s == pytest.approx(whole.step_time_s, rel=0.03)
    assert sketch.rank_bytes == pytest.approx(whole.rank_bytes, rel=0.15)
    blocks = Counter(stage for stage, _ in {(whole.stage_of[node], block) for node, block in whole.blocks.items()})
    made = {(whole.stage_of[node], whole.blocks[node]) for node, level in whole.again.items() if level == "full"}
    expected = {stage: num_whole(Fraction(1, 2), count, stage // shape.pipeline.degree) for stage, count in blocks.items()}
    assert Counter(stage for stage, _ in made) == expected


@pytest.mark.parametrize("shape", few(1, SHAPES[:3]), ids=str)
def test_stages_on_faster_devices_get_more(shape: Shape) -> None:
    """Of a whole model and of its sketch alike. No stage waits much, in less time than if all devices were slow."""
    search, outline = searches(prices=mixed)
    whole, layout = search.decide(shape), outline.layout(shape)
    sketch = outline.play(layout)
    assert sketch.step_time_s == pytest.approx(whole.step_time_s, rel=0.1)  # blocks are many for two stages, few for four
    assert layout.floor_s <= sketch.step_time_s
    assert outline.least_step_time_s(shape) <= sketch.step_time_s
    degree = shape.pipeline.degree
    slow, fast = ([node for node, stage in whole.stage_of.items() if (stage % degree >= (degree + 1) // 2) is at] for at in (False, True))
    assert len(fast) > 1.2 * len(slow) * (degree // 2) / ((degree + 1) // 2)
    all_slow, _ = searches(prices=lambda grid: mixed(grid).of_kinds((0,)))
    assert whole.step_time_s < 0.9 * all_slow.decide(shape).step_time_s  # whose products alone take longer


def test_what_does_not_fit_with_the_fewest_in_flight_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shapes that differ in the schedule alone, and hold more micro-batches the more stages a rank has, two are asked for, if any; that
    no other fits is so by itself, too."""
    search, outline = searches(0.2 * max(bound_of(SHAPES[0]).rank_bytes))
    solve_under, asked = Outline._solve_under, list[object]()

    def noted(self: Outline, shape: Shape, live: tuple[float, float], level: str, limit: MemoryLimit) -> Decision | InfeasibleError:
        asked.append((shape.grid, shape.pipeline.microbatches, shape.pipeline.position, level))
        return solve_under(self, shape, live, level, limit)

    monkeypatch.setattr(Outline, "_solve_under", noted)
    kinds = [(2, "1f1b"), (2, "zb-h1"), (4, "interleaved"), (6, "interleaved"), (8, "interleaved")]
    shapes = [Shape(Mesh(("a",), (2,)), Pipeline(2, stages, 4, schedule)) for stages, schedule in kinds]
    assert not outline.search_shapes(shapes)
    assert len({outline._live_of(shape) for shape in shapes}) > 3
    assert sorted(Counter(asked).values()) == [2, 2]
    assert len(search.tried) == len(shapes)
    for shape in shapes:
        with pytest.raises(InfeasibleError):
            searches(search.memory_limit_bytes)[1].sketch(shape)


@exhaustive
def test_what_does_not_fit_with_many_in_flight_is_asked_of_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many do not fit, so the fewest are asked for at once: these do not either, and those between need not be asked for; or they do, under
    a limit between what both need."""
    kinds = ((2, "1f1b"), (4, "interleaved"), (2, "gpipe"))
    few_live, between, many = (Shape(Mesh(("a",), (2,)), Pipeline(2, stages, 4, schedule)) for stages, schedule in kinds)
    solve_under, asked = Outline._solve_under, list[tuple[float, float]]()

    def noted(self: Outline, shape: Shape, live: tuple[float, float], level: str, limit: MemoryLimit) -> Decision | InfeasibleError:
        asked.append(live)
        return solve_under(self, shape, live, level, limit)

    monkeypatch.setattr(Outline, "_solve_under", noted)
    most, ends = max(bound_of(few_live).rank_bytes), set[bool]()
    for part in (0.2, 0.5, 0.8, 1.1):
        outline = searches(part * most)[1]
        limit, lives = outline.search.limit(many), [outline._live_of(shape) for shape in (few_live, between, many)]
        assert lives[0] < lives[1] < lives[2]
        for shape in (few_live, between, many):
            outline._note_live(shape)
        asked.clear()
        with pytest.raises(InfeasibleError):
            outline._decide_under(many, "none", limit)
        assert asked == [lives[2], lives[0]]
        fits = isinstance(outline._under_limit[_stage_of(many), "none"][lives[0]], Decision)
        with nullcontext() if fits else pytest.raises(InfeasibleError):
            outline._decide_under(few_live, "none", limit)
        with suppress(InfeasibleError):
            outline._decide_under(between, "none", limit)
        assert asked[2:] == ([lives[1]] if fits else [])
        ends.add(fits)
    assert ends == {True, False}


def test_stages_with_less_memory_get_fewer_blocks() -> None:
    """Of a sketch and of the whole, whose devices are as fast."""
    shape = SHAPES[0]
    most = max(bound_of(shape).rank_bytes)
    sizes = [int(part * most / USABLE_MEMORY) for part in (0.6, 2.0)]

    def halves(grid: Mesh) -> MachineProfile:
        alike = machine_of(grid)
        kinds = [replace(alike, device=replace(alike.device, memory_bytes=size)) for size in sizes]
        return MachineProfile.mixed([(grid.num_ranks // 2, kind) for kind in kinds])

    search, outline = searches(None, halves)
    layout = outline.layout(shape)
    assert layout.fits(search.limit(shape))
    assert layout.stages[0]["compute_s"] < 0.7 * layout.stages[1]["compute_s"]
    search.take(shape, layout.levels, layout.decision)
    assert search.best is not None
    assert search.best.fits(search.limit(shape))
    assert outline.play(layout).step_time_s == pytest.approx(search.best.step_time_s, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", few(1, SHAPES), ids=str)
def test_within_a_limit_of_memory(shape: Shape) -> None:
    """With less than it needs without, more is computed again, or sharded otherwise. The whole model then fits into 2 % more, by which a
    sketch may be wrong, and takes no longer. Computing again saves less where backwards are in two parts."""
    limit = (0.95 if shape.pipeline.schedule == "zb-h1" else 0.86) * max(bound_of(shape).rank_bytes)
    _, outline = searches(limit)
    sketch = outline.sketch(shape)
    assert max(sketch.rank_bytes) <= limit * 1.001
    assert sketch.step_time_s >= bound_of(shape).step_time_s * 0.999
    search, _ = searches(1.02 * limit)
    search.take(sketch.shape, sketch.levels, sketch.decision)
    assert search.best is not None
    assert search.best.fits(search.limit(shape))
    assert search.best.step_time_s <= sketch.step_time_s * 1.02


def test_a_limit_that_nothing_fits() -> None:
    search, outline = searches(1e3)
    assert outline.search_shapes(SHAPES[:1]) == []
    assert all(alternative.reason for alternative in search.tried)


@pytest.mark.slow
def test_the_search_finds_what_solving_every_shape_whole_finds() -> None:
    shapes = [*pipelined([Mesh(("a", "b"), (2, 4))], 4, per_rank=(1,)), Shape(Mesh(("a", "b"), (2, 4)))]
    search, outline = searches()
    found = outline.search_shapes(shapes)[0]
    best_s = float("inf")
    for shape in shapes:
        try:
            best_s = min(best_s, search.decide(shape).step_time_s)
        except PlanError:
            continue
    assert found.step_time_s == pytest.approx(best_s, rel=0.02)
    assert search.pruned.total() + len(search.tried) == len(shapes)


def test_more_stages_than_blocks_are_left_out() -> None:
    search, outline = searches()
    assert outline.search_shapes([Shape(Mesh(("a",), (2,)), Pipeline(16, 16, 16, "1f1b"))]) == []
    assert search.pruned == {Bound.STAGES: 1}


def test_stages_of_a_rank_share_its_memory() -> None:
    """Interleaved, two stages a rank: a limit between the fullest stage and the fullest rank is one to heed."""
    search, _ = searches()
    shape = SHAPES[2]
    whole = search.decide(shape)
    fullest_stage = max(use.total for use in whole.memory)
    assert max(whole.rank_bytes) > 1.3 * fullest_stage
    assert sum(whole.rank_bytes) <= sum(use.total for use in whole.memory)
    limit = 0.95 * max(whole.rank_bytes)
    assert limit > fullest_stage
    assert max(whole.rank_bytes) > limit
    assert max(searches(limit)[0].decide(shape).rank_bytes) <= limit * 1.001


def test_where_the_fastest_is_no_plan_after_all_the_next_is_made_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit may be one that the sketch just fits, and the whole does not."""
    search, outline = searches()
    take, tried = Search.take, []

    def take_second(self: Search, shape: Shape, levels: Sequence[str], like: Decision) -> None:
        tried.append(shape)
        if len(tried) == 1:
            raise InfeasibleError("does not fit")
        take(self, shape, levels, like)

    monkeypatch.setattr(Search, "take", take_second)
    assert _try_deeply(search, outline.folded, [Shape(Mesh(("a",), (4,)))], (), 4)
    assert len(tried) == 2
    assert search.best is not None
    assert search.best.shape == tried[1]


def test_what_is_made_whole_is_told_so_among_what_was_tried() -> None:
    search, outline = searches()
    sketches = outline.search_shapes(SHAPES[:2])
    before = {alternative.shape: alternative for alternative in search.tried}
    _take_best(search, sketches[:1], LAYERS)
    assert search.best is not None
    after = {alternative.shape: alternative for alternative in search.tried}
    taken = str(search.best.shape)
    assert len(after) == len(search.tried) == len(before)
    assert (after[taken].step_time_s, after[taken].bubble_fraction) == (search.best.step_time_s, search.best.bubble_fraction)
    assert after[taken].peak_memory_bytes == int(max(search.best.rank_bytes)) != before[taken].peak_memory_bytes
    assert {shape: after[shape] for shape in after if shape != taken} == {shape: before[shape] for shape in before if shape != taken}


@pytest.mark.parametrize("stages, step_s, is_taken", [(8, 1.01, True), (4, 1.01, False), (8, 1.03, False)])
def test_one_that_is_cut_within_blocks_may_be_faster_than_its_sketch(
    monkeypatch: pytest.MonkeyPatch, stages: int, step_s: float, is_taken: bool
) -> None:
    search, _ = searches()
    sketch, best = bound_of(SHAPES[0]), search.decide(SHAPES[0])
    tried = []

    def take(self: Search, shape: Shape, levels: Sequence[str], like: Decision) -> None:
        tried.append(shape)
        self.best = replace(best, step_time_s=1.0)

    monkeypatch.setattr(Search, "take", take)
    shapes = [SHAPES[0], *[Shape(Mesh(("a",), (2,)), Pipeline(2, stages, 8, "interleaved"))] * 2]
    sketches = [replace(sketch, shape=shape, step_time_s=own_s) for shape, own_s in zip(shapes, (1.0, step_s, step_s), strict=True)]
    _take_best(search, sketches, LAYERS)
    assert tried == shapes[: 1 + is_taken]


def test_stages_of_the_whole_that_do_not_fit_compute_more_again() -> None:
    """The whole may be cut otherwise than its sketch, so that another stage is the fullest."""
    search, outline = searches()
    bound = outline.sketch(SHAPES[0])
    assert set(bound.levels) == {"none"}
    limit = 0.8 * max(search.decide(SHAPES[0]).rank_bytes)
    search.memory_limit_bytes = limit
    search.take(bound.shape, bound.levels, bound.decision)
    assert search.best is not None
    assert search.best.fits(search.limit(SHAPES[0]))
    assert set(search.best.levels) != {"none"}


def test_what_does_not_fit_after_all_leaves_no_plan() -> None:
    search, outline = searches()
    bound = outline.sketch(SHAPES[0])
    search.memory_limit_bytes = 1e4
    with pytest.raises(InfeasibleError):
        search.take(bound.shape, bound.levels, bound.decision)
    assert search.best is None


def test_what_was_decided_for_a_few_blocks_is_not_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    search, outline = searches()
    bound = outline.sketch(SHAPES[0])
    monkeypatch.setattr("autopar.solve.decide.Solving", lambda *args, **kwargs: pytest.fail("solved again"))
    search.take(bound.shape, bound.levels, bound.decision)
    assert search.best is not None


def test_programs_are_made_while_others_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is the same every time, and as one after the other; nothing that was begun goes on when the search is over."""
    begun, found, begin = list[Shape](), list[dict[str, float]](), Search.begin

    def counted(search: Search, shape: Shape) -> None:
        begun.append(shape)
        begin(search, shape)

    for is_ahead in (True, True, False):
        monkeypatch.setattr(Search, "begin", counted if is_ahead else lambda *_: None)
        _, outline = searches()
        found.append({str(sketch.shape): sketch.step_time_s for sketch in outline.search_shapes(SHAPES)})
        assert not outline._few._begun
    assert found[0] == found[1] == pytest.approx(found[2], rel=1e-6)
    assert len(begun) > 1


def test_what_was_too_slow_is_not_tried_on_slower_links() -> None:
    """Stages that lie on the inner axis leave the outer one, over the network, to shards: no faster than the other way round. A complete
    search tries them."""
    shapes = pipelined([Mesh(("node", "gpu"), (4, 4))], 4, per_rank=(1, 2))
    cluster, best = autopar.Cluster(4, 4, "h100", inter="ib-100"), list[str]()
    for is_bound in (True, False):
        search, outline = searches(prices=lambda grid: cluster.with_mesh(grid).profile)
        search.is_complete = not is_bound
        best.append(str(outline.search_shapes(shapes)[0].shape))
        assert (search.pruned[Bound.LINKS] > 0) is is_bound
    assert best[0] == best[1]


def test_slower_links_bound_nothing_and_neither_does_what_was_fast() -> None:
    """Of the same stages with the same micro-batches alone."""
    cluster = autopar.Cluster(4, 4, "h100", inter="ib-100")
    _, outline = searches(prices=lambda grid: cluster.with_mesh(grid).profile)
    outer, inner = (Shape(Mesh((name,), (4,)), Pipeline(4, 4, 4, "1f1b", position=at)) for name, at in (("gpu", 0), ("node", 1)))
    more = replace(inner, pipeline=replace(inner.pipeline, microbatches=8))
    assert not outline._is_slower_elsewhere(inner, 1.0)
    outline._note_floor(outer, 2.0)  # its shards lie within nodes
    assert outline._is_slower_elsewhere(inner, 2.0)
    assert not outline._is_slower_elsewhere(inner, 2.1)
    assert not outline._is_slower_elsewhere(more, 1.0)
    outline._floors.clear()
    outline._note_floor(inner, 2.0)
    assert not outline._is_slower_elsewhere(outer, 1.0)


@pytest.mark.parametrize("part", few(2, [0.96, 0.86, 2.0]))
def test_slower_links_are_bounded_by_what_had_to_be_computed_again(part: float) -> None:
    """Whether the shape fits with that or not."""
    cluster = autopar.Cluster(4, 4, "h100", inter="ib-100")
    outer, inner = (Shape(Mesh((name,), (4,)), Pipeline(4, 4, 4, "1f1b", position=at)) for name, at in (("gpu", 0), ("node", 1)))
    search, outline = searches(prices=lambda grid: cluster.with_mesh(grid).profile)
    (layout,) = outline._open_layouts([outer], math.inf)
    search.memory_limit_bytes = part * max(layout.rank_bytes)
    found = list[Sketch]()
    heavy = outline._play_fitting([layout], found)
    is_again = part < 1
    assert (len(found), len(heavy)) == ((1, 0) if part > 0.9 else (0, 1))
    (levels,) = [taken.levels for taken in found] + [taken.levels for taken in heavy]
    assert (set(levels) != {"none"}) is is_again
    assert outline._is_slower_elsewhere(inner, layout.floor_s)
    assert outline._is_slower_elsewhere(inner, layout.floor_s * 1.0001) is is_again


@exhaustive
def test_a_complete_search_leaves_out_what_is_proved_alone() -> None:
    example = models.llama(layers=8, batch=16)
    asked = ask(example.model, autopar.Cluster(2, 4, "h100", inter="ib-100"), example.batch, complete=True)
    complete, quick = (answer(replace(asked, is_complete=is_complete)).plan for is_complete in (asked.is_complete, False))
    likely = [Bound.LINKS.value in str(plan.notes) and Bound.PATIENCE.value in str(plan.notes) for plan in (complete, quick)]
    assert likely == [False, True]
    assert complete.prediction.step_time_s == quick.prediction.step_time_s, "what is likely was right"


def test_work_bounds_that_of_more_micro_batches_only_if_they_divide_them() -> None:
    """Twelve samples: three of them may lie on fewer ranks than two, so that four micro-batches say nothing of six."""
    _, outline = searches()
    mesh = Mesh(("a",), (2,))
    outline._works[Shape(mesh, Pipeline(2, 2, 4)).grid, 0] = [(4, 1e3)]
    least = {count: outline.least_step_time_s(Shape(mesh, Pipeline(2, 2, count, "1f1b"))) for count in (2, 4, 6, 8)}
    assert {count for count, seconds in least.items() if seconds >= 1e3} == {4, 8}
    assert least[4] == pytest.approx(1e3 * (1 + 1 / 4))


@pytest.mark.parametrize(
    "peak, is_complete, asked",
    [
        (1.0, False, [12, 2, 4, 6, 8]),
        (3.0, False, [12, 2, 4, 6, 8, 10]),
        (1.0, True, [12, 2, 4, 6, 8, 10]),
        (1.0, False, [4, 2, 6]),
        (1.0, False, [6, 2, 4]),
    ],
)
def test_more_micro_batches_are_given_up_only_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, peak: float, is_complete: bool, asked: list[int]
) -> None:
    """The most of which every rank has samples are tried first. Then two numbers of them in turn are slower than the fastest, or one with
    fewer samples than ranks, which is proof of nothing."""
    search, outline = searches(2.0)
    search.is_complete = is_complete
    like, played = outline.layout(SHAPES[0]), bound_of(SHAPES[0])
    steps = {2: 5.0, 4: 4.0, 6: 6.0, 8: 7.0, 10: 3.0, 12: 6.0}
    seen: list[int] = []
    monkeypatch.setattr("autopar.solve.outline._likeliest", lambda family, samples: family[list(steps).index(asked[0])])

    def layout(self: Outline, shape: Shape) -> Layout:
        seen.append(shape.pipeline.microbatches)
        return replace(like, shape=shape, floor_s=steps[seen[-1]], peaks=lambda: (peak, peak))

    def limited(self: Outline, shape: Shape, level: str) -> Sketch:
        raise InfeasibleError("too large")

    monkeypatch.setattr(Outline, "layout", layout)
    monkeypatch.setattr(Outline, "least_step_time_s", lambda self, shape: 0.0)
    monkeypatch.setattr(Outline, "play", lambda self, layout: replace(played, shape=layout.shape, step_time_s=layout.floor_s))
    monkeypatch.setattr(Outline, "_lightest", lambda self, layout, limit: layout)
    monkeypatch.setattr(Outline, "_limited", limited)
    outline.search_shapes(Shape(Mesh(("a",), (2,)), Pipeline(2, 2, count, "1f1b")) for count in steps)
    assert seen == asked
    left = steps.keys() - set(asked)
    assert search.pruned[Bound.PATIENCE] == len(left)
    for count in left:  # nor are they tried where the stages lie on slower links
        assert outline._is_slower_elsewhere(Shape(Mesh(("a",), (2,)), Pipeline(2, 2, count, "1f1b")), min(steps[each] for each in asked))


def test_all_stages_of_a_rank_are_solved_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of the rank, which holds half of twelve blocks: of the first three for 4 micro-batches, of the others for 2."""
    search, outline = searches(2.0**24)
    shape = Shape(Mesh(("a",), (2,)), Pipeline(2, 4, 4, "interleaved"))
    asked = list[tuple[float, Staging]]()

    def solve(self: Search, shape: Shape, staging: Staging, limit_bytes: float, *, explain: bool) -> Decision:
        asked.append((limit_bytes, staging))
        raise InfeasibleError("too large")

    monkeypatch.setattr(Search, "solve", solve)
    with pytest.raises(InfeasibleError, match="too large"):
        outline._limited(shape, "none")
    ((limit_bytes, staging),) = asked
    assert limit_bytes == search.limit(shape).positions[0]
    assert set(staging.repeats.values()) == {LAYERS // 2 - KEPT + 1}
    rank = peak_live_by_rank(played(shape.pipeline, training=True))[0]
    assert (rank, staging.live) == (5, (2.5,))
    assert 0 < staging.later[0] <= staging.live[0]


def test_a_shape_that_does_not_fit_gets_the_shards_of_what_it_computes_again() -> None:
    """Those that the limit leaves to selective recomputation, and at the end those of the best level."""
    free = bound_of(SHAPES[0])
    _, outline = searches(0.6 * max(free.rank_bytes))
    tried = dict[str, float]()
    for level in ("none", "selective", "full"):
        with suppress(InfeasibleError):
            tried[level] = outline._limited(SHAPES[0], level).step_time_s
    assert len(tried) > 1
    assert outline._under(SHAPES[0]).step_time_s == tried.get("selective", tried["full"])
    (found,) = outline.search_shapes([SHAPES[0]])
    assert found.step_time_s <= min(tried.values())


def test_the_ends_of_a_model_may_be_stages_of_their_own() -> None:
    """Twelve blocks on fourteen stages, in the sketch as in the whole model; there are no more."""
    search, outline = searches()
    shape, more = (Shape(Mesh(("a",), (2,)), Pipeline(2, stages, 4, "interleaved")) for stages in (14, 16))
    layout = outline.layout(shape)
    block = layout.parts[0].block["forward_s"]
    assert min(stage["forward_s"] for stage in layout.stages[1:-1]) == pytest.approx(block)
    sketch, whole = outline.play(layout), search.decide(shape)
    assert outline.least_step_time_s(shape) <= layout.floor_s <= sketch.step_time_s
    assert sketch.step_time_s == pytest.approx(whole.step_time_s, rel=0.1)
    assert outline._families([shape, more]) == [[[shape]]]
    assert outline.search.pruned == {Bound.STAGES: 1}


def test_a_stage_without_blocks_takes_what_its_ops_take() -> None:
    """The last one, with the product of a large vocabulary: there are no more blocks than layers, of which it has no part."""
    example = models.llama(layers=LAYERS, vocab=8192, batch=8)
    normal = open_session(make_skeleton(example.model), (), example.batch).normal
    search, folded = Search(lambda _: normal, machine_of, float("inf")), fold(normal)
    assert folded is not None
    outline, shape = Outline(folded, search), Shape(Mesh(("a",), (2,)), Pipeline(2, 6, 4, "interleaved"))
    layout, whole = outline.layout(shape), search.decide(shape)
    assert layout.parts[0].blocks == LAYERS
    assert layout.stages[-1]["forward_s"] == pytest.approx(whole.prices[-1].forward_s, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_step_is_shorter_than_its_floor(shape: Shape) -> None:
    """A floor near the step prunes without a simulation."""
    _, outline = searches()
    layout = outline.layout(shape)
    step_time_s = outline.play(layout).step_time_s
    assert 0.8 * step_time_s <= layout.floor_s <= step_time_s * (1 + 1e-9)


def test_ranks_that_share_cores() -> None:
    """Two stages wait for each other, and leave their cores meanwhile."""
    alone = machine(1)
    sharing = replace(alone, device=replace(alone.device, sharing=2.0))
    normal = session("llama", LAYERS).normal
    folded = fold(normal)
    assert folded is not None
    search = Search(lambda _: normal, lambda grid: replace(sharing, links=sharing.links * len(grid.sizes)), float("inf"))
    bound = Outline(folded, search).sketch(SHAPES[0])
    assert bound.step_time_s == pytest.approx(search.decide(SHAPES[0]).step_time_s, rel=0.02)
    assert bound.step_time_s < 0.95 * bound_of(SHAPES[0]).step_time_s


@pytest.mark.parametrize("microbatches, messages", [(2, 2), (4, 4), (64, 4)])
def test_a_sketch_counts_what_its_own_messages_take_of_cores(microbatches: int, messages: int) -> None:
    """At both ends, three quarters of their second; it plays two micro-batches for each rank. A turn that is waited for is no work."""
    amounts = dict.fromkeys((*TIMES, "covered_s", "output_num_bytes"), 0.0)
    link = LinkProfile(0.0, 1e9, overlap=0.25, crowded_s=3.0)
    price = _price(amounts, 1e9, 0, [link], Pipeline(2, 2, microbatches, "1f1b"), in_two=False)
    assert price.core_s == pytest.approx(2 * messages * 0.75)
    assert price.send_forward_s == pytest.approx(4.0)
    assert price.send_backward_s == 0.0
    amounts |= {"reduce_s": 5.0, "shared_num_bytes": 2e9}  # of tied ends, which two ranks add up
    price = _price(amounts, 1e9, 0, [link], Pipeline(2, 2, microbatches, "1f1b"), in_two=False)
    assert (price.reduce_s, price.shared_s) == (7.0, 2.0)


def test_messages_take_longer_in_a_crowd() -> None:
    example, prices = models.gpt2(layers=4, batch=4), machine(1)
    free, crowded = (
        autopar.plan(
            example.model,
            2,
            example.batch,
            plan=autopar.Manual(pp=2, microbatches=2),
            profile=replace(prices, links=tuple(replace(link, crowded_s=crowded_s) for link in prices.links)),
        )
        for crowded_s in (0.0, 1e-2)
    )
    for end, name in ((0, "send_forward_s"), (1, "send_backward_s")):
        (slow, zero), (quick, _) = ([getattr(plan.stages[i], name) for i in (end, 1 - end)] for plan in (crowded, free))
        assert slow - quick == pytest.approx(1e-2)
        assert zero == 0.0
    assert [stage.core_s for stage in free.stages] == [stage.core_s for stage in crowded.stages]
    assert crowded.prediction.step_time_s - free.prediction.step_time_s >= 2e-2  # the first one on, and the last one back


@pytest.mark.parametrize(
    "manual, parts, ends",
    [
        (autopar.Manual(pp=2, microbatches=2), 1, (0, 1)),
        (autopar.Manual(pp=2, dp=2, zero=1, microbatches=2), 2, (0, 1)),
        (autopar.Manual(pp=2, dp=2, tp=2, microbatches=2, zero=2), 4, (0, 1)),
        (autopar.Manual(pp=2, microbatches=2, schedule="interleaved:2"), 1, (0, 3)),
    ],
    ids=str,
)
def test_gradients_that_stages_add_up(manual: autopar.Manual, parts: int, ends: tuple[int, int]) -> None:
    """Those of tied embeddings, after the backwards of both ends; the runtime sends as many bytes."""
    example, prices = models.gpt2(layers=4, batch=8), machine(1)
    links, embedding = tuple(LinkProfile(0.0, speed) for speed in (1e6, 1e9, 1e9)), example.model.get_parameter("transformer.wte.weight")
    profile = replace(prices, links=links[: len(manual.grid(manual.pp * manual.dp * manual.tp).sizes)])
    plan = autopar.plan(example.model, manual.pp * manual.dp * manual.tp, example.batch, plan=manual, profile=profile)
    (row,) = [row for row in plan.collectives if row.axis == "pp" and row.kind == "all_reduce"]
    assert (row.num_bytes, row.count) == (embedding.numel() * 4 / parts, 1)
    assert row.time_s == pytest.approx(row.num_bytes / 1e6)
    counted = autopar.count(example.model, plan, example.batch).positions[0].traffic
    assert [found.num_bytes for found in counted if found.axis == "pp" and found.kind == "all_reduce"] == [row.num_bytes]
    for i, stage in enumerate(plan.stages):
        pieces = [piece for piece in stage.inside if piece.axis == "pp" and piece.phase == "reduce"]
        assert [piece.num_bytes for piece in pieces] == [row.num_bytes] * (i in ends)
        assert sum(piece.time_s for piece in stage.inside if piece.phase == "reduce") == pytest.approx(stage.reduce_s)
        assert (stage.reduce_s >= row.time_s) == (i in ends)
    assert plan.prediction.update_s == pytest.approx(sum(stage.update_s for stage in plan.stages) / 2)
    assert plan.prediction.exposed_comm_s > row.time_s
    given_s = sum(stage.output_s for stage in plan.stages)
    assert plan.prediction.blocking_comm_s - given_s >= row.time_s * (1 - 1e-9)
    quick = autopar.plan(
        example.model,
        plan.grid,
        example.batch,
        plan=replace(manual, stages=tuple(stage.begins for stage in plan.stages[1:])),
        profile=replace(profile, links=(replace(links[0], bandwidth=1e12), *profile.links[1:])),
    )
    assert plan.prediction.step_time_s - quick.prediction.step_time_s > row.time_s


def test_the_peak_of_a_rank_is_that_of_all_its_stages() -> None:
    example = models.gpt2(layers=4, batch=4)
    plan = autopar.plan(example.model, 2, example.batch, plan=autopar.Manual(pp=2, schedule="interleaved:2", microbatches=2))
    prediction = plan.prediction
    assert len(prediction.peak_memory_bytes) == 2
    assert sum(prediction.memory_bytes.values()) == prediction.peak_memory_bytes[0]
    stages = [sum(stage.memory_bytes.values()) for stage in plan.stages]
    assert max(stages) < prediction.peak_memory_bytes[0] <= stages[0] + stages[2]


def amounts(forward_s: float) -> Amounts:
    """Backward takes twice the forward, half of it for weights."""
    names = (*TIMES, "covered_s", "covered_in_two_s", "compute_s")
    taken = {"forward_s": 1.0, "backward_s": 2.0, "input_s": 1.0, "weight_s": 1.0, "compute_s": 3.0}
    return {name: forward_s * taken.get(name, 0.0) for name in names}


def no_bytes() -> PartBytes:
    raise AssertionError("memory was asked for")


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
@pytest.mark.parametrize("blocks, last", [(8, 0.0), (9, 0.5), (10, 3.0)])
def test_the_longest_rank_takes_no_longer_in_any_way_to_share_blocks(schedule: str, chunks: int, blocks: int, last: float) -> None:
    """All ways to share blocks among two ranks are played. The best is at most a tenth above this, and above the mean with its bubble."""
    microbatches = 4
    each = Parts(blocks, amounts(1 / microbatches), amounts(0.2 / microbatches), amounts(last / microbatches), 0, no_bytes)
    whole = Parts(blocks, amounts(1.0), amounts(0.2), amounts(last), 0, no_bytes)
    pipeline, in_two = Pipeline(2, 2 * chunks, microbatches, schedule), schedule == "zb-h1"
    table = played(pipeline, training=True)
    steps = []
    for counts in product(range(1, blocks), repeat=pipeline.stages - 1):
        if sum(counts) <= blocks:  # the last stage may have none
            counts = (*counts, blocks - sum(counts))
            stages = [each.of(stage, counts) for stage in range(pipeline.stages)]
            steps.append(simulate(table, [StagePrice(**{name: one[name] for name in TIMES}) for one in stages]).step_time_s)
    least_s = longest_rank_s(whole, pipeline, in_two=in_two)
    mean_s = whole.of(0, [blocks])["compute_s"] / 2 * (1 if in_two else 1 + 1 / (microbatches * chunks))
    assert least_s <= min(steps) <= 1.1 * max(least_s, mean_s)


def test_with_more_stages_than_blocks_only_the_ends_have_none() -> None:
    """Also where the ends take nothing, so that they would have a block before stages between."""
    light = Parts(6, amounts(1.0), amounts(0.0), amounts(0.0), 0, no_bytes)
    assert _even([light] * 8, ()) == [0, *[1] * 6, 0]
    assert _even([light] * 7, ()) == [*[1] * 6, 0]
    assert sorted(_even([light] * 6, ())) == [1] * 6
    pipeline = Pipeline(2, 8, 4, "interleaved")
    assert longest_rank_s(light, pipeline, in_two=False) <= 3 * 3.0 + 3.0 / 4


def test_blocks_that_do_not_come_out_even_make_a_rank_longer() -> None:
    whole = Parts(9, amounts(1.0), amounts(0.0), amounts(0.0), 0, no_bytes)
    assert longest_rank_s(whole, Pipeline(2, 2, 4, "zb-h1"), in_two=True) == pytest.approx(5 * 3.0)
    assert longest_rank_s(whole, Pipeline(3, 9, 4, "interleaved"), in_two=False) == pytest.approx(3 * 3.0 + 2 * 3.0 / 4)
    assert least_shared_s(whole, Pipeline(3, 3, 4, "1f1b"), in_two=False) == pytest.approx(12.0)  # 4, 3 and 2: the first and the second


@pytest.mark.parametrize(
    "schedule, degree, chunks",
    [("1f1b", 2, 1), ("zb-h1", 2, 1), ("1f1b", 4, 1), ("zb-h1", 4, 1), ("interleaved", 2, 2), ("interleaved", 3, 2), ("interleaved", 2, 5)],
)
@pytest.mark.parametrize("first, last", [(0.0, 0.0), (0.2, 0.7), (1.5, 0.1), (0.1, 4.0)])
def test_no_way_in_which_sketches_share_blocks_takes_less(schedule: str, degree: int, chunks: int, first: float, last: float) -> None:
    """The bound is of the ops on one rank. Sketches share the same blocks by ends that take as long or longer."""
    microbatches = 4
    for blocks, more in product(range(max(degree * chunks - 1, 8), 17), (1.0, 1.3, 2.0)):
        whole = Parts(blocks, amounts(1.0), amounts(first), amounts(last), 0, no_bytes)
        parts = Parts(
            blocks, amounts(1 / microbatches), amounts(more * first / microbatches), amounts(more * last / microbatches), 0, no_bytes
        )
        pipeline = Pipeline(degree, degree * chunks, microbatches, schedule)
        shape, in_two = Shape(Mesh(("a",), (1,)), pipeline), schedule == "zb-h1"
        levels, alike = ("none",) * pipeline.stages, [parts] * pipeline.stages
        layout = lay(shape, cast(Decision, None), levels, alike, machine(1), training=True)
        assert least_shared_s(whole, pipeline, in_two=in_two) <= layout.floor_s * (1 + 1e-9)
