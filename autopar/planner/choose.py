"""A session and candidates of meshes -> the best plan: shapes are sketched or solved, and what nothing fits is explained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from autopar.capture.trace import Source
from autopar.compression import Compression
from autopar.cost.machine import MachineProfile
from autopar.errors import InfeasibleError, MicrobatchError, PlanError
from autopar.garbage import no_collection
from autopar.mesh import Mesh
from autopar.offload import CHOICES, NOTHING, Offload
from autopar.plan import Plan
from autopar.planner.session import Session
from autopar.report import Report, silent
from autopar.solve.bound import Bound
from autopar.solve.decide import PLAN_GAP, Decision
from autopar.solve.fold import KEPT, Folded
from autopar.solve.manual import Manual
from autopar.solve.outline import Outline
from autopar.solve.parts import Sketch
from autopar.solve.pins import Pin, Restriction
from autopar.solve.places import places_of
from autopar.solve.search import Search
from autopar.solve.shapes import MANY_MICROBATCHES, MANY_SCHEDULES, Shape, accumulating, pipelined
from autopar.solve.shortage import MAX_SHAPES, explain_shortage
from autopar.solve.write import write_plan
from autopar.units import number_text

MachineOf = Callable[[Mesh], MachineProfile]
COARSE = 0.02
"""How much of a step is made up for by cuts within blocks where stages have hardly more than one each."""


@no_collection()
def make_plan(
    session: Session,
    shapes: Sequence[Shape],
    machine_of: MachineOf,
    *,
    memory_limit_bytes: float | None,
    restrictions: Sequence[Restriction],
    optimizer: str,
    training: bool,
    config: str = "",
    widen: bool = False,
    others: Sequence[Mesh] = (),
    average: bool = False,
    compression: Compression | None = None,
    known: dict[object, Decision] | None = None,
    blame: bool = True,
    pipeline: bool = True,
    offload: Offload | None = NOTHING,
    keeps_best: bool = False,
    is_complete: bool = False,
    report: Report = silent,
) -> tuple[Plan, Decision]:
    """The best plan over candidate shapes.

    Args:
        shapes: to try first.
        widen: also try their grids with pipeline stages (on axes that no pin names), and where the batch does not fit whole without them
            in parts.
        others: grids of the same ranks to try too, of which only deep models also try the pipelines, on those of several axes.
        average: whether a batch that must be whole may be micro-batches that are averaged.
        compression: how gradients travel.
        known: what was found so far for other memory limits (`Search`).
        blame: where nothing fits, search again under fewer pins for those that are to blame.
        pipeline: whether stages may take the place of a configuration then.
        offload: what lies on the host; None: nothing, and where nothing fits so what is fastest.
        keeps_best: where the search is interrupted, give the best plan that it has found.
        is_complete: leave out only what is proved to be no faster.

    Raises:
        KeyboardInterrupt: interrupted, and no plan was found until then, or it is not asked for.
        InfeasibleError: nothing fits on any of them.
        ConflictError: pins go against each other, whatever the memory.
        MicrobatchError: the one shape that is asked for splits a batch that must be whole.
        PlanError: a pin does not fit, or gradients are to be compressed that are complex.
    """
    if compression is not None:
        _check_real(session, compression)
    machine_of = cache(machine_of)
    search = Search(
        session.normal_for,
        machine_of,
        memory_limit_bytes,
        restrictions,
        optimizer,
        training,
        report,
        offload=offload or NOTHING,
        compression=compression,
        keeps_best=keeps_best,
        is_complete=is_complete,
    )
    if known is not None:
        search.known = known
    try_all = partial(_try_all, session=session, shapes=shapes, widen=widen, others=others, average=average)
    reason, folded = try_all(search)
    if search.best is None and offload is None and _has_host(search, shapes[0]):
        search, (reason, folded) = _fastest_offload(search, try_all) or (search, (reason, folded))
    if search.best is None:

        def under(kept: Sequence[Restriction]) -> Search:
            other, is_free = search.under(kept, MAX_SHAPES), Manual in map(type, {*restrictions} - {*kept})
            others = [Shape(_without_stages(shape)) for shape in shapes] if is_free else shapes
            _try_all(other, session, others, widen=widen or (is_free and pipeline), average=average)
            return other

        raise explain_shortage(search, shapes[0], under if blame else None, _ways_out(search, shapes[0], offload))
    best, limit = search.best, search.limit(search.best.shape).most
    written = write_plan(
        best,
        machine=machine_of(best.shape.grid),
        model=session.name,
        batch=session.batch,
        memory_limit_bytes=int(limit if math.isfinite(limit) else machine_of(best.shape.grid).device.memory_bytes),
        capture_time_s=session.capture_time_s,
        config=config,
        precision=str(session.precision or ""),
        alternatives=search.alternatives(),
        notes=_notes(session, search, reason, folded, average=average, is_chosen=offload is None and bool(search.offload)),
        is_interrupted=search.is_interrupted,
    )
    return written, best.decision


def _has_host(search: Search, shape: Shape) -> bool:
    """Whether devices have another memory beside them."""
    return search.training and search.machine_of(shape.grid).device.has_host


def _fastest_offload(
    search: Search, try_all: Callable[[Search], tuple[str, Folded | None]]
) -> tuple[Search, tuple[str, Folded | None]] | None:
    """A search that ended in a plan with something on the host: of the first of `CHOICES` in which anything fits, that of the fastest."""
    for tier in CHOICES:
        found = list[tuple[float, int, Search, tuple[str, Folded | None]]]()
        for choice in tier:
            search.report(f"nothing fits, trying offload={str(choice)!r}")
            other = replace(search.offloading(choice), keeps_best=search.keeps_best)
            how = try_all(other)
            if other.best is not None:
                found.append((other.best.step_time_s, len(found), other, how))
            if other.is_interrupted:
                return other, how
        if found:
            return min(found, key=lambda entry: entry[:2])[2:]
    return None


def _ways_out(search: Search, shape: Shape, offload: Offload | None) -> str:
    """What is left to try beside what was, in words."""
    if offload is None or offload or not _has_host(search, shape):
        return ""
    return "nothing lies on the host: offload='auto' also tries optimizer state, parameters and activations in its memory"


def _notes(session: Session, search: Search, reason: str, folded: Folded | None, *, average: bool, is_chosen: bool) -> list[str]:
    """What a reader of the plan should know of how it was found."""
    notes = [f"one static batch: {session.captured.static_reason}"] if session.captured.static_reason else []
    if is_chosen:
        notes.append(f"nothing fits the memory of the devices alone; the host has what offload={str(search.offload)!r} says")
    if search.offload.folder:
        notes.append(f"what the disk behind {search.offload.folder} takes to read and write optimizer state is not in the step time")
    if reason:
        what = "micro-batches would be batches of their own, with the average of their losses" if average else "one micro-batch"
        notes.append(f"{what}: {reason}")
    best = search.best
    if best is not None and best.shape.recompute not in (None, "none") and search.training and not best.again:
        notes.append(f"recompute={best.shape.recompute!r} computes nothing again: it goes block by block, and no blocks repeat")
    if folded is not None:
        notes.append(f"shapes are judged by {KEPT} of {folded.blocks} equal blocks, and the best is made whole")
    if search.is_interrupted:
        notes.append(f"interrupted: the best of {number_text(len(search.tried), 'shape')} tried until then, others may be faster")
    limit = search.limit(best.shape) if best is not None else None
    if limit is not None and len(set(limit.positions)) > 1:
        notes.append(f"the memory limit is {limit}, by the devices of a stage; what is shown beside a limit is beside the largest")
    if pruned := search.pruned.total():
        why = ", ".join(f"{count} {bound.value}" for bound, count in search.pruned.most_common() if count)
        notes.append(f"{pruned} of {pruned + len(search.tried)} shapes {'is' if pruned == 1 else 'are'} not tried: {why}")
    return notes


def _check_real(session: Session, compression: Compression) -> None:
    """Raise `PlanError` if the model has complex parameters."""
    nodes = session.captured.graph.graph.find_nodes(op="placeholder")
    entries = zip(nodes, session.captured.placeholders, strict=True)
    names = [entry.name for node, entry in entries if entry.source is Source.PARAMETER and node.meta["val"].is_complex()]
    if names:
        raise PlanError(
            f"compress={str(compression)!r} is for gradients of real numbers, and those of {', '.join(names[:3])} are complex; "
            "leave compress out"
        )


def _try_all(
    search: Search, session: Session, shapes: Sequence[Shape], *, widen: bool, others: Sequence[Mesh] = (), average: bool
) -> tuple[str, Folded | None]:
    """Try shapes as `make_plan` says; tell why the batch must be whole, and the model in short if they are judged by it.

    Raises:
        MicrobatchError: the one shape that is asked for splits a batch that must be whole.
        PlanError: a pin does not fit.
    """
    is_split = widen or any(shape.pipeline.microbatches > 1 for shape in shapes)
    reason = why_whole(session) if is_split else ""
    shapes = [_averaged(shape) if reason and average else shape for shape in shapes]
    folded = session.folded() if widen and not (search.restrictions or reason) else None
    try:
        if len(shapes) == 1 and not (widen or others):
            try:
                search.best = search.decide(shapes[0])
            except InfeasibleError as error:
                search.refuse(shapes[0], error)
        elif folded is None or not _try_deeply(search, folded, shapes, others, session.batch_size):
            search.try_shapes([*shapes, *map(Shape, others)])
        if widen and (average or not reason) and (folded is None or search.best is None):
            _try_widely(search, [shape.mesh for shape in shapes], session.batch_size, is_average=bool(reason))
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.interrupt()
    return reason, folded


def _without_stages(shape: Shape) -> Mesh:
    """The ranks of a configuration, with those of the pipeline on its first axis."""
    first, *others = shape.mesh.sizes
    return Mesh(shape.mesh.names, (shape.pipeline.degree * first, *others))


def _try_deeply(search: Search, folded: Folded, shapes: Sequence[Shape], others: Sequence[Mesh], batch_size: int) -> bool:
    """Sketch shapes of a deep model with and without stages, and where the batch does not fit whole in parts, and make the best whole; tell
    whether any fits. Where none does, nothing is left of what was tried: the whole model then tells why."""
    try:
        search.check_least(shapes[0])
    except InfeasibleError:
        return False
    grids = [shape.mesh for shape in shapes]
    outline = Outline(folded, search)
    split = [other for other in others if len(other.sizes) > 1]
    deep = _unlike(search, pipelined([*grids, *split], batch_size, per_rank=MANY_MICROBATCHES, schedules=MANY_SCHEDULES))
    in_parts = accumulating(grids, batch_size)

    def fitting_or_seconds(shape: Shape) -> tuple[bool, float]:
        least_s = outline.least_step_time_s(shape)
        if search.best is not None and least_s >= search.best.step_time_s:
            return False, least_s
        layout = outline.layout(shape)
        return layout.fits(search.limit(shape)), layout.floor_s

    for candidates in ([*deep, *shapes, *map(Shape, others)], in_parts):
        try:
            _take_best(search, outline.search_shapes(candidates), folded.blocks)
            if search.best is not None and candidates is not in_parts:
                _take_best(search, outline.search_shapes(_worth_parts(search, in_parts, fitting_or_seconds)), folded.blocks)
        except KeyboardInterrupt:
            if search.best is not None or not outline.found:
                raise
            search.interrupt()
            search.report(f"making the best of {len(outline.found)} sketched shapes whole")
            _take_best(search, outline.finish(), folded.blocks)
        if search.best is not None:
            return True
        if search.is_interrupted:
            raise KeyboardInterrupt
    search.tried.clear()
    search.pruned.clear()
    search.closest = None
    return False


def _take_best(search: Search, sketches: Sequence[Sketch], blocks: int) -> None:
    """Make sketches whole, the fastest first, until none that is left can be faster. Of stages with hardly more than one of the ``blocks``
    each, which the whole model is also cut within, one more is made whole that seems to be a little slower."""
    coarse = 1
    for sketch in sketches:
        if search.best is not None and sketch.step_time_s >= search.best.step_time_s * (1 - PLAN_GAP):
            if sketch.step_time_s >= search.best.step_time_s * (1 + COARSE) or not coarse:
                return
            if 2 * sketch.shape.pipeline.stages <= blocks:
                continue
            coarse -= 1
        try:
            search.take(sketch.shape, sketch.levels, sketch.decision)
        except InfeasibleError as error:  # of a limit that the sketch just fits
            search.refuse(sketch.shape, error)


def _unlike(search: Search, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes without those that have the prices of an earlier one: their stages lie on another axis of the grid, and the links of all
    axes are the same then, in the same order. Pins name axes, and stages of several kinds of devices differ by where they lie: of these
    all are left."""
    found, known, links = dict[object, Shape](), dict[object, object](), dict[object, int]()
    for shape in shapes:
        where = shape.mesh, shape.pipeline.degree, shape.pipeline.position
        if where not in known:
            machine = search.machine_of(shape.grid)
            places = places_of(machine, shape)
            number = links.setdefault((places.inside, places.links, shape.mesh.sizes), len(links))
            known[where] = where if search.restrictions or machine.kinds else number
        found.setdefault((known[where], replace(shape.pipeline, axis="", position=0)), shape)
    search.pruned[Bound.ALIKE] += len(shapes) - len(found)
    return list(found.values())


