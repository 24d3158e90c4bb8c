"""Plans as documents: they travel, bind to their graph and to no other, explain themselves, and are never worse than by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import api
from autopar.compile import plan_choices
from autopar.cost.cluster import Cluster
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan as Record
from autopar.plan import Recipe
from autopar.planner.choose import make_plan, memory_bytes
from autopar.planner.document import Plan
from autopar.planner.question import ask, faster_by_hand
from autopar.solve.decide import PLAN_GAP
from autopar.solve.manual import Manual
from autopar.solve.pins import pin
from autopar.solve.shapes import Shape
from autopar.units import seconds_text
from tests import models
from tests.marks import few
from tests.show.plans import small_plan
from tests.solve.problems import session

pytestmark = pytest.mark.slow

WEIGHT = "blocks.0.1.weight"
GRID = Cluster(1, 4).with_mesh(Mesh(("dp", "tp"), (2, 2)))


@cache
def example() -> models.Example:
    return models.mlp(layers=1)


@cache
def automatic() -> Plan:
    return api.plan(example().model, GRID, example().batch)


def written(plan: Record) -> Record:
    return Record.from_json(plan.to_json())


@given(blocks=st.integers(0, 4), notes=st.lists(st.text()), names=st.lists(st.text("ab", min_size=1), min_size=1, unique=True))
def test_json_round_trip(blocks: int, notes: list[str], names: list[str]) -> None:
    mesh = Mesh(tuple(names), tuple(range(1, 1 + len(names))))
    plan = replace(small_plan(blocks), notes=tuple(notes), mesh=mesh)
    assert written(plan) == plan


def test_round_trip_of_how_the_model_is_built() -> None:
    plan = replace(small_plan(), source=Recipe("hf:gpt2", 8, 128, is_real=True, outputs="loss"), optimizer="sgd")
    assert written(plan) == plan


def test_round_trip_of_a_real_plan() -> None:
    plan = automatic()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda data: data | {"format": 0}, "not a plan of format 14 (found 0)"),
        (lambda data: [data], "not a plan of format 14 (found None)"),
        (lambda data: data | {"colour": "red"}, "a Plan of the plan has unknown fields ['colour']"),
        (lambda data: {k: v for k, v in data.items() if k != "graph_hash"}, "lacks ['graph_hash']"),
        (lambda data: data | {"mesh": 7}, "not a plan: mesh is text, got 7; make it again with autopar.plan"),
        (lambda data: data | {"mesh": "dp"}, "not a plan: a mesh reads like 'dp=2,tp=4', got 'dp'"),
        (lambda data: data | {"stats": {}}, "a Stats of the plan has unknown fields [] or lacks ['capture_time_s'"),
    ],
)
def test_what_is_no_plan_is_refused(change, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=re.escape(text)):
        Record.from_json(json.dumps(change(json.loads(small_plan().to_json()))))


@pytest.mark.parametrize("key", ["parameters", "ops", "collectives", "notes", "mesh", "prediction"])
def test_a_plan_that_lacks_a_part_is_refused(key: str) -> None:
    data = json.loads(small_plan().to_json())
    del data[key]
    with pytest.raises(PlanError, match=key):
        Record.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "path, value, text",
    [
        (["ops", 1, "choices"], "b", "ops[1] choices is a list, got 'b'"),
        (["ops", 1, "choices"], ["b", None], "ops[1] choices[1] is text, got None"),
        (["parameters", 0, "shape"], [50304, 7.5], "parameters[0] shape[1] is a whole number, got 7.5"),
        (["prediction", "step_time_s"], "soon", "prediction step_time_s is a number, got 'soon'"),
        (["stages", 0, "held"], [1], "stages[0] held is an object with names, got [1]"),
        (["stages", 0, "memory_bytes", "optimizer"], True, "stages[0] memory_bytes optimizer is a whole number, got True"),
        (["pipeline", "degree"], "2", "pipeline degree is a whole number, got '2'"),
        (["pipeline", "is_average"], 1, "pipeline is_average is true or false, got 1"),
        (["source"], 3, "source is an object with names, got 3"),
        (["notes"], "x" * 99, f"notes is a list, got '{'x' * 59}..."),
        (["prediction", "step_time_s"], -1.0, "prediction step_time_s is a number from 0 to 1e+30, got -1.0"),
        (["prediction", "mfu"], math.nan, "prediction mfu is a number from 0 to 1e+30, got nan"),
        (["stages", 0, "held", "static"], math.inf, "stages[0] held static is a number from -1e+30 to 1e+30, got inf"),
        (["stages", 0, "memory_bytes", "optimizer"], 10**31, "stages[0] memory_bytes optimizer is a whole number from -1e+30"),
        (["parameters", 0, "shape"], [7, -1], "parameters[0] shape[1] is a whole number from 0 to 1e+30, got -1"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_named(path: list[str | int], value: object, text: str) -> None:
    data = json.loads(small_plan().to_json())
    place = reduce(lambda at, key: at[key], path[:-1], data)
    place[path[-1]] = value
    with pytest.raises(PlanError, match=re.escape(f"not a plan: {text}")):
        Record.from_json(json.dumps(data))


def test_bytes_of_what_is_beside_something_else_may_be_negative() -> None:
    (stage,) = small_plan().stages
    lean = replace(stage, memory_bytes=dict(stage.memory_bytes) | {"activations": -1}, held=replace(stage.held, first=-1.0))
    assert written(replace(small_plan(), stages=(lean,))).stages == (lean,)


@pytest.mark.parametrize(
    "piece, text",
    [
        ("forward all_reduce tp nan 0 64 1 h.0", "nan is not finite, or negative"),
        ("forward all_reduce tp 0.1 inf 64 1 h.0", "inf is not finite, or negative"),
        ("forward compute - 0.1 0 64/0/-1/0 1 h.0", "-1 is negative"),
        ("sideways compute - 0.1 0 64/0/0/0 1 h.0", "the phase is none of forward, backward, weights, gather, reduce, output"),
        ("forward compute - 0.1 0 64 1 h.0", "not enough values to unpack"),
    ],
)
def test_a_piece_that_is_none(piece: str, text: str) -> None:
    data = json.loads(small_plan().to_json())
    data["stages"][0]["inside"] = [piece]
    with pytest.raises(PlanError, match=re.escape(f"not a piece of a step: {piece!r} ({text}")):
        Record.from_json(json.dumps(data))


@pytest.mark.parametrize("kind", [Record, Plan])
@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b"x = 1"], ids=str)
def test_the_file_that_is_no_plan_is_named(tmp_path: Path, kind: type[Record], text: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(text)
    with pytest.raises(PlanError, match=r"bad\.json: "):
        kind.load(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["mesh: 2x2", "[" * 100_000, "1" * 5000, small_plan().to_json()[:-2]], ids=lambda text: text[:9])
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(PlanError, match="the text is not JSON"):
        Record.from_json(text)


def test_file_is_bound_by_planning_with_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    automatic().save(path)
    loaded = Plan.load(path)
    assert loaded == automatic()
    with pytest.raises(PlanError, match=r"knows no graph; bind it with autopar\.plan"):
        loaded.graph  # noqa: B018
    with pytest.raises(PlanError, match="knows no graph"):
        loaded.explain(WEIGHT)
    bound = api.plan(example().model, GRID, example().batch, plan=path)
    assert bound == automatic()
    layouts = {node.name: node.meta.get("layout") for node in bound.graph.graph.nodes}
    assert all(layouts[op.name] == f"[{' '.join(op.layout)}]" for op in bound.ops)
    assert WEIGHT in bound.explain(WEIGHT)


def test_plan_of_another_graph_is_refused() -> None:
    other = models.mlp(layers=1, batch=16)
    with pytest.raises(PlanError, match=rf"made for another graph \(plan {automatic().graph_hash}.*float32\[16, 32\]"):
        api.plan(other.model, GRID, other.batch, plan=automatic())


def test_plan_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(MeshError, match=r"made for mesh \(dp=2,tp=2\), 4 ranks; here are 8"):
        api.plan(example().model, 8, example().batch, plan=automatic())


def steps(text: str) -> list[tuple[bool, float]]:
    """Rows of an explanation that have a price: whether in force, milliseconds."""
    found = re.findall(r"^(\*?) .*?([\d.]+) ms +[\d.]+x", text, re.MULTILINE)
    return [(star == "*", float(ms)) for star, ms in found]


@pytest.mark.parametrize("name", [WEIGHT, "blocks.0.0.bias"])
def test_explain_lists_alternatives_and_the_chosen_is_best(name: str) -> None:
    text = automatic().explain(name)
    rows = steps(text)
    assert text.startswith(f"{name}: factors ")
    assert len(rows) > 5
    assert sum(chosen for chosen, _ in rows) == 1
    mine = next(ms for chosen, ms in rows if chosen)
    assert all(mine <= ms * (1 + 2e-3) + 1e-3 for _, ms in rows)
    assert [ms for _, ms in rows] == sorted(ms for _, ms in rows)


def test_explain_an_op() -> None:
    name = next(op.name for op in automatic().ops if op.op == "aten.linear")
    assert "rule b0 k, n k -> b0 n" in automatic().explain(name)


def test_explain_an_op_that_is_decided_with_another() -> None:
    """By its own rule, and by how it lies itself, with how the other does where that alone tells layouts apart."""
    model, batch = models.llama(layers=1, device="meta")
    plan = api.plan(model, 2, batch, pipeline=False)
    (silu,) = (op.name for op in plan.ops if op.op == "aten.silu")
    text = plan.explain(silu)
    assert text.startswith(f"{silu}: rule a0 a1 a2 -> a0 a1 a2, decided with mul_")
    layouts = [line[2:34].strip() for line in text.splitlines()[2:]]
    assert len(set(layouts)) == len(layouts)
    assert "R*:R* with +1:P" in layouts
    assert not [layout for layout in layouts if layout.startswith("+")]


def test_explain_tells_the_step_of_a_plan_whose_stages_work_at_the_same_time() -> None:
    staged = api.plan(example().model, 2, example().batch, plan=Manual(pp=2, microbatches=4))
    text, step_s = staged.explain("blocks.0.0.weight"), staged.prediction.step_time_s
    (mine,) = (ms for chosen, ms in steps(text) if chosen)
    assert mine != pytest.approx(step_s * 1e3, rel=1e-2)
    assert f", and played in 2 stages the plan takes {seconds_text(step_s)}\n" in text
    assert "the plan takes" not in automatic().explain(WEIGHT)


def test_explain_keeps_the_pins() -> None:
    """Around an alternative only what the configuration leaves is solved again: no dearer plan is excused by a freer one."""
    made = api.plan(example().model, 4, example().batch, plan=Manual(dp=4))
    rows = steps(made.explain("blocks.0.0.weight"))
    free = api.plan(example().model, GRID.with_mesh(made.mesh), example().batch)
    assert free.prediction.step_time_s < 0.9 * made.prediction.step_time_s
    assert min(ms for _, ms in rows) > 1.05e3 * free.prediction.step_time_s


def test_explain_of_what_is_not_there() -> None:
    with pytest.raises(PlanError, match="no parameter or op 'nothing'"):
        automatic().explain("nothing")


def test_automatic_is_never_worse_than_by_hand() -> None:
    configs = {str(c): c for c in (Manual(dp=2, tp=2), Manual(dp=2, tp=2, zero=1), Manual(dp=2, tp=2, zero=3, sequence_parallel=True))}
    for model in (models.gpt2(layers=1), models.mlp(hidden=1024, intermediate=4096, batch=64, device="meta")):
        auto, *manual = api.compare(model.model, GRID, model.batch, configs)
        assert auto.name == "auto"
        assert auto.prediction is not None
        assert [row.name for row in manual] == list(configs)
        for row in manual:
            assert row.prediction is not None, row
            assert auto.prediction.step_time_s <= row.prediction.step_time_s * (1 + 2e-3)


SHARED = (
    Manual(dp=2, cp=2, zero=1),
    Manual(dp=4, ep=2),
    Manual(dp=4, ep=4, zero=3),
    Manual(dp=2, ep=2, tp=2, sequence_parallel=True),
    Manual(dp=2, ep=2, pp=2, microbatches=2),
)


@pytest.mark.parametrize("width, batch", few(1, [(1024, 32), (32, 8)]))
def test_automatic_is_never_worse_with_sequences_and_experts_shared(width: int, batch: int) -> None:
    """Neither where launches take the time, nor where products and messages do."""
    model = models.mixture(layers=1, hidden=width, batch=batch, sequence=64, device="meta")
    auto, *manual = api.compare(model.model, Cluster(1, 4, "h100"), model.batch, {str(c): c for c in SHARED}, outputs="loss")
    assert [row.reason for row in manual] == [""] * len(SHARED)
    for row in manual:
        assert auto.step_time_s <= row.step_time_s, row.name


def test_ranks_of_a_node_may_be_two_axes_without_stages() -> None:
    """As by hand; a pin names an axis of the cluster, which stays then."""
    wide, cluster = models.mlp(layers=1, hidden=4096, intermediate=16384, batch=2048, device="meta"), Cluster(1, 8, "h100")
    found = api.plan(wide.model, cluster, wide.batch, outputs="loss")
    line = found.with_(cluster=cluster.with_mesh(Mesh(("gpu",), (8,))), pipeline=False)
    halves = found.with_(cluster=cluster.with_mesh(Mesh.of((2, 4))), pipeline=False)
    assert found.prediction.step_time_s <= halves.prediction.step_time_s * (1 + PLAN_GAP)
    assert found.prediction.step_time_s < line.prediction.step_time_s * (1 - PLAN_GAP)
    pinned = found.with_(constraints=pin(WEIGHT, gpu="column"), pipeline=False)
    assert str(pinned.grid) == "gpu=8"
    assert not pinned.alternatives


def test_a_faster_configuration_widens_the_search() -> None:
    """The plan found in its shape is no slower than its own, and is nobody's configuration."""
    asked = ask(example().model, Cluster(1, 4, "h100"), example().batch)
    config = Manual(dp=2, tp=2)
    (own,) = api.compare(example().model, Cluster(1, 4, "h100"), example().batch, {"own": config}, pipeline=False)[1:]
    found = faster_by_hand(asked, math.inf, [(Manual(dp=4), 2.0), (config, 1.0)])
    assert found is not None
    assert found.plan.mesh == config.mesh
    assert found.plan.prediction.step_time_s <= own.step_time_s
    assert found.plan.config == ""
    assert "in the shape of Manual(dp=2, tp=2, zero=0)" in found.plan.notes[-1]
    assert faster_by_hand(asked, 0.5, [(config, 1.0)]) is None
    assert faster_by_hand(asked, 0.0, [(config, -1.0)]) is None  # what it promised does not come true
    assert faster_by_hand(asked, math.inf, [(replace(config, precision="bf16"), 1.0)]) is None


