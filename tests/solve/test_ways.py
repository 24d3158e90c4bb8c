"""Which ways there are, and what they have in common."""

from __future__ import annotations

import pytest

from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.pricing import EdgePrice, Pricer
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.solve.ways import Way, has_way, network_of
from autopar.storage import parse_held
from tests.cost.test_pricing import DEVICE

WANTED = ["R", "R*", "P", "S0", "S1"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_there_is_a_price_where_there_is_a_way(training: bool, needs_grad: bool) -> None:
    pricer = Pricer(MachineProfile(DEVICE, (LinkProfile(1e-6, 1e9),)), Mesh.of(2), training=training)
    found = set()
    for price, given, is_parameter in (
        (pricer.edge, WANTED, False),
        (pricer.parameter_edge, ["R", "S0", "S1", "Z1", "Z2", "Z3"], True),
    ):
        for held, wanted in ((parse_held(h), Placement.parse(w)) for h in given for w in WANTED):
            is_way = has_way(held, wanted, is_parameter=is_parameter, needs_grad=needs_grad and training)
            assert is_way == (price(held, wanted, 1e6, 0, needs_grad=needs_grad) is not None), (held, wanted)
            found.add(is_way)
    assert found == {True, False}


@pytest.mark.parametrize("in_time", [False, True])
def test_what_is_whole_is_shared_out_in_time_alone(in_time: bool) -> None:
    mesh = Mesh.of(2)
    pricer = Pricer(MachineProfile(DEVICE, (LinkProfile(1e-6, 1e9),)), mesh.with_time(2) if in_time else mesh)
    summand, free = Placement.parse("P"), EdgePrice()
    for held in map(Placement.parse, ("R", "R*")):
        assert has_way(held, summand, is_parameter=False, needs_grad=True, in_time=in_time) is in_time
        assert pricer.edge(held, summand, 1e6, 1 if in_time else 0, needs_grad=True) == (free if in_time else None)
    assert not has_way(Placement.parse("S0"), summand, is_parameter=False, needs_grad=True, in_time=in_time)


def test_ways_are_told_by_both_ends() -> None:
    whole, stored, shard = parse_held("R"), parse_held("Z3"), Placement.parse("S0")
    gathered, reduced = Placement.parse("R"), Placement.parse("R*")
    sources = (whole, (1, False, 0)), (stored, (2, True, 4)), (shard, (1, False, 0))
    targets = (gathered, 1), (reduced, 8), (shard, 8)
    network = network_of(sources, targets, is_parameter=True, needs_grad=True)
    assert [(str(way.held), str(way.wanted), way.parts) for way in network.ways] == [
        ("R", "R", 1),
        ("R", "R*", 8),
        ("R", "S0", 8),
        ("Z3", "R", 8),
        ("Z3", "R*", 8),
        ("S0", "S0", 8),
    ]
    assert network.ways[Way(stored, 2, reduced, 8, True, 4)] == 4
    assert (network.from_sources, network.to_targets) == (((0, 1, 2), (3, 4), (5,)), ((0, 3), (1, 4), (2, 5)))
    assert [(moved.held, moved.wanted, moved.parts) for moved in network.moved] == [(w.held, w.wanted, w.parts) for w in network.ways]
