"""Concrete graph -> normal graph: functional forms that rules and prices can read.

What makes graphs alike: no-ops dropped; biases added apart, so that a partial sum gets them once;
means as sums over counts, so that sharded means are exact; constant masks recognised.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.capture.trace import Captured
from autopar.errors import CaptureError
from autopar.graph import spec_of, specs_of, value_of, value_spec
from autopar.passes.constants import evaluate
from autopar.passes.emitter import Emitter, argument
from autopar.rules.registry import TensorSpec

aten = torch.ops.aten

_SPARSE = ("sparse", "sparse_grad")
"""What arguments are called that make the gradient of a table sparse."""
_CREATIONS = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.zero.default: aten.zeros.default,
}
_ALIASES = frozenset(
    {
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
        aten.slice.Tensor,
        aten.expand.default,
        aten.view.default,
        aten.view_as.default,
        aten.reshape.default,
        aten.reshape_as.default,
    }
)
"""Ops that do nothing where their result has the shape and dtype of their operand."""
_CASTS = frozenset({aten.type_as.default, aten.to.other, aten.to.device, aten.to.dtype_layout})
"""Ops of which a conversion is left: all of a graph is on the device of its rank."""
_PARTING = frozenset(
    {
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.unbind.int,
    }
)
_TOGETHER = frozenset({aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing})
"""Ops that give each of several tensors, by which it is shaped."""
_PLAIN = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_chunk.default: aten.chunk.default,
    aten.split_copy.Tensor: aten.split.Tensor,
    aten.split_with_sizes_copy.default: aten.split_with_sizes.default,
    aten.unbind_copy.int: aten.unbind.int,
}
"""Ops that part a tensor, and what they are where nothing is written."""
_OF_MEMORY = frozenset({aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype})
"""Ops that read how a tensor lies."""
_SUMS = {
    aten.add.Tensor: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.rsub.Tensor: aten.rsub.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
}
"""Ops that add two terms, and what they are of tensors alone."""
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.ravel.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)


def mark_sources(module: fx.GraphModule, captured: Captured) -> fx.GraphModule:
    """Give placeholder nodes their `Placeholder` under ``meta["placeholder"]``, and specs of parameters their master."""
    for node, entry in zip(module.graph.find_nodes(op="placeholder"), captured.placeholders, strict=True):
        node.meta["placeholder"] = entry
        node.meta["specs"] = (replace(spec_of(node), master=entry.master),)
    return module


def drop_noops(module: fx.GraphModule) -> fx.GraphModule:
    """Remove conversions to the same dtype, full slices, writes of all elements, copies, inactive dropout, views to the same shape; views
    become reshapes, and views and conversions that are done after another tensor are done without it."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        node.target = _PLAIN.get(node.target, node.target)
        is_alias = node.target in _ALIASES and specs_of(node)[0] == _first_operand_spec(node)
        is_idle = node.target is aten.dropout.default and (node.args[1] == 0.0 or not node.args[2])
        is_whole = node.target is aten.slice_scatter.default and spec_of(node) == value_spec(value_of(node.args[1]))
        if is_alias or is_idle or is_whole:
            node.replace_all_uses_with(node.args[1] if is_whole else node.args[0])
            module.graph.erase_node(node)
        elif node.target in _RESHAPES:
            node.target = aten.reshape.default
            node.args, node.kwargs = (node.args[0], list(spec_of(node).shape)), {}
        elif node.target in _CASTS:
            node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], spec_of(node).dtype), {}
    return module


def lie_in_order(module: fx.GraphModule) -> fx.GraphModule:
    """What is read as it lies in memory is laid out in order on each rank, whatever plans and other passes made of it."""
    for node in list(module.graph.nodes):
        if node.target in _OF_MEMORY:
            node.update_arg(0, Emitter(module, node)(aten.contiguous.default, node.args[0]))
    return module


