"""One model and one kind of call: what is captured of it, and its normal graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.loss import LossFn, WithLoss
from autopar.capture.outputs import Constant, leaves_of_call
from autopar.capture.reads import hold
from autopar.capture.trace import Captured, Placeholder, Signature, Source, capture, flatten_call, switches
from autopar.compile import Normal, normal_graph
from autopar.errors import InputError, MicrobatchError, PlanError
from autopar.garbage import no_collection
from autopar.graph import outputs_of, value_spec
from autopar.passes.average import average_of, part_of_call
from autopar.passes.microbatch import batch_size
from autopar.plan import Pipeline
from autopar.precision import Precision, autocast_state
from autopar.report import Report, silent
from autopar.solve.decide import graph_hash
from autopar.solve.fold import Folded, fold


@dataclass(frozen=True, slots=True)
class Session:
    """A captured call.

    Args:
        name: class of the model.
        captured: its graph with symbolic batch.
        normal: its graph for these sizes.
        batch: inputs as text, by name.
        returned: what such a call returns beside tensors, for which it has None.
        capture_time_s: seconds that both took.
        signature: the call.
        precision: what it computes in; None: what the parameters are in.
        open_call: another call of the same model, by what is captured already where that serves.
        open_in: the same call in another precision.
        open_part: the same call with one of so many equal parts of the batch.
        open_losses: the same call for its scalar outputs alone; None if there are no others, or it is not in training.
        folded: the normal graph in short, if it is deep.
    """

    name: str
    captured: Captured
    normal: Normal
    batch: Mapping[str, str]
    returned: tuple[Constant | None, ...]
    capture_time_s: float
    signature: Signature = field(repr=False)
    precision: Precision | None = field(repr=False)
    open_call: Callable[[tuple[object, ...], Mapping[str, object]], Session] = field(compare=False, repr=False)
    open_in: Callable[[Precision | None], Session] = field(compare=False, repr=False)
    open_part: Callable[[int], Session] = field(compare=False, repr=False)
    open_losses: Callable[[], Session] | None = field(compare=False, repr=False)
    folded: Callable[[], Folded | None] = field(compare=False, repr=False)

    @property
    def hash(self) -> str:
        return graph_hash(self.normal.module)

    def normal_for(self, pipeline: Pipeline) -> Normal:
        """The graph that a plan with this pipeline shards: that of the whole batch, or of one micro-batch of those that are averaged.

        Raises:
            MicrobatchError: they cannot be averaged.
        """
        count = pipeline.microbatches
        if not pipeline.is_average:
            return self.normal
        if self.batch_size % count:
            raise MicrobatchError(f"{count} micro-batches do not divide the batch of {self.batch_size}; choose a divisor of it")
        part = self.open_part(count).normal
        return replace(part, average=average_of(self.normal.module, part.module, count, self.captured.updates))

    def hash_for(self, pipeline: Pipeline) -> str:
        """Of `normal_for`."""
        return graph_hash(self.normal_for(pipeline).module)

    @property
    def batch_size(self) -> int:
        return batch_size(self.normal.module)

    def for_call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Session:
        """This session if the call has the same shapes; else another."""
        return self if Signature.of(args, kwargs) == self.signature else self.open_call(args, kwargs)

    def in_precision(self, precision: Precision | None) -> Session:
        """This session if it computes in that; else another."""
        return self if precision == self.precision else self.open_in(precision)

    def output_names(self) -> tuple[str, ...]:
        """Paths of the tensors among the outputs, for messages; last the buffers that change."""
        leaves = list(range(self.captured.out_spec.num_leaves))
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, self.captured.out_spec))
        named = [pytree.keystr(path) or "output" for path, _ in paths]
        returned = (name for name, constant in zip(named, self.captured.outputs, strict=True) if constant is None)
        return (*returned, *self.captured.updates)


@no_collection()
def open_session(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    loss_fn: LossFn | None = None,
    outputs: str = "whole",
    precision: Precision | None = None,
    known: dict[object, Captured] | None = None,
    symbolic: bool = True,
    report: Report = silent,
) -> Session:
    """Capture a call of a model whose parameters are on meta (`runtime.module.make_skeleton`), or of any model.

    Args:
        model: the module, in the mode wanted.
        args, kwargs: the call.
        loss_fn, outputs: as for `autopar.parallelize`.
        precision: what it computes in.
        known: captures so far; one of them serves if the call differs in batch size only.
        symbolic: keep the size of the batch open in what is captured, for calls with others.
        report: called with a line of text at every phase.

    Raises:
        CaptureError: the model cannot be captured.
        InputError: the batch has no rows.
    """
    if outputs not in ("whole", "loss"):
        raise PlanError(f"outputs is 'whole' or 'loss', got {outputs!r}")
    started = time.perf_counter()
    leaves, spec = flatten_call(args, kwargs)
    _check_rows(args, kwargs)
    moved = _beside_parameters(model, leaves)
    args, kwargs = pytree.tree_unflatten(moved, spec)
    known = {} if known is None else known
    signature = Signature.of(args, kwargs)
    kind = (signature.kind, switches(model.modules()), precision, autocast_state())
    captured = known.get(kind)
    if captured is not None and not hold(captured.reads, model):
        captured = None
    sizes = _sizes(captured, moved) if captured is not None else None
    if captured is None or sizes is None:
        report(f"capturing {type(model).__name__}")
        captured = known[kind] = _capture(
            model, args, kwargs, loss_fn, precision, only_losses=outputs == "loss" and model.training, symbolic=symbolic
        )
        sizes = captured.sizes
    normal = normal_graph(captured, sizes)
    shapes = {p.name: _describe(x) for p, x in zip(_inputs(captured), (x for x in leaves if isinstance(x, torch.Tensor)), strict=True)}
    size, others = batch_size(normal.module), dict(known)

    again = partial(open_session, model, loss_fn=loss_fn, outputs=outputs, known=others, report=report)
    open_call = partial(again, precision=precision, symbolic=True)  # who asks for another batch asks for more
    open_losses = partial(again, args, kwargs, outputs="loss", precision=precision, symbolic=symbolic, known=None)
    has_others = model.training and _has_more_than_losses(captured, normal)

    return Session(
        type(model).__name__,
        captured,
        normal,
        shapes,
        leaves_of_call(captured.outputs, sizes),
        time.perf_counter() - started,
        signature,
        precision,
        open_call,
        cache(lambda other: again(args, kwargs, precision=other, symbolic=symbolic)),
        cache(lambda count: open_call(*part_of_call((args, kwargs), size, count))),
        cache(open_losses) if has_others else None,
        cache(lambda: fold(normal)),
    )


def _has_more_than_losses(captured: Captured, normal: Normal) -> bool:
    """Whether there are scalars among the outputs, and others."""
    returned = outputs_of(normal.module.graph)[: captured.outputs.count(None)]
    return len({bool(value_spec(value).shape) for value in returned}) > 1


def _check_rows(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Refuse a batch whose first tensor with dims has no rows."""
    leaves, _ = pytree.tree_flatten_with_path((args, {name: kwargs[name] for name in sorted(kwargs)}))
    path, first = next(((path, x) for path, x in leaves if isinstance(x, torch.Tensor) and x.dim()), ((), None))
    if first is not None and not first.shape[0]:
        raise InputError(
            f"input {pytree.keystr(path[1:])} of shape {tuple(first.shape)} has no rows: its dim 0 is the batch, of which a step takes "
            "one row at least; give more, or leave out the call"
        )