def test_compare_says_why_a_row_does_not_fit() -> None:
    rows = {row.name: row for row in api.compare(example().model, 4, example().batch, {"wide": Manual(dp=2, tp=4)})}
    assert not rows["wide"].fits
    assert "needs dp * tp * pp = 8 ranks, but there are 4" in rows["wide"].reason


def test_limit_is_kept_and_what_is_below_is_refused_with_numbers() -> None:
    (peak,) = automatic().prediction.peak_memory_bytes
    tight = api.plan(example().model, GRID, example().batch, memory_limit=0.8 * peak, pipeline=False)
    assert tight.prediction.peak_memory_bytes[0] <= 0.8 * peak
    assert tight.memory_limit_bytes == int(0.8 * peak)
    assert tight.prediction.step_time_s >= automatic().prediction.step_time_s * (1 - 2e-3)
    said = r"no plan fits the memory limit of 10 KiB per rank on mesh \(dp=2,tp=2\): .* needs [\d.]+ [KM]iB \(parameters [\d.]+ [KM]iB"
    with pytest.raises(InfeasibleError, match=said) as error:
        api.plan(example().model, GRID, example().batch, memory_limit="10 KiB")
    assert "optimizer state alone need 16.6 KiB per rank, evenly over 4 ranks; the memory limit is 10 KiB" in str(error.value)


