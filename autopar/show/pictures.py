"""Pictures of plans as SVG, drawn without a browser: the simulated step, memory over the step, and time against memory of several plans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from autopar.cost.simulate import Event
from autopar.piece import Piece
from autopar.plan import Plan
from autopar.schedule.actions import Kind
from autopar.show.compare import Row
from autopar.show.drawing import BUBBLE, GRID, INK, LETTER, MUTED, PAGE, PALETTE, WAITS, Drawing, ticks
from autopar.show.inside import COMPUTE, PHASES, WAIT, Laid, play_inside
from autopar.show.memory import KINDS as MEMORY
from autopar.show.memory import memory_by_kind
from autopar.show.timeline import play, words
from autopar.units import bytes_text, seconds_text

WIDTH, LEFT, RIGHT, TOP = 1000, 96, 12, 48
ROW, LANE, GAP = 24, 8, 8
INSIDE = 48
"""Pixels from which on an action shows what it is made of."""
COLLECTIVES = {"all_reduce": "#d55e00", "all_gather": "#e69f00", "reduce_scatter": "#cc79a7", "all_to_all": "#009e73"}
KINDS = {
    "parameters": "#0072b2",
    "optimizer": "#009e73",
    "gradients": "#e69f00",
    "gathered": "#cc79a7",
    "activations": "#56b4e9",
    "buffers": "#d55e00",
}
_SHADES = {Kind.FORWARD: 0.62, Kind.WEIGHT: 0.4}
_THIN = {Kind.FORWARD: "#56b4e9", Kind.BACKWARD: "#0072b2", Kind.INPUT: "#0072b2", Kind.WEIGHT: "#009e73"}
"""Of actions of less than `THIN` pixels, in which colours of micro-batches would be noise."""
THIN, FINE = 5, 0.4
"""Pixels; what ends no `FINE` later than what was drawn before is left out."""
_SENDS = {"send": "send", "receive": "recv"}


def timeline_svg(plan: Plan) -> str:
    """The step: for each rank of the pipeline its computation, below it what runs on which axis, and messages."""
    timeline = play(plan)
    drawing = Drawing(WIDTH, f"{plan.model} on {plan.grid}: the predicted step")
    _head(drawing, plan, f"{seconds_text(plan.prediction.step_time_s)} a step")
    scale = (WIDTH - LEFT - RIGHT) / (timeline.step_time_s or 1.0)
    y = TOP + 10.0
    for rank in range(len(timeline.busy_s)):
        gantt = _Gantt(drawing, plan, scale, y)
        y = gantt.draw(rank, [event for event in timeline.events if event.rank == rank], timeline.step_time_s) + GAP
    for at_s in ticks(timeline.step_time_s):
        drawing.line([(LEFT + at_s * scale, TOP + 2), (LEFT + at_s * scale, TOP + 8)], stroke=MUTED)
        drawing.text(LEFT + at_s * scale + 3, TOP + 6, seconds_text(at_s), size=10, fill=MUTED)
    shown = [kind for kind in COLLECTIVES if any(piece.kind == kind for stage in plan.stages for piece in stage.inside)]
    keys = [(BUBBLE, "idle"), (WAITS, "waits for communication"), *((COLLECTIVES[kind], kind.replace("_", "-")) for kind in shown)]
    drawing.keys(LEFT, y + 4, [*keys, (PAGE, "forwards are pale, backwards full; colours tell micro-batches apart")])
    return str(drawing)


class _Gantt:
    """The rows of one rank, from ``y`` down."""

    def __init__(self, drawing: Drawing, plan: Plan, scale: float, y: float) -> None:
        self.drawing, self.plan, self.scale, self.y = drawing, plan, scale, y
        self.lanes: dict[str, float] = {}
        self.reached: dict[float, float] = {}

    def box(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0, tip: str = "") -> None:
        """A box in a row that is at ``y``, in order of time."""
        if x + width >= self.reached.get(y, 0.0) + FINE:
            self.drawing.box(x, y, width, height, fill, opacity=opacity, tip=tip)
            self.reached[y] = x + max(width, FINE)

    def draw(self, rank: int, events: Sequence[Event], end_s: float) -> float:
        """Gives where the rows end."""
        axes = [*self.plan.grid.names, "host"]
        done = {e.action for e in events if e.action is not None}
        used = {p.axis for action in done for p in self.plan.stages[action.stage].inside if p.phase in PHASES.get(action.kind, ())}
        lanes = [axis for axis in axes if axis in used] + [stream for stream in _SENDS if any(e.stream == stream for e in events)]
        self.lanes = {lane: self.y + ROW + 1 + i * (LANE + 1) for i, lane in enumerate(lanes)}
        for y, height, fill in ((self.y, ROW, BUBBLE), *((y, LANE, GRID) for y in self.lanes.values())):
            self.drawing.box(LEFT, y, end_s * self.scale, height, fill)
        self.drawing.text(4, self.y + ROW / 2 + 4, f"pipeline rank {rank}" if self.plan.pipeline.degree > 1 else "every rank")
        for lane, y in self.lanes.items():
            self.drawing.text(16, y + LANE - 0.5, _SENDS.get(lane, lane), size=8.5, fill=MUTED)
        for event in events:
            self._event(event)
        return max(self.lanes.values(), default=self.y + ROW - LANE) + LANE

    def _event(self, event: Event) -> None:
        x, width = LEFT + event.start_s * self.scale, (event.end_s - event.start_s) * self.scale
        pieces = self.plan.stages[event.action.stage].inside if event.action is not None else ()
        parts = play_inside(pieces, event.action, event.start_s, event.end_s) if event.action is not None else []
        if event.stream == "compute":
            self._computation(event, x, width)
        elif event.stream in self.lanes:
            self.box(x, self.lanes[event.stream], width, LANE, MUTED, tip=words(event.action))
        if width > INSIDE or event.stream == "collective":
            for part in parts:
                self._part(part, pieces[part.piece], is_action=event.stream == "collective")
        elif parts:
            self._share(parts, pieces, x, width)
        if event.stream == "compute":
            self._name(event, x, width)

    def _computation(self, event: Event, x: float, width: float) -> None:
        action = event.action
        if action is None:
            fill, opacity = "#555f6d", 1.0
        elif width < THIN:
            fill, opacity = _THIN[action.kind], 1.0
        else:
            fill, opacity = PALETTE[action.microbatch % len(PALETTE)], _SHADES.get(action.kind, 1.0)
            self.drawing.box(x, self.y, width - 0.4, ROW, PAGE)
        self.box(x, self.y, width if width < THIN else width - 0.4, ROW, fill, opacity, words(action))

    def _name(self, event: Event, x: float, width: float) -> None:
        action = event.action
        stage = action.stage if action is not None and len(self.plan.stages) > self.plan.pipeline.degree else ""
        name = "update" if action is None else f"{stage}{action.kind.value}{action.microbatch}"
        if LETTER * 10 * len(name) + 4 < width:
            self.drawing.text(x + 2, self.y + 10, name, size=10, bold=True, fill=PAGE if action is None else INK)

    def _part(self, part: Laid, piece: Piece, *, is_action: bool) -> None:
        x, width = LEFT + part.start_s * self.scale, (part.end_s - part.start_s) * self.scale
        if part.lane == COMPUTE:
            short = re.sub(r"^.*?(?=[^.]+\.\d+(\.|$| ))", "", piece.of)
            if not is_action and LETTER * 9 * len(short) + 4 < width:
                self.drawing.text(x + 2, self.y + ROW - 3, short, size=9)
        elif part.lane == WAIT:
            if not is_action:
                self.drawing.box(x, self.y, width, ROW, WAITS)
        elif part.lane in self.lanes:
            fill = COLLECTIVES.get(piece.kind, MUTED)
            self.box(x, self.lanes[part.lane], width, LANE, fill, tip=f"{piece.kind} {piece.of} {bytes_text(piece.num_bytes)}")

    def _share(self, parts: Sequence[Laid], pieces: Sequence[Piece], x: float, width: float) -> None:
        """Of an action too short for its parts: how much of it is waited, and how much each lane is in use."""
        whole_s = max(part.end_s for part in parts) - min(part.start_s for part in parts)
        used: dict[str, Counter[str]] = {}
        for part in parts:
            used.setdefault(part.lane, Counter())[pieces[part.piece].kind] += part.end_s - part.start_s  # type: ignore[assignment]
        for lane, kinds in used.items():
            share = min(1.0, sum(kinds.values()) / max(whole_s, 1e-30))
            if lane == WAIT:
                self.box(x + width * (1 - share), self.y + 0.7 * ROW, width * share, 0.3 * ROW, WAITS)
            elif lane in self.lanes:
                self.box(x, self.lanes[lane], width, LANE, COLLECTIVES.get(kinds.most_common(1)[0][0], MUTED), share)


def memory_svg(plan: Plan) -> str:
    """What lies in memory over the step, by kind, a panel for each rank of the pipeline."""
    timeline, degree = play(plan), plan.pipeline.degree
    curves = memory_by_kind(plan, timeline)
    drawing = Drawing(WIDTH, f"{plan.model} on {plan.grid}: memory over the step")
    limit = plan.memory_limit_bytes
    _head(drawing, plan, f"peak {bytes_text(max(plan.prediction.peak_memory_bytes))} of {bytes_text(limit)}")
    columns = min(degree, 2)
    width, height = (WIDTH - columns * LEFT - RIGHT) / columns, 220.0 if degree == 1 else 130.0
    most = 1.08 * max(1.0, *(sum(held) for rows in curves for _, held in rows))
    for rank, rows in enumerate(curves):
        x, y = LEFT + rank % columns * (width + LEFT), TOP + 14 + rank // columns * (height + 36)
        x_of, y_of = width / (timeline.step_time_s or 1.0), height / most
        for value in ticks(most, 4, base=2.0):
            drawing.line([(x, y + height - value * y_of), (x + width, y + height - value * y_of)])
            drawing.text(x - 5, y + height - value * y_of + 4, bytes_text(value), size=9.5, fill=MUTED, anchor="end")
        for top in range(len(KINDS), 0, -1):  # each over what lies below it
            line = [(x + t * x_of, y + height - sum(held[:top]) * y_of) for t, held in rows] + [(x + width, y + height)]
            outline = [line[0]] + [point for a, b in pairwise(line) for point in ((b[0], a[1]), b)]
            drawing.area([(x, y + height), *outline], KINDS[MEMORY[top - 1]])
        if limit and limit < most:
            drawing.line([(x, y + height - limit * y_of), (x + width, y + height - limit * y_of)], stroke=INK, dash="6 4")
        drawing.text(x, y - 4, f"pipeline rank {rank}" if degree > 1 else "every rank", bold=True)
        drawing.text(x, y + height + 13, "0 s", size=9.5, fill=MUTED)
        drawing.text(x + width, y + height + 13, seconds_text(timeline.step_time_s), size=9.5, fill=MUTED, anchor="end")
    drawing.keys(LEFT, drawing.height + 12, [(fill, kind) for kind, fill in KINDS.items()])
    return str(drawing)


def _head(drawing: Drawing, plan: Plan, figure: str) -> None:
    drawing.text(4, 16, f"{plan.model} on {plan.grid}: {plan.config or 'automatic'}", size=13, bold=True)
    drawing.text(4, 32, f"{figure}, on {plan.machine}", fill=MUTED)


def rows_svg(rows: Sequence[Row]) -> str:
    """Step time against peak memory of the plans of a comparison; hollow points do not fit."""
    shown = [row for row in rows if row.prediction is not None]
    width, height, left, top = 640.0, 340.0, 84.0, 20.0
    drawing = Drawing(left + width + 20, "step time against peak memory")
    most_s = 1.1 * max((row.step_time_s for row in shown), default=1.0)
    most = 1.1 * max((max(row.peak_memory_bytes, default=0) for row in shown), default=1)
    for value in ticks(most, 5, base=2.0):
        y = top + height * (1 - value / most)
        drawing.line([(left, y), (left + width, y)])
        drawing.text(left - 6, y + 4, bytes_text(value), size=10, fill=MUTED, anchor="end")
    for value in ticks(most_s):
        x = left + width * value / most_s
        drawing.line([(x, top), (x, top + height)])
        drawing.text(x, top + height + 15, seconds_text(value), size=10, fill=MUTED, anchor="middle")
    for row in shown:
        x = left + width * row.step_time_s / most_s
        y = top + height * (1 - max(row.peak_memory_bytes) / most)
        is_right = x > left + 0.75 * width
        drawing.dot(x, y, "#0072b2" if row.fits else PAGE, tip=row.layout, stroke="none" if row.fits else "#d55e00")
        name, (away, anchor) = row.name + ("" if row.fits else " (does not fit)"), (-9, "end") if is_right else (9, "start")
        drawing.text(x + away, y + 4, name, anchor=anchor)
    drawing.text(left + width / 2, top + height + 34, "step time; down and to the left is better", fill=MUTED, anchor="middle")
    drawing.height = max(drawing.height, top + height + 36)
    return str(drawing)