def _beside_parameters(model: nn.Module, leaves: Sequence[object]) -> list[object]:
    """Tensors of a call, on meta if the parameters are."""
    is_meta = any(parameter.device.type == "meta" for parameter in islice(model.parameters(), 1))
    return [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) and is_meta else x for x in leaves]


def _capture(
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    loss_fn: LossFn | None,
    precision: Precision | None,
    *,
    only_losses: bool,
    symbolic: bool,
) -> Captured:
    if loss_fn is None:
        return capture(model, args, kwargs, only_losses=only_losses, symbolic=symbolic, precision=precision)
    whole = WithLoss(model, loss_fn)
    whole.training = model.training
    captured = capture(whole, args, kwargs, only_losses=only_losses, symbolic=symbolic, precision=precision)
    updates = tuple(name.removeprefix("model.") for name in captured.updates)
    own = ((name, read) for read in captured.reads for head, _, name in (read.module.partition("."),) if head == "model")
    reads = tuple(read._replace(module=name) for name, read in own)
    for node in captured.graph.graph.nodes:
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {key: (_own_module(path), *others) for key, (path, *others) in stack.items()}
    return replace(captured, placeholders=tuple(_without_prefix(p) for p in captured.placeholders), updates=updates, reads=reads)


def _sizes(captured: Captured, leaves: Sequence[object]) -> dict[sympy.Symbol, int] | None:
    """Sizes of a call for a known capture; None if a dim that is static there differs."""
    try:
        return captured.bind_sizes([x for x in leaves if isinstance(x, torch.Tensor)])
    except InputError:
        return None


def _inputs(captured: Captured) -> list[Placeholder]:
    return [p for p in captured.placeholders if p.source is Source.INPUT]


def _without_prefix(placeholder: Placeholder) -> Placeholder:
    """Names as the user knows them, without the wrapper that adds the loss."""
    names = [name.removeprefix("model.") for name in (placeholder.name, *placeholder.aliases)]
    return replace(placeholder, name=names[0], aliases=tuple(names[1:]))


def _own_module(path: str) -> str:
    """A module likewise."""
    return "" if path == "model" else path.removeprefix("model.")


def _describe(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
