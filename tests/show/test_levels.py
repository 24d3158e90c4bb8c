from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from autopar import api
from autopar.cli.part import part_of_plan, sent_by_part
from autopar.cost.cluster import BETWEEN_NODES, INSIDE_NODE, Cluster
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.mesh import Mesh
from autopar.plan import CollectivePlan, LinkPlan, Pipeline, Plan
from autopar.show.levels import LevelTraffic, sent_by_level, total_by_level
from autopar.show.page import plan_html
from autopar.show.text import plan_text
from autopar.solve.manual import Manual
from autopar.solve.write import _links
from tests import models
from tests.show.plans import STAGE, small_plan
from tests.show.test_page import bound, data_of

NODE = 4
CLUSTER = Cluster(4, NODE)


def links_of(grid: Mesh) -> tuple[LinkPlan, ...]:
    return tuple(_links(grid, CLUSTER.with_mesh(grid).profile))


def moving(grid: Mesh, *collectives: CollectivePlan) -> Plan:
    return dataclasses.replace(small_plan(1), mesh=grid, collectives=collectives, links=links_of(grid))


def level(a: int, b: int) -> str:
    return INSIDE_NODE if a // NODE == b // NODE else BETWEEN_NODES


def played(grid: Mesh, axis: int, kind: str, num_bytes: int) -> dict[str, float]:
    """What all ranks send, message by message, over their number."""
    sent: Counter[str] = Counter()
    for group in grid.groups(axis):
        size = len(group)
        for i, rank in enumerate(group):
            if kind == "all_to_all":
                for other in {*group} - {rank}:
                    sent[level(rank, other)] += num_bytes // size**2
            else:
                sent[level(rank, group[(i + 1) % size])] += (1 + (kind == "all_reduce")) * (size - 1) * num_bytes // size
    return {name: total / grid.num_ranks for name, total in sent.items()}


