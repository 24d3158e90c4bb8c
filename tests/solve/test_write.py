"""The parts of a predicted step add up to it, whatever the backward computes again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import Manual
from autopar.plan import Plan
from autopar.solve.recompute import LEVELS
from tests import models

pytestmark = pytest.mark.slow
WAYS = {
    "alone": Manual(),
    "dp": Manual(dp=4),
    "zero3": Manual(dp=4, zero=3, microbatches=2),
    "tp": Manual(tp=4, sequence_parallel=True),
}


def made(manual: Manual, offload: str | None = None) -> Plan:
    model, given = models.gpt2(layers=4, hidden=256, heads=4, vocab=512, sequence=256, batch=64, device="meta")
    cluster = autopar.Cluster(1, manual.dp * manual.tp * manual.pp, "a100-80gb")
    return autopar.plan(model, cluster, given, plan=manual, outputs="loss", offload=offload)


def check(plan: Plan) -> None:
    step = plan.prediction
    assert not step.is_host_bound
    assert step.compute_s + step.update_s + step.exposed_comm_s + step.host_s == pytest.approx(step.step_time_s, rel=1e-6)
    assert step.blocking_comm_s <= step.exposed_comm_s * (1 + 1e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_parts_add_up_to_the_step(way: str, level: str) -> None:
    check(made(replace(WAYS[way], recompute=level)))


@pytest.mark.parametrize("level", ["none", "full"])
def test_so_they_do_with_activations_on_the_host(level: str) -> None:
    check(made(Manual(dp=4, recompute=level), "activations"))


def test_what_is_gathered_again_is_waited_for_again() -> None:
    kept, again = (made(replace(WAYS["tp"], recompute=level)).prediction for level in ("none", "selective"))
    assert again.blocking_comm_s > 1.1 * kept.blocking_comm_s
    assert again.blocking_comm_s == pytest.approx(again.exposed_comm_s)


@pytest.mark.parametrize("level", LEVELS)
def test_a_device_of_a_pipeline_computes_what_its_stages_do_in_the_mean(level: str) -> None:
    plan = made(Manual(pp=2, microbatches=4, recompute=level))
    computed_s = sum(piece.waited_s for stage in plan.stages for piece in stage.inside if piece.is_compute)
    assert plan.prediction.compute_s == pytest.approx(4 * computed_s / 2, rel=1e-6)
