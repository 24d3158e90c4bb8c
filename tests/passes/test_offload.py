"""What is on the host is fetched before its use and changes no bit; on virtual ranks in this process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar import Manual
from autopar.compile import compile_plan, compile_stage
from autopar.ops.host import arrive, fetch, leave
from autopar.passes import offload
from autopar.passes.differentiate import Halves
from autopar.passes.overlap import ALL_GATHER
from autopar.planner.request import positional_and_keyword
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.verify import _run_staged, _run_whole, _Virtual
from tests.marks import only
from tests.runtime.test_offload import PLANS, Small, batches

KINDS = ("optimizer", "parameters", "activations", "parameters+activations")
BATCH = batches(1)[0]
NUM_PARAMETERS = len([*Small().parameters()])  # the tied one once


@pytest.fixture(autouse=True)
def _all_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LARGE_NUM_BYTES", 0)


def session_of(model: nn.Module, plan: Manual) -> Session:
    args, kwargs = positional_and_keyword(BATCH)
    precision = autopar.Precision.of(plan.precision or None)
    return open_session(make_skeleton(model), args, kwargs, precision=precision, symbolic=False)


def ran(session: Session, model: nn.Module, plan: autopar.Plan) -> _Virtual:
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()} | BATCH
    is_whole = plan.pipeline.stages == plan.pipeline.microbatches == 1
    return (_run_whole if is_whole else _run_staged)(session.normal, plan, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", only(["pp2-dp2-zero3", "pp2-tp2-zb", "dp4-m2-bf16"], PLANS))
def test_not_a_bit_changes(name: str) -> None:
    torch.manual_seed(0)
    model = Small()
    plan = autopar.plan(model, 4, BATCH, plan=PLANS[name])
    session = session_of(model, PLANS[name])
    expected = ran(session, model, plan)
    for kind in KINDS:
        found = ran(session, model, replace(plan, offload=kind))
        assert found.grads.keys() == expected.grads.keys()
        for parameter, grad in expected.grads.items():
            assert torch.equal(found.grads[parameter], grad), (kind, parameter)
        for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), kind


def halves(plan: Manual, kind: str) -> list[fx.GraphModule]:
    model = Small()
    made = replace(autopar.plan(model, 4, BATCH, plan=plan), offload=kind)
    compiled = compile_plan(session_of(model, plan).normal, made, device=torch.device("cpu"), training=True).halves
    assert compiled.backward is not None
    return [compiled.forward, compiled.backward]


def order(module: fx.GraphModule) -> list[object]:
    names = {fetch: "fetch", arrive: "arrive", leave: "leave", ALL_GATHER: "gather"}
    return [names[node.target] for node in module.graph.nodes if node.target in names]


def test_copies_of_parameters_start_one_ahead_of_their_gathers() -> None:
    forward, backward = map(order, halves(Manual(dp=4, zero=3), "parameters"))
    assert forward[:6] == ["fetch", "arrive", "fetch", "gather", "arrive", "fetch"]
    assert forward.count("fetch") == forward.count("arrive") == NUM_PARAMETERS
    assert backward.count("fetch") == backward.count("arrive") > 0
    assert backward.count("leave") == NUM_PARAMETERS


def test_copies_for_the_step_are_made_once() -> None:
    forward, backward = map(order, halves(Manual(dp=4, zero=3), "optimizer"))
    assert forward.count("fetch") == NUM_PARAMETERS
    assert backward.count("fetch") == 0


@pytest.mark.parametrize("plan", [Manual(dp=4, microbatches=2), Manual(dp=4, zero=3, replicas=2, microbatches=2)], ids=str)
def test_copies_that_are_what_is_stored_stay_on_the_host(plan: Manual) -> None:
    """Of parameters whose gradients alone are reduced once a step there is nothing to make ready; micro-batches fetch what they use."""
    model = Small()
    made = replace(autopar.plan(model, 4, BATCH, plan=plan), offload="parameters")
    stage = compile_stage(session_of(model, plan).normal, made, 0, device=torch.device("cpu"), training=True)
    assert stage.prepare is not None
    assert (stage.num_copies, order(stage.prepare.forward)) == (NUM_PARAMETERS, [])
    assert order(stage.body.forward).count("fetch") == NUM_PARAMETERS


def test_activations_leave_after_their_last_use_and_come_back_one_ahead() -> None:
    forward, backward = halves(Manual(tp=4), "activations")
    nodes = {node: i for i, node in enumerate(forward.graph.nodes)}
    (output,) = forward.graph.find_nodes(op="output")
    gone = forward.graph.find_nodes(op="call_function", target=leave)
    assert len(gone) > 5
    for node in gone:
        assert set(node.users) == {output}
        assert all(nodes[user] <= nodes[node] for user in node.args[0].users)
    coming = order(backward)
    assert len(gone) == coming.count("fetch") == coming.count("arrive")
    ahead = 0
    for what in coming:
        ahead += {"fetch": 1, "arrive": -1}.get(str(what), 0)
        assert 0 <= ahead <= 2, "what is used, and the next"


def test_small_activations_and_gathered_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LARGE_NUM_BYTES", 10**6)
    assert all("leave" not in order(half) for half in halves(Manual(tp=4), "activations"))
    monkeypatch.setattr(offload, "LARGE_NUM_BYTES", 64 * 16 * 4)  # as large as the embedding, which is gathered for the step
    assert all("leave" not in order(half) for half in halves(Manual(dp=4, zero=1), "activations"))


def left_of(results: str) -> tuple[list[str], int]:
    """Which of some results leave a forward in which ``part`` and ``rest`` are halves of ``made``; and what comes back."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.ops.aten.mul.Tensor(x, 2.0)
        names = {"made": made, "part": made.narrow(0, 0, 2), "rest": made.narrow(0, 2, 2), "other": torch.ops.aten.exp.default(x)}
        return tuple(names[name] for name in results.split())

    def back(*saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.aten.neg.default(x) for x in saved)

    x = torch.ones(4, 8)
    forward, saved = make_fx(run)(x), run(x)[1:]
    halves = offload.leave_activations(Halves(forward, make_fx(back)(*saved), 1, (0,), (0,)), (), torch.device("cpu"))
    (output,) = halves.forward.graph.find_nodes(op="output")
    gone = [name for name, node in zip(results.split(), output.args[0], strict=True) if node.target is leave]
    assert halves.backward is not None
    assert all(torch.equal(a, b) for a, b in zip(halves.forward(x), run(x), strict=True))
    return gone, order(halves.backward).count("fetch")


@pytest.mark.parametrize(
    "results, gone",
    [
        ("other part rest", ["part", "rest"]),
        ("other rest", ["rest"]),
        ("other made", ["made"]),
        ("part rest", []),  # the first is an output, whose memory stays
        ("other made part", []),  # they overlap: what leaves would be more than what is freed
    ],
)
def test_what_shares_memory_leaves_together(results: str, gone: list[str]) -> None:
    assert left_of(results) == (gone, len(gone))


def test_small_parts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LARGE_NUM_BYTES", 4 * 8 * 4)
    assert left_of("other part rest") == ([], 0)
    assert left_of("part made") == ([], 0)
    assert left_of("part other") == (["other"], 1)
