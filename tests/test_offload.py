"""The word: what lies in the memory of the host."""

from __future__ import annotations

import re

import pytest

from autopar import Manual
from autopar.cli.inputs import read_manual
from autopar.errors import PlanError
from autopar.offload import CHOICES, Offload


@pytest.mark.parametrize(
    "text", ["", "optimizer", "parameters", "activations", "optimizer+activations", "optimizer:/disk", "optimizer:/disk+parameters"]
)
def test_it_prints_and_parses_back(text: str) -> None:
    assert str(Offload.of(text)) == text
    assert Offload.of(str(Offload.of(text))) == Offload.of(text)
    assert bool(Offload.of(text)) == bool(text)


def test_parameters_take_their_optimizer_along() -> None:
    assert Offload.of("parameters").optimizer
    assert Offload.of("optimizer+parameters") == Offload.of("parameters")
    assert not Offload.of("activations").optimizer
    assert not Offload.of("none")
    assert not Offload.of(None)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("gradients", "offload has optimizer, parameters, activations, joined by '\\+', or is 'auto' or 'none'; got gradients"),
        ("optimizer:", "a folder is for the optimizer"),
        ("activations:/disk", "a folder is for the optimizer, as in 'optimizer:/fast/disk'; got 'activations:/disk'"),
    ],
)
def test_other_words_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        Offload.of(text)


@pytest.mark.parametrize("given", [3, True, [], ["optimizer"]], ids=str)
def test_what_is_no_text_is_refused(given: object) -> None:
    with pytest.raises(PlanError, match=re.escape(f"an Offload or None, got {given!r}")):
        Offload.of(given)  # type: ignore[arg-type]


def test_a_configuration_says_it() -> None:
    manual = read_manual("dp=2,offload=optimizer+activations")
    assert manual == Manual(dp=2, offload="optimizer+activations")
    assert "offload=optimizer+activations" in str(manual)
    with pytest.raises(PlanError, match="a Manual says itself what it offloads"):
        Manual(offload="auto")
    with pytest.raises(PlanError, match="got all"):
        Manual(offload="all")


def test_what_the_planner_tries_is_all_there_is() -> None:
    tried = {choice for tier in CHOICES for choice in tier}
    assert len(tried) == 5
    assert all(not choice.folder for choice in tried)
