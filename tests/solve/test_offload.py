"""What lies on the host takes no memory of the device and some time; the planner uses it where nothing else fits, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import Cluster, Manual, Plan
from autopar.cost.updates import FOREACH_COPIES, UPDATE_COPIES
from autopar.errors import InfeasibleError
from autopar.passes import offload
from autopar.solve import footprint
from tests import models

pytestmark = pytest.mark.slow

EXAMPLE = models.mlp(layers=2, hidden=128, intermediate=512, batch=64)
"""Parameters of 1 MiB."""
GPUS, CPUS = Cluster(1, 2, "a100-80gb"), Cluster(1, 2, "cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (offload, footprint):
        monkeypatch.setattr(module, "LARGE_NUM_BYTES", 1024)
    for copies in (UPDATE_COPIES, FOREACH_COPIES):  # of the largest weight, which here is a quarter of all
        monkeypatch.setitem(copies, "adamw", 0)


def planned(cluster: Cluster = GPUS, **asked: object) -> Plan:
    return autopar.plan(EXAMPLE.model, cluster, EXAMPLE.batch, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [Manual(dp=2), Manual(dp=2, zero=3), Manual(pp=2, microbatches=4), Manual(dp=2, zero=2, microbatches=2)])
def test_each_kind_takes_less_of_the_device_and_more_time(config: Manual) -> None:
    kinds = ("none", "optimizer", "parameters", "activations", "parameters+activations")
    plans = {kind: planned(plan=config, offload=kind) for kind in kinds}
    peak = {kind: max(plan.prediction.peak_memory_bytes) for kind, plan in plans.items()}
    assert peak["none"] > peak["optimizer"] >= peak["parameters"] >= peak["parameters+activations"]  # whole gradients may be the most
    assert peak["none"] >= peak["activations"]  # equal where the peak is when all activations are used up
    assert peak["none"] > peak["activations"] or config.pp == 1, "several micro-batches in flight take most of the memory"
    step = {kind: plan.prediction.step_time_s for kind, plan in plans.items()}
    assert step["none"] < step["optimizer"] <= step["parameters"] <= step["parameters+activations"]
    assert step["none"] <= step["activations"], "copies may hide"
    assert not plans["none"].prediction.host_memory_bytes
    for kind, plan in plans.items():
        assert plan.offload == ("" if kind == "none" else kind)
        assert Plan.from_json(plan.to_json()).prediction == plan.prediction
    taken = plans["optimizer"].prediction.memory_bytes
    assert taken["parameters"] == taken["optimizer"] == 0
    state = sum(plans["none"].prediction.memory_bytes[kind] for kind in ("parameters", "optimizer"))
    assert plans["optimizer"].prediction.host_memory_bytes[0] == pytest.approx(state * 4 / 3, rel=0.01)  # and gradients


def test_the_host_updates_at_its_own_rate() -> None:
    num_bytes = 28 * sum(p.numel() for p in EXAMPLE.model.parameters())  # 3 of a parameter, 4 of its moments, in float32
    update_s = planned(plan=Manual(dp=2), offload="optimizer").prediction.update_s
    assert update_s == pytest.approx(num_bytes / GPUS.profile.device.host_memory_bandwidth, rel=0.01)


def test_one_memory_saves_nothing() -> None:
    plain = planned(CPUS, plan=Manual(dp=2)).prediction
    for kind in ("optimizer", "parameters", "activations"):
        prediction = planned(CPUS, plan=Manual(dp=2), offload=kind).prediction
        assert max(prediction.peak_memory_bytes) > max(plain.peak_memory_bytes)
        assert prediction.step_time_s > plain.step_time_s
        assert not prediction.host_memory_bytes


def test_auto_offloads_nothing_that_fits() -> None:
    for limit in (None, "10MiB"):
        plan = planned(offload="auto", memory_limit=limit)
        assert not plan.offload
        assert plan.prediction.step_time_s == planned(memory_limit=limit).prediction.step_time_s


def test_auto_offloads_what_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="nothing lies on the host: offload='auto' also tries"):
        planned(memory_limit="1MiB")
    plan = planned(offload="auto", memory_limit="1MiB")
    assert plan.offload in ("optimizer", "parameters", "activations")
    assert max(plan.prediction.peak_memory_bytes) <= MIB
    assert any("the host has what offload=" in note for note in plan.notes)
    assert f"on the host {plan.offload}" in str(plan)
    for kind in {"optimizer", "parameters", "activations"} - {plan.offload}:
        try:
            other = planned(offload=kind, memory_limit="1MiB")
        except InfeasibleError:
            continue
        assert other.prediction.step_time_s >= plan.prediction.step_time_s


def test_auto_has_no_way_out_of_one_memory() -> None:
    with pytest.raises(InfeasibleError) as error:
        planned(CPUS, offload="auto", memory_limit="1MiB")
    assert "host" not in str(error.value)


def test_the_host_has_limits_too() -> None:
    machine = GPUS.with_mesh(Manual(dp=2).mesh).profile
    small = replace(machine, device=replace(machine.device, host_memory_bytes=MIB))
    with pytest.raises(InfeasibleError, match=r"needs .* of the memory of the host per rank, which has 1 MiB for each"):
        planned(2, plan=Manual(dp=2), offload="optimizer", profile=small)  # type: ignore[arg-type]


def test_a_changed_question_and_a_saved_plan() -> None:
    plan = planned(plan=Manual(dp=2), offload="optimizer")
    assert not plan.with_(offload="none").offload
    assert plan.with_(memory_limit="1GiB").offload == "optimizer"
    assert plan.with_(plan=Manual(dp=2, offload="activations")).offload == "activations"
    with pytest.raises(autopar.errors.PlanError, match="the plan was made for offload 'optimizer', and 'activations' is asked for"):
        planned(plan=plan, offload="activations")
    assert planned(plan=plan).offload == "optimizer"


def test_relief_offers_it() -> None:
    rows = {row.what: row for row in autopar.relieve(EXAMPLE.model, GPUS, EXAMPLE.batch, plan=Manual(dp=2), memory_limit="1.5MiB")}
    assert rows["offload=parameters"].change == {"offload": "parameters"}
    assert rows["offload=parameters"].fits
    assert not rows["as asked"].fits
