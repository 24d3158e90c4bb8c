"""Capture: an unmodified ``nn.Module`` and an example batch become one ``torch.fx`` graph with a symbolic batch.

The graph is the training graph of ``torch.export`` (non-strict): parameters, buffers and inputs are placeholders, and ``linear``,
``scaled_dot_product_attention``, ``layer_norm`` and ``cross_entropy_loss`` stay whole. Works on meta tensors.
"""

from __future__ import annotations

import inspect
import linecache
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum

import sympy
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopar.callers import OF_AUTOPAR, OF_TORCH
from autopar.capture.exporting import MakingOn, code_when_called, frames_of_forwards, quiet, true_shapes, user_line
from autopar.capture.functions import keep_functions
from autopar.capture.grad_mode import detach_again, detached_without_grad
from autopar.capture.host_random import without_drawing
from autopar.capture.outputs import Leaf, buffers_last, keep_tensors, opening
from autopar.capture.reads import Read, reading
from autopar.capture.writes import mutates, show_views, write_anew
from autopar.errors import CaptureError, InputError
from autopar.precision import Master, Precision, computing

_PYTHON_DIR = sysconfig.get_path("stdlib")
_CHECKS = frozenset(
    {
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten.sym_constrain_range_for_size.default,
        torch.ops.aten.sym_constrain_range.default,
    }
)
"""Ops that raise an error or do nothing."""
MIN_SYMBOLIC_SIZE = 2
"""torch.export treats sizes 0 and 1 apart: a graph with a symbolic size holds from 2 on."""

aten = torch.ops.aten
_PRODUCTS = frozenset(
    {aten.linear.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.matmul.default}
    | {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}
)


class Source(Enum):
    """Where the value of a placeholder comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of the captured graph.

    Args:
        node: name of the placeholder node.
        source: what it is.
        name: parameter or buffer name, or the path of the input inside ``(args, kwargs)``.
        aliases: other names of the same parameter (tied weights).
        master: what is stored of a parameter that the graph has in another dtype; None if it is the parameter itself.
    """

    node: str
    source: Source
    name: str
    aliases: tuple[str, ...] = ()
    master: Master | None = None


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of one call: the pytree of ``(args, kwargs)`` with shapes and dtypes of tensors, and the values of everything else."""

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]

    @staticmethod
    def of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Signature:
        leaves, spec = flatten_call(args, kwargs)
        return Signature(
            spec, tuple(TensorLeaf(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
        )


    @property
    def kind(self) -> tuple[object, ...]:
        """What calls of one captured graph have in common: all but the sizes of tensors."""
        return (self.spec, *((len(x.shape), x.dtype) if isinstance(x, TensorLeaf) else x for x in self.leaves))


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured model.

    Args:
        graph: the graph; its batch dim is symbolic unless it need not be, or ``static_reason`` says why it cannot.
        placeholders: in the order of the graph's placeholder nodes.
        sizes: value of every symbol for the example batch.
        out_spec: the structure of what the model returns.
        outputs: the leaves of ``out_spec``.
        updates: names of the buffers that the forward changes; the last outputs of the graph are what they become.
        training: mode of the model when captured.
        static_reason: why the batch size could not be kept symbolic; empty if it could.
        reads: attributes of the modules that it depends on.
    """

    graph: fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    sizes: dict[sympy.Symbol, int]
    out_spec: pytree.TreeSpec
    outputs: tuple[Leaf, ...]
    updates: tuple[str, ...]
    training: bool
    static_reason: str
    reads: tuple[Read, ...] = ()

    def bind_sizes(self, inputs: Iterable[torch.Tensor]) -> dict[sympy.Symbol, int]:
        """The value of every symbol for other inputs; InputError where a static dim differs."""
        nodes = {node.name: node for node in self.graph.graph.find_nodes(op="placeholder")}
        entries = [entry for entry in self.placeholders if entry.source is Source.INPUT]
        sizes: dict[sympy.Symbol, int] = {}
        for entry, given in zip(entries, inputs, strict=True):
            expected = nodes[entry.node].meta["val"].shape
            for dim, (want, have) in enumerate(zip(expected, given.shape, strict=True)):
                expr = want.node.expr if isinstance(want, torch.SymInt) else sympy.Integer(want)
                value = sizes.setdefault(expr, int(have)) if isinstance(expr, sympy.Symbol) else expr
                if value != have or (isinstance(expr, sympy.Symbol) and have < MIN_SYMBOLIC_SIZE):
                    raise InputError(
                        f"input {entry.name} has size {have} in dim {dim} (shape {tuple(given.shape)}), the captured model needs "
                        f"{value}; give inputs of equal batch size, or capture again with this shape"
                    )
        return sizes