def _first_operand_spec(node: fx.Node) -> TensorSpec | None:
    first = node.args[0] if node.args else None
    return replace(value_spec(value_of(first)), master=None) if isinstance(first, fx.Node) else None


def free_creations(module: fx.GraphModule) -> fx.GraphModule:
    """``x.new_zeros(size)``, ``x.zero_()`` and the like become constants, since nothing of x is read but its dtype."""
    for node in list(module.graph.nodes):
        if node.target in _CREATIONS:
            emitter, spec = Emitter(module, node), spec_of(node)
            value = [argument(node, 2, "fill_value", None)] if node.target is aten.new_full.default else []
            emitter.replace_by(emitter(_CREATIONS[node.target], list(spec.shape), *value, dtype=spec.dtype))
    return module


def use_dense_gradients(module: fx.GraphModule) -> fx.GraphModule:
    """Ops that would give their table a sparse gradient give it a dense one, of the same values, which ranks can sum up and shard."""
    for node in module.graph.nodes:
        arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
        for i, name in enumerate(entry.name for entry in arguments):
            if name in _SPARSE and argument(node, i, name, False):
                node.update_arg(i, False) if i < len(node.args) else node.update_kwarg(name, False)
    return module


def expand_copies(module: fx.GraphModule) -> fx.GraphModule:
    """``copy(x, y)``, which writing into a tensor becomes, is y in the dtype and shape of x, of which no more is read."""
    for node in list(module.graph.nodes):
        if node.target is aten.copy.default:
            emitter, spec = Emitter(module, node), spec_of(node)
            value = _converted(emitter, node.args[1], spec.dtype)
            if _shape(value) != spec.shape:
                value = emitter(aten.expand.default, value, list(spec.shape))
            emitter.replace_by(value)
    return module


def name_only_parts(module: fx.GraphModule) -> fx.GraphModule:
    """Ops that part a tensor and leave it whole, as ``split`` by its size, are that tensor: of one result nobody could tell a list."""
    for node in list(module.graph.nodes):
        if node.target not in _PARTING | _TOGETHER or len(specs_of(node)) > 1:
            continue
        x, dim = node.args[0][0] if node.target in _TOGETHER else node.args[0], argument(node, 1, "dim", 0)
        for part in list(node.users):
            emitter = Emitter(module, part)
            emitter.replace_by(emitter(aten.squeeze.dim, x, dim) if node.target is aten.unbind.int else x)
        module.graph.erase_node(node)
    return module


def expand_masked_writes(module: fx.GraphModule) -> fx.GraphModule:
    """``x[mask] = y`` becomes a ``where`` if y is the same for all elements that the mask picks: which they are need not be known."""
    for node in list(module.graph.nodes):
        if node.target is not aten.index_put.default or len(node.args[1]) != 1 or argument(node, 3, "accumulate", False):
            continue
        x, (mask,), value = node.args[:3]
        rest = len(_shape(x)) - len(_shape(mask))
        if value_spec(value_of(mask)).dtype is not torch.bool or any(size > 1 for size in _shape(value)[: len(_shape(value)) - rest]):
            continue
        emitter = Emitter(module, node)
        if rest:
            mask = emitter(aten.reshape.default, mask, [*_shape(mask), *(1 for _ in range(rest))])
        if len(_shape(value)) > rest:
            value = emitter(aten.reshape.default, value, list(_shape(value)[len(_shape(value)) - rest :]))
        emitter.replace_by(emitter(aten.where.self, mask, value, x))
    return module


