"""What a batch size does to the number of steps, the data and the learning rate, given the noise scale of the gradient.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162). With the noise scale B_noise, to the same loss:

    steps          S = S_min (1 + B_noise / B)
    data           E = E_min (1 + B / B_noise)          E = B S, E_min = B_noise S_min: the critical batch size
    learning rate  e = e_max / (1 + B_noise / B)        of plain SGD: in proportion to B while it is small

A batch of B_noise takes twice the least data and twice the least steps. With Adam the best learning rate grows with a power of the batch
between 1/2 and 1 (the same paper). The noise scale grows in the course of training; a number stands for its mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.units import count_text


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A batch against the noise scale; both in the same unit, here tokens.

    Args:
        tokens: of the global batch.
        noise_scale_tokens: batch size at which a gradient is as much noise as signal: the critical batch size.

    Raises:
        PlanError: one of them is not a positive number.
    """

    tokens: float
    noise_scale_tokens: float

    def __post_init__(self) -> None:
        for name, value in (("batch", self.tokens), ("noise_scale_tokens", self.noise_scale_tokens)):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name} must be a positive number of tokens, got {value!r}")

    @property
    def critical_batches(self) -> float:
        """B / B_noise"""
        return self.tokens / self.noise_scale_tokens

    @property
    def data_factor(self) -> float:
        """E / E_min: how many times the least data the same loss takes."""
        return 1 + self.critical_batches

    @property
    def step_factor(self) -> float:
        """S / S_min: how many times the least steps the same loss takes."""
        return 1 + 1 / self.critical_batches

    def learning_rate_factor(self, base: BatchSize) -> float:
        """e(B) / e(base): what the best learning rate of another batch is multiplied by, for plain SGD."""
        return base.step_factor / self.step_factor

    def advice(self, base: BatchSize | None = None) -> str:
        """In words; with ``base`` also what to do with its learning rate."""
        text = (
            f"a batch of {count_text(self.tokens)} tokens is {self.critical_batches:.2g} critical batches: "
            f"{self.data_factor:.3g} times the least data and {self.step_factor:.3g} times the least steps"
        )
        if base is None or base.tokens == self.tokens:
            return text
        factor, linear = self.learning_rate_factor(base), self.tokens / base.tokens
        return (
            f"{text}; learning rate {factor:.3g} times that of {count_text(base.tokens)} tokens with SGD, between {math.sqrt(factor):.3g} "
            f"and {factor:.3g} with Adam (linear scaling would be {linear:.3g})"
        )
