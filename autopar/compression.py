"""Gradient compression: what is asked for, what it makes of one reduction, and what that costs. Lossy, and never chosen by the planner.

| kind       | a reduction of a gradient over the n ranks of an axis                           | source                               |
|------------|---------------------------------------------------------------------------------|--------------------------------------|
| bf16       | in bfloat16                                                                     | torch's DDP hooks                    |
| fp16       | in float16, as a mean, so that a sum of n does not overflow before its parts do | torch's DDP hooks                    |
| int8       | all-to-all of int8, sum in float32, all-gather of int8; a scale for every block | ZeRO++, Wang et al., 2023 (qgZ)      |
| topk:R     | every rank's largest R * elements, all-gathered, with error feedback            | Stich et al., 2018; Lin et al., 2018 |
| powersgd:r | all-reduce of two factors of rank r, with warm start and error feedback         | Vogels et al., 2019                  |

Error feedback (Karimireddy et al., 2019): what a rank has not sent it adds to its next gradient. So what all ranks have sent, and what they
still hold, adds up to all gradients that there were. The others keep nothing: their error is that of one rounding.

Tensors of one dim (biases, norms), those of fewer than `MIN_NUM_ELEMENTS` elements and those that would travel in no fewer bytes are
reduced exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.errors import PlanError

MIN_NUM_ELEMENTS = 4096
"""Smaller gradients stay exact: a collective of them takes its latency, and together they are little."""
BLOCK = 256
"""Elements of int8 that share a scale."""
SCALE_NUM_BYTES = 4
KINDS = ("bf16", "fp16", "int8", "topk", "powersgd")
SUGGESTED = ("bf16", "fp16", "int8", "topk:0.01", "powersgd:4")
"""One of each kind, as its authors use it; what `Plan.compressions` compares."""

TOUCHED = {"bf16": 12.0, "fp16": 28.0, "int8": 110.0, "topk": 500.0, "powersgd": 200.0}
"""What coding and decoding an element takes, in bytes that ``x + 1`` moves meanwhile: `benchmarks/compression.py --coding` on a core of an
AMD EPYC, 2026-11-22. The casts are what their reads and writes come to; the choice of the largest takes most of top-k, and products with
few columns, from 65 to 260 by their number, most of PowerSGD."""
SCATTERED = 0.63
"""The part of it that int8 takes where each rank wants its part only."""

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class Message:
    """One collective.

    Args:
        kind: ``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``.
        num_bytes: of the whole buffer: of what is gathered; of what a rank gives to the others.
    """

    kind: str
    num_bytes: int

    def sent_bytes(self, size: int) -> float:
        """What each of ``size`` ranks sends, by a ring (all_to_all: pairwise)."""
        return _PASSES[self.kind] * (size - 1) / size * self.num_bytes


@dataclass(frozen=True, slots=True)
class Reduction:
    """What compression makes of one reduction, on each rank.

    Args:
        messages: its collectives, in order.
        touched_bytes: that an op that only moves bytes would move while this codes and decodes.
        kept_bytes: that stay from step to step, in float32.
    """

    messages: tuple[Message, ...]
    touched_bytes: float
    kept_bytes: int

    def sent_bytes(self, size: int) -> float:
        """What each of ``size`` ranks sends."""
        return sum(message.sent_bytes(size) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients of parameters are compressed while they are reduced. Prints as ``bf16``, ``topk:0.01`` or ``powersgd:4 after 100``.

    Args:
        kind: one of `KINDS`.
        ratio: for ``topk``, the part of the elements that each rank sends.
        rank: for ``powersgd``.
        after: differentiated calls of the model in which gradients travel as they are, before the first that compresses them: a model
            learns the most in its first steps, where what comes late does the most harm (``start_powerSGD_iter`` of torch's hook). Plans
            are priced without them.

    Raises:
        PlanError: another kind, or an amount that makes no sense.
    """

    kind: str
    ratio: float = 0.0
    rank: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"compress is one of {', '.join(SUGGESTED)} or None; got kind {self.kind!r}")
        if (self.kind == "topk") != (self.ratio != 0.0) or (self.kind == "topk" and not 0.0 < self.ratio < 1.0):
            raise PlanError(f"compress='topk:R' sends a part 0 < R < 1 of the elements, as 'topk:0.01'; got {self.kind} with {self.ratio}")
        if (self.kind == "powersgd") != (self.rank != 0) or self.rank < 0:
            raise PlanError(f"compress='powersgd:r' takes a rank r of at least 1, as 'powersgd:4'; got {self.kind} with rank {self.rank}")
        if self.after < 0:
            raise PlanError(f"compress='{self.kind} after N' begins after N calls, of which there cannot be {self.after}")

    @staticmethod
    def of(given: str | Compression | None) -> Compression | None:
        """What a user may give; empty text is None.

        Raises:
            PlanError: another text.
        """
        if given is None or isinstance(given, Compression):
            return given
        if not isinstance(given, str):
            raise PlanError(f"compress is one of {', '.join(SUGGESTED)}, a Compression or None; got {given!r}")
        way, late, calls = given.partition(" after ")
        kind, colon, amount = way.partition(":")
        if not given:
            return None
        if late and not calls.isdecimal():
            raise PlanError(f"compress={given!r}: {calls!r} is not a number of calls; write for example 'powersgd:4 after 100'")
        after = int(calls or 0)
        try:
            if kind == "topk" and amount:
                return Compression(kind, ratio=float(amount), after=after)
            if kind == "powersgd" and amount:
                return Compression(kind, rank=int(amount), after=after)
        except PlanError:
            raise
        except ValueError:
            raise PlanError(f"compress={given!r}: {amount!r} is not a number; write for example 'topk:0.01' or 'powersgd:4'") from None
        if colon or kind not in KINDS or kind in ("topk", "powersgd"):
            raise PlanError(f"compress is one of {', '.join(SUGGESTED)} or None; got {given!r}")
        return Compression(kind, after=after)

    def __str__(self) -> str:
        amount = {"topk": f":{self.ratio:g}", "powersgd": f":{self.rank}"}
        return self.kind + amount.get(self.kind, "") + (f" after {self.after}" if self.after else "")

    @property
    def remembers(self) -> bool:
        """Whether ranks keep what they have not sent (error feedback)."""
        return self.kind in ("topk", "powersgd")

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype that gradients travel in, if that is all."""
        return _CASTS.get(self.kind)

    def count(self, num_elements: int) -> int:
        """Elements that each rank sends of a gradient (``topk``)."""
        return max(1, math.ceil(self.ratio * num_elements))

    def reduction(self, shape: Sequence[int], itemsize: int, size: int, *, is_scattered: bool) -> Reduction | None:
        """What becomes of a reduction; None if it stays exact.

        Args:
            shape: of the gradient on each rank before it is reduced.
            itemsize: bytes of an element.
            size: ranks of the axis.
            is_scattered: each rank wants its part only (ZeRO), and the exact reduction is a reduce-scatter.
        """
        numel = math.prod(shape)
        if len(shape) < 2 or numel < MIN_NUM_ELEMENTS or size == 1:
            return None
        exact = Message("reduce_scatter" if is_scattered else "all_reduce", numel * itemsize)
        found = self._reduction(shape, numel, size, exact.kind)
        return found if found.sent_bytes(size) < exact.sent_bytes(size) else None

    def _reduction(self, shape: Sequence[int], numel: int, size: int, exact: str) -> Reduction:
        touched = TOUCHED[self.kind] * numel
        if self.cast is not None:
            return Reduction((Message(exact, 2 * numel),), touched, 0)
        if self.kind == "int8":
            packed = size * packed_bytes(-(-numel // size))
            there = Message("all_to_all", packed)
            if exact == "reduce_scatter":
                return Reduction((there,), SCATTERED * touched, 0)
            return Reduction((there, Message("all_gather", packed)), touched, 0)
        if self.kind == "topk":
            gathered = Message("all_gather", size * self.count(numel) * 8)
            return Reduction((gathered,), touched, 4 * numel)
        rows, columns = shape[0], numel // shape[0]
        factors = (Message("all_reduce", 4 * rows * self.rank), Message("all_reduce", 4 * columns * self.rank))
        return Reduction(factors, touched, 4 * (numel + columns * self.rank))


def part_shape(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """About the shape of one of so many parts of a tensor, where it is not known which dim they split: the longest is taken."""
    longest = max(range(len(shape)), key=shape.__getitem__, default=0)
    return tuple(max(1, dim // parts) if i == longest else dim for i, dim in enumerate(shape))


def packed_bytes(num_elements: int) -> int:
    """Of so many elements in int8, with the scales of their blocks."""
    return -(-num_elements // BLOCK) * (BLOCK + SCALE_NUM_BYTES)
