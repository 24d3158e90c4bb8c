"""Which process of the tests runs a test: one all those of a file, and one all those that use real ranks.

What the tests of a file share is then made once, and four ranks started once. xdist has groups for this (``--dist loadgroup``), but hands
them on in the ids of tests, which pytest no longer lets it change; so the process that deals tests out reads here who belongs together.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

RANKS = "ranks"
ROOT = Path(__file__).parents[1]


@cache
def _uses_ranks(path: str, function: str) -> bool:
    """As its arguments say; such a fixture of a fixture is not seen."""
    return re.search(rf"^def {function}\([^)]*\b{RANKS}: ", _text(path), re.MULTILINE) is not None


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text()


def share_of(nodeid: str) -> str:
    """What a test belongs to: its file, or the ranks."""
    path, _, name = nodeid.partition("::")
    return RANKS if _uses_ranks(path, name.partition("[")[0]) else path


class Shares(LoadScopeScheduling):
    """Deals shares out in the order of their first tests."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)
