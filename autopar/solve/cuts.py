"""Where a solved problem may be cut into the stages of a pipeline.

The ops are cut in the order of the graph, where little crosses. With m micro-batches the slowest of all stages sets the pace, and the first
and the last of them wait for every message (the objective of Zhu et al., "Mist", 2025). How much the others wait, beside what stages do
once a step, is for the simulator to say. So these are cuts to play (`solve.stager`): for each of `SLACKS` the one with

    min sum_s send[s],   sum_{op in s} time[op] <= slack * shortest,   shortest = min max_s sum_{op in s} time[op]

where what crosses the end of s is sent in ``send[s]``. It is found by dynamic programming over the borders, with ``time[op]`` of the
stage's own device, as it is and with the m-th part of what the op has its stage do once a step; of cuts that send alike it is the most even
one, and the earliest one. Every stage has a parameter to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
from torch import fx

from autopar.cost.collectives import send_time_s
from autopar.cost.machine import LinkProfile
from autopar.errors import PlanError
from autopar.graph import operands_of, value_spec
from autopar.passes.stages import follow_parameters, staged_ops
from autopar.solve.inter import Costs
from autopar.solve.places import Places
from autopar.solve.shapes import Shape
from autopar.units import number_text

MAX_BORDERS = 256
"""How many places for a cut are looked at; where a graph has more, those that least crosses."""
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
"""How much longer than in the most even cut the longest stage may take, to send less."""
UNEVEN = 1e-2
"""What a stage that is as long as the longest counts beside the least of all sends."""


def cuts(costs: Sequence[Costs], shape: Shape, places: Places, taken: Sequence[np.ndarray] = ()) -> list[dict[fx.Node, int]]:
    """The stage of every op: by the parameters or modules that the shape names, else by time, in each way that may be the fastest;
    ``taken`` is that of `cuts_by_time`."""
    stages = shape.pipeline.stages
    if shape.homes is not None:
        return [follow_parameters(costs[0].prices.problem.module, shape.homes, stages)]
    if shape.cuts:
        return [cut_at_modules(costs[0], shape.cuts)]
    return cuts_by_time(costs, stages, places.links, taken)


def cuts_by_time(
    costs: Sequence[Costs], stages: int, line: Sequence[LinkProfile], taken: Sequence[np.ndarray] = ()
) -> list[dict[fx.Node, int]]:
    """The cuts that may be of the shortest step, each once; the first has the shortest of all longest stages.

    Args:
        costs: of the model, at every position of the pipeline; one if they are alike.
        stages: how many.
        line: from every position of the pipeline to the next; empty without a pipeline.
        taken: for every stage, the part of its memory that each op would take of it; if given, no stage takes more than it has.

    Raises:
        PlanError: there are fewer ops than stages, or fewer with a parameter to train, or no cut keeps to the memory.
    """
    order = costs[0].order
    if stages == 1:
        return [dict.fromkeys(order, 0)]
    if len(order) < stages:
        raise PlanError(f"{stages} stages are too many for a model of {number_text(len(order), 'op')}; use fewer")
    crossing = costs[0].crossing_bytes()[:-1]
    borders = np.sort(np.argsort(crossing, kind="stable")[:MAX_BORDERS])
    sends = np.array([send_time_s(crossing[borders], line[s % len(line)]) if line else np.zeros(len(borders)) for s in range(stages - 1)])
    # ends[j] is one past the last op of a stage that ends at candidate j; the last candidate is the end of the model
    ends, sends = np.append(borders + 1, len(order)), np.pad(sends, ((0, 0), (0, 1)))
    trained = np.cumsum([_is_trained(node) for node in order])[ends - 1]
    found = dict[tuple[int, ...], None]()
    for with_once in (False, True):
        own = _between(costs, ends, trained, stages, with_once=with_once)
        if taken:
            own = [np.where(_is_over(taken[stage], ends, is_first=not stage), np.inf, between) for stage, between in enumerate(own)]
        shortest = _shortest_pace(own)
        if not np.isfinite(shortest):
            memory = ", within the memory of its devices" if taken else ""
            raise PlanError(f"{stages} stages are too many for this model: each needs a parameter to train{memory}; use fewer")
        for slack, uneven in product(SLACKS, (UNEVEN, 0.0)):
            found[tuple(_least_sending(own, sends, slack * shortest, uneven))] = None
    return [_numbered(order, [int(ends[j]) for j in cut]) for cut in found]


def _is_over(taken: np.ndarray, ends: np.ndarray, *, is_first: bool) -> np.ndarray:
    """Where a stage from candidate i to candidate j, the first from the start of the model, takes more memory than it has."""
    done = np.concatenate(([0.0], np.cumsum(taken)))[ends]
    return np.asarray(done[None, :] - (0.0 if is_first else done[:, None]) > 1.0)


def _between(costs: Sequence[Costs], ends: np.ndarray, trained: np.ndarray, stages: int, *, with_once: bool) -> list[np.ndarray]:
    """For every stage ``[i, j]``, the seconds from candidate i to candidate j, ``with_once`` with the part of a micro-batch in what is done
    once a step; of the first all rows are from the start of the model. Infinite where there is nothing to train."""
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for one in costs:
        if id(one) not in found:
            time_s = np.array([one.time_s(node) for node in one.order]) + (one.once_s() if with_once else 0.0)
            done_s = np.concatenate(([0.0], np.cumsum(time_s)))[ends]
            own = done_s[None, :] - done_s[:, None]
            own[trained[:, None] >= trained[None, :]] = np.inf
            found[id(one)] = np.where(trained > 0, done_s, np.inf)[None, :], own
    return [found[id(costs[stage % len(costs)])][stage > 0] for stage in range(stages)]


def _shortest_pace(own: Sequence[np.ndarray]) -> float:
    """Seconds of the longest stage of the most even cut."""
    longest = own[0][0]
    for between in own[1:]:
        longest = np.maximum(longest[:, None], between).min(axis=0)
    return float(longest[-1])


def _least_sending(own: Sequence[np.ndarray], sends: np.ndarray, limit_s: float, uneven: float) -> list[int]:
    """The candidates at which to cut, so that no stage takes longer than the limit and the sends, ``[stage, candidate]``, are least; where
    they are alike, the squares of the stages' times, which count as `UNEVEN` says."""
    weight = uneven * sends[sends > 0].min(initial=limit_s)
    allowed = limit_s * (1 + 1e-9)
    alike = {id(t): t for t in own}  # most stages are
    uneven_by = {key: np.where(t <= allowed, weight * (np.minimum(t, allowed) / limit_s) ** 2, np.inf) for key, t in alike.items()}
    paid, came = uneven_by[id(own[0])][0], []
    for send, stage in zip(sends, own[1:], strict=True):
        through = (paid + send)[:, None] + uneven_by[id(stage)]
        came.append(through.argmin(axis=0))
        paid = through.min(axis=0)
    cut, j = [], len(paid) - 1
    for source in reversed(came):
        j = int(source[j])
        cut.append(j)
    return cut[::-1]


