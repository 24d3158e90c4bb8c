"""A schedule is a table: for each rank of the pipeline, the actions that it performs, in order.

An action prints as stage, kind, micro-batch, in the notation of ``torch.distributed.pipelining``: ``2F0``, ``2SEND_F0``, ``2REDUCE``. A
table prints as a head and one line for each rank; both parse back. Stages are looped over the ranks: stage s runs on rank s % degree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from autopar.errors import PlanError
from autopar.units import number_text


class Kind(Enum):
    """What is done; the value is the text."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights together
    INPUT = "I"  # gradients of the stage's inputs only
    WEIGHT = "W"  # gradients of its weights, after I
    SEND_F = "SEND_F"  # what the stage computed, to the next stage
    RECV_F = "RECV_F"  # starts to receive from the previous stage
    SEND_B = "SEND_B"  # gradients of the stage's inputs, to the previous stage
    RECV_B = "RECV_B"  # starts to receive from the next stage
    GATHER = "GATHER"  # once per step: the stage's parameters are made ready
    REDUCE = "REDUCE"  # once per step: the stage's gradients are reduced
    OUTPUT = "OUTPUT"  # once per step, when a rank has done its row: the stage's outputs go to the ranks of all others; in no table


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
TRANSFER = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
ONCE = (Kind.GATHER, Kind.REDUCE)

_KINDS = {kind.value: kind for kind in Kind if kind is not Kind.OUTPUT}
_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(_KINDS, key=len, reverse=True))})(\d*)")
_HEAD = re.compile(r"(\S+) degree=(\d+) stages=(\d+) microbatches=(\d+)")
_ROW = re.compile(r"rank +(\d+):(.*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank.

    Args:
        stage: of which stage.
        kind: what is done.
        microbatch: for which micro-batch; -1 for what is done once per step.
    """

    stage: int
    kind: Kind
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}" if self.microbatch >= 0 else f"{self.stage}{self.kind.value}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            PlanError: the text is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None or (_KINDS[match[2]] in ONCE) == bool(match[3]):
            raise PlanError(
                f"{text!r} is no action of a schedule; write stage, kind and micro-batch, as in 2F0 or 2SEND_F0, or stage and kind, as in "
                f"2GATHER; kinds are {', '.join(_KINDS)}"
            )
        return cls(int(match[1]), _KINDS[match[2]], int(match[3] or -1))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of a step.

    Args:
        name: how the table was made.
        degree: number of ranks of the pipeline.
        stages: number of stages, a multiple of ``degree``.
        microbatches: parts that the batch is cut into.
        ranks: the actions of each rank, in order.
    """

    name: str
    degree: int
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        return stage % self.degree

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs."""
        return tuple(range(rank, self.stages, self.degree))

    @property
    def has_backward(self) -> bool:
        """Whether anything is differentiated."""
        return any(action.kind in (Kind.BACKWARD, Kind.INPUT) for row in self.ranks for action in row)

    @property
    def is_in_two(self) -> bool:
        """Whether backwards are split into those of inputs and of weights."""
        return any(action.kind is Kind.WEIGHT for action in self.ranks[0])

    @property
    def has_transfers(self) -> bool:
        """Whether the table says who sends what when."""
        return any(action.kind in TRANSFER for row in self.ranks for action in row)

    @property
    def head(self) -> str:
        """The first line of the text."""
        return f"{self.name} degree={self.degree} stages={self.stages} microbatches={self.microbatches}"

    def __str__(self) -> str:
        return "\n".join([self.head, *grid_lines([str(action) for action in row] for row in self.ranks)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of ``str``.

        Raises:
            PlanError: a line is no head, row or action, or rows are missing.
        """
        head, *rows = [line.strip() for line in text.strip().splitlines()] or [""]
        found = _HEAD.fullmatch(head)
        if found is None:
            raise PlanError(f"a schedule starts with a line such as '1f1b degree=4 stages=4 microbatches=8', not {head!r}")
        table = []
        for number, line in enumerate(rows):
            row = _ROW.fullmatch(line)
            if row is None or int(row[1]) != number:
                raise PlanError(f"line {number + 2} of schedule {head!r} must start with 'rank {number}:', but is {line[:60]!r}")
            table.append(tuple(Action.parse(word) for word in row[2].split()))
        if len(table) != int(found[2]):
            raise PlanError(f"schedule {head!r} has {number_text(len(table), 'row')}; one for each rank is needed, {found[2]} in all")
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), tuple(table))


def grid_lines(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """``rank 0: 0F0 0F1``, a line for each row, with columns aligned."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells), default=0))]
    digits = len(str(len(cells) - 1))
    for rank, row in enumerate(cells):
        yield f"rank {rank:>{digits}}: {' '.join(f'{word:<{width}}' for word, width in zip(row, widths, strict=False))}".rstrip()
