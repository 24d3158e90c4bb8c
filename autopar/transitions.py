"""From one placement to another on one mesh axis: the operation, its forward and its backward.

A forward choice fixes the backward: all-gather and reduce-scatter are conjugates, so are slice and all-gather, identity and all-reduce.
Column- and row-parallel linears, Megatron sequence parallelism, DDP and ZeRO are rows of this table, put together by the solver.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.layout import REPLICATED, REPLICATED_PARTIAL_GRAD, Kind, Placement


@dataclass(frozen=True, slots=True)
class Transition:
    """One reshard on one axis.

    Args:
        op: name of the operation in `autopar.ops.collectives`; empty if there is nothing to do.
        forward: collective of the forward: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``slice`` or empty.
        backward: likewise for the gradient; ``pad`` puts a part among zeros.
    """

    op: str
    forward: str
    backward: str


_NOTHING = Transition("", "", "")
_SHARE = Transition("share", "", "")

_TABLE = {
    (Kind.REPLICATED, Kind.REPLICATED_PARTIAL_GRAD): Transition("replicate", "", "all_reduce"),
    (Kind.REPLICATED, Kind.SHARDED): Transition("shard_slice", "slice", "all_gather"),
    (Kind.REPLICATED_PARTIAL_GRAD, Kind.SHARDED): Transition("shard_slice", "slice", "pad"),
    (Kind.REPLICATED, Kind.PARTIAL): _SHARE,
    (Kind.REPLICATED_PARTIAL_GRAD, Kind.PARTIAL): _SHARE,
    (Kind.PARTIAL, Kind.REPLICATED): Transition("all_reduce", "all_reduce", ""),
    (Kind.PARTIAL, Kind.REPLICATED_PARTIAL_GRAD): Transition("all_reduce", "all_reduce", "all_reduce"),
    (Kind.PARTIAL, Kind.SHARDED): Transition("reduce_scatter", "reduce_scatter", "all_gather"),
    (Kind.SHARDED, Kind.REPLICATED): Transition("all_gather", "all_gather", "slice"),
    (Kind.SHARDED, Kind.REPLICATED_PARTIAL_GRAD): Transition("all_gather", "all_gather", "reduce_scatter"),
    (Kind.SHARDED, Kind.SHARDED): Transition("all_to_all", "all_to_all", "all_to_all"),
}


def transition(source: Placement, target: Placement, *, needs_grad: bool, in_time: bool) -> Transition | None:
    """How to go from ``source`` to ``target``; None if there is no way in one operation.

    Without a gradient R and R* are the same, and nothing happens backward. What is whole is shared out as summands among micro-batches
    alone, on the axis that is ``in_time``.
    """
    if not needs_grad:
        source = REPLICATED if source == REPLICATED_PARTIAL_GRAD else source
        target = REPLICATED if target == REPLICATED_PARTIAL_GRAD else target
    if source == target:
        return _NOTHING
    found = _TABLE.get((source.kind, target.kind))
    if found is _SHARE and not in_time:
        return None
    return found if found is None or needs_grad else Transition(found.op, found.forward, "")