def widen_masks(module: fx.GraphModule) -> fx.GraphModule:
    """A mask of attention that is the same for all queries, of fewer dims than queries and keys, gets dims of size 1 for them."""
    for node in list(module.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = widened = argument(node, 3, "attn_mask", None)
        emitter = Emitter(module, node)
        while widened is not None and len(_shape(widened)) < 2:
            widened = emitter(aten.unsqueeze.default, widened, 0)
        if widened is not mask:
            node.replace_input_with(mask, widened)
    return module


def drop_empty_parts(module: fx.GraphModule) -> fx.GraphModule:
    """``cat`` without the tensors that have no elements, as of rotary positions of whole heads, where nothing passes by."""
    for node in list(module.graph.nodes):
        if node.target not in (aten.cat.default, aten.concat.default):
            continue
        parts, emitter = [part for part in node.args[0] if 0 not in _shape(part)], Emitter(module, node)
        if len(parts) < len(node.args[0]):  # of which the others may have given the dtype
            parts = [_converted(emitter, part, spec_of(node).dtype) for part in parts]
        if len(parts) == 1:
            emitter.replace_by(parts[0])
        elif parts:
            node.args = (parts, *node.args[1:])
    return module


def split_biases(module: fx.GraphModule) -> fx.GraphModule:
    """``linear(x, w, b)``, ``addmm(b, x, w)`` and ``bilinear(x, y, w, b)`` become a product and an addition."""
    for node in list(module.graph.nodes):
        emitter = Emitter(module, node)
        if node.target is aten.linear.default and len(node.args) == 3 and node.args[2] is not None:
            x, weight, bias = node.args
            emitter.replace_by(emitter(aten.add.Tensor, emitter(aten.linear.default, x, weight), bias))
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, x, weight = node.args
            emitter.replace_by(emitter(aten.add.Tensor, emitter(aten.mm.default, x, weight), bias))
        elif node.target is aten.bilinear.default:
            x, y, weight, bias = node.args if len(node.args) == 4 else (*node.args, None)
            rows = string.ascii_lowercase[: len(spec_of(node).shape) - 1]
            product = emitter(aten.einsum.default, f"{rows}X,ZXY,{rows}Y->{rows}Z", [x, weight, y])
            emitter.replace_by(product if bias is None else emitter(aten.add.Tensor, product, bias))
    return module


def split_equations(module: fx.GraphModule) -> fx.GraphModule:
    """``tensordot`` becomes an ``einsum``, and one of three operands or more products of two, in the order in which torch multiplies them:
    what lies between them takes memory, is kept for the backward, and may be sharded."""
    for node in list(module.graph.nodes):
        if node.target is aten.tensordot.default:
            node.target, node.args, node.kwargs = aten.einsum.default, _equation(*node.args), {}
        if node.target is not aten.einsum.default or len(node.args[1]) < 3:
            continue
        left, arrow, kept = str(node.args[0]).replace(" ", "").partition("->")
        if not arrow or "." in left:
            continue
        emitter, path = Emitter(module, node), node.kwargs.get("path")
        rest = list(zip(left.split(","), node.args[1], strict=True))
        for i in range(0, 2 * len(rest) - 2, 2):
            low, high = sorted(path[i : i + 2]) if path else (0, 1)
            second, first = rest.pop(high), rest.pop(low)
            wanted = kept + "".join(letters for letters, _ in rest)
            made = "".join(x for x in dict.fromkeys(first[0] + second[0]) if x in wanted) if rest else kept
            product = emitter(aten.einsum.default, f"{first[0]},{second[0]}->{made}", [first[1], second[1]])
            rest.insert(len(rest) if path else 0, (made, product))
        emitter.replace_by(rest[0][1])
    return module


def _equation(first: fx.Node, second: fx.Node, dims: Sequence[int], others: Sequence[int]) -> tuple[str, list[fx.Node]]:
    """A ``tensordot`` in letters."""
    ranks = [len(value_spec(value_of(operand)).shape) for operand in (first, second)]
    left, right = (list(string.ascii_letters[start : start + rank]) for start, rank in zip((0, ranks[0]), ranks, strict=True))
    for dim, other in zip(dims, others, strict=True):
        right[other] = left[dim]
    kept = [letter for letter in (*left, *right) if (letter in left) != (letter in right)]
    return f"{''.join(left)},{''.join(right)}->{''.join(kept)}", [first, second]


def _converted(emitter: Emitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if value_spec(value_of(x)).dtype == dtype else emitter(aten.to.dtype, x, dtype)


def _summed(dtype: torch.dtype) -> torch.dtype:
    """What the sum of a mean is in: in float16 it would end at 65504, and torch does not sum up in it either."""
    return torch.float32 if dtype == torch.float16 else dtype


def expand_means(module: fx.GraphModule) -> fx.GraphModule:
    """``mean`` becomes a sum divided by a count, so that means over a sharded dim are exact."""
    for node in list(module.graph.nodes):
        if node.target not in (aten.mean.default, aten.mean.dim):
            continue
        emitter = Emitter(module, node)
        operand = node.args[0]
        numel = value_spec(value_of(operand)).numel
        summed = _summed(spec_of(node).dtype)
        dtype = {"dtype": summed} if node.kwargs.get("dtype") or summed != spec_of(node).dtype else {}
        if node.target is aten.mean.default:
            total = emitter(aten.sum.default, operand, **dtype)
        else:
            dims, keepdim = argument(node, 1, "dim", None), argument(node, 2, "keepdim", False)
            total = emitter(aten.sum.dim_IntList, operand, dims or list(range(len(_shape(operand)))), keepdim, **dtype)
        count = numel // max(1, spec_of(node).numel)
        emitter.replace_by(_converted(emitter, emitter(aten.div.Tensor, total, count), spec_of(node).dtype))
    return module


def expand_nansums(module: fx.GraphModule) -> fx.GraphModule:
    """``nansum`` becomes the sum of what is a number."""
    for node in list(module.graph.nodes):
        if node.target is aten.nansum.default:
            emitter, x, dims = Emitter(module, node), node.args[0], argument(node, 1, "dim", None)
            dtype = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") else {}
            is_whole = not value_spec(value_of(x)).dtype.is_floating_point
            numbers = x if is_whole else emitter(aten.where.ScalarSelf, emitter(aten.isnan.default, x), 0.0, x)
            if dims is not None and not dims:  # of which torch tells another shape before it runs than after (seen: torch 2.13)
                raise CaptureError(f"nansum over dim=[] ({node.meta.get('line', '')}): leave dim out to sum up all")
            dims = list(range(len(_shape(x)))) if dims is None else dims
            emitter.replace_by(emitter(aten.sum.dim_IntList, numbers, dims, argument(node, 2, "keepdim", False), **dtype))
    return module


def use_own_products(module: fx.GraphModule) -> fx.GraphModule:
    """Products of groups of rows that ``transformers`` defines become those of autopar, whose backward is an op in every version."""
    for node in list(module.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.name() == "transformers::grouped_mm_fallback":
            x, weight, ends = (argument(node, i, name, None) for i, name in enumerate(("input", "weight", "offs")))
            emitter = Emitter(module, node)
            emitter.replace_by(emitter(torch.ops.autopar.grouped_mm.default, x, weight, ends))
    return module


def expand_histograms(module: fx.GraphModule) -> fx.GraphModule:
    """``histc`` of integers, with a bin for each, becomes additions to zeros: models that are captured on meta ask for it as on a GPU, and
    CPUs have none."""
    for node in list(module.graph.nodes):
        if node.target is not aten.histc.default or spec_of(node).dtype.is_floating_point:
            continue
        x, bins, low, high = (argument(node, i, *of) for i, of in enumerate((("self", None), ("bins", 100), ("min", 0), ("max", 0))))
        if high - low + 1 != bins:
            continue
        emitter = Emitter(module, node)
        ids = emitter(aten.to.dtype, emitter(aten.reshape.default, x, [value_spec(value_of(x)).numel]), torch.int64)
        ids = emitter(aten.sub.Tensor, ids, int(low))
        is_inside = emitter(aten.logical_and.default, emitter(aten.ge.Scalar, ids, 0), emitter(aten.lt.Scalar, ids, bins))
        ids = emitter(aten.where.ScalarOther, is_inside, ids, bins)  # what lies outside goes to a bin that is cut off
        zeros = emitter(aten.new_zeros.default, ids, [bins + 1], dtype=spec_of(node).dtype)
        ones = emitter(aten.ones_like.default, ids, dtype=spec_of(node).dtype)
        emitter.replace_by(emitter(aten.slice.Tensor, emitter(aten.scatter_add.default, zeros, 0, ids, ones), 0, 0, bins))
    return module


def expand_bags(module: fx.GraphModule) -> fx.GraphModule:
    """``embedding_bag`` with bags of one size becomes look-ups whose rows are summed up, or give their mean or maximum, bag by bag.

    So the table may be sharded by rows and by columns, and bags by the batch. Bags that differ in size, and those that leave an index out,
    stay as they are.
    """
    for node in list(module.graph.nodes):
        if node.target is not aten.embedding_bag.padding_idx and node.target is not aten.embedding_bag.default:
            continue
        size, weights = _bag_size(module, node), argument(node, 6, "per_sample_weights", None)
        if size is None or any(used.args[1] != 0 for used in node.users):
            continue
        for result in list(node.users):
            emitter = Emitter(module, result)
            found = emitter(aten.embedding.default, node.args[0], _in_bags(emitter, argument(node, 1, "indices", None), size))
            if weights is not None:
                found = emitter(aten.mul.Tensor, found, emitter(aten.unsqueeze.default, _in_bags(emitter, weights, size), -1))
            emitter.replace_by(found if size == 1 else _of_bags(emitter, found, argument(node, 4, "mode", 0)))
    return module


def _of_bags(emitter: Emitter, rows: fx.Node, mode: int) -> fx.Node:
    """The sum, the mean or the maximum of each bag; that of equal rows is one of them, to which the gradient goes."""
    if mode == 2:
        return emitter.result(emitter(aten.max.dim, rows, 1), 0)
    return emitter(aten.mean.dim if mode == 1 else aten.sum.dim_IntList, rows, [1])


def _in_bags(emitter: Emitter, x: fx.Node, size: int) -> fx.Node:
    """A vector as rows of ``size`` elements: the matrix that it was made of, if that has such rows; as it is where there is one each."""
    if size == 1:
        return x
    rows = [_shape(x)[0] // size, size]
    is_of_matrix = x.target is aten.reshape.default and [*_shape(x.all_input_nodes[0])] == rows
    return x.all_input_nodes[0] if is_of_matrix else emitter(aten.reshape.default, x, rows)


def _bag_size(module: fx.GraphModule, node: fx.Node) -> int | None:
    """How many indices each bag of an ``embedding_bag`` has, all of which counts, if all have as many."""
    indices, offsets = argument(node, 1, "indices", None), argument(node, 2, "offsets", None)
    settings = [argument(node, i, name, False) for i, name in ((3, "scale_grad_by_freq"), (7, "include_last_offset"))]
    if any(settings) or argument(node, 8, "padding_idx", None) is not None or not offsets.meta.get("constant", False):
        return None
    (numel,), (count,) = _shape(indices), _shape(offsets)
    starts = evaluate(module, offsets)
    if starts is None or not count or numel % count:
        return None
    size = numel // count
    return size or None if torch.equal(starts, torch.arange(count, dtype=starts.dtype, device=starts.device) * size) else None


def _shape(x: fx.Node) -> tuple[int, ...]:
    return value_spec(value_of(x)).shape


def expand_losses(module: fx.GraphModule) -> fx.GraphModule:
    """Mean cross-entropy, also of log-probabilities, becomes the summed one over the count of targets that are not ignored, or what
    these weigh; of targets that are probabilities of the classes, over the count of all rows, whatever classes weigh."""
    for node in list(module.graph.nodes):
        if node.target not in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default):
            continue
        scores, target = node.args[:2]
        weight, reduction = argument(node, 2, "weight", None), argument(node, 3, "reduction", 1)
        ignore_index, smoothing = argument(node, 4, "ignore_index", -100), argument(node, 5, "label_smoothing", 0.0)
        is_index = not value_spec(value_of(target)).dtype.is_floating_point
        if reduction != 1 or (is_index and weight is not None and _is_refused(scores, weight)):
            continue
        emitter = Emitter(module, node)
        how = [smoothing] if node.target is aten.cross_entropy_loss.default else []
        dtype = _summed(spec_of(node).dtype)
        scores, weight = _converted(emitter, scores, dtype), weight if weight is None else _converted(emitter, weight, dtype)
        total = emitter(node.target, scores, target, weight, 2, ignore_index, *how)
        if is_index:
            count: fx.Node | int = _counted(emitter, target, weight, ignore_index)
        else:
            count = math.prod(_shape(target)) // max(1, _shape(target)[:2][-1])  # of classes, which are dim 1, or the only one
        emitter.replace_by(_converted(emitter, emitter(aten.div.Tensor, total, count), spec_of(node).dtype))
    return module


def _is_refused(scores: fx.Node, weight: fx.Node) -> bool:
    """Whether torch refuses weights of classes: those of another dtype, and those that want a gradient. It shall say so itself."""
    spec = value_spec(value_of(weight))
    return spec.requires_grad or spec.dtype != value_spec(value_of(scores)).dtype


def _counted(emitter: Emitter, target: fx.Node, weight: fx.Node | None, ignore_index: int) -> fx.Node:
    """How many targets are not ignored, or what all of them weigh."""
    if weight is None:
        return emitter(aten.sum.default, emitter(aten.ne.Scalar, target, ignore_index))
    is_ignored = emitter(aten.eq.Scalar, target, ignore_index)
    classes = emitter(aten.masked_fill.Scalar, target, is_ignored, 0)  # any that there is
    weights = emitter(aten.masked_fill.Scalar, emitter(aten.index.Tensor, weight, [classes]), is_ignored, 0.0)
    return emitter(aten.sum.default, weights)


def add_tensors(module: fx.GraphModule) -> fx.GraphModule:
    """Numbers that are added to a loss, or another scalar, are tensors, of which each micro-batch can have an equal part. In 16 bits they
    stay: there a number is more exact than a tensor of it."""
    for node in list(module.graph.nodes):
        if node.target not in _SUMS or specs_of(node)[0].shape != () or specs_of(node)[0].dtype not in (torch.float32, torch.float64):
            continue
        terms = {i: term for i, term in enumerate(node.args[:2]) if isinstance(term, int | float) and term}
        if not terms:
            continue
        emitter = Emitter(module, node)
        for i, term in terms.items():
            node.update_arg(i, emitter(aten.full.default, [], term, dtype=specs_of(node)[0].dtype))
        if len(node.args) > 2:  # of numbers by position, of tensors by name
            node.args, node.kwargs = node.args[:2], {**node.kwargs, "alpha": node.args[2]}
        node.target = _SUMS[node.target]
    return module


def drop_dead_code(module: fx.GraphModule) -> fx.GraphModule:
    for node in reversed(module.graph.nodes):
        if node.op not in ("placeholder", "output") and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


def number_names(module: fx.GraphModule) -> fx.GraphModule:
    """Number the ops of each name in their order, so that graphs that differ in what was captured beside them are called alike."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        name = node.name if node.op == "placeholder" else re.sub(r"_\d+$", "", node.name)
        args, kwargs = (fx.map_arg(x, env.__getitem__) for x in (node.args, node.kwargs))
        env[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        env[node].meta = node.meta
    return fx.GraphModule(module, graph)
