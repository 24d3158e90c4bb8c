"""The price of everything a plan may choose: ops on shards, reshards, stored parameters; in seconds and bytes, per rank.

A pricer is made for one machine and one mesh, and knows nothing of the solver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.compression import Compression, Message, Reduction, part_shape
from autopar.cost.collectives import collective_time_s
from autopar.cost.compute import OpCost, evaluate, node_cost, summed_bytes
from autopar.cost.host import copy_times, fetched_bytes, leaves_early, levels_of
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.updates import (
    FACTORED,
    MASTER,
    MASTER_WIDTH,
    ONE_KERNEL,
    Taken,
    state_bytes,
    taken_bytes,
    update_passes,
)
from autopar.graph import is_call, operands_of, specs_of, value_spec
from autopar.layout import REPLICATED, REPLICATED_PARTIAL_GRAD, Placement
from autopar.mesh import Mesh
from autopar.offload import NOTHING, Offload
from autopar.passes.buckets import BUCKET_NUM_BYTES, SMALL_NUM_BYTES
from autopar.passes.fuse import biased_product
from autopar.rules.notation import Rule
from autopar.rules.registry import TensorSpec
from autopar.storage import Held, Stored
from autopar.transitions import transition

BACKWARD_OPS = 2
"""Ops that a backward launches for each of its forward, views among both: 2.1 in the graphs of a GPT-2, 2.0 in those of a Llama."""
INSIDE_REDUCTIONS = 3
"""All-reduces inside of a cross-entropy whose classes are sharded: of the largest logit, of the sum, of what the target has."""


class EdgePrice(NamedTuple):
    """Seconds of one reshard on one axis: on the critical path, and what may hide under compute: that of the forward, of the backward, and
    of the last micro-batch's backward alone."""

    blocking_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    last_s: float = 0.0


def beside(prices: np.ndarray, overlap: float) -> np.ndarray:
    """Rows like an `EdgePrice`, with what is left to hide if only a part of the time of collectives is gained beside compute."""
    blocking_s, hidden_s = prices[:, 0], prices[:, 1:]
    return np.column_stack((blocking_s + (1 - overlap) * hidden_s.sum(axis=1), overlap * hidden_s))


class OpTime(NamedTuple):
    """Seconds of one op, forward and backward, for many shardings at a time (arrays of one length)."""

    forward_s: np.ndarray
    backward_s: np.ndarray


class ParameterBytes(NamedTuple):
    """Bytes per rank that one parameter takes, by kind; ``reduced`` is what is left of its gradient when all gradients are reduced."""

    parameter: float
    gradient: float
    optimizer: float
    gathered: float
    reduced: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer + self.gathered


