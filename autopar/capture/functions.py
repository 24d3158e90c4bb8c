"""Functions with a backward of their own (``torch.autograd.Function``): each call stays one op of a captured graph.

``torch.export`` looks into their forwards, so that autograd would differentiate these and never ask for what was written as the backward.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.autograd import Function
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import CaptureError

NAMESPACE = "autopar_function"
_SIMPLE = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None))
_PROBED = 4
"""Size of the dims on which it is tried whether a function may be taken apart."""
_MAX_PROBED = 1 << 22
"""Elements of a tensor up to which it is tried."""
Shapes = tuple[tuple[int, ...], ...]
_library = torch.library.Library(NAMESPACE, "DEF")
_apply: Any = Function.apply.__func__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A function and what it is called with, which a captured graph calls in place of the op that it was exported as.

    Graphs of other models, or of the same one captured again, may have been exported as an op of the same name: the graph says what it
    calls, and keeps it alive.

    Args:
        function: the class.
        args: what varies from call to call, tensors and sizes, is None among them.
        kinds: of what varies; empty for all else.
        op: what it was exported as.
        free: what `free_dims` has found.
    """

    function: type[Function]
    args: tuple[Any, ...]
    kinds: tuple[str, ...]
    op: torch._ops.OpOverload
    free: dict[object, frozenset[int]] = field(default_factory=dict, repr=False)

    def __call__(self, *given: Any) -> Any:
        """What the function gives, in `keep_functions` by an op again."""
        return Function.apply.__func__(self.function, *self._all(given))  # type: ignore[attr-defined]

    def run(self, *given: Any) -> Any:
        """What the function gives."""
        return _apply(self.function, *self._all(given))

    def __str__(self) -> str:
        return str(self.op)

    @property
    def __name__(self) -> str:
        return str(self.op.overloadpacket.__name__)

    @property
    def _schema(self) -> torch._C.FunctionSchema:
        return self.op._schema

    def _all(self, given: Sequence[Any]) -> list[Any]:
        values = iter(given)
        return [next(values) if kind else arg for arg, kind in zip(self.args, self.kinds, strict=True)]

    def is_of(self, function: type[Function], args: tuple[Any, ...], kinds: tuple[str, ...]) -> bool:
        """Whether it is what a call makes."""
        pairs = zip(self.args, args, strict=False)
        alike = (a is b or (isinstance(a, _SIMPLE) and type(a) is type(b) and a == b) for a, b in pairs)
        return self.function is function and self.kinds == kinds and all(alike)


_exported: dict[str, Kept] = {}
"""Of the export under way, by the names of their ops."""


def keep_functions(export: Callable[[], ExportedProgram]) -> ExportedProgram:
    """What ``export`` makes, in which a call of a function with a backward of its own is one call of a `Kept`.

    Those of torch are looked into, since their backwards are what autograd makes.

    Raises:
        CaptureError: a function takes tensors in lists, gives back what is no tensor, or changes what it is given.
    """

    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:  # whose backward is that of what it calls where no gradients are recorded
            call, _, *given = args
            return call(*given)
        if function.__module__.partition(".")[0] == "torch" or kwargs:
            return _apply(function, *args, **kwargs)
        return _op(function, args)(*(arg for arg in args if _kind(arg)))

    with patch.dict(_exported, clear=True), patch.object(Function, "apply", classmethod(apply)):
        program = export()
        kept = {each.op: each for each in _exported.values()}
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.target = kept.get(node.target, node.target)
    return program


def _kind(arg: object) -> str:
    """What an op has in its schema for an argument that varies; empty for all else."""
    return "Tensor" if isinstance(arg, torch.Tensor) else "SymInt" if isinstance(arg, torch.SymInt) else ""


def _op(function: type[Function], args: tuple[Any, ...]) -> torch._ops.OpOverload:
    """The op of a call, which is made if there is none."""
    kinds, num_results = tuple(map(_kind, args)), _num_results(function, args)
    args = tuple(None if kind else arg for arg, kind in zip(args, kinds, strict=True))
    told = [repr(arg) if isinstance(arg, _SIMPLE) else type(arg).__qualname__ for arg in args]
    digest = hashlib.sha256(repr((function.__module__, function.__qualname__, told, kinds, num_results)).encode()).hexdigest()[:8]
    for count in itertools.count():  # of those that cannot be told by a name, the first in a model comes first in all processes
        name = f"{function.__name__}_{digest}" + (f"_{count}" if count else "")
        if name not in _exported:
            _exported[name] = Kept(function, args, kinds, _defined(name, kinds, num_results))
        if _exported[name].is_of(function, args, kinds):
            break
    return _exported[name].op


