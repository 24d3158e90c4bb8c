"""Rows that go to marked places of their sample, as features of an image go to the tokens that stand for them.

``passes/marked.py`` puts the op there for what torch counts through the whole batch: a rank with some of the samples knows which row is
whose only if each sample has as many as the next, which is looked at in every step.
"""

from __future__ import annotations

import torch

from autopar.errors import InputError
from autopar.rules.registry import register

_library = torch.library.Library("autopar", "FRAGMENT")


def _row_of_mark(marked: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Which of ``num_rows`` rows of a sample goes to a place, in order (int64 [samples, places]), at each that is marked (bool).

    Raises:
        InputError: a sample has more or fewer marks. On CUDA it is an assertion of the device, for which nobody waits.
    """
    counts = marked.sum(1)
    are_right = counts == num_rows
    text = (
        f"every sample needs {num_rows} marked places, as many as rows come for it (features of its images): ranks and micro-batches share "
        "the samples and do not look at those of others"
    )
    if marked.is_cuda:
        torch._assert_async(are_right.all(), text)
    elif not are_right.all():
        raise InputError(f"{text}; here they have {counts.tolist()}; give all the same number, by images that are blank if need be")
    return (marked.cumsum(1) - 1).clamp(0, num_rows - 1)


_library.define("row_of_mark(Tensor marked, int num_rows) -> Tensor")
_library.impl("row_of_mark", _row_of_mark, "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::row_of_mark", lambda marked, num_rows: torch.empty_like(marked, dtype=torch.int64), lib=_library
)

register(torch.ops.autopar.row_of_mark.default, "b s! -> b s!")
