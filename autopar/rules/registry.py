"""The one table of ops: for each the line of its rule, and how its arguments look for the local shard.

A rule is a line, or a function from the `Call` to a line (or a parsed `Rule`) where dims depend on the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import RuleError
from autopar.precision import Master
from autopar.rules.notation import Rule

Op = Callable[..., Any]


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether values of a dtype may have gradients, and be sums of parts."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that a call takes or gives; ``master`` is that of a parameter which is stored in another dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = False
    master: Master | None = None

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_vector(self) -> bool:
        """Whether it has one dim, as biases and norms do, or none."""
        return len(self.shape) <= 1

    @property
    def stored(self) -> TensorSpec:
        """What is stored of it, with its gradient."""
        return self if self.master is None else TensorSpec(self.shape, self.master.dtype, self.requires_grad)

    @property
    def is_reduced_as_stored(self) -> bool:
        """Whether its gradient is summed over ranks in the dtype in which it is stored."""
        return self.master is None or self.master.reduce == self.master.dtype

    @property
    def reduced_width(self) -> int:
        """Bytes of an element of its gradient while that is summed over ranks."""
        return (self.dtype if self.master is None else self.master.reduce).itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One op call with every tensor argument as a `TensorSpec`; operands are the tensor arguments in order of appearance."""

    target: Op
    args: tuple[object, ...]
    kwargs: dict[str, object]
    results: tuple[TensorSpec, ...]

    @property
    def operands(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorSpec))

    def argument(self, position: int, name: str, default: object = None) -> object:
        """A non-tensor argument, given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Stands in local arguments for this rank's position on a mesh axis, an int64 tensor of shape [1]."""

    axis: int


@dataclass(frozen=True, slots=True)
class Local:
    """What a rank sees of a call: local sizes of the factors, local result shapes, and the mesh axes that shard a factor, major first."""

    sizes: dict[str, int]
    result_shapes: tuple[tuple[int, ...], ...]
    axes: dict[str, tuple[int, ...]]
    mesh_sizes: tuple[int, ...]
    axis_names: tuple[str, ...]


Arguments = tuple[Op, tuple[object, ...], dict[str, object]]
LocalForm = Callable[[Call, Local], Arguments]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table: ops that share a rule, and how their arguments change on a shard (None: they do not)."""

    rule: str | Callable[[Call], str | Rule | None]
    local: LocalForm | None = None


_TABLE: dict[Op, Entry] = {}
_NAMED: dict[str, Entry] = {}


def register(ops: Op | Sequence[Op], rule: str | Callable[[Call], str | Rule], *, local: LocalForm | None = None) -> None:
    """Add one row; RuleError if an op is registered twice or a line cannot be read."""
    if isinstance(rule, str):
        Rule.parse(rule)
    for op in ops if isinstance(ops, Sequence) else (ops,):
        if op in _TABLE:
            raise RuleError(f"op {op} has a rule already")
        _TABLE[op] = Entry(rule, local)


def register_named(names: Sequence[str], rule: str | Callable[[Call], str | Rule]) -> None:
    """Add one row for ops that need not be there, of another library or torch: by their names, ``namespace::op``."""
    for name in names:
        if name in _NAMED:
            raise RuleError(f"op {name} has a rule already")
        _NAMED[name] = Entry(rule)


def register_namespace(name: str, rule: Callable[[Call], str | Rule | None]) -> None:
    """Add one row for all ops of a library, some of which may have no rule after all."""
    if name in _NAMED:
        raise RuleError(f"ops of {name} have a rule already")
    _NAMED[name] = Entry(rule)


def _entry(op: Op) -> Entry | None:
    name = str(getattr(getattr(op, "_schema", None), "name", ""))
    return _TABLE.get(op) or _NAMED.get(name) or _NAMED.get(name.partition("::")[0])


def has_rule(op: Op) -> bool:
    """Whether an op is in the table."""
    return _entry(op) is not None


def registered() -> dict[Op, Entry]:
    """The table, in order of registration, without ops that are known by name alone."""
    return dict(_TABLE)


def rule_of(call: Call) -> Rule | None:
    """The rule of a call, checked against its shapes; None if its op is not in the table, or has none for such a call."""
    entry = _entry(call.target)
    rule = None if entry is None else entry.rule if isinstance(entry.rule, str) else entry.rule(call)
    if rule is None:
        return None
    rule = _parsed(rule) if isinstance(rule, str) else rule
    rule.bind([spec.shape for spec in call.operands], [spec.shape for spec in call.results])
    return rule


@lru_cache(maxsize=1 << 12)
def _parsed(text: str) -> Rule:
    """The rule of a line, of which equal blocks have many alike."""
    return Rule.parse(text)


def local_form(call: Call, local: Local) -> Arguments:
    """Target and arguments of the call on one rank; tensor arguments stay as `TensorSpec` place holders."""
    entry = _entry(call.target)
    if entry is None or entry.local is None:
        return call.target, call.args, call.kwargs
    return entry.local(call, local)