def _try_widely(search: Search, grids: Sequence[Mesh], batch_size: int, *, is_average: bool) -> None:
    """Pipelines on some grids; where the batch does not fit whole without them, also in parts."""

    def fitting_or_seconds(shape: Shape) -> tuple[bool, float]:
        free = search.unlimited(shape)
        return free.fits(search.limit(shape)), free.step_time_s

    pinned = {axis for r in search.restrictions if isinstance(r, Pin) for axis, _ in r.axes}
    shapes = _unlike(search, pipelined(grids, batch_size, kept=pinned))
    search.try_shapes(map(_averaged, shapes) if is_average else shapes)
    shapes = accumulating(grids, batch_size)
    shapes = [_averaged(shape) for shape in shapes] if is_average else shapes
    search.try_shapes(_worth_parts(search, shapes, fitting_or_seconds) if search.best is not None else shapes)


def _worth_parts(search: Search, shapes: Sequence[Shape], free: Callable[[Shape], tuple[bool, float]]) -> list[Shape]:
    """Of the shapes that run the batch in parts those that may be faster than the best: on each grid few parts before many, until they fit,
    or take no less than the best even without a limit of memory. That more parts take longer is likely, and not proved: a complete search
    goes on.

    Args:
        search: with a best.
        shapes: by grid, few parts before many.
        free: whether a shape fits without a limit of memory, and its seconds then.
    """
    assert search.best is not None
    found, best_s = list[Shape](), search.best.step_time_s
    for mesh in dict.fromkeys(shape.mesh for shape in shapes):
        tried = Shape(mesh)
        for shape in (shape for shape in shapes if shape.mesh == mesh):
            is_fitting, seconds = free(tried)
            if is_fitting or (seconds >= best_s and not search.is_complete):
                break
            found.append(shape)
            tried = shape
    return found


