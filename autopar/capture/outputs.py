"""What a forward returns: tensors, constants, and numbers that the sizes of a call tell, in whatever holds them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

_Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
_PYTHON_TYPES = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass(frozen=True, slots=True)
class Constant:
    """What every call returns in a place."""

    value: object


@dataclass(frozen=True, slots=True)
class Number:
    """What the sizes of a call tell, as ``x.shape[0]``.

    Args:
        expr: of the symbols of the captured graph.
        kind: int, float or bool.
    """

    expr: sympy.Basic
    kind: type[int | float | bool]

    def at(self, sizes: Mapping[sympy.Symbol, int]) -> Constant:
        """The number of a call, by the value of every symbol."""
        return Constant(self.kind(self.expr.subs(sizes)))


Leaf = Constant | Number | None
"""One leaf of what a model returns; None: a tensor, in the order of the graph's outputs."""


def leaves_of_call(leaves: Sequence[Leaf], sizes: Mapping[sympy.Symbol, int]) -> tuple[Constant | None, ...]:
    """What calls of these sizes return beside tensors, for which it has None."""
    return tuple(leaf.at(sizes) if isinstance(leaf, Number) else leaf for leaf in leaves)


class _Opened:
    """An instance of a dataclass that ``torch.utils._pytree`` does not know, as a node that it does.

    Args:
        kind: its class.
        values: of its attributes, opened.
    """

    def __init__(self, kind: type, values: Mapping[str, object]) -> None:
        self.kind, self.values = kind, values


def _flatten(x: _Opened) -> tuple[list[object], tuple[type, tuple[str, ...]]]:
    return list(x.values.values()), (x.kind, tuple(x.values))


def _flatten_with_keys(x: _Opened) -> tuple[list[tuple[pytree.KeyEntry, object]], tuple[type, tuple[str, ...]]]:
    values, context = _flatten(x)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(x.values, values, strict=True)], context


def _unflatten(values: Any, context: Any) -> _Opened:
    kind, names = context
    return _Opened(kind, dict(zip(names, values, strict=True)))


pytree.register_pytree_node(
    _Opened, _flatten, _unflatten, serialized_type_name="autopar.capture.outputs._Opened", flatten_with_keys_fn=_flatten_with_keys
)


class _OpenedSize(list[object]):
    """A ``torch.Size``, of which pytrees would make a tuple."""


pytree.register_pytree_node(
    _OpenedSize,
    lambda x: (list(x), None),
    lambda sizes, _: _OpenedSize(sizes),
    serialized_type_name="autopar.capture.outputs._OpenedSize",
    flatten_with_keys_fn=lambda x: ([(pytree.SequenceKey(i), size) for i, size in enumerate(x)], None),
)