def most_stages(module: fx.GraphModule) -> int:
    """How many stages a model can have: each has an op that reads a parameter to train, if there is more than one."""
    return max(1, sum(map(_is_trained, staged_ops(module))))


def _is_trained(node: fx.Node) -> bool:
    """Whether an op reads a parameter that gets a gradient."""
    return any(value.node.op == "placeholder" and value_spec(value).requires_grad for value in operands_of(node))


def cut_at_modules(costs: Costs, names: Sequence[str]) -> dict[fx.Node, int]:
    """Stages that begin where the ops of given modules begin.

    Raises:
        PlanError: a module has no ops, or the names are not in the order of the forward.
    """
    starts: list[int] = []
    for name in names:
        found = [i for i, node in enumerate(costs.order) if _is_in(node.meta.get("module", ""), name)]
        if not found:
            known = dict.fromkeys(node.meta.get("module", "") for node in costs.order)
            some = ", ".join(filter(None, list(known)[:12]))
            raise PlanError(f"stages: no op belongs to a module {name!r}; modules with ops are {some} ...")
        if not found[0] or (starts and found[0] <= starts[-1]):
            raise PlanError(f"stages: module {name!r} does not begin after those named before it; name them in the order of the forward")
        starts.append(found[0])
    for start, end in pairwise([0, *starts, len(costs.order)]):
        if not any(_is_trained(node) for node in costs.order[start:end]):
            raise PlanError(f"stages: the one that begins at op {costs.order[start].name} has no parameter to train; cut elsewhere")
    return _numbered(costs.order, starts)


def _is_in(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def _numbered(order: Sequence[fx.Node], starts: Sequence[int]) -> dict[fx.Node, int]:
    return {node: sum(i >= start for start in starts) for i, node in enumerate(order)}
