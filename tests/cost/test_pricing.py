"""What plans are priced with: every kind of op at its own rate, every message on its own link, collectives as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import Cluster, Manual, Plan, api
from autopar.cost.collectives import collective_time_s
from autopar.cost.device import AttentionSample, DeviceProfile, MatmulSample, Stream
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.mesh import Mesh
from tests import models

DEVICE = DeviceProfile("toy", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "made up")
LINKS = (LinkProfile(1e-6, 1e9),) * 2




def compute_s(device: DeviceProfile) -> float:
    model, batch = models.gpt2(layers=1, batch=8)
    return api.plan(model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(device, LINKS)).prediction.compute_s


SLOW = Stream(1e5, 1e5)


@pytest.mark.parametrize(
    "device",
    [
        replace(DEVICE, attention=(AttentionSample(16, "float32", 1e6, 1e6),)),
        replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(64, 64, 4, "float32", 1e7))),
        *(replace(DEVICE, streams={name: SLOW}) for name in ("tanh", "layer_norm", "cross_entropy_loss", "embedding")),
    ],
    ids=["attention", "skinny", "tanh", "layer_norm", "cross_entropy_loss", "embedding"],
)
def test_every_kind_of_op_has_its_rate(device: DeviceProfile) -> None:
    """One kind at a small part of its rate makes the model slower."""
    assert compute_s(device) > 1.2 * compute_s(DEVICE)


def test_kinds_that_a_model_has_not_are_nothing_to_it() -> None:
    assert compute_s(replace(DEVICE, streams={"gelu": SLOW})) == compute_s(DEVICE)


def pipelined(inside: LinkProfile, *, sharing: float = 1.0) -> Plan:
    """Four stages over two nodes of two."""
    model, batch = models.gpt2(layers=4, batch=8)
    machine = MachineProfile(replace(DEVICE, sharing=sharing), (LinkProfile(1e-2, 1e6), inside))
    cluster = Cluster.from_mesh(Mesh(("node", "gpu"), (2, 2)), machine)
    cuts = tuple(f"transformer.h.{layer}" for layer in (1, 2, 3))
    return api.plan(model, cluster, batch, plan=Manual(pp=4, microbatches=4, stages=cuts))


def test_messages_are_priced_on_the_link_that_they_cross() -> None:
    """The second of three boundaries lies between the nodes."""
    sends = [stage.send_s for stage in pipelined(LinkProfile(1e-6, 1e9)).stages]
    assert sends[1] > 100 * sends[0] == 100 * sends[2]
    assert sends[3] == 0


def test_messages_take_of_cores_that_are_shared() -> None:
    """What overlap leaves of a message is work; where every rank has its own device, it only waits."""
    free, dear = LinkProfile(1e-3, 1e6, overlap=1.0), LinkProfile(1e-3, 1e6, overlap=0.0)
    assert pipelined(dear).prediction.step_time_s == pipelined(free).prediction.step_time_s
    assert pipelined(dear, sharing=4.0).prediction.step_time_s > 1.02 * pipelined(free, sharing=4.0).prediction.step_time_s


def test_what_a_library_makes_of_a_collective_goes_along() -> None:
    """A reduce-scatter that takes twice the formula between nodes does so too for groups with several ranks of a node."""
    outer = LinkProfile(1e-9, 1e9)
    sizes = (1e6, 1e8)
    slow = {
        kind: tuple((size, times * float(collective_time_s(kind, size, 2, outer))) for size in sizes)
        for kind, times in (("reduce_scatter", 2.0), ("all_gather", 1.0))
    }
    measured = MachineProfile(DEVICE, (replace(outer, measured=slow, group_size=2), LinkProfile(1e-9, 4e9)))
    (link,) = Cluster.from_mesh(Mesh(("node", "gpu"), (2, 2)), measured).with_mesh(Mesh(("dp",), (4,))).profile.links
    assert link.lanes == 2
    for kind, times in (("reduce_scatter", 2.0), ("all_gather", 1.0)):
        formula = float(collective_time_s(kind, 1e7, 4, replace(outer, lanes=2.0)))
        assert float(collective_time_s(kind, 1e7, 4, link)) == pytest.approx(times * formula, rel=1e-3)