_FIXED = (enum.Enum, type, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Of values that are no tensors and that hold none."""


class _OpenedFixed:
    """Such a value, as a node that holds nothing."""

    def __init__(self, value: object) -> None:
        self.value = value


pytree.register_pytree_node(
    _OpenedFixed,
    lambda x: ([], x.value),
    lambda _, value: _OpenedFixed(value),
    serialized_type_name="autopar.capture.outputs._OpenedFixed",
    flatten_with_keys_fn=lambda x: ([], x.value),
)


def opened(returned: object) -> Any:
    """What a forward returned, with what pytrees do not know or change as nodes that they do; `closed` gives it back."""
    return pytree.tree_map(_open, returned, is_leaf=lambda x: isinstance(x, torch.Size))


def _open(leaf: object) -> object:
    if isinstance(leaf, torch.Size):
        return _OpenedSize(leaf)
    if isinstance(leaf, _FIXED):
        return _OpenedFixed(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type | dict | list | tuple):
        return leaf
    names = dict.fromkeys(x.name for x in fields(leaf) if hasattr(leaf, x.name)) | dict.fromkeys(getattr(leaf, "__dict__", ()))
    return _Opened(type(leaf), {name: opened(getattr(leaf, name)) for name in names})


def closed(returned: object) -> Any:
    """What was `opened`, as it was."""
    return pytree.tree_map(_close, returned, is_leaf=lambda x: isinstance(x, _Opened | _OpenedSize | _OpenedFixed))


def _close(leaf: object) -> object:
    """An instance of a dataclass is made without a call of its ``__init__``, which may ask for other things than it keeps."""
    if isinstance(leaf, _OpenedSize):
        return torch.Size(leaf)  # type: ignore[arg-type]
    if isinstance(leaf, _OpenedFixed):
        return leaf.value
    if not isinstance(leaf, _Opened):
        return leaf
    made: Any = object.__new__(leaf.kind)
    for name, value in leaf.values.items():
        object.__setattr__(made, name, closed(value))
    return made


@contextmanager
def opening(model: nn.Module) -> Iterator[None]:
    """Let a model return what is `opened`."""
    handle = model.register_forward_hook(lambda module, args, returned: opened(returned))
    try:
        yield
    finally:
        handle.remove()


def buffers_last(graph: fx.GraphModule, program: ExportedProgram) -> list[str]:
    """Move what buffers become behind what the model returns, without gradients; the names of these buffers."""
    (output,) = graph.graph.find_nodes(op="output")
    results = list(zip(program.graph_signature.output_specs, output.args[0], strict=True))
    changed = [(spec.target, value) for spec, value in results if spec.kind is OutputKind.BUFFER_MUTATION]
    detached = []
    for _, value in changed:
        with graph.graph.inserting_after(value):
            node = graph.graph.call_function(torch.ops.aten.detach.default, (value,))
        node.meta = dict(value.meta)
        detached.append(node)
    output.args = ((*(value for spec, value in results if spec.kind is OutputKind.USER_OUTPUT), *detached),)
    return [str(name) for name, _ in changed]


def keep_tensors(
    graph: fx.GraphModule, program: ExportedProgram, sizes: Mapping[sympy.Symbol, int], *, only_losses: bool
) -> tuple[Leaf, ...]:
    """Keep tensors (or scalars only) among what the graph returns; all leaves of what the model returns.

    Args:
        graph: as `buffers_last` leaves it.
        program: what it was.
        sizes: the symbols that inputs tell.
        only_losses: keep scalars only; the caller gets None for the others.

    Raises:
        CaptureError: a number that depends on values of tensors, or no scalar where only those are kept.
    """
    (output,) = graph.graph.find_nodes(op="output")
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    returned, updates = output.args[0][: len(specs)], output.args[0][len(specs) :]
    leaves = [_leaf(spec.arg, value, sizes) for spec, value in zip(specs, returned, strict=True)]
    if only_losses:
        leaves = [
            Constant(None) if leaf is None and value.meta["val"].dim() else leaf for value, leaf in zip(returned, leaves, strict=True)
        ]
        if None not in leaves:
            raise CaptureError("outputs='loss' was asked for, but the model returns no scalar; give a loss_fn, or use outputs='whole'")
    output.args = ((*(value for value, leaf in zip(returned, leaves, strict=True) if leaf is None), *updates),)
    graph.graph.eliminate_dead_code()
    return tuple(leaves)


def _leaf(argument: object, value: Any, sizes: Mapping[sympy.Symbol, int]) -> Leaf:
    """One output of a program, which its graph has as ``value``."""
    if hasattr(argument, "value"):
        return Constant(argument.value)
    number = value.meta.get("val")
    if not isinstance(number, _Symbolic):
        return None
    expr = number.node.expr
    if not expr.free_symbols <= sizes.keys():
        raise CaptureError(
            f"the forward returns a number that depends on values of tensors ({value.meta.get('line', '')}), as .item() gives it, and "
            "plans return those that shapes tell; return the tensor, and take .item() of it after the call"
        )
    return Number(expr, _PYTHON_TYPES[type(number)])
