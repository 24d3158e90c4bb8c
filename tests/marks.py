"""Which cases of a test run every time, and which with `make exhaustive` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

exhaustive = pytest.mark.exhaustive
not_on_torch_2_11 = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot, see docs/limits.md")


def few(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those after the first ``count`` are for `make exhaustive`: they show the same in more ways."""
    return [case if i < count else pytest.param(*_values(case), marks=exhaustive) for i, case in enumerate(cases)]


def only(always: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but ``always`` are for `make exhaustive`."""
    kept = list(always)
    return [case if case in kept else pytest.param(*_values(case), marks=exhaustive) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