@pytest.mark.parametrize(
    "text, value",
    [("10GiB", 10 * 2**30), ("800 MB", 8e8), ("1.5 kib", 1536), ("64", 64), ("7 b", 7), (2**20, 2**20), (None, None), (2.5, 2.5)],
)
def test_memory_limit_texts(text: str | float | None, value: float | None) -> None:
    assert memory_bytes(text) == value


@pytest.mark.parametrize("text", ["ten GiB", "", "GiB", 0, -1, "-3MB", "nan", float("nan"), True])
def test_memory_limits_that_are_none(text: str | float) -> None:
    with pytest.raises(PlanError, match="memory_limit"):
        memory_bytes(text)


def test_edited_plan_is_checked_against_the_rules() -> None:
    opened = session("gpt2", 1)
    plan, _ = make_plan(
        opened,
        [Shape(Mesh.of(2))],
        lambda mesh: Cluster(1, 2).with_mesh(mesh).profile,
        memory_limit_bytes=np.inf,
        restrictions=(),
        optimizer="adamw",
        training=True,
    )
    assert plan_choices(opened.normal, plan)
    norm = next(op for op in plan.ops if op.op == "aten.layer_norm")

    def edited(**changes: object) -> Record:
        return replace(plan, ops=tuple(replace(op, **changes) if op is norm else op for op in plan.ops))  # type: ignore[arg-type]

    with pytest.raises(PlanError, match=rf"op {norm.name} .* cannot be 'k0' on axis 'd0'; legal there: R, R\*, b0, b1$"):
        plan_choices(opened.normal, edited(choices=("k0",)))
    with pytest.raises(PlanError, match=rf"says nothing of op {norm.name}"):
        plan_choices(opened.normal, edited(name="another"))
    with pytest.raises(PlanError, match=rf"op {norm.name} has 2 choices, but mesh \(d0=2\) has 1 axis"):
        plan_choices(opened.normal, edited(choices=("R", "R")))
