"""What a rank holds of its memory: for a stage over the step, and while it computes a piece of an action."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds of its rank's memory, in bytes.

    Args:
        static: all the step.
        kept: of each micro-batch, from its forward to its backward (B or I).
        left: the same from I to W, of backwards in two parts.
        first: beside that while it computes B, until its first backward is over; what that has made of gradients is in it.
        later: the same, afterwards; ``last``: in the last backward, which starts reductions.
        forward: beside that while it computes F.
        inputs: beside that while it computes I.
        first_weights, later_weights: beside ``left`` while it computes W, as ``first`` and ``later`` are for B.
        gradients: from its first backward on. From its last one on ``coming`` is there, too, what their reductions make; when all is
            computed ``gone`` of both is no more.
        copies: what of ``static`` is gone when all is computed.
        kept_copies: what of ``kept`` are copies of parameters.
        end: beside the rest when all is computed.
        sent: what of ``kept`` is sent to the next stage, too.
        received: what of ``end`` stays while the optimizer steps: outputs that come from other ranks.
        update: instead of all else of ``end`` while the optimizer steps, one stage after the other; ``together``: of all stages at a time.
    """

    static: float
    kept: float
    left: float
    first: float
    later: float
    forward: float = 0.0
    inputs: float = 0.0
    first_weights: float = 0.0
    later_weights: float = 0.0
    gradients: float = 0.0
    copies: float = 0.0
    kept_copies: float = 0.0
    end: float = 0.0
    received: float = 0.0
    update: float = 0.0
    together: float = 0.0
    sent: float = 0.0
    last: float = 0.0
    coming: float = 0.0
    gone: float = 0.0


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that a rank holds of a micro-batch while it computes a piece.

    Args:
        activations: that it keeps for the backward, and those that come and go.
        gathered: copies of parameters that are there about their use, or of this micro-batch alone.
        gradients: of parameters, which the first backward has made so far.
        buffers: whole gradients that are being reduced.
    """

    activations: int = 0
    gathered: int = 0
    gradients: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.gathered + self.gradients + self.buffers

    def __str__(self) -> str:
        return "/".join(map(str, astuple(self)))

    @staticmethod
    def parse(text: str) -> Resident:
        """Inverse of ``str``; ValueError if the text has another form, or a negative number."""
        activations, gathered, gradients, buffers = map(int, text.split("/"))
        if (least := min(activations, gathered, gradients, buffers)) < 0:
            raise ValueError(f"{least} is negative")
        return Resident(activations, gathered, gradients, buffers)


NOTHING = Resident()
