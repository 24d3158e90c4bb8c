"""Constants of the graph: what depends on no input and no parameter, recognised by value.

* A mask that is the causal constant (or all true) becomes ``is_causal=True`` (or no mask) of its attention.
* Indexing that lists whole dims in order (how masks are looked up after ``vmap``) becomes a permute and unsqueezes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.graph import emit, spec_of, value_of, value_spec
from autopar.passes.aliases import only_looks
from autopar.passes.emitter import Emitter

aten = torch.ops.aten

MAX_NUMEL = 2**28
"""Constants are worked out up to this many elements, repeats counted once; larger ones are left as they are."""
MAX_COMPACTED = 2**24
"""Values up to this many elements are searched for repeats."""
_ELEMENTWISE = frozenset(
    {
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.le.Tensor,
        aten.lt.Tensor,
        aten.ge.Tensor,
        aten.gt.Tensor,
        aten.__and__.Tensor,
        aten.__or__.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
    }
)


def mark_constants(module: fx.GraphModule) -> fx.GraphModule:
    """Set ``meta["constant"]`` on nodes that depend on no placeholder."""
    for node in module.graph.nodes:
        node.meta["constant"] = node.op == "get_attr" or (
            node.op == "call_function"
            and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
            and all(used.meta["constant"] for used in node.all_input_nodes)
        )
    return module


def recognise_masks(module: fx.GraphModule) -> fx.GraphModule:
    """Replace constant causal masks of attention by ``is_causal=True`` and masks that hide nothing by none."""
    verdicts: dict[fx.Node, str] = {}
    for node in list(module.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or not mask.meta["constant"]:
            continue
        if mask not in verdicts:
            value = evaluate(module, mask)
            verdicts[mask] = _classify(value) if value is not None else "other"
        if verdicts[mask] != "other":
            query, key, value, *rest = node.args
            dropout = rest[1] if len(rest) > 1 else node.kwargs.get("dropout_p", 0.0)
            kept = {name: arg for name, arg in node.kwargs.items() if name in ("scale", "enable_gqa")}
            node.args = (query, key, value, None, dropout, verdicts[mask] == "causal")
            node.kwargs = kept
    return module


def _classify(mask: torch.Tensor) -> str:
    """``causal``, ``full`` or ``other``; the mask is boolean or additive, of shape [..., s, t]."""
    s, t = mask.shape[-2:]
    mask = _distinct(mask)
    if mask.dtype is torch.bool:
        keep = mask
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            return "other"
        keep = ~hidden
    if bool(keep.all()):
        return "full"
    is_square = s == t and keep.shape[-2:] == (s, t)
    return "causal" if is_square and bool((keep == torch.ones(s, t, dtype=torch.bool, device=keep.device).tril()).all()) else "other"


def evaluate(module: fx.GraphModule, wanted: fx.Node, given: Mapping[fx.Node, torch.Tensor] | None = None) -> torch.Tensor | None:
    """The value of a node that is made of constants, and of nodes whose values are given, computed on the CPU; every value is freed after
    its last use. None if one of them is too large."""
    given = {} if given is None else given
    needed: set[fx.Node] = set()
    stack = [wanted]
    while stack:
        node = stack.pop()
        if node not in needed and node not in given:
            needed.add(node)
            stack += node.all_input_nodes
    order = [node for node in module.graph.nodes if node in needed]
    last = {used: node for node in order for used in node.all_input_nodes}
    env: dict[fx.Node, Any] = dict(given)
    for node in order:
        if node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        else:
            args, kwargs = fx.map_arg((node.args, {**node.kwargs}), env.__getitem__)
            if _num_elements(node, args) > MAX_NUMEL:
                return None
            env[node] = _compute(node.target, args, _on_cpu(kwargs))
        for used in node.all_input_nodes:
            if last[used] is node and used is not wanted:
                del env[used]
    result: torch.Tensor = env[wanted]
    return result


def _compute(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one op; where its operands only repeat themselves along a dim, an elementwise op is run on one repeat and expanded.

    A mask of [batch, 1, s, s] is so worked out once, not once for each row of the batch.
    """
    operands = [x for x in args if isinstance(x, torch.Tensor)]
    if target not in _ELEMENTWISE or not operands:
        result = target(*args, **kwargs)
        return _compact(result) if isinstance(result, torch.Tensor) else result
    shape, repeated = _repeats(operands)

    def once(x: object) -> object:
        index = tuple(slice(0, 1) if dim in repeated else slice(None) for dim in range(len(shape)))
        return x.expand(shape)[index] if isinstance(x, torch.Tensor) else x

    return target(*(once(x) for x in args), **kwargs).expand(shape)