@pytest.mark.parametrize("grid", ["node=4,gpu=4", "dp=16", "dp=2,tp=8", "dp=8,tp=2", "a=2,b=4,c=2"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_levels_are_those_that_messages_cross(grid: str, kind: str) -> None:
    """Against rings and exchanges that are played rank by rank."""
    mesh, num_bytes = Mesh.parse(grid), 2**20
    for axis, name in enumerate(mesh.names):
        plan = moving(mesh, CollectivePlan(kind, name, "forward", "x", "", num_bytes, 1e-3, 3))
        assert total_by_level(plan) == {name: 3 * sent for name, sent in played(mesh, axis, kind, num_bytes).items()}


@pytest.mark.parametrize("is_trained", [True, False])
def test_messages_between_stages_go_over_the_links_between_them(is_trained: bool) -> None:
    """Four positions, two in a node, two stages at each: of the messages from 0 to 1 to .. 7 those after 1, 3 and 5 leave a node."""
    sends = dataclasses.replace(STAGE, send_forward_bytes=10, send_backward_bytes=100, backward_s=1.0 if is_trained else 0.0)
    first, last = dataclasses.replace(sends, send_backward_bytes=0), dataclasses.replace(sends, send_forward_bytes=0)
    pipeline, mesh = Pipeline(4, 8, 3, "interleaved"), Mesh(("tp",), (2,))
    links = (LinkPlan("pp", (BETWEEN_NODES, INSIDE_NODE), (4, 2)), LinkPlan("tp", (INSIDE_NODE,), (2,)))
    plan = dataclasses.replace(
        small_plan(1), mesh=mesh, pipeline=pipeline, stages=(first, *[sends] * 6, last), collectives=(), links=links
    )
    each = 110 if is_trained else 10
    assert sent_by_level(plan) == [
        LevelTraffic(BETWEEN_NODES, "send", round(3 * 3 * each / 4)),
        LevelTraffic(INSIDE_NODE, "send", 3 * 4 * each // 4),
    ]


def test_parts_of_a_plan_send_what_the_whole_does() -> None:
    """Two stages, each with its messages and the collectives of its ops; modules without messages."""
    sends = dataclasses.replace(STAGE, send_forward_bytes=3 * 2**20, send_backward_bytes=2**20, backward_s=1.0)
    small = bound(2)
    links = (LinkPlan("pp", (BETWEEN_NODES,), (2,)), *small.links)
    ops = tuple(dataclasses.replace(op, stage=int("1" in op.name)) for op in small.ops)
    stages = {p.name: (int(p.name.startswith("h.1")),) for p in small.parameters}
    parameters = tuple(dataclasses.replace(p, stages=stages[p.name]) for p in small.parameters)
    whole = dataclasses.replace(
        small, ops=ops, parameters=parameters, pipeline=Pipeline(2, 2, 3), stages=(sends, sends), links=links
    )

    def sent(*, module: str = "", stage: int | None = None) -> Counter[tuple[str, str]]:
        part = part_of_plan(whole, module, stage)
        return Counter({(row.level, row.kind): row.num_bytes for row in sent_by_part(whole, part, module, stage)})

    total = sent()
    assert total == {(row.level, row.kind): row.num_bytes for row in sent_by_level(whole)}
    first, second = sent(stage=0), sent(stage=1)
    assert first != second
    assert {key: (first[key] + second[key]) // 2 for key in total} == total
    assert first[BETWEEN_NODES, "send"] == 3 * 4 * 2**20
    modules = sent(module="wte") + sent(module="h")
    assert {key for key in total if modules[key] != total[key]} == {(BETWEEN_NODES, "send")}
    assert sent(module="wte", stage=0) + sent(module="h", stage=0) == first - Counter({(BETWEEN_NODES, "send"): 3 * 4 * 2**20})
    part = part_of_plan(whole, stage=1)
    text = plan_text(part, sent=sent_by_part(whole, part, stage=1))
    assert "between nodes a rank sends 19 MiB a step: send 12 MiB, all_gather 7 MiB\n" in text


def test_a_plan_without_links_says_nothing_of_them() -> None:
    plan = dataclasses.replace(small_plan(), links=())
    assert sent_by_level(plan) == []
    assert "a rank sends" not in plan_text(plan)


def test_page_and_text_tell_levels() -> None:
    (shown,) = data_of(plan_html(bound(1)))["plans"]
    assert shown["levels"][0] == {"level": BETWEEN_NODES, "kind": "all_gather", "num_bytes": 7 * 2**20}
    assert [row["level"] for row in shown["levels"]] == [BETWEEN_NODES, INSIDE_NODE, INSIDE_NODE]
    text = plan_text(small_plan(1))
    assert "between nodes a rank sends 7 MiB a step: all_gather 7 MiB\n" in text
    assert "inside a node a rank sends 10.5 MiB a step: reduce_scatter 9 MiB, all_reduce 1.50 MiB\n" in text


def test_plans_know_what_their_axes_cross_and_stages_send() -> None:
    """Stages over two nodes of two: activations of a micro-batch, of 2 rows of 4, and their gradients."""
    model, batch = models.gpt2(layers=2, batch=8)
    device = DeviceProfile("toy", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "made up")
    machine = MachineProfile(device, (LinkProfile(1e-6, 1e9, level=BETWEEN_NODES), LinkProfile(1e-6, 1e9)))
    cluster = Cluster.from_mesh(Mesh(("node", "gpu"), (2, 2)), machine)
    plan = api.plan(model, cluster, batch, plan=Manual(pp=2, dp=2, microbatches=2, stages=("transformer.h.1",)))
    assert plan.grid == Mesh.parse("pp=2,dp=2,tp=1")
    inside = ("links of gpu",)
    assert plan.links == (LinkPlan("pp", (BETWEEN_NODES,), (2,)), LinkPlan("dp", inside, (2,)), LinkPlan("tp", inside, (1,)))
    rows, (ids,) = 2, {tuple(x.shape) for x in batch.values()}
    num_bytes = rows * ids[1] * model.get_parameter("transformer.wpe.weight").shape[1] * 4
    assert [(s.send_forward_bytes, s.send_backward_bytes) for s in plan.stages] == [(num_bytes, 0), (0, num_bytes)]
    (added, *given) = (c.num_bytes for c in plan.collectives if c.axis == "pp")  # all of the output by one of two ranks
    assert [c.kind for c in plan.collectives if c.axis == "pp"] == ["all_reduce", *["broadcast"] * len(given)]
    assert added == model.get_parameter("transformer.wte.weight").numel() * 4  # which each rank sends half of, twice
    assert total_by_level(plan)[BETWEEN_NODES] == 2 * (num_bytes + num_bytes) // 2 + sum(given) // 2 + added


def test_gradients_of_both_ends_are_sent_by_these() -> None:
    model, batch = models.gpt2(layers=4, batch=8)
    plan = api.plan(model, Cluster(4, 1, "a100-80gb"), batch, plan=Manual(pp=4, microbatches=4))
    (added,) = (c.num_bytes for c in plan.collectives if c.kind == "all_reduce")
    for stage, num_bytes in ((None, added / 2), (0, added), (1, 0), (2, 0), (3, added)):
        rows = [row for row in sent_by_level(plan, stage=stage, has_messages=False) if row.kind == "all_reduce"]
        assert sum(row.num_bytes for row in rows) == num_bytes
        assert {row.level for row in rows} <= {BETWEEN_NODES}