def why_whole(session: Session) -> str:
    """Why the batch cannot be split exactly; empty if it can."""
    try:
        session.normal.split(_least_divisor(session.batch_size))
    except MicrobatchError as error:
        return str(error)
    return ""


def _averaged(shape: Shape) -> Shape:
    return replace(shape, pipeline=replace(shape.pipeline, is_average=shape.pipeline.microbatches > 1))


def _least_divisor(size: int) -> int:
    """The fewest equal parts, more than one, of a batch."""
    return next((count for count in range(2, size + 1) if size % count == 0), 1)


def memory_bytes(limit: int | float | str | None) -> float | None:
    """A memory limit as bytes; text such as ``'10GiB'`` or ``'800 MB'`` is read.

    Raises:
        PlanError: it cannot be read or is not positive.
    """
    if limit is None:
        return None
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "b": 1}
    value = limit
    if isinstance(limit, str):
        text = limit.strip().lower().replace(" ", "")
        unit = next((u for u in units if text.endswith(u)), "")
        try:
            value = float(text.removesuffix(unit)) * units.get(unit, 1)
        except ValueError:
            raise PlanError(f"memory_limit {limit!r} is not a size; write bytes as a number, or text such as '10GiB'") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise PlanError(f"memory_limit must be a positive number of bytes, got {limit!r}")
    return float(value)


def factorizations(num_ranks: int) -> list[Mesh]:
    """Grids that a plain number of ranks may be: one axis, and every product of two, the smaller outside."""
    pairs = [(a, num_ranks // a) for a in range(2, int(num_ranks**0.5) + 1) if num_ranks % a == 0]
    return [Mesh.of(num_ranks), *(Mesh.of(pair) for pair in pairs)]
