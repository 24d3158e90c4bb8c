"""``--relief``: what would make a plan fit, and what its pins cost, before the plan or in place of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autopar.errors import InfeasibleError
from autopar.planner.document import Plan
from autopar.planner.relief import Relief

HINT = "`autopar plan ... --relief` tries what would make it fit, and prices each"


@contextmanager
def hinted() -> Iterator[None]:
    """Errors of what does not fit name the command that tells more."""
    try:
        yield
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error}\n{HINT}",
            limit_bytes=error.limit_bytes,
            least_bytes=error.least_bytes,
            state_bytes=error.state_bytes,
            members=error.members,
        ) from error


def asked_plan(rows: Sequence[Relief]) -> Plan:
    """The plan of the request as it is, of what was tried for it.

    Raises:
        AutoparError: it has none.
    """
    if rows[0].error is not None:
        raise rows[0].error
    assert rows[0].plan is not None
    return rows[0].plan
