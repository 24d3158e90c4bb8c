"""Modules that are imported at first use: help, errors of usage and completion do not wait for torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """What stands for a module until something of it is asked for; beside it stands the import itself, under ``TYPE_CHECKING``.

    It is not `importlib.util.LazyLoader`, whose modules lie in ``sys.modules``: torch looks through these while it is being imported, and
    so would import the others in its midst.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
