"""The phases of a step of a stage (`liveness.Phase`): bytes at every op, and the most of each phase."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.solve.liveness import Liveness, Moment, Phase


class OverTime(NamedTuple):
    """Bytes at each op: of what comes and goes, with ``gathers`` (copies of parameters), ``reductions`` (whole gradients), ``joins`` (what
    outputs that are made whole take beside themselves), ``resharding`` (what gradients take more where they are moved) and ``joining``
    (parts that the backward joins) in it, and of what does so in the ``forward``; of what is kept from the op on, with ``copies`` of
    parameters in it; of what is kept from the op on on the host (``moved``)."""

    crossing: np.ndarray
    forward: np.ndarray
    gathers: np.ndarray
    reductions: np.ndarray
    joins: np.ndarray
    resharding: np.ndarray
    joining: np.ndarray
    kept: np.ndarray
    copies: np.ndarray
    moved: np.ndarray


class Peak(NamedTuple):
    """Bytes at a moment, beside parameters and optimizer state."""

    gradients: float
    gathered: float
    activations: float
    buffers: float


class OfParameters(NamedTuple):
    """Bytes at each op: gradients that a backward has ``made`` when it is there, parts of what it has not (``partial``), what reductions
    make of them (``coming``), copies that are made once a step, and what the optimizer takes for what the op is the first to use; what it
    takes for all ``together``; and of `ParameterBytes` in all. ``beside`` is as partial, of backwards after the first."""

    made: np.ndarray
    partial: np.ndarray
    beside: np.ndarray
    coming: np.ndarray
    copied: np.ndarray
    updated: np.ndarray
    together: float
    kinds: np.ndarray


class Walk(NamedTuple):
    """Bytes at the backward of an op beside what is kept, ``passing`` without gradients and copies: in the ``first`` backward of a stage,
    with those that it has made by then; ``later``, beside all of them; in the ``last``, with what reductions make."""

    passing: np.ndarray
    first: np.ndarray
    later: np.ndarray
    last: np.ndarray

    @staticmethod
    def of(over_time: OverTime, of_parameters: OfParameters, is_own: np.ndarray, *, has_later: bool) -> Walk:
        kept = over_time.kept * is_own
        passing = over_time.crossing + np.cumsum(kept) - float(kept.sum()) + of_parameters.partial
        first, later = passing + of_parameters.made + of_parameters.copied, passing + of_parameters.beside
        return Walk(passing, first, later, of_parameters.coming + (later if has_later else first))


def peaks_of(
    live: Liveness, stage: int, over_time: OverTime, of_parameters: OfParameters, walk: Walk, is_own: np.ndarray
) -> dict[Moment, Peak]:
    """The most of each phase of a stage, with the op at which it is; ``is_own`` says which ops are of the stage."""
    _, gradients, _, gathered, reduced = map(float, of_parameters.kinds)
    own, own_copies = float((over_time.kept * is_own).sum()), over_time.copies * is_own
    outputs, later = live.given_bytes(stage), live.later[stage]
    made, copied, coming, updated = of_parameters.made, of_parameters.copied, of_parameters.coming, of_parameters.updated
    first, after, last, largest = (int(np.argmax(np.where(is_own, amounts, -np.inf))) for amounts in (*walk[1:], updated))

    def at(position: int, passing: np.ndarray, micro_batches: float, made: float, copied: float) -> Peak:
        others = float(own_copies.sum()) * (micro_batches - 1)
        copied_here = float(over_time.gathers[position] + own_copies[: position + 1].sum()) + others
        whole = float(over_time.reductions[position])
        rest = micro_batches * own + float(passing[position]) - copied_here - whole
        return Peak(made, copied + copied_here, rest, outputs + whole)

    in_last = (walk.later, gradients, gathered) if later else (walk.passing, float(made[last]), float(copied[last]))
    passing, whole, copies = in_last
    return {
        Moment(Phase.FIRST, first): at(first, walk.passing, live.live[stage], float(made[first]), float(copied[first])),
        Moment(Phase.LATER, after): at(after, walk.later, later, gradients, gathered) if later else Peak(*[0.0] * 4),
        Moment(Phase.LAST, last): at(last, passing, 1, whole + float(coming[last]), copies),
        Moment(Phase.END, after): Peak(reduced, 0.0, 0.0, outputs + live.joined_bytes(stage)),
        Moment(Phase.UPDATE, largest): Peak(
            reduced, 0.0, 0.0, outputs + live.received_bytes(stage) + of_parameters.together + float(updated[largest])
        ),
    }
