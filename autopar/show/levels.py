"""What ranks send over the links of each level of the machine, inside a node and between nodes: collectives, and messages between stages.

Collectives are counted as they are priced (`cost.collectives`): by a ring, each rank to the next of its group, of which those at the end of
a node send to another; all-to-all pairwise. Trees and switches that reduce send less between nodes. What full recomputation communicates
again is left out, as it is of `Plan.collectives`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from autopar.cost.collectives import ring_terms
from autopar.plan import CollectivePlan, LinkPlan, Plan


@dataclass(frozen=True, slots=True)
class LevelTraffic:
    """What a rank sends in a step over links of one level, in the mean of all ranks; ``kind`` is that of a collective, or ``send``."""

    level: str
    kind: str
    num_bytes: int


def sent_by_level(plan: Plan, *, stage: int | None = None, has_messages: bool = True) -> list[LevelTraffic]:
    """The outermost level first; nothing of a plan that was not made for a machine.

    Args:
        plan: its collectives are all that are counted.
        stage: of whose ranks the mean is, where the collectives are those of one pipeline stage; None: of all ranks.
        has_messages: whether to count messages between stages.
    """
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    links = {link.axis: link for link in plan.links}
    if not links:
        return []
    positions = plan.pipeline.degree if stage is None else 1
    for c in plan.collectives:
        is_over_stages = c.axis == plan.pipeline.axis and c.axis not in plan.mesh.names
        if is_over_stages and c.kind == "all_reduce":
            own = _adding(plan, c)
            share = len(own) / positions if stage is None else stage % plan.pipeline.degree in own
            found[links[c.axis].levels[0], c.kind] += c.count * share * ring_terms(c.kind, len(own))[1] * c.num_bytes
            continue
        sharers = 1 if is_over_stages else positions  # all ranks pass an output on
        for level, num_bytes in _shares(c, links[c.axis]):
            found[level, c.kind] += c.count * num_bytes / sharers
    for sender, level, num_bytes in _messages(plan, links) if has_messages else ():
        if stage in (None, sender):
            found[level, "send"] += num_bytes / positions
    order = list(dict.fromkeys(level for link in plan.links for level in link.levels))
    rows = [LevelTraffic(level, kind, round(num_bytes)) for (level, kind), num_bytes in found.items() if num_bytes]
    return sorted(rows, key=lambda row: (order.index(row.level), -row.num_bytes))


def total_by_level(plan: Plan) -> dict[str, int]:
    """Bytes that a rank sends in a step over links of each level, in the mean of all ranks."""
    found: defaultdict[str, int] = defaultdict(int)
    for row in sent_by_level(plan):
        found[row.level] += row.num_bytes
    return dict(found)


def _adding(plan: Plan, c: CollectivePlan) -> set[int]:
    """Positions of the pipeline whose stages add up a gradient."""
    with_it = (s for s, stage in enumerate(plan.stages) if any((p.kind, p.axis, p.of) == (c.kind, c.axis, c.value) for p in stage.inside))
    return {s % plan.pipeline.degree for s in with_it}


def _shares(c: CollectivePlan, link: LinkPlan) -> Iterator[tuple[str, float]]:
    """What a rank of a group sends over each level, in the mean, of one collective."""
    size = link.ranks[0]
    if c.kind == "all_to_all":  # a rank has a part of the buffer, and a part of that for each other
        for level, (within, near) in zip(link.levels, pairwise((*link.ranks, 1)), strict=True):
            yield level, (within - near) * c.num_bytes / size**2
        return
    _, passing = ring_terms(c.kind, size)
    if c.kind == "broadcast":  # the last of the ring passes nothing on
        passing *= (size - 1) / size
    before = 0
    for level, near in zip(link.levels, (*link.ranks[1:], 1), strict=True):
        ends = -(-size // near)  # ranks of the ring that send over this level, or over one further out
        yield level, passing * c.num_bytes * (ends - before) / size
        before = ends


def _messages(plan: Plan, links: dict[str, LinkPlan]) -> Iterator[tuple[int, str, float]]:
    """What a rank of each stage sends to other stages in a step: the stage, over which level, bytes."""
    pipeline, is_trained = plan.pipeline, any(stage.backward_s for stage in plan.stages)
    if pipeline.degree == 1:
        return
    link = links[pipeline.axis]
    for s, stage in enumerate(plan.stages):
        yield s, link.hop(s % pipeline.degree), pipeline.microbatches * stage.send_forward_bytes
        if is_trained:
            yield s, link.hop((s - 1) % pipeline.degree), pipeline.microbatches * stage.send_backward_bytes
