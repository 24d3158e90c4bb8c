"""All hand-written configurations of a grid, each with its predicted step: what an expert could have chosen.

Those that share degrees share a search: a micro-batch is one program, on whose solution recomputation and schedules are played. Deep models
are sketched (`solve.outline`), so that a program is that of a few blocks.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from autopar.errors import PlanError
from autopar.plan import Pipeline
from autopar.solve.fold import Folded
from autopar.solve.manual import Manual, UnusedSettingWarning
from autopar.solve.outline import Outline
from autopar.solve.recompute import LEVELS
from autopar.solve.search import Search
from autopar.solve.state import StateBytes
from autopar.units import bytes_text, number_text, seconds_text

MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Stages per rank; several are interleaved."""
USUAL = ("1f1b", "interleaved:2")
"""Schedules beside context and expert parallelism."""
LONG = 8192
"""Tokens of a sequence for each rank of context parallelism, from which on it leaves a node."""


class Left(Enum):
    """Why a choice of degrees and micro-batch is not enumerated, in words that follow a number of them, which may be 1."""

    STAGES = "with more stages than the model has blocks and ends"
    TENSOR = "with tensor parallelism beyond a node"
    SAMPLES = "with the sequences of several samples shared, which as many more data-parallel ranks do without gathering keys and values"
    CONTEXT = f"with context parallelism beyond a node with less than {LONG} tokens a rank"
    EXPERTS = "with expert parallelism beyond a node, but not over as many ranks as there can be"
    BOTH = "with context and expert parallelism"


