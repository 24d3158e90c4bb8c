"""Random numbers of Python and numpy in a forward."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.capture.host_random import DrawnOnceWarning
from autopar.errors import CaptureError

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Drawing(nn.Linear):
    """Draws in a way that is given."""

    def __init__(self, way: Forward) -> None:
        super().__init__(64, 64)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, super().forward(x)).square().sum()


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As `transformers` masks parts of speech."""
    hidden = np.random.rand(*x.shape[1:]) < 0.5
    return x.masked_fill(torch.tensor(hidden, device=x.device), 0.0)


def scaled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * random.uniform(1, 2)


def skipped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if random.getrandbits(20) else x.relu()


def call() -> tuple[torch.Tensor]:
    return (torch.randn(4, 64),)


@pytest.mark.parametrize(
    "way, words",
    [
        (masked, r"numpy \(test_host_random.py:\d+, in masked: `return x.masked_fill"),
        (scaled, r"Python \(test_host_random.py:\d+, in scaled: `return x \* random.uniform"),
    ],
)
def test_what_makes_a_difference_is_refused(way: Forward, words: str) -> None:
    with pytest.raises(CaptureError, match=rf"draws random numbers of {words}(.|\n)*draw by torch"):
        autopar.plan(Drawing(way), 2, call())


def test_what_makes_none_is_told() -> None:
    with pytest.warns(DrawnOnceWarning, match=r"Python \(test_host_random.py:\d+, in skipped"):
        found = autopar.verify(Drawing(skipped), 2, call(), Manual(dp=2))
    assert found.loss_error < 1e-6


def test_generators_are_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(CaptureError):
        autopar.plan(Drawing(lambda model, x: scaled(model, masked(model, x))), 2, call())
    assert (random.random(), np.random.rand()) == expected


def test_numbers_of_torch_are_no_matter() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DrawnOnceWarning)
        autopar.plan(Drawing(lambda model, x: nn.functional.dropout(x) + torch.rand_like(x)), 2, call())
