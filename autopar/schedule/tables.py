"""Generators of schedules: in which order each rank computes. Communication is added by ``autopar.schedule.lower``.

With p ranks, v stages on each, m micro-batches, equal stages and free communication:

| name        | bubble                         | micro-batches alive on rank r | source                                        |
|-------------|--------------------------------|-------------------------------|-----------------------------------------------|
| gpipe       | (p-1) / (vm+p-1)               | vm                            | Huang et al. 2019; v > 1: Lamy-Poirier 2023   |
| 1f1b        | (p-1) / (m+p-1)                | min(m, p-r)                   | Narayanan et al. 2019 (PipeDream), 2021       |
| interleaved | (p-1) / (vm+p-1)               | min(vm, (v-1)p + 2(p-r) - 1)  | Narayanan et al. 2021 (Megatron), section 2.2 |
| zb-h1       | (p-1)(F+I-W) / that + m(F+I+W) | min(m, p)                     | Qi et al. 2023, section 2.1                   |

(F, I, W: times of forward, input gradients and weight gradients. The bubbles with v > 1 and of zb-h1 hold for m >= p, that of zb-h1 for
W <= F and W <= I, the live count of interleaved for multiples of p.) Every table does the backwards of a stage in the order of
micro-batches, so that all sum gradients in the same order, to the same bits.

[Note: torch's generators] torch.distributed.pipelining (2.13) holds the same orders, as private methods of schedules that are built from
real stages in a process group, so a plan for a cluster that is not there cannot ask for them; GPipe and 1F1B of one stage are loops, not
tables. tests/schedule/test_tables.py proves these tables equal to torch's where torch has them: 1F1B, interleaved, breadth-first GPipe (but
for the order of micro-batches in its backward) and ZB-H1, which is torch's InterleavedZeroBubble with one stage per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from autopar.errors import PlanError
from autopar.schedule.actions import Action, Kind, Schedule
from autopar.units import number_text


def _one_after_the_other(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """``ahead`` forwards, then forward and backward in turn."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for i, backward in enumerate(backwards):
        yield from forwards[ahead + i : ahead + i + 1]
        yield backward