@dataclass(frozen=True, slots=True)
class Pricer:
    """Prices on one machine and mesh.

    Args:
        machine: measured or shipped profile, one link per mesh axis that is not in time.
        mesh: the mesh.
        optimizer: a key of `OPTIMIZER_STATE_BYTES`.
        training: whether there is a backward.
        offload: what lies on the host. Where host and device are one memory it is counted with the rest.
        compression: how gradients of parameters travel; None: as they are.
    """

    machine: MachineProfile
    mesh: Mesh
    optimizer: str = "adamw"
    training: bool = True
    offload: Offload = NOTHING
    compression: Compression | None = None
    _known_s: dict[tuple[str, float, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_bytes: dict[tuple[TensorSpec, tuple[Held, ...]], ParameterBytes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def overlap(self, axis: int) -> float:
        """Part of a collective's time on an axis that may hide under compute."""
        return 1.0 if axis == self.mesh.time_axis else self.machine.links[axis].overlap

    def op_time(self, node: fx.Node, rule: Rule | None, sizes: Mapping[str, np.ndarray], count: int) -> OpTime:
        """Time of one op. What adds a bias to a product takes none on GPUs, whose products add it themselves, unless a reshard stands
        between (`bias_s`).

        Args:
            node: the op.
            rule: its rule; None for an op without one.
            sizes: local size of each factor of the rule, arrays of length ``count``.
            count: how many shardings are priced.
        """
        cost = node_cost(node, rule)
        dtype = (specs_of(node) or tuple(map(value_spec, operands_of(node))))[0].dtype
        forward_s = np.zeros(()) if self.is_added(node) else self._time_s(cost, sizes, dtype, backward=False)
        forward = np.broadcast_to(forward_s, (count,))
        if not (self.training and any(spec.requires_grad for spec in specs_of(node))):
            return OpTime(forward, np.zeros(count))
        device, backward_s = self.machine.device, self._time_s(cost, sizes, dtype, backward=True)
        more_s = np.where(backward_s > 0, (BACKWARD_OPS - 1) * device.launch_overhead_s, 0.0)  # the launch of one is priced
        summed_s = device.stream_time_s(evaluate(summed_bytes(node, cost), sizes))
        return OpTime(forward, np.broadcast_to(backward_s + more_s + summed_s, (count,)))

    def _time_s(self, cost: OpCost, sizes: Mapping[str, np.ndarray], dtype: torch.dtype, *, backward: bool) -> np.ndarray:
        device = self.machine.device
        flops = evaluate(cost.backward_flops if backward else cost.flops, sizes)
        num_bytes = evaluate(cost.backward_num_bytes if backward else cost.num_bytes, sizes)
        if not cost.is_matmul:
            return device.stream_time_s(num_bytes, cost.stream, backward=backward)
        sides = [evaluate(side, sizes) for side in cost.sides or ()]
        if cost.is_attention:
            return device.attention_time_s(flops, num_bytes, dtype, sides[1], backward=backward)
        of_each = (sides[0], sides[1], sides[2]) if sides else None
        return device.matmul_time_s(flops, num_bytes, dtype, of_each, gradients=cost.gradients if backward else 0)

    def is_added(self, node: fx.Node) -> bool:
        """Whether an op adds a bias that the product before it adds by itself, for nothing. On CPUs a product begins with copies of its
        bias, which take as long as to add it later."""
        return self.machine.device.has_host and biased_product(node) is not None

    def bias_s(self, node: fx.Node, num_bytes: float) -> float:
        """Seconds in which an op adds a bias to so many bytes of a product that a reshard has moved before; 0 where `op_time` has them."""
        return float(self.machine.device.stream_time_s(2 * num_bytes, "broadcast")) if self.is_added(node) else 0.0

    def hidden_bytes(self, node: fx.Node, rule: Rule | None, sizes: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """What an op keeps for its backward beside operands and results; arguments as in `op_time`."""
        return np.broadcast_to(evaluate(node_cost(node, rule).hidden_bytes, sizes), (count,))

    def whole_flops(self, node: fx.Node, rule: Rule | None, letters: Mapping[str, tuple[int, ...]]) -> float:
        """Flops of an op on the whole tensors, forward and, in training, backward; contractions only."""
        cost = node_cost(node, rule)
        if not cost.is_matmul:
            return 0.0
        sizes = {letter: float(np.prod(atoms)) for letter, atoms in letters.items()}
        trained = self.training and any(spec.requires_grad for spec in specs_of(node))
        return float(evaluate(cost.flops, sizes)) + (float(evaluate(cost.backward_flops, sizes)) if trained else 0.0)

    def inside_time_s(self, num_bytes: float, axis: int) -> float:
        """Collectives inside an op's special form (all-reduces of ``num_bytes``)."""
        return INSIDE_REDUCTIONS * self.waited_s("all_reduce", num_bytes, axis)

    def collective_s(self, kind: str, num_bytes: float, axis: int) -> float:
        """Seconds of a collective on a mesh axis; ``num_bytes`` as in `collective_time_s`."""
        key = kind, num_bytes, axis
        if key not in self._known_s:
            self._known_s[key] = self._collective_s(kind, num_bytes, axis)
        return self._known_s[key]

    def _collective_s(self, kind: str, num_bytes: float, axis: int) -> float:
        size = self.mesh.sizes[axis]
        if kind == "" or (axis == self.mesh.time_axis and kind not in ("slice", "pad")):
            return 0.0  # gradients add up over the micro-batches as they come
        if kind in ("slice", "pad"):  # a part is read and written; a pad is among zeros, which are written too
            zeros = num_bytes if kind == "pad" else 0.0
            return float(self.machine.device.stream_time_s(2 * num_bytes / size + zeros))
        if kind == "all_to_all":
            num_bytes = num_bytes / size
        return _known_time_s(kind, num_bytes, size, self.machine.links[axis])

    def waited_s(self, kind: str, num_bytes: float, axis: int) -> float:
        """Seconds of a collective that the next op waits for; arguments as of `collective_s`."""
        crowded_s = self.machine.links[axis].crowded_s if axis != self.mesh.time_axis and kind not in ("", "slice", "pad") else 0.0
        return self.collective_s(kind, num_bytes, axis) + (crowded_s if self.mesh.sizes[axis] > 1 else 0.0)

    def edge(
        self,
        source: Held,
        target: Placement,
        num_bytes: float,
        axis: int,
        *,
        needs_grad: bool,
        is_waited: bool = True,
        is_read_again: bool = True,
        is_vector: bool = False,
        of_grad: float = 1.0,
    ) -> EdgePrice | None:
        """Price of carrying a value of ``num_bytes`` (whole on this axis, local on the others); None where there is no way.

        What is waited for takes longer in a crowd; gathers of parameters are not, since they start one ahead. The gradient travels in
        ``of_grad`` times as many bytes. ZeRO-3 gathers twice what the backward reads again, and vectors together.
        """
        needs_grad, price_s = needs_grad and self.training, self.waited_s if is_waited else self.collective_s
        if isinstance(source, Stored):
            if not target.holds_whole:
                return None
            gather = self.of_parameter_s("all_gather", num_bytes, axis, is_vector=is_vector)
            again = gather if self.training and source.level == 3 and is_read_again else 0.0
            if not needs_grad:
                return EdgePrice(0.0, gather, again)
            kind = "reduce_scatter" if target != REPLICATED else "slice"
            reduce = self.of_parameter_s(kind, num_bytes * of_grad, axis, is_vector=is_vector, is_waited=is_waited)
            late = reduce if source.level == 1 else 0.0
            return EdgePrice(late, gather, again + reduce - late)
        step = transition(source, target, needs_grad=needs_grad, in_time=axis == self.mesh.time_axis)
        if step is None:
            return None
        return EdgePrice(price_s(step.forward, num_bytes, axis) + price_s(step.backward, num_bytes * of_grad, axis))

    def parameter_edge(
        self,
        source: Held,
        target: Placement,
        num_bytes: float,
        axis: int,
        *,
        needs_grad: bool,
        is_read_again: bool = True,
        is_vector: bool = False,
        of_grad: float = 1.0,
        shape: Sequence[int] = (),
    ) -> EdgePrice | None:
        """As `edge`, for a stored parameter: what it takes may hide under compute. ``shape`` is that of the gradient before the axis
        reduces it, for compression."""
        if isinstance(source, Placement) and source.is_sharded and source != target:
            return None
        is_each = isinstance(source, Stored) and source.level > 1 and self.mesh.time_axis is not None  # the next micro-batch waits
        about = {"needs_grad": needs_grad, "is_waited": is_each, "is_read_again": is_read_again, "is_vector": is_vector}
        price = self.edge(source, target, num_bytes, axis, of_grad=of_grad, **about)
        is_reduced = target == REPLICATED_PARTIAL_GRAD and needs_grad and self.training
        itemsize = round(num_bytes * of_grad / max(1, math.prod(shape)))
        compressed = self.reduction(source, shape, itemsize, axis) if is_reduced and shape else None
        if price is not None and compressed is not None:
            again_s = price.forward_s if isinstance(source, Stored) and source.level == 3 and is_read_again else 0.0
            return EdgePrice(0.0, price.forward_s, again_s + self.messages_s(compressed, axis))
        if price is None or isinstance(source, Stored):
            return price
        if (source, target) != (REPLICATED, REPLICATED_PARTIAL_GRAD) or not price.blocking_s:
            return EdgePrice(0.0, 0.0, price.blocking_s)
        return EdgePrice(0.0, 0.0, self.of_parameter_s("all_reduce", num_bytes * of_grad, axis, is_vector=is_vector))

    def of_parameter_s(self, kind: str, num_bytes: float, axis: int, *, is_vector: bool, is_waited: bool = False) -> float:
        """Seconds of a collective of a parameter or its gradient: where it travels with others (`passes.buckets`, `passes.vectors`), its
        part of a bucket. Arguments as of `collective_s`; ``is_waited`` as of `waited_s`."""
        price_s = self.waited_s if is_waited else self.collective_s
        if num_bytes < SMALL_NUM_BYTES and (kind == "all_reduce" or (is_vector and kind in ("all_gather", "reduce_scatter"))):
            return price_s(kind, BUCKET_NUM_BYTES, axis) * num_bytes / BUCKET_NUM_BYTES
        return price_s(kind, num_bytes, axis)

    def reduction(self, source: Held, shape: Sequence[int], itemsize: int, axis: int) -> Reduction | None:
        """What compression makes of a gradient of a parameter on an axis; None: it stays exact.

        Args:
            source: how the parameter is held on the axis.
            shape: of the gradient on each rank before it is reduced, in elements of ``itemsize`` bytes.
        """
        if self.compression is None or axis == self.mesh.time_axis:
            return None
        return self.compression.reduction(shape, itemsize, self.mesh.sizes[axis], is_scattered=isinstance(source, Stored))

    def messages_s(self, reduction: Reduction, axis: int) -> float:
        """Seconds of the collectives of a compressed gradient."""
        time_s = 0.0
        for message in reduction.messages:
            time_s += self.of_parameter_s(message.kind, self.priced_bytes(message, axis), axis, is_vector=False)
        return time_s

    def priced_bytes(self, message: Message, axis: int) -> int:
        """What `collective_s` takes for a message: for all_to_all a value of which each rank has its part."""
        return message.num_bytes * (self.mesh.sizes[axis] if message.kind == "all_to_all" else 1)

    def _reductions(self, spec: TensorSpec, held: Sequence[Held]) -> list[Reduction]:
        """What compression makes of the gradient of a parameter on all axes, if all that can be are reduced there."""
        if self.compression is None:
            return []
        found = []
        for axis, h in enumerate(held):
            is_sharded = isinstance(h, Placement) and h.is_sharded
            if not is_sharded and spec.requires_grad and self.training:
                parts = self._shards(held, zero=False) * (1 if isinstance(h, Stored) else self._shards(held, zero=True))
                found.append(self.reduction(h, part_shape(spec.shape, parts), spec.reduced_width, axis))
        return [reduction for reduction in found if reduction is not None]

    def parameter_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> ParameterBytes:
        """What a parameter takes on every device for how it is held on each axis (Rajbhandari et al. 2020, section 5).

        Of 16-bit parameters whose optimizer keeps a float32 copy, ZeRO-1 and -2 store the shards of that copy alone. Of those that the
        model computes with in another dtype than that of their `Master`, the copy counts as gathered, as do copies of what is stored on
        the host (`cost.host`). What compression keeps of gradients counts as state of the optimizer.
        """
        kept = self.kept_bytes(spec, held)
        if not self.offload.optimizer:
            return kept
        copied = kept.gathered + fetched_bytes(spec, self._use(spec, held), held, self.mesh, self.offload)
        if self.offload.parameters and not levels_of(held) & {1, 2}:
            copied = 0.0
        if not self.machine.device.has_host:
            return kept._replace(gathered=copied)
        gradient, reduced = (0.0, 0.0) if leaves_early(held, self.mesh) else (kept.gradient, kept.reduced)
        return ParameterBytes(0.0, gradient, float(self._kept_bytes(spec, held)), copied, reduced)

    def host_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> float:
        """What a parameter takes in the memory of the host for every device, with what the optimizer takes for itself there."""
        if not self.offload.optimizer or not self.machine.device.has_host:
            return 0.0
        kept = self.kept_bytes(spec, held)
        stored = self._stored_bytes(spec, held)
        state = kept.optimizer - self._kept_bytes(spec, held)
        return kept.parameter + state + (stored if spec.requires_grad and self.training else 0.0)

    def kept_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> ParameterBytes:
        """`parameter_bytes` without offload."""
        key = spec, tuple(held)
        if key not in self._known_bytes:
            self._known_bytes[key] = self._find_kept_bytes(spec, held)
        return self._known_bytes[key]

    def _find_kept_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> ParameterBytes:
        use = self._use(spec, held)
        stored = use / self._shards(held, zero=True)
        levels = levels_of(held)
        width, has_copy = spec.stored.dtype.itemsize, bool(levels & {1, 2}) or (spec.master is not None and 3 not in levels)
        trained = spec.requires_grad and self.training
        is_copy = trained and self.optimizer == MASTER and width < MASTER_WIDTH and bool(levels & {1, 2})
        return ParameterBytes(
            parameter=0.0 if is_copy else stored * width,
            gradient=(use if 1 in levels else stored) * width if trained else 0.0,
            optimizer=(state_bytes(self.optimizer, spec.shape, stored, width) if trained else 0.0) + self._kept_bytes(spec, held),
            gathered=use * spec.dtype.itemsize if has_copy else 0.0,
            reduced=stored * width if trained else 0.0,
        )

    def update_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> Taken:
        """What the optimizer takes on the device for itself while it updates a parameter."""
        is_trained = spec.requires_grad and self.training
        is_here = not self.offload.optimizer or not self.machine.device.has_host
        if not (is_trained and is_here):
            return Taken()
        stored = self.kept_bytes(spec, held).parameter
        return taken_bytes(self.optimizer, spec.stored.num_bytes, stored, by_foreach=self.machine.device.has_host)

    def copy_prices(self, spec: TensorSpec, held: Sequence[Held], microbatches: int = 1) -> EdgePrice:
        """Seconds of a step in which what is stored is copied to the device, and gradients to the host (`cost.host`)."""
        if not self.offload.optimizer:
            return EdgePrice()
        device, stored = self.machine.device, self._stored_bytes(spec, held)
        is_trained = spec.requires_grad and self.training
        times = copy_times(float(device.copy_time_s(stored)), held, self.offload, microbatches, is_trained=is_trained)
        return EdgePrice(*times) if device.has_host else EdgePrice(sum(times))

    def update_time_s(
        self,
        spec: TensorSpec,
        held: Sequence[Held],
        microbatches: int = 1,
        *,
        adds_itself: bool = False,
        is_read_again: bool = True,
    ) -> float:
        """Seconds of the optimizer step, which goes through parameter, gradient and state by `UPDATE_PASSES`, on the host in one kernel. Of
        all micro-batches but the first the gradient is added to a sum: two are read and one is written; but where the product that makes it
        ``adds_itself``, it only reads the sum too (`passes.accumulate`). A parameter that the model computes with in a narrower dtype is
        cast, a frozen one too, and its gradient back, vectors all at once (`passes.launches`); a gradient that travels compressed is coded
        and decoded. ``is_read_again`` is as of `edge`."""
        cast_s = self._cast_time_s(spec, held, microbatches, is_read_again=is_read_again)
        if not (spec.requires_grad and self.training):
            return cast_s
        taken = self.kept_bytes(spec, held)
        adds_itself = adds_itself and spec.master is None
        is_on_host = self.offload.optimizer and self.machine.device.has_host
        by_kernel = is_on_host and self.optimizer != FACTORED
        of_parameter, of_state = ONE_KERNEL if by_kernel else self._passes(len(spec.shape))
        of_shards = spec.stored.num_bytes if self.optimizer == FACTORED else self._stored_bytes(spec, held)
        updated = of_parameter * of_shards + of_state * (taken.optimizer - self._kept_bytes(spec, held))
        num_bytes = (1 if adds_itself else 3) * (microbatches - 1) * taken.gradient
        times = microbatches if levels_of(held) & {2, 3} else 1
        num_bytes += times * sum(reduction.touched_bytes for reduction in self._reductions(spec, held))
        device = self.machine.device
        gathered_s, launch_s = self._gathered_s(spec, held), 0.0 if device.dispatch_s else device.update_dispatch_s
        if self.offload.optimizer and not gathered_s:  # the host updates what it has
            return float(device.stream_time_s(num_bytes) + device.host_time_s(updated)) + cast_s + launch_s
        return float(device.stream_time_s(updated + num_bytes)) + cast_s + gathered_s + launch_s

    def update_dispatch_s(self, spec: TensorSpec) -> float:
        """Seconds of the host to launch the update of a parameter and, if the model computes in a narrower dtype, the casts of a step (its
        own, and its gradient's if it has one), but of vectors, which are cast together; none where the host is the device."""
        device, is_trained = self.machine.device, spec.requires_grad and self.training
        if not device.dispatch_s:
            return 0.0
        casts_s = (1 + is_trained) * device.dispatch_s if spec.master is not None and len(spec.shape) > 1 else 0.0
        return casts_s + (device.update_dispatch_s if is_trained else 0.0)

    def _passes(self, num_dims: int) -> tuple[float, float]:
        return update_passes(self.optimizer, num_dims, by_foreach=self.machine.device.has_host)

    def _gathered_s(self, spec: TensorSpec, held: Sequence[Held]) -> float:
        """Seconds in which an optimizer that needs whole parameters gathers one and its gradient."""
        if self.optimizer != FACTORED:
            return 0.0
        is_shared = [isinstance(h, Stored) or h.is_sharded for h in held]
        num_bytes, time_s = spec.stored.num_bytes / self._shards(held, zero=False) / self._shards(held, zero=True), 0.0
        for axis in (axis for axis, shared in enumerate(is_shared) if shared):
            num_bytes *= self.mesh.sizes[axis]
            time_s += 2 * self.waited_s("all_gather", num_bytes, axis)
        return time_s

    def _kept_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> int:
        """What compression keeps of the gradient of a parameter."""
        return sum(reduction.kept_bytes for reduction in self._reductions(spec, held))

    def _cast_time_s(self, spec: TensorSpec, held: Sequence[Held], microbatches: int, *, is_read_again: bool) -> float:
        """Seconds in which a step makes the narrower copy of a parameter: for every micro-batch of ZeRO-2 and -3, of ZeRO-3 again if its
        backward reads it again, else once; and as often the wider one of its gradient."""
        if spec.master is None:
            return 0.0
        levels = levels_of(held)
        castings = 1 + (self.training and 3 in levels and is_read_again) + (self.training and spec.requires_grad)
        num_bytes = self._stored_bytes(spec, held) * (1 + spec.dtype.itemsize / spec.stored.dtype.itemsize)
        each_s = float(self.machine.device.stream_time_s(num_bytes, "cast", is_launched=len(spec.shape) > 1))
        return castings * (microbatches if levels & {2, 3} else 1) * each_s

    def _use(self, spec: TensorSpec, held: Sequence[Held]) -> float:
        """Elements of a parameter that a rank computes with."""
        return spec.numel / self._shards(held, zero=False)

    def _stored_bytes(self, spec: TensorSpec, held: Sequence[Held]) -> float:
        """Bytes of the part of a parameter that a rank updates."""
        return self._use(spec, held) / self._shards(held, zero=True) * spec.stored.dtype.itemsize

    def _shards(self, held: Sequence[Held], *, zero: bool) -> int:
        shards = 1
        for size, h in zip(self.mesh.sizes, held, strict=True):
            if isinstance(h, Stored) if zero else (isinstance(h, Placement) and h.is_sharded):
                shards *= size
        return shards


@lru_cache(maxsize=1 << 16)
def _known_time_s(kind: str, num_bytes: float, size: int, link: LinkProfile) -> float:
    """`collective_time_s` of one message, which many shapes of a search have."""
    return float(collective_time_s(kind, num_bytes, size, link))


def saved_values(node: fx.Node, rule: Rule | None) -> tuple[list[int], list[int]]:
    """Which operands and which results of an op are kept for its backward."""
    if not any(spec.requires_grad for spec in specs_of(node)):
        return [], []
    count = len(operands_of(node))
    saved = node_cost(node, rule).saved
    operands = [i for i in range(count) if i in saved]
    return operands, [i - count for i in saved if i >= count]


def is_read_backward(node: fx.Node, rules: Mapping[fx.Node, Rule]) -> bool:
    """Whether the backward of any op reads a value, or what is made of it alone."""
    for user in (user for user in node.users if is_call(user)):
        if {i for i, value in enumerate(operands_of(user)) if value.node is node}.intersection(saved_values(user, rules.get(user))[0]):
            return True
        if user.all_input_nodes == [node] and is_read_backward(user, rules):
            return True
    return False


def local_bytes(spec: TensorSpec, held: Sequence[Held], mesh: Mesh) -> float:
    """Bytes of a value on each rank."""
    num_bytes = float(spec.num_bytes)
    for size, h in zip(mesh.sizes, held, strict=True):
        if isinstance(h, Placement) and h.is_sharded:
            num_bytes /= size
    return num_bytes


