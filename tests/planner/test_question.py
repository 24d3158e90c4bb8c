"""`Plan.with_`: the plan that `autopar.plan` makes of the changed request, from the same capture."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from autopar import api
from autopar.capture import trace
from autopar.cost.cluster import Cluster, named_device
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan as Record
from autopar.planner import session
from autopar.planner.document import Plan
from autopar.solve.manual import Manual
from autopar.solve.pins import pin
from tests import models
from tests.marks import exhaustive

pytestmark = pytest.mark.slow

CLUSTER, LARGER = Cluster(1, 2, "h100"), Cluster(2, 2, "h100")
PINS = (pin("blocks.*.1.weight", gpu="R"),)


@cache
def example() -> models.Example:
    return models.mlp(layers=1)


@cache
def asked() -> Plan:
    return api.plan(example().model, CLUSTER, example().batch)


def test_what_is_no_cluster_is_told() -> None:
    with pytest.raises(MeshError, match=r"a Cluster, a number of ranks, .* not a Plan"):
        api.verify(example().model, asked(), example().batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [None, Manual(pp=2), Manual(dp=2)], ids=str)
def test_what_was_measured_of_a_mesh_prices_all_that_its_ranks_may_do(tmp_path: Path, config: Manual | None) -> None:
    """Stages too, and configurations, which have grids of their own; given as a file or read."""
    link = LinkProfile(1e-5, 1e9, measured={"all_reduce": ((1.0, 1e-5), (1e9, 1.0))}, group_size=2)
    profile = MachineProfile(named_device("h100"), (link,), "here")
    profile.save(tmp_path / "profile.json")
    plans = [api.plan(example().model, 2, example().batch, plan=config, profile=given) for given in (profile, tmp_path / "profile.json")]
    assert plans[0].prediction == plans[1].prediction
    described = api.plan(example().model, Cluster.from_mesh(Mesh.of(2), profile), example().batch, plan=config)
    assert plans[0].prediction == described.prediction


def without_times(plan: Record) -> object:
    data = json.loads(plan.to_json())
    del data["stats"]["capture_time_s"], data["stats"]["solve_time_s"]
    return data


def grown(rows: int) -> dict[str, torch.Tensor]:
    return {name: x.new_empty((rows, *x.shape[1:])) for name, x in example().batch.items()}


def captures() -> mock._patch[mock.MagicMock]:
    return mock.patch.object(session, "capture", side_effect=trace.capture)


@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({"cluster": LARGER}, {}),
        ({"memory_limit": "60 KiB"}, {"memory_limit": "60 KiB"}),
        ({"constraints": PINS}, {"constraints": PINS}),
        ({"optimizer": "sgd"}, {"optimizer": "sgd"}),
        ({"pipeline": False}, {"pipeline": False}),
        ({"plan": Manual(dp=2, zero=1)}, {"plan": Manual(dp=2, zero=1)}),
    ],
)
def test_equals_a_new_plan_without_a_capture(changes: dict[str, object], arguments: dict[str, object]) -> None:
    plan = asked()
    with captures() as capture:
        changed = plan.with_(**changes)  # type: ignore[arg-type]
    assert not capture.called
    assert changed.stats.capture_time_s == 0
    fresh = api.plan(example().model, changes.get("cluster", CLUSTER), example().batch, **arguments)  # type: ignore[arg-type]
    assert without_times(changed) == without_times(fresh)


@exhaustive
def test_a_deep_model_under_other_limits() -> None:
    """What was found without a limit serves again, in the whole graph and in short."""
    model, batch = models.speaker(layers=10, device="meta")
    free = api.plan(model, CLUSTER, batch)
    peak = max(free.prediction.peak_memory_bytes)
    before = dict(free.question.known) if free.question else {}
    for share in (0.9, 0.8):
        tight = free.with_(memory_limit=share * peak)
        assert without_times(tight) == without_times(api.plan(model, CLUSTER, batch, memory_limit=share * peak))
    assert before
    assert without_times(free.with_(cluster=LARGER)) == without_times(api.plan(model, LARGER, batch))


def test_another_batch_is_captured_again_and_serves_all_others() -> None:
    plan, batch = api.plan(example().model, CLUSTER, example().batch), grown(16)
    with captures() as capture:
        changed = plan.with_(batch=batch)
        same = plan.with_(batch=grown(8))
        assert capture.call_count == 1
        more = plan.with_(batch=grown(24))
        again = changed.with_(batch=grown(32))
    assert capture.call_count == 1
    assert without_times(changed) == without_times(api.plan(example().model, CLUSTER, batch))
    assert without_times(same) == without_times(asked())
    for found, rows in ((more, 24), (again, 32)):
        assert without_times(found) == without_times(api.plan(example().model, CLUSTER, grown(rows)))


def test_a_symbolic_capture_serves_other_batches() -> None:
    opened = session.open_session(example().model, (), example().batch)
    with captures() as capture:
        other = opened.for_call((), grown(16))
    assert not capture.called
    assert other.batch_size == 16
    assert other.hash == asked().with_(batch=grown(16)).graph_hash


def test_changes_add_up_and_the_first_plan_stays() -> None:
    before = asked().to_json()
    both = asked().with_(constraints=PINS).with_(cluster=LARGER)
    assert without_times(both) == without_times(api.plan(example().model, LARGER, example().batch, constraints=PINS))
    free = both.with_(constraints=(), cluster=CLUSTER)
    assert without_times(free) == without_times(asked())
    assert asked().to_json() == before


def test_graphs_of_plans_that_share_a_capture_are_their_own() -> None:
    by_hand = asked().with_(plan=Manual(tp=2))
    first = {node.name: node.meta.get("layout") for node in asked().graph.graph.nodes}
    graph = asked().graph
    assert {node.name: node.meta.get("layout") for node in by_hand.graph.graph.nodes} != first
    assert {node.name: node.meta.get("layout") for node in graph.graph.nodes} == first


def test_a_configuration_stays_and_a_saved_plan_does_not(tmp_path: Path) -> None:
    by_hand = api.plan(example().model, CLUSTER, example().batch, plan=Manual(dp=2, zero=3))
    assert by_hand.with_(optimizer="sgd").config == by_hand.config != ""
    by_hand.save(tmp_path / "plan.json")
    bound = api.plan(example().model, CLUSTER, example().batch, plan=tmp_path / "plan.json")
    assert without_times(bound) == without_times(by_hand)
    assert without_times(bound.with_(cluster=LARGER)) == without_times(asked().with_(cluster=LARGER))


def test_a_loaded_plan_has_nothing_to_change() -> None:
    with pytest.raises(PlanError, match=r"make one with autopar\.plan\(model, cluster, batch\)"):
        Plan.from_json(asked().to_json()).with_(cluster=LARGER)


def test_bad_changes_are_refused() -> None:
    with pytest.raises(PlanError, match="optimizer 'lion' has no price here"):
        asked().with_(optimizer="lion")
    with pytest.raises(PlanError, match="memory_limit"):
        asked().with_(memory_limit=-1)
    with pytest.raises(InfeasibleError, match="the memory limit is 1 KiB"):
        asked().with_(memory_limit="1 KiB")
