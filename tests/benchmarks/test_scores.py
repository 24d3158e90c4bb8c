"""What is said of predictions, by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def row(scores: ModuleType, measured_s: float | None, predicted_s: float | None, **changes: Any) -> Any:
    """A run of one model on 8 GPUs."""
    from records import Dims, Record  # type: ignore[import-not-found]

    dims = changes.pop("dims", Dims("gpt", 2, 64, 2, 2, 256, 100, 128, 32))
    fields = {
        "id": "run", "source": "them/repository page", "note": "", "dims": dims, "gpu": "A100-80GB", "num_gpus": 8, "gpus_per_node": 8,
        "inter_gbps": None, "dp": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "vpp": 1, "zero": 0, "zero_ranks": None,
        "sequence_parallel": False, "micro_batch": 1, "global_batch": 16, "recompute": "none", "precision": "bf16",
        "peak_memory_bytes": None,
    }
    record = Record(**fields | changes, step_time_s=measured_s)
    predicted = None if predicted_s is None else scores.Predicted(predicted_s, 2.0**30, "")
    return scores.Row(record, predicted, "" if predicted_s is not None else "no profile")


def test_errors_bias_and_order(scores: ModuleType) -> None:
    """Errors +10, -20 and 0 %, of three pairs of runs one in the wrong order; what was not predicted, or not measured, does not count."""
    rows = [row(scores, 1.0, 1.1), row(scores, 1.25, 1.0, tp=2), row(scores, 2.0, 2.0, tp=4)]
    rows += [row(scores, 3.0, None), row(scores, None, 4.0)]
    line = scores.table(rows).splitlines()[2]
    assert line == "| them/repository | 3 | 10.0% | 10.0% | -3.3% | 0.33 (1.00) | 0.33 (3) | 0.33 (1.00) | - |"


def test_nothing_to_score(scores: ModuleType) -> None:
    rows = [row(scores, None, 1.0), row(scores, 1.0, None)]
    assert len(scores.table(rows).splitlines()) == 2
    assert scores.pairs_text(rows) == "- all: 0 of 0 (0%)"
    assert not scores.wrong_text(rows)


def test_order_beyond_noise(scores: ModuleType) -> None:
    """Of 1.00, 1.04, 1.10 and 1.30 s five pairs differ by more than 5 %: one is predicted in the wrong order, one as equal."""
    rows = [row(scores, t, p, id=name) for name, t, p in (("a", 1.0, 1.0), ("b", 1.04, 0.9), ("c", 1.1, 1.2), ("d", 1.3, 1.0))]
    line = scores.table(rows).splitlines()[2]
    assert "| 0.40 (5) |" in line, "three in the right order, less one, of five"
    assert scores.wrong_text(rows) == "them/repository: +18.2% c before d"
    assert "| - |" in scores.table(rows[:2]).splitlines()[2]


def test_memory(scores: ModuleType) -> None:
    rows = [row(scores, 1.0, 1.0, peak_memory_bytes=2.0**31), row(scores, 1.0, 1.0, peak_memory_bytes=2.0**30), row(scores, 1.0, 1.0)]
    assert "| 25% (2) |" in scores.table(rows)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"micro_batch": 2}, "- only micro-batch differs: 1 of 1 pairs ordered right"),
        ({"recompute": "full"}, "- only recompute differs: 1 of 1 pairs ordered right"),
        ({"tp": 2, "dp": 4}, "- only tp differs: 1 of 1 pairs ordered right"),
        ({"zero": 3}, "- only ZeRO differs: 1 of 1 pairs ordered right"),
        ({"zero_ranks": 8}, "- only ZeRO differs: 1 of 1 pairs ordered right"),
        ({"ep": 2}, "- only experts differs: 1 of 1 pairs ordered right"),
        ({"zero_ranks": 8, "global_batch": 32}, "- all: 0 of 0 (0%)"),
        ({"ep": None, "micro_batch": 2}, "- only micro-batch differs: 1 of 1 pairs ordered right"),
        ({"micro_batch": 2, "recompute": "full"}, "- all: 0 of 0 (0%)"),
        ({"gpu": "H100-80GB", "micro_batch": 2}, "- all: 0 of 0 (0%)"),
    ],
    ids=str,
)
def test_pairs_that_differ_in_one_setting(scores: ModuleType, changes: dict[str, Any], text: str) -> None:
    assert text in scores.pairs_text([row(scores, 1.0, 1.0), row(scores, 2.0, 1.5, **changes)])


def test_pairs_in_the_wrong_order_and_within_noise(scores: ModuleType) -> None:
    rows = [row(scores, 1.0, 1.0), row(scores, 1.02, 0.5, micro_batch=2), row(scores, 2.0, 0.9, micro_batch=4)]
    assert "- only micro-batch differs: 1 of 2 pairs ordered right" in scores.pairs_text(rows)


def test_batches_compare_by_token(scores: ModuleType) -> None:
    """Twice the batch in less than twice the time is the faster of both."""
    rows = [row(scores, 1.0, 1.0), row(scores, 1.6, 1.7, global_batch=32)]
    assert "- only batch differs: 1 of 1 pairs ordered right" in scores.pairs_text(rows)


def test_even_true_times_do_not_order_runs_that_differ_by_less_than_the_spread(scores: ModuleType) -> None:
    rows = [row(scores, 1.0 + 0.02 * i, 1.0 + 0.02 * i) for i in range(6)]
    tau, _, true_tau = scores.table(rows).splitlines()[2].split("|")[6].strip().partition(" ")
    assert tau == "1.00"
    assert 0.3 < float(true_tau.strip("()")) < 0.8


def test_groups_without_an_order_have_no_say(scores: ModuleType) -> None:
    alike = [row(scores, 1.0, 1.0, num_gpus=8) for _ in range(3)]
    other = [row(scores, float(i), float(i), gpu="H200") for i in range(1, 4)]
    assert "nan" not in scores.table(alike) + scores.table([*alike, *other])
    assert scores.table([*alike, *other]).splitlines()[2].split("|")[8].strip().startswith("1.00")
