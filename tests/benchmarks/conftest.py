"""The modules of ``benchmarks/reference``, which import their siblings by their names. They are imported once: they keep what they have
planned, and many tests ask for the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="package")
def published() -> Iterator[ModuleType]:
    """The script ``benchmarks/published.py``."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for folder in (FOLDER, FOLDER / "cluster", FOLDER / "reference"):
            patch.syspath_prepend(str(folder))
        yield import_module("published")
        for name, module in list(sys.modules.items()):
            if name not in before and FOLDER in Path(getattr(module, "__file__", None) or "/").parents:
                del sys.modules[name]


@pytest.fixture(scope="package")
def reference(published: ModuleType) -> ModuleType:
    """The module ``predict``."""
    return import_module("predict")


@pytest.fixture(scope="package")
def records(published: ModuleType) -> ModuleType:
    """The module ``records``."""
    return import_module("records")


@pytest.fixture(scope="package")
def depths(reference: ModuleType) -> ModuleType:
    """The module ``depth``."""
    return import_module("depth")


@pytest.fixture(scope="package")
def few_layers(reference: ModuleType) -> ModuleType:
    """The module ``few``."""
    return import_module("few")


@pytest.fixture(scope="package")
def experts(reference: ModuleType) -> ModuleType:
    """The module ``experts``."""
    return import_module("experts")


@pytest.fixture(scope="package")
def scores(published: ModuleType) -> ModuleType:
    """The module ``scores``."""
    return import_module("scores")


@pytest.fixture(scope="package")
def memory(published: ModuleType) -> ModuleType:
    """The module ``memory``, of ``benchmarks/cluster``."""
    return import_module("memory")


@pytest.fixture(scope="package")
def launches(published: ModuleType) -> ModuleType:
    """The script ``benchmarks/launches.py``."""
    return import_module("launches")
