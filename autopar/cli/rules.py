"""``autopar rules``: which ops a name means, and the line of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.rules.registry import Call, Entry, Op, rule_of
from autopar.rules.samples import samples


def is_called(op: Op, name: str) -> bool:
    full = str(op)
    return name in (full, full.rpartition(".")[0], *full.split(".")[1:2])


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
