"""Experts that take rows in the order of their ids: made so that each rank sorts its own rows.

Models of transformers sort all pairs of token and expert, multiply the rows of each expert by its matrix, and put the rows back. Where an
expert's rows end depends on all rows, so that all of them are gathered. But each row goes its own way: the ops become those of
`rules.sorted_rows`, which say so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.graph import call_of, is_getitem, spec_of, specs_of, value_of, value_spec
from autopar.passes.constants import evaluate
from autopar.passes.emitter import Emitter, argument
from autopar.rules import rule_of

aten, ours = torch.ops.aten, torch.ops.autopar
_PRODUCTS = ("aten::_grouped_mm", "autopar::grouped_mm")


class _Kind(Enum):
    """What a value is beside a sort."""

    IDS = auto()  # made of the sorted ids, row by row
    ENDS = auto()  # made of all sorted ids
    ORDER = auto()  # which row each was
    TOKENS = auto()  # the order over a number of copies
    BLANK = auto()  # of its shape, with nothing in it
    INVERSE = auto()  # where each row is
    ROWS = auto()  # rows in order


class _Role(NamedTuple):
    kind: _Kind
    copies: int = 1


class _Change(NamedTuple):
    """What a node becomes, made of its arguments as they are when all before it have changed; ``is_end``: where rows are back."""

    node: fx.Node
    made: Callable[[Emitter], fx.Node]
    is_end: bool = False


class _Unknown(Exception):
    """Something is done with sorted rows that is not known to be done row by row."""


def sort_own_rows(module: fx.GraphModule) -> fx.GraphModule:
    """Find the sorts of rows that are put back, and let them, and what is between, be done for any part of the rows."""
    known: dict[str, bool] = {}
    for node in module.graph.find_nodes(op="call_function", target=aten.sort.default):
        spec = specs_of(node)[0]
        if len(spec.shape) > 1 or spec.dtype.is_floating_point or argument(node, 2, "descending", False):
            continue
        try:
            region = _Region(module, node, known)
        except _Unknown:
            continue
        region.rewrite()
    return module


class _Region:
    """What is made of a sort until rows are back where they were.

    Args:
        module: the graph.
        sort: the node.
        known: for ways to make something of sorted ids, whether it is where the rows of each expert end; found ones are put in.

    Raises:
        _Unknown: there is no telling.
    """

    def __init__(self, module: fx.GraphModule, sort: fx.Node, known: dict[str, bool]) -> None:
        self.module, self.sort, self.known = module, sort, known
        self.rows = specs_of(sort)[0].shape[0]
        self.roles: dict[fx.Node, _Role] = {}
        self.changes: list[_Change] = []
        self.named: dict[int, fx.Node] = {}
        nodes = list(module.graph.nodes)
        for node in nodes[nodes.index(sort) + 1 :]:
            if node.target is operator.getitem and node.args[0] is sort:
                self._name(node)
            elif not self.roles.keys().isdisjoint(node.all_input_nodes):
                if node.op == "output":
                    raise _Unknown
                self._take(node)
        if not any(change.is_end for change in self.changes):
            raise _Unknown

    def _name(self, node: fx.Node) -> None:
        index = node.args[1]
        assert isinstance(index, int)
        self.roles[node] = _Role((_Kind.IDS, _Kind.ORDER)[index])
        self.named[index] = node

    def _take(self, node: fx.Node) -> None:
        """Find what a node makes of sorted rows, and what becomes of it."""
        roles = {used: self.roles[used] for used in node.all_input_nodes if used in self.roles}
        kinds = {role.kind for role in roles.values()}
        args: Any = node.args
        if is_getitem(node):
            self.roles[node] = self.roles[args[0]]
        elif node.target is aten.index.Tensor and len(args[1]) == 1:
            self._index(node, args[0], args[1][0])
        elif _name_of(node) in _PRODUCTS:
            self._product(node)
        elif kinds == {_Kind.ORDER}:
            self.roles[node] = self._of_order(node)
        elif node.target is aten.index_put.default and kinds == {_Kind.BLANK, _Kind.ORDER}:
            blank, (order,), values = args[:3]
            if self._kind(blank) is not _Kind.BLANK or self._kind(order) is not _Kind.ORDER or not self._counts(values):
                raise _Unknown
            self.roles[node] = _Role(_Kind.INVERSE)
        elif node.target is aten.index_add.default and kinds == {_Kind.TOKENS, _Kind.ROWS}:
            self._add(node)
        elif kinds <= {_Kind.IDS, _Kind.ENDS}:
            is_by_row = kinds == {_Kind.IDS} and _is_by_row(node, roles)
            self.roles[node] = _Role(_Kind.IDS if is_by_row else _Kind.ENDS)
        elif kinds <= {_Kind.IDS, _Kind.ROWS} and _is_by_row(node, roles):
            self.roles[node] = _Role(_Kind.ROWS)
        else:
            raise _Unknown

    def _kind(self, node: Any) -> _Kind | None:
        role = self.roles.get(node)
        return None if role is None else role.kind

    def _of_order(self, node: fx.Node) -> _Role:
        """What is made of the order alone."""
        if node.target is aten.empty_like.default:
            return _Role(_Kind.BLANK)
        if node.target is aten.argsort.default and not argument(node, 2, "descending", False):
            return _Role(_Kind.INVERSE)
        is_floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
        if is_floor and isinstance(node.args[1], int) and self.rows % node.args[1] == 0:
            return _Role(_Kind.TOKENS, node.args[1])
        raise _Unknown

    def _counts(self, values: Any) -> bool:
        """Whether a value is 0, 1, 2, ..."""
        value = self._constant(values)
        return value is not None and torch.equal(value, torch.arange(self.rows, device=value.device))

    def _constant(self, value: Any) -> torch.Tensor | None:
        is_constant = isinstance(value, fx.Node) and value.meta.get("constant", False)
        return evaluate(self.module, value) if is_constant else None

    def _index(self, node: fx.Node, x: Any, index: Any) -> None:
        """Rows of something are taken in order, or put back, or looked up for each row."""
        role, size = self.roles.get(index), value_spec(value_of(x)).shape[0]
        is_sorted = x in self.roles
        if role is None or (is_sorted and self._kind(x) is not _Kind.ROWS):
            raise _Unknown
        if role.kind is _Kind.INVERSE and is_sorted:
            self.changes.append(_Change(node, lambda emit: emit(ours.put_back.default, node.args[0], self.named[1]), is_end=True))
        elif role.kind in (_Kind.ORDER, _Kind.TOKENS) and not is_sorted and size * role.copies == self.rows:
            self.changes.append(_Change(node, lambda emit: emit(ours.take_sorted.default, node.args[0], self.named[1], role.copies)))
            self.roles[node] = _Role(_Kind.ROWS)
        elif role.kind is _Kind.IDS and not is_sorted:
            self.roles[node] = _Role(_Kind.ROWS)
        else:
            raise _Unknown

    def _product(self, node: fx.Node) -> None:
        """Rows times the matrices of their experts."""
        given: list[Any] = [*node.args, *node.kwargs.values()]
        if len(given) != 3 or self._kind(given[0]) is not _Kind.ROWS or self._kind(given[2]) is not _Kind.ENDS or given[1] in self.roles:
            raise _Unknown
        if not self._are_ends(given[2], value_spec(value_of(given[1])).shape[0]):
            raise _Unknown

        def multiply(emit: Emitter) -> fx.Node:
            rows, weight, _ = [*node.args, *node.kwargs.values()]
            return emit(ours.sorted_mm.default, rows, weight, self.named[0], _name_of(node))

        self.changes.append(_Change(node, multiply))
        self.roles[node] = _Role(_Kind.ROWS)

    def _are_ends(self, ends: fx.Node, experts: int) -> bool:
        """Whether a value is where the rows of each expert end, by what it is for some ids, among which some experts have no rows."""
        way = f"{self._way(ends)} {experts} {self.rows}"
        if way not in self.known:
            drawn = torch.randint(experts, (self.rows,), generator=torch.Generator().manual_seed(0), device="cpu")
            drawn = torch.where(drawn % 3 == 1, drawn - 1, drawn).sort().values
            found = evaluate(self.module, ends, {self.named[0]: drawn.to(specs_of(self.sort)[0].dtype)})
            expected = torch.searchsorted(drawn, torch.arange(experts, device="cpu"), right=True)
            self.known[way] = found is not None and found.tolist() == expected.tolist()
        return self.known[way]

    def _way(self, node: fx.Node) -> str:
        """How a value is made of the sorted ids, alike for those that are made alike: a line for each op."""
        numbers, lines = {self.named[0]: 0}, list[str]()

        def number(used: fx.Node) -> Any:
            if used not in numbers:
                lines.append(f"{used.target} {fx.map_arg((used.args, used.kwargs), number)}")
                numbers[used] = len(numbers)
            return numbers[used]

        number(node)
        return "\n".join(lines)

    def _add(self, node: fx.Node) -> None:
        """Rows are added to those of their tokens: put back, each token's copies are one after the other."""
        args: Any = node.args
        zeros, dim, tokens, rows = args[:4]
        start, copies = self._constant(zeros), self.roles[tokens].copies if tokens in self.roles else 0
        if dim != 0 or node.kwargs or self._kind(tokens) is not _Kind.TOKENS or self._kind(rows) is not _Kind.ROWS:
            raise _Unknown
        if start is None or start.any() or len(start) * copies != self.rows:
            raise _Unknown

        def add(emit: Emitter) -> fx.Node:
            back = emit(ours.put_back.default, node.args[3], self.named[1])
            parted = emit(aten.reshape.default, back, [self.rows // copies, copies, *spec_of(node).shape[1:]])
            return emit(aten.sum.dim_IntList, parted, [1])

        self.changes.append(_Change(node, add, is_end=True))

    def rewrite(self) -> None:
        made = Emitter(self.module, self.sort)(ours.sort_ids.default, self.sort.args[0])
        made.meta["is_sorted"] = True
        for index, node in self.named.items():
            self.named[index] = Emitter(self.module, self.sort).result(made, index)
            node.replace_all_uses_with(self.named[index])
        for node, role in self.roles.items():
            node.meta["is_sorted"] = role.kind is not _Kind.ENDS
        for node, make, is_end in self.changes:
            emitter = Emitter(self.module, node)
            changed = make(emitter)
            changed.meta["is_sorted"] = not is_end
            emitter.replace_by(changed)


def _name_of(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def _is_by_row(node: fx.Node, roles: Collection[fx.Node]) -> bool:
    """Whether each row of what a node makes is made of that row of each of ``roles``, and of nothing else in order."""
    rule, given = rule_of(call_of(node)), list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), given.append)
    if rule is None:
        return False
    terms = list(zip(given, rule.operands, strict=True))
    firsts = {term[:1] for used, term in terms if used in roles}
    others = {letter for used, term in terms for dim in (term[1:] if used in roles else term) for letter in dim}
    if len(firsts) != 1 or not all(term[:1] in firsts for term in rule.results):
        return False
    letters = {letter for term in firsts for dim in term for letter in dim}
    return bool(letters) and letters.isdisjoint(rule.whole | others)
