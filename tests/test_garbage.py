"""The search for reference cycles rests while graphs are made, and does not make up for it at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autopar import garbage
from autopar.garbage import no_collection


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_others_freeze", False)
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    yield
    if not was_enabled:
        gc.disable()
    if frozen:
        gc.freeze()


def test_what_was_made_is_not_young_any_more() -> None:
    kept: list[object] = []
    with no_collection():
        assert not gc.isenabled()
        kept += ([] for _ in range(20_000))
        assert gc.get_count()[0] > 10_000
    assert gc.isenabled()
    assert gc.get_count()[0] < 1000
    assert gc.get_freeze_count() == 0


def test_inside_of_another_it_changes_nothing() -> None:
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()


def test_what_others_froze_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with no_collection():
        pass
    assert gc.get_freeze_count() > frozen / 2 > 0  # of another thread's some may have gone


def test_what_others_froze_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count() -> int:
        counted.append(1_000_000)
        return counted[-1]

    monkeypatch.setattr(gc, "get_freeze_count", count)
    for _ in range(3):
        with no_collection():
            pass
    assert len(counted) == 1
