"""A damaged file is refused when it is read, and whatever is read can be shown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Manual
from autopar.errors import PlanError
from autopar.planner.document import Plan
from autopar.planner.request import load_plan
from autopar.show.page import plan_html
from tests import models
from tests.marks import few

pytestmark = pytest.mark.slow

WAYS = {
    "staged": Manual(dp=2, pp=2, microbatches=2),
    "sharded": Manual(dp=2, tp=2, zero=3, recompute="full"),
    "in_two": Manual(pp=4, microbatches=4, schedule="zb-h1"),
}
Place = tuple[str | int, ...]
GONE = "what is taken out"


@cache
def saved(way: str) -> str:
    model, batch = models.mlp(layers=4, device="meta")
    return autopar.plan(model, autopar.Cluster(1, 4, "h100"), batch, plan=WAYS[way]).to_json()


def changed(way: str, path: Place, value: object) -> str:
    data = json.loads(saved(way))
    place = reduce(lambda at, key: at[key], path[:-1], data)
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "path, value, text",
    [
        (("pipeline", "schedule"), "x", "there is no schedule 'x'"),
        (("pipeline", "microbatches"), 0, "microbatches is 0; it must be 1 or more"),
        (("pipeline", "axis"), "dp", "the pipeline axis is called 'dp', as is one of mesh (dp=2,tp=1)"),
        (("pipeline", "axis"), "", "mesh axis names are text without '=' and ','"),
        (("stages", 1), GONE, "the plan has figures of 1 stage and 2 positions"),
        (("stages", 0, "memory_bytes", "parameters"), GONE, "stages[0] memory_bytes is ['gradients', "),
        (("prediction", "memory_bytes"), {}, "prediction memory_bytes is [], and should be of parameters, gradients, optimizer, gathered"),
        (("sharing",), 0, "sharing is 0, and should be more than 0"),
        (("parameters", 1, "held"), ["R"], "parameters[1] held is ('R',), and should be one placement for each axis of mesh (dp=2,tp=1)"),
        (("parameters", 1, "held", 0), "Z9", "parameters[1] held is 'Z9', and should be a placement: R, S0, S0.1, ..., Z1, Z2 or Z3"),
        (("ops", 2, "layout", 1), "", "ops[2] layout is '', and should be a placement: R, R*, P, S0, S0.1, ..."),
        (("links", 0), GONE, "axis of links is ('dp', 'tp'), and should be of the axes of grid (pp=2,dp=2,tp=1), in order"),
        (("links", 1, "axis"), "x", "axis of links is ('pp', 'x', 'tp')"),
        (("links", 1, "levels"), [], "links[1] levels is (), and should be as many as its ranks (2,), and one or more"),
        (("links", 1, "ranks"), [0], "links[1] ranks is (0,), and should be the 2 of axis dp"),
        (("collectives", 0, "kind"), "send", "collectives[0] kind is 'send', and should be one of all_reduce, all_gather, reduce_scatter"),
        (("collectives", 0, "axis"), "x", "collectives[0] axis is 'x', and should be one of pp, dp, tp"),
        (("collectives", 0, "phase"), "x", "collectives[0] phase is 'x', and should be one of forward, backward"),
        (("stages", 0, "inside", 0), "forward compute x 0.1 0 0/0/0/0 1 h.0", "axis of stages[0] inside[0] is 'x', and should be one of"),
    ],
    ids=str,
)
def test_what_is_damaged_is_named(path: Place, value: object, text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(changed("staged", path, value))
    for read in (Plan.load, load_plan):
        with pytest.raises(PlanError, match=re.escape(text)) as error:
            read(file)
        assert str(error.value).startswith(f"{file}: not a whole plan: ")


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_as_it_was_saved_is_whole(way: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(saved(way))
    assert Plan.load(tmp_path / "plan.json").to_json() == saved(way)


def places(data: Any, path: Place = ()) -> Iterator[Place]:
    """Everywhere in JSON, of a list its first and last."""
    if path:
        yield path
    inner = data if isinstance(data, dict) else {i: data[i] for i in (0, len(data) - 1)} if data and isinstance(data, list) else {}
    for key, value in inner.items():
        yield from places(value, (*path, key))


@pytest.mark.parametrize("way", few(1, sorted(WAYS)))
def test_whatever_is_read_can_be_shown(way: str, tmp_path: Path) -> None:
    """A value in place of another, everywhere."""
    shown = 0
    for number, path in enumerate(places(json.loads(saved(way)))):
        values = [GONE, -1, math.nan, 1e308, 10**400, 0, 7, "", "x", [], {}]
        for value in (values[number % len(values)], values[(number + 4) % len(values)]):
            try:
                plan = Plan.from_json(changed(way, path, value))
            except PlanError:
                continue
            shown += 1
            assert str(plan)
            plan_html(plan)
            plan.to_trace(tmp_path / "trace.json")
    assert shown > 20
