"""The formulas of McCandlish et al. 2018, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.batch_size import BatchSize
from autopar.errors import PlanError

POSITIVE = st.floats(1, 1e12)


def test_a_critical_batch_takes_twice_the_least_data_and_twice_the_least_steps() -> None:
    batch = BatchSize(2e6, 2e6)
    assert (batch.critical_batches, batch.data_factor, batch.step_factor) == (1, 2, 2)


def test_by_hand() -> None:
    batch = BatchSize(4.2e6, 2e6)
    assert batch.data_factor == pytest.approx(3.1)
    assert batch.step_factor == pytest.approx(1 + 1 / 2.1)
    # from a quarter to one critical batch: (1 + 4) / (1 + 1)
    assert BatchSize(1e6, 1e6).learning_rate_factor(BatchSize(2.5e5, 1e6)) == pytest.approx(2.5)


@given(tokens=POSITIVE, noise=POSITIVE)
def test_data_is_steps_times_batch(tokens: float, noise: float) -> None:
    """E = B S with E_min = B_noise S_min."""
    batch = BatchSize(tokens, noise)
    assert batch.data_factor * noise == pytest.approx(batch.step_factor * tokens)


def test_learning_rate_is_linear_in_small_batches_and_the_same_for_large_ones() -> None:
    assert BatchSize(8, 1e9).learning_rate_factor(BatchSize(2, 1e9)) == pytest.approx(4)
    assert BatchSize(8e9, 1).learning_rate_factor(BatchSize(2e9, 1)) == pytest.approx(1)


def test_in_words() -> None:
    batch = BatchSize(4.2e6, 2e6)
    text = "a batch of 4.20 M tokens is 2.1 critical batches: 3.1 times the least data and 1.48 times the least steps"
    assert batch.advice() == batch.advice(batch) == text
    said = "; learning rate 1.32 times that of 2.10 M tokens with SGD, between 1.15 and 1.32 with Adam (linear scaling would be 2)"
    assert batch.advice(BatchSize(2.1e6, 2e6)) == text + said


@pytest.mark.parametrize("noise", [0, -1.0, float("nan"), float("inf")])
def test_a_noise_scale_that_is_none(noise: float) -> None:
    with pytest.raises(PlanError, match="noise_scale_tokens must be a positive number of tokens"):
        BatchSize(1, noise)
