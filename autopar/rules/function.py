"""Functions with a backward of their own."""

from __future__ import annotations

from autopar.functions import NAMESPACE, free_dims
from autopar.rules.lines import full, line, whole
from autopar.rules.registry import Call, register_namespace


def _function(call: Call) -> str:
    """Dims along which a function is seen to work element by element, of tensors of one shape, are free; all else is whole."""
    shapes = {spec.shape for spec in (*call.operands, *call.results)}
    if len(shapes) > 1 or len(call.operands) != len(call.args):
        return whole(call)
    (shape,) = shapes
    name = str(call.target).split(".")[1]
    dtypes = tuple(spec.dtype for spec in call.operands)
    free = free_dims(name, (shape,) * len(dtypes), dtypes, len(call.results))
    term = [x if x == "1" or dim in free else f"{x}!" for dim, x in enumerate(full(shape))]
    return line([term] * len(call.operands), [term] * len(call.results))


register_namespace(NAMESPACE, _function)
