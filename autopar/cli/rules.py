"""``autopar rules``: which ops a name means, and the line of each."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from autopar.errors import RuleError
from autopar.rules.registry import Call, Entry, Op, registered, rule_of
from autopar.rules.samples import samples


def is_called(op: Op, name: str) -> bool:
    full = str(op)
    return name in (full, full.rpartition(".")[0], *full.split(".")[1:2])


def op_names() -> list[str]:
    """As ``aten.linear``."""
    return sorted({str(found).rpartition(".")[0] for found in registered() if "." in str(found)})


def chosen_rules(name: str | None) -> dict[Op, Entry]:
    """The rules of all ops, or of those that a name means.

    Raises:
        RuleError: it means none.
    """
    chosen = {found: entry for found, entry in registered().items() if name is None or is_called(found, name)}
    if name is not None and not chosen:
        near = difflib.get_close_matches(name.split(".")[-1], {full.split(".")[1] for full in op_names()})
        raise RuleError(f"no op {name!r} has a rule" + (f"; did you mean {', '.join(near)}?" if near else "; `autopar rules` lists all"))
    return chosen


def rule_lines(chosen: Mapping[Op, Entry]) -> Iterator[tuple[str, str]]:
    """Each op with its line; where the line depends on the call, that of the first sample of the op."""
    examples: dict[Op, Call] = {}
    for sample in samples():
        examples.setdefault(sample.op, sample.call)
    for op, entry in chosen.items():
        if isinstance(entry.rule, str):
            yield str(op), entry.rule
        elif op in examples:
            yield str(op), f"{rule_of(examples[op])}   for such a call"
        else:
            yield str(op), "depends on the call"
