"""Whether a plan from a file hangs together by itself, so that it can be printed, drawn and played: a file may be damaged, or changed by
hand. What its graph and the rules say of it is asked when it meets them (`planner.sound`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.cost.machine import KINDS
from autopar.errors import AutoparError, PlanError
from autopar.mesh import MICROBATCH, Mesh
from autopar.piece import HOST, NO_AXIS
from autopar.plan import MEMORY_KINDS, LinkPlan, Plan
from autopar.planner.sound import check_cut

LAYOUT, HELD = r"R\*?|P|S\d+(\.\d+)?", r"R|S\d+(\.\d+)?|Z[123]"
"""Placements of results of ops, and of parameters."""
COLLECTIVES = tuple(kind for kind in KINDS if kind != "send")
Rule = tuple[str, object, str]
"""A field, the value that it has, and what it should be."""


def load_whole(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` wrote.

    Raises:
        PlanError: the file holds something else, or a plan that is damaged.
    """
    plan = Plan.load(path)
    try:
        check_whole(plan)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan


def check_whole(plan: Plan) -> None:
    """Whether all that a plan says can be shown.

    Raises:
        PlanError: it cannot.
    """
    try:
        check_cut(plan)
        grid = plan.grid
    except AutoparError as error:  # of the mesh, too
        raise PlanError(f"not a whole plan: {error}") from error
    for where, value, rule in (*_memory(plan), *_placements(plan), *_links(plan, grid), *_moves(plan, grid)):
        raise PlanError(f"not a whole plan: {where} is {value!r}, and should be {rule}; make it again with autopar.plan")


def _memory(plan: Plan) -> Iterator[Rule]:
    given = {"prediction": plan.prediction.memory_bytes} | {f"stages[{i}]": stage.memory_bytes for i, stage in enumerate(plan.stages)}
    for where, kinds in given.items():
        if {*kinds} != {*MEMORY_KINDS}:
            yield f"{where} memory_bytes", [*kinds], f"of {', '.join(MEMORY_KINDS)}"
    if plan.sharing <= 0:
        yield "sharing", plan.sharing, "more than 0"


def _placements(plan: Plan) -> Iterator[Rule]:
    """One for each axis inside of a stage; of thousands of ops few differ."""
    rows = [("parameters", i, "held", entry.held, HELD) for i, entry in enumerate(plan.parameters)]
    rows += [("ops", i, "layout", op.layout, LAYOUT) for i, op in enumerate(plan.ops)]
    first = {(name, texts, pattern): f"{of}[{i}] {name}" for of, i, name, texts, pattern in reversed(rows)}
    for (_, texts, pattern), where in first.items():
        if len(texts) != len(plan.mesh.sizes):
            yield where, texts, f"one placement for each axis of mesh ({plan.mesh})"
        for text in texts:
            if not re.fullmatch(pattern, text):
                known = "R, S0, S0.1, ..., Z1, Z2 or Z3" if pattern == HELD else "R, R*, P, S0, S0.1, ..."
                yield where, text, f"a placement: {known}"


def _links(plan: Plan, grid: Mesh) -> Iterator[Rule]:
    """Of every axis, or of none in a plan that was not made for a machine."""
    axes = tuple(link.axis for link in plan.links)
    if axes not in ((), grid.names):
        yield "axis of links", axes, f"of the axes of grid ({grid}), in order"
        return
    for i, (link, size) in enumerate(zip(plan.links, grid.sizes, strict=False)):
        if not link.levels or len(link.levels) != len(link.ranks):
            yield f"links[{i}] levels", link.levels, f"as many as its ranks {link.ranks}, and one or more"
        elif not _are_nested(link, size):
            yield f"links[{i}] ranks", link.ranks, f"the {size} of axis {link.axis}, then no more than those before, and 1 or more"


def _are_nested(link: LinkPlan, size: int) -> bool:
    outer = (size, *link.ranks)
    return link.ranks[0] == size and all(1 <= near <= within for within, near in zip(outer, link.ranks, strict=False))


def _moves(plan: Plan, grid: Mesh) -> Iterator[Rule]:
    for i, c in enumerate(plan.collectives):
        yield from _unknown(f"collectives[{i}] kind", c.kind, COLLECTIVES)
        yield from _unknown(f"collectives[{i}] axis", c.axis, grid.names)
        yield from _unknown(f"collectives[{i}] phase", c.phase, ("forward", "backward"))
    places = (HOST, NO_AXIS, MICROBATCH, *grid.names)
    for i, stage in enumerate(plan.stages):
        for k, piece in enumerate(stage.inside):
            yield from _unknown(f"axis of stages[{i}] inside[{k}]", piece.axis, places)


def _unknown(where: str, value: str, known: Sequence[str]) -> Iterator[Rule]:
    if value not in known:
        yield where, value, f"one of {', '.join(known)}"
