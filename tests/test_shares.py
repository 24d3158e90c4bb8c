from __future__ import annotations

import pytest

from tests.shares import RANKS, share_of


@pytest.mark.parametrize(
    "test, share",
    [
        ("tests/test_pool.py::test_processes_are_reused", RANKS),
        ("tests/runtime/test_values.py::test_recorded_values_are_those_of_one_device[some]", RANKS),
        ("tests/runtime/test_values.py::test_of_no_such_name", "tests/runtime/test_values.py"),
        ("tests/test_shares.py::test_what_a_test_belongs_to[tests/test_pool.py::test_a-ranks]", "tests/test_shares.py"),
    ],
)
def test_what_a_test_belongs_to(test: str, share: str) -> None:
    assert share_of(test) == share
