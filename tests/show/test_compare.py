from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.show.compare import Row, compare_text
from tests.show.plans import small_plan


def test_the_table(golden: Callable[[str, str], None]) -> None:
    prediction = small_plan().prediction
    slow = replace(prediction, step_time_s=2 * prediction.step_time_s, mfu=0.0)
    rows = [
        Row("automatic", True, "", prediction, 0.0263, 3 * 2**30),
        Row("megatron", True, "", slow, None, 5 * 2**30),
        Row("ddp", False, "needs 93.1 GiB on rank 0, have 80", slow, None, 2**30),
        Row("tp=5", False, "5 does not divide the 12 heads", None, None, 0),
    ]
    text = compare_text(rows)
    golden("show/compare_text", text)
    assert max(map(len, text.splitlines())) <= 100


def test_figures_are_on_the_row() -> None:
    prediction = small_plan().prediction
    row = Row("automatic", True, "", prediction, None, 0)
    for name in ("step_time_s", "tokens_per_s", "mfu", "bubble_fraction", "exposed_comm_s", "peak_memory_bytes"):
        assert getattr(row, name) == getattr(prediction, name)


def test_no_rows() -> None:
    assert "plan" in compare_text([])
