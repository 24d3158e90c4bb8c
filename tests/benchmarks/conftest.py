"""The modules of ``benchmarks/reference``, which import their siblings by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = (
    *("published", "predict", "depth", "few", "experts", "clusters", "records", "fields", "names", "decoder", "stacks", "scores"),
    *("table", "memory"),
)


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for folder in ("cluster", "reference"):
        monkeypatch.syspath_prepend(str(FOLDER / folder))
    yield import_module(name)
    for made in MODULES:
        sys.modules.pop(made, None)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``predict``."""
    yield from _module("predict", monkeypatch)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``records``."""
    yield from _module("records", monkeypatch)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script ``benchmarks/published.py``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield from _module("published", monkeypatch)


@pytest.fixture
def depths(reference: ModuleType) -> ModuleType:
    """The module ``depth``."""
    return import_module("depth")


@pytest.fixture
def few_layers(reference: ModuleType) -> ModuleType:
    """The module ``few``."""
    return import_module("few")


@pytest.fixture
def experts(reference: ModuleType) -> ModuleType:
    """The module ``experts``."""
    return import_module("experts")


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``scores``."""
    yield from _module("scores", monkeypatch)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``memory``."""
    yield from _module("memory", monkeypatch)
