"""Values for what a rank holds of a model on meta: one tensor at a time, of which it keeps its shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.layout import Layout, take_shard
from autopar.ops.host import on_host
from autopar.runtime.groups import local_device
from autopar.runtime.parameters import is_on_meta, keep
from autopar.start.recording import Recording, View
from autopar.start.replay import Receiver, replay


@dataclass(frozen=True, slots=True)
class Start:
    """Where the values of a model come from that it has not itself.

    Args:
        recorded: of tensors on meta, by name: a recording, and the tensor in it.
        blank: names of tensors on meta that others will give values: they are NaN until then, integers 0.
        load: gives the parallel model values from files.
    """

    recorded: Mapping[str, tuple[Recording, View]] = field(default_factory=dict)
    blank: frozenset[str] = frozenset()
    load: Callable[[nn.Module], None] | None = None


def materialize(
    model: nn.Module, start: Start, layouts: Mapping[str, Layout], mesh: DeviceMesh, hosted: Collection[str] = ()
) -> None:
    """Give every tensor on meta its value, in place.

    Args:
        model: with the parameters that this rank holds.
        start: their values.
        layouts: of every parameter.
        mesh: that they lie on.
        hosted: the parameters that are stored in the memory of the host.
    """
    device, coordinate = local_device(mesh.device_type), mesh.get_coordinate()
    assert coordinate is not None
    wanted = dict[int, tuple[Recording, list[tuple[View, Receiver]]]]()

    def want(name: str, receive: Receiver) -> None:
        recording, view = start.recorded[name]
        wanted.setdefault(id(recording), (recording, []))[1].append((view, receive))

    def shard_of(parameter: nn.Parameter, layout: Layout, *, to_host: bool) -> Receiver:
        def receive(whole: torch.Tensor) -> None:
            shard = _own(take_shard(whole, layout, coordinate), device)
            keep(parameter, on_host(shard) if to_host else shard, layout, mesh)

        return receive

    def value_of(buffer: torch.Tensor) -> Receiver:
        return lambda whole: torch.utils.swap_tensors(buffer, _own(whole, device))

    for name, parameter in model.named_parameters():
        if is_on_meta(parameter):
            layout = layouts[name]
            if name in start.blank:
                empty = blank(layout.local_shape, parameter.dtype, device)
                keep(parameter, on_host(empty) if name in hosted else empty, layout, mesh)
            else:
                want(name, shard_of(parameter, layout, to_host=name in hosted))
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name in start.blank:
            torch.utils.swap_tensors(buffer, blank(buffer.shape, buffer.dtype, device))
        elif buffer.is_meta:
            want(name, value_of(buffer))
        elif buffer.device.type != device.type:
            torch.utils.swap_tensors(buffer, buffer.to(device))
    for recording, receivers in wanted.values():
        replay(recording, receivers)


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What shows that it was not given a value: a model that is trained on it has a loss of NaN."""
    return torch.full(shape, float("nan") if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=device)


def _own(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A part of a tensor that is let go, on a device; all of it is not copied."""
    part = part.to(device).contiguous()
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
