"""Rows in the order of the experts that they go to: ops of a graph between a sort and the place where rows are put back.

``passes/sorted_rows.py`` puts them there. A rank that has part of the rows sorts that part, so that rows lie in an order of its own until
they are put back: between the two nothing may be moved along them (`graph.is_sorted`, `solve.ways`).
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.lines import full, line
from autopar.rules.notation import Rule
from autopar.rules.registry import Call, register

_library = torch.library.Library("autopar", "FRAGMENT")


def _sort_ids(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [rows] in order, and which row each was (int64 [rows]); the same order whenever it is worked out again."""
    found = ids.sort(stable=True)
    return found.values, found.indices


def _take_sorted(x: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    """Rows of x [rows / copies, ...] in order, each of them ``copies`` times among all rows, one copy after the other."""
    return x[order if copies == 1 else order // copies]


def _put_back(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The rows of x [rows, ...] where they were before they were in order."""
    return torch.empty_like(x).index_copy(0, order, x)


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, op: str) -> torch.Tensor:
    """Rows of x [rows, in] times the matrix of weight [experts, in, out] that their ids, which are in order, name, by a product of torch or
    of ours that is told where the rows of each expert end (int32 [experts])."""
    experts = torch.arange(weight.shape[0], dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    namespace, _, name = op.partition("::")
    product: Any = getattr(getattr(torch.ops, namespace), name)
    result: torch.Tensor = product(x, weight, ends)
    return result


for _schema, _made in (
    ("sort_ids(Tensor ids) -> (Tensor, Tensor)", _sort_ids),
    ("take_sorted(Tensor x, Tensor order, int copies) -> Tensor", _take_sorted),
    ("put_back(Tensor x, Tensor order) -> Tensor", _put_back),
    ("sorted_mm(Tensor x, Tensor weight, Tensor ids, str op) -> Tensor", _grouped_mm),
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _made, "CompositeImplicitAutograd")


def _take_rule(call: Call) -> Rule:
    copies = call.args[2]
    assert isinstance(copies, int)
    rest = full(call.operands[0].shape)[1:]
    rows = "t" if copies == 1 else "(t k!)"
    return Rule.parse(line([["t", *rest], [rows]], [[rows, *rest]], "0"), **({} if copies == 1 else {"k": copies}))


def _put_rule(call: Call) -> str:
    rest = full(call.operands[0].shape)[1:]
    return line([["s", *rest], ["s"]], [["s", *rest]], "0")


register(torch.ops.autopar.sort_ids.default, "s -> s, s")
register(torch.ops.autopar.take_sorted.default, _take_rule)
register(torch.ops.autopar.put_back.default, _put_rule)
register(torch.ops.autopar.sorted_mm.default, "s k, e! k n, s -> s n ; 0 | 1")