def _defined(name: str, kinds: tuple[str, ...], num_results: int) -> torch._ops.OpOverload:
    """The op of a name, which is what the export under way says: others may have had one of that name."""
    ops = getattr(torch.ops, NAMESPACE)
    if not hasattr(ops, name):
        given = ", ".join(f"{kind} x{i}" for i, kind in enumerate(filter(None, kinds)))
        made = ", ".join(["Tensor"] * num_results)
        _library.define(f"{name}({given}) -> {made if num_results == 1 else f'({made})'}")
        _library.impl(name, lambda *given: _exported[name].run(*given), "CompositeImplicitAutograd")
    op: torch._ops.OpOverload = getattr(ops, name).default
    return op


def _num_results(function: type[Function], args: tuple[Any, ...]) -> int:
    """How many tensors a call gives."""
    name = f"{function.__module__}.{function.__qualname__}"
    if any(isinstance(part, torch.Tensor) for arg in args if isinstance(arg, list | tuple | dict) for part in _parts(arg)):
        raise CaptureError(f"{name}, a torch.autograd.Function, takes tensors in a list; give each as an argument of its own")
    before = [x._version for x in args if isinstance(x, torch.Tensor)]
    with disable_proxy_modes_tracing():
        results = _apply(function, *args)
    if before != [x._version for x in args if isinstance(x, torch.Tensor)]:
        raise CaptureError(f"{name}, a torch.autograd.Function, changes what it is given in place; let it make something new")
    results = results if isinstance(results, tuple) else (results,)
    if not results or not all(isinstance(x, torch.Tensor) for x in results):
        raise CaptureError(f"{name}, a torch.autograd.Function, gives back what is no tensor ({results!r}); let it give tensors alone")
    return len(results)


def _parts(x: Any) -> Iterator[Any]:
    for part in x.values() if isinstance(x, dict) else x:
        yield part
        if isinstance(part, list | tuple | dict):
            yield from _parts(part)


def free_dims(kept: Kept, shapes: Shapes, dtypes: tuple[torch.dtype, ...], results: Shapes) -> frozenset[int]:
    """Dims along which a function may be taken apart, forward and backward: it is tried on random numbers, whole and in halves.

    All dims are tried if all tensors have the same shape, else the first if all have that.

    Args:
        kept: the function.
        shapes, dtypes: of its tensors.
        results: shapes of what it gives.
    """
    call = shapes, dtypes, results
    if call not in kept.free:
        kept.free[call] = _free_dims(kept, *call)
    return kept.free[call]


def _free_dims(kept: Kept, shapes: Shapes, dtypes: tuple[torch.dtype, ...], results: Shapes) -> frozenset[int]:
    first = shapes[0]
    is_alike = all(shape == first for shape in (*shapes, *results))
    if not is_alike and not all(shape[:1] == first[:1] != () for shape in (*shapes, *results)):
        return frozenset()
    sizes = [_probed(shape, is_alike) for shape in (*shapes, *results)]
    if max(map(math.prod, sizes)) > _MAX_PROBED:
        return frozenset()
    random = torch.Generator().manual_seed(0)
    whole = [_drawn(shape, dtype, random) for shape, dtype in zip(sizes, dtypes, strict=False)]
    grads = [torch.rand(shape, generator=random, dtype=torch.float64, device="cpu") for shape in sizes[len(shapes) :]]
    try:
        expected = _run(kept, whole, grads)
        if [tuple(x.shape) for x in expected[: len(results)]] != sizes[len(shapes) :]:
            return frozenset()
        tried = [dim for dim in range(len(first) if is_alike else 1) if sizes[0][dim] == _PROBED]
        return frozenset(dim for dim in tried if _is_free(kept, whole, grads, expected, dim))
    except Exception:  # whatever it raises for other sizes and numbers than its own: then it is taken whole
        return frozenset()


def _probed(shape: tuple[int, ...], is_alike: bool) -> tuple[int, ...]:
    """A smaller shape: other tensors may have to fit to all dims but the first."""
    return tuple(min(size, _PROBED) if is_alike or dim == 0 else size for dim, size in enumerate(shape))


def _is_free(kept: Kept, whole: list[torch.Tensor], grads: list[torch.Tensor], expected: list[torch.Tensor], dim: int) -> bool:
    halves = [_run(kept, [x.chunk(2, dim)[i] for x in whole], [x.chunk(2, dim)[i] for x in grads]) for i in range(2)]
    pairs = [(torch.cat(parts, dim), x) for *parts, x in zip(*halves, expected, strict=True)]
    return all(torch.allclose(joined, x, rtol=1e-9, atol=1e-12, equal_nan=True) for joined, x in pairs)


def _drawn(sizes: Sequence[int], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(tuple(sizes), generator=random, dtype=torch.float64, device="cpu") * 4 - 2
    return torch.randint(2, tuple(sizes), generator=random, device="cpu").to(dtype)


def _run(kept: Kept, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results, then gradients of what has some."""
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
    with torch.enable_grad():
        made = kept(*given)
        results = list(made) if isinstance(made, tuple) else [made]
        pairs = [(x, grad.to(x.dtype)) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        wanted = [x for x in given if x.requires_grad]
        found = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True) if pairs else ()
    zeros = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, found, strict=bool(pairs))]
    return [*(x.detach() for x in results), *zeros]