@dataclass(frozen=True, slots=True)
class Space:
    """What configurations may be of.

    Args:
        num_ranks: of the grid.
        batch_size: samples of the global batch.
        most_tp: tensor-parallel ranks, at most; people stay within a node.
        most_stages: stages, at most: as many as the model has blocks, and two for its ends.
        sequence: tokens of a sample; 1 if it has none.
        experts: a number that all layers of experts have a multiple of; 1 if there are none.
        training: else nothing is recomputed, no optimizer sharded and no schedule chosen.
        is_split: whether the batch may be cut into micro-batches; else each rank has its share of it at once, and there are no stages.
    """

    num_ranks: int
    batch_size: int
    most_tp: int
    most_stages: int
    sequence: int = 1
    experts: int = 1
    training: bool = True
    is_split: bool = True

    def degrees(self, left: Counter[Left]) -> Iterator[tuple[int, int, int, int, int, int]]:
        """All dp, tp, pp, cp, ep and micro-batches that divide ranks, batch, sequence and experts, but for those that are ``left``."""
        for tp, pp, cp in product(_divisors(self.num_ranks), repeat=3):
            if self.num_ranks % (tp * pp * cp) or self.sequence % cp:
                continue
            dp = self.num_ranks // (tp * pp * cp)
            sizes = MICRO_BATCHES if self.is_split else (max(1, self.batch_size // dp),)
            for ep, size in product(_divisors(math.gcd(dp, self.experts)), sizes):
                if self.batch_size % (dp * size) == 0 and (self.is_split or pp == 1):
                    why = self._why_left(dp, tp, pp, cp, ep, size)
                    if why is None:
                        yield dp, tp, pp, cp, ep, size
                    else:
                        left[why] += 1

    def _why_left(self, dp: int, tp: int, pp: int, cp: int, ep: int, size: int) -> Left | None:
        reasons = {
            Left.STAGES: pp > self.most_stages,
            Left.TENSOR: tp > self.most_tp,
            Left.SAMPLES: cp > 1 and size > 1,
            Left.CONTEXT: cp > 1 and cp > max(self.most_tp // tp, self.sequence // LONG),
            Left.EXPERTS: 1 < ep < math.gcd(dp, self.experts) and ep * tp > self.most_tp,
            Left.BOTH: cp > 1 and ep > 1,
        }
        return next((why for why, holds in reasons.items() if holds), None)


@dataclass(frozen=True, slots=True)
class Point:
    """What a configuration takes.

    Args:
        config: the configuration.
        fits: whether it is legal and fits the memory limit; ``reason`` says why not.
        step_time_s: predicted, in the layout that is fastest without a limit, or where that does not fit and would be the fastest of all
            until then, in the one that is fastest within it; nan if it was not worked out.
        bubble_fraction: idle part of the pipeline.
        peak_memory_bytes: of the rank that needs most; the least that it may be if no step was worked out.
    """

    config: Manual
    fits: bool
    reason: str
    step_time_s: float
    bubble_fraction: float
    peak_memory_bytes: int


def configurations(space: Space, left: Counter[Left] | None = None) -> list[Manual]:
    """The configurations of a space: all degrees, micro-batches of `MICRO_BATCHES` samples, 1F1B, ZB-H1 and interleaving of `CHUNKS` (with
    context or expert parallelism `USUAL` schedules), and all levels of recomputation. Degrees that are left out are counted in ``left``.

    Tensor parallelism comes with sequence parallelism. The optimizer is sharded over data parallelism (ZeRO-1); without stages also
    ZeRO-3, which pipelines would gather for every micro-batch, over all of it and within a node.
    """
    found = []
    levels = LEVELS if space.training else LEVELS[:1]
    for dp, tp, pp, cp, ep, size in space.degrees(Counter() if left is None else left):
        count = space.batch_size // (dp * size)
        schedules = _schedules(pp, count, space.most_stages) if space.training else ["1f1b"]
        for schedule in (name for name in schedules if cp * ep == 1 or name in USUAL):
            for zero in (0,) if dp * cp == 1 or not space.training else (1, 3) if pp == 1 else (1,):
                config = Manual(dp, tp, zero, tp > 1, pp, schedule, micro_batch=size, cp=cp, ep=ep)
                ways = [config, *_within_node(config, space.most_tp)] if zero == 3 else [config]
                found += [replace(way, recompute=level) for way in ways for level in levels]
    return found


def _within_node(config: Manual, ranks: int) -> Iterator[Manual]:
    """With the same shards on every node of so many ranks, where there are several."""
    replicas = config.dp * config.cp * config.tp // ranks
    if replicas > 1 and config.dp % replicas == 0 and config.dp // replicas % config.ep == 0 and config.dp * config.cp > replicas:
        yield replace(config, replicas=replicas)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _schedules(pp: int, microbatches: int, most_stages: int) -> Iterator[str]:
    yield "1f1b"
    if pp > 1:
        yield "zb-h1"
        if microbatches % pp == 0:
            yield from (f"interleaved:{chunks}" for chunks in CHUNKS[1:] if pp * chunks <= most_stages)


def price_all(configs: Sequence[Manual], search: Search, folded: Folded | None, batch_size: int) -> list[Point]:
    """What each configuration takes; those that fit first, the fastest of them first.

    Args:
        configs: to be priced.
        search: of the same model and cluster, without restrictions; it tells the progress.
        folded: the model in short; None if it is small or has no equal blocks, and is priced whole.
        batch_size: samples of the global batch.
    """
    families: dict[object, list[Manual]] = {}
    for config in configs:
        key = config.dp, config.tp, config.pp, config.cp, config.ep, config.zero, config.replicas, config.sequence_parallel
        families.setdefault(key, []).append(config)
    points: list[Point] = []
    state = StateBytes.of(search.normal_for(Pipeline()).module, search.optimizer, training=search.training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedSettingWarning)
        for family in families.values():
            best = min((point.step_time_s for point in points if point.fits), default=math.inf)
            so_far = f", best so far {seconds_text(best)}" if best < math.inf else ""
            search.report(f"{len(points)} of {number_text(len(configs), 'configuration')} priced{so_far}")
            least, limit = least_bytes(state, family[0]), search.limit(family[0].shape(batch_size))
            if least > limit.mean:
                reason = f"its parameters and their state need {bytes_text(least)} per rank, the limit is {limit}"
                points += [Point(config, False, reason, math.nan, 0.0, int(least)) for config in family]
                continue
            own = search.alike(restrictions=family[:1])
            outline = Outline(folded, own) if folded is not None else None
            for config in family:
                points.append(_point(config, own, outline, batch_size, best))
                best = min(best, points[-1].step_time_s) if points[-1].fits else best
    return sorted(points, key=lambda point: (not point.fits, point.step_time_s if point.fits else 0.0))


def least_bytes(state: StateBytes, config: Manual) -> float:
    """What the mean rank needs for the state of the model; the fullest needs no less."""
    parts = [config.zero_ranks if config.zero >= level else config.ep for level in (3, 2, 1)]  # if all parameters are of experts
    return sum(num_bytes / part for num_bytes, part in zip(state, parts, strict=True)) / (config.tp * config.pp)


def _point(config: Manual, search: Search, outline: Outline | None, batch_size: int, best_s: float) -> Point:
    """The figures of one configuration, laid out as is fastest; within the limit if it may take less than ``best_s``."""
    shape, found, limit = config.shape(batch_size), None, None
    try:
        limit = search.limit(shape)
        found = search.unlimited(shape) if outline is None else outline.play(outline.layout(shape))
        if not found.fits(limit) and found.step_time_s < best_s:
            found = search.decide(shape) if outline is None else outline.sketch(shape)
    except PlanError as error:
        if found is None or limit is None:
            return Point(config, False, str(error), math.nan, 0.0, 0)
    peak = max(found.rank_bytes)
    reason = "" if found.fits(limit) else f"needs {bytes_text(peak)} per rank, the limit is {limit}"
    return Point(config, not reason, reason, found.step_time_s, found.bubble_fraction, int(peak))