def _repeats(operands: Sequence[torch.Tensor]) -> tuple[torch.Size, list[int]]:
    """The shape that operands broadcast to, and its dims along which all of them only repeat themselves."""
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    views = [x.expand(shape) for x in operands]
    return shape, [dim for dim in range(len(shape)) if all(view.stride(dim) == 0 for view in views)]


def _num_elements(node: fx.Node, args: Sequence[object]) -> int:
    """How many elements `_compute` works out; a view is none, but a reshape that must copy is all of them."""
    operands = [x for x in args if isinstance(x, torch.Tensor)]
    if node.target in _ELEMENTWISE and operands:
        shape, repeated = _repeats(operands)
        return math.prod(size for dim, size in enumerate(shape) if dim not in repeated)
    is_view = only_looks(node) and (node.target is not aten.reshape.default or _can_view(operands[0], args[1]))
    return 0 if is_view else sum(spec.numel for spec in node.meta.get("specs", ()))


def _can_view(x: torch.Tensor, shape: Any) -> bool:
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True


def _compact(x: torch.Tensor) -> torch.Tensor:
    """The same values, with stride 0 along dims where a small tensor only repeats itself."""
    for dim in range(x.dim()):
        if x.shape[dim] > 1 and x.stride(dim) != 0 and x.numel() <= MAX_COMPACTED:
            first = x.narrow(dim, 0, 1)
            if bool((x == first).all()):
                x = first.expand(x.shape)
    return x


def _distinct(x: torch.Tensor) -> torch.Tensor:
    """Without the repeats of dims with stride 0."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}


def fold_identity_indexing(module: fx.GraphModule) -> fx.GraphModule:
    """``x[arange(b)[:, None], arange(s)[None, :]]`` and its like become permute and unsqueeze of ``x``."""
    for node in list(module.graph.nodes):
        if node.target is not aten.index.Tensor or spec_of(node).requires_grad:
            continue
        source, indices = node.args
        if len(indices) != len(value_spec(value_of(source)).shape):
            continue
        found = [_listed_dim(module, index, spec_of(node).shape) for index in indices]
        dims = [dim for dim in found if dim is not None]
        sizes = value_spec(value_of(source)).shape
        if len(set(dims)) != len(found) or any(spec_of(node).shape[d] != n for d, n in zip(dims, sizes, strict=True)):
            continue
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        with module.graph.inserting_before(node):
            result = emit(module.graph, aten.permute.default, source, order, origin=node)
            for dim in range(len(spec_of(node).shape)):
                if dim not in dims:
                    result = emit(module.graph, aten.unsqueeze.default, result, dim, origin=node)
            if spec_of(result).shape != spec_of(node).shape:
                result = emit(module.graph, aten.expand.default, result, list(spec_of(node).shape), origin=node)
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    return mark_constants(module)


def batch_indexing(module: fx.GraphModule) -> fx.GraphModule:
    """``x[arange(n), y]``, which picks rows of each sample, as of the last token that is no padding, becomes a gather, which may be done
    sample by sample."""
    for node in list(module.graph.nodes):
        if node.target is not aten.index.Tensor or len(node.args[1]) != 2 or None in node.args[1]:
            continue
        source, (samples, rows) = node.args
        sizes, shape = value_spec(value_of(source)).shape, value_spec(value_of(rows)).shape
        if not shape or shape[0] != sizes[0] or value_spec(value_of(rows)).dtype is torch.bool:
            continue
        if _listed_dim(module, samples, shape) != 0 or spec_of(node).shape != (*shape, *sizes[2:]):
            continue
        emitter = Emitter(module, node)
        rows = emitter(aten.where.self, emitter(aten.lt.Scalar, rows, 0), emitter(aten.add.Tensor, rows, sizes[1]), rows)
        rows = emitter(aten.reshape.default, emitter(aten.to.dtype, rows, torch.int64), [sizes[0], -1, *(1 for _ in sizes[2:])])
        if len(sizes) > 2:
            rows = emitter(aten.expand.default, rows, [-1, -1, *sizes[2:]])
        picked = emitter(aten.gather.default, source, 1, rows)
        emitter.replace_by(emitter(aten.reshape.default, picked, list(spec_of(node).shape)))
    return mark_constants(module)


def _listed_dim(module: fx.GraphModule, index: object, shape: tuple[int, ...]) -> int | None:
    """The result dim along which a constant index counts 0, 1, 2, ..., if it does that and nothing else."""
    if not isinstance(index, fx.Node) or not index.meta["constant"]:
        return None
    index_shape = spec_of(index).shape
    long = [dim for dim, size in enumerate(index_shape) if size > 1]
    if len(long) != 1:
        return None
    value = evaluate(module, index)
    if value is None:
        return None
    value = value.flatten()
    dim = long[0] + len(shape) - len(index_shape)
    return dim if torch.equal(value, torch.arange(len(value), device=value.device)) else None


