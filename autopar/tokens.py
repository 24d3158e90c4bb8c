"""How much a batch is: tokens, or samples where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Shaped(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Amount:
    """``count`` of ``unit``, which is ``tokens`` or ``samples``."""

    count: int
    unit: str


def amount_of(inputs: Sequence[Shaped]) -> Amount:
    """Elements of the first input that is not of floating point, else rows of the first.

    These are tokens where that input has two dims or more, as ``input_ids`` [rows, length] have; one number a row, as a label of an image,
    is a sample.

    Args:
        inputs: tensors of the global batch, in order.
    """
    for each in inputs:
        if not each.dtype.is_floating_point:
            return Amount(torch.Size(each.shape).numel(), "tokens" if len(each.shape) > 1 else "samples")
    return Amount(inputs[0].shape[0] if inputs and inputs[0].shape else 1, "samples")
