"""Racks, pods and datacenters: which links a group crosses, what a collective takes over them, and where the planner puts what."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.inputs import read_cluster
from autopar.cost.cluster import BETWEEN_NODES, INSIDE_NODE, Cluster, Level, named_link
from autopar.cost.collectives import collective_time_s
from autopar.cost.machine import KINDS, LinkProfile
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.show.levels import total_by_level

NUM_BYTES = (1e3, 1e6, 1e9)
POD = Level("pod", 4, oversubscription=7)
PODS = Cluster(16, 8, "h100", inter="ib-400", levels=(POD,))


def levels(link: LinkProfile) -> list[tuple[str, int]]:
    """Of a group, the outermost first, each with its ranks in one part of it; of one that is alone there it crosses nothing."""
    below = levels(link.inside) if link.inside is not None and link.ranks_inside > 1 else []
    return [(link.level, link.ranks_inside), *below]


@pytest.mark.parametrize(
    "mesh, expected",
    [
        ("node=16,gpu=8", [[("between pods", 4), (BETWEEN_NODES, 1)], [(INSIDE_NODE, 1)]]),
        ("pod=4,node=4,gpu=8", [[("between pods", 1)], [(BETWEEN_NODES, 1)], [(INSIDE_NODE, 1)]]),
        ("dp=8,tp=16", [[("between pods", 2), (BETWEEN_NODES, 1)], [(BETWEEN_NODES, 8), (INSIDE_NODE, 1)]]),
        ("all=128", [[("between pods", 32), (BETWEEN_NODES, 8), (INSIDE_NODE, 1)]]),
    ],
)
def test_a_group_takes_the_outermost_links_that_it_crosses(mesh: str, expected: list[list[tuple[str, int]]]) -> None:
    assert [levels(link) for link in PODS.with_mesh(Mesh.parse(mesh)).profile.links] == expected


def test_groups_that_do_not_come_out_even_cross_as_well() -> None:
    """Six of eight devices: every second group has its ranks in two nodes, two of them at least in each."""
    _, inner = Cluster(3, 8, "h100").with_mesh(Mesh.parse("dp=4,tp=6")).profile.links
    assert levels(inner) == [(BETWEEN_NODES, 2), (INSIDE_NODE, 1)]


def test_an_all_reduce_over_pods_by_hand() -> None:
    """One rank in each node of four pods of four: a ring of 16 crosses pods four times, of which three count, and within each three nodes.
    Four ranks in a pod have four sevenths of a port between them."""
    outer, inter = PODS.profile.links[0], named_link("ib-400")
    by_hand = 15 * inter.alpha_s + 15 / 16 * 1e9 / (4 / 7 * inter.bandwidth)
    simple = replace(outer, protocols=(), inside=replace(outer.inside, protocols=()) if outer.inside else None)
    assert collective_time_s("all_gather", 1e9, 16, simple) == pytest.approx(inter.base_s + by_hand)
    far = replace(PODS, levels=(replace(POD, latency_s=1e-3),)).profile.links[0]
    assert far.alpha_s == pytest.approx(inter.alpha_s + 1e-3)
    assert collective_time_s("send", 1.0, 2, far.hop(3)) - collective_time_s("send", 1.0, 2, far.hop(2)) == pytest.approx(1e-3, rel=0.01)


def test_ranks_that_fill_a_pod_are_as_fast_as_their_ports() -> None:
    """All 32 ranks of a pod drive its uplinks, 32 sevenths of a port, which a ring cannot use all if a node has eight ports of its own."""
    link = PODS.with_mesh(Mesh.parse("all=128")).profile.links[0]
    node = Cluster(4, 8, "h100", inter="ib-400").with_mesh(Mesh.parse("all=32")).profile.links[0]
    assert link.bandwidth * link.lanes == pytest.approx(min(32 / 7 * named_link("ib-400").bandwidth, node.bandwidth * node.lanes))


@pytest.mark.parametrize("mesh", ["node=16,gpu=8", "dp=8,tp=16", "all=128", "dp=32,tp=4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_level_as_fast_as_the_one_below_changes_nothing(mesh: str, kind: str) -> None:
    plain = replace(PODS, levels=())
    same = replace(PODS, levels=(Level("pod", 4), Level("hall", 8)))
    grid = Mesh.parse(mesh)
    for size, a, b in zip(grid.sizes, plain.with_mesh(grid).profile.links, same.with_mesh(grid).profile.links, strict=True):
        times = [[float(collective_time_s(kind, num_bytes, size, link)) for num_bytes in NUM_BYTES] for link in (a, b)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_cluster_of_one_group_has_no_links_between_groups(nodes: int) -> None:
    assert replace(PODS, nodes=nodes).profile.links == replace(PODS, nodes=nodes, levels=()).profile.links


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: replace(PODS, nodes=6), "6 nodes are no whole pods of 4 nodes 1:7; give a number of nodes that is a multiple of 4, or le"),
        (lambda: replace(PODS, levels=(POD, Level("hall", 6))), "halls of 6 nodes do not hold whole groups of 4 nodes"),
        (lambda: Level("pod", 0), "is no level: it needs a name, nodes >= 1"),
        (lambda: Level("pod", "4"), r"\(name='pod', nodes='4', oversubscription=1.0, latency_s=0.0\) is no level"),  # type: ignore[arg-type]
        (lambda: Level("pod", 4, latency_s="1e-6"), "latency_s='1e-6'"),  # type: ignore[arg-type]
        (lambda: replace(PODS, levels=POD), r"levels of a Cluster is a tuple, .* got Level"),  # type: ignore[arg-type]
        (lambda: Level("pod", 4, oversubscription=0.5), "oversubscription >= 1"),
        (lambda: Level("pod", 4, oversubscription=math.nan), "oversubscription=nan"),
        (lambda: Level("pod", 4, oversubscription=math.inf), "a finite oversubscription"),
        (lambda: Level("pod", 4, latency_s=math.nan), "latency_s=nan"),
        (lambda: PODS + Cluster(4, 8, "a100-80gb"), "in pods of 4 nodes 1:7 and in no levels are not added"),
        (lambda: read_cluster("16x8:h100/pod"), "'pod' is no level of '16x8:h100/pod': it reads like 'pod=256'"),
        (lambda: read_cluster("16x8:h100/pod=4:7:1:1"), "is no level of"),
    ],
)
def test_levels_that_cannot_be(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(MeshError, match=text):
        make()


def test_levels_are_written_and_read(tmp_path: Path) -> None:
    mixed = read_cluster("8x8:h100+8x8:a100-80gb/pod=4:7:1e-6/hall=8")
    assert mixed.levels == (Level("pod", 4, 7, 1e-6), Level("hall", 8))
    assert [link.level for link in mixed.profile.links] == ["between halls", INSIDE_NODE]
    mixed.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == mixed
    (tmp_path / "cluster.json").write_text((tmp_path / "cluster.json").read_text().replace("latency_s", "latency_ms"))
    with pytest.raises(PlanError, match=r"cluster.json is not a cluster: its level .*'latency_ms'.* write it with Cluster.save"):
        Cluster.load(tmp_path / "cluster.json")
    assert PODS.profile.origin == "16 nodes x 8 h100, ib-400, pods of 4 nodes 1:7"


@pytest.mark.slow
def test_little_is_sent_over_links_that_carry_little() -> None:
    """On two pods with a thousandth of the bandwidth between them far less crosses than where they are as near as nodes, and a step takes
    no thousand times as long."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)), nn.Linear(2048, 1))
        batch = torch.empty(512, 2048)
    sent = []
    for oversubscription in (1.0, 1000.0):
        cluster = Cluster(2, 2, "h100", inter="ib-400", levels=(Level("pod", 1, oversubscription),))
        plan = autopar.plan(model, cluster, (batch,), loss_fn=torch.sum)
        sent.append((plan.prediction.step_time_s, total_by_level(plan).get("between pods", 0)))
    (near_s, near_bytes), (far_s, far_bytes) = sent
    assert far_bytes < near_bytes / 10
    assert near_s < far_s < 20 * near_s
