"""A plan, or a comparison of plans, as one self-contained page of HTML: graph, timeline, memory, cluster, and the rows side by side.

``page.html`` beside this file is the page without data, built from ``page/`` (`npm ci && npm run build` there, with Node.js); it opens
from disk and needs no network.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autopar.cost.simulate import Timeline
from autopar.measured import Measured
from autopar.piece import Piece
from autopar.plan import CollectivePlan, OpPlan, ParameterPlan, Plan
from autopar.schedule.actions import Kind
from autopar.show.collectives import by_value
from autopar.show.compare import Row
from autopar.show.files import check_page
from autopar.show.inside import lay
from autopar.show.levels import sent_by_level
from autopar.show.measured import measured_data
from autopar.show.memory import memory_by_kind
from autopar.show.pictures import rows_svg
from autopar.show.text import NUM_ALTERNATIVES
from autopar.show.timeline import STREAMS, play
from autopar.units import number_text

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN = ("kind", "axis", "phase", "num_bytes", "time_s", "count")
"""What is shown of a collective beside its value."""
WHOLE = 1_000_000
"""Length of an action in the page, of which its parts take some."""
DIGITS = 6
"""Significant digits of seconds in the page."""


def plan_html(
    plan: Plan, why: Mapping[str, str] | None = None, measured: Measured | None = None, reasons: Mapping[str, object] | None = None
) -> str:
    """The page of a plan.

    Args:
        plan: what it shows.
        why: texts of `Plan.explain` by parameter or op.
        measured: steps that are shown beside the predicted one.
        reasons: those of all parameters and ops, as a dictionary (`reasons.Reasons`).
    """
    data = _plan_data(plan.model, plan, why or {}) | {"reasons": reasons}
    if measured is not None:
        data["measured"] = measured_data(plan, measured.recordings)
    return _page(f"{plan.model} on {plan.grid}", {"plans": [data], "rows": None})


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Write a page to look at a comparison on: the rows of `autopar.compare`, their time against their memory, and behind each its plan.

    The public ``autopar.draw``. It is one file that opens from disk without a network. A path that ends in ``.svg`` gets the picture of
    time against memory alone.

    Raises:
        PlanError: it has the name of another kind of file.
    """
    check_page(path)
    text = rows_svg(rows) if Path(path).suffix.lower() == ".svg" else compare_html(rows)
    Path(path).write_text(text, encoding="utf-8")


def compare_html(rows: Sequence[Row]) -> str:
    """The text of the page of a comparison."""
    planned = [row for row in rows if row.plan is not None]
    plans = [_plan_data(row.name, row.plan, {}) for row in planned if row.plan is not None]
    number = {row.name: i for i, row in enumerate(planned)}
    title = f"{planned[0].plan.model}: {number_text(len(rows), 'plan')}" if planned and planned[0].plan else "plans"
    return _page(title, {"plans": plans, "rows": [_row_data(row, number.get(row.name)) for row in rows]})


def _page(title: str, data: object) -> str:
    head, rest = TEMPLATE.read_text(encoding="utf-8").split("%TITLE%", 1)
    middle, tail = rest.split("%DATA%", 1)
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    return "".join([head, html.escape(title), middle, base64.b64encode(packed).decode(), tail])


def _plan_data(name: str, plan: Plan, why: Mapping[str, str]) -> dict[str, Any]:
    own = by_value(plan)
    kept = ("model", "machine", "config", "batch", "memory_limit_bytes", "notes", "optimizer", "precision", "dtypes")
    return {
        "name": name,
        **{field: getattr(plan, field) for field in kept},
        **{field: asdict(getattr(plan, field)) for field in ("prediction", "pipeline", "stats")},
        "stages": [asdict(replace(stage, inside=())) for stage in plan.stages],
        "collectives": [asdict(c) for c in plan.collectives],
        "alternatives": [asdict(a) for a in plan.alternatives[:NUM_ALTERNATIVES]],
        "mesh": {"names": plan.mesh.names, "sizes": plan.mesh.sizes},
        "grid": {"names": plan.grid.names, "sizes": plan.grid.sizes},
        "gridText": f"{plan.grid} ({number_text(plan.grid.num_ranks, 'rank')})",
        "parameters": [_with(p, own, why) for p in plan.parameters],
        "ops": [_with(op, own, why) for op in plan.ops],
        "levels": [asdict(row) for row in sent_by_level(plan)],
        "timeline": _timeline(plan),
        "measured": None,
    }


def _with(entry: OpPlan | ParameterPlan, own: Mapping[str, Sequence[CollectivePlan]], why: Mapping[str, str]) -> dict[str, Any]:
    """An entry of the plan with its collectives, and why it lies as it does if that is known."""
    found: dict[str, Any] = asdict(entry)
    if entry.name in own:
        found["collectives"] = [{name: getattr(c, name) for name in SHOWN} for c in own[entry.name]]
    if entry.name in why:
        found["why"] = why[entry.name]
    return found


def _timeline(plan: Plan) -> dict[str, Any]:
    timeline = play(plan)
    events = [
        [
            e.rank,
            STREAMS.index(e.stream),
            e.action.kind.value if e.action else "U",
            e.action.stage if e.action else e.rank,
            e.action.microbatch if e.action else -1,
            _short(e.start_s),
            _short(e.end_s),
        ]
        for e in timeline.events
        if e.end_s > e.start_s
    ]
    return {
        "ranks": len(timeline.busy_s),
        "streams": STREAMS,
        "step_s": timeline.step_time_s,
        "events": events,
        "memory": [[[_short(at_s), *map(round, held)] for at_s, held in rows] for rows in memory_by_kind(plan, timeline)],
        "inside": [_inside(stage.inside, kinds) for stage, kinds in zip(plan.stages, _kinds(timeline), strict=True)],
    }


def _kinds(timeline: Timeline) -> list[list[Kind]]:
    """The kinds of actions of every stage that take time."""
    found: dict[int, dict[Kind, None]] = {}
    for event in timeline.events:
        if event.action is not None:
            found.setdefault(event.action.stage, {})[event.action.kind] = None
    return [list(found[stage]) for stage in sorted(found)]


def _inside(pieces: Sequence[Piece], kinds: Sequence[Kind]) -> dict[str, Any]:
    """What actions of a stage are made of: parts as (piece, lane, start, end), of which the last two are per `WHOLE` of an action."""
    told = [[p.kind, p.axis, p.of, p.count, p.num_bytes, _short(p.waited_s), _short(p.hidden_s)] for p in pieces]
    parts = {}
    for kind in kinds:
        if laid := lay(pieces, kind):
            scale = WHOLE / max(max(part.end_s for part in laid), 1e-30)
            parts[kind.value] = [[p.piece, p.lane, round(p.start_s * scale), round(p.end_s * scale)] for p in laid]
    return {"pieces": told, "parts": parts}


def _short(time_s: float) -> float:
    return float(f"{time_s:.{DIGITS}g}")


def _row_data(row: Row, plan: int | None) -> dict[str, Any]:
    told: dict[str, Any] = {name: getattr(row, name) for name in ("name", "fits", "reason", "layout")} | {"plan": plan}
    if row.prediction is None:
        return told | {"step_time_s": None}
    told["unit"] = row.prediction.unit
    figures = ("step_time_s", "tokens_per_s", "mfu", "bubble_fraction", "exposed_comm_s")
    return told | {name: getattr(row, name) for name in figures} | {"peak_memory_bytes": max(row.peak_memory_bytes, default=0)}