def switches(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """What decides, beside the call, what is captured of a model: the modes of its modules, which of their parameters are trained, and
    which buffers there are."""
    found = []
    for module in modules:
        found.append(module.training)
        found.extend([p.requires_grad for p in module._parameters.values() if p is not None])
        if module._buffers:
            found.extend([buffer is not None for buffer in module._buffers.values()])
    return tuple(found)


def flatten_call(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[list[object], pytree.TreeSpec]:
    """Leaves of a call with keyword arguments in the order of their names, so that equal calls look equal."""
    return pytree.tree_flatten((tuple(args), {name: kwargs[name] for name in sorted(kwargs)}))


def capture(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    only_losses: bool = False,
    symbolic: bool = True,
    precision: Precision | None = None,
) -> Captured:
    """Capture ``model(*args, **kwargs)`` in its present mode.

    Args:
        model: the module.
        args, kwargs: the call.
        only_losses: keep scalar outputs only; the caller gets None for the others.
        symbolic: keep the size of the batch open, so that calls with others can share the graph; it takes twice as long.
        precision: what it computes in; None: what its parameters are in.

    Raises:
        CaptureError: the model cannot be one graph; the text quotes the line of the model's source and says what to change.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"{type(model).__name__} cannot be called with this batch: {error}") from None
    leaves, spec = flatten_call(args, kwargs)
    with computing(model, precision):
        with reading(model) as reads:
            program, static_reason = without_drawing(lambda: _exported(model, leaves, spec, symbolic=symbolic))
        static_reason = static_reason or (_specialised(program, leaves) if symbolic else "")
        if _writes(program):
            for module in _graph_modules(program):
                show_views(module)
            write_anew(program.graph_module)
        if _writes(program):
            program = _traced_again(program)
            detach_again(program, _trained(model))
    _refuse_mutation(program)
    _refuse_foreign_memory(program)
    _refuse_mixed_products(program)
    return replace(_package(model, program, static_reason, precision, only_losses=only_losses), reads=tuple(reads))


def _exported(model: nn.Module, leaves: list[object], spec: pytree.TreeSpec, *, symbolic: bool) -> tuple[ExportedProgram, str]:
    """The program, and why its batch is static if exporting failed otherwise."""
    try:
        return _export(model, leaves, spec, dynamic=symbolic), ""
    except CaptureError:
        raise
    except Exception as dynamic_error:  # export raises many types
        try:
            program = _export(model, leaves, spec, dynamic=False)
        except Exception as error:
            raise CaptureError(_explain(model, error)) from error
        return program, f"{type(dynamic_error).__name__}: {str(dynamic_error).strip().splitlines()[0]}"


def _export(model: nn.Module, leaves: list[object], spec: pytree.TreeSpec, *, dynamic: bool) -> ExportedProgram:
    # Export marks tensors: one object passed twice would be captured as one input, and marks of a failed attempt would spoil the next.
    copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(copies, spec)
    shapes = pytree.tree_unflatten(
        [{0: Dim.AUTO} if isinstance(x, torch.Tensor) and x.dim() and dynamic else None for x in leaves], spec
    )
    named = _by_parameter_name(model, shapes) if dynamic else None
    trained = _trained(model)
    device = next((x.device for x in (*model.parameters(), *leaves) if isinstance(x, torch.Tensor)), torch.device("cpu"))
    with ExitStack() as around:
        for each in (
            quiet(),
            true_shapes(),
            detached_without_grad(trained),
            code_when_called(),
            frames_of_forwards(),
            MakingOn(device),
            opening(model),
        ):
            around.enter_context(each)
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return keep_functions(lambda: export(model, args, kwargs, dynamic_shapes=named, strict=False))  # type: ignore[arg-type]


def _writes(program: ExportedProgram) -> bool:
    return any(mutates(node) for module in _graph_modules(program) for node in module.graph.nodes)


def _traced_again(program: ExportedProgram) -> ExportedProgram:
    """Without writes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program.graph_module.recompile()
            return keep_functions(lambda: program.run_decompositions({}))
    except CaptureError:
        raise
    except Exception as error:  # torch raises many types
        reason = str(error).strip().partition("\n")[0]
        raise CaptureError(
            f"the forward changes a value in a way that torch has no function for ({type(error).__name__}: {reason}): say what the value "
            "becomes by a function, as y = torch.polygamma(1, y) for y.polygamma_(1)"
        ) from error


def _trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def _specialised(program: ExportedProgram, leaves: list[object]) -> str:
    """Why export took the batch size for a constant without a word, if it did."""
    inputs = [node for node in program.graph.find_nodes(op="placeholder") if node.name in program.graph_signature.user_inputs]
    sizes = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
    dims = [size for node in inputs for size in getattr(node.meta["val"], "shape", ()) if isinstance(size, torch.SymInt)]
    if not sizes or any(size.node.expr.free_symbols for size in dims):
        return ""
    if max(sizes) < 2:
        return "the example has batch size 1, which torch.export takes for a constant"
    return f"the model computes with the batch size {max(sizes)} itself"


def _by_parameter_name(model: nn.Module, shapes: tuple[tuple[object, ...], dict[str, object]]) -> object:
    """``dynamic_shapes`` as export wants it: by name, of several positional ones (``*args``) together."""
    positional, keyword = shapes
    signature = inspect.signature(model.forward)
    bound = signature.bind_partial(*positional)
    named: dict[str, object] = dict(bound.arguments)
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    for name, shape in keyword.items():
        if name in signature.parameters or extra is None:
            named[name] = shape
        else:
            named.setdefault(extra, {})[name] = shape  # type: ignore[index]
    return named


def _graph_modules(program: ExportedProgram) -> list[fx.GraphModule]:
    return [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]


def _refuse_mutation(program: ExportedProgram) -> None:
    for output in program.graph_signature.output_specs:
        if output.kind in (OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION):
            raise CaptureError(
                f"the forward changes {output.target!r} in place ({output.kind.name.lower().replace('_', ' ')}), which autopar does not "
                "support: work on a copy of it in the forward; what a model remembers from call to call belongs into a buffer"
            )


def _refuse_foreign_memory(program: ExportedProgram) -> None:
    """Plans keep the elements of tensors, each rank some, and not how they lay in the memory of others."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        x, (size, stride, *offset) = node.args[0].meta["val"], node.args[1:]
        last = (offset[0] or 0 if offset else 0) + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        if not x.is_contiguous() or x.storage_offset() or last >= x.numel():
            raise CaptureError(
                f"as_strided reads a view as it lies in the memory of another tensor ({user_line(node)}), of which ranks hold parts: index "
                "that tensor, or take as_strided of x.contiguous()"
            )


def _refuse_mixed_products(program: ExportedProgram) -> None:
    """Torch refuses products of different dtypes, but not on meta."""
    for node in program.graph.nodes:
        terms = [x.meta["val"] for x in node.args if isinstance(x, fx.Node)] if node.target in _PRODUCTS else []
        if len({x.dtype for x in terms}) > 1:
            what = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in terms)
            raise CaptureError(
                f"{node.target} takes values of several dtypes, {what} ({user_line(node)}), which torch refuses; convert the batch or the "
                "model, or give precision="
            )


def _package(
    model: nn.Module, program: ExportedProgram, static_reason: str, precision: Precision | None, *, only_losses: bool
) -> Captured:
    graph = program.graph_module
    nodes = graph.graph.find_nodes(op="placeholder")
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first_node: dict[int, fx.Node] = {}
    names: dict[fx.Node, list[str]] = {}
    placeholders: list[Placeholder] = []
    sources: dict[fx.Node, Source] = {}
    for node, spec in zip(list(nodes), program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            if not isinstance(node.meta["val"], torch.Tensor):
                graph.graph.erase_node(node)  # a constant argument: its value is part of the signature
                continue
            sources[node], names[node] = Source.INPUT, [node.name]
            continue
        assert spec.target is not None
        tensor = tensors.get(spec.target)
        if tensor is None:
            tensor = program.constants[spec.target]
            _keep_constant(graph, node, tensor)
            continue
        owner = first_node.setdefault(id(tensor), node)
        names.setdefault(owner, []).append(spec.target)
        if owner is not node:
            node.replace_all_uses_with(owner)
            graph.graph.erase_node(node)
        else:
            sources[node] = Source.PARAMETER if spec.kind is InputKind.PARAMETER else Source.BUFFER
            node.meta["requires_grad"] = tensor.requires_grad
    canonical = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for node, source in sources.items():
        own, *others = names[node]
        master = None
        if source is Source.PARAMETER and precision is not None:
            master = precision.master_of(tensors[own], node.meta["val"].dtype)
        if source is not Source.INPUT:
            all_names = names[node]
            own = canonical[id(tensors[own])]
            others = [name for name, tensor in tensors.items() if tensor is tensors[own] and name != own] or all_names[1:]
        placeholders.append(Placeholder(node.name, source, own, tuple(others), master))
    for module in _graph_modules(program):
        _drop_checks(module.graph)
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    sizes, changed = _example_sizes(graph), buffers_last(graph, program)
    outputs = keep_tensors(graph, program, sizes, only_losses=only_losses)
    updates = tuple(canonical[id(tensors[name])] for name in changed)
    graph.recompile()
    return Captured(graph, tuple(placeholders), sizes, out_spec, outputs, updates, model.training, static_reason)


def _keep_constant(graph: fx.GraphModule, node: fx.Node, tensor: torch.Tensor) -> None:
    """Let a tensor that the forward makes of numbers be a buffer of the graph, in place of the placeholder that export made of it."""
    if tensor.is_meta:
        line = next((user_line(user) for user in node.users), "")
        raise CaptureError(
            f"the forward makes a tensor of numbers in a way that autopar does not know ({line}), so that its values are not there "
            "when the model is captured on meta; make it by torch.tensor, or keep it in a buffer"
        )
    graph.register_buffer(node.name, tensor)
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(node.name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
    graph.graph.erase_node(node)


def _drop_checks(graph: fx.Graph) -> None:
    """Leave out what raises an error or does nothing, with what is made for it alone, and note the user's line of every node."""
    for node in graph.nodes:
        node.meta["line"] = user_line(node)
        if node.target in _CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _example_sizes(graph: fx.GraphModule) -> dict[sympy.Symbol, int]:
    sizes = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                sizes[size.node.expr] = int(size.node.hint)
    return sizes


def _explain(model: nn.Module, error: BaseException) -> str:
    """What went wrong, the user's own line, and what to change."""
    where = "an unknown line"
    for frame in traceback.extract_tb(error.__traceback__):
        in_python = frame.filename.startswith(_PYTHON_DIR) and "site-packages" not in frame.filename
        if not frame.filename.startswith((OF_TORCH, OF_AUTOPAR, "<")) and not in_python:
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            where = f"{frame.filename}:{frame.lineno}, in {frame.name}: `{code}`"
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    advice = (
        "check that the model runs on this batch by itself; if it does, make its forward free of Python values that are computed from "
        "tensors"
    )
    if "data-dependent" in str(error).lower() or "GuardOnDataDependent" in type(error).__name__:
        advice = "the branch or size depends on tensor values: use torch.where, torch.cond, or masks instead of Python if/int()/.item()"
    if "DeviceMismatch" in type(error).__name__ or "found two different devices" in reason:
        advice = (
            "make every tensor of the forward on the device of its inputs (device=x.device): models are captured without their weights; "
            "one that is there before, as in a loss_fn, belongs into a buffer of the model or among the arguments of the call"
        )
    if "in output, which is not a known type" in reason:
        advice = (
            "the forward returns an object that torch.utils._pytree cannot open: return tensors in tuples, lists, dicts or dataclasses, or "
            "register its type there; models of transformers return a cache unless they are called with use_cache=False"
        )
    return f"cannot capture {type(model).__name__} as one graph at {where}\n  {type(error).__name__}: {reason}\n  {advice}"
