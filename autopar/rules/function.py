"""Functions with a backward of their own."""

from __future__ import annotations

from autopar.capture.functions import NAMESPACE, Kept, free_dims
from autopar.rules.lines import full, line
from autopar.rules.registry import Call, register_namespace


def _function(call: Call) -> str | None:
    """Dims along which a function is seen to work element by element are free, all others whole; None where there are none."""
    shapes, results = (tuple(spec.shape for spec in specs) for specs in (call.operands, call.results))
    if len(call.operands) != len(call.args):  # a size is that of the whole
        return None
    assert isinstance(call.target, Kept)
    free = free_dims(call.target, shapes, tuple(spec.dtype for spec in call.operands), results)
    if not free:
        return None
    is_alike = len({*shapes, *results}) == 1
    terms = []
    for i, shape in enumerate((*shapes, *results)):
        names = full(shape, "a" if is_alike else f"x{i}y")
        terms.append(["b" if dim in free and not is_alike else x if dim in free or x == "1" else f"{x}!" for dim, x in enumerate(names)])
    return line(terms[: len(shapes)], terms[len(shapes) :])


register_namespace(NAMESPACE, _function)
