"""Whose value each collective moves. Equal blocks are decided as one, and their collectives stand in the plan with the first of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autopar.plan import CollectivePlan, Plan
from autopar.show.fold import split_numbers


def by_value(plan: Plan) -> dict[str, list[CollectivePlan]]:
    """The collectives of each parameter and op, by name, each with its own count; all counts together are those of the plan.

    Blocks are equal whose modules differ in numbers only, and whose ops at the same place do the same. Where a count does not divide among
    them, it stays with the value that the plan names.
    """
    alike: defaultdict[object, list[str]] = defaultdict(list)
    keys: dict[str, object] = {}
    for name, key in _keys(plan):
        alike[key].append(name)
        keys[name] = key
    found: defaultdict[str, list[CollectivePlan]] = defaultdict(list)
    for c in plan.collectives:
        names = alike[keys[c.value]] if c.value in keys else [c.value]
        if c.count % len(names):
            found[c.value].append(c)
            continue
        for name in names:
            found[name].append(replace(c, value=name, count=c.count // len(names)))
    return dict(found)


def _keys(plan: Plan) -> Iterator[tuple[str, object]]:
    """What equal blocks agree on: place in the block, and layout."""
    for p in plan.parameters:
        yield p.name, (split_numbers(p.name)[0], p.held, p.shape)
    places: defaultdict[str, int] = defaultdict(int)
    for op in plan.ops:
        yield op.name, (split_numbers(op.module)[0], places[op.module], op.op, op.choices, op.layout)
        places[op.module] += 1
