"""What a stage of a pipeline is when it is compiled (`compile.compile_stage`): its graphs, and what passes between it and its neighbours.

Who runs it, a rank (`runtime.pipeline`), all virtual ranks (`verify`) or nobody (`dry`), needs this and not the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.differentiate import Halves
from autopar.passes.last_backward import Ending
from autopar.passes.split_backward import SplitBackward


@dataclass(frozen=True, slots=True)
class Wire:
    """One value between two stages, as every rank sends it: shape and dtype of the local tensor, and whether a gradient comes back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The graphs of one stage; the *inputs of the stage* are its placeholders, received values, coordinates and seed, in this order.

    Args:
        names: of its placeholders (parameters, buffers, inputs) in the model.
        is_input: for each of them whether it comes with the batch.
        is_parted: for each of them whether a micro-batch takes its part of dim 0 of it (`passes.average`), and not the graph.
        updates: for each buffer that changes from micro-batch to micro-batch its position in ``names``, and in ``outputs``.
        hosted: positions in ``names`` of what is on the host, and copied to the device once a step.
        scale: what the loss of a micro-batch counts.
        prepare: what is done to parameters once a step (`passes.prepare`); None if there is nothing to do.
        taken: inputs of the stage that ``prepare`` takes.
        num_copies: outputs of ``prepare``, which are the first inputs of ``body``.
        body: forward and backward of one micro-batch.
        kept: inputs of the stage that ``body`` takes after the copies.
        split: the backward of ``body`` in two, for schedules that want it so.
        ending: what ends the backward of each micro-batch (the whole, or its second half).
        received, sent: values from the stage before and to the stage after; those sent are the first outputs of ``body``.
        outputs: for each further output of ``body`` its position among the outputs of the model.
    """

    names: tuple[str, ...]
    is_input: tuple[bool, ...]
    is_parted: tuple[bool, ...]
    updates: tuple[tuple[int, int], ...]
    hosted: tuple[int, ...]
    scale: float
    prepare: Halves | None
    taken: tuple[int, ...]
    num_copies: int
    body: Halves
    kept: tuple[int, ...]
    split: SplitBackward | None
    ending: Ending | None
    received: tuple[Wire, ...]
    sent: tuple[Wire, ...]
    outputs: tuple[int, ...]

    @property
    def trained(self) -> frozenset[str]:
        """Names of the placeholders that get a gradient."""
        of_body = [self.kept[i - self.num_copies] for i in self.body.with_grad if i >= self.num_copies]
        of_copies = [] if self.prepare is None else [self.taken[i] for i in self.prepare.with_grad]
        return frozenset(self.names[i] for i in (*of_body, *of_copies) if i < len(self.names))

    def graphs(self) -> Iterator[tuple[fx.GraphModule, str]]:
        """Every graph that a step may run, ``forward`` or ``backward``."""
        for halves in (self.prepare, self.body):
            yield from () if halves is None else halves.graphs()
        backwards = [] if self.split is None else [self.split.inputs]
        if self.ending is not None:
            backwards += [self.ending.first, self.ending.next]
            backwards += [] if self.ending.last is None else [self.ending.last.start, self.ending.last.finish]
        yield from ((graph, "backward") for graph in backwards)
