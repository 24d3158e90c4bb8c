"""What an action of a pipeline stage is made of: a piece of computation, or one collective or copy.

    forward compute - 0.00031 0 4194304/0/0/0 1 h.0.attn           the stage computes, and holds 4 MiB of activations meanwhile
    forward all_reduce tp 0.00012 0 50331648 1 h.0.attn.c_proj     computation waits for it
    backward all_reduce dp 0 0.0021 7077888 6 h.0.mlp.c_fc.weight  may run beside computation, 6 gradients together
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.resident import NOTHING, Resident

COMPUTE, NO_AXIS, HOST = "compute", "-", "host"
PHASES = ("forward", "backward", "weights", "gather", "reduce", "output")
"""Of a micro-batch the forward and the backward, of which ``weights`` is the second part where it runs in two; once a step the others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece.

    Args:
        phase: one of `PHASES`.
        kind: ``compute``, a collective, ``slice`` and ``pad`` (what an axis that needs no communication takes), or ``copy`` (`HOST`).
        axis: of the grid; ``host`` for copies to and from its memory, ``-`` for computation.
        waited_s: seconds that it takes of computation, or that computation waits for it.
        hidden_s: seconds that may lie beside computation.
        num_bytes: of the whole buffers that move.
        count: how many values move together.
        of: module that computes, or the (first) value that moves, by its name in the plan.
        resident: of computation what is in memory, when that is most.
    """

    phase: str
    kind: str
    axis: str
    waited_s: float
    hidden_s: float
    num_bytes: int
    count: int
    of: str
    resident: Resident = NOTHING

    @property
    def is_compute(self) -> bool:
        return self.kind == COMPUTE

    @property
    def is_local(self) -> bool:
        """Whether a rank cuts or fills its own memory for an axis, with no other rank."""
        return self.kind in ("slice", "pad")

    @property
    def time_s(self) -> float:
        return self.waited_s + self.hidden_s

    def __str__(self) -> str:
        times = f"{self.waited_s:.12g} {self.hidden_s:.12g}"
        num_bytes = self.resident if self.is_compute else self.num_bytes
        return f"{self.phase} {self.kind} {self.axis} {times} {num_bytes} {self.count} {self.of}"

    @staticmethod
    def parse(text: str) -> Piece:
        """Inverse of ``str``, with twelve digits of the seconds; PlanError if the text is no piece."""
        words = text.split(" ", 7)
        try:
            phase, kind, axis, waited_s, hidden_s, num_bytes, count, of = words
            moved, resident = (0, Resident.parse(num_bytes)) if kind == COMPUTE else (int(num_bytes), NOTHING)
            piece = Piece(phase, kind, axis, float(waited_s), float(hidden_s), moved, int(count), of, resident)
            for number in (piece.waited_s, piece.hidden_s, moved, piece.count):
                if not 0 <= number < math.inf:  # nor is NaN
                    raise ValueError(f"{number} is not finite, or negative")
            if phase not in PHASES:
                raise ValueError(f"the phase is none of {', '.join(PHASES)}")
            return piece
        except ValueError as error:
            raise PlanError(f"not a piece of a step: {text!r} ({error}); make the plan again with autopar.plan") from error