def _groups(degree: int, microbatches: int) -> list[range]:
    """Micro-batches that pass all stages of a rank together: p each if p divides m, else more, as even as can be, larger ones first."""
    count = max(1, microbatches // degree)
    size, longer = divmod(microbatches, count)
    starts = [size * i + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def gpipe(degree: int, stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards; with several stages on a rank, one stage after the other (breadth first)."""
    table = []
    for rank in range(degree):
        own = range(rank, stages, degree)
        forwards = [Action(stage, Kind.FORWARD, k) for stage in own for k in range(microbatches)]
        table.append((*forwards, *(Action(stage, Kind.BACKWARD, k) for stage in reversed(own) for k in range(microbatches))))
    return Schedule("gpipe", degree, stages, microbatches, tuple(table))


def one_f_one_b(degree: int, stages: int, microbatches: int) -> Schedule:
    """Rank r does p - r - 1 forwards, then forward and backward in turn, so that p - r micro-batches are alive."""
    table = []
    for rank in range(degree):
        forwards = [Action(rank, Kind.FORWARD, k) for k in range(microbatches)]
        backwards = [Action(rank, Kind.BACKWARD, k) for k in range(microbatches)]
        table.append(tuple(_one_after_the_other(forwards, backwards, degree - rank - 1)))
    return Schedule("1f1b", degree, stages, microbatches, tuple(table))


def interleaved(degree: int, stages: int, microbatches: int) -> Schedule:
    """Groups of p micro-batches go through all stages of a rank; (v-1) p + 2 (p-r-1) forwards, then forward and backward in turn.

    Megatron's order, where m must be a multiple of p. Here any m will do: the groups are then larger than p (fewer idle ticks, more
    memory); torch does the same where groups come out equal.
    """
    groups = _groups(degree, microbatches)
    table = []
    for rank in range(degree):
        own = range(rank, stages, degree)
        forwards = [Action(stage, Kind.FORWARD, k) for group in groups for stage in own for k in group]
        backwards = [Action(stage, Kind.BACKWARD, k) for group in groups for stage in reversed(own) for k in group]
        ahead = (len(own) - 1) * len(groups[0]) + 2 * (degree - rank - 1)
        table.append(tuple(_one_after_the_other(forwards, backwards, ahead)))
    return Schedule("interleaved", degree, stages, microbatches, tuple(table))


def zb_h1(degree: int, stages: int, microbatches: int) -> Schedule:
    """1F1B with the backward in two: weight gradients follow r micro-batches behind input gradients, so that p are alive on every rank.

    Earlier stages get their gradients sooner, and the weight gradients left over fill the end, where later ranks would idle.
    """
    table = []
    for rank in range(degree):
        ahead = min(degree - rank - 1, microbatches)
        row = [Action(rank, Kind.FORWARD, k) for k in range(ahead)]
        for k in range(microbatches):
            if ahead + k < microbatches:
                row.append(Action(rank, Kind.FORWARD, ahead + k))
            row.append(Action(rank, Kind.INPUT, k))
            if k >= rank:
                row.append(Action(rank, Kind.WEIGHT, k - rank))
        row += [Action(rank, Kind.WEIGHT, k) for k in range(max(0, microbatches - rank), microbatches)]
        table.append(tuple(row))
    return Schedule("zb-h1", degree, stages, microbatches, tuple(table))


def forward_only(degree: int, stages: int, microbatches: int) -> Schedule:
    """Forwards alone, for evaluation; groups of p micro-batches go through all stages of a rank.

    Raises:
        PlanError: as ``make_schedule``.
    """
    _check_sizes("forward", degree, stages, microbatches)
    groups = _groups(degree, microbatches)
    table = [
        tuple(Action(stage, Kind.FORWARD, k) for group in groups for stage in range(rank, stages, degree) for k in group)
        for rank in range(degree)
    ]
    return Schedule("forward", degree, stages, microbatches, tuple(table))


_GENERATORS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}

SCHEDULES = tuple(_GENERATORS)
"""Names that ``make_schedule`` knows."""


def _check_sizes(name: str, degree: int, stages: int, microbatches: int) -> None:
    for word, value in (("degree", degree), ("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise PlanError(f"schedule {name!r}: {word} is {value}; it must be 1 or more")
    if stages % degree:
        fewer, more = stages // degree * degree, (stages // degree + 1) * degree
        raise PlanError(
            f"schedule {name!r}: {number_text(stages, 'stage')} cannot be shared among {number_text(degree, 'pipeline rank')}: "
            f"every rank runs as many; take {f'{fewer} or ' if fewer else ''}{number_text(more, 'stage')}"
        )


def make_schedule(name: str, *, degree: int, stages: int, microbatches: int) -> Schedule:
    """The table of a schedule, computation only.

    Args:
        name: one of ``SCHEDULES``.
        degree: number of ranks of the pipeline.
        stages: number of stages, a multiple of ``degree``.
        microbatches: parts that the batch is cut into.

    Raises:
        PlanError: there is no such schedule, or it is not made for these numbers.
    """
    check_numbers(name, degree=degree, stages=stages, microbatches=microbatches)
    return _GENERATORS[name](degree, stages, microbatches)


def check_numbers(name: str, *, degree: int, stages: int, microbatches: int) -> None:
    """Raise `PlanError` as ``make_schedule``, without making the table."""
    if name not in _GENERATORS:
        raise PlanError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    _check_sizes(name, degree, stages, microbatches)
    found = f"{stages // degree}, as of {number_text(stages, 'stage')} on {number_text(degree, 'rank')}"
    if name in ("1f1b", "zb-h1") and stages != degree:
        raise PlanError(
            f"schedule {name!r} runs one stage on each rank, not {found}; take {number_text(degree, 'stage')}, or 'interleaved' or 'gpipe'"
        )
    if name == "interleaved" and stages == degree:
        raise PlanError(f"schedule 'interleaved' runs two or more stages on each rank, not {found}; take {2 * degree} stages, or '1f1b'")
