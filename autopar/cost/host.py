"""Parameters that are stored on the host: what of them is on the device, and what is copied when.

- Stored shard. On the device: a copy for the step, from its first use; ZeRO-1 and -2 need it for the gather alone; ``parameters``: about
  its use. Copied: to the device once; with several micro-batches for all uses at the start of the step.
- Gradient. On the device: none where it leaves as soon as it is there: of one micro-batch, unless an all-reduce or ZeRO-1 holds it back.
  Copied: to the host once.
- Optimizer state. On the device: none. Copied: none, the host updates.

Copies to the device hide under the forward, and those of ``parameters``, which come again, under the backward too; gradients go out beside
the backward, in the other direction at the same time. What does not fit under the compute of its half of the step, with the collectives
that hide there too, is exposed (the offload schedule of Ren et al. 2021, section 4; bandwidth-centric prefetching of Rajbhandari et al.
2021, section 6). The update is not hidden: it reads and writes as many bytes as on the device, at the rate of the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.offload import Offload
from autopar.rules.registry import TensorSpec
from autopar.storage import Held, Stored


def levels_of(held: Sequence[Held]) -> set[int]:
    """The ZeRO levels at which a parameter is held."""
    return {h.level for h in held if isinstance(h, Stored)}


def leaves_early(held: Sequence[Held], mesh: Mesh) -> bool:
    """Whether the gradient of a parameter can go to the host while the backward still runs: of several micro-batches the sum stays, as does
    what is all-reduced, which waits for the end, and what ZeRO-1 reduces there."""
    if mesh.time_axis is not None:
        return False
    return all(
        size == 1 or (isinstance(h, Stored) and h.level > 1) or (isinstance(h, Placement) and h.is_sharded)
        for size, h in zip(mesh.sizes, held, strict=True)
    )


def fetched_bytes(spec: TensorSpec, use: float, held: Sequence[Held], mesh: Mesh, offload: Offload) -> float:
    """Bytes of the copy of a stored shard that the device has for the step, beside what is gathered or cast of it.

    Args:
        spec: the parameter.
        use: elements that a rank computes with.
        held: how it is held on each axis.
        mesh: with the axis in time, if there are micro-batches.
        offload: what lies on the host.
    """
    levels, width = levels_of(held), spec.stored.dtype.itemsize
    shards = math.prod(size for size, h in zip(mesh.sizes, held, strict=True) if isinstance(h, Stored))
    is_gathered_once = 1 in levels or (2 in levels and mesh.time_axis is None)
    if offload.parameters or is_gathered_once or (not levels and spec.master is not None):
        return 0.0
    return use / shards * width


def used_bytes(spec: TensorSpec, value: float, held: Sequence[Held], mesh: Mesh) -> float:
    """Bytes of what there is of a parameter about its use: the ``value`` as it is used, and the shard that it is gathered or cast from."""
    shards = math.prod(size for size, h in zip(mesh.sizes, held, strict=True) if isinstance(h, Stored))
    is_made = shards > 1 or spec.master is not None
    return value * (1 + spec.stored.dtype.itemsize / spec.dtype.itemsize / shards * is_made)


def copy_times(copy_s: float, held: Sequence[Held], offload: Offload, microbatches: int, *, is_trained: bool) -> tuple[float, ...]:
    """Seconds of all copies of a parameter in a step: exposed, and to hide under the forward and the backward.

    Args:
        copy_s: of its stored shard, or of the gradient of that, once.
        held: how it is held on each axis.
        offload: what lies on the host.
        microbatches: of the step.
        is_trained: whether it has a gradient.
    """
    levels, out_s = levels_of(held), copy_s if is_trained else 0.0
    is_once = not offload.parameters or 1 in levels
    again_s = 0.0 if is_once or 2 in levels else copy_s
    if microbatches == 1:
        return 0.0, copy_s, max(again_s, out_s)
    if is_once:
        return copy_s + out_s, 0.0, 0.0
    return out_s, microbatches * copy_s, microbatches * again_s
