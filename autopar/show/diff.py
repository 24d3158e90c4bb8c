"""What changes from one plan of a model to another, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import fill

from autopar.plan import OpPlan, Plan
from autopar.show.compare import layout_text
from autopar.show.fold import fold
from autopar.show.table import table_text
from autopar.show.text import MAIN_OPS, op_name, short_name
from autopar.units import bytes_text, count_text, number_text, seconds_text, share_text

MAX_ROWS = 24
"""Rows of a table; the rest is counted."""

Cells = tuple[str, ...]
Change = tuple[str, tuple[Cells, Cells], int]
"""(name, what it was and is, position), as `fold` takes it."""
Sum = tuple[int, int, float]
_COUNTED = ("count", "num_bytes", "time_s")
"""What a `Sum` has of all collectives of a kind in a step."""


def diff_text(old: Plan, new: Plan, width: int = 100) -> str:
    """What ``new`` does otherwise than ``old``: figures, then parameters, ops and collectives that differ.

    Args:
        old, new: of one model; parameters and ops are told apart by their names.
        width: of the text, in columns; at least 60.
    """
    sections = [
        "\n".join(fill(line, width, subsequent_indent="  ") for line in (f"old: {_head(old)}", f"new: {_head(new)}", *_requests(old, new))),
        _figures(old, new, width),
        _parameters(old, new, width),
        _ops(old, new, width),
        _collectives(old, new, width),
    ]
    return "\n\n".join(section for section in sections if section)


def diff_data(old: Plan, new: Plan) -> dict[str, object]:
    """The same as data, with every row, in bytes and seconds."""
    requests = {name: {"old": getattr(old, name), "new": getattr(new, name)} for name in _differing(old, new)}
    limits = {"old": old.memory_limit_bytes, "new": new.memory_limit_bytes}
    collectives = [
        {"kind": kind, "axis": axis, "old": dict(zip(_COUNTED, was, strict=True)), "new": dict(zip(_COUNTED, now, strict=True))}
        for (kind, axis), was, now in _differing_collectives(old, new)
    ]
    return {
        "old": {"plan": _head(old), **_figure_data(old)},
        "new": {"plan": _head(new), **_figure_data(new)},
        "request": requests | ({"memory_limit_bytes": limits} if limits["old"] != limits["new"] else {}),
        "parameters": [_change_data(change) for change in _changed(_named_parameters(old), _named_parameters(new))],
        "ops": [_change_data(change) for change in _changed(_named_ops(old), _named_ops(new))],
        "collectives": collectives,
    }


def _figure_data(plan: Plan) -> dict[str, object]:
    names = ("step_time_s", "compute_s", "update_s", "exposed_comm_s", "bubble_fraction", "tokens_per_s", "peak_memory_bytes")
    moved = sum(c.num_bytes * c.count for c in plan.collectives)
    return {name: getattr(plan.prediction, name) for name in names} | {"moved_bytes": moved}


def _change_data(change: Change) -> dict[str, object]:
    name, (was, now), _ = change
    return {"name": name, "old": " ".join(was), "new": " ".join(now)}


def _head(plan: Plan) -> str:
    return f"{plan.model}, {plan.config or 'automatic'}: {layout_text(plan)}"


def _requests(old: Plan, new: Plan) -> Iterator[str]:
    """Where they answer different questions."""
    for name in _differing(old, new):
        yield f"{name.replace('_', ' ')}: {_told(getattr(old, name))}, now {_told(getattr(new, name))}"
    if old.memory_limit_bytes != new.memory_limit_bytes:
        yield f"memory limit: {bytes_text(old.memory_limit_bytes)}, now {bytes_text(new.memory_limit_bytes)}"


def _differing(old: Plan, new: Plan) -> list[str]:
    names = ("model", "machine", "batch", "optimizer", "precision", "graph_hash")
    return [name for name in names if getattr(old, name) != getattr(new, name)]


def _told(value: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value) or "none"


def _figures(old: Plan, new: Plan, width: int) -> str:
    units = {plan.prediction.unit for plan in (old, new)}  # tokens of one model are not beside rows of another
    rows = [
        _figure(name, measure(old), measure(new), text)
        for name, measure, text in (
            ("step", lambda p: p.prediction.step_time_s, seconds_text),
            ("compute", lambda p: p.prediction.compute_s, seconds_text),
            ("update", lambda p: p.prediction.update_s, seconds_text),
            ("exposed communication", lambda p: p.prediction.exposed_comm_s, seconds_text),
            ("bubble", lambda p: p.prediction.bubble_fraction, share_text),
            (f"{new.prediction.unit}/s", lambda p: p.prediction.tokens_per_s, count_text),
            ("peak memory", lambda p: float(max(p.prediction.peak_memory_bytes, default=0)), bytes_text),
            ("moved by collectives", lambda p: float(sum(c.num_bytes * c.count for c in p.collectives)), bytes_text),
        )
        if len(units) == 1 or not name.endswith("/s")
    ]
    return table_text(("", ">old", ">new", ">new / old"), rows, width=width)


def _figure(name: str, was: float, now: float, text: Callable[[float], str]) -> list[str]:
    return [name, text(was), text(now), f"{now / was:.3f}" if was else "-"]


def _parameters(old: Plan, new: Plan, width: int) -> str:
    return _changes("parameter", _changed(_named_parameters(old), _named_parameters(new)), width)


def _named_parameters(plan: Plan) -> Iterator[tuple[str, Cells]]:
    for p in plan.parameters:
        yield p.name, (f"[{' '.join(p.held)}]", f"stage {', '.join(map(str, p.stages))}", bytes_text(p.num_bytes))


def _ops(old: Plan, new: Plan, width: int) -> str:
    return _changes("op", _changed(_named_ops(old), _named_ops(new)), width)


def _named_ops(plan: Plan) -> Iterator[tuple[str, Cells]]:
    """The ops that tell a plan, by module and kind, for those of other captures have other names."""
    seen: defaultdict[str, int] = defaultdict(int)
    for op in (op for op in plan.ops if op_name(op.op) in MAIN_OPS):
        name = f"{op.module}.{short_name(op)}".removeprefix(".")
        seen[name] += 1
        yield (f"{name} ({seen[name]})" if seen[name] > 1 else name), _op_cells(op)


def _op_cells(op: OpPlan) -> Cells:
    return (f"[{' '.join(op.choices)}]", f"stage {op.stage}", f"again: {op.recompute}" if op.recompute else "")


def _changed(was: Iterable[tuple[str, Cells]], now: Iterable[tuple[str, Cells]]) -> list[Change]:
    """What differs; of a row only the cells that do."""
    before, after = dict(was), dict(now)
    changed: list[Change] = []
    for name in {**before, **after}:
        a, b = before.get(name, ("-",)), after.get(name, ("-",))
        if a == b:
            continue
        differing = [i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]]
        changed.append((name, (_picked(a, differing), _picked(b, differing)), len(changed)))
    return changed


def _changes(kind: str, changed: Sequence[Change], width: int) -> str:
    """A table of what differs."""
    if not changed:
        return f"no {kind} differs"
    folded = fold(changed)
    rows = [[row.name, f"x{len(row.items)}" if len(row.items) > 1 else "", *map(" ".join, changed[row.items[0]][1])] for row in folded]
    footer = (number_text(len(rows) - MAX_ROWS, "more row"), "", "", "") if len(rows) > MAX_ROWS else ()
    return table_text((kind, ">", "old", "new"), rows[:MAX_ROWS], width=width, footer=footer, wide=(kind,))


def _picked(cells: Sequence[str], positions: Sequence[int]) -> Cells:
    return tuple(cells[i] for i in positions if i < len(cells) and cells[i]) or ("-",)


def _collectives(old: Plan, new: Plan, width: int) -> str:
    rows = [
        [*key, str(a[0]), str(b[0]), bytes_text(a[1]), bytes_text(b[1]), seconds_text(a[2]), seconds_text(b[2])]
        for key, a, b in _differing_collectives(old, new)
    ]
    columns = ("collective", "axis", ">count", ">now", ">bytes", ">now", ">time", ">now")
    return table_text(columns, rows, width=width) if rows else "no collective differs"


def _differing_collectives(old: Plan, new: Plan) -> Iterator[tuple[tuple[str, str], Sum, Sum]]:
    """Kind and axis, with what it was and is."""
    was, now, none = _by_kind(old), _by_kind(new), (0, 0, 0.0)
    for key in {**was, **now}:
        if was.get(key, none) != now.get(key, none):
            yield key, was.get(key, none), now.get(key, none)


def _by_kind(plan: Plan) -> dict[tuple[str, str], Sum]:
    """(count, bytes, seconds) of a step by kind and axis."""
    found: dict[tuple[str, str], Sum] = {}
    for c in plan.collectives:
        count, num_bytes, time_s = found.get((c.kind, c.axis), (0, 0, 0.0))
        found[c.kind, c.axis] = (count + c.count, num_bytes + c.num_bytes * c.count, time_s + c.time_s * c.count)
    return found
